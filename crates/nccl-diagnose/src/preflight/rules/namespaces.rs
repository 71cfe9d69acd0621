//! Namespaces: ranks of one machine that do not share what ranks of one host should.

use super::view::FactsView;
use crate::preflight::facts::ProcessFacts;
use nccl_base::report::Finding;

/// What ranks lose by not sharing a namespace.
struct NamespaceKind {
    name: &'static str,
    of: fn(&ProcessFacts) -> &str,
    effect: &'static str,
    fix: &'static str,
    /// Whether it matters only where two of the processes have the same process number.
    is_of_numbers: bool,
}

const KINDS: [NamespaceKind; 4] = [
    NamespaceKind {
        name: "IPC",
        of: |process| &process.namespaces.ipc,
        effect: "NCCL cannot share memory between them",
        fix: "run the containers with --ipc=host, or all ranks of a machine in one container",
        is_of_numbers: false,
    },
    NamespaceKind {
        name: "network",
        of: |process| &process.namespaces.network,
        effect: "NCCL cannot pass device memory between them, and goes by the network",
        fix: "run the containers with --network=host, or all ranks of a machine in one container",
        is_of_numbers: false,
    },
    NamespaceKind {
        name: "user",
        of: |process| &process.namespaces.user,
        effect: "the kernel lets none of them open the memory of another",
        fix: "run the containers with the same user namespace (--userns=host)",
        is_of_numbers: false,
    },
    NamespaceKind {
        name: "PID",
        of: |process| &process.namespaces.pid,
        effect: "two of them may have the same process number, which NCCL before 2.30 takes for one process",
        fix: "run the containers with --pid=host where NCCL finds no devices to share",
        is_of_numbers: true,
    },
];

pub(super) fn check(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    for (boot, ranks) in view.groups(|rank| Some(view.process(rank)?.boot.clone())) {
        if boot.is_empty() || ranks.len() < 2 {
            continue;
        }
        for kind in KINDS {
            let groups = view.groups(|rank| {
                ranks.binary_search(&rank).ok()?;
                let own = (kind.of)(view.process(rank)?);
                (!own.is_empty()).then(|| own.to_owned())
            });
            if groups.len() < 2 || (kind.is_of_numbers && !same_pid(view, &ranks)) {
                continue;
            }
            let (odd, text) = view.contrast(&groups, |own| format!("in {own}"));
            let what = format!(
                "ranks of one machine (boot {}) are in different {} namespaces: {text}; {}",
                boot.split('-').next().unwrap_or_default(),
                kind.name,
                kind.effect
            );
            found.push(view.about(&odd, Finding::warning("namespaces", what).fix(kind.fix)));
        }
    }
}

fn same_pid(view: &FactsView<'_>, ranks: &[usize]) -> bool {
    let mut pids: Vec<u64> = view
        .processes()
        .filter(|(rank, _)| ranks.binary_search(rank).is_ok())
        .map(|(_, process)| process.pid)
        .collect();
    pids.sort_unstable();
    pids.windows(2).any(|pair| pair[0] == pair[1])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::tests::ranks_on;
    use nccl_base::report::Report;

    #[test]
    fn a_container_with_an_ipc_namespace_of_its_own_is_named() {
        let mut facts = ranks_on(&["h1", "h1", "h1", "h2"]);
        for (rank, facts) in facts.iter_mut().enumerate() {
            let namespace = if rank == 1 { "ipc:[9]" } else { "ipc:[1]" };
            facts.process.as_mut().unwrap().namespaces.ipc = namespace.to_owned();
        }
        let mut found = Vec::new();
        check(&FactsView::of(&facts), &mut found);
        let report = Report::new(found);
        let [finding] = &report.findings[..] else {
            panic!("{report}");
        };
        assert_eq!(
            (&finding.ranks[..], &finding.hosts[..]),
            (&[1][..], &["h1".to_owned()][..])
        );
        assert!(finding.what.contains("rank 1 (h1) in ipc:[9]"), "{finding}");
        assert!(finding.fix.as_ref().unwrap().contains("--ipc=host"));
    }

    #[test]
    fn machines_of_their_own_share_no_namespaces_and_need_not() {
        let mut facts = ranks_on(&["h1", "h2"]);
        for (rank, facts) in facts.iter_mut().enumerate() {
            facts.process.as_mut().unwrap().namespaces.ipc = format!("ipc:[{rank}]");
        }
        let mut found = Vec::new();
        check(&FactsView::of(&facts), &mut found);
        assert_eq!(found, []);
    }
}
