//! The parts of a test that ran, and those that cannot run here: one line for people, and a value for the step that runs the
//! test.

use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

use serde::{Deserialize, Serialize};

/// The file for the verdicts of a step's processes: a line of JSON for each.
pub const VERDICTS: &str = "NCCL_TOOLS_VERDICTS";

/// A part of a test.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Not run: the part and the reason.
    NotTested(String),
    /// Run. A test that left out only a part does not count as left out.
    Tested(String),
}

/// Reports that a test does not run a part, and the reason.
pub fn not_tested(what_and_why: impl Display) {
    println!("NOT TESTED: {what_and_why}");
    Verdict::NotTested(what_and_why.to_string()).leave();
}

/// Reports that a test runs a part.
pub fn tested(what: impl Display) {
    println!("tested: {what}");
    Verdict::Tested(what.to_string()).leave();
}

impl Verdict {
    /// Appends the verdict to the step's file; without a step it does nothing.
    pub fn leave(&self) {
        let Some(path) = std::env::var_os(VERDICTS) else {
            return;
        };
        let add = || -> io::Result<()> {
            let line = format!("{}\n", serde_json::to_string(self)?);
            // Other processes of the step append theirs.
            let mut file = File::options().create(true).append(true).open(&path)?;
            file.write_all(line.as_bytes())
        };
        if let Err(error) = add() {
            eprintln!("{}: {error}", Path::new(&path).display());
        }
    }
}

/// The verdicts of a step's processes at `path`, in order.
pub(super) fn left_at(path: &Path) -> Vec<Verdict> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let lines = text.lines().map(serde_json::from_str);
    lines.filter_map(Result::ok).collect()
}
