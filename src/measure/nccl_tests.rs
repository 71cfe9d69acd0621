//! Compares this workspace's all-to-all with that of NVIDIA's nccl-tests: the same ranks, the same sizes, alternating.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::gpu_check::RESULT;
use crate::raw::Result;
use crate::spawn::{Job, Outcome, Output};
use crate::statistics::median;

/// The settings of a comparison.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// `alltoall_perf` of nccl-tests, built with the `mpi.h` of the bundle.
    pub theirs: PathBuf,
    /// This workspace's `all_to_all_perf`.
    pub ours: PathBuf,
    /// Ranks, a process each.
    pub ranks: usize,
    /// Whether to run few sizes and turns.
    pub short: bool,
}

/// How long one run may take.
const LIMIT: Duration = Duration::from_secs(120);

/// Times in microseconds by size.
type Times = BTreeMap<u64, Vec<f64>>;

/// Runs both alternately, with and without `-C 1`, and writes the table.
///
/// # Errors
/// When one of them fails.
pub fn run(comparison: &Comparison) -> Result {
    let directory = tempfile::tempdir()?;
    let turns = if comparison.short { 3 } else { 7 };
    let sizes = if comparison.short {
        "-b 1K -e 64K -f 64 -n 5 -w 1 -c 0"
    } else {
        "-b 1K -e 1G -f 4 -n 20 -w 5 -c 0"
    };
    // Time, and host time to enqueue; of nccl-tests and of this workspace.
    let mut times: [[Times; 2]; 2] = Default::default();
    for turn in 0..turns {
        for (host, option) in ["", " -C 1"].into_iter().enumerate() {
            // The order alternates, too.
            for side in if turn % 2 == 0 { [0, 1] } else { [1, 0] } {
                let json = directory.path().join(format!("{turn}-{host}-{side}.json"));
                let mut arguments: Vec<String> = format!("{sizes}{option}")
                    .split_whitespace()
                    .map(str::to_owned)
                    .collect();
                arguments.extend(["-J".into(), json.display().to_string()]);
                if side == 0 {
                    theirs(comparison, &arguments, directory.path())?;
                } else {
                    ours(comparison, &arguments)?;
                }
                collect(&json, &mut times[host][side])?;
            }
        }
    }
    write(comparison, turns, &times)
}

fn theirs(comparison: &Comparison, arguments: &[String], directory: &Path) -> Result {
    let shared = directory.join("mpi");
    // Fresh for every run: it holds the counters of barriers.
    std::fs::write(&shared, vec![0u8; 1 << 20])?;
    let job = Job::new(comparison.ranks)
        .output(Output::Collect)
        .deadline(LIMIT);
    let ended = job.run(|_| {
        let mut command = Command::new(&comparison.theirs);
        command
            .args(arguments)
            .env("NCCL_TESTS_DEVICE", "0")
            .env("NCCL_TOOLS_MPI", &shared);
        if let Some(directory) = std::env::var_os("NCCL_LIBRARY")
            .map(PathBuf::from)
            .and_then(|library| library.parent().map(Path::to_owned))
        {
            let mut path = directory.into_os_string();
            if let Some(rest) = std::env::var_os("LD_LIBRARY_PATH") {
                path.push(":");
                path.push(rest);
            }
            command.env("LD_LIBRARY_PATH", path);
        }
        command
    })?;
    let last = |rank: &crate::spawn::RankEnd| {
        let lines: Vec<_> = rank
            .stdout
            .iter()
            .chain(&rank.stderr)
            .rev()
            .take(8)
            .cloned()
            .collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("\n")
    };
    match ended.outcome {
        Outcome::Succeeded => Ok(()),
        Outcome::Failed(failure) => {
            Err(format!("nccl-tests: {failure}\n{}", last(&ended.ranks[0])).into())
        }
        Outcome::TimedOut(_) => {
            Err(format!("nccl-tests does not end:\n{}", last(&ended.ranks[0])).into())
        }
        Outcome::OutputClosed => Err("the output is closed".into()),
    }
}

fn ours(comparison: &Comparison, arguments: &[String]) -> Result {
    let status = Command::new(&comparison.ours)
        .args(["--ranks", &comparison.ranks.to_string(), "-T", "60"])
        .args(arguments)
        .stdout(Stdio::null())
        .status()?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("all_to_all_perf: {status}").into())
    }
}

/// Adds the times of one run.
fn collect(path: &Path, times: &mut Times) -> Result {
    let report: Value = serde_json::from_str(&std::fs::read_to_string(path)?)?;
    for row in report["results"].as_array().into_iter().flatten() {
        let Some(size) = row["size"].as_u64() else {
            continue;
        };
        let side = &row["out_of_place"];
        let time = side["time"].as_f64().or(side["cpu_time"].as_f64());
        times
            .entry(size)
            .or_default()
            .push(time.ok_or("a row has no time")?);
    }
    Ok(())
}

/// Median, least and greatest.
fn spread(times: &[f64]) -> [f64; 3] {
    let least = times.iter().copied().reduce(f64::min);
    let greatest = times.iter().copied().reduce(f64::max);
    [median(times), least, greatest].map(|time| time.unwrap_or(f64::NAN))
}

fn write(comparison: &Comparison, turns: usize, times: &[[Times; 2]; 2]) -> Result {
    let mut text = String::new();
    if std::env::var("NCCL_EMULATOR").is_ok_and(|value| value == "1") {
        text.push_str("On the emulator: these figures say nothing about a GPU.\n\n");
    }
    text.push_str(&format!(
        "{} ranks, out of place, microseconds, median (least .. greatest) of {turns} alternated runs.\n\n\
         | bytes | what | `{}` | `{}` | ours over theirs | busbw theirs | busbw ours |\n|---|---|---|---|---|---|---|\n",
        comparison.ranks,
        name(&comparison.theirs),
        name(&comparison.ours)
    ));
    let mut rows = Vec::new();
    for (what, [theirs, ours]) in ["time", "host time (-C 1)"].into_iter().zip(times) {
        for (size, theirs) in theirs {
            let Some(ours) = ours.get(size) else { continue };
            let (theirs, ours) = (spread(theirs), spread(ours));
            let shown = |[median, least, greatest]: [f64; 3]| {
                format!("{median:.2} ({least:.2} .. {greatest:.2})")
            };
            let ratio = ours[0] / theirs[0];
            let share = (comparison.ranks - 1) as f64 / comparison.ranks as f64;
            let bus = |time: f64| match what {
                "time" => format!("{:.2}", *size as f64 / time / 1e3 * share),
                _ => String::new(),
            };
            text.push_str(&format!(
                "| {size} | {what} | {} | {} | {ratio:.3} | {} | {} |\n",
                shown(theirs),
                shown(ours),
                bus(theirs[0]),
                bus(ours[0])
            ));
            rows.push(
                json!({"size": size, "what": what, "theirs": theirs, "ours": ours, "ratio": ratio}),
            );
        }
    }
    print!("{text}");
    if let Some(path) = std::env::var_os(RESULT) {
        std::fs::write(
            path,
            format!("{:#}\n", json!({"markdown": text, "rows": rows})),
        )?;
    }
    if rows.is_empty() {
        Err("there is nothing in common to compare".into())
    } else {
        Ok(())
    }
}

fn name(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_spread_of_times_is_median_least_and_greatest() {
        assert_eq!(spread(&[3.0, 1.0, 2.0]), [2.0, 1.0, 3.0]);
        assert_eq!(spread(&[4.0, 1.0, 2.0, 3.0]), [2.5, 1.0, 4.0]);
        assert!(spread(&[])[0].is_nan());
    }

    #[test]
    fn rows_of_nccl_tests_are_read_with_either_time() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let rows = json!({"results": [
            {"size": 1024, "out_of_place": {"time": 1.5}},
            {"size": 2048, "out_of_place": {"cpu_time": 2.5}},
        ]});
        std::fs::write(file.path(), rows.to_string()).unwrap();
        let mut times = Times::new();
        collect(file.path(), &mut times).unwrap();
        collect(file.path(), &mut times).unwrap();
        assert_eq!(times[&1024], [1.5, 1.5]);
        assert_eq!(times[&2048], [2.5, 2.5]);
    }
}
