//! The reports of a check: `report.json` for programs, `report.md` for people.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::Path;

use serde_json::{Value, json};

use super::bundle::Unpacked;
use super::options::Options;
use super::step::{Outcome, Record};

/// All results, in order.
#[derive(Debug)]
pub struct Report {
    /// Facts about the machine.
    pub machine: Vec<(&'static str, String)>,
    /// Processes that were still there at the end, and were killed.
    pub left_behind: Vec<String>,
    title: String,
    mode: &'static str,
    emulated: bool,
    bundle: Value,
    records: Vec<Record>,
}

impl Report {
    /// A report without any steps.
    #[must_use]
    pub fn new(options: &Options, unpacked: &Unpacked) -> Self {
        let subject = if options.emulated {
            "the CPU emulator; nothing here says anything about a GPU"
        } else {
            "real NCCL"
        };
        Self {
            machine: Vec::new(),
            left_behind: Vec::new(),
            title: format!("Check of nccl on {subject}"),
            mode: if options.full { "full" } else { "quick" },
            emulated: options.emulated,
            bundle: unpacked.description.clone(),
            records: Vec::new(),
        }
    }

    /// Adds a step.
    pub fn add(&mut self, record: Record) {
        self.records.push(record);
    }

    /// Returns whether all steps that count passed, and no process was left running.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.left_behind.is_empty()
            && self.records.iter().all(|record| {
                !record.counts || matches!(record.outcome, Outcome::Passed | Outcome::Skipped(_))
            })
    }

    /// Writes both reports into `directory`.
    ///
    /// # Errors
    /// The file system's.
    pub fn write(&self, directory: &Path) -> io::Result<()> {
        let json = format!("{:#}\n", self.json());
        fs::write(directory.join("report.json"), json)?;
        fs::write(directory.join("report.md"), self.markdown())
    }

    fn json(&self) -> Value {
        let steps: Vec<Value> = self
            .records
            .iter()
            .map(|record| {
                json!({
                    "name": record.name,
                    "command": record.command,
                    "outcome": record.outcome.word(),
                    "detail": record.outcome.detail(),
                    "counts": record.counts,
                    "seconds": (record.took.as_secs_f64() * 1e3).round() / 1e3,
                    "result": record.result,
                    "output_tail": if record.outcome == Outcome::Passed { &[] } else { &*record.tail },
                })
            })
            .collect();
        let machine: serde_json::Map<String, Value> = self
            .machine
            .iter()
            .map(|(name, text)| ((*name).to_owned(), text.as_str().into()))
            .collect();
        json!({
            "title": self.title,
            "mode": self.mode,
            "emulated": self.emulated,
            "good": self.is_good(),
            "bundle": self.bundle,
            "machine": machine,
            "environment": environment(),
            "left_behind": self.left_behind,
            "steps": steps,
        })
    }

    fn markdown(&self) -> String {
        let mut text = format!("# {}\n\n", self.title);
        let count = |word: &str| {
            self.records
                .iter()
                .filter(|r| r.outcome.word() == word)
                .count()
        };
        let _ = writeln!(
            text,
            "`run.sh {}`, commit {}: {} steps passed, {} failed, {} timed out, {} skipped.\n",
            self.mode,
            self.bundle["commit"].as_str().unwrap_or("unknown"),
            count("passed"),
            count("FAILED"),
            count("TIMED OUT"),
            count("skipped"),
        );
        for (name, line) in &self.machine {
            let _ = writeln!(
                text,
                "- {name}: {}",
                line.lines().last().unwrap_or("unknown")
            );
        }
        if !self.left_behind.is_empty() {
            let _ = writeln!(
                text,
                "- **left behind and killed**: {}",
                self.left_behind.join("; ")
            );
        }
        text.push_str("\n| step | outcome | seconds | |\n|---|---|---|---|\n");
        for record in &self.records {
            let mut note = record.outcome.detail().replace('|', "\\|");
            if !record.counts && !note.is_empty() && !matches!(record.outcome, Outcome::Skipped(_))
            {
                note += " (found out; no failure of the check)";
            }
            let _ = writeln!(
                text,
                "| {} | {} | {:.1} | {note} |",
                record.name,
                record.outcome.word(),
                record.took.as_secs_f64(),
            );
        }
        for record in &self.records {
            let is_bad = matches!(record.outcome, Outcome::Failed(_) | Outcome::TimedOut(_));
            let told = record
                .result
                .as_ref()
                .and_then(|result| result["markdown"].as_str());
            if !is_bad && told.is_none() {
                continue;
            }
            let _ = write!(text, "\n## {}\n\n`{}`\n", record.name, record.command);
            if let Some(told) = told {
                let _ = write!(text, "\n{}\n", told.trim_end());
            }
            if is_bad {
                let _ = write!(text, "\n```text\n{}\n```\n", record.tail.join("\n"));
            }
        }
        text
    }
}

/// The variables of NCCL and CUDA, and no others: those may hold secrets.
fn environment() -> Value {
    let variables = std::env::vars_os().filter_map(|(name, value)| {
        let name = name.into_string().ok()?;
        let ours = ["NCCL_", "CUDA_"]
            .iter()
            .any(|prefix| name.starts_with(prefix));
        ours.then(|| (name, value.to_string_lossy().into_owned().into()))
    });
    Value::Object(variables.collect())
}
