//! The JSON file of `-J`: nccl-tests' version 3, key by key.
//!
//! Further keys follow its own: `producer`, `emulator`, `spawn` and `buffers`, and in each result `algorithm`,
//! `memcpy_ratio` and `per_rank_times_us`. One difference is deliberate: `env` holds `NCCL_*` and `CUDA_*` only, and no
//! variable that looks secret, because reports get published.

mod value;

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

pub use value::Value;

use crate::bench::{Measurement, Row, Totals};
use crate::build_info::BUILD;
use crate::clock;
use crate::failure::Failure;
use crate::format::{DeviceLine, Footer};
use crate::options::{Blocking, Options};
use crate::sizes::Step;

/// The version of nccl-tests' file format.
const FORMAT_VERSION: u32 = 3;

/// Finds an unused name for the file, and creates it: `path`, else `path.0`, `path.1` …
///
/// # Errors
/// When the file cannot be created there.
pub fn reserve(path: &Path) -> Result<PathBuf, Failure> {
    let mut candidate = path.to_owned();
    let mut number = 0u32;
    loop {
        match OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&candidate)
        {
            Ok(_) => return Ok(candidate),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let mut name = path.as_os_str().to_owned();
                name.push(format!(".{number}"));
                candidate = PathBuf::from(name);
                number += 1;
            }
            Err(error) => {
                return Err(Failure::usage(format!(
                    "-J {}: the file cannot be written: {error}",
                    path.display()
                )));
            }
        }
    }
}

/// Fills a reserved file that its rank left empty.
pub fn complete(path: &Path, error: &str) {
    if std::fs::metadata(path).is_ok_and(|metadata| metadata.len() == 0) {
        // The failure has been reported already.
        let _ = Report::new(path.to_owned(), 0).write(&[error.to_owned()], None, "", "");
    }
}

/// The contents of the file; written at the end, whatever the end is.
#[derive(Debug)]
pub struct Report {
    path: PathBuf,
    start: Vec<(&'static str, Value)>,
    config: Vec<(&'static str, Value)>,
    /// For each rank the index of its process.
    processes: Vec<usize>,
    results: Vec<Value>,
    end: Vec<(&'static str, Value)>,
}

impl Report {
    /// A report to a file that was [`reserve`]d.
    #[must_use]
    pub fn new(path: PathBuf, library_version: u32) -> Self {
        let arguments = std::env::args_os().map(|argument| argument.to_string_lossy().into_owned());
        let start = vec![
            ("version", FORMAT_VERSION.into()),
            ("start_time", clock::now().into()),
            ("args", arguments.collect()),
            (
                "env",
                environment(std::env::vars_os()).into_iter().collect(),
            ),
            ("nccl_version", library_version.into()),
        ];
        Self {
            path,
            start,
            config: Vec::new(),
            processes: Vec::new(),
            results: Vec::new(),
            end: Vec::new(),
        }
    }

    /// The path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds the options and the devices.
    pub fn config(&mut self, options: &Options, devices: &[DeviceLine]) {
        let (step_key, step) = match options.sweep.step {
            Step::Factor(factor) => ("step_factor", factor),
            Step::Bytes(bytes) => ("step_bytes", bytes),
        };
        self.processes = processes(devices);
        let device = |line: &DeviceLine| {
            Value::Object(vec![
                ("rank", line.rank.into()),
                ("group", 0u32.into()),
                ("pid", line.pid.into()),
                ("hostname", line.host.as_str().into()),
                ("device", line.device.into()),
                ("device_hex", line.pci_text().into()),
                ("device_info", line.name.as_str().into()),
            ])
        };
        self.config = vec![
            ("nthreads", options.threads.into()),
            ("ngpus", options.gpus.into()),
            ("minimum_bytes", options.sweep.min.into()),
            ("maximum_bytes", options.sweep.max.into()),
            (step_key, step.into()),
            ("warmup_iters", options.warm_up.into()),
            ("iterations", options.iterations.into()),
            ("aggregated_iterations", options.aggregate.into()),
            ("validation", options.checks.into()),
            ("graph", options.graph.into()),
            (
                "blocking_collectives",
                (options.blocking != Blocking::Never).into(),
            ),
            ("per_iter_timing", options.per_iteration.into()),
            ("per_iter_skip", options.per_iteration_skip.into()),
            ("parallel_init", options.parallel_init.into()),
            ("devices", devices.iter().map(device).collect()),
        ];
    }

    /// Adds a row of the table.
    pub fn row(&mut self, options: &Options, row: &Row) {
        let shape = row.shape;
        let placement = |measured: &Measurement| {
            let speed = shape.speed(measured.seconds);
            let (key, seconds) = match options.cpu_time {
                true => ("cpu_time", measured.host_seconds),
                false => ("time", measured.seconds),
            };
            Value::Object(vec![
                (key, (seconds * 1e6).into()),
                ("alg_bw", speed.algorithm.into()),
                ("bus_bw", speed.bus.into()),
                ("nwrong", measured.wrong.map(|wrong| wrong as f64).into()),
            ])
        };
        let mut entries = vec![
            ("size", shape.bytes.into()),
            ("count", shape.count.into()),
            ("type", shape.element().name.into()),
            ("redop", shape.case.redop().into()),
            ("root", format!("{:>6}", -1).into()),
            ("out_of_place", placement(&row.out_of_place)),
        ];
        let iterations = |measured| per_iteration(options, measured, &self.processes);
        entries.extend(iterations(&row.out_of_place).map(|value| ("out_of_place_per_iter", value)));
        entries.push(("in_place", placement(&row.in_place)));
        entries.extend(iterations(&row.in_place).map(|value| ("in_place_per_iter", value)));
        entries.push(("actual_iterations", options.iterations.into()));
        entries.push(("experiment_name", "".into()));
        let algorithm = shape.case.algorithm;
        entries.extend(algorithm.map(|algorithm| ("algorithm", algorithm.name.into())));
        entries.extend(row.ratio.map(|ratio| {
            let value = Value::Object(vec![
                ("memcpy_us", (ratio.copy_seconds * 1e6).into()),
                ("operation_us", (ratio.operation_seconds * 1e6).into()),
                ("ratio", ratio.ratio.into()),
                ("lowest", ratio.lowest.into()),
                ("highest", ratio.highest.into()),
            ]);
            ("memcpy_ratio", value)
        }));
        self.results.push(Value::Object(entries));
    }

    /// Adds the totals.
    pub fn totals(&mut self, totals: &Totals, footer: &Footer) {
        let okay = match footer.fast_enough() {
            None => "unchecked".into(),
            Some(okay) => Value::from(okay),
        };
        self.end = vec![
            (
                "out_of_bounds",
                Value::Object(vec![
                    ("count", totals.out_of_bounds.into()),
                    ("okay", (totals.out_of_bounds == 0).into()),
                ]),
            ),
            (
                "average_bus_bandwidth",
                Value::Object(vec![
                    ("bandwidth", totals.average_bus.into()),
                    ("okay", okay),
                ]),
            ),
        ];
    }

    /// Writes the file. `errors` are the library's last error, or the reason of an early end.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(
        mut self,
        errors: &[String],
        emulator: Option<&str>,
        spawn: &str,
        buffers: &str,
    ) -> Result<(), Failure> {
        let mut entries = self.start;
        if !self.config.is_empty() {
            entries.push(("config", Value::Object(self.config)));
        }
        entries.push(("results", Value::List(self.results)));
        entries.append(&mut self.end);
        entries.push(("errors", errors.iter().map(String::as_str).collect()));
        entries.push(("end_time", clock::now().into()));
        entries.push(("producer", BUILD.line().into()));
        entries.push(("emulator", emulator.into()));
        entries.push(("spawn", spawn.into()));
        entries.push(("buffers", buffers.into()));
        let text = Value::Object(entries).to_string();
        let written = File::create(&self.path).and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            file.sync_all()
        });
        written.map_err(|error| {
            Failure::new(
                crate::failure::Exit::Failed,
                format!(
                    "the JSON output could not be written to {}: {error}",
                    self.path.display()
                ),
            )
        })
    }
}

fn per_iteration(options: &Options, measured: &Measurement, processes: &[usize]) -> Option<Value> {
    let iterations = measured.per_iteration.as_ref()?;
    let summary = &iterations.summary;
    let microseconds = |times: &[f64]| times.iter().map(|time| time * 1e6).collect::<Value>();
    let mut entries = vec![
        ("skipped_iterations", options.per_iteration_skip.into()),
        ("min_us", (summary.min * 1e6).into()),
        ("max_us", (summary.max * 1e6).into()),
        ("avg_us", (summary.mean * 1e6).into()),
        ("p50_us", (summary.p50 * 1e6).into()),
        ("p95_us", (summary.p95 * 1e6).into()),
        ("p99_us", (summary.p99 * 1e6).into()),
        ("stdev_us", (summary.deviation * 1e6).into()),
        ("cv_pct", summary.variation_percent().into()),
        ("times_us", microseconds(&iterations.longest)),
    ];
    let rows = |times: &[Vec<f64>]| times.iter().map(|times| microseconds(times)).collect();
    let by_process = by_process(&iterations.by_rank, processes);
    if by_process.len() > 1 {
        entries.push(("per_process_max_times_us", Value::List(rows(&by_process))));
    }
    if by_process.len() < iterations.by_rank.len() {
        let by_rank = Value::List(rows(&iterations.by_rank));
        entries.push(("per_rank_times_us", by_rank));
    }
    Some(Value::Object(entries))
}

/// For each rank the index of its process, in the order of the first ranks of processes.
fn processes(devices: &[DeviceLine]) -> Vec<usize> {
    let mut known: Vec<(&str, u32)> = Vec::new();
    devices
        .iter()
        .map(|line| {
            let process = (line.host.as_str(), line.pid);
            known
                .iter()
                .position(|&one| one == process)
                .unwrap_or_else(|| {
                    known.push(process);
                    known.len() - 1
                })
        })
        .collect()
}

/// For each process, and each iteration, the longest time of its ranks, which may be threads.
fn by_process(by_rank: &[Vec<f64>], processes: &[usize]) -> Vec<Vec<f64>> {
    let mut all: Vec<Vec<f64>> = Vec::new();
    for (rank, times) in by_rank.iter().enumerate() {
        let process = processes.get(rank).copied().unwrap_or(rank);
        match all.get_mut(process) {
            None => all.push(times.clone()),
            Some(longest) => {
                for (longest, &time) in longest.iter_mut().zip(times) {
                    *longest = longest.max(time);
                }
            }
        }
    }
    all
}

/// The variables that set up NCCL, CUDA and this program.
fn environment(
    variables: impl Iterator<Item = (std::ffi::OsString, std::ffi::OsString)>,
) -> Vec<String> {
    const SECRET: [&str; 6] = ["SECRET", "TOKEN", "PASSWORD", "PASSWD", "CREDENTIAL", "KEY"];
    let mut kept: Vec<String> = variables
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value))
        .filter(|(name, _)| name.starts_with("NCCL_") || name.starts_with("CUDA_"))
        // The variables of the rendezvous differ on every run, and are private.
        .filter(|(name, _)| !name.starts_with("NCCL_RUN_"))
        .filter(|(name, _)| !SECRET.iter().any(|word| name.to_uppercase().contains(word)))
        .map(|(name, value)| format!("{name}={}", value.to_string_lossy()))
        .collect();
    kept.sort();
    kept
}

#[cfg(test)]
mod tests;
