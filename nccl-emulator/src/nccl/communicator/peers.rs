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
//! | split | remote error |
//! | destroy, shared memory | since 2.32.3 after the retries of a connection |

use std::io;
use std::sync::atomic::Ordering;

use super::identity;
use super::route::share_a_host;
use super::session::Session;
use super::state::Communicator;
use crate::code::Result;
use crate::nccl::bootstrap;
use crate::nccl::debug::warn;
use crate::transport::teardown::GONE;

/// Whether the sockets of a rank are closed: its process has ended, or its end of the communicator was aborted or freed.
/// For a rank of another host only the former counts: news of the latter may not get through a broken network, which the
/// emulator cannot break.
pub(crate) fn has_hung_up(session: &Session, rank: usize) -> bool {
    let teardown = session.segment.block(rank).teardown.load(Ordering::SeqCst);
    share_a_host(session.info(session.rank), session.info(rank)) && teardown & GONE != 0
        || identity::is_gone(session.info(rank))
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
