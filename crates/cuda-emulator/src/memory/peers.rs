//! Peer access between the devices of this process, as contexts enable it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use super::span::DeviceOrdinal;
use crate::settings::settings;

/// Returns the number of contexts that have enabled peer access, for each pair of devices.
fn counts() -> &'static [AtomicU32] {
    static COUNTS: OnceLock<Box<[AtomicU32]>> = OnceLock::new();
    COUNTS.get_or_init(|| {
        let devices = settings().devices as usize;
        (0..devices * devices).map(|_| AtomicU32::new(0)).collect()
    })
}

fn count(device: DeviceOrdinal, other: DeviceOrdinal) -> Option<&'static AtomicU32> {
    let devices = settings().devices as usize;
    let (device, other) = (usize::try_from(device).ok()?, usize::try_from(other).ok()?);
    let inside = device < devices && other < devices;
    inside.then(|| &counts()[device * devices + other])
}

/// Counts a context of `device` that enables the use of memory of `other`.
pub fn allow_peer(device: DeviceOrdinal, other: DeviceOrdinal) {
    if let Some(count) = count(device, other) {
        count.fetch_add(1, Ordering::AcqRel);
    }
}

/// Reverts an [`allow_peer`].
pub fn forbid_peer(device: DeviceOrdinal, other: DeviceOrdinal) {
    if let Some(count) = count(device, other) {
        let less = |count: u32| count.checked_sub(1);
        let _ = count.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
    }
}

/// Whether `device` may use memory of `other`.
pub(super) fn may_use(device: DeviceOrdinal, other: DeviceOrdinal) -> bool {
    device == other || count(device, other).is_some_and(|count| count.load(Ordering::Acquire) > 0)
}
