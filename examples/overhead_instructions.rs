//! How many instructions the safe crate adds to a message and to a group.
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
//!     target/release/examples/overhead_instructions (raw|safe|driver) (success|in-progress) (off|on) MESSAGES GROUPS
//! ```
//!
//! Only what happens inside of `measured` is counted, with everything called from there: the library
//! that queues, and the driver or the emulator. The difference of two sizes is the messages', and what
//! is left of a group without them is the group's. `driver` counts the driver's part of a group, which
//! is the emulator's and none of the safe crate's. The figures of one build are the same each time.

use std::error::Error;
use std::process::Command;

use nccl_tools::overhead::{Tracking, Workload};
use nccl_tools::queueing::Ending;

/// The numbers of messages whose difference is taken, and of groups.
const FEW: u64 = 8;
const MANY: u64 = 128;
const GROUPS: u64 = 1000;

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [] => table(),
        [way, ending, tracking, messages, groups] => {
            count(way, ending, tracking, messages.parse()?, groups.parse()?)
        }
        _ => Err(
            "expected nothing, or (raw|safe|driver) (success|in-progress) (off|on) MESSAGES GROUPS"
                .into(),
        ),
    }
}

fn count(way: &str, ending: &str, tracking: &str, messages: usize, groups: usize) -> Outcome<()> {
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
    let mut workload = Workload::new(ending, tracking)?;
    let mut group: Box<dyn FnMut() -> Outcome<()>> = match way {
        "safe" => Box::new(|| Ok(workload.safe_group(messages)?)),
        "raw" => Box::new(|| {
            workload
                .raw_group(messages)
                .map_err(|code| format!("{code:?}").into())
        }),
        "driver" => Box::new(|| Ok(workload.driver_calls()?)),
        _ => return Err("the way is raw, safe or driver".into()),
    };
    for _ in 0..3 {
        group()?;
    }
    measured(&mut *group, groups)
}

/// What callgrind counts.
#[inline(never)]
fn measured(group: &mut dyn FnMut() -> Outcome<()>, groups: usize) -> Outcome<()> {
    for _ in 0..groups {
        group()?;
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
        for way in ["raw", "safe"] {
            let few = under_callgrind(way, ending, tracking, FEW)?;
            let many = under_callgrind(way, ending, tracking, MANY)?;
            let message = (many - few) / (MANY - FEW) as f64;
            let group = few - message * FEW as f64;
            println!(
                "{:<30} {message:>14.1} {group:>14.1}",
                format!("{ending}, tracking {tracking}, {way}")
            );
            lines.push((message, group));
        }
        if let [raw, safe] = lines[..] {
            println!(
                "{:<30} {:>14.1} {:>14.1}",
                "  difference",
                safe.0 - raw.0,
                safe.1 - raw.1
            );
        }
    }
    let driver = under_callgrind("driver", "success", "off", FEW)?;
    println!(
        "{:<30} {:>14} {driver:>14.1}",
        "  of which the driver's", ""
    );
    Ok(())
}

/// Instructions per group.
fn under_callgrind(way: &str, ending: &str, tracking: &str, messages: u64) -> Outcome<f64> {
    let profile = tempfile::NamedTempFile::new()?;
    let output = Command::new("valgrind")
        .arg("--tool=callgrind")
        .arg(format!("--callgrind-out-file={}", profile.path().display()))
        .args([
            "--collect-atstart=no",
            "--toggle-collect=*overhead_instructions::measured*",
        ])
        .arg(std::env::current_exe()?)
        .args([
            way,
            ending,
            tracking,
            &messages.to_string(),
            &GROUPS.to_string(),
        ])
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
            Ok(instructions / GROUPS as f64)
        }
        _ => Err(format!("valgrind ended with {} and said:\n{text}", output.status).into()),
    }
}
