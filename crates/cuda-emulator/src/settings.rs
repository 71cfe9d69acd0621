//! The simulated machine: the number of devices and their memory. Fixed once per process, before its first use.

use std::sync::OnceLock;

/// The machine that the driver presents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Number of devices.
    pub devices: u32,
    /// Memory of each device in bytes, a multiple of 2 MiB.
    pub memory: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            devices: 8,
            memory: 4 << 30,
        }
    }
}

static SETTINGS: OnceLock<Settings> = OnceLock::new();

/// Fixes the settings of this process, and returns those in force: the first ones that were given.
pub fn fix(settings: Settings) -> Settings {
    *SETTINGS.get_or_init(|| settings)
}

/// The settings in force; the default ones from then on if none were given.
pub fn settings() -> &'static Settings {
    SETTINGS.get_or_init(Settings::default)
}
