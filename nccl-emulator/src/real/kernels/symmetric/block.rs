//! One block of a launch.

use std::sync::Arc;

use super::super::block::{Context, Stop, Wait};
use super::super::functions::Collective;
use super::super::memory::{Memory, View, Violation};
use super::address::Buffer;
use super::arguments::Launch;
use super::layout::Layout;
use super::profile::Profile;
use super::works::Work;

/// One block of a launch.
pub(super) struct Block {
    pub(super) context: Arc<Context>,
    pub(super) launch: Arc<Launch>,
    pub(super) index: usize,
    pub(super) abort: Option<View>,
}

impl Block {
    /// Waits until `ready`, or until the communicator is aborted.
    pub(super) async fn wait(
        &self,
        wait: Wait,
        ready: impl Fn() -> Result<bool, Violation> + Send + Sync,
    ) -> Result<(), Stop> {
        let abort = self.abort.as_ref();
        self.context.wait(self.index, wait, abort, ready).await
    }

    pub(super) fn memory(&self) -> &dyn Memory {
        self.context.memory.as_ref()
    }

    pub(super) fn profile(&self) -> Option<&Profile> {
        self.launch.profile.as_ref()
    }

    /// Returns the element size in bytes as the kernel counts: 1 for an all-gather.
    pub(super) fn element(&self) -> usize {
        match (self.launch.kernel.collective, self.launch.kernel.ty) {
            (Collective::AllGather, _) | (_, None) => 1,
            (_, Some(ty)) => ty.size() as usize,
        }
    }

    /// Returns the input and the output of a work.
    pub(super) fn buffers(&self, work: &Work) -> Result<(Buffer, Buffer), Stop> {
        let team = self.launch.team;
        match &self.context.layout.symmetric {
            Some(Layout::Windows { window, .. }) => {
                let open = |at, offset| Buffer::open(self.memory(), window, at, offset);
                Ok((
                    open(work.input_window, work.input)?,
                    open(work.output_window, work.output)?,
                ))
            }
            _ => {
                let map = |address| Buffer::new(address, work.stride, team.rank);
                Ok((map(work.input), map(work.output)))
            }
        }
    }
}
