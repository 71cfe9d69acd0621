//! When a world is checked: once by itself, before its first communicator of several ranks, unless somebody
//! has switched that off.

use std::time::Instant;

use nccl_base::report::{Finding, Report};
use nccl_diagnose::preflight as checks;

use super::settings::Settings;
use crate::error::{Error, ErrorKind, Result};
use crate::peers::{About, Check};
use crate::sync::Mutex;
use crate::time::deadline_after;
use crate::world::World;

/// What a world knows about its checks.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    off: bool,
    /// Whether there was a check without errors; held while one is made, so that the communicators of
    /// several threads wait for one check.
    passed: Mutex<bool>,
}

impl Checks {
    /// Of the next epoch of a world, whose ranks are all of this one, or not.
    pub(crate) fn of_next(&self, all_known: bool) -> Self {
        Self {
            off: self.off,
            passed: Mutex::new(all_known && *self.passed.lock()),
        }
    }
}

/// Whether the environment switches the checks off.
fn is_off() -> bool {
    let value = std::env::var("NCCL_RUN_PREFLIGHT").unwrap_or_default();
    ["off", "0", "no", "false"].contains(&value.trim().to_ascii_lowercase().as_str())
}

impl World {
    /// Checks what has to agree between the ranks, and whether they reach each other where NCCL will try:
    /// every rank has to call it, and gets the same report.
    ///
    /// Making the first communicator of several ranks does so by itself, unless
    /// [`without_preflight`](Self::without_preflight) or `NCCL_RUN_PREFLIGHT=off` says otherwise: an error keeps the
    /// communicator from being made, on every rank, and rank 0 logs the warnings.
    ///
    /// On one host it takes a few milliseconds; between hosts that do not reach each other, 5 s at most.
    ///
    /// # Errors
    /// As [`barrier`](Self::barrier), when a rank does not come. What is found is no error but in the report.
    ///
    /// ```
    /// use nccl::preflight::Settings;
    ///
    /// std::thread::scope(|scope| {
    ///     for world in nccl::World::threads(2) {
    ///         scope.spawn(move || {
    ///             let report = world.preflight(&Settings::new())?;
    ///             for error in report.errors() {
    ///                 eprintln!("{error}");
    ///             }
    ///             Ok::<(), nccl::Error>(())
    ///         });
    ///     }
    /// });
    /// ```
    pub fn preflight(&self, settings: &Settings) -> Result<Report> {
        // One after the other, or their exchanges would be mixed up.
        let _turn = self.checks.passed.lock();
        checks::world(
            self.member(),
            Some(&settings.given()),
            deadline_after(self.timeout()),
            &|| false,
        )
    }

    /// Makes communicators without checking first. All ranks have to do so; when only some do, nothing is
    /// checked, and rank 0 logs a warning.
    ///
    /// ```
    /// let worlds: Vec<_> = nccl::World::threads(2)
    ///     .into_iter()
    ///     .map(nccl::World::without_preflight)
    ///     .collect();
    /// # drop(worlds);
    /// ```
    #[must_use]
    pub fn without_preflight(mut self) -> Self {
        self.checks.off = true;
        self
    }
}

#[doc(hidden)]
impl Check for World {
    fn check(
        &self,
        about: Option<About>,
        deadline: Instant,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<()> {
        if self.size() < 2 || !self.needs_nccl {
            return Ok(());
        }
        let mut passed = self.checks.passed.lock();
        if *passed {
            return Ok(());
        }
        let off = self.checks.off || is_off();
        let given = about
            .filter(|_| !off)
            .map(|about| Settings::about(about).given());
        let report = match checks::world(self.member(), given.as_ref(), deadline, interrupted) {
            Ok(report) => report,
            Err(error) => {
                // Others may have come through, and will not be there another time.
                *passed = true;
                return Err(error);
            }
        };
        if self.rank() == 0 {
            report.warnings().for_each(warn);
        }
        if report.errors().next().is_some() {
            return Err(Error::new(ErrorKind::Preflight { report }));
        }
        *passed = true;
        Ok(())
    }
}

fn warn(finding: &Finding) {
    tracing::warn!(
        name: "nccl.preflight.finding",
        target: "nccl",
        check = finding.check,
        ranks = ?finding.ranks,
        fix = finding.fix,
        "{}",
        finding.what
    );
}
