//! How the ranks of a communicator find each other.
//!
//! `ncclGetUniqueId` starts a root: one thread and one socket in the calling process, which must
//! live until all ranks have joined. Each rank connects, says who it is and hands over its device's
//! pool; when the last one is there the root makes the communicator's segment and hands it to all
//! of them, with all the pools.
//!
//! ```text
//! rank ──Hello {nranks, rank, who I am} + pool──▶ root
//! rank ◀──Welcome {token, number of pools} + segment── root      when all are there
//! rank ◀──Pools + descriptors── root                             as often as it takes
//! rank ──Received──▶ root                                        one rank after the other
//! rank ◀──end of the connection── root                           when all have everything
//! rank ◀──Refused {why}── root                                   only under NCCL_EMULATOR_STRICT
//! ```
//!
//! What does not fit together is seen by the root alone, as in NCCL: it says so and goes, and the
//! ranks wait for ever, or until they abort. A rank that never arrives is waited for in the same
//! way. A root goes when it is done, or when every rank that had joined has left again; an id that
//! nobody uses keeps its thread.

mod member;
mod root;
mod wire;

pub(crate) use member::{dial, join, join_soon};
pub(crate) use root::start as start_root;
