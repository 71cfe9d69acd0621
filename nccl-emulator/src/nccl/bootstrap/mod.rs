//! The bootstrap: the ranks of a communicator meet at a root.
//!
//! `ncclGetUniqueId` starts a root: one thread and one socket in the calling process, which must
//! live until all ranks have joined. Each rank connects, sends its identity and hands over its
//! device's pool. When all ranks have connected, the root makes the communicator's segment and
//! hands it to all of them, with all the pools.
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
//! Only the root detects a mismatch between the ranks, as in NCCL: the root logs it and ends, and
//! the ranks wait for ever, or until they abort. The ranks also wait like this for a rank that
//! never arrives. A root ends when it is done, is dismissed, or when every rank that had joined has
//! left again; the root of an unused id keeps its thread.

mod member;
mod root;
mod wire;

pub(crate) use member::{dial, join, join_soon};
pub(crate) use root::start as start_root;
