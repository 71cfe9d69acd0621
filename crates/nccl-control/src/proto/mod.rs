//! The control plane as machines: no clock, lock, thread, socket, cipher or log.
//!
//! A machine is told what happens ([`Member::handle`], [`Member::handle_timeout`]) and asked what to do ([`Member::poll`]) and when
//! it wants to be asked again ([`Member::next_timeout`]). A driver connects it to sockets and clocks; the simulator in `tests/sim`
//! connects many of them to each other in virtual time.
//!
//! - `id`: who takes part; `timing`: all durations; `message`: what machines tell each other; `log`: what all hear;
//! - `link`: sessions that outlive connections;
//! - `core`: what a member is in every role; `forming`, `candidate`, `coordinator`: three of the roles; `member`: the machine;
//! - `observer`: the machine of a process that is no member and does not vote;
//! - `mistake`: what the simulator has to find.
//!
//! # What is promised
//!
//! 1. Of one generation there are never two successors that are active.
//! 2. All members of a successor have heard the same of their generation.
//! 3. A member that is not in the successor says that it reaches no majority or was left behind, or what it was told, and makes
//!    nothing.
//! 4. No process is called dead that lives.
//! 5. All hear within a bound after the last fault, and members that reach each other and are a majority go on together.
//! 6. Nothing waits for ever.

mod candidate;
mod coordinator;
mod core;
mod forming;
mod id;
mod link;
mod log;
mod member;
mod message;
mod mistake;
mod observer;
mod timing;

#[cfg(test)]
mod tests;

pub use self::core::Event;
pub use self::id::{Generation, MemberId, Membership, Peer, SharedMembership, Term, Time};
pub use self::link::{Connection, Wire};
pub use self::log::{Entry, LogPart, OperatorWord, Said};
pub use self::member::{Command, Input, Member, Output, Seat};
pub use self::message::{
    Beat, Ended, Exclusion, Frame, Message, Place, Proof, Pulse, Report, Solicit, Wish,
};
pub use self::mistake::{Mistake, Mistakes};
pub use self::observer::Observer;
pub use self::timing::{MILLI, Timing};
