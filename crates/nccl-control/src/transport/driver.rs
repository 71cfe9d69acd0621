//! The interface that connections and dialers use to reach their driver.

use crate::connect::AuthenticatedConnection;
use crate::departure::Lost;
use crate::job::Job;
use crate::proto;

/// The driver of a machine, and of its connections.
pub(crate) trait MachineDriver: Send + Sync {
    /// Frames have arrived over one connection, which may also have ended. Further effects are deferred to
    /// [`run_deferred_work`](Self::run_deferred_work).
    fn frames_arrived(
        &self,
        number: proto::Connection,
        frames: Vec<proto::Frame>,
        lost: Option<Lost>,
    );
    /// Carries out the effects that must not run while locks are held.
    fn run_deferred_work(&self);
    fn dialled(&self, peer: proto::MemberId, connection: AuthenticatedConnection);
    fn dial_failed(&self, peer: proto::MemberId, lost: Lost);
    fn job(&self) -> &Job;
    /// The rank as which the process was started.
    fn slot(&self) -> usize;
}
