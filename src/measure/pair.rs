//! A parent that never carries data, and a blocking child that does.
//!
//! Both share one abort flag if the parent's config says `splitShare`; so aborting the parent, which
//! does not block, frees a thread that waits inside a call on the child.

use std::time::Duration;

use crate::conformance::name_of;
use crate::nccl_call;
use crate::raw::{Comm, Rank, Result, config, last_error, settle};

/// How long NCCL may take to create a communicator.
pub(super) const LIMIT: Duration = Duration::from_secs(60);

/// Parent and child.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pair {
    pub(super) parent: Comm,
    pub(super) child: Comm,
}

impl Pair {
    /// Both, or why NCCL does not create the child; then the parent is aborted.
    pub(super) fn new(
        rank: &Rank,
        name: &str,
        shared: bool,
    ) -> Result<std::result::Result<Self, String>> {
        let mut sharing = config(false);
        sharing.splitShare = i32::from(shared);
        let (parent, code) = Comm::init(rank, name, sharing)?;
        if code != 0 {
            return Err(format!("the parent cannot be made: {}", last_error()).into());
        }
        let mut child = Comm::NULL;
        let mut blocking = config(true);
        blocking.splitShare = 0;
        let number = rank.world.rank() as i32;
        let code = nccl_call!(ncclCommSplit(
            parent.0,
            0,
            number,
            &mut child.0,
            &mut blocking
        ));
        let code = settle(parent, code, LIMIT);
        if code != 0 || child.0.is_null() {
            let text = format!("ncclCommSplit: {}, {}", name_of(code), last_error());
            let _ = nccl_call!(ncclCommAbort(parent.0));
            return Ok(Err(text));
        }
        Ok(Ok(Self { parent, child }))
    }
}
