//! The name of this host.

use std::sync::{Arc, LazyLock};

static NAME: LazyLock<Arc<str>> = LazyLock::new(|| {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map(|name| Arc::from(name.trim()))
        .unwrap_or_else(|_| Arc::from("unknown host"))
});

/// Returns the host's name, as its kernel has it.
#[doc(hidden)]
pub fn name() -> Arc<str> {
    Arc::clone(&NAME)
}

static BOOT: LazyLock<String> = LazyLock::new(|| {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|id| id.trim().to_owned())
        .unwrap_or_default()
});

/// Returns the boot id of the running kernel; empty where the system has none.
#[doc(hidden)]
pub fn boot() -> &'static str {
    &BOOT
}
