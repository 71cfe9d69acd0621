//! Files for PyTorch's flight-recorder analyser (`torchfrtrace`, the module `torch.distributed.flight_recorder.fr_trace`).
//!
//! The analyser reads one pickle per rank, takes the first call of a rank that it has not yet seen, looks for the call
//! with the same `collective_seq_id` in the same process group on all ranks of that group, and compares kind, sizes,
//! types and state. These files compensate for what the analyser does not handle:
//!
//! - **Rings.** It drops calls from the start of a file by `record_id`, which counts the calls of all groups of a rank
//!   together. Here each group begins with the first collective that the recordings of all its ranks have, and record ids
//!   begin at 0 on all ranks.
//! - **Calls between some ranks.** `collective_seq_id` is the number among the calls of all ranks, without messages and groups of
//!   messages, of which each rank has a number of its own.
//! - **States.** It treats ranks that are in the same call in different states as an error. A recording knows when a
//!   call was found done, but not that it was not done before. So a collective has one state on all ranks.
//! - **Messages.** It treats a group in which two ranks send to each other as an error, and confuses groups with
//!   collectives of the same number. Here the messages from one rank to another are a process group of these two ranks,
//!   and each message is a call of its own, numbered within that group.
//!
//! - `groups`: the process groups, and what the recordings of several ranks say together;
//! - `sizes`: the sizes and types of a collective; `dump`: the values in a file.

mod dump;
mod groups;
mod sizes;

use self::dump::Dump;
use self::groups::Groups;
use super::Timeline;

impl Timeline {
    /// Returns the input of PyTorch's flight-recorder analyser: the ranks with a recording, and for each the content of
    /// its file, a pickle. The name of a file ends in the number of its rank: `nccl_trace_rank_0`.
    ///
    /// Communicators are process groups, numbered from 0, with the communicator's name for their description. Calls that
    /// failed and captures are left out; so are communicators of earlier generations of the world, unless all of their ranks
    /// have a recording.
    ///
    /// ```
    /// use nccl::recorder::{self, Timeline};
    ///
    /// let timeline = Timeline::merge(vec![recorder::snapshot()])?;
    /// let directory = std::env::temp_dir().join(format!("nccl-doc-pytorch-{}", std::process::id()));
    /// std::fs::create_dir_all(&directory).unwrap();
    /// for (rank, pickle) in timeline.to_pytorch_traces() {
    ///     std::fs::write(directory.join(format!("nccl_trace_rank_{rank}")), pickle).unwrap();
    /// }
    /// // torchfrtrace DIRECTORY
    /// # std::fs::remove_dir_all(directory).unwrap();
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn to_pytorch_traces(&self) -> impl Iterator<Item = (usize, Vec<u8>)> + '_ {
        let groups = Groups::of(self);
        let ranks: Vec<usize> = groups.files.keys().copied().collect();
        ranks.into_iter().map(move |rank| {
            let options = serde_pickle::SerOptions::new().proto_v2();
            // Serializing cannot fail: all keys are strings, and no sequence lacks its length.
            let pickle = serde_pickle::to_vec(&Dump::of(&groups, rank), options);
            (rank, pickle.unwrap_or_default())
        })
    }
}
