//! The table of `docs/launching.md` between its markers.

use std::fmt::Write as _;
use std::fs;

use crate::{Result, workspace};

const PAGE: &str = "docs/launching.md";
const BEGIN: &str =
    "<!-- launchers: written by `cargo xtask launchers --write`; do not edit by hand -->\n";
const END: &str = "<!-- end of launchers -->\n";

/// A line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) launcher: String,
    pub(super) command: String,
    pub(super) library: String,
    pub(super) what: String,
    pub(super) result: String,
    pub(super) flag: String,
}

const HEADER: &str = "| launcher | command line | NCCL | what was run | result | flag for survivors |\n\
                      |---|---|---|---|---|---|\n";

impl Row {
    /// Returns whether two rows differ only in the library.
    fn is_like(&self, other: &Self) -> bool {
        let bare = |row: &Self| Self {
            library: String::new(),
            ..row.clone()
        };
        bare(self) == bare(other)
    }

    fn line(&self) -> String {
        let command = self.command.replace('|', "\\|");
        let Self {
            launcher,
            library,
            what,
            result,
            flag,
            ..
        } = self;
        format!("| {launcher} | `{command}` | {library} | {what} | {result} | {flag} |")
    }
}

/// Returns the table. Rows that differ only in the library are merged.
pub(super) fn table(rows: &[Row]) -> String {
    let mut merged: Vec<Row> = Vec::new();
    for row in rows {
        match merged.iter_mut().find(|other| other.is_like(row)) {
            Some(other) => other.library = "both".into(),
            None => merged.push(row.clone()),
        }
    }
    let mut text = HEADER.to_owned();
    for row in &merged {
        let _ = writeln!(text, "{}", row.line());
    }
    text
}

/// Returns the parts of the page before, between and after the markers.
fn parts(page: &str) -> Result<(&str, &str, &str)> {
    let parts = page.split_once(BEGIN).and_then(|(before, rest)| {
        let (between, behind) = rest.split_once(END)?;
        Some((before, between, behind))
    });
    parts.ok_or_else(|| format!("{PAGE} lacks {BEGIN:?} or {END:?}").into())
}

pub(super) fn write(table: &str) -> Result {
    let path = workspace::root().join(PAGE);
    let page = fs::read_to_string(&path)?;
    let (before, _, behind) = parts(&page)?;
    Ok(fs::write(
        path,
        format!("{before}{BEGIN}\n{table}\n{END}{behind}"),
    )?)
}

/// Compares the table of a run with the page. Versions of launchers may differ.
pub(super) fn check(table: &str) -> Result {
    let page = fs::read_to_string(workspace::root().join(PAGE))?;
    let (_, between, _) = parts(&page)?;
    match shape(between.trim()) == shape(table.trim()) {
        true => Ok(()),
        false => {
            let text = format!(
                "{PAGE} has another table than this run: `cargo xtask launchers --write`\n{table}"
            );
            Err(text.into())
        }
    }
}

/// Returns a table without the versions of launchers: numbers with points in the first cell.
fn shape(table: &str) -> Vec<String> {
    let line = |line: &str| {
        let mut cells = line.splitn(3, '|');
        let (_, launcher, rest) = (cells.next(), cells.next(), cells.next());
        let words: Vec<&str> = launcher
            .unwrap_or_default()
            .split_whitespace()
            .filter(|word| !word.starts_with(|letter: char| letter.is_ascii_digit()))
            .collect();
        format!("{} |{}", words.join(" "), rest.unwrap_or_default())
    };
    table.lines().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(library: &str, result: &str) -> Row {
        Row {
            launcher: "Slurm 22.05.8 one node".into(),
            command: "srun sh -c 'a | b'".into(),
            library: library.into(),
            what: "x".into(),
            result: result.into(),
            flag: "–".into(),
        }
    }

    #[test]
    fn rows_that_differ_in_the_library_alone_are_one_row() {
        let same = table(&[row("emulator", "right"), row("NVIDIA's", "right")]);
        assert_eq!(same.lines().count(), 3, "{same}");
        assert!(
            same.contains("| both |") && same.contains("a \\| b"),
            "{same}"
        );
        let other = table(&[row("emulator", "right"), row("NVIDIA's", "wrong")]);
        assert_eq!(other.lines().count(), 4, "{other}");
    }

    #[test]
    fn a_table_may_differ_from_the_page_in_versions_and_in_nothing_else() {
        let newer = Row {
            launcher: "Slurm 24.11.5 one node".into(),
            ..row("emulator", "right")
        };
        let (old, new) = (table(&[row("emulator", "right")]), table(&[newer]));
        assert_eq!(shape(&old), shape(&new));
        assert_ne!(shape(&old), shape(&table(&[row("emulator", "wrong")])));
    }

    #[test]
    fn the_page_has_a_table_of_this_shape() {
        let page = fs::read_to_string(workspace::root().join(PAGE)).unwrap();
        let (_, between, _) = parts(&page).unwrap();
        let lines: Vec<&str> = between.trim().lines().collect();
        assert!(between.trim().starts_with(HEADER), "{between}");
        for line in &lines[2..] {
            assert_eq!(line.replace("\\|", "").matches('|').count(), 7, "{line}");
        }
        // At least one row of each launcher and of each trial.
        for word in [
            "| nccl-run",
            "| Open MPI",
            "| MPICH",
            "| Slurm",
            "| torchrun",
            "`all_to_all_perf`",
            "one rank killed",
            "one node lost",
            "`nccl-doctor`",
        ] {
            assert!(between.contains(word), "{word:?}");
        }
    }
}
