//! The interface of connections and dialers to their driver.

use crate::connect::AuthenticatedConnection;
use crate::departure::Lost;
use crate::job::Job;
use crate::proto;

/// The driver of a machine, and of its connections.
pub(crate) trait Driver: Send + Sync {
    /// Frames have arrived over one connection, and perhaps its end. Further effects wait for [`settle`](Self::settle).
    fn frames_arrived(
        &self,
        number: proto::Connection,
        frames: Vec<proto::Frame>,
        lost: Option<Lost>,
    );
    /// Carries out effects that need free locks.
    fn settle(&self);
    fn dialled(&self, peer: proto::MemberId, established: AuthenticatedConnection);
    fn dial_failed(&self, peer: proto::MemberId, lost: Lost);
    fn job(&self) -> &Job;
    /// The rank as which it was started.
    fn slot(&self) -> usize;
}
