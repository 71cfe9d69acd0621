//! The devices, which of them a rank uses, and how much fits on one.

use std::sync::Arc;

use cudarc::driver::CudaContext;
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use nccl_emulator::Choice;
use procfs::{Current, Meminfo};

use super::failure::cuda;
use crate::element::{self, Element};
use crate::failure::Failure;
use crate::format::DeviceLine;
use crate::options::Options;

/// The implementation of NCCL and the CUDA driver in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Emulation {
    /// NVIDIA's.
    None,
    /// `nccl-emulator`: there is no GPU.
    Emulated,
    /// NVIDIA's library on the driver of `nccl-emulator`, which interprets its kernels.
    Interpreted,
}

impl Emulation {
    /// Whether this is an emulator.
    #[must_use]
    pub fn is_emulated(self) -> bool {
        self != Self::None
    }

    /// The name of the emulator, if this is one.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Emulated => Some("nccl-emulator"),
            Self::Interpreted => Some(
                "nccl-emulator's driver under NVIDIA's own library, whose kernels are interpreted (times mean nothing)",
            ),
        }
    }
}

/// The default number of ranks without a GPU.
pub(super) const EMULATED_RANKS: usize = 4;

/// The emulator's default number of devices.
const EMULATED_DEVICES: usize = 8;

/// Installs the emulator where there is no GPU, with at least `devices` devices.
///
/// # Errors
/// When the choice of the environment is not available.
pub fn install(devices: usize) -> Result<Emulation, Failure> {
    // The header of each program reports it.
    let mut emulator = nccl_emulator::Emulator::new().quiet();
    // Unless the user asks for another number.
    if devices > EMULATED_DEVICES && std::env::var_os("NCCL_EMULATOR_DEVICES").is_none() {
        emulator = emulator.devices(devices as u32);
    }
    let choice = emulator
        .install_unless_gpu()
        .map_err(|error| Failure::usage(error.to_string()))?;
    if !choice.is_emulator() && !cudarc_finds_libcuda() {
        return Err(Failure::usage(format!(
            "{choice}, but there is no CUDA driver (libcuda.so)"
        )));
    }
    Ok(match choice {
        Choice::Emulator { installation, .. } if installation.real_nccl().is_some() => {
            Emulation::Interpreted
        }
        Choice::Emulator { .. } => Emulation::Emulated,
        _ => Emulation::None,
    })
}

/// Without the driver, cudarc panics at the first call.
pub(crate) fn cudarc_finds_libcuda() -> bool {
    // SAFETY: loads libcuda, as every call into it does, and nothing else.
    unsafe { cudarc::driver::sys::is_culib_present() }
}

/// The number of devices.
pub(super) fn count() -> Result<usize, Failure> {
    let count = CudaContext::device_count().map_err(cuda("counting the devices"))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// Whether NCCL is allowed to put several ranks on one device.
fn may_share() -> bool {
    std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value.trim() != "0")
}

/// `NCCL_TESTS_DEVICE`: the first device to use.
pub(super) fn first_device() -> Result<usize, Failure> {
    match std::env::var("NCCL_TESTS_DEVICE") {
        Err(_) => Ok(0),
        Ok(text) => text.trim().parse().map_err(|_| {
            Failure::usage(format!(
                "NCCL_TESTS_DEVICE={text}: the number of a device is needed"
            ))
        }),
    }
}

/// The device of the rank that is `local_rank` on its host.
///
/// A launcher may have made one device visible to each rank; then it is number 0 for all.
pub(super) fn of_rank(
    local_rank: usize,
    first: usize,
    count: usize,
    launched: bool,
) -> Result<usize, Failure> {
    let device = first + local_rank;
    match count.checked_sub(first) {
        _ if device < count => Ok(device),
        Some(usable) if usable > 0 && (may_share() || (launched && count == 1)) => {
            Ok(first + local_rank % usable)
        }
        _ => Err(too_few(local_rank + 1, first, count)),
    }
}

/// Checks that there are devices for `ranks` ranks on this host.
pub(super) fn check_fit(ranks: usize, first: usize, count: usize) -> Result<(), Failure> {
    if first + ranks <= count || (may_share() && first < count) {
        Ok(())
    } else {
        Err(too_few(ranks, first, count))
    }
}

fn too_few(ranks: usize, first: usize, count: usize) -> Failure {
    let from = if first > 0 {
        format!(" from number {first} on")
    } else {
        String::new()
    };
    Failure::usage(format!(
        "{ranks} {} as many devices{from}, and there {}: use fewer, or \
         NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30.3 or later to share them",
        if ranks == 1 {
            "rank needs"
        } else {
            "ranks need"
        },
        match count {
            1 => "is 1".to_owned(),
            _ => format!("are {count}"),
        },
    ))
}

/// Facts about a rank's device for rank 0, and its line in the header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Device {
    pub(super) line: DeviceLine,
    /// Bytes of one buffer that fit.
    pub(super) fitting: u64,
    /// Identifies the host, and the device on it.
    pub(super) identity: String,
    /// Compute capability, as 90 for 9.0.
    pub(super) capability: u32,
}

impl Device {
    /// The device behind `context`, used by `rank`, one of `local_ranks` on this host.
    pub(super) fn of(
        context: &Arc<CudaContext>,
        rank: usize,
        local_ranks: usize,
        options: &Options,
        emulation: Emulation,
    ) -> Result<Self, Failure> {
        let attribute = |attribute| {
            context
                .attribute(attribute)
                .map_err(cuda("asking for an attribute of the device"))
        };
        let pci = [
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)? as u32,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)? as u32,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)? as u32,
        ];
        let capability = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? * 10
            + attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let mut name = context
            .name()
            .map_err(cuda("asking for the name of the device"))?;
        if emulation.is_emulated() && !name.to_lowercase().contains("emulat") {
            name.push_str(" (CPU emulator, not a GPU)");
        }
        let line = DeviceLine {
            rank,
            pid: std::process::id(),
            host: host(),
            device: context.ordinal(),
            pci,
            name,
        };
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let identity = format!("{} {} {}", line.host, boot.trim(), line.pci_text());
        let total = total_memory(context.ordinal())?;
        let fitting = fitting(total, local_ranks, options, emulation);
        Ok(Self {
            line,
            fitting,
            identity,
            capability: capability as u32,
        })
    }

    /// For the other ranks.
    pub(super) fn encode(&self) -> Vec<u8> {
        let Self {
            line,
            fitting,
            identity,
            capability,
        } = self;
        let DeviceLine {
            rank,
            pid,
            host,
            device,
            pci: [domain, bus, number],
            name,
        } = line;
        format!(
            "{rank}\n{pid}\n{host}\n{device}\n{domain}\n{bus}\n{number}\n{name}\n{fitting}\n\
             {identity}\n{capability}"
        )
        .into_bytes()
    }

    /// Reads the encoding of another rank's device.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        let mut fields = text.split('\n');
        let line = DeviceLine {
            rank: fields.next()?.parse().ok()?,
            pid: fields.next()?.parse().ok()?,
            host: fields.next()?.to_owned(),
            device: fields.next()?.parse().ok()?,
            pci: [
                fields.next()?.parse().ok()?,
                fields.next()?.parse().ok()?,
                fields.next()?.parse().ok()?,
            ],
            name: fields.next()?.to_owned(),
        };
        Some(Self {
            line,
            fitting: fields.next()?.parse().ok()?,
            identity: fields.next()?.to_owned(),
            capability: fields.next()?.parse().ok()?,
        })
    }
}

/// Refuses two ranks on one device, unless they may share it: NCCL's own message would not name them.
pub(super) fn check_distinct(devices: &[Device]) -> Result<(), Failure> {
    if may_share() {
        return Ok(());
    }
    for (index, device) in devices.iter().enumerate() {
        if let Some(other) = devices[..index]
            .iter()
            .find(|one| one.identity == device.identity)
        {
            return Err(Failure::usage(format!(
                "ranks {} and {} are both on device {} of {}: NCCL needs one for each, or \
                 NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30.3 or later",
                other.line.rank,
                device.line.rank,
                device.line.pci_text(),
                device.line.host,
            )));
        }
    }
    Ok(())
}

/// The host's name up to the first dot.
fn host() -> String {
    let name = rustix::system::uname();
    let name = name.nodename().to_string_lossy();
    name.split('.').next().unwrap_or_default().to_owned()
}

/// The memory of a device in bytes, without a context on it.
pub(super) fn total_memory(ordinal: usize) -> Result<u64, Failure> {
    let device =
        cudarc::driver::result::device::get(ordinal as i32).map_err(cuda("finding the device"))?;
    // SAFETY: `device` was just returned by the driver.
    let total = unsafe { cudarc::driver::result::device::total_mem(device) }
        .map_err(cuda("asking for the memory of the device"))?;
    Ok(total as u64)
}

/// The bytes that one buffer may have so that all buffers fit.
fn fitting(total: u64, local_ranks: usize, options: &Options, emulation: Emulation) -> u64 {
    const GIB: u64 = 1 << 30;
    let mut buffers = 2;
    let usable = if emulation.is_emulated() {
        // Every device is in the memory of this host, and so are the two buffers of the comparison.
        buffers += if options.memcpy_ratio { 2 } else { 0 };
        total.min(available_memory() / local_ranks as u64 / 4 * 3)
    } else {
        // As in nccl-tests, which has a third buffer on the device for the verification.
        buffers += u64::from(options.checks > 0);
        let reserved = (total.div_ceil(16 * GIB) * GIB).min(4 * GIB);
        total.saturating_sub(reserved + GIB)
    };
    usable / buffers / u64::from(options.aggregate)
}

/// The memory that the kernel has available; a large number if unknown.
fn available_memory() -> u64 {
    let memory = Meminfo::current().ok();
    memory
        .and_then(|memory| memory.mem_available)
        .unwrap_or(1 << 50)
}

/// Refuses sizes that no device can hold, before any rank is started.
pub(super) fn check_sizes(options: &Options, total: u64) -> Result<(), Failure> {
    let sweep = options.sweep;
    if sweep.max > total {
        return Err(Failure::usage(format!(
            "the last size (-e) is {} bytes, and a device has no more than {total}",
            sweep.max
        )));
    }
    Ok(())
}

/// The types of `-d` that the library and the devices support.
pub(super) fn elements(
    options: &Options,
    library: &nccl::Library,
    capability: u32,
) -> Result<Vec<Element>, Failure> {
    let lacks = |element: Element| {
        if !element.is_float8() {
            None
        } else if !library.has(nccl::Capability::Float8) {
            Some(format!("NCCL 2.24.3, and this is {}", library.version()))
        } else if capability < 90 {
            Some(format!(
                "compute capability 9.0, and this is {}",
                f64::from(capability) / 10.0
            ))
        } else {
            None
        }
    };
    match options.element {
        None => Ok(element::ALL
            .into_iter()
            .filter(|&element| lacks(element).is_none())
            .collect()),
        Some(element) => match lacks(element) {
            None => Ok(vec![element]),
            Some(needs) => Err(Failure::usage(format!("-d {} needs {needs}", element.name))),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Exit;

    #[test]
    fn ranks_take_the_devices_in_order() {
        let devices: Vec<_> = (0..4)
            .map(|rank| of_rank(rank, 0, 4, false).unwrap())
            .collect();
        assert_eq!(devices, [0, 1, 2, 3]);
        assert_eq!(of_rank(1, 2, 4, false), Ok(3));
    }

    #[test]
    fn more_ranks_than_devices_are_refused_with_the_way_out() {
        for failure in [
            check_fit(4, 0, 1).unwrap_err(),
            check_fit(2, 3, 4).unwrap_err(),
            of_rank(4, 0, 4, true).unwrap_err(),
            check_fit(1, 0, 0).unwrap_err(),
        ] {
            assert_eq!(failure.exit(), Exit::Usage);
            let text = failure.to_string();
            assert!(
                text.contains("NCCL_MULTI_RANK_GPU_ENABLE=1") && !text.contains('\n'),
                "{text}"
            );
        }
        assert_eq!(check_fit(4, 0, 4), Ok(()));
    }

    #[test]
    fn a_launcher_may_show_each_rank_its_own_device() {
        assert_eq!(of_rank(3, 0, 1, true), Ok(0));
        assert!(of_rank(3, 0, 1, false).is_err());
    }

    fn device(rank: usize, identity: &str) -> Device {
        Device {
            line: DeviceLine {
                rank,
                pid: 77,
                host: "node-a".into(),
                device: 3,
                pci: [0, 0x18, 1],
                name: "NVIDIA H200 NVL".into(),
            },
            fitting: 1 << 33,
            identity: identity.into(),
            capability: 90,
        }
    }

    #[test]
    fn a_device_survives_the_way_to_another_rank() {
        let device = device(1, "node-a x 0000:18:01");
        assert_eq!(Device::decode(&device.encode()), Some(device));
        assert_eq!(Device::decode(b"nonsense"), None);
    }

    #[test]
    fn two_ranks_on_one_device_are_named() {
        let devices = [device(0, "a"), device(1, "b"), device(2, "a")];
        let text = check_distinct(&devices).unwrap_err().to_string();
        assert!(
            text.starts_with("ranks 0 and 2 are both on device 0000:18:01 of node-a"),
            "{text}"
        );
        assert_eq!(check_distinct(&devices[..2]), Ok(()));
    }

    #[test]
    fn nccl_tests_rule_says_what_fits_on_a_gpu() {
        let options = Options::default();
        let h200 = 150_000_000_000;
        let expected = (h200 - (4 << 30) - (1 << 30)) / 3;
        assert_eq!(fitting(h200, 1, &options, Emulation::None), expected);
        assert_eq!(fitting(1 << 20, 1, &options, Emulation::None), 0);
    }

    #[test]
    fn sizes_beyond_a_device_are_refused() {
        let options = Options {
            sweep: crate::sizes::Sweep {
                max: 1 << 40,
                ..Options::default().sweep
            },
            ..Options::default()
        };
        let failure = check_sizes(&options, 4 << 30).unwrap_err();
        assert_eq!(failure.exit(), Exit::Usage);
        assert!(failure.to_string().contains("-e"), "{failure}");
    }
}
