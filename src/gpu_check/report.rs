//! The reports of a check: `report.json` for programs, `report.md` for people.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::Path;

use serde_json::{Value, json};

use super::bundle::Unpacked;
use super::options::Options;
use super::step::{Outcome, Record};

/// The names of the reports.
pub const FILES: [&str; 2] = ["report.json", "report.md"];

/// All results, in order.
#[derive(Debug)]
pub struct Report {
    /// Facts about the machine.
    pub machine: Vec<(&'static str, String)>,
    /// Whether the check came to its end; a report is also written after every step.
    pub complete: bool,
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
            complete: false,
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

    /// Returns whether the check came to its end, a step passed, none that counts failed, and no process was left
    /// running.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.objections().is_empty()
    }

    /// Returns the reasons why the check is not good.
    #[must_use]
    pub fn objections(&self) -> Vec<String> {
        let count = |is: fn(&Record) -> bool| self.records.iter().filter(|one| is(one)).count();
        let passed = count(|one| one.outcome == Outcome::Passed);
        let failed = count(|one| {
            one.counts && !matches!(one.outcome, Outcome::Passed | Outcome::Skipped(_))
        });
        let mut objections = Vec::new();
        if !self.complete {
            objections.push("it did not come to its end".to_owned());
        }
        if passed == 0 {
            objections.push("no step passed".to_owned());
        }
        if failed > 0 {
            objections.push(format!("steps that must not fail and did: {failed}"));
        }
        if !self.left_behind.is_empty() {
            objections.push("processes were left behind".to_owned());
        }
        objections
    }

    /// Writes both reports into `directory`.
    ///
    /// # Errors
    /// The file system's.
    pub fn write(&self, directory: &Path) -> io::Result<()> {
        let json = format!("{:#}\n", self.json());
        let [for_programs, for_people] = FILES.map(|file| directory.join(file));
        fs::write(for_programs, json)?;
        fs::write(for_people, self.markdown())
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
            "complete": self.complete,
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
        for objection in self.objections() {
            let _ = writeln!(text, "- **not good**: {objection}");
        }
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

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use super::*;

    /// A report of a check that came to its end, with these steps.
    fn report(steps: &[(Outcome, bool)]) -> Report {
        let options = Options::parse(std::iter::empty()).unwrap().unwrap();
        let unpacked = Unpacked {
            programs: PathBuf::new(),
            library: None,
            description: json!({"commit": "abc"}),
        };
        let mut report = Report::new(&options, &unpacked);
        report.complete = true;
        for (outcome, counts) in steps {
            report.add(Record {
                name: "a step".to_owned(),
                command: String::new(),
                outcome: outcome.clone(),
                counts: *counts,
                took: Duration::ZERO,
                result: None,
                tail: Vec::new(),
                log: PathBuf::new(),
            });
        }
        report
    }

    fn failed() -> Outcome {
        Outcome::Failed("exit code 1".to_owned())
    }

    fn skipped() -> Outcome {
        Outcome::Skipped("there is no second device".to_owned())
    }

    #[test]
    fn a_check_is_good_if_something_passed_and_nothing_that_counts_failed() {
        let good = report(&[
            (Outcome::Passed, true),
            (failed(), false),
            (skipped(), true),
        ]);
        assert!(good.is_good() && good.objections().is_empty());
        let bad = report(&[(Outcome::Passed, true), (failed(), true)]);
        assert_eq!(bad.objections(), ["steps that must not fail and did: 1"]);
        let late = Outcome::TimedOut(Duration::ZERO);
        assert!(!report(&[(Outcome::Passed, true), (late, true)]).is_good());
        let mut left = report(&[(Outcome::Passed, true)]);
        left.left_behind.push("sleep 600".to_owned());
        assert_eq!(left.objections(), ["processes were left behind"]);
    }

    #[test]
    fn a_check_in_which_nothing_passed_is_not_good() {
        let nothing_passed = [vec![], vec![(skipped(), true)], vec![(failed(), false)]];
        for steps in nothing_passed {
            assert_eq!(report(&steps).objections(), ["no step passed"]);
        }
    }

    #[test]
    fn a_check_that_was_cut_off_is_not_good_and_both_reports_say_so() {
        let mut report = report(&[(Outcome::Passed, true)]);
        assert_eq!(report.json()["complete"], true);
        assert_eq!(report.json()["good"], true);
        report.complete = false;
        assert_eq!(report.json()["complete"], false);
        assert_eq!(report.json()["good"], false);
        let text = report.markdown();
        assert!(
            text.contains("not good**: it did not come to its end"),
            "{text}"
        );
    }
}
