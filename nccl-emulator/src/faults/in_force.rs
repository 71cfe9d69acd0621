//! The active faults and the delay of operations, from the environment and from the API.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use cuda_emulator::sync::Mutex;

use super::rule::Faults;
use super::specification::{self, SpecificationError};
use crate::options::Options;

/// The environment variable.
const VARIABLE: &str = "NCCL_EMULATOR_FAULTS";

pub(super) static FAULTS: LazyLock<Mutex<Faults>> = LazyLock::new(|| {
    let faults = SPECIFIED
        .as_ref()
        .map_or_else(|_| Faults::default(), |parse| parse.build());
    Mutex::new(faults)
});

static SPECIFIED: LazyLock<Result<specification::Specification, SpecificationError>> =
    LazyLock::new(|| {
        let text = std::env::var_os(VARIABLE)
            .map(|text| text.to_string_lossy().into_owned())
            .unwrap_or_default();
        let parsed = specification::parse(&text);
        if let Err(error) = &parsed {
            eprintln!("nccl-emulator: {VARIABLE}: {error}");
        }
        parsed
    });

/// The number of active faults, plus 1 until the faults of the environment have been counted.
pub(super) static COUNT: AtomicUsize = AtomicUsize::new(1);

pub(super) static LATE_NANOS: AtomicU64 = AtomicU64::new(0);

pub(super) fn read_environment() {
    static READ: LazyLock<()> = LazyLock::new(|| {
        let faults = FAULTS.lock();
        COUNT.fetch_add(faults.rules.len(), Ordering::Relaxed);
        COUNT.fetch_sub(1, Ordering::Relaxed);
        LATE_NANOS.fetch_add(faults.late.as_nanos() as u64, Ordering::Relaxed);
    });
    LazyLock::force(&READ);
}

/// Checks that the variable could be parsed; otherwise the error was already printed.
pub(crate) fn check_environment() -> Result<(), &'static SpecificationError> {
    SPECIFIED.as_ref().map(drop)
}

/// Checks that all active faults can strike with these options. With NVIDIA's own library, also checks that the variable could
/// be parsed, because no later call reports that.
///
/// # Errors
/// The reason why a fault cannot strike.
pub(crate) fn check_for(options: &Options) -> Result<(), String> {
    if options.nccl.is_some() {
        check_environment().map_err(|error| format!("{VARIABLE}: {error}"))?;
    }
    let faults = FAULTS.lock();
    let useless = faults
        .rules
        .iter()
        .find_map(|rule| rule.is_useless(options));
    useless.map_or(Ok(()), Err)
}

/// Returns whether there are active faults; a cheap check before all others.
#[inline]
pub(crate) fn any() -> bool {
    COUNT.load(Ordering::Relaxed) != 0 && any_that_is_read()
}

#[cold]
fn any_that_is_read() -> bool {
    read_environment();
    COUNT.load(Ordering::Relaxed) != 0
}

/// Returns the delay of operations.
pub(crate) fn lateness() -> Option<Duration> {
    read_environment();
    match LATE_NANOS.load(Ordering::Relaxed) {
        0 => None,
        nanos => Some(Duration::from_nanos(nanos)),
    }
}
