//! The program `all_to_all_perf` as users run it: started for each of its turns, with ranks of its own.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::Outcome;
use super::options::Options;
use super::rank::BATCH;
use super::root::root;
use nccl_tools::statistics::median;

/// The program, built.
pub(crate) struct Example {
    program: PathBuf,
    /// The file of its results.
    json: PathBuf,
    ranks: usize,
    /// The size of its buffers: that of the other competitors.
    room: usize,
}

impl Example {
    /// Builds it, with the same profile and from the same sources as this program.
    pub(crate) fn build(ranks: usize, options: &Options, directory: &Path) -> Outcome<Self> {
        let mut build = Command::new(env!("CARGO"));
        build.args([
            "build",
            "--profile",
            "bench",
            "--quiet",
            "--package",
            "nccl-tools",
        ]);
        build.args(["--example", "all_to_all_perf"]);
        let status = build.current_dir(root()).status()?;
        if !status.success() {
            return Err(
                format!("cargo could not build the example all_to_all_perf: {status}").into(),
            );
        }
        // This one is in `deps`, beside `examples`.
        let program = std::env::current_exe()?;
        let profile = program.ancestors().nth(2).ok_or("no directory above")?;
        Ok(Self {
            program: profile.join("examples/all_to_all_perf"),
            json: directory.join("all_to_all_perf.json"),
            ranks,
            room: options.max,
        })
    }

    /// Seconds of one operation: the median of so many cycles, of each of which the slowest rank counts.
    pub(crate) fn time_cycles(&self, bytes: usize, count: usize) -> Outcome<f64> {
        let mut command = Command::new(&self.program);
        // One size, in buffers that are as large as the largest.
        for (option, value) in [
            ("--minbytes", bytes),
            ("--maxbytes", self.room),
            ("--stepfactor", 2 * self.room),
            ("--iters", BATCH),
            ("--run_cycles", count),
            ("--ranks", self.ranks),
            ("--warmup_iters", 20),
            ("--average", 3),
            ("--check", 0),
            ("--memcpy_ratio", 0),
        ] {
            command.arg(option).arg(value.to_string());
        }
        command.arg("--output_file").arg(&self.json);
        let output = command.stdin(Stdio::null()).output()?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(format!("all_to_all_perf: {}: {said}", output.status).into());
        }
        let read: serde_json::Value = serde_json::from_slice(&std::fs::read(&self.json)?)?;
        // The program does not overwrite an existing file, but picks another name.
        std::fs::remove_file(&self.json)?;
        let rows = read["results"].as_array().ok_or("no results")?;
        let time = |row: &serde_json::Value| {
            let is_of_size = row["size"].as_u64() == Some(bytes as u64);
            row["out_of_place"]["time"].as_f64().filter(|_| is_of_size)
        };
        let times: Vec<f64> = rows.iter().filter_map(time).collect();
        match (median(&times), times.len() == count) {
            (Some(microseconds), true) => Ok(microseconds * 1e-6),
            _ => Err(format!("all_to_all_perf has not measured {bytes} bytes: {read}").into()),
        }
    }
}
