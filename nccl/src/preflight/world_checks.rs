//! When a world is checked: once, before its first communicator of several ranks, unless the checks are
//! switched off.

use std::time::Instant;

use nccl_base::report::{Finding, Report, Severity};
use nccl_diagnose::preflight as checks;

use super::settings::Settings;
use crate::peers::InitSetup;
use crate::sync::Mutex;
use crate::time::deadline_after;
use nccl_base::error::{Error, ErrorKind, Result};
use nccl_control::World;

/// State of a world's checks.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    off: bool,
    /// Whether a check found no errors. Locked during a check, so that the communicators of several threads wait for
    /// one check.
    passed: Mutex<bool>,
}

impl Checks {
    /// Returns the checks of a world's next generation; `all_known`: whether all its ranks were in this one.
    pub(crate) fn of_next(&self, all_known: bool) -> Self {
        Self {
            off: self.off,
            passed: Mutex::new(all_known && *self.passed.lock()),
        }
    }
}

/// Returns whether the environment switches the checks off.
fn is_off() -> bool {
    let value = std::env::var("NCCL_RUN_PREFLIGHT").unwrap_or_default();
    ["off", "0", "no", "false"].contains(&value.trim().to_ascii_lowercase().as_str())
}

impl Checks {
    /// Switches off the check before the first communicator.
    pub(crate) fn switch_off(&mut self) {
        self.off = true;
    }

    /// Makes a check at the program's request.
    pub(crate) fn report(&self, member: &World, settings: &Settings) -> Result<Report> {
        // Checks run one after the other: otherwise their exchanges would be mixed up.
        let _turn = self.passed.lock();
        let deadline = deadline_after(member.timeout());
        checks::world(member, Some(&settings.check_input()), deadline, &|| false)
    }

    /// Checks before a communicator of all ranks is made, unless an earlier check found nothing wrong. Without `setup`,
    /// this rank requests no check.
    ///
    /// # Errors
    /// [`ErrorKind::Preflight`] on all ranks alike.
    pub(crate) fn ensure_passed(
        &self,
        member: &World,
        setup: Option<InitSetup>,
        deadline: Instant,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<()> {
        let mut passed = self.passed.lock();
        if *passed {
            return Ok(());
        }
        let off = self.off || is_off();
        let check_input = setup
            .filter(|_| !off)
            .map(|setup| Settings::setup(setup).check_input());
        let report = match checks::world(member, check_input.as_ref(), deadline, interrupted) {
            Ok(report) => report,
            Err(error) => {
                // Other ranks may have passed the check, and would not take part in another one.
                *passed = true;
                return Err(error);
            }
        };
        if member.rank() == 0 {
            report.of(Severity::Warning).for_each(warn);
        }
        if report.of(Severity::Error).next().is_some() {
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
