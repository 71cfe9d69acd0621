//! Namespaces: ranks of one machine that cannot see each other as ranks of one host do.

use super::view::View;
use crate::preflight::facts::Process;
use nccl_base::report::Finding;

/// What a namespace that is not shared takes away.
type Kind = (
    &'static str,
    fn(&Process) -> &str,
    &'static str,
    &'static str,
);

const KINDS: [Kind; 4] = [
    (
        "IPC",
        |process| &process.namespaces.ipc,
        "NCCL cannot share memory between them",
        "run the containers with --ipc=host, or all ranks of a machine in one container",
    ),
    (
        "network",
        |process| &process.namespaces.network,
        "NCCL cannot pass device memory between them, and goes by the network",
        "run the containers with --network=host, or all ranks of a machine in one container",
    ),
    (
        "user",
        |process| &process.namespaces.user,
        "the kernel lets none of them open the memory of another",
        "run the containers with the same user namespace (--userns=host)",
    ),
    (
        "PID",
        |process| &process.namespaces.pid,
        "two of them may have the same process number, which NCCL before 2.30 takes for one process",
        "run the containers with --pid=host where NCCL finds no devices to share",
    ),
];

pub(super) fn judge(view: &View<'_>, found: &mut Vec<Finding>) {
    for (boot, ranks) in view.groups(|rank| Some(view.process(rank)?.boot.clone())) {
        if boot.is_empty() || ranks.len() < 2 {
            continue;
        }
        for (kind, of, effect, fix) in KINDS {
            let groups = view.groups(|rank| {
                ranks.binary_search(&rank).ok()?;
                let own = of(view.process(rank)?);
                (!own.is_empty()).then(|| own.to_owned())
            });
            // The process number alone matters little.
            if groups.len() < 2 || (kind == "PID" && !same_pid(view, &ranks)) {
                continue;
            }
            let (odd, text) = view.contrast(&groups, |own| format!("in {own}"));
            let what = format!(
                "ranks of one machine (boot {}) are in different {kind} namespaces: {text}; {effect}",
                boot.split('-').next().unwrap_or_default()
            );
            found.push(view.about(&odd, Finding::warning("namespaces", what).fix(fix)));
        }
    }
}

fn same_pid(view: &View<'_>, ranks: &[usize]) -> bool {
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
        judge(&View::of(&facts), &mut found);
        let report = Report::new(found);
        let [finding] = report.findings() else {
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
        judge(&View::of(&facts), &mut found);
        assert_eq!(found, []);
    }
}
