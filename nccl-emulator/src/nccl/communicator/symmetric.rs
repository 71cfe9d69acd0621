//! The work of a group between its jobs and its operations, which all ranks of a communicator do
//! together: registering windows, the first one-sided operation, suspending and resuming device
//! memory.
//!
//! The emulator's communicators have no device memory, so a suspend frees none. The rules for a
//! suspend, and the waiting of the ranks for each other, are as in NCCL.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::peers;
use super::state::Communicator;
use super::window::WindowRequest;
use super::windows::{register_window, watch_windows};
use crate::code::{INTERNAL, INVALID_USAGE, Result, UNHANDLED_CUDA};
use crate::nccl::debug::{self, warn};
use cuda_emulator::driver::context;

/// A task, in the order in which NCCL runs them, independent of the order of the calls.
#[derive(Debug, Clone, Copy)]
pub(crate) enum SymmetricTask {
    /// `ncclCommWindowRegister`.
    Window(WindowRequest),
    /// The first one-sided operation.
    OneSided,
    /// `ncclCommSuspend`.
    Suspend,
    /// `ncclCommResume`.
    Resume,
}

/// Runs the tasks that a group has queued for one communicator.
pub(crate) fn run_symmetric(communicator: &Arc<Communicator>, tasks: &[SymmetricTask]) -> Result {
    let _device = debug::on_device(communicator.device);
    let mut tasks = tasks.to_vec();
    tasks.sort_by_key(|task| match task {
        SymmetricTask::Window(_) => 0,
        SymmetricTask::OneSided => 1,
        SymmetricTask::Suspend => 2,
        SymmetricTask::Resume => 3,
    });
    tasks.into_iter().try_for_each(|task| match task {
        SymmetricTask::Window(request) => register_window(communicator, &request),
        SymmetricTask::OneSided => prepare_one_sided(communicator),
        SymmetricTask::Suspend => suspend(communicator),
        SymmetricTask::Resume => resume(communicator),
    })
}

/// Waits for all ranks at the first one-sided operation, where NCCL registers a window for the
/// signals. Does so once, however often the group has asked for it.
fn prepare_one_sided(communicator: &Communicator) -> Result {
    if !communicator.is_one_sided() {
        watch_windows(communicator)?;
        barrier(communicator)?;
        communicator.one_sided.store(true, Ordering::Release);
    }
    Ok(())
}

fn suspend(communicator: &Communicator) -> Result {
    if communicator.family.is_suspended() {
        warn!("MemManager: Already suspended");
        return Err(INVALID_USAGE);
    }
    let synchronized =
        context::primary(communicator.device).and_then(|context| context.synchronize());
    synchronized.map_err(|error| {
        warn!("Cuda failure {}", error.0);
        UNHANDLED_CUDA
    })?;
    barrier(communicator)?;
    communicator.family.suspended.store(true, Ordering::Release);
    Ok(())
}

fn resume(communicator: &Communicator) -> Result {
    if !communicator.family.is_suspended() {
        warn!("MemManager: Not in suspended state");
        return Err(INVALID_USAGE);
    }
    communicator
        .family
        .suspended
        .store(false, Ordering::Release);
    barrier(communicator)
}

fn barrier(communicator: &Communicator) -> Result {
    let session = communicator.session().ok_or(INTERNAL)?;
    let number = session.reach_barrier();
    let is_aborted = || communicator.abort.is_raised();
    peers::wait_for_each(session, &is_aborted, |rank| {
        session.has_reached_barrier(rank, number)
    })
}
