//! Every device function of NVIDIA's own library: run with right results, or on the list of those that are not, with the reason.
//!
//! One child process for each algorithm and protocol runs every operator on every type, and reports what the interpreter has
//! carried out. With `NCCL_EMULATOR_COVERAGE_PAGE` set to a file, the comparison is written there as a page
//! (`cargo xtask real-nccl coverage`).

mod ranks;
mod real;

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::Path;

use nccl_emulator::{State, real_coverage};
use nccl_sys::{ncclDataType_t as Kind, ncclRedOp_t as Op, ncclScalarResidence_t as Residence};
use ranks::cases::{Case, Function, KINDS, Prepared, Reduction};
use ranks::{Process, Rank, is_child_of, last_error, nccl, processes, threads};
use real::{SOCKETS, environment_of, libraries, version};

const TEST: &str = "every_device_function_is_right_or_refused_for_a_reason";

/// Where children write what they ran.
const REPORTS: &str = "TEST_REPORTS";

/// A child: what it is held to.
struct Held {
    algorithm: &'static str,
    protocol: &'static str,
    /// On hosts of their own, which are processes; otherwise threads of one process.
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

/// Whether NCCL's PAT takes operators that scale; before, it has nothing to run where no other algorithm is allowed.
fn pat_scales(version: i32) -> bool {
    version >= 23200
}

/// The operators of the device code by the ones of the API.
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
    // Of integers; that of floats is a PreMulSum.
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
            let case = Case {
                kind,
                reduction,
                shift: 1,
                root: 1,
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

/// The child's body: works, and reports what was carried out.
fn child(process: &Process) {
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
    }
    let covered = real_coverage().unwrap();
    for function in &covered.functions {
        // Only what the child is held to was run.
        if matches!(function.state, State::Interpreted { times: 1.. }) {
            let right = function.collective == "SendRecv"
                || function.algorithm == algorithm_of(algorithm, &function.collective)
                    && function.protocol.eq_ignore_ascii_case(&protocol);
            assert!(right, "{algorithm} {protocol} ran {function:?}");
        }
    }
    let lines = covered.functions.iter().map(|function| {
        let (word, text) = match &function.state {
            State::Interpreted { times } => ("ran", times.to_string()),
            State::Refused { reason } => ("refused", reason.clone()),
            State::Absent => ("absent", String::new()),
        };
        let none = || "-".to_owned();
        [
            function.collective.clone(),
            function.operator.clone().unwrap_or_else(none),
            function.data_type.clone().unwrap_or_else(none),
            function.algorithm.clone(),
            function.protocol.clone(),
            word.to_owned(),
            text,
        ]
        .join("\t")
    });
    let text: Vec<_> = lines.collect();
    let file = format!("{algorithm}.{protocol}.{}.{}", process.rank, version());
    let file = Path::new(&env::var(REPORTS).unwrap()).join(file);
    fs::write(file, text.join("\n")).unwrap();
}

/// A tree is for all-reduces; beside it a ring is used.
fn algorithm_of(held: &str, collective: &str) -> &'static str {
    match (held, collective) {
        ("Tree", "AllReduce") => "Tree",
        ("PAT", _) => "Pat",
        _ => "Ring",
    }
}

/// A row's collective, operator, type, algorithm and protocol.
type Key = [String; 5];

/// What was found of a row: what became of it, and why or how often.
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

/// Why NCCL's own host code never launches a function that the library has.
fn never_launched(version: i32, key: &Key) -> Option<&'static str> {
    let [collective, operator, _, algorithm, _] = key.each_ref().map(String::as_str);
    let scales = matches!(operator, "PreMulSum" | "SumPostDiv");
    (collective == "ReduceScatter" && algorithm == "Pat" && scales && !pat_scales(version))
        .then_some("NCCL's PAT does not scale before 2.32")
}

#[test]
fn every_device_function_is_right_or_refused_for_a_reason() {
    if is_child_of(TEST) {
        processes(TEST, hosts(), &[], |process| child(&process));
        return;
    }
    for library in libraries(TEST) {
        println!("{TEST} on {library}");
        let reports = tempfile::tempdir().unwrap();
        for held in &CHILDREN {
            let algorithm = match held.algorithm {
                "Tree" => "Ring;AllReduce:Tree",
                other => other,
            };
            let together = if held.algorithm == "Tree" { "1" } else { "0" };
            let hosts = if held.hosts { "4" } else { "1" };
            let own = [
                ("NCCL_ALGO", algorithm),
                ("NCCL_PROTO", held.protocol),
                ("NCCL_ALLGATHERV_ENABLE", together),
                (REPORTS, reports.path().to_str().unwrap()),
                (HOSTS, hosts),
            ];
            let mut environment = environment_of(&library, &own);
            if held.hosts {
                environment.extend(SOCKETS);
            }
            let ranks = hosts.parse().unwrap();
            processes(TEST, ranks, &environment, |_| unreachable!());
        }
        let (version, rows) = collect(reports.path());
        let unknown: Vec<_> = rows
            .iter()
            .filter(|(key, (state, times))| {
                state == "ran" && times == "0" && never_launched(version, key).is_none()
            })
            .map(|(key, _)| key.join(" "))
            .collect();
        assert!(unknown.is_empty(), "neither run nor refused: {unknown:#?}");
        let ran = rows
            .values()
            .filter(|(state, times)| state == "ran" && times != "0");
        println!("{} rows, {} run", rows.len(), ran.count());
    }
}

/// The number of a child's processes.
const HOSTS: &str = "TEST_HOSTS";

fn hosts() -> i32 {
    env::var(HOSTS).unwrap().parse().unwrap()
}
