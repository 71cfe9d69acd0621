//! A communicator's handle, and the calls of its life.

use std::time::Duration;

use nccl_sys::{ncclComm_t, ncclConfig_t, ncclResult_t, ncclUniqueId};

use super::{IN_PROGRESS, Rank, library, text, wait_until};
use crate::nccl_call;

/// A handle that threads may share. It is never destroyed implicitly.
#[derive(Clone, Copy, Debug)]
pub struct Comm(pub ncclComm_t);

// SAFETY: a number; NCCL allows it on any thread, and the programs that use it from two at a time do so to observe the
// effect, in a process of their own.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

impl Comm {
    /// No communicator.
    pub const NULL: Self = Self(std::ptr::null_mut());

    /// Creates a communicator of all ranks of a world, with this config; returns it with the code after waiting.
    ///
    /// # Errors
    /// The world's. A refusal of NCCL is the code.
    pub fn init(rank: &Rank, name: &str, mut config: ncclConfig_t) -> super::Result<(Self, u32)> {
        let id = rank.unique_id(name)?;
        let mut comm = Self::NULL;
        let (size, number) = (rank.world.size() as i32, rank.world.rank() as i32);
        let code = nccl_call!(ncclCommInitRankConfig(
            &mut comm.0,
            size,
            id,
            number,
            &mut config
        ));
        Ok((comm, settle(comm, code, Duration::from_secs(60))))
    }

    /// As [`init`](Self::init); a refusal is an error.
    ///
    /// # Errors
    /// The world's, and NCCL's code.
    pub fn new(rank: &Rank, name: &str, blocking: bool) -> super::Result<Self> {
        let (comm, code) = Self::init(rank, name, config(blocking))?;
        match code {
            0 => Ok(comm),
            code => Err(format!("a communicator cannot be made: {code}, {}", last_error()).into()),
        }
    }

    /// A communicator of one rank with an id of its own.
    #[must_use]
    pub fn alone(mut config: ncclConfig_t) -> (Self, u32) {
        let mut id = ncclUniqueId::default();
        let mut comm = Self::NULL;
        match nccl_call!(ncclGetUniqueId(&mut id)) {
            0 => {
                let code = nccl_call!(ncclCommInitRankConfig(&mut comm.0, 1, id, 0, &mut config));
                (comm, settle(comm, code, Duration::from_secs(60)))
            }
            code => (comm, code),
        }
    }

    /// `ncclCommAbort`; its code.
    #[must_use]
    pub fn abort(self) -> u32 {
        nccl_call!(ncclCommAbort(self.0))
    }

    /// `ncclCommDestroy`; its code.
    #[must_use]
    pub fn destroy(self) -> u32 {
        nccl_call!(ncclCommDestroy(self.0))
    }

    /// The state from `ncclCommGetAsyncError`.
    #[must_use]
    pub fn state(self) -> u32 {
        let mut state = ncclResult_t(0);
        match nccl_call!(ncclCommGetAsyncError(self.0, &mut state)) {
            0 => state.0,
            code => code,
        }
    }
}

/// A config with nothing set but whether calls block.
#[must_use]
pub fn config(blocking: bool) -> ncclConfig_t {
    let mut config = ncclConfig_t::default();
    config.version = config.version.min(library().version.code() as u32);
    config.blocking = i32::from(blocking);
    config
}

/// Waits until a call that returned `code` is complete; [`IN_PROGRESS`] if it is not within `timeout`.
///
/// NCCL's split, shrink and grow return success while the work is in progress; only the state shows that.
#[must_use]
pub fn settle(comm: Comm, mut code: u32, timeout: Duration) -> u32 {
    if code != 0 && code != IN_PROGRESS {
        return code;
    }
    wait_until(timeout, || {
        code = comm.state();
        code != IN_PROGRESS
    });
    code
}

/// The text of the last error of this process.
#[must_use]
pub fn last_error() -> String {
    match super::api().ncclGetLastError {
        // SAFETY: the function ignores its argument and returns a text in static memory.
        Some(function) => unsafe { text(function(std::ptr::null_mut())) },
        None => "(missing)".into(),
    }
}
