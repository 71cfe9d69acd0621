//! The devices visible to this process: `CUDA_VISIBLE_DEVICES`, read once, as CUDA reads it.
//!
//! Everywhere else a device is its index in that list; only the properties that distinguish the devices of
//! a host (UUID, bus, NVML's number) use the number in the list.

use std::ffi::c_int;
use std::hash::{Hash, Hasher};
use std::sync::OnceLock;

use crate::settings::settings;

const VARIABLE: &str = "CUDA_VISIBLE_DEVICES";

/// The numbers of the visible devices on this host, in this process's order.
fn visible() -> &'static [u32] {
    static VISIBLE: OnceLock<Vec<u32>> = OnceLock::new();
    VISIBLE.get_or_init(|| {
        let all = settings().devices;
        match std::env::var(VARIABLE) {
            Ok(list) => chosen(&list, all, |device| text(uuid(device))),
            Err(_) => (0..all).collect(),
        }
    })
}

/// Returns the number of visible devices.
pub fn count() -> u32 {
    visible().len() as u32
}

/// Returns the number on this host of a device of this process.
pub fn physical(device: u32) -> u32 {
    visible().get(device as usize).copied().unwrap_or(device)
}

/// Returns this process's ordinal of a device of this host.
pub(crate) fn ordinal(physical: u32) -> Option<c_int> {
    let place = visible().iter().position(|&device| device == physical)?;
    c_int::try_from(place).ok()
}

/// Returns the devices of a list of numbers or unique prefixes of UUIDs. Entries from the first unknown device on
/// do not count, and a list that names a device twice names none.
fn chosen(list: &str, all: u32, uuid: impl Fn(u32) -> String) -> Vec<u32> {
    let device = |word: &str| -> Option<u32> {
        if word.to_ascii_uppercase().starts_with("GPU-") {
            let is_it = |&device: &u32| {
                let name = uuid(device);
                name.get(..word.len())
                    .is_some_and(|start| start.eq_ignore_ascii_case(word))
            };
            let mut found = (0..all).filter(is_it);
            return found.next().filter(|_| found.next().is_none());
        }
        word.parse().ok().filter(|&device| device < all)
    };
    let devices: Vec<u32> = list
        .split(',')
        .map_while(|word| device(word.trim()))
        .collect();
    let repeated = |(at, device): (usize, &u32)| devices[..at].contains(device);
    if devices.iter().enumerate().any(repeated) {
        return Vec::new();
    }
    devices
}

/// Returns the UUID of a device by its number on this host, the same in any process of this host and boot.
pub fn uuid(device: u32) -> [u8; 16] {
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let host = std::fs::read("/proc/sys/kernel/hostname").unwrap_or_default();
    let half = |salt: u8| {
        // `DefaultHasher::new` has fixed keys. Another release of Rust may hash otherwise: the
        // processes of one job are built alike.
        let mut hasher = std::hash::DefaultHasher::new();
        ("nccl-emulator", salt, &boot, &host, device).hash(&mut hasher);
        hasher.finish().to_le_bytes()
    };
    let mut uuid = [0; 16];
    uuid[..8].copy_from_slice(&half(0));
    uuid[8..].copy_from_slice(&half(1));
    // A UUID of version 8 (vendor's own), variant 1.
    uuid[6] = uuid[6] & 0x0f | 0x80;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    uuid
}

/// Formats a UUID as `nvidia-smi` does: `GPU-8e2f…`.
pub(crate) fn text(uuid: [u8; 16]) -> String {
    let mut text = String::from("GPU");
    for (at, byte) in uuid.iter().enumerate() {
        if matches!(at, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_eight(list: &str) -> Vec<u32> {
        chosen(list, 8, |device| format!("GPU-{device}{device}aa-{device}"))
    }

    #[test]
    fn a_list_chooses_and_orders_devices() {
        assert_eq!(of_eight("2, 0,7"), [2, 0, 7]);
        assert_eq!(of_eight("gpu-33AA,5"), [3, 5]);
    }

    #[test]
    fn a_list_ends_at_what_there_is_not() {
        for (list, devices) in [
            ("", &[][..]),
            ("-1", &[]),
            ("8", &[]),
            ("1,8,2", &[1]),
            ("1,,2", &[1]),
            ("1,NoDevFiles", &[1]),
            ("GPU-9", &[]),
            ("GPU-", &[]),
            ("1,2,1", &[]),
        ] {
            assert_eq!(of_eight(list), devices, "{list:?}");
        }
    }

    #[test]
    fn a_uuid_is_written_as_tools_write_it() {
        let uuid = [0x8e, 0x2f, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13];
        assert_eq!(text(uuid), "GPU-8e2f0001-0203-0405-0607-08090a0b0c0d");
    }
}
