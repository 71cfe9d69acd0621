//! The control plane as machines: no clock, lock, thread, socket, cipher or log.
//!
//! A machine is given inputs ([`MemberMachine::handle`], [`MemberMachine::handle_timeout`]) and asked for outputs ([`MemberMachine::poll`]) and for the
//! time of its next timeout ([`MemberMachine::next_timeout`]). A driver (`Node`, with its services) connects it to sockets and clocks; the simulator in `tests/sim`
//! connects many of them to each other in virtual time.
//!
//! - `id`: members, generations and terms; `member_list`: how a list of members is encoded; `timing`: all durations;
//!   `message`: the messages of machines; `log`: entries for all members;
//! - `link`: links that outlive connections;
//! - `core`: the state of a member in every role; `forming`, `candidate`, `coordinator`: three of the roles; `member`: the machine;
//! - `observer`: the machine of a process that is no member and does not vote;
//! - `mistake`: planted mistakes that the simulator has to find.
//!
//! # Guarantees
//!
//! 1. Of one generation there are never two active successors.
//! 2. All members of a successor have received the same entries of their generation.
//! 3. A member that is not in the successor reports that it reaches no majority or was left behind, or the reason it received, and
//!    forms no generation.
//! 4. No living process is reported as dead.
//! 5. All members learn of it within a bound after the last fault, and members that reach each other and are a majority form the
//!    next generation together.
//! 6. Nothing waits for ever.

mod candidate;
mod coordinator;
mod core;
mod forming;
mod id;
mod link;
mod log;
mod member;
mod member_list;
mod message;
mod mistake;
mod observer;
mod timing;

#[cfg(test)]
mod tests;

pub use self::core::Event;
pub use self::id::{Generation, MemberId, Membership, ProcessInfo, SharedMembership, Term, Time};
pub use self::link::{Connection, ConnectionRequest};
pub use self::log::{Broadcast, Entry, LogPart, OperatorDecision};
pub use self::member::{Command, Input, MemberMachine, Output, StartRole};
pub use self::message::{
    Ended, Exclusion, Frame, Heartbeat, HeartbeatReply, JoinRole, Message, Proof,
    ReconfigureRequest, VoteReport, VoteRequest,
};
pub use self::mistake::{Mistake, Mistakes};
pub use self::observer::ObserverMachine;
pub use self::timing::{MILLI, Timing};
