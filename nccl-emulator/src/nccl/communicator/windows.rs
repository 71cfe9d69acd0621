//! Windows: memory that each rank of a communicator shares with all others.
//!
//! The registration is a collective: every rank publishes its part and gets the parts of the others.
//! Only memory of `ncclMemAlloc` can be registered, as NCCL needs memory whose handle can be sent to
//! other ranks. A window's handle is a number local to the rank, like a communicator's.

use std::ffi::c_void;
use std::sync::Arc;

use cuda_emulator::sync::{Mutex, MutexGuard};
use nccl_sys::{NCCL_WIN_COLL_SYMMETRIC, NCCL_WIN_REQUIRED_ALIGNMENT, ncclWindow_t};

use super::nodes::nodes;
use super::peers;
use super::session::Session;
use super::state::Communicator;
use super::window::{KIND, Listed, WINDOWS, Window, WindowRequest, allocated};
use crate::code::{INTERNAL, INVALID_ARGUMENT, REMOTE, Result, SYSTEM, UNHANDLED_CUDA};
use crate::nccl::debug::{info, subsystem, warn};
use crate::nccl::environment;
use crate::version;
use cuda_emulator::memory::{self, Span, Watch};
use cuda_emulator::violations::{self, Violation, ViolationKind};

impl Communicator {
    /// Whether the communicator supports windows: all ranks are on one node, and windows are not switched off. 2.27
    /// needs two ranks.
    pub(crate) fn supports_windows(&self) -> bool {
        let off = |variable| environment::integer(variable) == Some(0);
        let one_node = self
            .session()
            .is_some_and(|session| nodes(session).iter().all(|&node| node == 0));
        let enough = version::is_at_least(2, 28, 3)
            || self.session().is_some_and(|session| session.ranks() > 1);
        one_node && enough && !off("NCCL_WIN_ENABLE") && !off("NCCL_CUMEM_ENABLE")
    }

    fn windows(&self) -> MutexGuard<'_, Vec<Listed>> {
        self.windows.lock()
    }

    /// Returns the symmetric window that an address of this rank lies in, and the offset in it.
    pub(crate) fn window_at(&self, address: u64) -> Option<(Arc<Window>, u64)> {
        let listed = self.windows();
        let mut windows = listed.iter().map(|listed| &listed.window);
        let inside = |window: &&Arc<Window>| {
            window.flags & NCCL_WIN_COLL_SYMMETRIC != 0
                && address.wrapping_sub(window.address) < window.size
        };
        let window = windows.find(inside)?;
        Some((Arc::clone(window), address - window.address))
    }

    /// Watches the communicator's windows no more: it has ended, but for other ranks of its process.
    pub(super) fn unwatch_windows(&self) {
        self.windows()
            .iter_mut()
            .for_each(|listed| listed.watch = None);
    }

    /// Ends the communicator's windows.
    pub(super) fn forget_windows(&self) {
        self.windows().clear();
        WINDOWS.remove_if(|window| window.communicator == self.handle());
    }
}

/// Returns the window of a handle.
pub(crate) fn find_window(
    communicator: &Communicator,
    handle: ncclWindow_t,
    function: &str,
) -> Result<Arc<Window>> {
    let found = WINDOWS.get(handle.cast::<c_void>());
    if let Some(window) = found.filter(|window| window.communicator == communicator.handle()) {
        return Ok(window);
    }
    if handle.addr() as u64 >> 56 == u64::from(KIND) {
        let text = format!(
            "{communicator}: {function} with window {:#x}, which is not there any more, or another communicator's",
            handle.addr()
        );
        violations::record(Violation::new(
            ViolationKind::UseAfterDestroy,
            Some(communicator.device),
            text,
        ));
    }
    warn!("Device object does not exist in shadow pool.");
    Err(INTERNAL)
}

/// Ends a window, on this rank.
pub(crate) fn deregister_window(communicator: &Communicator, handle: ncclWindow_t) -> Result {
    let window = find_window(communicator, handle, "ncclCommWindowDeregister")?;
    WINDOWS.remove(handle.cast::<c_void>());
    communicator
        .windows()
        .retain(|other| !Arc::ptr_eq(&other.window, &window));
    Ok(())
}

/// Runs the job of `ncclCommWindowRegister`.
pub(super) fn register_window(communicator: &Communicator, request: &WindowRequest) -> Result {
    let session = communicator.session().ok_or(INTERNAL)?;
    let part = part(communicator, request)?;
    // Before any rank can put into it.
    let is_one_sided = communicator.is_one_sided();
    let watch = is_one_sided.then(|| watch(communicator, session, (request.address, part)));
    let number = session.next_window();
    session.segment.say_window(session.rank, number, &part);
    let said = |rank| session.segment.window(rank, number);
    let is_aborted = || communicator.abort.is_raised();
    peers::wait_for_each(session, &is_aborted, |rank| said(rank).is_some())?;
    // A rank that has failed since may have registered others.
    let parts = (0..session.ranks()).map(|rank| said(rank).ok_or(REMOTE));
    let parts = parts.collect::<Result<_>>()?;
    let window = Arc::new(Window {
        communicator: communicator.handle(),
        address: request.address,
        size: request.size,
        flags: request.flags,
        parts,
        reached: Mutex::default(),
    });
    let Some(handle) = WINDOWS.insert(Arc::clone(&window)) else {
        warn!("nccl-emulator: too many windows");
        return Err(SYSTEM);
    };
    communicator.windows().push(Listed { window, watch });
    info!(
        subsystem::INIT,
        "Inserted window {handle:p} into address map"
    );
    // SAFETY: the promise made when the slot was made.
    unsafe { request.out.0.write_unaligned(handle.cast()) };
    Ok(())
}

/// Watches the windows from now on, before any rank can put.
pub(super) fn watch_windows(communicator: &Communicator) -> Result {
    let session = communicator.session().ok_or(INTERNAL)?;
    for listed in communicator.windows().iter_mut() {
        let part = (listed.window.address, listed.window.parts[session.rank]);
        listed.watch = Some(watch(communicator, session, part));
    }
    Ok(())
}

/// Records the uses of this rank's part that may see half of a put.
fn watch(
    communicator: &Communicator,
    session: &Arc<Session>,
    (address, part): (u64, Span),
) -> Watch {
    let (name, device) = (communicator.to_string(), communicator.device);
    let (signals, before) = (communicator.config.signals.max(1), session.logged());
    let (weak, abort) = (Arc::downgrade(session), Arc::clone(&communicator.abort));
    session.pool(session.rank).watch(part, move |used| {
        let Some(session) = weak.upgrade() else {
            return;
        };
        // What an abort leaves in a window has no order.
        if abort.is_raised() || session.has_lost_waits() {
            return;
        }
        for (source, put) in session.new_races(used, &part, &before, signals) {
            let spans = [used, &put, &part];
            let from = spans.iter().map(|span| span.offset).max();
            let to = spans.iter().map(|span| span.offset + span.len).min();
            let inside = |at: Option<u64>| at.map_or(0, |at| at - part.offset);
            let text = format!(
                "{name}: bytes {} to {} of the window at {address:#x} were used before the signal of rank {source}'s put into them \
                 was waited for: what is read is old, new or a mixture, and what is written may be lost",
                inside(from),
                inside(to)
            );
            let violation = Violation::new(ViolationKind::Race, Some(device), text);
            let allocation = session.pool(session.rank).allocation(&part);
            violations::record(violation.about(allocation));
        }
    })
}

/// Returns this rank's part, if it can be registered.
fn part(communicator: &Communicator, request: &WindowRequest) -> Result<Span> {
    let refuse = |why: &str| {
        info!(subsystem::REG, "{communicator}: {why}");
        warn!("Cuda failure 1 'invalid argument'");
        UNHANDLED_CUDA
    };
    let (device, span) = memory::resolve(request.address, request.size)
        .map_err(|violation| refuse(&violation.to_string()))?;
    let (_, start, size) =
        memory::range(request.address).ok_or_else(|| refuse("the window is no device memory"))?;
    if allocated().get(&start) != Some(&size) {
        return Err(refuse(
            "the window's memory has no handle: it is not of ncclMemAlloc",
        ));
    }
    if device != communicator.device {
        return Err(refuse("the window's memory is another device's"));
    }
    if !(request.address - start).is_multiple_of(NCCL_WIN_REQUIRED_ALIGNMENT as u64) {
        warn!("Window address must be suitably aligned.");
        return Err(INVALID_ARGUMENT);
    }
    Ok(span)
}
