//! The checks at work: of one host, and of a world.

use super::facts::{Control, Facts, Process};
use super::report::Report;
use super::rules::{View, judge};
use super::settings::Settings;
use super::system::System;

/// Checks this host alone, before there is a world: limits, variables, interfaces, adapters.
///
/// Starts nothing and waits for nobody. What only shows between ranks is checked by
/// [`World::preflight`](crate::World::preflight).
///
/// ```
/// use nccl::preflight::{Settings, host};
///
/// let report = host(&Settings::new().ranks(8, 8));
/// for finding in report.errors() {
///     eprintln!("{finding}");
/// }
/// ```
#[must_use]
pub fn host(settings: &Settings) -> Report {
    let facts = [Facts {
        process: Some(Process::gather(&System::real(), &Control::default())),
        ..Facts::of_rank(settings)
    }];
    judge(&View::alone(
        &facts,
        settings.local_ranks,
        settings.world_size,
    ))
}
