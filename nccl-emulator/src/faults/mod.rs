//! Faults on purpose: delay, hang or fail a chosen call on a chosen rank, or end the process in it.
//!
//! For tests of what is built on NCCL. A fault sits at a function of NCCL's or of the CUDA driver's
//! ([`at_call`]), and strikes when it is called; or at an operation ([`at_operation`]), and strikes when the operation begins
//! to run on its stream. It may be limited to one rank and to the n-th time. [`late`] makes every
//! operation begin late: what is only right because the work was quick, goes wrong.
//!
//! ```
//! use nccl_emulator::faults;
//!
//! // Rank 1 hangs in its third ncclGroupEnd, until the guard goes.
//! let guard = faults::at_call("ncclGroupEnd").rank(1).nth(3).hang();
//! assert_eq!(guard.hits(), 0);
//! ```
//!
//! For processes that a test does not write, the variable `NCCL_EMULATOR_FAULTS` holds the same,
//! separated by semicolons:
//!
//! ```text
//! NCCL_EMULATOR_FAULTS="call=ncclGroupEnd,rank=1,nth=3,action=hang; run=AllReduce,action=delay=50ms; late=2ms"
//! ```
//!
//! | action | a call | an operation |
//! |---|---|---|
//! | `delay=TIME` | begins later | begins later |
//! | `hang` | hangs; not even an abort ends it | never begins; an abort ends it |
//! | `stall` | hangs until its communicator is aborted | as `hang` |
//! | `fail=CODE` | returns the code, or counts as failed in its group | never begins; the communicator reports the code |
//! | `kill` | the process ends by SIGKILL | the process ends by SIGKILL |
//!
//! Functions of the driver have no rank and no communicator: a fault at one strikes whoever calls it, and
//! nothing but the end of the fault ends its `stall`. They are named without the version that some have
//! in their symbols (`cuMemAlloc`), and fail with codes of CUDA's.
//!
//! `ncclCommInitRankConfig` and `ncclCommInitRankScalable` with `fail=1` leave the thread inside a
//! group, as NCCL's do when CUDA cannot tell the current device.
//!
//! `ncclCommGetAsyncError` with `fail=CODE` succeeds, and reports the code as the communicator's
//! state from then on.

mod rule;
mod specification;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

pub(crate) use rule::OperationFault;
pub use specification::SpecificationError;

use crate::driver::CUresult;
use crate::nccl::{AbortFlag, Code};
use rule::{Caller, Rule};

/// The environment variable.
const VARIABLE: &str = "NCCL_EMULATOR_FAULTS";

/// Where a fault sits.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Point {
    Call(String),
    /// `None`: any operation.
    Operation(Option<String>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Delay(Duration),
    Hang,
    Stall,
    Fail(u32),
    Kill,
}

/// The faults in force, and by how much operations are late.
#[derive(Debug, Default)]
struct Faults {
    rules: Vec<Arc<Rule>>,
    late: Duration,
}

static FAULTS: LazyLock<Mutex<Faults>> = LazyLock::new(|| {
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
/// How many faults there are. Those of the environment are counted when they are read.
static COUNT: AtomicUsize = AtomicUsize::new(1);
static LATE_NANOS: AtomicU64 = AtomicU64::new(0);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn read_environment() {
    static READ: LazyLock<()> = LazyLock::new(|| {
        let faults = lock(&FAULTS);
        COUNT.fetch_add(faults.rules.len(), Ordering::Relaxed);
        COUNT.fetch_sub(1, Ordering::Relaxed);
        LATE_NANOS.fetch_add(faults.late.as_nanos() as u64, Ordering::Relaxed);
    });
    LazyLock::force(&READ);
}

/// A fault at every call of a function of NCCL's or of the CUDA driver's, by its C name. Choose what
/// it does to put it in place.
///
/// # Panics
/// If there is no such function.
///
/// ```
/// use nccl_emulator::faults;
/// let guard = faults::at_call("ncclCommInitRankConfig").rank(1).fail(2);
/// let wedged = faults::at_call("cuEventQuery").hang();
/// ```
#[must_use]
pub fn at_call(function: &str) -> Fault {
    assert!(
        specification::is_function(function),
        "neither NCCL nor the driver has a function {function}"
    );
    Fault {
        point: Point::Call(function.to_owned()),
        rank: None,
        nth: None,
        thread: None,
    }
}

/// A fault at every start of an operation on its stream: `AllReduce`, `Broadcast`, `Reduce`,
/// `AllGather`, `ReduceScatter`, `AlltoAll`, `Gather`, `Scatter`, `Send`, `Recv`, or `any`.
///
/// # Panics
/// If there is no such operation.
///
/// ```
/// use nccl_emulator::faults;
/// // The second all-reduce of rank 0 never begins.
/// let guard = faults::at_operation("AllReduce").rank(0).nth(2).hang();
/// ```
#[must_use]
pub fn at_operation(name: &str) -> Fault {
    let point =
        specification::operation(name).unwrap_or_else(|| panic!("there is no operation {name}"));
    Fault {
        point,
        rank: None,
        nth: None,
        thread: None,
    }
}

/// Every operation begins this much later than its stream could, until the guard goes.
///
/// ```
/// use nccl_emulator::faults;
/// use std::time::Duration;
/// let late = faults::late(Duration::from_millis(5));
/// // … what is issued here runs at least 5 ms later …
/// drop(late);
/// ```
#[must_use = "the operations are late only while the guard lives"]
pub fn late(by: Duration) -> LateGuard {
    read_environment();
    LATE_NANOS.fetch_add(by.as_nanos() as u64, Ordering::Relaxed);
    LateGuard(by)
}

/// Puts in place what a text in the form of `NCCL_EMULATOR_FAULTS` says.
///
/// # Errors
/// [`SpecificationError`] says in one sentence what is wrong with it.
///
/// ```
/// use nccl_emulator::faults;
/// let guards = faults::specify("call=ncclGroupEnd,rank=1,action=delay=10ms; run=Send,action=stall")?;
/// assert_eq!(guards.len(), 2);
/// assert!(faults::specify("call=ncclGroupEnd,action=dance").is_err());
/// # Ok::<(), faults::SpecificationError>(())
/// ```
pub fn specify(text: &str) -> Result<Vec<FaultGuard>, SpecificationError> {
    let faults = specification::parse(text)?.build();
    LATE_NANOS.fetch_add(faults.late.as_nanos() as u64, Ordering::Relaxed);
    Ok(faults.rules.into_iter().map(install).collect())
}

/// Where a fault sits, before it is said what it does.
///
/// ```
/// use nccl_emulator::faults;
/// let send: faults::Fault = faults::at_operation("Send").rank(3);
/// let guard = send.stall();
/// ```
#[derive(Debug, Clone)]
pub struct Fault {
    point: Point,
    rank: Option<i32>,
    nth: Option<u64>,
    thread: Option<Caller>,
}

impl Fault {
    /// Only on this rank of whatever communicator. A group counts for each rank in it, and a call of
    /// the driver's, like `ncclGetUniqueId`, for none.
    ///
    /// ```
    /// use nccl_emulator::faults;
    /// let guard = faults::at_call("ncclGroupEnd").rank(2).hang();
    /// ```
    #[must_use]
    pub fn rank(mut self, rank: i32) -> Self {
        self.rank = Some(rank);
        self
    }

    /// Only the n-th time in this process, counted from 1 and from now.
    ///
    /// ```
    /// use nccl_emulator::faults;
    /// let guard = faults::at_call("ncclGroupEnd").nth(10).fail(3);
    /// ```
    #[must_use]
    pub fn nth(mut self, n: u64) -> Self {
        self.nth = Some(n);
        self
    }

    /// Only calls of the thread that says this: not those of a library's own threads, which may come first.
    /// Operations begin on threads of the emulator's.
    ///
    /// ```
    /// use nccl_emulator::faults;
    /// let guard = faults::at_call("ncclCommGetAsyncError").on_this_thread().hang();
    /// ```
    #[must_use]
    pub fn on_this_thread(mut self) -> Self {
        self.thread = Some(Caller::Only(thread::current().id()));
        self
    }

    /// Only calls of other threads than the one that says this.
    ///
    /// ```
    /// use nccl_emulator::faults;
    /// let guard = faults::at_call("cuEventQuery").on_other_threads().hang();
    /// ```
    #[must_use]
    pub fn on_other_threads(mut self) -> Self {
        self.thread = Some(Caller::AnyBut(thread::current().id()));
        self
    }

    /// It begins later.
    ///
    /// ```
    /// use nccl_emulator::faults;
    /// use std::time::Duration;
    /// let guard = faults::at_operation("any").delay(Duration::from_millis(20));
    /// ```
    #[must_use = "the fault is in place only while the guard lives"]
    pub fn delay(self, by: Duration) -> FaultGuard {
        self.install(Action::Delay(by))
    }

    /// It hangs, until the guard goes.
    ///
    /// ```
    /// use nccl_emulator::faults;
    /// let guard = faults::at_call("ncclCommAbort").hang();
    /// // … what hangs there goes on when the guard is dropped …
    /// drop(guard);
    /// ```
    #[must_use = "the fault is in place only while the guard lives"]
    pub fn hang(self) -> FaultGuard {
        self.install(Action::Hang)
    }

    /// It hangs, until its communicator is aborted or the guard goes.
    ///
    /// ```
    /// use nccl_emulator::faults;
    /// let guard = faults::at_operation("Recv").rank(0).stall();
    /// ```
    #[must_use = "the fault is in place only while the guard lives"]
    pub fn stall(self) -> FaultGuard {
        self.install(Action::Stall)
    }

    /// It fails with this `ncclResult_t`.
    ///
    /// # Panics
    /// If the code is `ncclSuccess`.
    ///
    /// ```
    /// use nccl_emulator::faults;
    /// let system_error = 2;
    /// let guard = faults::at_call("ncclAllReduce").fail(system_error);
    /// ```
    #[must_use = "the fault is in place only while the guard lives"]
    pub fn fail(self, code: u32) -> FaultGuard {
        assert!(code != 0, "0 is success");
        self.install(Action::Fail(code))
    }

    /// The process ends by SIGKILL.
    ///
    /// ```
    /// use nccl_emulator::faults;
    /// let guard = faults::at_operation("AllReduce").rank(1).nth(5).kill();
    /// # guard.release();
    /// ```
    #[must_use = "the fault is in place only while the guard lives"]
    pub fn kill(self) -> FaultGuard {
        self.install(Action::Kill)
    }

    fn install(self, action: Action) -> FaultGuard {
        install(Arc::new(Rule {
            thread: self.thread,
            ..Rule::new(self.point, self.rank, self.nth, action)
        }))
    }
}

fn install(rule: Arc<Rule>) -> FaultGuard {
    read_environment();
    lock(&FAULTS).rules.push(Arc::clone(&rule));
    COUNT.fetch_add(1, Ordering::Relaxed);
    FaultGuard(rule)
}

/// A fault in place. Dropping it takes the fault away and lets go on what hangs because of it.
///
/// ```
/// use nccl_emulator::faults;
/// let guard: faults::FaultGuard = faults::at_call("ncclSend").fail(3);
/// assert_eq!(guard.hits(), 0);
/// ```
#[derive(Debug)]
#[must_use = "the fault is in place only while the guard lives"]
pub struct FaultGuard(Arc<Rule>);

impl FaultGuard {
    /// How often it has struck.
    ///
    /// ```
    /// use nccl_emulator::faults;
    /// let guard = faults::at_call("ncclGroupStart").fail(3);
    /// assert_eq!(guard.hits(), 0); // nobody has called it yet
    /// ```
    #[must_use]
    pub fn hits(&self) -> u64 {
        lock(&self.0.state).hits
    }

    /// Waits until it has struck `hits` times. False if that takes longer than `patience`.
    ///
    /// ```
    /// use nccl_emulator::faults;
    /// use std::time::Duration;
    /// let guard = faults::at_call("ncclGroupStart").hang();
    /// // Nobody calls it here, so that this waits in vain.
    /// assert!(!guard.wait_for_hits(1, Duration::from_millis(1)));
    /// ```
    #[must_use]
    pub fn wait_for_hits(&self, hits: u64, patience: Duration) -> bool {
        let state = lock(&self.0.state);
        let (state, _) = self
            .0
            .changed
            .wait_timeout_while(state, patience, |state| state.hits < hits)
            .unwrap_or_else(PoisonError::into_inner);
        state.hits >= hits
    }

    /// Takes the fault away, and lets go on what hangs because of it, as dropping the guard does.
    ///
    /// ```
    /// use nccl_emulator::faults;
    /// let guard = faults::at_call("ncclGroupStart").hang();
    /// guard.release();
    /// assert_eq!(guard.hits(), 0); // what it has seen can still be asked
    /// ```
    pub fn release(&self) {
        let mut faults = lock(&FAULTS);
        let before = faults.rules.len();
        faults.rules.retain(|rule| !Arc::ptr_eq(rule, &self.0));
        COUNT.fetch_sub(before - faults.rules.len(), Ordering::Relaxed);
        drop(faults);
        let wakers = {
            let mut state = lock(&self.0.state);
            state.released = true;
            std::mem::take(&mut state.wakers)
        };
        self.0.changed.notify_all();
        wakers.into_iter().for_each(|wake| wake());
    }

    /// Leaves the fault in place for the rest of the process.
    ///
    /// ```
    /// use nccl_emulator::faults;
    /// faults::at_call("ncclCommAbort").rank(7).hang().keep();
    /// ```
    pub fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for FaultGuard {
    fn drop(&mut self) {
        self.release();
    }
}

/// While it lives, operations begin late.
///
/// ```
/// use nccl_emulator::faults;
/// use std::time::Duration;
/// let late: faults::LateGuard = faults::late(Duration::from_micros(100));
/// ```
#[derive(Debug)]
#[must_use = "the operations are late only while the guard lives"]
pub struct LateGuard(Duration);

impl Drop for LateGuard {
    fn drop(&mut self) {
        LATE_NANOS.fetch_sub(self.0.as_nanos() as u64, Ordering::Relaxed);
    }
}

fn kill() -> ! {
    // SAFETY: ends this process, at once.
    unsafe { libc::raise(libc::SIGKILL) };
    unreachable!("SIGKILL cannot be ignored")
}

/// Whether there are any faults: asked before anything else.
#[inline]
pub(crate) fn any() -> bool {
    COUNT.load(Ordering::Relaxed) != 0 && any_that_is_read()
}

#[cold]
fn any_that_is_read() -> bool {
    read_environment();
    COUNT.load(Ordering::Relaxed) != 0
}

/// Whether the variable could be read; the sentence was printed.
pub(crate) fn check_environment() -> Result<(), &'static SpecificationError> {
    SPECIFIED.as_ref().map(drop)
}

/// By how much operations are late.
pub(crate) fn lateness() -> Option<Duration> {
    read_environment();
    match LATE_NANOS.load(Ordering::Relaxed) {
        0 => None,
        nanos => Some(Duration::from_nanos(nanos)),
    }
}

fn striking(point: impl Fn(&Point) -> bool, ranks: &[i32]) -> Vec<Arc<Rule>> {
    let rules: Vec<_> = lock(&FAULTS)
        .rules
        .iter()
        .filter(|rule| point(&rule.point))
        .cloned()
        .collect();
    rules
        .into_iter()
        .filter(|rule| rule.strikes(ranks))
        .collect()
}

/// Lets faults strike that sit at this call. `ranks` are those that it concerns.
///
/// # Errors
/// The code of a fault that makes it fail.
pub(crate) fn check_call(
    function: &str,
    ranks: &[i32],
    abort: Option<&AbortFlag>,
) -> Result<(), Code> {
    if !any() {
        return Ok(());
    }
    let mut result = Ok(());
    for rule in striking(
        |point| matches!(point, Point::Call(name) if name == function),
        ranks,
    ) {
        match rule.action {
            Action::Delay(by) => std::thread::sleep(by),
            Action::Hang | Action::Stall => rule.hold(abort),
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
            Action::Hang | Action::Stall => rule.hold(None),
            Action::Fail(code) => result = Err(CUresult(code)),
            Action::Kill => kill(),
        }
    }
    result
}

/// The faults that strike an operation which is about to begin, if any.
pub(crate) fn check_operation(name: &str, rank: i32) -> Option<OperationFault> {
    let matches = |point: &Point| match point {
        Point::Operation(wanted) => wanted.as_deref().is_none_or(|wanted| wanted == name),
        Point::Call(_) => false,
    };
    let rules = striking(matches, &[rank]);
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

#[cfg(test)]
mod tests {
    use super::*;

    // Names of functions that no other test of this crate calls: the faults are the process's.
    const FUNCTION: &str = "ncclCommSuspend";

    #[test]
    fn a_fault_strikes_the_chosen_rank_the_chosen_time_only() {
        let guard = at_call("ncclCommResume").rank(1).nth(2).fail(6);
        let call = |rank| check_call("ncclCommResume", &[rank], None).map_err(Code::number);
        assert_eq!(
            [call(1), call(0), call(1), call(1)],
            [Ok(()), Ok(()), Err(6), Ok(())]
        );
        assert_eq!(guard.hits(), 1);
        drop(guard);
        assert_eq!(call(1), Ok(()));
    }

    #[test]
    fn a_hang_ends_with_its_guard_and_a_stall_with_an_abort() {
        let abort = AbortFlag::default();
        let patience = Duration::from_secs(5);
        std::thread::scope(|scope| {
            let guard = at_call(FUNCTION).hang();
            let hung = scope.spawn(|| check_call(FUNCTION, &[0], Some(&abort)).is_ok());
            assert!(guard.wait_for_hits(1, patience));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!hung.is_finished());
            drop(guard);
            assert!(hung.join().unwrap());
            let guard = at_call(FUNCTION).stall();
            let stalled = scope.spawn(|| check_call(FUNCTION, &[0], Some(&abort)).is_ok());
            assert!(guard.wait_for_hits(1, patience));
            abort.raise();
            assert!(stalled.join().unwrap());
        });
    }
}
