//! The driver by `dlopen` and `dlsym`, as a foreign client finds it: functions that cudarc does not call, or
//! hides.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

const SUCCESS: u32 = 0;
const INVALID_VALUE: u32 = 1;
const INVALID_CONTEXT: u32 = 201;
const INVALID_HANDLE: u32 = 400;
const NOT_FOUND: u32 = 500;
const NOT_READY: u32 = 600;
const ILLEGAL_ADDRESS: u32 = 700;
const PEER_ACCESS_ALREADY_ENABLED: u32 = 704;
const PEER_ACCESS_NOT_ENABLED: u32 = 705;
const NOT_SUPPORTED: u32 = 801;

/// The address of a driver function.
fn symbol(name: &CStr) -> *mut c_void {
    static HANDLE: OnceLock<usize> = OnceLock::new();
    let handle = *HANDLE.get_or_init(|| {
        nccl_emulator::install().unwrap();
        // SAFETY: the emulator's stand-in, which has no code.
        let handle = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null());
        handle.expose_provenance()
    });
    let handle = std::ptr::with_exposed_provenance_mut(handle);
    // SAFETY: a live handle and a C string.
    let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
    assert!(!address.is_null(), "{name:?}");
    address
}

/// Calls a driver function by name, with the types that its arguments have here.
macro_rules! call {
    ($name:literal, $($argument:expr => $type:ty),* $(,)?) => {{
        // SAFETY: the types are those of the function in cuda.h.
        let function: unsafe extern "C" fn($($type),*) -> u32 = unsafe { std::mem::transmute(symbol($name)) };
        // SAFETY: the test keeps the function's contract, or breaks it in a way that the emulator detects.
        unsafe { function($($argument),*) }
    }};
}

/// Makes the primary context of a device current.
fn context(device: c_int) -> *mut c_void {
    let mut context = std::ptr::null_mut();
    assert_eq!(call!(c"cuInit", 0 => c_uint), SUCCESS);
    assert_eq!(
        call!(c"cuDevicePrimaryCtxRetain", &raw mut context => *mut *mut c_void, device => c_int),
        SUCCESS
    );
    assert_eq!(call!(c"cuCtxSetCurrent", context => *mut c_void), SUCCESS);
    context
}

fn allocate(size: usize) -> u64 {
    let mut address = 0;
    assert_eq!(
        call!(c"cuMemAlloc_v2", &raw mut address => *mut u64, size => usize),
        SUCCESS
    );
    address
}

fn read<T: Copy + Default>(address: u64, count: usize) -> Vec<T> {
    let mut out = vec![T::default(); count];
    let bytes = size_of::<T>() * count;
    assert_eq!(
        call!(c"cuMemcpyDtoH_v2", out.as_mut_ptr().cast() => *mut c_void, address => u64, bytes => usize),
        SUCCESS
    );
    out
}

#[test]
fn contexts_are_made_stacked_and_destroyed() {
    let primary = context(0);
    for (name, make) in [
        (
            "v2",
            (|place| call!(c"cuCtxCreate_v2", place => *mut *mut c_void, 0 => c_uint, 0 => c_int))
                as fn(*mut *mut c_void) -> u32,
        ),
        ("v3", |place| {
            let none = std::ptr::null_mut::<c_void>();
            call!(c"cuCtxCreate_v3", place => *mut *mut c_void, none => *mut c_void, 0 => c_int, 0 => c_uint, 0 => c_int)
        }),
        ("v4", |place| {
            let none = std::ptr::null_mut::<c_void>();
            call!(c"cuCtxCreate_v4", place => *mut *mut c_void, none => *mut c_void, 0 => c_uint, 0 => c_int)
        }),
    ] {
        let mut own = std::ptr::null_mut();
        assert_eq!(make(&raw mut own), SUCCESS, "{name}");
        let mut current = std::ptr::null_mut();
        call!(c"cuCtxGetCurrent", &raw mut current => *mut *mut c_void);
        assert_eq!(current, own);
        let memory = allocate(100);
        let mut popped = std::ptr::null_mut();
        assert_eq!(
            call!(c"cuCtxPopCurrent_v2", &raw mut popped => *mut *mut c_void),
            SUCCESS
        );
        assert_eq!(popped, own);
        call!(c"cuCtxGetCurrent", &raw mut current => *mut *mut c_void);
        assert_eq!(current, primary);
        assert_eq!(call!(c"cuCtxDestroy_v2", own => *mut c_void), SUCCESS);
        assert_eq!(
            call!(c"cuCtxPushCurrent_v2", own => *mut c_void),
            INVALID_CONTEXT
        );
        // The context's memory was freed with it.
        assert_eq!(call!(c"cuMemFree_v2", memory => u64), INVALID_VALUE);
    }
    // The primary context is released, not destroyed.
    assert_eq!(
        call!(c"cuCtxDestroy_v2", primary => *mut c_void),
        INVALID_CONTEXT
    );
}

#[test]
fn without_a_context_nothing_goes() {
    context(0);
    std::thread::spawn(|| {
        let mut address = 0;
        assert_eq!(
            call!(c"cuMemAlloc_v2", &raw mut address => *mut u64, 1 => usize),
            INVALID_CONTEXT
        );
        let null = std::ptr::null_mut();
        assert_eq!(
            call!(c"cuStreamSynchronize", null => *mut c_void),
            INVALID_CONTEXT
        );
        let mut device = 0;
        assert_eq!(
            call!(c"cuCtxGetDevice", &raw mut device => *mut c_int),
            INVALID_CONTEXT
        );
        assert_eq!(
            call!(c"cuCtxPopCurrent_v2", null.cast() => *mut *mut c_void),
            INVALID_CONTEXT
        );
    })
    .join()
    .unwrap();
}

#[test]
fn fills_of_every_width_fill_what_they_should() {
    context(0);
    let memory = allocate(4099);
    assert_eq!(
        call!(c"cuMemsetD8_v2", memory => u64, 0xab => u8, 4099 => usize),
        SUCCESS
    );
    assert_eq!(read::<u8>(memory, 4099), vec![0xab; 4099]);
    assert_eq!(
        call!(c"cuMemsetD16_v2", memory + 2 => u64, 0x1234 => u16, 1001 => usize),
        SUCCESS
    );
    assert_eq!(read::<u16>(memory + 2, 1001), vec![0x1234; 1001]);
    assert_eq!(read::<u8>(memory + 2 + 2002, 1), [0xab]);
    let null = std::ptr::null_mut::<c_void>();
    assert_eq!(
        call!(c"cuMemsetD32Async", memory + 4 => u64, 0x8765_4321 => u32, 1000 => usize, null => *mut c_void),
        SUCCESS
    );
    assert_eq!(read::<u32>(memory + 4, 1000), vec![0x8765_4321; 1000]);
    assert_eq!(read::<u8>(memory + 4 + 4000, 95), vec![0xab; 95]);
    assert_eq!(
        call!(c"cuMemsetD32_v2", memory + 2 => u64, 0 => u32, 1 => usize),
        INVALID_VALUE
    );
    assert_eq!(call!(c"cuMemFree_v2", memory => u64), SUCCESS);
}

#[test]
fn a_copy_finds_out_by_itself_where_its_ends_are() {
    context(0);
    let (one, two) = (allocate(1000), allocate(1000));
    let source = vec![9_u8; 1000];
    let mut target = vec![0_u8; 1000];
    let host = |memory: *const u8| memory.expose_provenance() as u64;
    for (to, from) in [
        (one, host(source.as_ptr())),
        (two, one),
        (host(target.as_mut_ptr()), two),
    ] {
        assert_eq!(
            call!(c"cuMemcpy", to => u64, from => u64, 1000 => usize),
            SUCCESS
        );
    }
    assert_eq!(target, source);
    for memory in [one, two] {
        assert_eq!(call!(c"cuMemFree_v2", memory => u64), SUCCESS);
    }
}

#[test]
fn an_address_is_told_from_another() {
    let current = context(1);
    let memory = allocate(5000);
    let mut kind: c_uint = 0;
    let ask = |place: *mut c_void, attribute: c_int, address: u64| call!(c"cuPointerGetAttribute", place => *mut c_void, attribute => c_int, address => u64);
    assert_eq!(ask((&raw mut kind).cast(), 2, memory + 4999), SUCCESS);
    assert_eq!(kind, 2, "device memory");
    let mut device: c_int = -1;
    assert_eq!(ask((&raw mut device).cast(), 9, memory), SUCCESS);
    assert_eq!(device, 1);
    let mut owner = std::ptr::null_mut::<c_void>();
    assert_eq!(ask((&raw mut owner).cast(), 1, memory), SUCCESS);
    assert_eq!(owner, current);
    let (mut start, mut size) = (0_u64, 0_usize);
    assert_eq!(
        call!(c"cuMemGetAddressRange_v2", &raw mut start => *mut u64, &raw mut size => *mut usize, memory + 77 => u64),
        SUCCESS
    );
    assert_eq!((start, size), (memory, 5000));

    let host = 0_u8;
    let address = (&raw const host).addr() as u64;
    assert_eq!(ask((&raw mut kind).cast(), 2, address), INVALID_VALUE);
    // The query for several attributes at once succeeds instead, with the memory type 0.
    let mut places: [*mut c_void; 2] = [(&raw mut kind).cast(), (&raw mut device).cast()];
    assert_eq!(
        call!(c"cuPointerGetAttributes", 2 => c_uint, [2, 9].as_ptr() => *const c_int, places.as_mut_ptr() => *mut *mut c_void, address => u64),
        SUCCESS
    );
    assert_eq!((kind, device), (0, -2));

    let mut pinned = std::ptr::null_mut::<c_void>();
    assert_eq!(
        call!(c"cuMemHostAlloc", &raw mut pinned => *mut *mut c_void, 100 => usize, 0 => c_uint),
        SUCCESS
    );
    assert_eq!(
        ask((&raw mut kind).cast(), 2, pinned.addr() as u64),
        SUCCESS
    );
    assert_eq!(kind, 1, "host memory");
    assert_eq!(call!(c"cuMemFreeHost", pinned => *mut c_void), SUCCESS);
    assert_eq!(
        call!(c"cuMemFreeHost", pinned => *mut c_void),
        INVALID_VALUE
    );
    assert_eq!(call!(c"cuMemFree_v2", memory => u64), SUCCESS);
}

#[test]
fn registered_memory_is_pinned_until_it_is_unregistered() {
    context(0);
    let mut buffer = vec![0_u8; 10_000];
    let start = buffer.as_mut_ptr().cast::<c_void>();
    let register =
        || call!(c"cuMemHostRegister_v2", start => *mut c_void, 10_000 => usize, 0 => c_uint);
    assert_eq!(register(), SUCCESS);
    assert_eq!(register(), 712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED");
    assert_eq!(call!(c"cuMemHostUnregister", start => *mut c_void), SUCCESS);
    assert_eq!(call!(c"cuMemHostUnregister", start => *mut c_void), 713);
}

#[test]
fn a_stream_knows_what_it_was_made_as() {
    let current = context(0);
    let mut stream = std::ptr::null_mut::<c_void>();
    assert_eq!(
        call!(c"cuStreamCreateWithPriority", &raw mut stream => *mut *mut c_void, 1 => c_uint, -3 => c_int),
        SUCCESS
    );
    let mut owner = std::ptr::null_mut();
    assert_eq!(
        call!(c"cuStreamGetCtx", stream => *mut c_void, &raw mut owner => *mut *mut c_void),
        SUCCESS
    );
    assert_eq!(owner, current);
    let (mut flags, mut priority): (c_uint, c_int) = (0, 0);
    assert_eq!(
        call!(c"cuStreamGetFlags", stream => *mut c_void, &raw mut flags => *mut c_uint),
        SUCCESS
    );
    assert_eq!(
        call!(c"cuStreamGetPriority", stream => *mut c_void, &raw mut priority => *mut c_int),
        SUCCESS
    );
    assert_eq!((flags, priority), (1, -3));
    assert_eq!(call!(c"cuStreamQuery", stream => *mut c_void), SUCCESS);

    static OPEN: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
    unsafe extern "C" fn wait(_: *mut c_void) {
        while !OPEN.load(std::sync::atomic::Ordering::SeqCst) {
            std::thread::yield_now();
        }
    }
    assert_eq!(
        call!(c"cuLaunchHostFunc", stream => *mut c_void, wait => unsafe extern "C" fn(*mut c_void), std::ptr::null_mut() => *mut c_void),
        SUCCESS
    );
    assert_eq!(call!(c"cuStreamQuery", stream => *mut c_void), NOT_READY);
    OPEN.store(true, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(
        call!(c"cuStreamSynchronize", stream => *mut c_void),
        SUCCESS
    );

    assert_eq!(call!(c"cuStreamDestroy_v2", stream => *mut c_void), SUCCESS);
    assert_eq!(
        call!(c"cuStreamDestroy_v2", stream => *mut c_void),
        INVALID_HANDLE
    );
    assert_eq!(
        call!(c"cuStreamSynchronize", current => *mut c_void),
        INVALID_HANDLE,
        "a context is no stream"
    );
    let wanted = format!("{stream:p} is no stream");
    assert!(
        nccl_emulator::violations()
            .iter()
            .any(|v| v.to_string().contains(&wanted))
    );
}

#[test]
fn peer_access_is_enabled_once() {
    let other = context(3);
    context(2);
    let mut can: c_int = 0;
    call!(c"cuDeviceCanAccessPeer", &raw mut can => *mut c_int, 2 => c_int, 3 => c_int);
    assert_eq!(can, 1);
    let enable = || call!(c"cuCtxEnablePeerAccess", other => *mut c_void, 0 => c_uint);
    let disable = || call!(c"cuCtxDisablePeerAccess", other => *mut c_void);
    assert_eq!(enable(), SUCCESS);
    assert_eq!(enable(), PEER_ACCESS_ALREADY_ENABLED);
    assert_eq!(disable(), SUCCESS);
    assert_eq!(disable(), PEER_ACCESS_NOT_ENABLED);
}

#[test]
fn functions_are_found_by_name_and_version() {
    context(0);
    let mut function = std::ptr::null_mut::<c_void>();
    let mut status: c_uint = 9;
    let mut find = |name: &CStr, version: c_int| {
        let code = call!(
            c"cuGetProcAddress_v2",
            name.as_ptr() => *const c_char,
            &raw mut function => *mut *mut c_void,
            version => c_int,
            0 => u64,
            &raw mut status => *mut c_uint,
        );
        (code, function)
    };
    assert_eq!(
        find(c"cuMemAlloc", 13_000),
        (SUCCESS, symbol(c"cuMemAlloc_v2"))
    );
    assert_eq!(
        find(c"cuCtxCreate", 11_080),
        (SUCCESS, symbol(c"cuCtxCreate_v3"))
    );
    assert_eq!(
        find(c"cuGetExportTable", 13_000),
        (NOT_FOUND, std::ptr::null_mut())
    );
    assert_eq!(status, 1);
}

#[test]
fn what_is_not_there_says_so() {
    context(0);
    let null = std::ptr::null_mut::<c_void>();
    for code in [
        call!(c"cuModuleLoadFatBinary", null.cast() => *mut *mut c_void, null => *const c_void),
        call!(c"cuGraphCreate", null.cast() => *mut *mut c_void, 0 => c_uint),
        call!(c"cuMemAllocManaged", null.cast() => *mut u64, 1 => usize, 1 => c_uint),
        call!(c"cuIpcGetEventHandle", null => *mut c_void, null => *mut c_void),
        call!(c"cuMulticastCreate", null.cast() => *mut u64, null => *const c_void),
        call!(c"cuMemGetHandleForAddressRange", null => *mut c_void, 0 => u64, 1 => usize, 1 => c_uint, 0 => u64),
    ] {
        assert_eq!(code, NOT_SUPPORTED);
    }
}

#[test]
fn null_where_a_result_belongs_is_refused() {
    context(0);
    let null = std::ptr::null_mut::<c_void>();
    for code in [
        call!(c"cuDeviceGetCount", null.cast() => *mut c_int),
        call!(c"cuMemAlloc_v2", null.cast() => *mut u64, 8 => usize),
        call!(c"cuMemAllocAsync", null.cast() => *mut u64, 8 => usize, null => *mut c_void),
        call!(c"cuMemHostAlloc", null.cast() => *mut *mut c_void, 8 => usize, 0 => c_uint),
        call!(c"cuStreamCreate", null.cast() => *mut *mut c_void, 0 => c_uint),
        call!(c"cuEventCreate", null.cast() => *mut *mut c_void, 0 => c_uint),
        call!(c"cuDevicePrimaryCtxRetain", null.cast() => *mut *mut c_void, 0 => c_int),
        call!(c"cuMemGetInfo_v2", null.cast() => *mut usize, null.cast() => *mut usize),
    ] {
        assert_eq!(code, INVALID_VALUE);
    }
}

#[test]
fn bytes_beyond_the_end_are_caught_with_the_allocation_named() {
    context(7);
    let memory = allocate(1000);
    assert_eq!(
        call!(c"cuMemsetD8_v2", memory => u64, 0 => u8, 1001 => usize),
        ILLEGAL_ADDRESS
    );
    let mut address = 0;
    assert_eq!(
        call!(c"cuMemAlloc_v2", &raw mut address => *mut u64, 1 => usize),
        ILLEGAL_ADDRESS,
        "the error sticks"
    );
    let violations = nccl_emulator::violations();
    let found = violations.iter().find(|v| v.device() == Some(7)).unwrap();
    assert_eq!(found.kind(), nccl_emulator::ViolationKind::OutOfBounds);
    assert_eq!(found.allocation().unwrap().size, Some(1000));
    assert!(
        found.to_string().contains("1 bytes past its end"),
        "{found}"
    );
}
