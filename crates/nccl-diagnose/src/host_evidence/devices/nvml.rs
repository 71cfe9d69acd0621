//! Calls NVML through the crate `nvml-wrapper`, which loads the library. The calls may not return.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::sync::OnceLock;

use nvml_wrapper::Device;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::enum_wrappers::nv_link::ErrorCounter;
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id;

use super::reading::{Link, Reading, Source};
use super::state::{MOST_LINKS, ThrottleReason};

/// The names of the library; the second is that of a package for development.
const NAMES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// Maximum number of processes of a device that are reported.
const MOST_PROCESSES: usize = 4;

/// The reasons for slow clocks that are reported; NVML sets the last one together with others, too.
const REASONS: [(ThrottleReasons, ThrottleReason); 4] = [
    (
        ThrottleReasons::HW_THERMAL_SLOWDOWN,
        ThrottleReason::Thermal,
    ),
    (
        ThrottleReasons::SW_THERMAL_SLOWDOWN,
        ThrottleReason::SoftwareThermal,
    ),
    (
        ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN,
        ThrottleReason::PowerBrake,
    ),
    (ThrottleReasons::HW_SLOWDOWN, ThrottleReason::Hardware),
];

/// The library that was started first, which is never shut down: its calls may still be under way when the process ends.
static STARTED: OnceLock<nvml_wrapper::Nvml> = OnceLock::new();

/// NVML of this process.
pub(super) struct Nvml {
    library: &'static nvml_wrapper::Nvml,
    /// A lost device is not found any more and, in some releases, neither are the devices beside it.
    found: HashMap<String, Device<'static>>,
}

impl Nvml {
    /// Loads and starts NVML; `name` is another name of the library.
    ///
    /// # Errors
    /// NVML's reason.
    pub(super) fn open(name: Option<&OsStr>) -> Result<Self, String> {
        let names: Vec<&OsStr> = match name {
            Some(name) => vec![name],
            None => NAMES.iter().map(OsStr::new).collect(),
        };
        let mut why = String::new();
        for name in names {
            match nvml_wrapper::Nvml::builder().lib_path(name).init() {
                Ok(library) => {
                    return Ok(Self {
                        library: STARTED.get_or_init(|| library),
                        found: HashMap::new(),
                    });
                }
                Err(error) if why.is_empty() => why = error.to_string(),
                Err(_) => {}
            }
        }
        Err(why)
    }

    fn device(&mut self, bus_id: &str) -> Result<&Device<'static>, NvmlError> {
        if !self.found.contains_key(bus_id) {
            let device = self.library.device_by_pci_bus_id(bus_id)?;
            self.found.insert(bus_id.to_owned(), device);
        }
        self.found.get(bus_id).ok_or(NvmlError::NotFound)
    }
}

impl Source for Nvml {
    fn all(&mut self) -> Vec<(String, Reading)> {
        let count = self.library.device_count().unwrap_or_default();
        let of_index = |index| {
            let device = self.library.device_by_index(index)?;
            let pci = device.pci_info()?;
            let bus_id = format!("{:04x}:{:02x}:{:02x}.0", pci.domain, pci.bus, pci.device);
            Ok((bus_id, read(&device)))
        };
        (0..count)
            // NVML does not report the address of a lost device; the kernel's log has it.
            .map(|index| {
                of_index(index).unwrap_or_else(|error| (format!("number {index}"), failed(&error)))
            })
            .collect()
    }

    fn read(&mut self, bus_id: &str) -> Reading {
        match self.device(bus_id) {
            Ok(device) => read(device),
            Err(error) => failed(&error),
        }
    }
}

/// Returns the reading of a device that cannot be read.
fn failed(error: &NvmlError) -> Reading {
    let is_lost = is_lost(error);
    Reading {
        is_lost,
        unreadable: (!is_lost).then(|| error.to_string()),
        ..Reading::default()
    }
}

fn is_lost(error: &NvmlError) -> bool {
    matches!(error, NvmlError::GpuLost | NvmlError::ResetRequired)
}

/// What the answers show about the device besides their values.
#[derive(Default)]
struct Answers {
    /// Whether it was lost during the queries.
    is_lost: bool,
    /// Whether at least one query was answered.
    has_any: bool,
    /// The first refusal.
    refusal: Option<NvmlError>,
}

impl Answers {
    fn get<T>(&mut self, answer: Result<T, NvmlError>) -> Option<T> {
        match answer {
            Ok(value) => {
                self.has_any = true;
                Some(value)
            }
            // A missing feature of a device, or a query that is not permitted, is no trouble.
            Err(error) => {
                self.is_lost |= is_lost(&error);
                self.refusal.get_or_insert(error);
                None
            }
        }
    }
}

fn read(device: &Device<'_>) -> Reading {
    let mut answers = Answers::default();
    let uncorrected = device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile);
    let uncorrected = answers.get(uncorrected);
    if answers.is_lost {
        return failed(&NvmlError::GpuLost);
    }
    let [remap_pending, remap_failed] = remapped_rows(device, &mut answers);
    let reasons = answers.get(device.current_throttle_reasons());
    let reasons = reasons.unwrap_or(ThrottleReasons::empty());
    let mut throttle: Vec<ThrottleReason> = REASONS
        .iter()
        .filter(|(bit, _)| reasons.contains(*bit))
        .map(|(_, reason)| *reason)
        .collect();
    if throttle.len() > 1 {
        throttle.retain(|reason| *reason != ThrottleReason::Hardware);
    }
    let lanes = answers.get(device.current_pcie_link_width());
    let generation = answers.get(device.current_pcie_link_gen());
    let reading = Reading {
        uncorrected,
        remap_pending,
        remap_failed,
        retirement_pending: answers.get(device.are_pages_pending_retired()) == Some(true),
        links: links(device, &mut answers),
        pcie_lanes: lanes.zip(answers.get(device.max_pcie_link_width())),
        pcie_generation: generation.zip(answers.get(device.max_pcie_link_gen())),
        pcie_replays: answers.get(device.pcie_replay_counter()),
        throttle,
        is_idle: reasons.contains(ThrottleReasons::GPU_IDLE),
        celsius: answers.get(device.temperature(TemperatureSensor::Gpu)),
        processes: other_processes(device, &mut answers),
        ..Reading::default()
    };
    match answers {
        Answers { is_lost: true, .. } => failed(&NvmlError::GpuLost),
        Answers {
            has_any: false,
            refusal: Some(error),
            ..
        } => failed(&error),
        _ => reading,
    }
}

/// Returns whether rows of its memory are to be remapped, and whether a row could not be remapped.
fn remapped_rows(device: &Device<'_>, answers: &mut Answers) -> [bool; 2] {
    let fields = [
        field_id::NVML_FI_DEV_REMAPPED_PENDING,
        field_id::NVML_FI_DEV_REMAPPED_FAILURE,
    ];
    let mut values = answers
        .get(device.field_values_for(&fields.map(FieldId)))
        .unwrap_or_default()
        .into_iter();
    [(), ()].map(|()| {
        let value = values.next().and_then(Result::ok);
        match value.and_then(|sample| answers.get(sample.value)) {
            Some(SampleValue::U32(value)) => value > 0,
            Some(SampleValue::U64(value)) => value > 0,
            _ => false,
        }
    })
}

/// Returns its links, up to the first number that it does not have.
fn links(device: &Device<'_>, answers: &mut Answers) -> Vec<Link> {
    let kinds = [
        ErrorCounter::DlReplay,
        ErrorCounter::DlRecovery,
        ErrorCounter::DlCrcFlit,
        ErrorCounter::DlCrcData,
    ];
    let mut links = Vec::new();
    for number in (0..).take(MOST_LINKS) {
        let link = device.link_wrapper_for(number);
        let Some(is_active) = answers.get(link.is_active()) else {
            break;
        };
        let errors = match is_active {
            true => kinds.map(|kind| answers.get(link.error_counter(kind))),
            false => [None; 4],
        };
        links.push(Link {
            number,
            is_active,
            errors,
        });
    }
    links
}

/// Returns the processes that compute on the device, except this process, its descendants, and the MPS server.
fn other_processes(device: &Device<'_>, answers: &mut Answers) -> Vec<(u32, String)> {
    let found = answers.get(device.running_compute_processes());
    let pids: Vec<u32> = found
        .unwrap_or_default()
        .iter()
        .map(|process| process.pid)
        .collect();
    // The numbers are those of the host: in a PID namespace of its own, this process would not find itself.
    let own = std::process::id();
    if !pids.contains(&own) {
        return Vec::new();
    }
    let others = pids.into_iter().filter(|pid| !descends_from(*pid, own));
    let named = others.map(|pid| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        (pid, name.trim_end().to_owned())
    });
    named
        .filter(|(_, name)| !name.starts_with("nvidia-cuda-mps"))
        .take(MOST_PROCESSES)
        .collect()
}

/// Returns whether process `pid` is `ancestor` or a descendant of it.
fn descends_from(pid: u32, ancestor: u32) -> bool {
    const MOST_GENERATIONS: usize = 16;
    let parent = |pid: &u32| -> Option<u32> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name may contain parentheses.
        let (_, fields) = stat.rsplit_once(')')?;
        fields.split_ascii_whitespace().nth(1)?.parse().ok()
    };
    std::iter::successors(Some(pid), parent)
        .take(MOST_GENERATIONS)
        .any(|pid| pid == ancestor)
}

#[cfg(test)]
mod tests {
    use super::super::{DeviceTrouble, NvlinkError};
    use super::*;

    /// A single test, because the state of the emulator's NVML belongs to the process.
    #[test]
    fn the_emulators_devices_are_healthy_but_for_what_was_injected() {
        nccl_emulator::install().unwrap();
        let mut nvml = Nvml::open(None).unwrap();
        let all = nvml.all();
        assert_eq!(all.len(), 8);
        let (one, other) = ("0000:02:00.0", "0000:03:00.0");
        assert_eq!(all[1].0, one);
        let before = nvml.read(one);
        assert_eq!(before.state(one, None).troubles, []);
        assert_eq!(before.celsius, Some(35));
        assert_eq!(before.pcie_lanes, Some((16, 16)));
        nccl_emulator::faults::nvml(
            "device=1,ecc=2,row-remap=failed,retired-pages=pending,nvlink=3:down; \
             device=1,pcie-width=8,pcie-generation=4,pcie-replays=6,throttle=thermal,temperature=93,process=1",
        )
        .unwrap();
        let state = nvml.read(one).state(one, Some(&before));
        let expected = [
            DeviceTrouble::UncorrectedEcc {
                errors: 2,
                since_driver_start: false,
            },
            DeviceTrouble::RowRemapFailed,
            DeviceTrouble::RetirementPending,
            DeviceTrouble::InactiveNvlinks(vec![3]),
            DeviceTrouble::PcieWidth { lanes: 8, most: 16 },
            DeviceTrouble::PcieGeneration {
                generation: 4,
                most: 5,
            },
            DeviceTrouble::PcieReplays(6),
            DeviceTrouble::Throttled {
                reason: ThrottleReason::Thermal,
                celsius: Some(93),
            },
        ];
        assert_eq!(state.troubles[..8], expected);
        let [DeviceTrouble::OtherProcess { pid: 1, .. }] = &state.troubles[8..] else {
            panic!("{:?}", state.troubles)
        };
        assert_eq!((state.nvlinks, state.active_nvlinks), (18, 17));
        assert_eq!(nvml.read(other).state(other, None).troubles, []);

        nccl_emulator::faults::nvml("device=1,nvlink=up; device=1,nvlink=4:crc:2").unwrap();
        let up = Reading {
            links: (0..18)
                .map(|number| Link {
                    number,
                    is_active: true,
                    errors: [Some(0); 4],
                })
                .collect(),
            ..before.clone()
        };
        let expected = DeviceTrouble::NvlinkErrors {
            link: 4,
            kind: NvlinkError::CrcFlit,
            errors: 2,
        };
        assert_eq!(nvml.read(one).state(one, Some(&up)).troubles, [expected]);

        nccl_emulator::faults::nvml("device=1,lost").unwrap();
        assert_eq!(
            nvml.read(one).state(one, None).troubles,
            [DeviceTrouble::Lost]
        );
        let (name, reading) = &nvml.all()[1];
        assert_eq!((&name[..], reading.is_lost), ("number 1", true));
        nccl_emulator::faults::nvml("").unwrap();
        assert_eq!(nvml.read(one), before);
        let nowhere = nvml.read("0000:99:00.0").state("x", None);
        assert!(
            matches!(&nowhere.troubles[..], [DeviceTrouble::Unreadable(_)]),
            "{nowhere:?}"
        );
        let none = Nvml::open(Some(OsStr::new("libno-such-nvml.so")));
        assert!(none.err().unwrap().contains("libno-such-nvml"), "no reason");
    }

    #[test]
    fn a_process_descends_from_itself_and_from_its_parent_and_not_from_its_child() {
        let own = std::process::id();
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        assert!(descends_from(own, own));
        assert!(descends_from(child.id(), own));
        assert!(!descends_from(own, child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
