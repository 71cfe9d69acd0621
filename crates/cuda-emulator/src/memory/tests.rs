use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::Arc;

use super::*;

fn kind<T: std::fmt::Debug>(result: Result<T, Violation>) -> ViolationKind {
    result.unwrap_err().kind()
}

#[test]
fn a_range_is_found_from_any_address_inside_it() {
    for size in [
        1,
        100,
        4096,
        4097,
        1 << 20,
        (2 << 20) - 1,
        2 << 20,
        (5 << 20) + 3,
    ] {
        let start = allocate(0, size).unwrap();
        assert_eq!(start % 4096, 0);
        let (device, span) = resolve(start, size).unwrap();
        assert_eq!((device, span.len), (0, size));
        for at in [0, 1, size / 2, size - 1] {
            let (_, inner) = resolve(start + at, size - at).unwrap();
            assert_eq!(
                (inner.index, inner.generation),
                (span.index, span.generation)
            );
            assert_eq!(inner.offset, span.offset + at);
            assert_eq!(
                kind(resolve(start + at, size - at + 1)),
                ViolationKind::OutOfBounds
            );
        }
        assert_eq!(range(start + size - 1), Some((0, start, size)));
        free(start).unwrap();
    }
}

#[test]
fn freed_memory_is_named_by_resolve_view_and_still_valid() {
    let start = allocate(0, 5000).unwrap();
    let (_, span) = resolve(start + 8, 16).unwrap();
    let mapping = Arc::clone(pool(0).unwrap().mapping());
    mapping.view(&span).unwrap();
    mapping.still_valid(&span).unwrap();
    free(start).unwrap();
    for violation in [
        resolve(start + 8, 16).unwrap_err(),
        mapping.view(&span).unwrap_err(),
        mapping.still_valid(&span).unwrap_err(),
    ] {
        assert_eq!(violation.kind(), ViolationKind::UseAfterFree);
        let allocation = violation.allocation().unwrap();
        assert_eq!((allocation.number, allocation.device), (span.generation, 0));
        assert_eq!((allocation.size, allocation.freed), (Some(5000), true));
        let text = violation.to_string();
        assert!(
            text.contains(&format!("allocation #{}", span.generation)),
            "{text}"
        );
        assert!(
            text.contains("offset 8") && text.contains("5000 bytes") && text.contains("freed"),
            "{text}"
        );
    }
}

#[test]
fn a_span_is_not_taken_for_the_next_allocation_at_its_place() {
    // One device of its own: nothing else moves the quarantine on.
    let start = allocate(4, 100 << 20).unwrap();
    let (_, old) = resolve(start, 100 << 20).unwrap();
    free(start).unwrap();
    let mut taken = Vec::new();
    let again = loop {
        let next = allocate(4, 100 << 20).unwrap();
        if next == start {
            break next;
        }
        taken.push(next);
        let other = taken.remove(0);
        free(other).unwrap();
        assert!(taken.len() < 1000);
    };
    let mapping = pool(4).unwrap().mapping();
    assert_eq!(kind(mapping.view(&old)), ViolationKind::UseAfterFree);
    let (_, new) = resolve(again, 1).unwrap();
    mapping.view(&new).unwrap();
    assert_ne!(old.generation, new.generation);
}

#[test]
fn frees_of_the_wrong_address_are_refused() {
    let start = allocate(0, 100).unwrap();
    assert_eq!(kind(free(start + 8)), ViolationKind::InvalidFree);
    free(start).unwrap();
    let twice = free(start).unwrap_err();
    assert_eq!(twice.kind(), ViolationKind::InvalidFree);
    assert!(twice.to_string().contains("twice"), "{twice}");
    let host = 7_u8;
    assert_eq!(
        kind(free((&raw const host).addr() as u64)),
        ViolationKind::UnknownAddress
    );
}

#[test]
fn host_memory_is_told_from_device_memory() {
    let host = [0_u8; 64];
    assert_eq!(
        kind(resolve(host.as_ptr().addr() as u64, 64)),
        ViolationKind::UnknownAddress
    );
    let pinned = allocate_host(64, 0, 0).unwrap().addr();
    let violation = resolve(pinned as u64, 64).unwrap_err();
    assert_eq!(violation.kind(), ViolationKind::HostMemory);
    free_host(pinned).unwrap();
}

#[test]
fn a_range_without_bytes_is_always_fine() {
    let (_, span) = resolve(0, 0).unwrap();
    pool(0).unwrap().mapping().view(&span).unwrap();
    let start = allocate(0, 10).unwrap();
    resolve(start + 10, 0).unwrap();
    free(start).unwrap();
    resolve(start, 0).unwrap();
}

#[test]
fn memory_of_a_stream_is_usable_when_the_stream_gets_there() {
    let pool = pool(0).unwrap();
    let placement = pool.allocate(64, NO_OWNER, true).unwrap();
    let (_, span) = resolve(placement.address, 64).unwrap();
    assert_eq!(
        kind(pool.mapping().view(&span)),
        ViolationKind::UseBeforeAllocation
    );
    pool.reached(placement);
    pool.mapping().view(&span).unwrap();
    let freeing = begin_free(placement.address).unwrap();
    pool.mapping().view(&span).unwrap();
    assert_eq!(
        kind(begin_free(placement.address)),
        ViolationKind::InvalidFree
    );
    freeing.finish();
    assert_eq!(
        kind(pool.mapping().view(&span)),
        ViolationKind::UseAfterFree
    );
}

#[test]
fn all_memory_can_be_allocated_freed_and_allocated_again() {
    let device = 5;
    let (free_bytes, total) = pool(device).unwrap().usage();
    assert_eq!(free_bytes, total);
    for _ in 0..3 {
        let whole = allocate(device, total).unwrap();
        assert_eq!(allocate(device, 1), Err(CUresult::ERROR_OUT_OF_MEMORY));
        assert_eq!(pool(device).unwrap().usage().0, 0);
        free(whole).unwrap();
        assert_eq!(pool(device).unwrap().usage().0, total);
    }
    assert_eq!(
        allocate(device, total + 1),
        Err(CUresult::ERROR_OUT_OF_MEMORY)
    );
    assert_eq!(allocate(device, 0), Err(CUresult::ERROR_INVALID_VALUE));
}

#[test]
fn new_memory_is_not_zero() {
    let start = allocate(0, 256).unwrap();
    let (_, span) = resolve(start, 256).unwrap();
    let at = pool(0).unwrap().mapping().view(&span).unwrap();
    // SAFETY: the span was just found usable; only this test knows it.
    let bytes = unsafe { std::slice::from_raw_parts(at, 256) };
    assert!(bytes.iter().any(|&byte| byte != 0));
    free(start).unwrap();
}

#[test]
fn memory_of_a_context_goes_with_it() {
    let device = 6;
    let pool = pool(device).unwrap();
    let before = pool.usage().0;
    let (owned, other) = (4242, 4243);
    let mine = pool.allocate(1 << 20, owned, false).unwrap();
    let theirs = pool.allocate(1 << 20, other, false).unwrap();
    free_all_of(device, owned);
    assert_eq!(kind(resolve(mine.address, 1)), ViolationKind::UseAfterFree);
    resolve(theirs.address, 1).unwrap();
    free_all_of(device, other);
    assert_eq!(pool.usage().0, before);
}

#[test]
fn the_token_of_an_own_pool_gives_its_own_mapping() {
    let pool = pool(0).unwrap();
    let fd = pool.fd().try_clone_to_owned().unwrap();
    let mapping = import(fd, pool.token()).unwrap();
    assert!(Arc::ptr_eq(&mapping, pool.mapping()));
}

#[test]
fn what_is_no_pool_is_not_mapped() {
    let pool = pool(0).unwrap();
    let wrong = import(pool.fd().try_clone_to_owned().unwrap(), pool.token() ^ 1).unwrap_err();
    assert!(wrong.to_string().contains("token"), "{wrong}");
    let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    assert!(import(null, 1).is_err());
    // SAFETY: a new descriptor.
    let empty = unsafe {
        use std::os::fd::FromRawFd;
        OwnedFd::from_raw_fd(libc::memfd_create(
            c"empty".as_ptr(),
            libc::MFD_ALLOW_SEALING,
        ))
    };
    assert!(import(empty, 1).is_err());
}

/// In the environment of the child that plays the peer: token and span of what it shall read.
const PEER: &str = "NCCL_EMULATOR_TEST_PEER";

/// Runs [`the_peer_of_another_test`] in a process that has the pool's descriptor as its standard
/// input.
fn peer(order: &str, span: &Span) -> String {
    let pool = pool(0).unwrap();
    let job = format!(
        "{order} {} {} {} {} {}",
        pool.token(),
        span.index,
        span.generation,
        span.offset,
        span.len
    );
    let output = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "memory::tests::the_peer_of_another_test",
            "--nocapture",
        ])
        .env(PEER, job)
        .stdin(Stdio::from(pool.fd().try_clone_to_owned().unwrap()))
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Not a test but the other process of the two below.
#[test]
fn the_peer_of_another_test() {
    let Ok(job) = std::env::var(PEER) else { return };
    let words: Vec<_> = job.split(' ').collect();
    let number = |index: usize| words[index].parse::<u64>().unwrap();
    let fd = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let token = words[1].parse().unwrap();
    let mapping = import(fd, token).unwrap();
    let again = import(
        std::io::stdin().as_fd().try_clone_to_owned().unwrap(),
        token,
    )
    .unwrap();
    assert!(Arc::ptr_eq(&mapping, &again), "mapped once");
    let span = Span {
        index: number(2) as u32,
        generation: number(3) as u32,
        offset: number(4),
        len: number(5),
    };
    match mapping.view(&span) {
        Ok(at) => {
            // SAFETY: the span is usable, and the parent waits for this process.
            let bytes = unsafe { std::slice::from_raw_parts_mut(at, span.len as usize) };
            println!(
                "read {}",
                bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>()
            );
            bytes.fill(2);
            mapping.still_valid(&span).unwrap();
        }
        Err(violation) => println!("violation {violation}"),
    }
}

#[test]
fn a_peer_process_reads_and_writes_the_same_memory() {
    let start = allocate(0, 10_000).unwrap();
    let (_, span) = resolve(start + 10, 1000).unwrap();
    let at = pool(0).unwrap().mapping().view(&span).unwrap();
    // SAFETY: usable, and only this test has it now.
    unsafe { at.write_bytes(1, 1000) };
    let said = peer("read", &span);
    assert!(said.contains("read 1000"), "{said}");
    // SAFETY: the peer has ended.
    let bytes = unsafe { std::slice::from_raw_parts(at, 1000) };
    assert!(bytes.iter().all(|&byte| byte == 2));
    free(start).unwrap();
}

#[test]
fn a_peer_that_reads_freed_memory_is_told_the_allocation() {
    let start = allocate(0, 10_000).unwrap();
    let (_, span) = resolve(start + 10, 1000).unwrap();
    free(start).unwrap();
    let said = peer("read", &span);
    let wanted = format!(
        "1000 bytes at offset 10 of allocation #{} (10000 bytes on GPU 0 of process {}) were used, but it was freed",
        span.generation,
        std::process::id()
    );
    assert!(said.contains(&wanted), "{said}\n{wanted}");
}

#[test]
fn a_peer_that_reads_out_of_bounds_is_told_by_how_much() {
    let start = allocate(0, 10_000).unwrap();
    let (_, mut span) = resolve(start, 10_000).unwrap();
    span.len += 24;
    let said = peer("read", &span);
    assert!(said.contains("24 bytes past its end"), "{said}");
    free(start).unwrap();
}

/// Prints what a check costs:
/// `cargo test --release -p cuda-emulator --lib -- --ignored --nocapture what_a_check_costs`.
#[test]
#[ignore = "a measurement"]
fn what_a_check_costs() {
    let starts: Vec<_> = (0..64).map(|_| allocate(0, 1 << 20).unwrap()).collect();
    let mapping = pool(0).unwrap().mapping();
    let median = |name: &str, body: &dyn Fn(usize)| {
        let mut samples: Vec<_> = (0..101)
            .map(|_| {
                let start = std::time::Instant::now();
                (0..1000).for_each(body);
                start.elapsed().as_nanos() as f64 / 1000.0
            })
            .collect();
        samples.sort_by(f64::total_cmp);
        println!("{name}: median {:.1} ns", samples[50]);
    };
    let spans: Vec<_> = starts
        .iter()
        .map(|&at| resolve(at + 64, 4096).unwrap().1)
        .collect();
    median("resolve", &|i| {
        std::hint::black_box(resolve(starts[i % 64] + 64, 4096).unwrap());
    });
    median("view", &|i| {
        std::hint::black_box(mapping.view(&spans[i % 64]).unwrap());
    });
    median("still_valid", &|i| {
        mapping
            .still_valid(std::hint::black_box(&spans[i % 64]))
            .unwrap()
    });
    starts.into_iter().for_each(|start| free(start).unwrap());
}
