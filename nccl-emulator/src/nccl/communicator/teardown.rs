//! The end of a communicator: finalize, destroy, abort.
//!
//! Finalize, and a destroy without it, wait for this rank's launches to leave their streams and
//! then, since 2.32.3, for all ranks with which this rank shares memory to get there too. An abort raises the flag, so its launches end
//! as soon as the stream reaches them; the abort waits for that, and for peers to finish the piece of this rank's memory that they
//! are copying, but never for other ranks to get anywhere. Of several ranks in a process the last one does all that; as in NCCL,
//! the others return at once. An abort of a communicator that was
//! connected to ranks of other processes takes half a second more. As in NCCL, these calls also wait
//! for the work before a launch on its stream, and for the end of every graph that has captured a launch.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::thread;
use std::time::{Duration, Instant};

use super::announce::ending;
use super::identity;
use super::peers;
use super::route::Route;
use super::session::Session;
use super::state::Communicator;
use crate::code::Result;
use crate::nccl::debug::{self, info, subsystem};
use crate::nccl::ras;
use crate::options::options;
use crate::transport::teardown::{GONE, LEAVING};
use crate::version;

/// The limit of a sleep that a ring should end: a killed process does not ring.
const SAFETY_NET: Duration = Duration::from_millis(100);
/// How long a stopped process that copies from or to the memory of a rank holds up the end of that rank.
pub(super) const PATIENCE_WITH_USERS: Duration = Duration::from_secs(10);

/// Runs the job of `ncclCommFinalize`.
pub(crate) fn finalize(communicator: &Arc<Communicator>) -> Result {
    let _device = debug::on_device(communicator.device);
    wait_for_launches(communicator);
    communicator.captured.wait();
    if let Some(session) = communicator.session() {
        announce(session, LEAVING);
        wait_for_others(communicator, session);
    }
    info!(
        subsystem::DESTROY,
        "{} - Finalize COMPLETE",
        ending(communicator, "nranks")
    );
    Ok(())
}

/// Runs the job of `ncclCommDestroy` and `ncclCommAbort`: ends the handle, and frees this process's ranks
/// of the communicator with the last of them.
pub(crate) fn reclaim(communicator: &Arc<Communicator>) -> Result {
    let _device = debug::on_device(communicator.device);
    communicator.retire();
    communicator.unwatch_windows();
    let (Some(session), Some(clique)) = (communicator.session(), communicator.clique.get()) else {
        // The init failed, so no other rank knows this rank.
        complete(communicator);
        return Ok(());
    };
    // Even if the rest has to wait for other ranks of this process.
    let aborted = communicator.abort.is_raised();
    let is_gone = aborted || !communicator.is_initialized();
    announce(session, if is_gone { GONE } else { LEAVING });
    let local = (0..session.ranks())
        .filter(|&rank| session.is_local(rank))
        .count();
    let Some(all) = clique.reclaim(local) else {
        return Ok(());
    };
    let unfinalized: Vec<&Arc<Communicator>> = all
        .iter()
        .filter(|member| !member.finalized.load(Ordering::Acquire))
        .collect();
    for member in &unfinalized {
        wait_for_launches(member);
        member.captured.wait();
    }
    let until = Instant::now() + PATIENCE_WITH_USERS;
    for member in all.iter().filter(|member| member.abort.is_raised()) {
        wait_for_users(member.session().unwrap_or(session), until);
    }
    // A rank whose init failed has no connections.
    for member in unfinalized.iter().filter(|member| member.is_initialized()) {
        if let Some(session) = member.session() {
            wait_for_others(member, session);
        }
    }
    for member in &all {
        announce(member.session().unwrap_or(session), GONE);
        complete(member);
    }
    if aborted && all.iter().any(|member| member.family.ends_proxy()) {
        // NCCL's abort joins the proxy thread, which sees the abort after its poll.
        thread::sleep(options().proxy_poll);
    }
    Ok(())
}

fn complete(communicator: &Communicator) {
    ras::leave(communicator);
    communicator.leave_family();
    communicator.captured.mark_freed();
    communicator.forget_windows();
    info!(
        subsystem::DESTROY,
        "{} - {} COMPLETE",
        ending(communicator, "nranks"),
        if communicator.abort.is_raised() {
            "Abort"
        } else {
            "Destroy"
        }
    );
    if let Some(profiler) = communicator.profiler() {
        profiler.finalize();
    }
}

fn announce(session: &Session, bits: u32) {
    session.own().teardown.fetch_or(bits, Ordering::SeqCst);
    session.segment.ring_others(session.rank);
}

/// Waits until this communicator's last launch has left its stream. Each launch waits for the previous one.
pub(super) fn wait_for_launches(communicator: &Communicator) {
    let last = communicator.issue.lock().0.clone();
    if let Some((stream, sequence)) = last {
        // A stream of a failed context has dropped its jobs.
        let _ = stream.wait_until(sequence);
    }
}

/// Waits until no other rank uses the memory of this one for an operation that this rank has given up; not longer than
/// `until`.
pub(super) fn wait_for_users(session: &Session, until: Instant) {
    let own = session.rank;
    // A rank that is about to put into the memory of this one sees that it leaves, or is seen.
    fence(Ordering::SeqCst);
    for other in 0..session.ranks() {
        let uses = || session.segment.uses_memory_of(other, own);
        while uses() && !identity::is_gone(session.info(other)) && Instant::now() < until {
            thread::sleep(Duration::from_micros(200));
        }
    }
}

/// Waits, since 2.32.3, until all ranks with which this rank shares memory are leaving too. Ends early when this rank is aborted.
fn wait_for_others(communicator: &Communicator, session: &Session) {
    if !version::is_at_least(2, 32, 3) {
        return;
    }
    let bell = &session.own().bell;
    let shares = |&other: &usize| session.route(other) != Route::Network;
    for other in (0..session.ranks()).filter(shares) {
        let block = session.segment.block(other);
        loop {
            let seen = bell.value();
            if communicator.abort.is_raised() {
                return;
            }
            if block.teardown.load(Ordering::SeqCst) & LEAVING != 0 {
                break;
            }
            if peers::has_hung_up(session, other) {
                // NCCL reports success all the same.
                let _ = peers::dial(communicator, session, other);
                return;
            }
            bell.wait(seen, SAFETY_NET);
        }
    }
}
