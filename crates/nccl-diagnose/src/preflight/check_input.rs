//! The input of a check, beside the host.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use nccl_base::launch_mode::LaunchPreference;
use serde::{Deserialize, Serialize};

/// What is known about a rank before it is checked.
#[doc(hidden)]
#[derive(Clone, Debug)]
pub struct CheckInput {
    /// The stream of its operations.
    pub stream: Option<Arc<CudaStream>>,
    pub library: Option<Loaded>,
    /// Whether that library takes virtual interfaces as well.
    pub takes_virtual: bool,
    pub preference: LaunchPreference,
    /// Variables that this process gives NCCL, which are not in the environment.
    pub set_variables: Vec<(String, String)>,
    /// Ranks on this host; `world_size` counts those of all hosts.
    pub local_ranks: usize,
    pub world_size: usize,
}

impl Default for CheckInput {
    fn default() -> Self {
        Self {
            stream: None,
            library: None,
            takes_virtual: false,
            preference: LaunchPreference::Either,
            set_variables: Vec::new(),
            local_ranks: 1,
            world_size: 1,
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[doc(hidden)]
pub struct Loaded {
    pub version: String,
    pub path: String,
    /// The GNU build id, in hexadecimal digits.
    pub build_id: Option<String>,
}
