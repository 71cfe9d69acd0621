//! The all-to-all algorithms that `--algo` chooses from: one table entry each, and nothing else to change.

use std::num::NonZeroUsize;

use nccl::Capability;
use nccl::all_to_all::AllToAllAlgorithm;

/// One algorithm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Algorithm {
    /// Its name in `--algo`, the tables, the JSON file and the plot.
    pub name: &'static str,
    /// Its description for `--help`.
    pub about: &'static str,
    /// The crate's value for it.
    pub way: AllToAllAlgorithm,
    /// The capability that the loaded library must have.
    pub needs: Option<Capability>,
    /// Whether groups support it, and with them `-m` and `-G`.
    pub in_groups: bool,
    /// Whether it is a plan (`nccl::all_to_all::AllToAll`), made before the timing.
    pub planned: bool,
    /// Whether it makes sense only between several nodes.
    pub between_nodes: bool,
    /// Whether it needs symmetric windows and the policy that uses no multiprocessors (`-R 2 -x 2`).
    pub by_copy_engines: bool,
}

/// One call of NCCL's own, or one group.
const CALL: Algorithm = Algorithm {
    name: "auto",
    about: "what the crate chooses for a single call",
    way: AllToAllAlgorithm::Auto,
    needs: None,
    in_groups: true,
    planned: false,
    between_nodes: false,
    by_copy_engines: false,
};

/// Several groups one after another.
const STEPS: Algorithm = Algorithm {
    in_groups: false,
    ..CALL
};

const PLAN: Algorithm = Algorithm {
    planned: true,
    ..STEPS
};

const fn number(number: usize) -> NonZeroUsize {
    NonZeroUsize::new(number).unwrap()
}

/// All algorithms; the first is the default of `--algo`.
pub const TABLE: &[Algorithm] = &[
    CALL,
    Algorithm {
        name: "native",
        about: "ncclAlltoAll",
        way: AllToAllAlgorithm::Native,
        needs: Some(Capability::NativeAllToAll),
        ..CALL
    },
    Algorithm {
        name: "grouped",
        about: "a message to and from every rank, in one group",
        way: AllToAllAlgorithm::Grouped,
        ..CALL
    },
    Algorithm {
        name: "chunked",
        about: "four groups, each with a quarter of every message",
        way: AllToAllAlgorithm::Chunked { pieces: number(4) },
        ..STEPS
    },
    Algorithm {
        name: "pairwise",
        about: "a group for each peer",
        way: AllToAllAlgorithm::Pairwise { width: number(1) },
        ..STEPS
    },
    Algorithm {
        name: "plan",
        about: "a persistent plan, by the way that the cost model chooses",
        way: AllToAllAlgorithm::Auto,
        ..PLAN
    },
    Algorithm {
        name: "two-level",
        about: "a plan: first inside of the nodes, then between them",
        way: AllToAllAlgorithm::TwoLevel,
        between_nodes: true,
        ..PLAN
    },
    Algorithm {
        name: "copy-engine",
        about: "a plan: NCCL's own call without multiprocessors; needs -R 2 and -x 2",
        way: AllToAllAlgorithm::CopyEngine,
        by_copy_engines: true,
        ..PLAN
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
