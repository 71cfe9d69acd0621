//! What the ranks of one communicator share: one segment of memory, mapped by every rank, and no
//! locks in it.
//!
//! ```text
//! Header     how many ranks, the collective in flight, the number of spinning executors
//! RankBlock  one for each rank: its bell, what peers delivered to it, what it offers to a collective, who it is
//! Side       one for each (owner, peer): the send and the receive that the owner has posted for that peer
//! Exchange   one for each (source, destination): who copies the message in flight, how far it got
//! signals    some for each (source, destination): how often the one has signalled the other
//! ```
//!
//! A message is moved by whichever of its two ends sees that both have posted: it copies straight
//! from the sender's pool into the receiver's ([`exchange`]). A collective is worked off by all
//! ranks together ([`rendezvous`]). Nothing is ever buffered in between, so a send is complete only
//! when its receive was there. A process that is killed leaves nothing locked: the others wait, as
//! they do over NCCL's shared memory, until they abort.

mod copy;
mod direction;
mod exchange;
pub(crate) mod prefetch;
mod rendezvous;
mod segment;
mod shared_memory;
mod socket;

pub(crate) use copy::{CHUNK, copy};
pub(crate) use direction::Direction;
pub(crate) use exchange::{Claim, Exchange, Posted, Spoiled};
pub(crate) use rendezvous::{Arrival, Offer};
pub(crate) use segment::{RankBlock, RankInfo, SIGNALS, Segment, teardown};
pub(crate) use socket::{
    Address, DESCRIPTORS_PER_MESSAGE, Listener, Received, Socket, wait_readable,
};
