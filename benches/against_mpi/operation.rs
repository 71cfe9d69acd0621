//! The measured operations: the names are those of the orders to the ranks.

/// A measured operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    AllToAll,
    /// The same, called through the safe crate instead of the C function.
    AllToAllByCrate,
    AllReduce,
    /// One message to and one from the other rank of a pair, in a group.
    SendRecv,
    /// A copy by each rank, all at once.
    Memcpy,
}

impl Operation {
    const ALL: [Self; 5] = [
        Self::AllToAll,
        Self::AllToAllByCrate,
        Self::AllReduce,
        Self::SendRecv,
        Self::Memcpy,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AllToAll => "all-to-all",
            Self::AllToAllByCrate => "all-to-all-by-crate",
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
