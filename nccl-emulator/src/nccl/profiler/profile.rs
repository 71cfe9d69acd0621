//! The data that an operation keeps from its call for its events.

use super::event::Handle;
use crate::nccl::task::ProfileIndex;
use crate::numbers::datatype::DataType;

/// See the module.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Profile {
    /// The mask when the call was made.
    pub(super) mask: i32,
    pub(super) group_api: Handle,
    pub(super) api: Handle,
    pub(super) count: u64,
    pub(super) data_type: DataType,
    pub(super) tag: u64,
}

impl Profile {
    /// Adds a profile to the list of a launch.
    pub(crate) fn keep(self, list: &mut Vec<Self>) -> Option<ProfileIndex> {
        list.push(self);
        ProfileIndex::new(list.len() as u32)
    }
}
