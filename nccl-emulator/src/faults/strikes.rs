//! Applies the faults of a call or of an operation that begins.

use std::sync::Arc;
use std::time::Instant;

use super::in_force::{FAULTS, any};
use super::point::{Action, Point};
use super::rule::{OperationFault, Rule, Subject};
use crate::code::Code;
use cuda_emulator::driver::CUresult;

fn striking(point: impl Fn(&Point) -> bool, subjects: &[Subject<'_>]) -> Vec<Arc<Rule>> {
    let rules: Vec<_> = FAULTS
        .lock()
        .rules
        .iter()
        .filter(|rule| point(&rule.point))
        .cloned()
        .collect();
    rules
        .into_iter()
        .filter(|rule| rule.strikes(subjects))
        .collect()
}

/// Applies the faults of this call, which belongs to `subjects`. `aborted` returns whether its communicator has been aborted.
///
/// # Errors
/// The code of a fault that fails the call.
pub(crate) fn check_call(
    function: &str,
    subjects: &[Subject<'_>],
    aborted: &dyn Fn() -> bool,
) -> Result<(), Code> {
    if !any() {
        return Ok(());
    }
    let mut result = Ok(());
    for rule in striking(
        |point| matches!(point, Point::Call(name) if name == function),
        subjects,
    ) {
        match rule.action {
            Action::Delay(by) => std::thread::sleep(by),
            Action::Hang | Action::Stall => rule.hold(aborted),
            Action::Fail(code) => result = Code::new(code).map_or(Ok(()), Err),
            Action::Kill => kill(),
        }
    }
    result
}

/// Applies the faults of this driver call.
///
/// # Errors
/// The code of a fault that fails the call.
#[inline]
pub(crate) fn check_driver_call(function: &str) -> Result<(), CUresult> {
    match any() {
        true => strike_driver_call(function),
        false => Ok(()),
    }
}

#[cold]
fn strike_driver_call(function: &str) -> Result<(), CUresult> {
    let mut result = Ok(());
    for rule in striking(
        |point| matches!(point, Point::Call(name) if name == function),
        &[],
    ) {
        match rule.action {
            Action::Delay(by) => std::thread::sleep(by),
            Action::Hang | Action::Stall => rule.hold(&|| false),
            Action::Fail(code) => result = Err(CUresult(code)),
            Action::Kill => kill(),
        }
    }
    result
}

/// Returns the faults of an operation that is about to begin, if there are any.
pub(crate) fn check_operation(name: &str, subject: Subject<'_>) -> Option<OperationFault> {
    let matches = |point: &Point| match point {
        Point::Operation(wanted) => wanted.as_deref().is_none_or(|wanted| wanted == name),
        Point::Call(_) => false,
    };
    let rules = striking(matches, &[subject]);
    if rules.is_empty() {
        return None;
    }
    let mut fault = OperationFault::default();
    for rule in rules {
        match rule.action {
            Action::Delay(by) => fault.until = fault.until.max(Some(Instant::now() + by)),
            Action::Hang | Action::Stall => fault.holding.push(rule),
            Action::Fail(code) => fault.code = Code::new(code),
            Action::Kill => kill(),
        }
    }
    Some(fault)
}

fn kill() -> ! {
    // SAFETY: ends this process, at once.
    unsafe { libc::raise(libc::SIGKILL) };
    unreachable!("SIGKILL cannot be ignored")
}
