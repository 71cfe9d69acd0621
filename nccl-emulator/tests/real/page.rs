//! The page that shows which device functions and kernels of NVIDIA's library are run, from what a test found.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// What became of a function or a kernel.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fate {
    /// Run, with right results.
    Run,
    /// Its launch fails by name, for this reason.
    Refused(String),
    /// The library has it, and NCCL's host code never launches it here.
    NeverLaunched(&'static str),
    /// The library has no code for it.
    Absent,
}

/// A line of a table: a group of rows, by its cells.
type Group = Vec<String>;

/// The fates of the rows of a group, by release.
type Fates = BTreeMap<Group, BTreeMap<i32, BTreeMap<Fate, usize>>>;

/// What one library has: of each function (collective, operator, type, algorithm, protocol) and each kernel its fate.
pub(crate) struct Release {
    /// 2.28.3 is 22803.
    pub(crate) version: i32,
    pub(crate) functions: Vec<([String; 5], Fate)>,
    pub(crate) kernels: Vec<(String, Fate)>,
}

/// Reasons in the order in which they are first named.
#[derive(Default)]
struct Reasons(Vec<String>);

impl Reasons {
    fn number(&mut self, reason: &str) -> usize {
        let at = self.0.iter().position(|one| one == reason);
        at.unwrap_or_else(|| {
            self.0.push(reason.to_owned());
            self.0.len() - 1
        }) + 1
    }

    fn cell(&mut self, fates: Option<&BTreeMap<Fate, usize>>) -> String {
        let texts = fates.into_iter().flatten().filter_map(|(fate, count)| {
            Some(match fate {
                Fate::Run => format!("{count} run"),
                Fate::Refused(reason) => format!("{count} refused ({})", self.number(reason)),
                Fate::NeverLaunched(reason) => {
                    format!("{count} never launched ({})", self.number(reason))
                }
                Fate::Absent => return None,
            })
        });
        let texts: Vec<_> = texts.collect();
        if texts.is_empty() {
            "–".to_owned()
        } else {
            texts.join(", ")
        }
    }
}

fn text(version: i32) -> String {
    format!(
        "{}.{}.{}",
        version / 10_000,
        version / 100 % 100,
        version % 100
    )
}

fn table(
    page: &mut String,
    heads: &[&str],
    versions: &[i32],
    fates: &Fates,
    reasons: &mut Reasons,
) {
    let mut heads: Vec<String> = heads.iter().map(|&head| head.to_owned()).collect();
    heads.extend(versions.iter().map(|&version| text(version)));
    let _ = writeln!(page, "| {} |", heads.join(" | "));
    let _ = writeln!(page, "|{}", "---|".repeat(heads.len()));
    let absent = |fate: &Fate| *fate == Fate::Absent;
    for (group, by_release) in fates {
        if by_release.values().all(|fates| fates.keys().all(absent)) {
            continue;
        }
        let mut cells = group.clone();
        cells.extend(
            versions
                .iter()
                .map(|version| reasons.cell(by_release.get(version))),
        );
        let _ = writeln!(page, "| {} |", cells.join(" | "));
    }
    page.push('\n');
}

/// A kernel's family: its name without operator and type.
fn family(name: &str) -> String {
    if name.contains("oneRankReduce") {
        return "`oneRankReduce<…>`".to_owned();
    }
    if name.starts_with("ncclDevKernel_") && name != "ncclDevKernel_Generic" {
        return "`ncclDevKernel_…`, one for some functions each".to_owned();
    }
    let end = ["_sum_", "_avg_"].iter().find_map(|word| name.find(word));
    let profiled = if name.ends_with("_profile") {
        ", and for profilers `…_profile`"
    } else {
        ""
    };
    match (end, name.strip_suffix("_profile")) {
        (Some(end), _) => format!("`{}_…`{profiled}", &name[..end]),
        (None, Some(name)) => format!("`{name}`{profiled}"),
        (None, None) => format!("`{name}`"),
    }
}

/// The page.
pub(crate) fn page(releases: &[Release]) -> String {
    let versions: Vec<i32> = releases.iter().map(|release| release.version).collect();
    let (mut functions, mut operators, mut kernels) = (Fates::new(), BTreeMap::new(), Fates::new());
    for release in releases {
        for ([collective, operator, ty, algorithm, protocol], fate) in &release.functions {
            let group = vec![collective.clone(), algorithm.clone(), protocol.clone()];
            *functions
                .entry(group)
                .or_default()
                .entry(release.version)
                .or_default()
                .entry(fate.clone())
                .or_default() += 1;
            if *fate == Fate::Run && operator != "-" {
                let types: &mut BTreeSet<_> = operators.entry(operator.clone()).or_default();
                types.insert(ty.clone());
            }
        }
        for (name, fate) in &release.kernels {
            *kernels
                .entry(vec![family(name)])
                .or_default()
                .entry(release.version)
                .or_default()
                .entry(fate.clone())
                .or_default() += 1;
        }
    }
    let mut page = String::from(
        "# What runs of NVIDIA's device code\n\n\
         Written by a test, from what the interpreter has carried out of each library: do not edit.\n\n\
         ```sh\nNCCL_EMULATOR_COVERAGE_PAGE=$PWD/docs/results/real_nccl_coverage.md \\\n    \
         cargo xtask real-nccl test real_coverage\n```\n\n\
         *Run* is: carried out by the interpreter, forced by `NCCL_ALGO` and `NCCL_PROTO` (or `NCCL_SYM_KERNEL`), with the \
         results compared byte by byte. *Refused* is: the launch fails with the reason, by name. The test fails on any \
         function or kernel that is neither.\n\n\
         ## Device functions\n\n\
         The rows of the library's table `ncclDevFuncRowToId`: of a reduction one for each operator and type. A dash: the \
         library has no such function.\n\n",
    );
    let mut reasons = Reasons::default();
    let heads = ["collective", "algorithm", "protocol"];
    table(&mut page, &heads, &versions, &functions, &mut reasons);
    page.push_str("Operators and types that are run, in one reduction at least:\n\n| operator | types |\n|---|---|\n");
    for (operator, types) in &operators {
        let types: Vec<_> = types.iter().cloned().collect();
        let _ = writeln!(page, "| {operator} | {} |", types.join(", "));
    }
    page.push_str("\n## Kernels\n\n");
    table(&mut page, &["kernel"], &versions, &kernels, &mut reasons);
    page.push_str(
        "## Without kernels\n\n\
         | what | test in `nccl-emulator/tests/` |\n|---|---|\n\
         | collectives over windows by copies (`NCCL_CTA_POLICY=2`, 2.28 and later) | `real_windows`: `without_thread_blocks_collectives_over_windows_are_copies` |\n\
         | `ncclPutSignal`, `ncclSignal`, `ncclWaitSignal` on one host (2.29 and later) | `real_windows`: `ranks_put_to_each_other_and_wait_for_signals` |\n\
         | the same between hosts | refused by NCCL: `over_two_hosts_there_are_no_windows_and_no_puts` |\n\
         | P2P by copies (`NCCL_P2P_USE_CUDA_MEMCPY=1`) | `real_collectives` |\n\n\
         ## Reasons\n\n",
    );
    for (at, reason) in reasons.0.iter().enumerate() {
        let _ = writeln!(page, "{}. {reason}", at + 1);
    }
    page
}
