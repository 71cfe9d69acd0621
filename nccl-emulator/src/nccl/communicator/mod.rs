//! Communicators: their handles, their life, and the state that `ncclCommGetAsyncError` reports.
//!
//! ```text
//! init ──job──▶ ready ◀──▶ busy (non-blocking: 7 until the pending group is through)
//!                 │ error: stays, every later call returns it
//!                 ├─ finalize ─▶ flushed ─ destroy ─▶ gone
//!                 ├─ destroy ──────────────────────▶ gone
//!                 └─ abort, from any state, any thread ▶ gone
//! ```
//!
//! A handle is a number, never an address ([`Registry`](cuda_emulator::registry::Registry)); the use of a handle that
//! has ended is recognised and recorded as a violation. Jobs on streams hold the communicator itself, so no memory is
//! unmapped under them.
//!
//! [`Communicator`] is in `state`. Its parts are in `session`, `route`, `family`, `connections`, `clique`, `window`,
//! `captured_count` and `background`. The functions that use it are in the other files.

mod announce;
mod background;
mod captured;
mod captured_count;
mod child;
mod clique;
mod connect;
mod connections;
mod family;
mod grow;
mod identity;
mod init;
mod lsa;
mod nodes;
mod peers;
mod revoke;
mod route;
mod session;
mod state;
mod symmetric;
mod teardown;
mod window;
mod windows;

pub(crate) use announce::ending;
pub(crate) use background::Background;
pub(crate) use captured::Captured;
pub(crate) use child::{ChildKind, ChildRequest, OutSlot, create_child};
pub(crate) use connect::{finish_algorithm, finish_peers, start_algorithm, start_peers};
pub(crate) use connections::{Connections, algorithm};
pub(crate) use grow::{await_handle, handle_id, hash_of_grown, send_handle};
pub(crate) use identity::process;
pub(crate) use init::{InitRequest, Meeting, init};
pub(crate) use lsa::{Team, lsa_pointer, peer_pointer};
pub(crate) use peers::{has_hung_up, warn_of_closed_connection};
pub(crate) use revoke::{revoke, stop_launches};
pub(crate) use route::Route;
pub(crate) use session::Session;
pub(crate) use state::{Communicator, lookup, peek, report_dead};
pub(crate) use symmetric::{SymmetricTask, run_symmetric};
pub(crate) use teardown::{finalize, reclaim};
pub(crate) use window::{
    Window, WindowRequest, WindowSlot, forget_allocation, remember_allocation,
};
pub(crate) use windows::{deregister_window, find_window};
