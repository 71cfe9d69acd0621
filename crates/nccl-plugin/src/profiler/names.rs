//! The names that NCCL gives to functions, algorithms and protocols, as indices: NCCL's strings may disappear with its
//! library.

use std::ffi::{CStr, c_char};

/// The first entry stands for every other name.
pub(super) static FUNCTIONS: [&str; 12] = [
    "an operation",
    "AllGather",
    "AllReduce",
    "AlltoAll",
    "Broadcast",
    "Gather",
    "Reduce",
    "ReduceScatter",
    "Scatter",
    "Send",
    "Recv",
    "SendRecv",
];
pub(super) static ALGORITHMS: [&str; 8] = [
    "",
    "TREE",
    "RING",
    "COLLNET_DIRECT",
    "COLLNET_CHAIN",
    "NVLS",
    "NVLS_TREE",
    "PAT",
];
pub(super) static PROTOCOLS: [&str; 4] = ["", "LL", "LL128", "SIMPLE"];

/// Bytes of an element, by the name of its type.
static ELEMENTS: [(&str, u8); 12] = [
    ("ncclInt8", 1),
    ("ncclUint8", 1),
    ("ncclInt32", 4),
    ("ncclUint32", 4),
    ("ncclInt64", 8),
    ("ncclUint64", 8),
    ("ncclFloat16", 2),
    ("ncclFloat32", 4),
    ("ncclFloat64", 8),
    ("ncclBfloat16", 2),
    ("ncclFloat8e4m3", 1),
    ("ncclFloat8e5m2", 1),
];

/// Returns the bytes of an element; 0 for a type that is not known.
///
/// # Safety
/// `name` is null or a C string.
pub(super) unsafe fn element_size(name: *const c_char) -> u8 {
    if name.is_null() {
        return 0;
    }
    // SAFETY: guaranteed by the caller.
    let name = unsafe { CStr::from_ptr(name) }.to_bytes();
    let found = ELEMENTS.iter().find(|(one, _)| one.as_bytes() == name);
    found.map_or(0, |(_, bytes)| *bytes)
}

/// The function numbers of version 1 (`ncclFunc_t`), as indices of [`FUNCTIONS`].
static FUNCTIONS_V1: [u8; 8] = [4, 6, 1, 7, 2, 11, 9, 10];

/// Returns the index of a name.
///
/// # Safety
/// `name` is null or a C string.
pub(super) unsafe fn index(names: &[&str], name: *const c_char) -> u8 {
    if name.is_null() {
        return 0;
    }
    // SAFETY: guaranteed by the caller.
    let name = unsafe { CStr::from_ptr(name) }.to_bytes();
    let found = names.iter().position(|one| one.as_bytes() == name);
    found.unwrap_or(0) as u8
}

pub(super) fn function_v1(number: u8) -> u8 {
    FUNCTIONS_V1.get(usize::from(number)).copied().unwrap_or(0)
}

/// Returns the index of a version 1 number in a table of names, whose first entry has no number.
pub(super) fn number_v1(names: &[&str], number: u8) -> u8 {
    let index = usize::from(number) + 1;
    if index < names.len() { index as u8 } else { 0 }
}
