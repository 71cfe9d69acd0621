//! The ways of an all-to-all that `--algo` chooses from: one line each, and nothing else to change.

use nccl::{AllToAllAlgorithm, Capability};

/// One way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Algorithm {
    /// What `--algo`, the tables, the JSON file and the plot call it.
    pub name: &'static str,
    /// What it is, for `--help`.
    pub about: &'static str,
    /// The same for the crate.
    pub way: AllToAllAlgorithm,
    /// What the loaded library has to have for it.
    pub needs: Option<Capability>,
    /// Whether groups take it, and with them `-m` and `-G`.
    pub in_groups: bool,
}

/// All ways; the first is taken without `--algo`.
pub const TABLE: &[Algorithm] = &[
    Algorithm {
        name: "auto",
        about: "what the crate chooses",
        way: AllToAllAlgorithm::Auto,
        needs: None,
        in_groups: true,
    },
    Algorithm {
        name: "native",
        about: "ncclAlltoAll",
        way: AllToAllAlgorithm::Native,
        needs: Some(Capability::NativeAllToAll),
        in_groups: true,
    },
    Algorithm {
        name: "grouped",
        about: "a message to and from every rank, in one group",
        way: AllToAllAlgorithm::Grouped,
        needs: None,
        in_groups: true,
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_distinct_and_fit_into_lists() {
        for (index, one) in TABLE.iter().enumerate() {
            assert!(TABLE[..index].iter().all(|other| other.name != one.name));
            assert!(!one.name.contains([',', ' ']) && one.name != "all");
        }
    }
}
