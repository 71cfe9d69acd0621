//! When a world is checked: once by itself, before its first communicator of several ranks, unless somebody
//! has switched that off.

use std::time::Instant;

use nccl_base::report::{Finding, Report};
use nccl_diagnose::preflight as checks;

use super::settings::Settings;
use crate::error::{Error, ErrorKind, Result};
use crate::peers::About;
use crate::rendezvous::World;
use crate::sync::Mutex;
use crate::time::deadline_after;

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

impl Checks {
    /// None before the first communicator.
    pub(crate) fn switch_off(&mut self) {
        self.off = true;
    }

    /// What the program asks for.
    pub(crate) fn report(&self, member: &World, settings: &Settings) -> Result<Report> {
        // One after the other, or their exchanges would be mixed up.
        let _turn = self.passed.lock();
        let deadline = deadline_after(member.timeout());
        checks::world(member, Some(&settings.given()), deadline, &|| false)
    }

    /// Before a communicator is made of all ranks: the check, unless it was made and found nothing wrong. Without `about`, this rank
    /// wants none.
    ///
    /// # Errors
    /// [`ErrorKind::Preflight`] on all ranks alike.
    pub(crate) fn pass(
        &self,
        member: &World,
        about: Option<About>,
        deadline: Instant,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<()> {
        let mut passed = self.passed.lock();
        if *passed {
            return Ok(());
        }
        let off = self.off || is_off();
        let given = about
            .filter(|_| !off)
            .map(|about| Settings::about(about).given());
        let report = match checks::world(member, given.as_ref(), deadline, interrupted) {
            Ok(report) => report,
            Err(error) => {
                // Others may have come through, and will not be there another time.
                *passed = true;
                return Err(error);
            }
        };
        if member.rank() == 0 {
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
