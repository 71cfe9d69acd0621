//! Planted mistakes that the simulator must find.
//!
//! With the feature `mistakes`, a machine can be configured to make one of them. Without the feature,
//! [`Mistakes::makes`] is always `false`, and the compiler removes the branches.

/// One wrong rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mistake {
    /// A connection that ended is treated as the end of its process.
    ClosedIsDead,
    /// A member that does not answer is counted as a vote.
    UnresponsiveVotes,
    /// A candidate does not increment the round, so that two terms have the same round and the same coordinator.
    RoundReused,
    /// A new coordinator does not propose the successor that was accepted.
    DecisionForgotten,
    /// A frame for an earlier incarnation of this process is accepted.
    StaleIncarnation,
    /// A voter gives its vote to every candidate.
    VotesTwice,
    /// Proven ends reduce the majority although the lease has run out.
    LeaseIgnored,
    /// Members that are merely unreachable reduce the majority.
    UnreachableRemovesVoter,
    /// A living member is left out before its lease has run out.
    LeftOutEarly,
    /// A new coordinator keeps its own log instead of the longest.
    ShorterLogKept,
    /// Unacknowledged messages are not sent again after a connection was lost.
    NotRepeated,
    /// Messages that have arrived are sent again after a connection was lost, and handled again.
    HandledTwice,
    /// A coordinator appends entries without having confirmed its majority.
    UnconfirmedCoordinatorAppends,
    /// A successor becomes active before a majority has accepted it.
    ActiveAlone,
    /// A member that has received other entries is allowed to follow.
    DivergentFollows,
    /// Messages of members that the last coordinator had not appended to the log are lost.
    UnloggedForgotten,
    /// A member that abstains still counts the ends that it sees.
    AbstainerCounts,
    /// A witness coordinates.
    WitnessCoordinates,
    /// A new coordinator does not know which members abstain.
    AbstentionForgotten,
    /// Other members count an end because a member bound to a successor has counted it.
    BoundReportsEnd,
    /// A member that has left still votes, and counts the ends that it sees.
    LeaverVotes,
    /// A member that is left behind is removed from the voters by processes that do not know the successor that it has
    /// voted for.
    BoundLeaves,
    /// A coordinator ignores that another member may have coordinated for a while.
    GapForgotten,
    /// A coordinator forgets which changes of the store it has made, and applies a repeated one again.
    ChangesForgotten,
    /// A rank does not report to a new coordinator which exchanges it has the outcomes of.
    OutcomesForgotten,
    /// A coordinator does not send again what a rank that follows again has not received of a channel.
    MessagesForgotten,
    /// A coordinator that takes over continues the channels of the previous one.
    ChannelsContinued,
}

impl Mistake {
    /// All mistakes.
    pub const ALL: [Self; 27] = [
        Self::ClosedIsDead,
        Self::UnresponsiveVotes,
        Self::RoundReused,
        Self::DecisionForgotten,
        Self::StaleIncarnation,
        Self::VotesTwice,
        Self::LeaseIgnored,
        Self::UnreachableRemovesVoter,
        Self::LeftOutEarly,
        Self::ShorterLogKept,
        Self::NotRepeated,
        Self::HandledTwice,
        Self::UnconfirmedCoordinatorAppends,
        Self::ActiveAlone,
        Self::DivergentFollows,
        Self::UnloggedForgotten,
        Self::AbstainerCounts,
        Self::WitnessCoordinates,
        Self::AbstentionForgotten,
        Self::BoundReportsEnd,
        Self::LeaverVotes,
        Self::BoundLeaves,
        Self::GapForgotten,
        Self::ChangesForgotten,
        Self::OutcomesForgotten,
        Self::MessagesForgotten,
        Self::ChannelsContinued,
    ];
}

/// The mistake that a machine makes, if any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mistakes(#[cfg(feature = "mistakes")] pub Option<Mistake>);

impl Mistakes {
    /// Whether it makes this mistake.
    #[inline]
    #[must_use]
    pub fn makes(self, mistake: Mistake) -> bool {
        #[cfg(feature = "mistakes")]
        return self.0 == Some(mistake);
        #[cfg(not(feature = "mistakes"))]
        {
            let _ = mistake;
            false
        }
    }
}
