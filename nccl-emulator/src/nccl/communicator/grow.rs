//! Growing: the ranks of a communicator and new ranks create a larger communicator.
//!
//! One rank of the parent, the coordinator, starts a root and announces it to the first and the last
//! rank; both wait for that inside `ncclCommGrow`, in the calling thread. All ranks of the parent can
//! compute the id of the root; new ranks get the id from the program.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::session::Session;
use super::state::Communicator;
use crate::code::{INTERNAL, INVALID_ARGUMENT, Result};
use crate::nccl::debug::warn;
use crate::nccl::unique_id::{UniqueId, mix};

/// Returns the id of the parent's grow of this number.
pub(crate) fn handle_id(session: &Session, number: u64) -> UniqueId {
    UniqueId::derived("grow", &[session.token, number])
}

/// Returns the hash of the grown communicator, the same on old and new ranks.
pub(crate) fn hash_of_grown(id: &UniqueId, ranks: i32) -> u64 {
    mix(&[id.magic, ranks as u64])
}

/// Announces grow `number` to the first and the last rank.
pub(crate) fn send_handle(session: &Session, number: u64) {
    if session.ranks() == 1 {
        return;
    }
    for rank in [0, session.ranks() - 1] {
        let block = session.segment.block(rank);
        block.grow.store(number, Ordering::SeqCst);
        block.bell.ring();
    }
}

/// Waits, on the first and the last rank, until the coordinator has announced a grow, and checks that
/// its number is `number`.
pub(crate) fn await_handle(parent: &Arc<Communicator>, session: &Session, number: u64) -> Result {
    if session.ranks() == 1 || (session.rank != 0 && session.rank + 1 != session.ranks()) {
        return Ok(());
    }
    let _inside = parent.enter();
    let own = session.own();
    loop {
        let seen = own.bell.value();
        let announced = own.grow.swap(0, Ordering::SeqCst);
        if announced == number {
            return Ok(());
        }
        if announced != 0 {
            warn!(
                "ncclCommGrow: magic mismatch computed by the root, got {announced:x} expected {number:x}"
            );
            return Err(INVALID_ARGUMENT);
        }
        if parent.abort.is_raised() {
            return Err(INTERNAL);
        }
        own.bell.wait(seen, Duration::from_millis(100));
    }
}
