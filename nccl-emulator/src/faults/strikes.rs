//! A call is made or an operation begins: the faults that sit there strike.

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

/// Lets faults strike that sit at this call, which concerns `subjects`. `aborted` says whether its communicator was
/// aborted meanwhile.
///
/// # Errors
/// The code of a fault that makes it fail.
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

/// Lets faults strike that sit at this call of the driver's.
///
/// # Errors
/// The code of a fault that makes it fail.
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

/// The faults that strike an operation which is about to begin, if any.
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
