//! Memory operations in streams, copies in batches, and memory of the host that devices use.

mod common;

use std::ffi::{c_int, c_uint, c_void};
use std::time::{Duration, Instant};

use common::*;

fn query(stream: *mut c_void) -> u32 {
    call!(c"cuStreamQuery", stream => *mut c_void)
}

#[test]
fn a_stream_waits_for_a_number_that_the_host_writes() {
    use std::sync::atomic::Ordering;
    context(0);
    let (stream, memory) = (stream(), allocate(8));
    let (number, address) = pinned();
    done!(c"cuMemsetD32Async", memory => u64, 0 => u32, 2 => usize, stream => *mut c_void);
    done!(c"cuStreamWaitValue32_v2", stream => *mut c_void, address => u64, 5 => u32, 0 => c_uint);
    done!(c"cuStreamWriteValue64_v2", stream => *mut c_void, memory => u64, 1 << 40 | 7 => u64, 0 => c_uint);
    for _ in 0..100 {
        assert_eq!(query(stream), NOT_READY);
    }
    number.store(4, Ordering::Release);
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(query(stream), NOT_READY);
    number.store(6, Ordering::Release);
    done!(c"cuStreamSynchronize", stream => *mut c_void);
    assert_eq!(read(memory, 8), (1_u64 << 40 | 7).to_ne_bytes());
}

#[test]
fn a_fill_without_async_waits_for_pinned_memory_and_not_for_device_memory() {
    use std::sync::atomic::Ordering;
    context(3);
    let ((number, address), memory) = (pinned(), allocate(8));
    let default = std::ptr::null_mut();
    let over = hold(default, Duration::from_millis(500));
    done!(c"cuMemsetD32_v2", memory => u64, 7 => u32, 2 => usize);
    assert_eq!(over.load(Ordering::Relaxed), 0);
    done!(c"cuMemsetD32_v2", address => u64, 7 => u32, 2 => usize);
    assert_eq!(number.load(Ordering::Relaxed), 7 << 32 | 7);
    hold(default, Duration::from_millis(20));
    done!(c"cuMemsetD16_v2", address => u64, 8 => u16, 4 => usize);
    assert_eq!(number.load(Ordering::Relaxed), 0x0008_0008_0008_0008);
    hold(default, Duration::from_millis(20));
    done!(c"cuMemsetD8_v2", address => u64, 9 => u8, 8 => usize);
    assert_eq!(number.load(Ordering::Relaxed), 0x0909_0909_0909_0909);
}

#[test]
fn a_stream_waits_for_a_number_that_another_stream_writes() {
    context(1);
    let (one, two, memory) = (stream(), stream(), allocate(16));
    done!(c"cuMemsetD32_v2", memory => u64, 0 => u32, 4 => usize);
    #[repr(C)]
    struct Operation(c_uint, u64, u64, c_uint, u64, u64);
    let batch = [
        Operation(4, memory, 3, 1, 0, 0),
        Operation(6, 0, 0, 0, 0, 0),
        Operation(2, memory + 8, 9, 0, 0, 0),
    ];
    done!(c"cuStreamBatchMemOp_v2", one => *mut c_void, 3 => c_uint, batch.as_ptr() => *const Operation, 0 => c_uint);
    assert_eq!(query(one), NOT_READY);
    done!(c"cuStreamWriteValue64_v2", two => *mut c_void, memory => u64, 3 => u64, 0 => c_uint);
    done!(c"cuStreamSynchronize", one => *mut c_void);
    assert_eq!(read(memory + 8, 4), 9_u32.to_ne_bytes());
    let flush = [Operation(3, 0, 0, 0, 0, 0)];
    let refused = call!(c"cuStreamBatchMemOp_v2", one => *mut c_void, 1 => c_uint, flush.as_ptr() => *const Operation, 0 => c_uint);
    assert_eq!(refused, NOT_SUPPORTED);
    let odd = call!(c"cuStreamWriteValue64_v2", two => *mut c_void, memory + 4 => u64, 3 => u64, 0 => c_uint);
    assert_eq!(odd, INVALID_VALUE);
}

#[test]
fn a_wait_in_vain_leaves_the_core_to_others() {
    context(2);
    let (stream, (number, address)) = (stream(), pinned());
    let spent = || {
        // SAFETY: a plain value to write to.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
        Duration::new(
            (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) as u64,
            ((usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1000) as u32,
        )
    };
    done!(c"cuStreamWaitValue32_v2", stream => *mut c_void, address => u64, 1 => u32, 0 => c_uint);
    let (before, start) = (spent(), Instant::now());
    let writer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(400));
        number.store(1, std::sync::atomic::Ordering::Release);
    });
    done!(c"cuStreamSynchronize", stream => *mut c_void);
    assert!(start.elapsed() >= Duration::from_millis(350));
    let used = spent() - before;
    assert!(used < Duration::from_millis(200), "{used:?} of a core");
    writer.join().unwrap();
}

#[test]
fn a_batch_copies_between_addresses_of_any_kind() {
    context(3);
    let (stream, one, two) = (stream(), allocate(100), allocate(100));
    let (number, address) = pinned();
    number.store(
        u64::from_ne_bytes(*b"pinnedOK"),
        std::sync::atomic::Ordering::Relaxed,
    );
    let pageable = *b"pageable";
    let (to, from, sizes) = (
        [one, one + 8, two],
        [pageable.as_ptr().addr() as u64, address, one],
        [8_usize, 8, 16],
    );
    let attributes = [0_u64; 8];
    let first = [0_usize];
    let mut failed = 77_usize;
    done!(c"cuMemcpyBatchAsync",
        to.as_ptr() => *const u64, from.as_ptr() => *const u64, sizes.as_ptr() => *const usize, 3 => usize,
        attributes.as_ptr().cast() => *const c_void, first.as_ptr() => *const usize, 1 => usize,
        &raw mut failed => *mut usize, stream => *mut c_void);
    done!(c"cuStreamSynchronize", stream => *mut c_void);
    assert_eq!(read(two, 16), b"pageablepinnedOK");
    let from = [one, 0x10, one];
    let wrong = call!(c"cuMemcpyBatchAsync",
        to.as_ptr() => *const u64, from.as_ptr() => *const u64, sizes.as_ptr() => *const usize, 3 => usize,
        attributes.as_ptr().cast() => *const c_void, first.as_ptr() => *const usize, 1 => usize,
        &raw mut failed => *mut usize, std::ptr::null_mut() => *mut c_void);
    assert_eq!(
        (wrong, failed),
        (INVALID_VALUE, usize::MAX),
        "not on the default stream"
    );
    done!(c"cuMemcpyBatchAsync_v2",
        to.as_ptr() => *const u64, to.as_ptr() => *const u64, sizes.as_ptr() => *const usize, 1 => usize,
        attributes.as_ptr().cast() => *const c_void, first.as_ptr() => *const usize, 1 => usize,
        stream => *mut c_void);
    done!(c"cuStreamSynchronize", stream => *mut c_void);
}

#[test]
fn shared_memory_of_the_host_is_registered_and_used() {
    context(4);
    let name =
        std::ffi::CString::new(format!("/dev/shm/cuda-emulator-{}", std::process::id())).unwrap();
    // SAFETY: a file of this test's own, mapped whole.
    let start = unsafe {
        let fd = libc::open(
            name.as_ptr(),
            libc::O_RDWR | libc::O_CREAT | libc::O_EXCL,
            0o600,
        );
        assert!(fd >= 0);
        libc::unlink(name.as_ptr());
        assert_eq!(libc::ftruncate(fd, 8192), 0);
        libc::mmap(
            std::ptr::null_mut(),
            8192,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            fd,
            0,
        )
    };
    assert_ne!(start, libc::MAP_FAILED);
    done!(c"cuMemHostRegister_v2", start => *mut c_void, 8192 => usize, 3 => c_uint);
    let (stream, memory) = (stream(), allocate(8));
    write(memory, b"tomemory");
    // The address of the host is one of the device.
    done!(c"cuMemcpyDtoDAsync_v2", start.addr() as u64 + 100 => u64, memory => u64, 8 => usize, stream => *mut c_void);
    done!(c"cuStreamSynchronize", stream => *mut c_void);
    // SAFETY: mapped, and the copy is done.
    let seen = unsafe { std::slice::from_raw_parts(start.cast::<u8>().add(100), 8) };
    assert_eq!(seen, b"tomemory");
    assert_eq!(attribute::<c_int>(9, start.addr() as u64), Ok(4));
    done!(c"cuMemHostUnregister", start => *mut c_void);
    assert!(attribute::<c_int>(9, start.addr() as u64).is_err());
}

#[test]
fn a_copy_of_pageable_memory_takes_its_bytes_at_the_call() {
    context(5);
    let (stream, flag) = (stream(), pinned());
    for len in [100, 64 << 10, 1 << 20] {
        let memory = allocate(len);
        let mut source = vec![1_u8; len];
        let open = len > 64 << 10;
        flag.0
            .store(u64::from(open), std::sync::atomic::Ordering::Release);
        done!(c"cuStreamWaitValue32_v2", stream => *mut c_void, flag.1 => u64, 1 => u32, 0 => c_uint);
        done!(c"cuMemcpyHtoDAsync_v2", memory => u64, source.as_ptr().cast() => *const c_void, len => usize, stream => *mut c_void);
        source.fill(2);
        flag.0.store(1, std::sync::atomic::Ordering::Release);
        done!(c"cuStreamSynchronize", stream => *mut c_void);
        assert_eq!(read(memory, len), vec![1; len]);
    }
}
