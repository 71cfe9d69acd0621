//! What a rank's program says that it does (`World::phase`).

/// What a rank does, as far as it has said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// It has come, and has said nothing yet.
    Joined,
    /// This.
    Said(String),
}

impl Phase {
    /// As people are told.
    pub(super) fn name(&self) -> &str {
        match self {
            Self::Joined => "joined",
            Self::Said(name) => name,
        }
    }
}
