//! The operations of a launch, in lists.

use super::lane::Lane;
use crate::nccl::profiler::Profile;
use crate::nccl::task::{CollectiveTask, MessageTask, OneSidedTask};

/// The operations of a launch. The communicator keeps the lists between launches to reuse their
/// capacity.
#[derive(Default)]
pub(crate) struct Lists {
    pub(crate) collectives: Vec<CollectiveTask>,
    pub(crate) messages: Vec<MessageTask>,
    pub(crate) one_sided: Vec<OneSidedTask>,
    /// What a profiler is told of the operations; empty if it wants no events.
    pub(crate) profiles: Vec<Profile>,
    pub(super) lanes: Vec<Lane>,
}

impl Lists {
    /// Empties the lists.
    pub(crate) fn clear(&mut self) {
        self.collectives.clear();
        self.messages.clear();
        self.one_sided.clear();
        self.profiles.clear();
        self.lanes.clear();
    }
}
