//! The data path between the ranks of a communicator: one shared memory segment, mapped by every
//! rank, without locks.
//!
//! ```text
//! Header     how many ranks, the collective in flight, the number of spinning executors
//! RankBlock  one for each rank: its bell, what peers delivered to it, what it offers to a collective, who it is
//! Side       one for each (owner, peer): the send and the receive that the owner has posted for that peer
//! Exchange   one for each (source, destination): who copies the message in flight, how far it got
//! signals    some for each (source, destination): how often the one has signalled the other
//! PutLog     one for each (source, destination): the last puts and signals from the one to the other
//! ```
//!
//! When one end of a message sees that both ends have posted, it copies the data straight from the sender's pool into the
//! receiver's ([`exchange`]). All ranks work on a collective together ([`rendezvous`]). No data is buffered in between, so a
//! send completes only with its receive. A killed process leaves no lock held: its peers wait, as they do over NCCL's shared
//! memory, until they abort. A rank that aborts withdraws what it has posted and where it has arrived, and waits until no peer
//! uses its memory for that any more.

mod copy;
mod direction;
mod exchange;
pub(crate) mod prefetch;
mod put_log;
mod rendezvous;
mod segment;
mod shared_memory;
mod socket;

pub(crate) use copy::{CHUNK, copy};
pub(crate) use direction::Direction;
pub(crate) use exchange::{Claim, Exchange, Posted, Spoiled};
pub(crate) use put_log::{Action, KEPT};
pub(crate) use rendezvous::{Arrival, Offer, Taken};
pub(crate) use segment::{RankBlock, RankInfo, SIGNALS, Segment, busy, teardown};
pub(crate) use socket::{
    Address, DESCRIPTORS_PER_MESSAGE, Listener, Received, Socket, wait_readable,
};
