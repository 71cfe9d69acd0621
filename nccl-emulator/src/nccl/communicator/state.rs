//! One rank's end of a communicator: its handle, and the state that `ncclCommGetAsyncError` reports.

use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use cuda_emulator::sync::{Mutex, MutexGuard};

use super::background::Background;
use super::captured_count::Count;
use super::clique::Clique;
use super::connections::Connections;
use super::family::Family;
use super::session::Session;
use super::window::Listed;
use crate::code::{self, Code, INVALID_ARGUMENT, Result};
use crate::faults::Subject;
use crate::nccl::abort::AbortFlag;
use crate::nccl::config::Config;
use crate::nccl::debug::warn;
use crate::nccl::operators::UserOperators;
use crate::nccl::profiler::Context as ProfilerContext;
use crate::nccl::task::Function;
use crate::nccl::work::Lists;
use cuda_emulator::exec::Last;
use cuda_emulator::registry::Registry;
use cuda_emulator::violations::{self, Violation, ViolationKind};
use nccl_sys::ncclComm_t;

const KIND: u8 = 0x4C;
static COMMUNICATORS: Registry<Communicator> = Registry::new(KIND);

/// One rank's end of a communicator.
pub(crate) struct Communicator {
    /// The handle; unset until the communicator is published.
    handle: OnceLock<usize>,
    /// This rank, and the number of ranks.
    pub(crate) rank: i32,
    pub(crate) ranks: i32,
    /// The ordinal of the rank's device.
    pub(crate) device: i32,
    /// A hash that is the same on all ranks. It orders the launches of one group on several communicators.
    pub(crate) hash: u64,
    pub(crate) config: Config,
    pub(crate) abort: Arc<AbortFlag>,
    /// `ncclResult_t` as `ncclCommGetAsyncError` reports it.
    state: AtomicU32,
    pub(super) session: OnceLock<Arc<Session>>,
    pub(super) clique: OnceLock<Arc<Clique<Self>>>,
    /// The group that runs, or waits to run, in the background.
    pending: Mutex<Option<Arc<dyn Background>>>,
    pub(super) initialized: AtomicBool,
    pub(super) finalized: AtomicBool,
    /// Whether `ncclCommDestroy` or `ncclCommAbort` was called.
    destroyed: AtomicBool,
    revoked: AtomicBool,
    /// The flag of a child whose split has not succeeded, raised together with `abort`.
    child_abort: Mutex<Option<Arc<AbortFlag>>>,
    /// The number of splits and grows so far. The ranks of a child meet by this number.
    children: AtomicU64,
    /// The common state of communicators that share resources.
    pub(crate) family: Arc<Family>,
    in_family: AtomicBool,
    /// The number of threads inside a call that may wait on this communicator's behalf.
    inside: AtomicU32,
    /// Threads inside `ncclCommGetAsyncError`.
    polling: AtomicU32,
    /// Registered buffers: address, size, number of registrations.
    registrations: Mutex<Vec<(usize, usize, usize)>>,
    /// The operators that the user created.
    operators: Mutex<UserOperators>,
    pub(super) windows: Mutex<Vec<Listed>>,
    /// Whether all ranks have reached their first one-sided operation.
    pub(super) one_sided: AtomicBool,
    /// The number of operations so far, for the log.
    operations: AtomicU64,
    /// Lists of finished launches, for reuse.
    spare: Mutex<Vec<Lists>>,
    /// Held while launches are enqueued, so that every launch is ordered after the previous one.
    pub(crate) issue: Mutex<Last>,
    /// The count of launches in graphs that are not destroyed.
    pub(crate) captured: Count,
    pub(crate) connections: Mutex<Connections>,
    /// The communicator as a profiler plugin knows it. Unset without a plugin.
    pub(super) profiler: OnceLock<Arc<ProfilerContext>>,
    /// The number of launched collectives of each function, without those in graphs.
    sequences: [AtomicU64; Function::COUNT],
}

impl Communicator {
    /// Creates a communicator whose init has not run.
    pub(crate) fn new(rank: i32, ranks: i32, device: i32, hash: u64, config: Config) -> Self {
        Self {
            handle: OnceLock::new(),
            rank,
            ranks,
            device,
            hash,
            config,
            abort: Arc::new(AbortFlag::default()),
            state: AtomicU32::new(0),
            session: OnceLock::new(),
            clique: OnceLock::new(),
            pending: Mutex::new(None),
            initialized: AtomicBool::new(false),
            finalized: AtomicBool::new(false),
            destroyed: AtomicBool::new(false),
            revoked: AtomicBool::new(false),
            child_abort: Mutex::default(),
            children: AtomicU64::new(0),
            family: Arc::new(Family::default()),
            in_family: AtomicBool::new(true),
            inside: AtomicU32::new(0),
            polling: AtomicU32::new(0),
            registrations: Mutex::default(),
            operators: Mutex::default(),
            windows: Mutex::default(),
            one_sided: AtomicBool::new(false),
            operations: AtomicU64::new(0),
            spare: Mutex::default(),
            issue: Mutex::default(),
            captured: Count::default(),
            connections: Mutex::default(),
            profiler: OnceLock::new(),
            sequences: [const { AtomicU64::new(0) }; Function::COUNT],
        }
    }

    /// Returns the communicator as a profiler plugin knows it.
    pub(crate) fn profiler(&self) -> Option<&Arc<ProfilerContext>> {
        self.profiler.get()
    }

    /// Returns the number of launched collectives of a function, without those in graphs.
    pub(crate) fn sequence(&self, function: Function) -> &AtomicU64 {
        &self.sequences[function as usize]
    }

    /// Sets the abort flag.
    pub(crate) fn with_abort(mut self, abort: Arc<AbortFlag>) -> Self {
        self.abort = abort;
        self
    }

    /// Makes the communicator share the resources of `parent`.
    pub(super) fn sharing(mut self, parent: &Self) -> Self {
        self.family = Arc::clone(&parent.family);
        self.family.members.fetch_add(1, Ordering::AcqRel);
        self
    }

    /// Removes the destroyed communicator from its family.
    pub(super) fn leave_family(&self) {
        if self.in_family.swap(false, Ordering::AcqRel) {
            self.family.members.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Raises the abort flag, and that of the child that is being made.
    pub(crate) fn raise_abort(&self) {
        if let Some(child) = &*self.child_abort() {
            child.raise();
        }
        self.abort.raise();
    }

    /// Lowers the flags that [`Communicator::raise_abort`] has raised.
    pub(super) fn lower_abort(&self) {
        if let Some(child) = &*self.child_abort() {
            child.lower();
        }
        self.abort.lower();
    }

    /// Returns the flag of a child that is being made, or whose creation failed.
    pub(crate) fn child_abort(&self) -> MutexGuard<'_, Option<Arc<AbortFlag>>> {
        self.child_abort.lock()
    }

    /// Counts a split or a grow and returns its number.
    pub(crate) fn next_child(&self) -> u64 {
        self.children.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Returns the number of splits and grows so far.
    pub(crate) fn children(&self) -> u64 {
        self.children.load(Ordering::Acquire)
    }

    /// Whether it was revoked.
    pub(crate) fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire)
    }

    /// Marks it as revoked.
    pub(crate) fn mark_revoked(&self) {
        self.revoked.store(true, Ordering::Release);
    }

    /// Whether it was finalized, or revoked.
    pub(crate) fn is_finalized(&self) -> bool {
        self.finalized.load(Ordering::Acquire)
    }

    /// Gives the communicator a handle.
    pub(crate) fn publish(self: &Arc<Self>) -> Result<ncclComm_t> {
        let Some(handle) = COMMUNICATORS.insert(Arc::clone(self)) else {
            warn!("nccl-emulator: too many communicators");
            return Err(code::SYSTEM);
        };
        self.handle
            .set(handle.addr())
            .expect("a communicator is published once");
        Ok(handle.cast())
    }

    /// Returns the handle, for messages and comparisons; 0 without one.
    pub(crate) fn handle(&self) -> usize {
        self.handle.get().copied().unwrap_or(0)
    }

    /// Ends the handle. Later uses of the handle are reported as violations.
    pub(super) fn retire(&self) {
        COMMUNICATORS.remove(std::ptr::without_provenance_mut(self.handle()));
    }

    /// Returns the session, once the init has succeeded.
    pub(crate) fn session(&self) -> Option<&Arc<Session>> {
        self.session.get()
    }

    /// Returns the async state.
    pub(crate) fn state(&self) -> Result {
        code::result(self.state.load(Ordering::Acquire))
    }

    /// Sets the async state.
    pub(crate) fn set_state(&self, state: Result) {
        self.state.store(code::number(state), Ordering::Release);
    }

    /// Makes an error in the background the async state, unless another error already is. Returns false while a group is in
    /// progress, whose result would replace the error.
    pub(crate) fn fail(&self, code: Code) -> bool {
        let state =
            self.state
                .compare_exchange(0, code.number(), Ordering::AcqRel, Ordering::Acquire);
        state.map_or_else(|found| found != code::IN_PROGRESS.number(), |_| true)
    }

    /// `ncclCommGetAsyncError`: starts a pending group, if there is one, and returns the async state.
    pub(crate) fn poll(&self) -> Result {
        self.polling.fetch_add(1, Ordering::AcqRel);
        if self.state() == Err(code::IN_PROGRESS) {
            let pending = self.pending().clone();
            if let Some(pending) = pending {
                pending.poll();
            }
        }
        let state = self.state();
        if state.is_ok() {
            self.pending().take();
        }
        self.polling.fetch_sub(1, Ordering::AcqRel);
        state
    }

    /// Returns the background group.
    pub(crate) fn pending(&self) -> MutexGuard<'_, Option<Arc<dyn Background>>> {
        self.pending.lock()
    }

    /// Checks that the communicator may be used for a new call.
    pub(crate) fn ensure_ready(&self) -> Result {
        if self.abort.is_raised() {
            self.cancel_pending();
            return Ok(());
        }
        let state = self.state();
        if state == Err(code::IN_PROGRESS) {
            warn!("Attempt to use communicator before the previous operation returned ncclSuccess");
            return Err(INVALID_ARGUMENT);
        }
        state
    }

    /// Whether the init succeeded.
    pub(crate) fn is_initialized(&self) -> bool {
        self.initialized.load(Ordering::Acquire)
    }

    /// Marks the communicator as being destroyed. Groups with it are blocking from now on.
    pub(crate) fn mark_destroyed(&self) {
        self.destroyed.store(true, Ordering::Release);
    }

    /// Whether it is being destroyed.
    pub(crate) fn is_destroyed(&self) -> bool {
        self.destroyed.load(Ordering::Acquire)
    }

    /// Marks the communicator as finalized. Returns false if it already was.
    pub(crate) fn mark_finalized(&self) -> bool {
        !self.finalized.swap(true, Ordering::AcqRel)
    }

    /// Returns the number of threads inside a call that may wait on the communicator's behalf.
    pub(crate) fn threads_inside(&self) -> u32 {
        self.inside.load(Ordering::Acquire)
    }

    /// Threads inside `ncclCommGetAsyncError`.
    pub(crate) fn threads_polling(&self) -> u32 {
        self.polling.load(Ordering::Acquire)
    }

    /// Cancels the background group: drops it if it has not begun, else waits for it.
    pub(crate) fn cancel_pending(&self) {
        let pending = self.pending().take();
        if let Some(pending) = pending {
            pending.cancel();
        }
    }

    /// Marks the calling thread as inside a call on this communicator.
    pub(crate) fn enter(self: &Arc<Self>) -> Inside {
        self.inside.fetch_add(1, Ordering::AcqRel);
        Inside(Arc::clone(self))
    }

    /// The operators that the user created.
    pub(crate) fn operators(&self) -> MutexGuard<'_, UserOperators> {
        self.operators.lock()
    }

    /// Whether one-sided operations can run without waiting for all ranks first.
    pub(crate) fn is_one_sided(&self) -> bool {
        self.config.one_sided_at_init || self.one_sided.load(Ordering::Acquire)
    }

    /// Counts an operation and returns the number of operations before it.
    pub(crate) fn operations(&self) -> u64 {
        self.operations.fetch_add(1, Ordering::Relaxed)
    }

    /// Counts a registration of a buffer and returns its handle: never 0, the same for the same
    /// buffer.
    pub(crate) fn register(&self, address: usize, size: usize) -> usize {
        let mut all = self.registrations.lock();
        let at = all
            .iter()
            .position(|&(a, s, _)| (a, s) == (address, size))
            .unwrap_or_else(|| {
                all.push((address, size, 0));
                all.len() - 1
            });
        all[at].2 += 1;
        at + 1
    }

    /// Reverts one registration. Returns false if there is none.
    pub(crate) fn deregister(&self, handle: usize) -> bool {
        let mut all = self.registrations.lock();
        match handle.checked_sub(1).and_then(|at| all.get_mut(at)) {
            Some((_, _, count)) if *count > 0 => {
                *count -= 1;
                true
            }
            _ => false,
        }
    }

    /// Records a violation if the communicator's memory is suspended.
    pub(crate) fn check_not_suspended(&self, function: &str) {
        if self.family.is_suspended() {
            let text = format!("{self}: {function} while suspended: NCCL's buffers are gone");
            violations::record(Violation::new(
                ViolationKind::Misuse,
                Some(self.device),
                text,
            ));
        }
    }

    /// Returns empty lists, if possible with the capacity of a finished launch's.
    pub(crate) fn spare_lists(&self) -> Lists {
        self.spare.lock().pop().unwrap_or_default()
    }

    /// Stores the lists of a finished launch for reuse.
    pub(crate) fn give_back(&self, mut lists: Lists) {
        const KEPT: usize = 64;
        lists.clear();
        let mut spare = self.spare.lock();
        if spare.len() < KEPT {
            spare.push(lists);
        }
    }

    /// Records a violation about this communicator.
    pub(crate) fn violation(&self, text: impl fmt::Display) {
        let text = format!("{self}: {text}");
        violations::record(Violation::new(
            ViolationKind::UseAfterDestroy,
            Some(self.device),
            text,
        ));
    }
}

impl Communicator {
    /// Returns the rank and name that faults are matched with.
    pub(crate) fn subject(&self) -> Subject<'_> {
        Subject {
            rank: self.rank,
            name: self.config.name.as_deref(),
        }
    }
}

impl fmt::Display for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "comm {:#x}", self.handle())?;
        if let Some(name) = &self.config.name {
            write!(f, " \"{name}\"")?;
        }
        write!(f, " rank {} of {}", self.rank, self.ranks)
    }
}

/// Marks its thread as inside a call on the communicator, until it is dropped.
pub(crate) struct Inside(Arc<Communicator>);

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Returns the communicator of a handle, or `None` without a log line.
pub(crate) fn peek(handle: ncclComm_t) -> Option<Arc<Communicator>> {
    COMMUNICATORS.get(handle.cast::<c_void>())
}

/// `CommCheck`: returns the communicator of a handle. `function` is the name that NCCL uses in its messages.
pub(crate) fn lookup(handle: ncclComm_t, function: &str) -> Result<Arc<Communicator>> {
    if handle.is_null() {
        warn!("{function} : comm argument is NULL");
        return Err(INVALID_ARGUMENT);
    }
    if let Some(communicator) = peek(handle) {
        return Ok(communicator);
    }
    report_dead(handle, function);
    warn!("Error: corrupted comm object detected");
    Err(INVALID_ARGUMENT)
}

/// Records the use of a communicator that is gone. Returns true if `handle` named one.
pub(crate) fn report_dead(handle: ncclComm_t, function: &str) -> bool {
    let was_ours = handle.addr() as u64 >> 56 == u64::from(KIND);
    if was_ours {
        let text = format!(
            "{function} on comm {:#x}, which was destroyed or aborted: in NCCL a use after free",
            handle.addr()
        );
        violations::record(Violation::new(ViolationKind::UseAfterDestroy, None, text));
    }
    was_ours
}
