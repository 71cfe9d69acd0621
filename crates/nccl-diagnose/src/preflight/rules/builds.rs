//! The builds of NCCL that the ranks have loaded, and releases with known faults.

use super::view::FactsView;
use crate::preflight::facts::ProcessFacts;
use nccl_base::report::{Finding, Severity};

pub(super) fn check(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    builds(view, found);
    releases(view, found);
}

/// Two builds of one release: one for CUDA 12 and one for CUDA 13, a distributor's and NVIDIA's, one with patches.
fn builds(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    const CHECK: &str = "nccl-build";
    let loaded = |rank: usize| view.facts(rank).library.as_ref();
    for (version, ranks) in view.groups(|rank| Some(loaded(rank)?.version.clone())) {
        let groups = view.groups(|rank| {
            ranks.binary_search(&rank).ok()?;
            loaded(rank)?.build_id.clone()
        });
        match &groups[..] {
            [] => {}
            [(id, ranks)] => {
                let text = format!("NCCL {version} has build id {}", short(id));
                found.push(view.about(ranks, Finding::new(Severity::Ok, CHECK, text)));
            }
            _ => {
                let path = |id: &String| {
                    let of = groups.iter().find(|(other, _)| other == id);
                    let first = of.and_then(|(_, ranks)| loaded(*ranks.first()?));
                    first.map_or("?", |loaded| &loaded.path)
                };
                let (odd, text) = view.contrast(&groups, |id| {
                    format!("loaded build {} from {}", short(id), path(id))
                });
                let finding = Finding::warning(CHECK, format!("of NCCL {version}, {text}")).fix(
                    "install the same package on every host, or name one file with NCCL_LIBRARY on every rank: builds of \
                     one release may be for other versions of CUDA, or have other patches",
                );
                found.push(view.about(&odd, finding));
            }
        }
    }
}

/// The first digits of a build id, which tell builds apart.
fn short(id: &str) -> &str {
    id.get(..12).unwrap_or(id)
}

/// A fault of one release.
struct KnownFault {
    release: &'static str,
    what: &'static str,
    fix: &'static str,
    trigger: Trigger,
}

/// What triggers a known fault of a release in a process.
#[derive(Clone, Copy)]
enum Trigger {
    /// NCCL's RAS service, which is on unless `NCCL_RAS_ENABLE=0`.
    Ras,
    /// A client that asks the RAS service.
    RasClient,
    /// A profiler plugin.
    Profiler,
}

impl Trigger {
    /// Returns whether a process with these facts has the trigger. A client of the RAS service cannot be known
    /// beforehand.
    fn is_met(self, process: &ProcessFacts) -> bool {
        match self {
            Self::Ras => {
                process.value("NCCL_RAS_ENABLE").is_none() || process.is_on("NCCL_RAS_ENABLE")
            }
            Self::RasClient => false,
            Self::Profiler => process.value("NCCL_PROFILER_PLUGIN").is_some(),
        }
    }
}

const ASK_ONCE: &str = "ask the RAS service (nccl::ras, nccl-doctor ras, ncclras) only once a job hangs, or set NCCL_RAS_ENABLE=0, \
                        or take a newer release";

/// Faults of releases that NVIDIA's issue tracker lists, and that end processes.
const KNOWN: [KnownFault; 6] = [
    KnownFault {
        release: "2.26.2",
        what: "crashes when its RAS service is asked during the start of a communicator (NVIDIA/nccl#1669)",
        fix: ASK_ONCE,
        trigger: Trigger::RasClient,
    },
    KnownFault {
        release: "2.26.5",
        what: "has crashed when its RAS service was asked again and again (NVIDIA/nccl#1718)",
        fix: ASK_ONCE,
        trigger: Trigger::RasClient,
    },
    KnownFault {
        release: "2.27.3",
        what: "has crashed when its RAS service was asked for the verbose status (NVIDIA/nccl#1762)",
        fix: ASK_ONCE,
        trigger: Trigger::RasClient,
    },
    KnownFault {
        release: "2.27.7",
        what: "has crashed in its RAS service, also where no client asked it (NVIDIA/nccl#1996)",
        fix: "set NCCL_RAS_ENABLE=0, or take a newer release",
        trigger: Trigger::Ras,
    },
    KnownFault {
        release: "2.29.7",
        what: "has crashed at 256 GPUs when its RAS service was asked while communicators were made (NVIDIA/nccl#2346)",
        fix: ASK_ONCE,
        trigger: Trigger::RasClient,
    },
    KnownFault {
        release: "2.30.3",
        what: "has crashed with a profiler plugin in all-to-alls of several hosts (NVIDIA/nccl#2112)",
        fix: "unset NCCL_PROFILER_PLUGIN, or take a newer release",
        trigger: Trigger::Profiler,
    },
];

/// Releases with known faults: a warning where the environment of a rank has what triggers the fault.
fn releases(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    const CHECK: &str = "nccl-release";
    let version = |rank: usize| Some(view.facts(rank).library.as_ref()?.version.clone());
    for (version, ranks) in view.groups(version) {
        for known in KNOWN.iter().filter(|known| known.release == version) {
            let met = ranks.iter().copied();
            let met = met.filter(|rank| {
                let process = view.process(*rank);
                process.is_some_and(|process| known.trigger.is_met(process))
            });
            let met: Vec<usize> = met.collect();
            let text = format!("NCCL {version} {}", known.what);
            let finding = match met.is_empty() {
                true => view.about(&ranks, Finding::new(Severity::Ok, CHECK, text)),
                false => view.about(&met, Finding::warning(CHECK, text)),
            };
            found.push(finding.fix(known.fix));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::Loaded;
    use crate::preflight::facts::Facts;
    use crate::preflight::tests::{ranks_on, set};

    fn with(hosts: &[&str], loaded: &[(&str, Option<&str>)]) -> Vec<Facts> {
        let mut facts = ranks_on(hosts);
        for (facts, (version, id)) in facts.iter_mut().zip(loaded) {
            facts.library = Some(Loaded {
                version: (*version).to_owned(),
                path: String::from("/lib/libnccl.so.2"),
                build_id: id.map(str::to_owned),
            });
        }
        facts
    }

    fn checked(facts: &[Facts]) -> Vec<Finding> {
        let mut found = Vec::new();
        check(&FactsView::of(facts), &mut found);
        found
    }

    #[test]
    fn a_rank_with_another_build_of_the_same_release_is_named() {
        let (one, other) = ("00112233445566778899", "ffeeddccbbaa99887766");
        let release = "2.32.3";
        let facts = with(
            &["h1", "h2", "h3"],
            &[
                (release, Some(one)),
                (release, Some(other)),
                (release, Some(one)),
            ],
        );
        let [finding] = &checked(&facts)[..] else {
            panic!("{:?}", checked(&facts))
        };
        assert_eq!(
            (finding.severity, &finding.ranks[..]),
            (Severity::Warning, &[1][..])
        );
        assert_eq!(finding.check, "nccl-build");
        assert_eq!(
            finding.what,
            "of NCCL 2.32.3, rank 1 (h2) loaded build ffeeddccbbaa from /lib/libnccl.so.2, the other 2 ranks (h1, h3) loaded \
             build 001122334455 from /lib/libnccl.so.2"
        );
        // What is not known does not differ, and builds of two releases always do.
        let facts = with(&["h1", "h2"], &[(release, Some(one)), (release, None)]);
        assert!(
            checked(&facts)
                .iter()
                .all(|one| one.severity == Severity::Ok)
        );
        let facts = with(
            &["h1", "h2"],
            &[("2.32.3", Some(one)), ("2.30.7", Some(other))],
        );
        assert!(
            checked(&facts)
                .iter()
                .all(|one| one.severity == Severity::Ok)
        );
    }

    #[test]
    fn a_release_with_a_known_fault_is_a_warning_where_something_triggers_it() {
        let mut facts = with(&["h1", "h2"], &[("2.27.7", None), ("2.27.7", None)]);
        let worst = |facts: &[Facts]| {
            let found = checked(facts);
            let [finding] = &found[..] else {
                panic!("{found:?}")
            };
            assert_eq!(finding.check, "nccl-release");
            assert!(finding.fix.is_some());
            (finding.severity, finding.ranks.clone())
        };
        assert_eq!(worst(&facts), (Severity::Warning, vec![0, 1]));
        set(&mut facts[0], "NCCL_RAS_ENABLE", "0");
        assert_eq!(worst(&facts), (Severity::Warning, vec![1]));
        set(&mut facts[1], "NCCL_RAS_ENABLE", "0");
        assert_eq!(worst(&facts).0, Severity::Ok);
        let mut facts = with(&["h1"], &[("2.30.3", None)]);
        assert_eq!(worst(&facts).0, Severity::Ok);
        set(&mut facts[0], "NCCL_PROFILER_PLUGIN", "example");
        assert_eq!(worst(&facts), (Severity::Warning, vec![0]));
        assert_eq!(checked(&with(&["h1"], &[("2.32.3", None)])), []);
    }
}
