//! Stopping the work of a communicator without ending it: revoke, and a shrink that aborts.
//!
//! The abort flag is raised, every wait on the communicator's behalf ends, and the flag is lowered
//! again, so that the communicator can still be split or shrunk. A thread that has not checked
//! the flag by then never sees it.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::state::Communicator;
use super::teardown::{PATIENCE_WITH_USERS, wait_for_launches, wait_for_users};
use crate::code::{IN_PROGRESS, Result};
use crate::nccl::debug::{self, info, subsystem};

/// How long threads inside a call have to see the flag. NCCL gives them the time that it takes to stop
/// its own threads.
const PATIENCE: Duration = Duration::from_secs(1);

/// Runs the job of `ncclCommRevoke`; the flag is already raised.
pub(crate) fn revoke(communicator: &Arc<Communicator>) -> Result {
    let _device = debug::on_device(communicator.device);
    info!(
        subsystem::DESTROY,
        "CommRevokeAsync START comm {:#x} rank {} nRanks {} cudaDev {}",
        communicator.handle(),
        communicator.rank,
        communicator.ranks,
        communicator.device
    );
    // No wait for signals is possible from now on.
    if let Some(session) = communicator.session() {
        session.lose_waits();
    }
    leave(communicator);
    // A blocking communicator keeps its error: it can be revoked, but not shrunk.
    if let Err(IN_PROGRESS) = communicator.state() {
        communicator.set_state(Ok(()));
    }
    info!(
        subsystem::DESTROY,
        "CommRevokeAsync END comm {:#x} result 0",
        communicator.handle()
    );
    Ok(())
}

/// Does the first half of a shrink with `NCCL_SHRINK_ABORT`, in the calling thread.
pub(crate) fn stop_launches(communicator: &Communicator) {
    communicator.raise_abort();
    leave(communicator);
}

fn leave(communicator: &Communicator) {
    wait_for_launches(communicator);
    if let Some(session) = communicator.session() {
        wait_for_users(session, Instant::now() + PATIENCE_WITH_USERS);
    }
    let until = Instant::now() + PATIENCE;
    while communicator.threads_inside() > 0 && Instant::now() < until {
        thread::sleep(Duration::from_micros(200));
    }
    communicator.lower_abort();
}
