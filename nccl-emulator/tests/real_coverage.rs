//! Every device function of NVIDIA's own library: run with right results, or on the list of those that are not, with the reason.
//!
//! One child process for each algorithm and protocol runs every operator on every type, and reports what the interpreter has
//! carried out. With `NCCL_EMULATOR_COVERAGE_PAGE` set to a file, the comparison is written there as a page.

mod ranks;
mod real;

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::Path;

use nccl_emulator::{State, real_coverage};
use nccl_sys::{ncclDataType_t as Kind, ncclRedOp_t as Op, ncclScalarResidence_t as Residence};
use ranks::cases::{Case, Function, KINDS, Prepared, Reduction, is_float8};
use ranks::{Process, Rank, is_child_of, last_error, nccl, processes, threads};
use real::page::{Fate, Release, page};
use real::profiler::{self, PLUGIN};
use real::windows::{Collective, MACHINE, of_counts};
use real::{SOCKETS, environment_of, libraries, version};

const TEST: &str = "every_device_function_is_right_or_refused_for_a_reason";

/// Where children write what they ran.
const REPORTS: &str = "TEST_REPORTS";

/// A child: the algorithm and protocol to which it is restricted.
struct Held {
    algorithm: &'static str,
    protocol: &'static str,
    /// Whether the ranks are processes, each on a host of its own; otherwise they are threads of one process.
    hosts: bool,
}

const fn held(algorithm: &'static str, protocol: &'static str) -> Held {
    Held {
        algorithm,
        protocol,
        hosts: false,
    }
}

const CHILDREN: [Held; 7] = [
    held("Ring", "LL"),
    held("Ring", "LL128"),
    held("Ring", "Simple"),
    held("Tree", "LL"),
    held("Tree", "LL128"),
    held("Tree", "Simple"),
    Held {
        algorithm: "PAT",
        protocol: "Simple",
        hosts: true,
    },
];

/// Whether NCCL's PAT takes operators that scale. Before, NCCL has nothing to run for them where only PAT is allowed.
fn pat_scales(version: i32) -> bool {
    version >= 23200
}

/// The kernel over symmetric memory to which a child is restricted.
const KERNEL: &str = "TEST_KERNEL";

/// The kernels over symmetric memory that NCCL has for the emulated devices.
const KERNELS: [&str; 6] = [
    "AllGather_LL",
    "AllGather_ST",
    "AllReduce_AGxLL_R",
    "AllReduce_RSxLD_AGxST",
    "ReduceScatter_LL",
    "ReduceScatter_LD",
];

/// In a row for a kernel, stands in place of the collective.
const A_KERNEL: &str = "kernel";

/// The operators of the device code, with the operators of the API that lead to them.
const OPERATORS: [(&str, Reduction); 7] = [
    ("Sum", Reduction::BuiltIn(Op::ncclSum)),
    ("Prod", Reduction::BuiltIn(Op::ncclProd)),
    ("MinMax", Reduction::BuiltIn(Op::ncclMin)),
    ("MinMax", Reduction::BuiltIn(Op::ncclMax)),
    (
        "PreMulSum",
        Reduction::PreMulSum(Residence::ncclScalarHostImmediate),
    ),
    (
        "PreMulSum",
        Reduction::PreMulSum(Residence::ncclScalarDevice),
    ),
    // For integers; for floats it is a PreMulSum.
    ("SumPostDiv", Reduction::BuiltIn(Op::ncclAvg)),
];

/// Runs a collective of every type by every operator that the algorithm takes.
fn reductions(rank: &Rank, function: Function, scaling: bool) {
    for (_, reduction) in OPERATORS {
        let scales = matches!(
            reduction,
            Reduction::PreMulSum(_) | Reduction::BuiltIn(Op::ncclAvg)
        );
        if scales && !scaling {
            continue;
        }
        for kind in KINDS {
            // NCCL has no such kernel.
            if scales && rank.ranks == 1 && is_float8(kind) {
                continue;
            }
            let case = Case {
                kind,
                reduction,
                shift: 1,
                root: rank.ranks - 1,
                ..Case::new(function, 403)
            };
            case.check(rank);
        }
    }
}

fn moves(rank: &Rank, function: Function) {
    for count in [1, 1003, 40_000] {
        Case {
            kind: Kind::ncclUint8,
            root: 1,
            ..Case::new(function, count)
        }
        .check(rank);
    }
}

fn send_to_the_next(rank: &Rank) {
    let (own, ranks) = (rank.rank, rank.ranks);
    let (from, to) = (
        rank.memory(&[own as u8; 5000]),
        rank.memory(&[0xffu8; 5000]),
    );
    assert_eq!(nccl!(ncclGroupStart()), 0);
    assert_eq!(rank.send(&from, Kind::ncclUint8, (own + 1) % ranks), 0);
    let previous = (own + ranks - 1) % ranks;
    assert_eq!(rank.receive(&to, Kind::ncclUint8, previous), 0);
    assert_eq!(nccl!(ncclGroupEnd()), 0, "{}", last_error());
    rank.sync();
    assert_eq!(to.read(), [previous as u8; 5000]);
}

/// Broadcasts of several roots in a group, which newer releases carry out together.
fn broadcasts(rank: &Rank) {
    for count in [10, 40_000] {
        let cases = (0..rank.ranks).map(|root| Case {
            root,
            ..Case::new(Function::Broadcast, count + root as usize)
        });
        let prepared: Vec<Prepared> = cases.map(|case| case.prepare(rank)).collect();
        assert_eq!(nccl!(ncclGroupStart()), 0);
        for prepared in &prepared {
            assert_eq!(prepared.issue(rank), 0, "{}", last_error());
        }
        assert_eq!(nccl!(ncclGroupEnd()), 0, "{}", last_error());
        rank.sync();
        prepared.into_iter().for_each(|one| one.verify(rank));
    }
}

/// What a rank does in the child of an algorithm.
fn work(algorithm: &str, rank: &Rank) {
    match algorithm {
        "Tree" => {
            reductions(rank, Function::AllReduce, true);
            broadcasts(rank);
        }
        "PAT" => {
            moves(rank, Function::AllGather);
            reductions(rank, Function::ReduceScatter, pat_scales(version()));
        }
        _ => {
            for function in [
                Function::AllReduce,
                Function::Reduce,
                Function::ReduceScatter,
            ] {
                reductions(rank, function, true);
            }
            for function in [Function::AllGather, Function::Broadcast] {
                moves(rank, function);
            }
            send_to_the_next(rank);
        }
    }
}

/// The code of a child: runs the work, and reports what the interpreter carried out.
fn child(process: &Process) {
    if env::var_os(PLUGIN.0).is_some() {
        ranks::api();
        profiler::install();
    }
    match env::var(KERNEL) {
        Ok(kernel) => threads(4, |rank| over_symmetric_memory(rank, &kernel)),
        Err(_) => held_child(process),
    }
    let covered = real_coverage().unwrap();
    let line = |key: [&str; 5], state: &State| {
        let (word, text) = match state {
            State::Interpreted { times } => ("ran", times.to_string()),
            State::Refused { reason } => ("refused", reason.clone()),
            State::Absent => ("absent", String::new()),
        };
        format!("{}\t{word}\t{text}", key.join("\t"))
    };
    let functions = covered.functions.iter().map(|function| {
        let key = [
            &function.collective,
            function.operator.as_deref().unwrap_or("-"),
            function.data_type.as_deref().unwrap_or("-"),
            &function.algorithm,
            &function.protocol,
        ];
        line(key, &function.state)
    });
    let kernels = covered
        .kernels
        .iter()
        .map(|kernel| line([A_KERNEL, &kernel.name, "-", "-", "-"], &kernel.state));
    let lines: Vec<_> = functions.chain(kernels).collect();
    let file = format!("{}.{}", std::process::id(), version());
    let file = Path::new(&env::var(REPORTS).unwrap()).join(file);
    fs::write(file, lines.join("\n")).unwrap();
}

/// The collective of a kernel over symmetric memory, of every type that it takes.
fn over_symmetric_memory(rank: &Rank, kernel: &str) {
    let collective = match kernel.split('_').next() {
        Some("AllGather") => Collective::AllGather,
        Some("AllReduce") => Collective::AllReduce,
        _ => Collective::ReduceScatter,
    };
    let kinds = [
        Kind::ncclFloat32,
        Kind::ncclFloat16,
        Kind::ncclBfloat16,
        Kind::ncclFloat8e4m3,
        Kind::ncclFloat8e5m2,
    ];
    let counts = [1, 7, 1000, 30_000];
    of_counts(rank, collective, &kinds, Op::ncclSum, &counts);
    if collective == Collective::ReduceScatter {
        of_counts(rank, collective, &kinds, Op::ncclAvg, &counts);
    }
}

/// A child that is restricted to an algorithm and a protocol, and runs nothing else.
fn held_child(process: &Process) {
    let algorithm = env::var("NCCL_ALGO").unwrap();
    let protocol = env::var("NCCL_PROTO").unwrap();
    let algorithm = algorithm.rsplit(':').next().unwrap();
    if process.ranks > 1 {
        // SAFETY: nothing else uses the environment yet.
        unsafe { env::set_var("NCCL_HOSTID", format!("host{}", process.rank)) };
        let rank = process.join();
        work(algorithm, &rank);
        process.meet("worked");
        assert_eq!(rank.abort(), 0);
    } else {
        ranks::api();
        threads(4, |rank| work(algorithm, rank));
        // A single rank has kernels of its own for what scales.
        threads(1, |rank| reductions(rank, Function::AllReduce, true));
    }
    for function in &real_coverage().unwrap().functions {
        if matches!(function.state, State::Interpreted { times: 1.. }) {
            let right = function.collective == "SendRecv"
                || function.algorithm == algorithm_of(algorithm, &function.collective)
                    && function.protocol.eq_ignore_ascii_case(&protocol);
            assert!(right, "{algorithm} {protocol} ran {function:?}");
        }
    }
}

/// A tree is for all-reduces; other collectives beside it use a ring.
fn algorithm_of(held: &str, collective: &str) -> &'static str {
    match (held, collective) {
        ("Tree", "AllReduce") => "Tree",
        ("PAT", _) => "Pat",
        _ => "Ring",
    }
}

/// A row's collective, operator, type, algorithm and protocol.
type Key = [String; 5];

/// The outcome of a row, and its reason or its number of runs.
type Found = (String, String);

/// The rows of a library.
type Rows = BTreeMap<Key, Found>;

/// The release, and the rows that all children saw, with what became of them in any.
fn collect(reports: &Path) -> (i32, Rows) {
    let mut rows = Rows::new();
    let mut version = 0;
    for entry in fs::read_dir(reports).unwrap() {
        let path = entry.unwrap().path();
        version = path.extension().unwrap().to_str().unwrap().parse().unwrap();
        for line in fs::read_to_string(&path).unwrap().lines() {
            let mut words = line.split('\t').map(str::to_owned);
            let key: Key = std::array::from_fn(|_| words.next().unwrap());
            let found = (words.next().unwrap(), words.next().unwrap());
            let row = rows.entry(key).or_insert_with(|| found.clone());
            assert_eq!(row.0, found.0);
            if found.1 != "0" {
                *row = found;
            }
        }
    }
    (version, rows)
}

/// Why NCCL's own host code never launches a function or a kernel that the library has, on the emulated devices.
fn never_launched(version: i32, key: &Key) -> Option<&'static str> {
    let [collective, operator, _, algorithm, _] = key.each_ref().map(String::as_str);
    if collective == A_KERNEL {
        return match operator {
            name if name.contains("Tma") => Some("NCCL launches it on compute capability 10 alone"),
            name if name.contains("oneRankReduce") && name.contains("fp8") => {
                Some("NCCL's host code refuses these types on a single rank")
            }
            "ncclDevKernel_Generic" => Some("every function has a kernel of its own"),
            _ => None,
        };
    }
    let scales = matches!(operator, "PreMulSum" | "SumPostDiv");
    (collective == "ReduceScatter" && algorithm == "Pat" && scales && !pat_scales(version))
        .then_some("NCCL's PAT does not scale before 2.32")
}

/// Runs a child in one or more processes.
fn run(library: &str, reports: &Path, hosts: i32, own: &[(&str, &str)]) {
    let hosts_text = hosts.to_string();
    let mut all = vec![
        (REPORTS, reports.to_str().unwrap()),
        (HOSTS, &*hosts_text),
        ("NCCL_PROGRESS_COUNTERS", "1"),
        ("NCCL_RAS_ENABLE", "1"),
    ];
    all.extend(own);
    let environment = environment_of(library, &all);
    processes(TEST, hosts, &environment, |_| unreachable!());
}

/// Runs all children on a library, and returns its release and rows.
fn run_all(library: &str) -> (i32, Rows) {
    let reports = tempfile::tempdir().unwrap();
    for held in &CHILDREN {
        let algorithm = match held.algorithm {
            "Tree" => "Ring;AllReduce:Tree",
            other => other,
        };
        let together = if held.algorithm == "Tree" { "1" } else { "0" };
        let mut own = vec![
            ("NCCL_ALGO", algorithm),
            ("NCCL_PROTO", held.protocol),
            ("NCCL_ALLGATHERV_ENABLE", together),
        ];
        let hosts = if held.hosts { 4 } else { 1 };
        if held.hosts {
            own.extend(SOCKETS);
        }
        run(library, reports.path(), hosts, &own);
    }
    for kernel in KERNELS {
        let own = [
            MACHINE,
            ("NCCL_SYM_KERNEL", kernel),
            ("NCCL_RUN_DIAGNOSTICS", "1"),
            (KERNEL, kernel),
        ];
        run(library, reports.path(), 1, &own);
        // The same kernels for profilers.
        run(library, reports.path(), 1, &[&own[..], &[PLUGIN]].concat());
    }
    collect(reports.path())
}

#[test]
fn every_device_function_is_right_or_refused_for_a_reason() {
    if is_child_of(TEST) {
        processes(TEST, hosts(), &[], |process| child(&process));
        return;
    }
    let mut releases = Vec::new();
    for library in libraries(TEST) {
        println!("{TEST} on {library}");
        let (version, rows) = run_all(&library);
        let mut release = Release {
            version,
            functions: Vec::new(),
            kernels: Vec::new(),
        };
        let mut unknown = Vec::new();
        for (key, (state, text)) in rows {
            let fate = match (state.as_str(), text.as_str()) {
                ("absent", _) => Fate::Absent,
                ("refused", _) => Fate::Refused(text),
                (_, "0") => match never_launched(version, &key) {
                    Some(reason) => Fate::NeverLaunched(reason),
                    None => {
                        unknown.push(key.join(" "));
                        continue;
                    }
                },
                _ => Fate::Run,
            };
            let [collective, name, ..] = &key;
            match collective == A_KERNEL {
                true => release.kernels.push((name.clone(), fate)),
                false => release.functions.push((key, fate)),
            }
        }
        assert!(unknown.is_empty(), "neither run nor refused: {unknown:#?}");
        // The builds for CUDA 12 and 13 have the same rows.
        releases.retain(|other: &Release| other.version != version);
        releases.push(release);
    }
    releases.sort_by_key(|release| release.version);
    if let (Some(file), false) = (env::var_os(PAGE), releases.is_empty()) {
        fs::write(file, page(&releases)).unwrap();
    }
}

/// Where the page is to be written.
const PAGE: &str = "NCCL_EMULATOR_COVERAGE_PAGE";

/// The number of a child's processes.
const HOSTS: &str = "TEST_HOSTS";

fn hosts() -> i32 {
    env::var(HOSTS).unwrap().parse().unwrap()
}
