//! Virtual memory management: memory without addresses, addresses without memory, and mappings of one to the other.

mod common;

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::process::Stdio;

use common::*;
use cuda_emulator::memory::access;
use nccl_emulator::ViolationKind;

const MIB: usize = 1 << 20;
const DEVICE: c_int = 1;
const HOST_NUMA: c_int = 3;

#[derive(Clone, Copy)]
#[repr(C)]
struct Location {
    kind: c_int,
    id: c_int,
}

#[repr(C)]
struct Properties {
    kind: c_int,
    handle_types: c_uint,
    location: Location,
    windows: *mut c_void,
    flags: [u8; 8],
}

#[repr(C)]
struct Grant {
    location: Location,
    flags: c_uint,
}

fn properties(kind: c_int, id: c_int) -> Properties {
    Properties {
        kind: 1,
        handle_types: 1,
        location: Location { kind, id },
        windows: std::ptr::null_mut(),
        flags: [0; 8],
    }
}

fn create(size: usize, kind: c_int, id: c_int) -> u64 {
    let mut handle = 0;
    done!(c"cuMemCreate", &raw mut handle => *mut u64, size => usize, &properties(kind, id) => &Properties, 0 => c_ulonglong);
    handle
}

fn reserve(size: usize) -> u64 {
    let mut address = 0;
    done!(c"cuMemAddressReserve", &raw mut address => *mut u64, size => usize, 0 => usize, 0 => u64, 0 => c_ulonglong);
    address
}

fn map(address: u64, size: usize, handle: u64) -> u32 {
    call!(c"cuMemMap", address => u64, size => usize, 0 => usize, handle => u64, 0 => c_ulonglong)
}

fn grant(address: u64, size: usize, kind: c_int, id: c_int) -> u32 {
    let grant = Grant {
        location: Location { kind, id },
        flags: 3,
    };
    call!(c"cuMemSetAccess", address => u64, size => usize, &raw const grant => *const Grant, 1 => usize)
}

fn unmap(address: u64, size: usize) -> u32 {
    call!(c"cuMemUnmap", address => u64, size => usize)
}

fn release(handle: u64) -> u32 {
    call!(c"cuMemRelease", handle => u64)
}

fn unreserve(address: u64, size: usize) -> u32 {
    call!(c"cuMemAddressFree", address => u64, size => usize)
}

#[test]
fn memory_is_there_from_the_grant_to_the_unmapping() {
    context(0);
    let (handle, address) = (create(2 * MIB, DEVICE, 0), reserve(4 * MIB));
    assert_eq!(
        access(0, address, 1).unwrap_err().kind(),
        ViolationKind::UnknownAddress
    );
    assert_eq!(map(address, 2 * MIB, handle), SUCCESS);
    assert_eq!(
        map(address, 2 * MIB, handle),
        INVALID_VALUE,
        "mapped already"
    );
    let early = access(0, address, 1).unwrap_err().to_string();
    assert!(early.contains("cuMemSetAccess"), "{early}");
    assert_eq!(grant(address, 2 * MIB, DEVICE, 0), SUCCESS);
    write(address + 5, b"bytes");
    assert_eq!(read(address + 5, 5), b"bytes");
    let late = access(0, address + 5, 5).unwrap();
    assert_eq!(
        unreserve(address, 4 * MIB),
        INVALID_VALUE,
        "something is mapped"
    );
    assert_eq!(unmap(address, MIB), INVALID_VALUE, "half a mapping");
    assert_eq!(unmap(address, 2 * MIB), SUCCESS);
    let violation = late.still_valid().unwrap_err();
    assert_eq!(violation.kind(), ViolationKind::UseAfterFree);
    // SAFETY: the memory stays mapped for work that uses it.
    assert_eq!(unsafe { late.pointer.read() }, b'b');
    let after = access(0, address + 5, 5).unwrap_err();
    assert_eq!(after.kind(), ViolationKind::UseAfterFree, "{after}");
    assert_eq!(release(handle), SUCCESS);
    assert_eq!(release(handle), INVALID_VALUE);
    assert_eq!(unreserve(address, 4 * MIB), SUCCESS);
}

#[test]
fn a_range_over_adjacent_mappings_is_one_piece_of_memory() {
    context(1);
    let handles = [create(2 * MIB, DEVICE, 1), create(4 * MIB, DEVICE, 1)];
    let address = reserve(8 * MIB);
    assert_eq!(map(address, 2 * MIB, handles[0]), SUCCESS);
    assert_eq!(map(address + 2 * MIB as u64, 4 * MIB, handles[1]), SUCCESS);
    assert_eq!(grant(address, 6 * MIB, DEVICE, 1), SUCCESS);
    let bytes: Vec<u8> = (0..6 * MIB).map(|i| (i / 999) as u8).collect();
    write(address, &bytes);
    assert_eq!(read(address, 6 * MIB), bytes);
    let whole = access(1, address, 6 * MIB as u64).unwrap();
    // SAFETY: as many bytes are mapped.
    let seen = unsafe { std::slice::from_raw_parts(whole.pointer, 6 * MIB) };
    assert_eq!(seen, bytes);
    let beyond = access(1, address + 1, 6 * MIB as u64).unwrap_err();
    assert_eq!(beyond.kind(), ViolationKind::OutOfBounds);
    assert!(beyond.to_string().contains("1 bytes past"), "{beyond}");
    assert_eq!(unmap(address, 6 * MIB), SUCCESS);
    assert!(handles.map(release).iter().all(|&code| code == SUCCESS));
}

#[test]
fn the_host_cannot_read_device_memory_at_its_address() {
    context(0);
    let (handle, address) = (create(2 * MIB, DEVICE, 0), reserve(2 * MIB));
    assert_eq!(map(address, 2 * MIB, handle), SUCCESS);
    assert_eq!(grant(address, 2 * MIB, DEVICE, 0), SUCCESS);
    assert_eq!(grant(address, 2 * MIB, HOST_NUMA, 0), NOT_SUPPORTED);
    // The kernel cannot read these addresses either.
    let place = std::ptr::with_exposed_provenance::<c_void>(address as usize);
    // SAFETY: a descriptor that is none; the memory is looked at first.
    let written = unsafe { libc::syscall(libc::SYS_memfd_create, place, 0) };
    assert_eq!(written, -1);
    assert_eq!(
        std::io::Error::last_os_error().raw_os_error(),
        Some(libc::EFAULT)
    );
}

#[test]
fn memory_of_the_host_is_used_at_its_own_address() {
    context(2);
    let (handle, address) = (create(2 * MIB, HOST_NUMA, 0), reserve(2 * MIB));
    assert_eq!(map(address, 2 * MIB, handle), SUCCESS);
    assert_eq!(grant(address, 2 * MIB, DEVICE, 2), SUCCESS);
    assert_eq!(grant(address, 2 * MIB, HOST_NUMA, 0), SUCCESS);
    let place = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
    // SAFETY: mapped, and the host has access.
    unsafe { place.write(42) };
    let seen = access(2, address, 1).unwrap();
    // SAFETY: mapped while `seen` lives.
    assert_eq!(unsafe { seen.pointer.read() }, 42);
    access(3, address, 1).unwrap_err();
    assert_eq!(attribute::<c_uint>(2, address), Ok(1), "host memory");
    assert_eq!(attribute::<u64>(4, address), Ok(address));
}

#[test]
fn a_handle_is_one_for_all_who_retain_it() {
    context(0);
    let (handle, address) = (create(2 * MIB, DEVICE, 0), reserve(2 * MIB));
    assert_eq!(map(address, 2 * MIB, handle), SUCCESS);
    let retain = || {
        let mut again = 0_u64;
        done!(c"cuMemRetainAllocationHandle", &raw mut again => *mut u64, (address + 77) as *mut c_void => *mut c_void);
        again
    };
    assert_eq!(retain(), handle);
    assert_eq!(release(handle), SUCCESS);
    assert_eq!(release(handle), SUCCESS);
    assert_eq!(release(handle), INVALID_VALUE, "nobody holds it");
    let new = retain();
    assert_ne!(new, handle, "the memory is there while it is mapped");
    let mut found = properties(0, 0);
    done!(c"cuMemGetAllocationPropertiesFromHandle", &raw mut found => *mut Properties, new => u64);
    assert_eq!((found.location.kind, found.location.id), (DEVICE, 0));
    assert_eq!(release(new), SUCCESS);
    assert_eq!(unmap(address, 2 * MIB), SUCCESS);
}

#[test]
fn memory_counts_against_its_device() {
    context(5);
    let free = || {
        let (mut free, mut total) = (0_usize, 0_usize);
        done!(c"cuMemGetInfo_v2", &raw mut free => *mut usize, &raw mut total => *mut usize);
        (free, total)
    };
    let (before, total) = free();
    let handle = create(6 * MIB, DEVICE, 5);
    assert_eq!(free().0, before - 6 * MIB);
    let mut none = 0_u64;
    let all = call!(c"cuMemAlloc_v2", &raw mut none => *mut u64, total - 4 * MIB => usize);
    assert_eq!(all, OUT_OF_MEMORY);
    assert_eq!(release(handle), SUCCESS);
    assert_eq!(free().0, before);
}

#[test]
fn an_address_in_mapped_memory_is_told_from_another() {
    context(3);
    let (handle, address) = (create(4 * MIB, DEVICE, 3), reserve(4 * MIB));
    assert_eq!(map(address, 4 * MIB, handle), SUCCESS);
    let inside = address + 12_345;
    assert_eq!(attribute::<c_uint>(2, inside), Ok(2), "device memory");
    assert_eq!(attribute::<c_int>(9, inside), Ok(3), "its device");
    assert_eq!(attribute::<u64>(11, inside), Ok(address), "its start");
    assert_eq!(attribute::<c_uint>(10, inside), Ok(0), "no legacy IPC");
    assert_eq!(attribute::<u64>(14, inside), Ok(1), "as a descriptor");
    assert_eq!(attribute::<u64>(17, inside), Ok(0), "of no pool");
    let other = allocate(100);
    assert_ne!(attribute::<u64>(7, inside), attribute::<u64>(7, other));
    assert_eq!(attribute::<c_uint>(10, other), Ok(1), "legacy IPC");
    assert_eq!(attribute::<u64>(14, other), Ok(0));
    let on = 1_u32;
    done!(c"cuPointerSetAttribute", (&raw const on).cast() => *const c_void, 6 => c_int, other => u64);
    assert_eq!(attribute::<c_uint>(6, other), Ok(1));
    assert_eq!(attribute::<c_uint>(6, inside), Ok(0));
    assert!(attribute::<u64>(99, inside).is_err());
    let (mut start, mut size) = (0_u64, 0_usize);
    done!(c"cuMemGetAddressRange_v2", &raw mut start => *mut u64, &raw mut size => *mut usize, inside => u64);
    assert_eq!((start, size), (address, 4 * MIB));
}

fn export(handle: u64) -> OwnedFd {
    let mut fd: c_int = -1;
    done!(c"cuMemExportToShareableHandle", &raw mut fd => *mut c_int, handle => u64, 1 => c_uint, 0 => c_ulonglong);
    // SAFETY: the descriptor is the caller's.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn import(fd: c_int) -> Result<u64, u32> {
    let mut handle = 0_u64;
    match call!(c"cuMemImportFromShareableHandle", &raw mut handle => *mut u64, fd as usize as *mut c_void => *mut c_void, 1 => c_uint)
    {
        SUCCESS => Ok(handle),
        error => Err(error),
    }
}

#[test]
fn another_process_reads_and_writes_what_was_exported() {
    context(1);
    for (kind, id) in [(DEVICE, 1), (HOST_NUMA, 0)] {
        let (handle, address) = (create(2 * MIB, kind, id), reserve(2 * MIB));
        assert_eq!(map(address, 2 * MIB, handle), SUCCESS);
        assert_eq!(grant(address, 2 * MIB, DEVICE, 1), SUCCESS);
        write(address + 9, b"question");
        let output = child(
            "the_importer_of_another_test",
            "import",
            Stdio::from(export(handle)),
        );
        assert!(output.status.success(), "{output:?}");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            said.contains(&format!("location {kind} {id} question")),
            "{said}"
        );
        assert_eq!(read(address + 9, 8), b"answered");
    }
}

/// Not a test: the other process of the test above.
#[test]
fn the_importer_of_another_test() {
    if std::env::var_os(JOB).is_none() {
        return;
    }
    context(4);
    let own = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let handle = import(0).unwrap();
    drop(own);
    let mut found = properties(0, 0);
    done!(c"cuMemGetAllocationPropertiesFromHandle", &raw mut found => *mut Properties, handle => u64);
    let address = reserve(2 * MIB);
    assert_eq!(map(address, 2 * MIB, handle), SUCCESS);
    access(4, address, 1).unwrap_err();
    assert_eq!(grant(address, 2 * MIB, DEVICE, 4), SUCCESS);
    let text = String::from_utf8(read(address + 9, 8)).unwrap();
    println!(
        "location {} {} {text}",
        found.location.kind, found.location.id
    );
    write(address + 9, b"answered");
}

#[test]
fn a_foreign_descriptor_is_not_imported() {
    context(0);
    let null = std::fs::File::open("/dev/null").unwrap();
    use std::os::fd::AsRawFd;
    assert_eq!(import(null.as_raw_fd()), Err(INVALID_VALUE));
    assert_eq!(import(100_000), Err(INVALID_VALUE));
}
