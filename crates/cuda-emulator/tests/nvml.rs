//! Functions of libnvidia-ml, by name.

mod functions;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use functions::{Handle, NULL, address_in, call_at, cu};

const UNINITIALIZED: u32 = 1;
const INVALID_ARGUMENT: u32 = 2;
const NOT_SUPPORTED: u32 = 3;
const NOT_FOUND: u32 = 6;
const INSUFFICIENT_SIZE: u32 = 7;
const VERSION_MISMATCH: u32 = 25;

macro_rules! nvml {
    ($name:literal $(, $argument:expr => $type:ty)* $(,)?) => {
        call_at!(address_in(&cuda_emulator::nvml::symbols(), $name); $($argument => $type),*)
    };
}

/// Serializes the tests of this process, because one of them shuts NVML down.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn device(index: c_uint) -> Handle {
    assert_eq!(nvml!(c"nvmlInit_v2"), 0);
    functions::made(
        |place| nvml!(c"nvmlDeviceGetHandleByIndex_v2", index => c_uint, place => *mut Handle),
    )
}

fn text(fill: impl FnOnce(*mut c_char, c_uint) -> u32) -> String {
    let mut place = [0; 96];
    assert_eq!(fill(place.as_mut_ptr(), 96), 0);
    // SAFETY: the function wrote a C string.
    unsafe { CStr::from_ptr(place.as_ptr()) }
        .to_string_lossy()
        .into_owned()
}

#[test]
fn what_nccl_must_find_it_finds() {
    let all = cuda_emulator::nvml::symbols();
    let mut names: Vec<_> = all.iter().map(|(name, _)| name.to_str().unwrap()).collect();
    let asked = "nvmlInit nvmlInit_v2 nvmlShutdown nvmlDeviceGetCount nvmlDeviceGetCount_v2 \
                 nvmlDeviceGetHandleByPciBusId nvmlDeviceGetHandleByIndex nvmlDeviceGetIndex nvmlErrorString \
                 nvmlDeviceGetNvLinkState nvmlDeviceGetNvLinkRemotePciInfo nvmlDeviceGetNvLinkCapability \
                 nvmlDeviceGetNvLinkRemoteDeviceType nvmlDeviceGetCudaComputeCapability nvmlDeviceGetP2PStatus \
                 nvmlDeviceGetFieldValues nvmlDeviceGetPciInfo_v3 nvmlDeviceGetPciInfoExt \
                 nvmlDeviceGetPcieLinkMaxSpeed nvmlDeviceGetCurrPcieLinkGeneration nvmlDeviceGetCurrPcieLinkWidth \
                 nvmlDeviceGetGpuFabricInfoV nvmlDeviceGetPlatformInfo nvmlSystemGetConfComputeState \
                 nvmlSystemGetConfComputeSettings nvmlSystemGetDriverVersion";
    for name in asked.split_whitespace() {
        assert!(names.contains(&name), "{name}");
    }
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count, "a name twice");
}

#[test]
fn a_device_is_the_drivers_device_of_the_same_bus_and_uuid() {
    let _turn = turn();
    let one = device(1);
    let mut count = 0;
    assert_eq!(
        nvml!(c"nvmlDeviceGetCount_v2", &raw mut count => *mut c_uint),
        0
    );
    assert_eq!(count, 8);

    assert_eq!(cu!(c"cuInit", 0 => c_uint), 0);
    let mut id = [0; 32];
    assert_eq!(
        cu!(c"cuDeviceGetPCIBusId", id.as_mut_ptr() => *mut c_char, 32 => c_int, 1 => c_int),
        0
    );
    let same = functions::made(
        |place| nvml!(c"nvmlDeviceGetHandleByPciBusId_v2", id.as_ptr() => *const c_char, place => *mut Handle),
    );
    assert_eq!(same, one);
    let mut index = 0;
    assert_eq!(
        nvml!(c"nvmlDeviceGetIndex", one => Handle, &raw mut index => *mut c_uint),
        0
    );
    assert_eq!(index, 1);

    // busIdLegacy, domain, bus, device, ids, busId
    let mut pci = [0u8; 68];
    assert_eq!(
        nvml!(c"nvmlDeviceGetPciInfo_v3", one => Handle, pci.as_mut_ptr() => *mut u8),
        0
    );
    // SAFETY: the driver wrote a C string.
    let id = unsafe { CStr::from_ptr(id.as_ptr()) };
    assert_eq!(CStr::from_bytes_until_nul(&pci).unwrap(), id);
    assert_eq!(
        CStr::from_bytes_until_nul(&pci[36..]).unwrap(),
        c"00000000:02:00.0"
    );
    assert_eq!(pci[20], 2);

    let name = text(
        |place, length| nvml!(c"nvmlDeviceGetName", one => Handle, place => *mut c_char, length => c_uint),
    );
    assert!(name.contains("emulator"), "{name}");
    let version = text(
        |place, length| nvml!(c"nvmlSystemGetDriverVersion", place => *mut c_char, length => c_uint),
    );
    assert!(version.contains("emulator"), "{version}");

    let uuid = text(
        |place, length| nvml!(c"nvmlDeviceGetUUID", one => Handle, place => *mut c_char, length => c_uint),
    );
    let mut bytes = [0u8; 16];
    assert_eq!(
        cu!(c"cuDeviceGetUuid_v2", bytes.as_mut_ptr() => *mut u8, 1 => c_int),
        0
    );
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(uuid.replace("GPU-", "").replace('-', ""), digits);
    let uuid = std::ffi::CString::new(uuid).unwrap();
    let same = functions::made(
        |place| nvml!(c"nvmlDeviceGetHandleByUUID", uuid.as_ptr() => *const c_char, place => *mut Handle),
    );
    assert_eq!(same, one);
}

#[test]
fn devices_reach_each_other_over_pci_and_have_no_nvlink() {
    let _turn = turn();
    let (one, other) = (device(0), device(7));
    for (capability, expected) in [(0, 0), (1, 0), (2, 5), (3, 5), (4, 0)] {
        let mut status = 99;
        assert_eq!(
            nvml!(c"nvmlDeviceGetP2PStatus", one => Handle, other => Handle, capability => c_uint,
                &raw mut status => *mut c_uint),
            0
        );
        assert_eq!(status, expected, "{capability}");
    }
    let mut active = 0;
    assert_eq!(
        nvml!(c"nvmlDeviceGetNvLinkState", one => Handle, 0 => c_uint, &raw mut active => *mut c_uint),
        NOT_SUPPORTED
    );
    // Two field values, each answered separately.
    let mut values = [[0u8; 40]; 2];
    assert_eq!(
        nvml!(c"nvmlDeviceGetFieldValues", one => Handle, 2 => c_int, values.as_mut_ptr().cast() => *mut c_void),
        0
    );
    for value in values {
        assert_eq!(value[28], NOT_SUPPORTED as u8);
    }
}

#[test]
fn structures_of_another_version_are_refused() {
    let _turn = turn();
    let one = device(0);
    for (version, expected) in [
        (0x0200_0024, 0),
        (0x0300_0028, 0),
        (0x0900_0024, VERSION_MISMATCH),
    ] {
        let mut info = [0xffff_ffffu32; 10];
        info[0] = version;
        assert_eq!(
            nvml!(c"nvmlDeviceGetGpuFabricInfoV", one => Handle, info.as_mut_ptr() => *mut u32),
            expected
        );
        // The state, which says that there is no fabric, where the version is known.
        assert_eq!(info[7] == 0, expected == 0);
        assert_eq!(
            info[9] == 0,
            version == 0x0300_0028,
            "no more than the version says"
        );
    }
    let mut settings = [0x0100_0014u32, 7, 7, 7, 7];
    assert_eq!(
        nvml!(c"nvmlSystemGetConfComputeSettings", settings.as_mut_ptr() => *mut u32),
        0
    );
    assert_eq!(settings, [0x0100_0014, 0, 0, 0, 0]);
}

#[test]
fn what_is_no_device_or_has_no_room_is_an_error() {
    let _turn = turn();
    let one = device(0);
    let mut place = NULL;
    for id in [c"0000:99:00.0", c"0000:00:00.0"] {
        assert_eq!(
            nvml!(c"nvmlDeviceGetHandleByPciBusId", id.as_ptr() => *const c_char, &raw mut place => *mut Handle),
            NOT_FOUND
        );
    }
    assert_eq!(
        nvml!(c"nvmlDeviceGetHandleByIndex", 8 => c_uint, &raw mut place => *mut Handle),
        INVALID_ARGUMENT
    );
    let mut index = 0;
    for handle in [
        NULL,
        std::ptr::without_provenance_mut(one.addr() + 1),
        one.wrapping_byte_add(8 * 16),
    ] {
        assert_eq!(
            nvml!(c"nvmlDeviceGetIndex", handle => Handle, &raw mut index => *mut c_uint),
            INVALID_ARGUMENT
        );
    }
    let mut name = [0; 4];
    assert_eq!(
        nvml!(c"nvmlDeviceGetName", one => Handle, name.as_mut_ptr() => *mut c_char, 4 => c_uint),
        INSUFFICIENT_SIZE
    );
    // More shutdowns than initializations; other tests of this process have initialized NVML as well.
    let ended = (0..100).map(|_| nvml!(c"nvmlShutdown"));
    assert_eq!(ended.fold(None, |_, code| Some(code)), Some(UNINITIALIZED));
    assert_eq!(
        nvml!(c"nvmlDeviceGetIndex", one => Handle, &raw mut index => *mut c_uint),
        UNINITIALIZED
    );
}

/// Returns the health of a device: uncorrected errors, whether link 3 is up, errors of link 3, throttle reasons, PCIe width.
fn health(device: Handle) -> [Result<u64, u32>; 5] {
    let (mut ecc, mut state, mut errors, mut reasons, mut width) = (9u64, 9, 9u64, 9u64, 9);
    let said = |code: u32, value: u64| match code {
        0 => Ok(value),
        code => Err(code),
    };
    [
        said(
            nvml!(c"nvmlDeviceGetTotalEccErrors", device => Handle, 1 => c_uint, 0 => c_uint, &raw mut ecc => *mut u64),
            ecc,
        ),
        said(
            nvml!(c"nvmlDeviceGetNvLinkState", device => Handle, 3 => c_uint, &raw mut state => *mut c_uint),
            u64::from(state),
        ),
        said(
            nvml!(c"nvmlDeviceGetNvLinkErrorCounter", device => Handle, 3 => c_uint, 2 => c_uint,
                &raw mut errors => *mut u64),
            errors,
        ),
        said(
            nvml!(c"nvmlDeviceGetCurrentClocksThrottleReasons", device => Handle, &raw mut reasons => *mut u64),
            reasons,
        ),
        said(
            nvml!(c"nvmlDeviceGetCurrPcieLinkWidth", device => Handle, &raw mut width => *mut c_uint),
            u64::from(width),
        ),
    ]
}

#[test]
fn a_device_is_healthy_but_for_what_was_injected() {
    const LOST: u32 = 15;
    let _turn = turn();
    let (one, other) = (device(1), device(2));
    let unsupported = Err(NOT_SUPPORTED);
    let healthy = [Ok(0), unsupported, unsupported, Ok(0), Ok(16)];
    assert_eq!(health(one), healthy);
    let text =
        "device=1,ecc=2,nvlink=3:down; device=1,nvlink=3:crc:7,throttle=power-brake,pcie-width=8";
    cuda_emulator::nvml::faults::set(text).unwrap();
    assert_eq!(health(one), [Ok(2), Ok(0), Ok(7), Ok(0x80), Ok(8)]);
    assert_eq!(health(other), healthy);
    // The fields of remapped rows, and of something else.
    cuda_emulator::nvml::faults::set("device=1,row-remap=failed").unwrap();
    let mut values = [[0u32; 10]; 3];
    for (value, field) in values.iter_mut().zip([144, 145, 1]) {
        value[0] = field;
    }
    assert_eq!(
        nvml!(c"nvmlDeviceGetFieldValues", one => Handle, 3 => c_int, values.as_mut_ptr().cast() => *mut c_void),
        0
    );
    let said = values.map(|value| (value[7], value[8]));
    assert_eq!(said, [(0, 0), (0, 1), (NOT_SUPPORTED, 0)]);
    cuda_emulator::nvml::faults::set("device=1,lost").unwrap();
    assert_eq!(health(one), [Err(LOST); 5]);
    let mut place = NULL;
    assert_eq!(
        nvml!(c"nvmlDeviceGetHandleByIndex_v2", 1 => c_uint, &raw mut place => *mut Handle),
        LOST
    );
    cuda_emulator::nvml::faults::set("").unwrap();
    assert_eq!(health(one), healthy);
}

#[test]
fn this_process_is_on_a_device_and_injected_ones_are() {
    let _turn = turn();
    let one = device(1);
    cuda_emulator::nvml::faults::set("device=1,process=4711").unwrap();
    let mut count: c_uint = 0;
    assert_eq!(
        nvml!(c"nvmlDeviceGetComputeRunningProcesses_v3", one => Handle, &raw mut count => *mut c_uint,
            std::ptr::null_mut() => *mut c_void),
        INSUFFICIENT_SIZE
    );
    assert_eq!(count, 2);
    let mut places = [[0u32; 6]; 2];
    assert_eq!(
        nvml!(c"nvmlDeviceGetComputeRunningProcesses_v3", one => Handle, &raw mut count => *mut c_uint,
            places.as_mut_ptr().cast() => *mut c_void),
        0
    );
    assert_eq!(places.map(|place| place[0]), [std::process::id(), 4711]);
    cuda_emulator::nvml::faults::set("").unwrap();
}
