//! Runs all measurements, and writes a page for `docs/results`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use super::MEASUREMENTS;
use crate::build_info::BUILD;
use crate::gpu_check::RESULT;
use crate::raw::Result;
use crate::{clock, machine};

/// The arrangements of the ranks.
const ARRANGEMENTS: [&str; 2] = ["processes", "threads"];

/// Runs every measurement in every arrangement, and writes the results to `path`.
///
/// # Errors
/// The failure of a measurement, or of the file system.
pub fn write(path: &Path, short: bool) -> Result {
    let before = machine::load();
    let mut sections = String::new();
    for measurement in MEASUREMENTS {
        let _ = writeln!(
            sections,
            "\n## {}\n\nIt tells: {}.",
            measurement.name, measurement.about
        );
        for arrangement in ARRANGEMENTS {
            eprintln!("measure: {}, ranks as {arrangement}", measurement.name);
            let _ = writeln!(sections, "\nRanks as {arrangement}:\n");
            sections += &table(measurement.name, arrangement, short)?;
        }
    }
    let mut page = String::from("# What NCCL's calls cost a host\n\n");
    let library = match std::env::var("NCCL_EMULATOR_NCCL") {
        Ok(library) if !library.is_empty() => {
            page += "**NVIDIA's own library on the emulator's driver: kernels are interpreted, launches are nearly free. These figures \
                     are differences between ways to call NCCL, and say nothing about a GPU.**\n\n";
            let release = Path::new(&library).parent().and_then(Path::file_name);
            release.unwrap_or_default().to_string_lossy().into_owned()
        }
        _ => "what is installed".to_owned(),
    };
    let command = std::env::args().skip(1).collect::<Vec<_>>().join(" ");
    let _ = writeln!(
        page,
        "- command: `measure {command}`, {}\n- library: {library}\n- {}\n- {}\n- load (1, 5 and 15 minutes) before: {before}; after: {}\n",
        clock::now(),
        BUILD.line(),
        machine::line(),
        machine::load(),
    );
    page += "Two ranks, bound to no core; in `launch-ratio`, where there are two cores, to one each. Each measurement is a run of its own: `measure NAME --arrangement threads` or `processes`.\n";
    page += &sections;
    fs::write(path, page)?;
    Ok(())
}

/// The table of a measurement, which runs in processes of its own.
fn table(name: &str, arrangement: &str, short: bool) -> Result<String> {
    let place = tempfile::tempdir()?;
    let (result, log) = (place.path().join("result"), place.path().join("log.%p"));
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args([name, "--arrangement", arrangement])
        .args(short.then_some("--short"))
        .env(RESULT, &result)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    if name == "init-cost" {
        // NCCL logs the parts of its init there.
        command.envs([("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "INIT")]);
        command.env("NCCL_DEBUG_FILE", log);
    }
    let status = command.status()?;
    if !status.success() {
        return Err(format!("measure {name}: {status}").into());
    }
    let said: Value = serde_json::from_str(&fs::read_to_string(result)?)?;
    let table = said["markdown"].as_str().unwrap_or_default();
    let mut text: String = table
        .split_inclusive('\n')
        .skip_while(|line| !line.starts_with('|'))
        .collect();
    if name == "init-cost" {
        text += &timings(place.path())?;
    }
    Ok(text)
}

/// NCCL's own timings of the inits, by the function that created the communicators: means in milliseconds of all lines.
/// Each line has hundredths of a second, so means of few lines are coarse.
fn timings(logs: &Path) -> Result<String> {
    let mut accounts: BTreeMap<String, (u32, Vec<(String, f64)>)> = BTreeMap::new();
    for entry in fs::read_dir(logs)? {
        let log = fs::read_to_string(entry?.path()).unwrap_or_default();
        for (function, parts) in log.lines().filter_map(account) {
            let (count, sums) = accounts.entry(function).or_default();
            *count += 1;
            if sums.is_empty() {
                *sums = parts;
            } else {
                for ((_, sum), (_, seconds)) in sums.iter_mut().zip(parts) {
                    *sum += seconds;
                }
            }
        }
    }
    let mut text = String::new();
    for (function, (count, sums)) in accounts {
        let parts: Vec<String> = sums
            .iter()
            .map(|(part, seconds)| format!("{part} {:.1}", seconds * 1e3 / f64::from(count)))
            .collect();
        text += &format!(
            "\nNCCL's own account (\"Init timings\"), means of {count} calls of `{function}` in milliseconds: {}.\n",
            parts.join(", ")
        );
    }
    Ok(text)
}

/// The function and the seconds by part, of a line such as `… Init timings - ncclCommSplit: rank 0 nranks 2 total 0.04
/// (kernels 0.00, alloc 0.01)`.
fn account(line: &str) -> Option<(String, Vec<(String, f64)>)> {
    let (_, said) = line.split_once("Init timings - ")?;
    let (function, said) = said.split_once(':')?;
    let (_, said) = said.split_once(" total ")?;
    let (total, parts) = said.trim_end().strip_suffix(')')?.split_once(" (")?;
    let parts = parts.split(", ").map(|part| part.split_once(' '));
    let parts = std::iter::once(Some(("total", total))).chain(parts);
    let parts: Option<Vec<_>> = parts
        .map(|part| part.and_then(|(name, seconds)| Some((name.to_owned(), seconds.parse().ok()?))))
        .collect();
    Some((function.to_owned(), parts?))
}

#[cfg(test)]
mod tests {
    use super::account;

    #[test]
    fn an_account_of_an_init_is_read_by_its_parts() {
        let line = "vm:1:2 [0] NCCL INFO Init timings - ncclCommSplit: rank 0 nranks 2 total 0.04 (kernels 0.00, rest 0.01)";
        let (function, parts) = account(line).expect("it has the form");
        assert_eq!(function, "ncclCommSplit");
        let parts: Vec<_> = parts
            .iter()
            .map(|(name, seconds)| (name.as_str(), *seconds))
            .collect();
        assert_eq!(parts, [("total", 0.04), ("kernels", 0.0), ("rest", 0.01)]);
        assert!(account("vm:1:2 [0] NCCL INFO Init COMPLETE").is_none());
        assert!(
            account("Init timings - ncclCommSplit: rank 0 total 0.04 (kernels many)").is_none()
        );
    }
}
