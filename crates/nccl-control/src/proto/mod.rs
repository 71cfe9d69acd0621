//! The control plane as state machines, without clock, lock, thread, socket, cipher or log.
//!
//! A machine takes inputs ([`MemberMachine::handle`], [`MemberMachine::handle_timeout`]), and returns its outputs
//! ([`MemberMachine::poll`]) and the time of its next timeout ([`MemberMachine::next_timeout`]). A driver (`Node`, with
//! its services) connects the machine to sockets and clocks; the simulator in `tests/sim` connects many machines to
//! each other in virtual time.
//!
//! - `id`: the names of members, generations and terms; `membership`: the members of a generation; `member_list`: how they
//!   are encoded; `timing`: all durations;
//!   `message`: the messages of machines; `log`: entries for all members;
//! - `link`: links that outlive connections;
//! - `core`: the state of a member in every role; `forming`, `candidate`, `coordinator`: three of the roles; `member`:
//!   the machine;
//! - `observer`: the machine of a process that is not a member and does not vote;
//! - `mistake`: planted mistakes that the simulator must find.
//!
//! # Guarantees
//!
//! 1. A generation never has two active successors.
//! 2. All members of a successor have received the same entries of their generation.
//! 3. A member that is not in the successor reports that it reaches no majority or was left behind, or reports the
//!    reason it received, and forms no generation.
//! 4. No living process is reported as dead.
//! 5. All members learn the outcome within a bound after the last fault, and members that reach each other and are a
//!    majority form the next generation together.
//! 6. Nothing waits forever.

mod candidate;
mod coordinator;
mod core;
mod forming;
mod id;
mod link;
mod log;
mod member;
mod member_list;
mod membership;
mod message;
mod mistake;
mod observer;
mod timing;

#[cfg(test)]
mod tests;

pub use self::core::Event;
pub use self::id::{Generation, MemberId, ProcessInfo, Term, Time};
pub use self::link::{Connection, ConnectionRequest};
pub use self::log::{Broadcast, Entry, LogPart, OperatorDecision};
pub use self::member::{Command, Input, MemberMachine, Output, StartRole};
pub use self::membership::{Membership, SharedMembership};
pub use self::message::{
    Ended, Exclusion, Frame, Heartbeat, HeartbeatReply, JoinRole, Message, Proof,
    ReconfigureRequest, VoteReport, VoteRequest,
};
pub use self::mistake::{Mistake, Mistakes};
pub use self::observer::ObserverMachine;
pub use self::timing::{MILLI, Timing};
