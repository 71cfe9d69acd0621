//! Counts the instructions that the safe crate adds to a message and to a group.
//!
//! ```text
//! cargo run --release --example overhead_instructions
//! ```
//!
//! This needs valgrind, under which the program starts itself again once for every row and size:
//!
//! ```text
//! valgrind --tool=callgrind --callgrind-out-file=FILE --collect-atstart=no \
//!     --toggle-collect='*overhead_instructions::measured*' \
//!     target/release/examples/overhead_instructions (raw|safe|blocking-child|driver) (success|in-progress) (off|on) WHAT TIMES
//! ```
//!
//! WHAT is the number of messages of a group, `all-to-all`, `all-reduce`, or `elsewhere` for an
//! all-reduce by way of `Communicator::on`.
//!
//! Only instructions inside `measured` and its callees are counted: the library that queues, and the driver or the emulator.
//! The difference between two sizes is the cost of the messages; the remainder is the cost of the group itself. `driver` counts
//! the driver's part of a group, which belongs to the emulator and not to the safe crate. `blocking-child` is the safe crate in
//! that launch mode. The figures of one build are the same each time.

use std::error::Error;
use std::process::Command;

use nccl::LaunchMode;
use nccl_tools::overhead::{Tracking, Workload};
use nccl_tools::queueing::Ending;

/// The numbers of messages whose difference is taken, and how often each is called.
const FEW: u64 = 8;
const MANY: u64 = 128;
const TIMES: u64 = 1000;

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [] => table(),
        [way, ending, tracking, what, times] => count(way, ending, tracking, what, times.parse()?),
        _ => Err(
            "expected nothing, or (raw|safe|blocking-child|driver) (success|in-progress) (off|on) WHAT TIMES"
                .into(),
        ),
    }
}

fn count(way: &str, ending: &str, tracking: &str, what: &str, times: usize) -> Outcome<()> {
    nccl_emulator::install()?;
    let ending = match ending {
        "success" => Ending::Success,
        "in-progress" => Ending::InProgress,
        _ => return Err("the end of a group is success or in-progress".into()),
    };
    let tracking = match tracking {
        "off" => Tracking::Off,
        "on" => Tracking::On,
        _ => return Err("the tracking of events is off or on".into()),
    };
    let mode = match way {
        "blocking-child" => LaunchMode::BlockingChild,
        _ => LaunchMode::NonBlocking,
    };
    let mut workload = Workload::in_mode(mode, ending, tracking)?;
    let code =
        |called: Result<(), nccl_sys::ncclResult_t>| called.map_err(|code| format!("{code:?}"));
    let messages = what.parse::<usize>().ok();
    let mut call: Box<dyn FnMut() -> Outcome<()>> = match (way, what, messages) {
        ("driver", ..) => Box::new(|| Ok(workload.driver_calls()?)),
        ("safe" | "blocking-child", _, Some(messages)) => {
            Box::new(move || Ok(workload.safe_group(messages)?))
        }
        ("raw", _, Some(messages)) => Box::new(move || Ok(code(workload.raw_group(messages))?)),
        ("safe" | "blocking-child", "all-to-all", _) => {
            Box::new(|| Ok(workload.safe_all_to_all()?))
        }
        ("raw", "all-to-all", _) => Box::new(|| Ok(code(workload.raw_all_to_all())?)),
        ("safe" | "blocking-child", "all-reduce", _) => {
            Box::new(|| Ok(workload.safe_all_reduce()?))
        }
        ("safe" | "blocking-child", "elsewhere", _) => {
            Box::new(|| Ok(workload.safe_all_reduce_on()?))
        }
        ("raw", "all-reduce" | "elsewhere", _) => Box::new(|| Ok(code(workload.raw_all_reduce())?)),
        _ => {
            return Err(
                "the way is raw, safe, blocking-child or driver; what is a number of messages, all-to-all, \
                         all-reduce or elsewhere"
                    .into(),
            );
        }
    };
    for _ in 0..3 {
        call()?;
    }
    measured(&mut *call, times)
}

/// The function whose instructions callgrind counts.
#[inline(never)]
fn measured(call: &mut dyn FnMut() -> Outcome<()>, times: usize) -> Outcome<()> {
    for _ in 0..times {
        call()?;
    }
    Ok(())
}

fn table() -> Outcome<()> {
    println!(
        "{:<30} {:>14} {:>14}",
        "instructions", "per message", "per group"
    );
    for (ending, tracking) in [
        ("success", "off"),
        ("in-progress", "off"),
        ("success", "on"),
        ("in-progress", "on"),
    ] {
        let mut lines = Vec::new();
        let ways = match ending {
            // The return value of a blocking communicator.
            "success" => &["raw", "safe", "blocking-child"][..],
            _ => &["raw", "safe"],
        };
        for &way in ways {
            let few = under_callgrind(way, ending, tracking, &FEW.to_string())?;
            let many = under_callgrind(way, ending, tracking, &MANY.to_string())?;
            let message = (many - few) / (MANY - FEW) as f64;
            let group = few - message * FEW as f64;
            println!(
                "{:<30} {message:>14.1} {group:>14.1}",
                format!("{ending}, tracking {tracking}, {way}")
            );
            lines.push((message, group));
        }
        if let [raw, safe, ..] = lines[..] {
            println!(
                "{:<30} {:>14.1} {:>14.1}",
                "  difference",
                safe.0 - raw.0,
                safe.1 - raw.1
            );
        }
    }
    for what in ["all-to-all", "all-reduce", "elsewhere"] {
        let raw = under_callgrind("raw", "success", "off", what)?;
        let safe = under_callgrind("safe", "success", "off", what)?;
        println!("{:<30} {:>14} {:>14.1}", what, "", safe - raw);
    }
    let driver = under_callgrind("driver", "success", "off", "driver")?;
    println!(
        "{:<30} {:>14} {driver:>14.1}",
        "  of which the driver's", ""
    );
    Ok(())
}

/// Instructions per call.
fn under_callgrind(way: &str, ending: &str, tracking: &str, what: &str) -> Outcome<f64> {
    let profile = tempfile::NamedTempFile::new()?;
    let output = Command::new("valgrind")
        .arg("--tool=callgrind")
        .arg(format!("--callgrind-out-file={}", profile.path().display()))
        .args([
            "--collect-atstart=no",
            "--toggle-collect=*overhead_instructions::measured*",
        ])
        .arg(std::env::current_exe()?)
        .args([way, ending, tracking, what, &TIMES.to_string()])
        .output()
        .map_err(|error| format!("valgrind cannot be started: {error}"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    // `==123== Collected : 456`
    let collected = text
        .lines()
        .find_map(|line| line.split_once("Collected :"))
        .and_then(|(_, number)| number.trim().parse::<f64>().ok());
    match collected {
        Some(instructions) if output.status.success() && instructions > 0.0 => {
            Ok(instructions / TIMES as f64)
        }
        _ => Err(format!("valgrind ended with {} and said:\n{text}", output.status).into()),
    }
}
