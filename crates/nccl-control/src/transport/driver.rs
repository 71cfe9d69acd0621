//! What connections and dialers tell the one that they work for.

use crate::client::Met;
use crate::departure::Lost;
use crate::job::Job;
use crate::proto;

/// What has a machine, and connections for it.
pub(crate) trait Driver: Send + Sync {
    /// Frames of one connection have come, and perhaps its end. What follows waits for [`settle`](Self::settle).
    fn came(&self, number: proto::Connection, frames: Vec<proto::Frame>, lost: Option<Lost>);
    /// Does what waits for locks to be free.
    fn settle(&self);
    fn dialled(&self, peer: proto::MemberId, met: Met);
    fn dial_failed(&self, peer: proto::MemberId, lost: Lost);
    fn job(&self) -> &Job;
    /// As which rank it was started.
    fn slot(&self) -> usize;
}
