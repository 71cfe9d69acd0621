//! All durations of the protocol, and what each of them guarantees.

/// Nanoseconds in a millisecond.
pub const MILLI: u64 = 1_000_000;

/// Durations in nanoseconds.
///
/// `lease + 4 * heartbeat_interval <= max_unanswered_heartbeats * heartbeat_interval` keeps two generations apart: a
/// member counts the proven ends of others only while its lease runs, and no coordinator leaves out a living member
/// before that member's lease has run out. Two heartbeats account for another coordinator, which may have coordinated
/// for a moment and granted the lease; two account for the votes, which are not older than that. The coordinator counts
/// heartbeats instead of measuring time, so that a clock that jumps once shortens nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// How often the coordinator sends a heartbeat to every member.
    pub heartbeat_interval: u64,
    /// How long after a confirmed exchange with the coordinator a member knows that no generation exists without it.
    pub lease: u64,
    /// The number of consecutive heartbeats that a living member must leave unanswered before it may be left out of the
    /// next generation.
    pub max_unanswered_heartbeats: u64,
    /// How long a member may leave heartbeats unanswered before it is a suspect. Nothing ends because of that.
    pub suspect_after: u64,
    /// How long a lost connection may take to be restored.
    pub resume: u64,
    /// How long a launcher's report of an end waits for a leave message that it may have overtaken, while the link is ready.
    pub exit_report_wait: u64,
    /// The time between two attempts to connect.
    pub redial: u64,
    /// How much later the next member in failover order starts a failover.
    pub stagger: u64,
    /// How long a vote binds against other candidates, unless its candidate ends.
    pub hold: u64,
    /// How long a candidate asks for votes before it lets others try.
    pub elect: u64,
    /// How long a candidate that has a majority waits for the remaining votes.
    pub grace: u64,
    /// How long a request to the coordinator may stay unanswered before the coordinator counts as unresponsive.
    pub unresponsive: u64,
    /// How long the coordinator may be without answers of a majority before it reports that there is none.
    pub confirm: u64,
    /// How long a member may be without a coordinator before it reports that it is cut off.
    pub majority_timeout: u64,
    /// How long an unreachable member is tolerated after NCCL has made progress with it.
    pub progress: u64,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            heartbeat_interval: 500 * MILLI,
            lease: 4000 * MILLI,
            max_unanswered_heartbeats: 12,
            suspect_after: 2000 * MILLI,
            resume: 2000 * MILLI,
            exit_report_wait: 500 * MILLI,
            redial: 200 * MILLI,
            stagger: 1000 * MILLI,
            hold: 2000 * MILLI,
            elect: 3000 * MILLI,
            grace: 1000 * MILLI,
            unresponsive: 4000 * MILLI,
            confirm: 3000 * MILLI,
            majority_timeout: 12000 * MILLI,
            progress: 3000 * MILLI,
        }
    }
}
