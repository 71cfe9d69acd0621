//! Measurements that need a GPU and that decisions of this workspace depend on: times of launches and aborts, the cost
//! of a second communicator, features between ranks that share a device.
//!
//! Each measurement is a run of the program `measure`, with its ranks as threads or processes; its results ([`Sheet`])
//! go into the report of the check. On the emulator the measurements run in a short form, to test the code; those
//! figures are marked, and say nothing about a GPU.

pub mod aborts;
pub mod arrangement;
pub mod cost;
pub mod launch;
pub mod mps;
pub mod nccl_tests;
pub mod page;
mod pair;
pub mod symmetric;

use std::fmt::{Display, Write as _};
use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::gpu_check::RESULT;
use crate::raw::{Rank, Result, Way};
use crate::statistics::median_time;

/// How a measurement is run.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Whether to run few repetitions, to test the code.
    pub short: bool,
}

/// A measurement with two ranks.
#[derive(Clone, Copy)]
pub struct Measurement {
    /// Its name.
    pub name: &'static str,
    /// The question that it answers.
    pub about: &'static str,
    /// Whether it is part of the quick check.
    pub quick: bool,
    run: fn(&Rank, Setting, &mut Sheet) -> Result,
}

const fn measurement(
    name: &'static str,
    about: &'static str,
    run: fn(&Rank, Setting, &mut Sheet) -> Result,
) -> Measurement {
    Measurement {
        name,
        about,
        quick: false,
        run,
    }
}

/// All measurements, in order.
pub const MEASUREMENTS: &[Measurement] = &[
    measurement(
        "launch-time",
        "host time of a grouped exchange of 8 bytes, by kind of communicator",
        launch::host_time,
    ),
    measurement(
        "launch-ratio",
        "host time of the safe crate's default over a blocking communicator, ten alternated runs",
        launch::ratio,
    ),
    measurement(
        "init-cost",
        "time and device memory of a communicator, and of a parent with a child",
        cost::init,
    ),
    measurement(
        "abort-connect",
        "how soon an abort of the parent frees a thread that waits for its peer",
        aborts::in_connect,
    ),
    measurement(
        "abort-kernel",
        "how soon an abort ends a kernel that spins, with the launch queue full",
        aborts::in_kernel,
    ),
    measurement(
        "abort-repeat",
        "abort of parent and child many times, and destroy in both orders",
        aborts::repeated,
    ),
    measurement(
        "kept",
        "what a process keeps of communicators that are gone",
        aborts::kept,
    ),
    measurement(
        "child-bandwidth",
        "bandwidth of a child against that of a plain communicator",
        cost::child_bandwidth,
    ),
    measurement(
        "abort-one-rank",
        "how long an abort takes when one rank aborts, and when all do",
        aborts::one_or_all,
    ),
    measurement(
        "symmetric",
        "windows and copy-engine collectives between ranks that share a device",
        symmetric::windows,
    ),
];

/// How long a whole measurement may take.
const DEADLINE: Duration = Duration::from_secs(280);

/// Runs the measurement of this name with two ranks.
///
/// # Errors
/// Why it failed. A missing feature is recorded instead.
pub fn run(name: &str, way: Way, setting: Setting) -> Result {
    let measurement = *MEASUREMENTS
        .iter()
        .find(|measurement| measurement.name == name)
        .ok_or_else(|| format!("there is no measurement `{name}`"))?;
    crate::raw::run(way, 2, DEADLINE, move |rank| {
        let mut sheet = Sheet::new(rank);
        (measurement.run)(rank, setting, &mut sheet)?;
        rank.barrier("measured")?;
        sheet.write()
    })
}

/// The results of a measurement, in order; only rank 0's is kept.
#[derive(Debug)]
pub struct Sheet {
    is_kept: bool,
    lines: Vec<(String, Value, String)>,
}

impl Sheet {
    /// An empty sheet.
    #[must_use]
    pub fn new(rank: &Rank) -> Self {
        Self {
            is_kept: rank.world.rank() == 0,
            lines: Vec::new(),
        }
    }

    /// Adds a result.
    pub fn add(&mut self, what: impl Display, value: impl Into<Value>, unit: &str) {
        self.lines
            .push((what.to_string(), value.into(), unit.to_owned()));
    }

    /// Adds a result that is not available here, and why.
    pub fn unavailable(&mut self, what: impl Display, why: impl Display) {
        self.add(what, format!("not available: {why}"), "");
    }

    /// Adds a time.
    pub fn time(&mut self, what: impl Display, time: Duration) {
        self.add(what, microseconds(time), "us");
    }

    /// Adds the median and the 99th percentile of times.
    pub fn times(&mut self, what: impl Display, mut times: Vec<Duration>) {
        times.sort_unstable();
        let most = times[((times.len() - 1) as f64 * 0.99).round() as usize];
        let median = median_time(&times).unwrap_or_default();
        self.time(format!("{what}, median"), median);
        self.time(format!("{what}, 99 %"), most);
    }

    /// Prints the results, and writes them for the report.
    ///
    /// # Errors
    /// The file system's.
    pub fn write(&self) -> Result {
        if !self.is_kept {
            return Ok(());
        }
        let mut text = String::new();
        if std::env::var("NCCL_EMULATOR").is_ok_and(|value| value == "1") {
            text.push_str("On the emulator: these figures say nothing about a GPU.\n\n");
        }
        text.push_str("| | |\n|---|---|\n");
        let mut values = Map::new();
        for (what, value, unit) in &self.lines {
            let shown = value.as_str().map_or(value.to_string(), str::to_owned);
            let _ = writeln!(text, "| {what} | {shown} {unit} |");
            values.insert(what.clone(), json!({"value": value, "unit": unit}));
        }
        print!("{text}");
        if let Some(path) = std::env::var_os(RESULT) {
            let result = json!({"markdown": text, "values": values});
            std::fs::write(path, format!("{result:#}\n"))?;
        }
        Ok(())
    }
}

/// Rounds to two decimals.
fn microseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e8).round() / 1e2
}
