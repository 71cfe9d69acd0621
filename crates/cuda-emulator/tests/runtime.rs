//! Functions of the CUDA runtime, called by name as from a library built for CUDA 13 or 12.
#![cfg(feature = "runtime")]

mod functions;

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, Once};
use std::thread;

use cuda_emulator::runtime::{self, Cuda, Field, Structures};
use functions::{Handle, NULL, address_in, call_at, cu, made};

const INVALID_VALUE: u32 = 1;
const INVALID_CONFIGURATION: u32 = 9;
const INVALID_MEMCPY_DIRECTION: u32 = 21;
const INVALID_DEVICE_FUNCTION: u32 = 98;
const INVALID_DEVICE: u32 = 101;
const INVALID_RESOURCE_HANDLE: u32 = 400;
const NOT_READY: u32 = 600;
const ILLEGAL_ADDRESS: u32 = 700;

/// Structures whose fields are laid out in the order of the first query.
#[derive(Default)]
struct Made(Mutex<HashMap<(String, String), Field>>);

impl Made {
    fn of(&self, name: &str, path: &str) -> Field {
        let fields = self.0.lock().unwrap();
        fields[&(name.to_owned(), path.to_owned())]
    }
}

impl Structures for Made {
    fn size_of(&self, name: &str) -> Option<usize> {
        // As in builds that know no others.
        let known = [
            "cudaDeviceProp",
            "cudaFuncAttributes",
            "cudaPointerAttributes",
        ];
        known.contains(&name).then_some(1024)
    }

    fn field(&self, name: &str, path: &str) -> Option<Field> {
        let mut fields = self.0.lock().unwrap();
        let of_name = fields.iter().filter(|((other, _), _)| other == name);
        let offset = of_name.map(|(_, field)| field.offset + field.size * field.count);
        let (size, count) = match path {
            "name" => (1, 256),
            "uuid" => (16, 1),
            "totalGlobalMem" | "devicePointer" | "hostPointer" => (8, 1),
            "maxThreadsDim" | "maxGridSize" => (4, 3),
            _ => (4, 1),
        };
        let field = Field {
            offset: offset.max().unwrap_or(8),
            size,
            count,
        };
        fields.insert((name.to_owned(), path.to_owned()), field);
        Some(field)
    }
}

fn structures() -> &'static Made {
    static MADE: std::sync::OnceLock<Made> = std::sync::OnceLock::new();
    static ONCE: Once = Once::new();
    let made = MADE.get_or_init(Made::default);
    ONCE.call_once(|| runtime::configure(13_020, made, |_| None).unwrap());
    made
}

/// Calls a runtime function as a library built for CUDA 13 does.
macro_rules! cuda {
    ($name:literal $(, $argument:expr => $type:ty)* $(,)?) => {{
        structures();
        call_at!(address_in(&runtime::symbols(Cuda::V13), $name); $($argument => $type),*)
    }};
}

fn last() -> u32 {
    cuda!(c"cudaGetLastError")
}

fn peek() -> u32 {
    cuda!(c"cudaPeekAtLastError")
}

fn set_device(device: c_int) -> u32 {
    cuda!(c"cudaSetDevice", device => c_int)
}

fn get_device() -> c_int {
    let mut device = -1;
    assert_eq!(cuda!(c"cudaGetDevice", &raw mut device => *mut c_int), 0);
    device
}

fn malloc(size: usize) -> *mut c_void {
    made(|place| cuda!(c"cudaMalloc", place => *mut Handle, size => usize))
}

/// What the wheels of NCCL 2.27.7, 2.30.7 and 2.32.3 call.
const ALL: &str = "cudaDeviceCanAccessPeer cudaDeviceDisablePeerAccess cudaDeviceEnablePeerAccess cudaDeviceGetAttribute \
    cudaDeviceGetByPCIBusId cudaDeviceGetPCIBusId cudaDeviceSetLimit cudaDeviceSynchronize cudaDriverGetVersion \
    cudaEventCreate cudaEventCreateWithFlags cudaEventDestroy cudaEventQuery cudaEventRecord cudaEventSynchronize \
    cudaFree cudaFreeAsync cudaFreeHost cudaFuncGetAttributes cudaFuncSetAttribute cudaGetDevice cudaGetDeviceCount \
    cudaGetErrorName cudaGetErrorString cudaGetFuncBySymbol cudaGetLastError cudaGraphAddDependencies \
    cudaGraphAddEventRecordNode cudaGraphRetainUserObject cudaHostAlloc cudaHostGetDevicePointer cudaHostRegister \
    cudaHostUnregister cudaIpcCloseMemHandle cudaIpcGetMemHandle cudaIpcOpenMemHandle cudaLaunchHostFunc \
    cudaLaunchKernel cudaLaunchKernelExC cudaMalloc cudaMallocFromPoolAsync cudaMemPoolCreate cudaMemPoolDestroy \
    cudaMemPoolSetAttribute cudaMemcpy cudaMemcpyAsync cudaMemcpyBatchAsync cudaMemset cudaMemsetAsync \
    cudaPeekAtLastError cudaPointerGetAttributes cudaRuntimeGetVersion cudaSetDevice cudaStreamCreateWithFlags \
    cudaStreamDestroy cudaStreamGetId cudaStreamIsCapturing cudaStreamSynchronize cudaStreamUpdateCaptureDependencies \
    cudaStreamWaitEvent cudaThreadExchangeStreamCaptureMode cudaUserObjectCreate";
const OF_12: &str = "cudaGetDeviceProperties_v2 cudaGetDriverEntryPoint cudaGraphAddDependencies_v2 \
    cudaStreamGetCaptureInfo_v2 cudaStreamGetCaptureInfo_v3 cudaStreamUpdateCaptureDependencies_v2";
const OF_13: &str =
    "cudaGetDeviceProperties cudaGetDriverEntryPointByVersion cudaStreamGetCaptureInfo";

#[test]
fn each_generation_finds_the_functions_that_nccl_calls() {
    for (cuda, own) in [(Cuda::V12, OF_12), (Cuda::V13, OF_13)] {
        let table = runtime::symbols(cuda);
        for name in ALL.split_whitespace().chain(own.split_whitespace()) {
            let here = table.iter().filter(|(known, _)| known.to_str() == Ok(name));
            assert_eq!(here.count(), 1, "{cuda:?}: {name}");
        }
    }
    assert_eq!(Cuda::of(12_090), Some(Cuda::V12));
    assert_eq!(Cuda::of(13_020), Some(Cuda::V13));
    assert_eq!(Cuda::of(11_080), None);
}

#[test]
fn the_last_error_stays_until_it_is_asked_for_and_is_the_threads_own() {
    assert_eq!((last(), peek()), (0, 0));
    assert_eq!(set_device(99), INVALID_DEVICE);
    assert_eq!((peek(), peek()), (INVALID_DEVICE, INVALID_DEVICE));
    // A success changes nothing; neither does another thread.
    assert_eq!(set_device(0), 0);
    thread::spawn(|| {
        assert_eq!(last(), 0);
        let stale = std::ptr::without_provenance_mut(12_345);
        assert_eq!(
            cuda!(c"cudaStreamSynchronize", stale => Handle),
            INVALID_RESOURCE_HANDLE
        );
    })
    .join()
    .unwrap();
    assert_eq!((last(), last()), (INVALID_DEVICE, 0));

    // `cudaErrorNotReady` is not recorded as an error.
    let stream =
        made(|place| cuda!(c"cudaStreamCreateWithFlags", place => *mut Handle, 1 => c_uint));
    let event = made(|place| cuda!(c"cudaEventCreateWithFlags", place => *mut Handle, 2 => c_uint));
    let gate: &'static Mutex<()> = Box::leak(Box::new(Mutex::new(())));
    let held = gate.lock().unwrap();
    unsafe extern "C" fn wait(argument: *mut c_void) {
        // SAFETY: the gate of this test, which is never freed.
        drop(unsafe { &*argument.cast::<Mutex<()>>() }.lock());
    }
    let argument = std::ptr::from_ref(gate).cast_mut().cast();
    assert_eq!(
        cuda!(c"cudaLaunchHostFunc", stream => Handle, wait => unsafe extern "C" fn(*mut c_void),
            argument => *mut c_void),
        0
    );
    assert_eq!(
        cuda!(c"cudaEventRecord", event => Handle, stream => Handle),
        0
    );
    assert_eq!(cuda!(c"cudaEventQuery", event => Handle), NOT_READY);
    assert_eq!(last(), 0);
    drop(held);
    assert_eq!(cuda!(c"cudaEventSynchronize", event => Handle), 0);
    assert_eq!(cuda!(c"cudaStreamDestroy", stream => Handle), 0);
}

#[test]
fn an_error_of_the_context_is_not_forgotten() {
    assert_eq!(set_device(5), 0);
    let memory = malloc(100);
    assert_eq!(
        cuda!(c"cudaMemset", memory => *mut c_void, 1 => c_int, 200 => usize),
        ILLEGAL_ADDRESS
    );
    assert_eq!((last(), last()), (ILLEGAL_ADDRESS, ILLEGAL_ADDRESS));
    assert_eq!(cuda!(c"cudaDeviceSynchronize"), ILLEGAL_ADDRESS);
    // Another device is not affected.
    assert_eq!(set_device(4), 0);
    assert_eq!((last(), last()), (ILLEGAL_ADDRESS, 0));
    assert_eq!(cuda!(c"cudaDeviceSynchronize"), 0);
}

#[test]
fn errors_have_the_runtimes_names() {
    let text = |name, code| {
        structures();
        let address = address_in(&runtime::symbols(Cuda::V13), name);
        // SAFETY: the function's type in C.
        let function: unsafe extern "C" fn(u32) -> *const c_char =
            unsafe { std::mem::transmute(address) };
        // SAFETY: it takes any number, and gives a C string that lives for ever.
        unsafe { CStr::from_ptr(function(code)) }
    };
    assert_eq!(
        text(c"cudaGetErrorName", 400),
        c"cudaErrorInvalidResourceHandle"
    );
    assert_eq!(text(c"cudaGetErrorString", 2), c"out of memory");
    assert_eq!(
        text(c"cudaGetErrorName", 12_345),
        c"unrecognized error code"
    );
}

#[test]
fn a_thread_has_device_0_until_it_sets_another_and_a_context_when_it_needs_one() {
    fn active(device: c_int) -> bool {
        let (mut flags, mut active) = (0, 0);
        assert_eq!(
            cu!(c"cuDevicePrimaryCtxGetState", device => c_int, &raw mut flags => *mut c_uint,
                &raw mut active => *mut c_int),
            0
        );
        active != 0
    }
    thread::spawn(|| {
        assert_eq!(get_device(), 0);
        assert!(!active(6), "nothing was done on it");
        assert_eq!(set_device(6), 0);
        assert!(active(6));
        thread::spawn(|| assert_eq!(get_device(), 0))
            .join()
            .unwrap();
        assert_eq!(get_device(), 6);
        // Contexts made current by others take precedence, and releasing them does not end the runtime's context.
        let own = made(|place| cu!(c"cuDevicePrimaryCtxRetain", place => *mut Handle, 3 => c_int));
        assert_eq!(cu!(c"cuCtxSetCurrent", own => Handle), 0);
        assert_eq!(get_device(), 3);
        assert_eq!(cu!(c"cuDevicePrimaryCtxRelease_v2", 3 => c_int), 0);
        assert_eq!(cu!(c"cuCtxSetCurrent", NULL => Handle), 0);
        assert_eq!(get_device(), 6);
        let used = made(|place| cu!(c"cuDevicePrimaryCtxRetain", place => *mut Handle, 6 => c_int));
        assert_eq!(cu!(c"cuDevicePrimaryCtxRelease_v2", 6 => c_int), 0);
        assert!(active(6));
        malloc(10);
        let mut current = NULL;
        assert_eq!(cu!(c"cuCtxGetCurrent", &raw mut current => *mut Handle), 0);
        assert_eq!(current, used);
    })
    .join()
    .unwrap();
}

#[test]
fn bytes_go_to_a_device_and_back() {
    assert_eq!(set_device(1), 0);
    let (from, mut to) = ([7u8; 64], [0u8; 64]);
    let memory = malloc(64);
    let host = from.as_ptr().cast::<c_void>();
    assert_eq!(
        cuda!(c"cudaMemcpy", memory => *mut c_void, host => *const c_void, 64 => usize, 1 => c_int),
        0
    );
    let half = memory.wrapping_byte_add(32);
    assert_eq!(
        cuda!(c"cudaMemsetAsync", half => *mut c_void, 0x109 => c_int, 32 => usize, NULL => Handle),
        0
    );
    assert_eq!(
        cuda!(c"cudaMemcpyAsync", to.as_mut_ptr() => *mut u8, memory => *const c_void, 64 => usize,
            4 => c_int, NULL => Handle),
        0
    );
    assert_eq!(cuda!(c"cudaStreamSynchronize", NULL => Handle), 0);
    assert_eq!((&to[..32], &to[32..]), (&[7; 32][..], &[9; 32][..]));
    assert_eq!(
        cuda!(c"cudaMemcpy", memory => *mut c_void, host => *const c_void, 64 => usize, 9 => c_int),
        INVALID_MEMCPY_DIRECTION
    );
    assert_eq!(cuda!(c"cudaFree", memory => *mut c_void), 0);
    // An allocation of size 0 gives null, which can be freed.
    assert_eq!(malloc(0), NULL);
    for name in [c"cudaFree", c"cudaFreeHost"] {
        let address = address_in(&runtime::symbols(Cuda::V13), name);
        assert_eq!(call_at!(address; NULL => Handle), 0);
    }
    last();
}

#[test]
fn structures_are_filled_where_the_callers_build_has_the_fields() {
    let made = structures();
    let mut bytes = [0xffu8; 1024];
    assert_eq!(
        cuda!(c"cudaGetDeviceProperties", bytes.as_mut_ptr() => *mut u8, 2 => c_int),
        0
    );
    let number = |bytes: &[u8], name, path| {
        let at = made.of(name, path).offset;
        i32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
    };
    let of_device = |path| number(&bytes, "cudaDeviceProp", path);
    assert_eq!((of_device("major"), of_device("minor")), (9, 0));
    assert_eq!((of_device("pciBusID"), of_device("warpSize")), (3, 32));
    assert_eq!(of_device("maxThreadsDim"), 1024);
    let name = &bytes[made.of("cudaDeviceProp", "name").offset..];
    let name = CStr::from_bytes_until_nul(name).unwrap().to_str().unwrap();
    assert!(name.contains("emulator"), "{name}");
    // Before the first field, and behind the last.
    assert_eq!((&bytes[..8], bytes[1023]), (&[0; 8][..], 0));

    assert_eq!(set_device(2), 0);
    let memory = malloc(100);
    let of_address = |address: *const c_void| {
        let mut bytes = [0xffu8; 1024];
        assert_eq!(
            cuda!(c"cudaPointerGetAttributes", bytes.as_mut_ptr() => *mut u8, address => *const c_void),
            0
        );
        let address = |path| {
            let at = made.of("cudaPointerAttributes", path).offset;
            usize::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
        };
        let pointers = (address("devicePointer"), address("hostPointer"));
        (
            number(&bytes, "cudaPointerAttributes", "type"),
            number(&bytes, "cudaPointerAttributes", "device"),
            pointers,
        )
    };
    let inside = memory.wrapping_byte_add(10);
    assert_eq!(of_address(inside), (2, 2, (inside.addr(), 0)));
    let own = (&raw const bytes).cast::<c_void>();
    assert_eq!(of_address(own), (0, -2, (0, own.addr())));
    let pinned = functions::made(
        |place| cuda!(c"cudaHostAlloc", place => *mut Handle, 64 => usize, 0 => c_uint),
    );
    let (kind, device, (_, host)) = of_address(pinned);
    assert_eq!((kind, device, host), (1, 2, pinned.addr()));
    assert_eq!(last(), 0, "no question failed");
}

#[test]
fn driver_functions_are_found_by_name_and_version() {
    let find = |name: &CStr, version| {
        let (mut function, mut status) = (NULL, 9);
        let code = cuda!(c"cudaGetDriverEntryPointByVersion", name.as_ptr() => *const c_char,
            &raw mut function => *mut Handle, version => c_uint, 0 => u64, &raw mut status => *mut c_uint);
        (code, function, status)
    };
    let exact = |name| functions::driver(name).cast_mut();
    assert_eq!(find(c"cuMemAlloc", 12_000), (0, exact(c"cuMemAlloc_v2"), 0));
    let older = find(c"cuGraphAddDependencies", 12_000);
    assert_eq!(older, (0, exact(c"cuGraphAddDependencies"), 0));
    let newer = find(c"cuGraphAddDependencies", 13_000);
    assert_eq!(newer, (0, exact(c"cuGraphAddDependencies_v2"), 0));
    // An unknown driver function is reported, not an error.
    assert_eq!(find(c"cuNoSuchThing", 13_000), (0, NULL, 1));
    assert_eq!(last(), 0);
    let mut version = 0;
    assert_eq!(
        cuda!(c"cudaRuntimeGetVersion", &raw mut version => *mut c_int),
        0
    );
    assert_eq!(version, 13_020);
}

#[test]
fn a_host_function_without_a_kernel_is_refused() {
    #[derive(Clone, Copy)]
    #[repr(C)]
    struct Dim3([c_uint; 3]);
    let (symbol, mut place) = (std::ptr::without_provenance(0x1234), NULL);
    assert_eq!(
        cuda!(c"cudaGetFuncBySymbol", &raw mut place => *mut Handle, symbol => *const c_void),
        INVALID_DEVICE_FUNCTION
    );
    let launch = |grid: u32| {
        cuda!(c"cudaLaunchKernel", symbol => *const c_void, Dim3([grid, 1, 1]) => Dim3, Dim3([1; 3]) => Dim3,
            std::ptr::null_mut() => *mut Handle, 0 => usize, NULL => Handle)
    };
    assert_eq!(launch(0), INVALID_CONFIGURATION);
    assert_eq!(launch(1), INVALID_DEVICE_FUNCTION);
    assert_eq!(last(), INVALID_DEVICE_FUNCTION);
}

#[test]
fn a_device_reaches_another_once_it_may() {
    thread::spawn(|| {
        const ALREADY: u32 = 704;
        assert_eq!(set_device(1), 0);
        let mut can = 0;
        assert_eq!(
            cuda!(c"cudaDeviceCanAccessPeer", &raw mut can => *mut c_int, 1 => c_int, 7 => c_int),
            0
        );
        assert_eq!(can, 1);
        let enable = || cuda!(c"cudaDeviceEnablePeerAccess", 7 => c_int, 0 => c_uint);
        assert_eq!((enable(), enable()), (0, ALREADY));
        assert_eq!((last(), last()), (ALREADY, 0));
        assert_eq!(cuda!(c"cudaDeviceDisablePeerAccess", 7 => c_int), 0);
        assert_eq!(enable(), 0);
    })
    .join()
    .unwrap();
}

/// The functions of captures have other arguments in CUDA 12.
#[test]
fn both_generations_order_a_capture_by_hand() {
    for cuda in [Cuda::V12, Cuda::V13] {
        let function = |name| {
            structures();
            address_in(&runtime::symbols(cuda), name)
        };
        assert_eq!(set_device(0), 0);
        let (origin, event) = (functions::stream(), functions::event());
        functions::begin(origin);
        let (mut status, mut id, mut graph, mut count) = (0, 0, NULL, 9);
        let mut nodes = std::ptr::null::<Handle>();
        match cuda {
            Cuda::V12 => assert_eq!(
                call_at!(function(c"cudaStreamGetCaptureInfo_v2"); origin => Handle,
                    &raw mut status => *mut c_uint, &raw mut id => *mut u64, &raw mut graph => *mut Handle,
                    &raw mut nodes => *mut *const Handle, &raw mut count => *mut usize),
                0
            ),
            Cuda::V13 => {
                let mut edges = std::ptr::null::<u64>();
                assert_eq!(
                    call_at!(function(c"cudaStreamGetCaptureInfo"); origin => Handle,
                        &raw mut status => *mut c_uint, &raw mut id => *mut u64, &raw mut graph => *mut Handle,
                        &raw mut nodes => *mut *const Handle, &raw mut edges => *mut *const u64,
                        &raw mut count => *mut usize),
                    0
                );
            }
        }
        assert_eq!((status, count), (1, 0));
        let node = || {
            made(|place| {
                call_at!(function(c"cudaGraphAddEventRecordNode"); place => *mut Handle, graph => Handle,
                    std::ptr::null() => *const Handle, 0 => usize, event => Handle)
            })
        };
        let (first, second) = (node(), node());
        let (from, to) = (&raw const first, &raw const second);
        let (depend, update) = (
            function(c"cudaGraphAddDependencies"),
            function(c"cudaStreamUpdateCaptureDependencies"),
        );
        let none = std::ptr::null::<c_void>();
        let answers = match cuda {
            Cuda::V12 => (
                call_at!(depend; graph => Handle, from => *const Handle, to => *const Handle, 1 => usize),
                call_at!(depend; graph => Handle, from => *const Handle, to => *const Handle, 1 => usize),
                call_at!(update; origin => Handle, to => *const Handle, 1 => usize, 1 => c_uint),
            ),
            Cuda::V13 => (
                call_at!(depend; graph => Handle, from => *const Handle, to => *const Handle,
                    none => *const c_void, 1 => usize),
                call_at!(depend; graph => Handle, from => *const Handle, to => *const Handle,
                    none => *const c_void, 1 => usize),
                call_at!(update; origin => Handle, to => *const Handle, none => *const c_void, 1 => usize,
                    1 => c_uint),
            ),
        };
        assert_eq!(answers, (0, INVALID_VALUE, 0), "{cuda:?}");
        assert_eq!(functions::end(origin), graph);
        last();
    }
}
