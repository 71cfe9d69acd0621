//! Memory that one process allocates and another opens: legacy CUDA IPC.

mod common;

use std::ffi::{c_int, c_uint, c_void};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};

use common::*;
use cuda_emulator::memory::access;

#[derive(Clone, Copy)]
#[repr(C)]
struct Handle([u8; 64]);

fn handle_of(address: u64) -> Result<Handle, u32> {
    let mut handle = Handle([0; 64]);
    match call!(c"cuIpcGetMemHandle", &raw mut handle => *mut Handle, address => u64) {
        SUCCESS => Ok(handle),
        error => Err(error),
    }
}

fn open(handle: Handle) -> Result<u64, u32> {
    let mut address = 0;
    match call!(c"cuIpcOpenMemHandle_v2", &raw mut address => *mut u64, handle => Handle, 1 => c_uint)
    {
        SUCCESS => Ok(address),
        error => Err(error),
    }
}

fn close(address: u64) -> u32 {
    call!(c"cuIpcCloseMemHandle", address => u64)
}

fn to_text(handle: Handle) -> String {
    handle.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_text(text: &str) -> Handle {
    let mut handle = Handle([0; 64]);
    for (at, byte) in handle.0.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap();
    }
    handle
}

#[test]
fn another_process_uses_the_memory_until_it_closes_it() {
    context(1);
    for size in [5000, 3 << 20] {
        let memory = allocate(size);
        write(memory + 11, b"question");
        // A handle stands for the whole allocation.
        let handle = handle_of(memory + 11).unwrap();
        let mut peer = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_opener_of_another_test", "--nocapture"])
            .env(JOB, to_text(handle))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(peer.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("answered") {
            line.clear();
            assert_ne!(
                said.read_line(&mut line).unwrap(),
                0,
                "the peer ended early"
            );
        }
        assert_eq!(read(memory + 11, 8), b"answered");
        done!(c"cuMemFree_v2", memory => u64);
        // The owner's new allocations do not overlap the memory that the peer has open.
        let others = [0; 80].map(|_| allocate(3 << 20));
        assert!(!others.contains(&memory));
        for other in others {
            done!(c"cuMemFree_v2", other => u64);
        }
        peer.stdin.take().unwrap().write_all(b"freed\n").unwrap();
        let mut rest = String::new();
        said.read_to_string(&mut rest).unwrap();
        assert!(peer.wait().unwrap().success(), "{rest}");
    }
}

/// Not a test: the other process of the test above.
#[test]
fn the_opener_of_another_test() {
    let Ok(job) = std::env::var(JOB) else { return };
    context(2);
    let handle = from_text(&job);
    let address = open(handle).unwrap();
    assert_eq!(open(handle), Ok(address), "one address for a context");
    assert_eq!(close(address), SUCCESS);
    assert_eq!(read(address + 11, 8), b"question");
    assert_eq!(
        attribute::<c_uint>(2, address + 4999),
        Ok(2),
        "device memory"
    );
    assert_eq!(attribute::<u64>(11, address + 4999), Ok(address));
    assert_eq!(handle_of(address).err(), Some(INVALID_VALUE));
    let there = access(2, address + 11, 8).unwrap();
    let refused = access(3, address + 11, 8).unwrap_err().to_string();
    assert!(refused.contains("device 3 has no access"), "{refused}");
    write(address + 11, b"answered");
    println!("answered");
    let mut word = String::new();
    std::io::stdin().read_line(&mut word).unwrap();
    there.still_valid().unwrap();
    assert_eq!(read(address + 11, 8), b"answered");
    assert_eq!(open(handle), Ok(address), "open already");
    assert_eq!(close(address), SUCCESS);
    assert_eq!(close(address), SUCCESS);
    assert_eq!(close(address), INVALID_VALUE);
    let closed = there.still_valid().unwrap_err().to_string();
    assert!(closed.contains("cuIpcCloseMemHandle"), "{closed}");
    assert_eq!(open(handle), Err(INVALID_VALUE), "freed");
}

#[test]
fn what_cannot_be_opened_says_so() {
    context(0);
    let memory = allocate(100);
    let mut handle = handle_of(memory).unwrap();
    assert_eq!(open(handle), Err(INVALID_CONTEXT), "the memory is our own");
    // The number of a process that does not exist.
    handle.0[8..12].copy_from_slice(&i32::MAX.to_ne_bytes());
    handle.0[16] ^= 1;
    assert_eq!(open(handle), Err(INVALID_VALUE));
    assert_eq!(open(Handle([7; 64])), Err(INVALID_VALUE));
    let mut pinned = std::ptr::null_mut::<c_void>();
    done!(c"cuMemHostAlloc", &raw mut pinned => *mut *mut c_void, 100 => usize, 0 => c_uint);
    assert_eq!(handle_of(pinned.addr() as u64).err(), Some(INVALID_VALUE));
    let mut device: c_int = -1;
    done!(c"cuCtxGetDevice", &raw mut device => *mut c_int);
    assert_eq!(device, 0);
}
