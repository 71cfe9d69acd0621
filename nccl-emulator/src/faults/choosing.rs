//! The builder of a fault: where it applies, its limits, and its action.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use super::guard::FaultGuard;
use super::in_force::{COUNT, FAULTS, LATE_NANOS, read_environment};
use super::point::{Action, Point};
use super::rule::{Caller, Name, Rule};
use super::specification::{self, SpecificationError};
use crate::options;

/// A fault at every call of a function of NCCL or of the CUDA driver, by its C name. Choosing an action activates it.
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
        communicator: None,
        nth: None,
        thread: None,
    }
}

/// A fault at every start of an operation on its stream: `AllReduce`, `Broadcast`, `Reduce`, `AllGather`, `ReduceScatter`,
/// `AlltoAll`, `Gather`, `Scatter`, `Send`, `Recv`, or `any`.
///
/// # Panics
/// If there is no such operation. Activating the fault panics if NVIDIA's own library runs.
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
        communicator: None,
        nth: None,
        thread: None,
    }
}

/// Activates the faults of a text in the form of `NCCL_EMULATOR_FAULTS`.
///
/// # Errors
/// [`SpecificationError`] describes the problem in one sentence.
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
    if let Some(options) = options::in_force()
        && let Some(problem) = faults
            .rules
            .iter()
            .find_map(|rule| rule.is_useless(options))
    {
        return Err(SpecificationError {
            entry: text.to_owned(),
            problem,
        });
    }
    LATE_NANOS.fetch_add(faults.late.as_nanos() as u64, Ordering::Relaxed);
    Ok(faults.rules.into_iter().map(install).collect())
}

/// A fault whose action has not been chosen yet.
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
    communicator: Option<Name>,
    nth: Option<u64>,
    thread: Option<Caller>,
}

impl Fault {
    /// Limits the fault to this rank, of any communicator. A group matches for each of its ranks. Functions without a
    /// communicator, such as those of the driver and `ncclGetUniqueId`, never match.
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

    /// Limits the fault to communicators of this name (`commName`), or, with a `*` at the end, to names with this prefix. So
    /// tests that run as threads of one process do not disturb each other. With [`rank`](Self::rank), limits it to that rank of
    /// these communicators.
    ///
    /// A group matches for each of its communicators. The crate `nccl` names its communicators. Functions without a
    /// communicator, such as `ncclGetUniqueId` and those of the driver, never match.
    ///
    /// Only the name distinguishes communicators: if two worlds of one process both use the name `demo`, the fault applies to
    /// both. So give the communicators of a test a distinct name, or a distinct prefix as in the second line below.
    ///
    /// # Panics
    /// Activating the fault panics if names are not known, because the fault would never strike: with NVIDIA's own library, and
    /// if the emulated release is older than 2.27.3. [`specify`] and [`install`](crate::install()) return an error in these
    /// cases.
    ///
    /// ```
    /// use nccl_emulator::faults;
    /// let guard = faults::at_operation("AllReduce").communicator("model/tp").rank(1).stall();
    /// let of_a_test = faults::at_call("ncclGroupEnd").communicator("my_test/*").fail(3);
    /// ```
    #[must_use]
    pub fn communicator(mut self, name: &str) -> Self {
        self.communicator = Some(Name::new(name));
        self
    }

    /// Limits the fault to the n-th match in this process, counted from 1 after the activation.
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

    /// Limits the fault to calls of the calling thread. This excludes a library's own threads, which may call first. Operations
    /// begin on threads of the emulator.
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

    /// Limits the fault to calls of threads other than the calling thread.
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

    /// Limits the fault to calls of threads with this name (`std::thread::Builder::name`), of which Linux keeps the first 15
    /// bytes. So one of several threads of a library is chosen, whichever calls first.
    ///
    /// ```
    /// use nccl_emulator::faults;
    /// let guard = faults::at_call("cuEventQuery").on_threads_named("nccl-poller").hang();
    /// ```
    #[must_use]
    pub fn on_threads_named(mut self, name: &str) -> Self {
        self.thread = Some(Caller::named(name));
        self
    }

    /// Delays the beginning of the call or operation.
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

    /// Hangs the call or operation until the guard is dropped.
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

    /// Hangs the call or operation until its communicator is aborted or the guard is dropped. A group hangs until any of its
    /// communicators is aborted. A call that creates a communicator (`ncclCommInitRankConfig`) hangs until the guard is
    /// dropped, because there is no communicator yet that could be aborted.
    ///
    /// ```
    /// use nccl_emulator::faults;
    /// let guard = faults::at_operation("Recv").rank(0).stall();
    /// ```
    #[must_use = "the fault is in place only while the guard lives"]
    pub fn stall(self) -> FaultGuard {
        self.install(Action::Stall)
    }

    /// Fails the call or operation with this `ncclResult_t`.
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

    /// Ends the process by SIGKILL.
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
        let rule = Rule {
            thread: self.thread,
            communicator: self.communicator,
            ..Rule::new(self.point, self.rank, self.nth, action)
        };
        if let Some(options) = options::in_force()
            && let Some(reason) = rule.is_useless(options)
        {
            panic!("{reason}");
        }
        install(Arc::new(rule))
    }
}

fn install(rule: Arc<Rule>) -> FaultGuard {
    read_environment();
    FAULTS.lock().rules.push(Arc::clone(&rule));
    COUNT.fetch_add(1, Ordering::Relaxed);
    FaultGuard(rule)
}
