//! Checks of what must agree or be reachable before NCCL is started.
//!
//! NCCL compares its own release and little else: a variable that differs, an address that cannot be
//! reached or a limit that is too low shows as a hang, or as a message on another rank. Here every rank
//! gathers facts, rank 0 compares them, and all ranks get the same [`Report`].
//!
//! - `settings`: what a check covers; `world_checks`: when checks are made.

mod settings;
mod world_checks;

pub use nccl_base::report::{Finding, Report, Severity};
pub use nccl_launch::nccl_variables_for;
pub use settings::Settings;
pub(crate) use world_checks::Checks;

/// Checks this host alone, before there is a world: limits, variables, interfaces, adapters.
///
/// Starts nothing and waits for no other rank. [`World::preflight`](crate::World::preflight) checks what only shows
/// between ranks.
///
/// ```
/// use nccl::preflight::{Settings, host};
///
/// let report = host(&Settings::default());
/// for finding in &report.findings {
///     eprintln!("{finding}");
/// }
/// ```
#[must_use]
pub fn host(settings: &Settings) -> Report {
    nccl_diagnose::preflight::host(&settings.check_input())
}
