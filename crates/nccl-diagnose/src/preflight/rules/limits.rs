//! The resources that a process and its host need for a world, compared with those that they have.
//!
//! The needs are estimates. `needed` is what NCCL and this crate use before the first operation, whatever the network:
//! less is an error. `advised` is what operations with every other rank may use over sockets: less is a warning. For a
//! process with `local` ranks on its machine and `remote` ranks on others:
//!
//! | | needed | advised |
//! |---|---|---|
//! | open files | 32 + 2·local | 96 + 4·local + 8·remote |
//! | threads | 8 | 16 |
//! | locked memory, with RDMA | | 64 MiB |
//! | `/dev/shm`, of all local ranks | 1 MiB | 32 MiB·local, and no more than 1 GiB |
//! | memory, of all local ranks | | 512 MiB·local |
//! | processors, of all local ranks | | 1·local |
//! | ports, of all local ranks | 8·local | (16 + 4·remote)·local |
//!
//! Open files: listening sockets, rings and proxies of NCCL's start, its connections to the proxies of local
//! ranks, CUDA's own; then, to each remote rank, a control and a data socket for two channels in two
//! directions. Threads: NCCL's proxies, RAS and bootstrap, CUDA's, and the two of this crate.

use super::view::FactsView;
use crate::preflight::facts::ProcessFacts;
use nccl_base::report::{Finding, Severity};
use nccl_base::system::limits::Limits;

const MIB: u64 = 1 << 20;

pub(in crate::preflight) const OPEN_FILES: &str = "open files";

/// A resource that is too scarce for NCCL to start.
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct ResourceShortage {
    /// The name that `RootCause::ResourceExhausted` has for it.
    pub resource: &'static str,
    /// The numbers.
    pub text: String,
    pub fix: String,
}

/// The ranks on the machine of a process, and those on others.
#[derive(Clone, Copy)]
struct Size {
    local: u64,
    remote: u64,
}

/// A sentence without its subject, and advice.
type Shortage = (Severity, &'static str, String, String);

pub(super) fn check(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    let before = found.len();
    let mut seen: Vec<(Shortage, Vec<usize>)> = Vec::new();
    for (rank, process) in view.processes() {
        let local = view.local_ranks(process) as u64;
        let size = Size {
            local,
            remote: (view.size() as u64).saturating_sub(local),
        };
        for judgement in of_process(process, size) {
            match seen.iter_mut().find(|(other, _)| *other == judgement) {
                Some((_, ranks)) => ranks.push(rank),
                None => seen.push((judgement, vec![rank])),
            }
        }
    }
    for ((severity, check, text, fix), ranks) in seen {
        let text = format!("{}: {text}", view.who(&ranks));
        found.push(view.about(&ranks, Finding::new(severity, check, text).fix(fix)));
    }
    if found.len() == before {
        let ranks: Vec<usize> = view.ranks().collect();
        let text = "open files, threads, memory, /dev/shm and ports suffice";
        found.push(view.about(&ranks, Finding::new(Severity::Ok, "limits", text)));
    }
}

fn of_process(process: &ProcessFacts, size: Size) -> Vec<Shortage> {
    let limits = &process.limits;
    let found = [
        files(limits, size),
        processes(limits),
        tasks(limits, size),
        locked(process),
        shared(limits, size),
        leaked(limits),
        memory(limits, size),
        processors(limits, size),
        ports(limits, size),
    ];
    found.into_iter().flatten().collect()
}

/// The resource that a process has too little of for NCCL's start, with one other rank on its host.
pub(in crate::preflight) fn resource_shortage(process: &ProcessFacts) -> Option<ResourceShortage> {
    let two = Size {
        local: 2,
        remote: 0,
    };
    of_process(process, two)
        .into_iter()
        .filter(|(severity, ..)| *severity == Severity::Error)
        .find_map(|(_, check, text, fix)| {
            let resource = match check {
                "open-files" => OPEN_FILES,
                "threads" => "threads or processes",
                "shared-memory" => "shared memory (/dev/shm)",
                "ports" => "ports",
                _ => return None,
            };
            Some(ResourceShortage {
                resource,
                text,
                fix,
            })
        })
}

/// The severity of having only `has`.
fn grade(has: u64, needed: u64, advised: u64) -> Option<Severity> {
    match has {
        _ if has < needed => Some(Severity::Error),
        _ if has < advised => Some(Severity::Warning),
        _ => None,
    }
}

fn files(limits: &Limits, size: Size) -> Option<Shortage> {
    let limit = limits.files?;
    let needed = 32 + 2 * size.local;
    let advised = 96 + 4 * size.local + 8 * size.remote;
    let severity = grade(limit.saturating_sub(limits.files_used), needed, advised)?;
    let wanted = limits.files_used.saturating_add(advised);
    let wanted = wanted
        .checked_next_power_of_two()
        .unwrap_or(wanted)
        .max(1024);
    let hard = match limits.files_hard {
        Some(hard) if hard < wanted => format!(
            "raise the hard limit, which is {hard}, as well (limits.conf, LimitNOFILE= of systemd, --ulimit \
             nofile= of docker): ulimit -n {wanted}"
        ),
        _ => format!("ulimit -n {wanted} before the start"),
    };
    Some((
        severity,
        "open-files",
        format!(
            "{} of {limit} files are open, and NCCL needs {needed} to start and about {advised} for this world",
            limits.files_used
        ),
        hard,
    ))
}

fn processes(limits: &Limits) -> Option<Shortage> {
    let limit = limits.processes?;
    let (needed, advised) = (8, 16);
    let severity = grade(limit.saturating_sub(limits.threads_used), needed, advised)?;
    Some((
        severity,
        "threads",
        format!(
            "this user may have {limit} threads (ulimit -u), {} are in this process alone, and NCCL starts about \
             {advised}: without, it ends the process",
            limits.threads_used
        ),
        String::from("ulimit -u unlimited before the start (limits.conf, LimitNPROC= of systemd)"),
    ))
}

fn tasks(limits: &Limits, size: Size) -> Option<Shortage> {
    let left = limits.tasks_left?;
    let severity = grade(left, 8 * size.local, 16 * size.local)?;
    Some((
        severity,
        "threads",
        format!(
            "the control group allows {left} more threads, and NCCL starts about {} for {} ranks: without, it \
             ends the process",
            16 * size.local,
            size.local
        ),
        format!(
            "raise {} (--pids-limit of docker, TasksMax= of systemd, podPidsLimit of kubelet)",
            limits.tasks_file
        ),
    ))
}

fn locked(process: &ProcessFacts) -> Option<Shortage> {
    let uses_rdma =
        process.ports.iter().any(|port| port.active) && !process.is_on("NCCL_IB_DISABLE");
    let limit = process.limits.locked.filter(|_| uses_rdma)?;
    let severity = grade(limit, 0, 64 * MIB)?;
    Some((
        severity,
        "locked-memory",
        format!(
            "{} may be locked (ulimit -l), and network adapters with RDMA lock all of NCCL's buffers",
            bytes(limit)
        ),
        String::from("ulimit -l unlimited before the start (--ulimit memlock=-1 of docker)"),
    ))
}

fn shared(limits: &Limits, size: Size) -> Option<Shortage> {
    // A rank alone on its host shares no memory.
    let free = limits.shared_free.filter(|_| size.local > 1)?;
    let advised = (32 * MIB * size.local).min(1 << 30);
    let severity = grade(free, MIB, advised)?;
    let total = limits.shared_size.unwrap_or(free);
    Some((
        severity,
        "shared-memory",
        format!(
            "/dev/shm has {} free of {}, and {} ranks may need {} where their devices do not reach each other",
            bytes(free),
            bytes(total),
            size.local,
            bytes(advised)
        ),
        String::from(
            "--shm-size=1g of docker, or an emptyDir with medium: Memory at /dev/shm in kubernetes",
        ),
    ))
}

fn leaked(limits: &Limits) -> Option<Shortage> {
    (limits.leaked > 0).then(|| {
        (
            Severity::Warning,
            "shared-memory",
            format!(
                "{} files /dev/shm/nccl-* with {} were left by jobs that were killed",
                limits.leaked,
                bytes(limits.leaked_bytes)
            ),
            String::from("rm /dev/shm/nccl-* when no job runs on the host"),
        )
    })
}

fn memory(limits: &Limits, size: Size) -> Option<Shortage> {
    let limit = limits.memory?;
    let advised = 512 * MIB * size.local;
    let severity = grade(limit, 0, advised)?;
    Some((
        severity,
        "memory",
        format!(
            "the control group allows {}, and CUDA and NCCL take about {} for {} ranks: the kernel kills what \
             takes more",
            bytes(limit),
            bytes(advised),
            size.local
        ),
        format!("raise {}", limits.memory_file),
    ))
}

fn processors(limits: &Limits, size: Size) -> Option<Shortage> {
    let limit = limits.processors?;
    let severity = grade(limit, 0, 1000 * size.local)?;
    Some((
        severity,
        "processors",
        format!(
            "the control group allows {}.{:03} processors for {} ranks, whose proxies each keep one busy",
            limit / 1000,
            limit % 1000,
            size.local
        ),
        String::from("raise cpu.max (--cpus of docker, limits.cpu in kubernetes)"),
    ))
}

fn ports(limits: &Limits, size: Size) -> Option<Shortage> {
    let (first, last) = (limits.first_port?, limits.last_port?);
    let count = last.saturating_add(1).saturating_sub(first);
    let advised = (16 + 4 * size.remote) * size.local;
    let severity = grade(count, 8 * size.local, advised.min(60_000))?;
    Some((
        severity,
        "ports",
        format!(
            "connections may take the {count} ports from {first} to {last}, and {} ranks need about {advised}",
            size.local
        ),
        String::from("sysctl -w net.ipv4.ip_local_port_range='15000 65535'"),
    ))
}

fn bytes(count: u64) -> String {
    match count {
        _ if count >= 1 << 30 => format!("{:.1} GiB", count as f64 / (1u64 << 30) as f64),
        _ if count >= MIB => format!("{:.1} MiB", count as f64 / MIB as f64),
        _ => format!("{} KiB", count >> 10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::tests::ranks_on;
    use nccl_base::report::Report;

    /// Two hosts of two ranks, of which rank 3 has these limits.
    fn checked(change: impl Fn(&mut ProcessFacts)) -> Report {
        let mut facts = ranks_on(&["h1", "h1", "h2", "h2"]);
        change(facts[3].process.as_mut().unwrap());
        let mut found = Vec::new();
        check(&FactsView::of(&facts), &mut found);
        Report::new(found)
    }

    #[test]
    fn limits_that_are_not_known_are_nobodys_fault() {
        assert!(checked(|_| ()).worst() == Severity::Ok);
    }

    #[test]
    fn too_few_open_files_are_an_error_and_few_a_warning() {
        let with = |files| checked(|process| process.limits.files = Some(files));
        let report = with(30);
        let error = report.of(Severity::Error).next().unwrap();
        assert_eq!(
            (&error.ranks[..], &error.check[..]),
            (&[3][..], "open-files")
        );
        assert!(
            error
                .what
                .starts_with("rank 3 (h2): 0 of 30 files are open"),
            "{error}"
        );
        assert!(
            error.fix.as_ref().unwrap().contains("ulimit -n 1024"),
            "{error}"
        );
        assert_eq!(with(64).worst(), Severity::Warning);
        assert_eq!(with(1024).worst(), Severity::Ok);
        // Open files are not available any more.
        let used = checked(|process| {
            process.limits.files = Some(1024);
            process.limits.files_used = 1000;
            process.limits.files_hard = Some(1024);
        });
        assert!(
            used.of(Severity::Error)
                .next()
                .unwrap()
                .to_string()
                .contains("hard limit, which is 1024")
        );
    }

    #[test]
    fn only_what_keeps_nccl_from_starting_is_scarce() {
        let with = |files, free| {
            let limits = Limits {
                files: Some(files),
                files_used: 40,
                shared_size: Some(64 * MIB),
                shared_free: Some(free),
                ..Limits::default()
            };
            let process = ProcessFacts {
                limits,
                ..ProcessFacts::default()
            };
            resource_shortage(&process)
                .map(|resource_shortage| (resource_shortage.resource, resource_shortage.text))
        };
        assert_eq!(with(1024, 64 * MIB), None);
        // Little, but enough to start.
        assert_eq!(with(80, 2 * MIB), None);
        let (resource, text) = with(64, 64 * MIB).unwrap();
        assert_eq!(resource, "open files");
        assert!(text.starts_with("40 of 64 files are open"), "{text}");
        assert_eq!(with(1024, 4096).unwrap().0, "shared memory (/dev/shm)");
        let narrow = Limits {
            first_port: Some(40_000),
            last_port: Some(40_009),
            ..Limits::default()
        };
        let process = ProcessFacts {
            limits: narrow,
            ..ProcessFacts::default()
        };
        let found = resource_shortage(&process).unwrap();
        assert_eq!(found.resource, "ports");
        assert!(
            found.text.contains("10 ports from 40000 to 40009"),
            "{}",
            found.text
        );
    }

    #[test]
    fn each_limit_has_a_sentence_of_its_own_with_a_fix() {
        let report = checked(|process| {
            process.limits = Limits {
                processes: Some(4),
                tasks_left: Some(3),
                tasks_file: String::from("/sys/fs/cgroup/pids.max"),
                locked: Some(64 << 10),
                shared_size: Some(64 << 10),
                shared_free: Some(64 << 10),
                leaked: 3,
                leaked_bytes: 5 << 20,
                memory: Some(100 << 20),
                memory_file: String::from("/sys/fs/cgroup/memory.max"),
                processors: Some(100),
                first_port: Some(40_000),
                last_port: Some(40_009),
                ..Limits::default()
            };
            process.ports = vec![crate::preflight::rdma::Port {
                active: true,
                ..Default::default()
            }];
        });
        let text = report.to_string();
        for words in [
            "may have 4 threads",
            "control group allows 3 more threads",
            "raise /sys/fs/cgroup/pids.max",
            "64 KiB may be locked",
            "/dev/shm has 64 KiB free of 64 KiB",
            "--shm-size=1g",
            "3 files /dev/shm/nccl-* with 5.0 MiB",
            "allows 100.0 MiB",
            "0.100 processors for 2 ranks",
            "10 ports from 40000 to 40009",
        ] {
            assert!(text.contains(words), "{words:?} in {text}");
        }
        assert!(report.findings.iter().all(|finding| finding.fix.is_some()));
        assert_eq!(report.of(Severity::Error).count(), 4);
    }
}
