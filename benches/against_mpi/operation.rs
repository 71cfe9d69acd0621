//! What is measured: the names are those of the orders that ranks take.

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    AllToAll,
    AllReduce,
    /// One message to and one from the other rank of a pair, in a group.
    SendRecv,
    /// A copy by each rank, all at once.
    Memcpy,
}

impl Operation {
    const ALL: [Self; 4] = [
        Self::AllToAll,
        Self::AllReduce,
        Self::SendRecv,
        Self::Memcpy,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AllToAll => "all-to-all",
            Self::AllReduce => "all-reduce",
            Self::SendRecv => "send+recv",
            Self::Memcpy => "memcpy",
        }
    }

    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|operation| operation.name() == name)
    }
}
