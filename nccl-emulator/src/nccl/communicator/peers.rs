//! The errors that NCCL reports when a peer is gone, by the route of the pair's data ([`Route`](super::Route)).
//!
//! In the emulator all data goes through shared memory. In NCCL, ranks of one host share memory and ranks of different
//! hosts use sockets, and only a rank with a socket learns that its peer died. `docs/real-nccl.md` describes the
//! behaviour of NVIDIA's library.
//!
//! | action of a rank | result when its peer is gone |
//! |---|---|
//! | waits for it in an operation, shared memory | hangs |
//! | waits for it in an operation, sockets | remote error of the communicator; since 2.28 its state says so |
//! | first operation with it | remote error after the retries of a connection |
//! | init, split, window, first one-sided operation, suspend, resume: waits for all ranks | remote error |
//! | destroy, shared memory | since 2.32.3 after the retries of a connection |

use std::io;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::identity;
use super::route::share_a_host;
use super::session::Session;
use super::state::Communicator;
use crate::code::{INTERNAL, REMOTE, Result};
use crate::nccl::bootstrap;
use crate::nccl::debug::warn;
use crate::transport::teardown::GONE;

/// The limit of a sleep that a ring should end: a killed process does not ring.
const SAFETY_NET: Duration = Duration::from_millis(100);

/// Whether the sockets of a rank are closed: its process has ended, or its end of the communicator was aborted or freed.
/// For a rank of another host only the former counts: news of the latter may not get through a broken network, which the
/// emulator cannot break.
pub(crate) fn has_hung_up(session: &Session, rank: usize) -> bool {
    let teardown = session.segment.block(rank).teardown.load(Ordering::SeqCst);
    share_a_host(session.info(session.rank), session.info(rank)) && teardown & GONE != 0
        || identity::is_gone(session.info(rank))
}

/// Waits on the host until each rank has done its part in something that all ranks do together. The last one rings.
///
/// # Errors
/// An internal error after an abort; a remote error if a rank has hung up before it was done.
pub(super) fn wait_for_each(
    session: &Session,
    is_aborted: &dyn Fn() -> bool,
    is_done: impl Fn(usize) -> bool,
) -> Result {
    let bell = &session.own().bell;
    for rank in 0..session.ranks() {
        loop {
            let seen = bell.value();
            if is_done(rank) {
                break;
            }
            if is_aborted() {
                return Err(INTERNAL);
            }
            if has_hung_up(session, rank) && !is_done(rank) {
                warn_of_closed_connection(session, rank);
                return Err(REMOTE);
            }
            bell.wait(seen, SAFETY_NET);
        }
    }
    Ok(())
}

/// Logs the warning of a socket to that rank.
pub(crate) fn warn_of_closed_connection(session: &Session, rank: usize) {
    let info = session.info(rank);
    warn!(
        "socketProgress: Connection closed by remote peer rank-{rank}-of-process-{}<0>",
        info.pid
    );
}

/// Dials a rank that has hung up, as often as NCCL does.
///
/// # Errors
/// Always: a remote error after all retries, or the error of an abort.
pub(crate) fn dial(communicator: &Communicator, session: &Session, rank: usize) -> Result {
    let name = format!("rank-{rank}-of-process-{}", session.info(rank).pid);
    let refused = || Err(io::Error::from(io::ErrorKind::ConnectionRefused));
    bootstrap::dial(&name, &|| communicator.abort.is_raised(), refused)
}
