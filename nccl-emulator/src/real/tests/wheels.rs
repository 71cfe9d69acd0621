//! NVIDIA's libraries, as the environment names them: `NCCL_REAL_LIBRARIES` (paths with colons between
//! them) or `NCCL_TEST_LIBRARY`.

use std::ffi::{c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use nccl_sys::Version;

use super::super::cache::CacheUse;
use super::super::calls::{Calls, Site};
use super::super::file::{ElfFile, Source};
use super::super::kernels::{Interpreter, Reason};
use super::super::library::{Provided, RealNccl, analyse, load_with};
use super::super::wanted;
use super::{address, cache_in, refused};

static CALLS: AtomicUsize = AtomicUsize::new(0);

/// cudaErrorNoDevice.
extern "C" fn no_device() -> c_int {
    CALLS.fetch_add(1, Ordering::Relaxed);
    100
}

extern "C" fn error_string() -> *const c_char {
    c"no device".as_ptr()
}

fn libraries() -> Vec<PathBuf> {
    let value = ["NCCL_REAL_LIBRARIES", "NCCL_TEST_LIBRARY"]
        .map(std::env::var_os)
        .into_iter()
        .flatten()
        .next();
    let Some(value) = value else {
        println!("NOT TESTED: NCCL_REAL_LIBRARIES and NCCL_TEST_LIBRARY are not set");
        return Vec::new();
    };
    std::env::split_paths(&value).collect()
}

/// In one test, because a library can be loaded once.
#[test]
fn a_wheels_library_is_redirected_whole_and_nothing_else_of_it_is_changed() {
    for path in libraries() {
        let source = Source::open(&path).unwrap();
        let file = ElfFile::parse(&source).unwrap();
        let start = Instant::now();
        let calls = analyse(&file).unwrap().calls;
        let first = start.elapsed();
        let functions: Vec<(&'static str, *const c_void)> = calls
            .functions
            .iter()
            .filter(|function| !wanted::REFERENCED_ONLY.contains(&function.name.as_str()))
            .map(|function| match &*function.name.clone().leak() {
                name @ ("cudaGetErrorString" | "cudaGetErrorName") => {
                    (name, error_string as *const c_void)
                }
                name => (name, address(no_device)),
            })
            .collect();
        let provided = Provided {
            functions: &|_| functions.clone(),
            refused,
        };
        let directory = tempfile::tempdir().unwrap();
        let cache = cache_in(directory.path());
        // Fills the cache, and leaves nothing loaded.
        let none = Provided {
            functions: &|_| Vec::new(),
            refused,
        };
        load_with(&path, none, &cache).unwrap_err();
        let start = Instant::now();
        let nccl = load_with(&path, provided, &cache).unwrap();
        println!(
            "{}: NCCL {}, {} calls of {} functions, read in {first:?}, loaded from the cache in {:?}",
            path.display(),
            nccl.version(),
            calls.sites.len(),
            calls.functions.len(),
            start.elapsed()
        );
        assert!(
            matches!(nccl.cache(), CacheUse::Found(_)),
            "{:?}",
            nccl.cache()
        );
        only_sites_are_changed(&nccl, &file, &calls);
        kernels_have_names(&nccl);
        symmetric_kernels_are_known(&nccl);
        layouts_are_there(&nccl);
        nccl_calls_ours(&nccl);
    }
}

fn only_sites_are_changed(nccl: &RealNccl, file: &ElfFile<'_>, calls: &Calls) {
    let base = nccl.base();
    let target_of = |at: u64, bytes: &[u8]| {
        let displacement = i32::from_le_bytes(bytes.try_into().unwrap());
        at.wrapping_add(4).wrapping_add_signed(displacement.into())
    };
    let mut redirected = 0;
    for code in file.sections().unwrap().code().unwrap() {
        // SAFETY: the section is mapped as the file says, and no code writes to it.
        let loaded = unsafe {
            std::slice::from_raw_parts(
                (base + code.address as usize) as *const u8,
                code.bytes.len(),
            )
        };
        let mut at = 0;
        while at < loaded.len() {
            let address = code.address + at as u64;
            let site: Option<&Site> = calls
                .sites
                .binary_search_by_key(&address, |site| site.address)
                .ok()
                .map(|index| &calls.sites[index]);
            if let Some(site) = site {
                let function = &calls.functions[usize::from(site.function)];
                assert_eq!(
                    target_of(address, &code.bytes[at..at + 4]),
                    function.address
                );
                let target = base.wrapping_add(target_of(address, &loaded[at..at + 4]) as usize);
                assert!(
                    nccl.trampolines().contains(&target),
                    "{address:#x} leads to {target:#x}"
                );
                assert!(!calls.runtime.contains(&address));
                redirected += 1;
                at += 4;
                continue;
            }
            assert_eq!(loaded[at], code.bytes[at], "at {address:#x}");
            at += 1;
        }
        // Without the decoder: wherever four bytes behind what may be the end of an opcode (call, jmp,
        // jcc, an operand relative to the instruction) lead to a redirected function, they are in the runtime.
        for (at, bytes) in loaded.windows(6).enumerate() {
            let address = code.address + at as u64 + 2;
            let opcode = match [bytes[0], bytes[1]] {
                [_, 0xe8 | 0xe9] | [0x0f, 0x80..=0x8f] => true,
                [_, operand] => operand & 0xc7 == 0x05,
            };
            let target = target_of(address, &bytes[2..]);
            let function = calls
                .functions
                .iter()
                .find(|function| function.address == target);
            assert!(
                !opcode || function.is_none() || calls.runtime.contains(&address),
                "{address:#x} still leads to {function:?}"
            );
        }
    }
    assert_eq!(redirected, calls.sites.len());
    assert!(redirected > 900, "{redirected}");
}

fn kernels_have_names(nccl: &RealNccl) {
    let list = nccl.data("ncclDevKernelList").unwrap();
    let count = list.size / size_of::<usize>();
    let mut named = 0;
    for index in 0..count {
        // SAFETY: the table consists of pointers to host stubs, and its size was read with it.
        let stub = unsafe { list.address.cast::<*const c_void>().add(index).read() };
        if !stub.is_null() {
            let name = nccl.kernel_of(stub).unwrap();
            assert!(name.contains("ncclDevKernel_"), "{name}");
            named += 1;
        }
    }
    assert!(named > 30, "{named}");
    for (list, name) in [
        ("ncclSymKernelList", "ncclSymDevKernel_"),
        ("ncclSymkKernelList", "ncclSymkDevKernel_"),
    ] {
        let Some(list) = nccl.data(list) else {
            continue;
        };
        // SAFETY: as above; no entry of these is null.
        let stub = unsafe { list.address.cast::<*const c_void>().read() };
        let found = nccl.kernel_of(stub).unwrap();
        assert!(found.contains(name), "{found}");
    }
    let rows = nccl.data("ncclDevFuncRowToId").unwrap();
    assert_eq!(rows.size % size_of::<c_int>(), 0);
}

/// All kernels over symmetric memory, of which only those that need what no emulated device has are refused.
fn symmetric_kernels_are_known(nccl: &RealNccl) {
    let (mut interpreted, mut refused) = (0, 0);
    for (_, name) in nccl.kernels() {
        if !name.contains("ncclSymkDevKernel_") && !name.contains("ncclSymDevKernel_") {
            continue;
        }
        let kernel = Interpreter::symmetric(name);
        match kernel.map(|kernel| kernel.interpreted()) {
            Some(Ok(())) => interpreted += 1,
            Some(Err(Reason::Multicast | Reason::DeviceNetwork)) => refused += 1,
            other => panic!("{name}: {other:?}"),
        }
    }
    // 2.32 has each of 2.30's a second time, for profilers.
    let expected = match nccl.version() {
        version if version < Version::new(2, 28, 0) => (22, 17),
        version if version < Version::new(2, 32, 0) => (48, 44),
        _ => (96, 88),
    };
    assert_eq!((interpreted, refused), expected);
}

/// Offsets that the debugger says as well.
fn layouts_are_there(nccl: &RealNccl) {
    let types = nccl.types();
    let offset = |name, path, size| {
        let field = types.field(name, path).unwrap();
        assert_eq!(field.size, size);
        field.offset
    };
    assert_eq!(types.size_of("ncclDevKernelArgs"), Ok(32));
    assert_eq!(types.size_of("ncclDevWorkP2p"), Ok(48));
    assert_eq!(types.size_of("ncclDevChannel"), Ok(368));
    assert_eq!(types.size_of("ncclDevChannelPeer"), Ok(608));
    assert_eq!(offset("ncclDevChannel", "ring.prev", 4), 8);
    // 2.27's ring has no index, and its channel is as long.
    let ring = if nccl.version() < Version::new(2, 30, 0) {
        24
    } else {
        32
    };
    assert_eq!(types.size_of("ncclRing"), Ok(ring));
    assert_eq!(offset("ncclDevChannel", "tree.down", 4), 16 + ring);
    assert_eq!(offset("ncclDevChannel", "workCounter", 8), 328 + ring);
    assert_eq!(types.field("ncclDevChannelPeer", "recv").unwrap().count, 2);
    assert_eq!(offset("ncclConnInfo", "head", 8), 56);
    assert_eq!(offset("ncclConnInfo", "step", 8), 104);
    let batch = types.field("ncclDevWorkBatch", "nextJump").unwrap();
    assert_eq!(
        batch.bits.map(|bits| (bits.first, bits.count)),
        Some((0, 14))
    );
    assert_eq!(types.enumerator("ncclDevWorkTypeP2p"), Ok(0));
    assert_eq!(types.enumerator("ncclDevWorkTypeCollReg"), Ok(2));
    assert!(types.size_of("cudaDeviceProp").unwrap() > 1000);
}

fn nccl_calls_ours(nccl: &RealNccl) {
    let symbols = nccl.nccl_symbols();
    let (_, allocate) = symbols
        .iter()
        .find(|(name, _)| name.as_c_str() == c"ncclMemAlloc")
        .unwrap();
    // SAFETY: the signature of `ncclMemAlloc` in nccl.h.
    let allocate: extern "C" fn(*mut *mut c_void, usize) -> c_int =
        unsafe { std::mem::transmute(*allocate) };
    let before = CALLS.load(Ordering::Relaxed);
    let mut pointer = std::ptr::null_mut();
    let code = allocate(&mut pointer, 4096);
    assert_ne!(code, 0);
    assert!(CALLS.load(Ordering::Relaxed) > before);
}
