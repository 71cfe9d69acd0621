//! Compares two sets of facts: equal, intentionally different, or different.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use serde_json::{Value, json};

use super::intended::{INTENDED, Intended, Verdict};
use super::runner;
use crate::failure::Failure;

/// One observation of one program, on both sides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The program.
    pub program: String,
    /// The name of the fact.
    pub fact: String,
    /// The library's value.
    pub library: String,
    /// The emulator's value.
    pub emulator: String,
    /// The verdict; `None`: an unintended difference.
    pub verdict: Option<Verdict>,
    /// The reason of an intended difference.
    pub reason: &'static str,
}

/// The value of a fact that was not observed.
const NOTHING: &str = "(not observed)";

/// Checks that the sets are of the two subjects: a set that is compared with one of the same subject shows no difference.
/// With `emulated`, the emulator may be on both sides, to test the comparison.
///
/// # Errors
/// When the first set is the emulator's, or the second one is not.
pub fn check(library: &Value, emulator: &Value, emulated: bool) -> Result<(), Failure> {
    let is_emulators = |facts: &Value| facts["subject"] == runner::EMULATOR;
    if is_emulators(library) && !emulated {
        let text = "the first facts are the emulator's, not NCCL's; --emulated allows that";
        return Err(Failure::usage(text));
    }
    if !is_emulators(emulator) {
        let subject = emulator["subject"]
            .as_str()
            .unwrap_or("nothing that they name");
        let text = format!("the second facts are not the emulator's: they are of {subject}");
        return Err(Failure::usage(text));
    }
    Ok(())
}

/// Compares the programs that both sets have.
#[must_use]
pub fn rows(library: &Value, emulator: &Value) -> Vec<Row> {
    with(library, emulator, INTENDED)
}

fn with(library: &Value, emulator: &Value, intended: &'static [Intended]) -> Vec<Row> {
    let mut rows = Vec::new();
    let release = runner::release(library);
    let programs = library["programs"].as_object().into_iter().flatten();
    for (program, ours) in programs {
        let theirs = &emulator["programs"][program];
        if theirs.is_null() {
            continue;
        }
        let mut row = |fact: &str, library: &Value, emulator: &Value| {
            let text = |value: &Value| value.as_str().unwrap_or(NOTHING).to_owned();
            let (library, emulator) = (text(library), text(emulator));
            let meant = intended.iter().find(|meant| {
                meant.program == program && meant.holds(release) && meant.covers(fact)
            });
            let (verdict, reason) = match meant {
                _ if library == emulator => (Some(Verdict::Equal), ""),
                Some(meant) => (Some(meant.verdict), meant.reason),
                None => (None, ""),
            };
            rows.push(Row {
                program: program.clone(),
                fact: fact.to_owned(),
                library,
                emulator,
                verdict,
                reason,
            });
        };
        row("how it ended", &ours["outcome"], &theirs["outcome"]);
        let facts = |value: &Value| -> BTreeSet<String> {
            let facts = value["facts"].as_object();
            facts
                .into_iter()
                .flatten()
                .map(|(fact, _)| fact.clone())
                .collect()
        };
        for fact in facts(ours).union(&facts(theirs)) {
            row(fact, &ours["facts"][fact], &theirs["facts"][fact]);
        }
    }
    rows
}

/// The number of rows with an unintended difference.
#[must_use]
pub fn unexplained(rows: &[Row]) -> usize {
    rows.iter().filter(|row| row.verdict.is_none()).count()
}

/// A line for each program, and a table of all differences.
#[must_use]
pub fn markdown(rows: &[Row]) -> String {
    let count = |verdict| rows.iter().filter(|row| row.verdict == verdict).count();
    let mut text = format!(
        "{} observations: {} equal, {} stricter, {} kinder, {} not there yet, {} otherwise on purpose, {} **different**.\n\n",
        rows.len(),
        count(Some(Verdict::Equal)),
        count(Some(Verdict::Stricter)),
        count(Some(Verdict::Kinder)),
        count(Some(Verdict::NotThereYet)),
        count(Some(Verdict::OnPurpose)),
        count(None),
    );
    if rows.iter().all(|row| row.verdict == Some(Verdict::Equal)) {
        return text;
    }
    text.push_str("| program | observation | NCCL | emulator | verdict |\n|---|---|---|---|---|\n");
    let cell = |text: &str| text.replace('|', "\\|");
    for row in rows {
        let verdict = match row.verdict {
            Some(Verdict::Equal) => continue,
            Some(verdict) => format!("{}: {}", verdict.word(), row.reason),
            None => "**different**".to_owned(),
        };
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {verdict} |",
            row.program,
            cell(&row.fact),
            cell(&row.library),
            cell(&row.emulator)
        );
    }
    text
}

/// The rows for programs that read them.
#[must_use]
pub fn as_json(rows: &[Row]) -> Value {
    let rows = rows.iter().map(|row| {
        json!({
            "program": row.program,
            "fact": row.fact,
            "library": row.library,
            "emulator": row.emulator,
            "verdict": row.verdict.map_or("different", Verdict::word),
            "reason": row.reason,
        })
    });
    Value::Array(rows.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(values: &[(&str, &str)]) -> Value {
        let facts: serde_json::Map<_, _> = values
            .iter()
            .map(|&(fact, value)| (fact.to_owned(), value.into()))
            .collect();
        json!({"programs": {"small-send": {"outcome": "ended", "facts": facts}}})
    }

    const MEANT: &[Intended] = &[Intended {
        program: "small-send",
        fact: "rank 0: ends",
        until: None,
        verdict: Verdict::Stricter,
        reason: "there is no buffer in between",
    }];

    #[test]
    fn a_difference_is_meant_or_it_is_a_defect() {
        let library = facts(&[
            ("rank 0: ends", "Ok(true)"),
            ("code", "a"),
            ("only here", "x"),
        ]);
        let emulator = facts(&[("rank 0: ends", "Ok(false)"), ("code", "b")]);
        let rows = with(&library, &emulator, MEANT);
        let verdict = |fact: &str| rows.iter().find(|row| row.fact == fact).unwrap().verdict;
        assert_eq!(verdict("how it ended"), Some(Verdict::Equal));
        assert_eq!(verdict("rank 0: ends"), Some(Verdict::Stricter));
        assert_eq!(verdict("code"), None);
        assert_eq!(verdict("only here"), None);
        assert_eq!(unexplained(&rows), 2);
        let text = markdown(&rows);
        assert!(text.contains("there is no buffer in between"), "{text}");
        assert!(text.contains("| a | b | **different** |"), "{text}");
    }

    #[test]
    fn the_emulator_is_not_compared_with_itself_unless_that_is_meant() {
        let of = |subject: &str| json!({"subject": subject, "programs": {}});
        let (nccl, emulator) = (of("NCCL /lib/libnccl.so.2"), of(runner::EMULATOR));
        check(&nccl, &emulator, false).unwrap();
        check(&emulator, &emulator, true).unwrap();
        let error = check(&emulator, &emulator, false).unwrap_err().to_string();
        assert!(error.contains("--emulated"), "{error}");
        let error = check(&nccl, &nccl, true).unwrap_err().to_string();
        assert!(
            error.contains("they are of NCCL /lib/libnccl.so.2"),
            "{error}"
        );
        assert!(check(&nccl, &json!({}), false).is_err());
    }

    #[test]
    fn what_is_equal_is_not_listed() {
        let both = facts(&[("code", "a")]);
        let rows = with(&both, &both, MEANT);
        assert_eq!(unexplained(&rows), 0);
        assert!(!markdown(&rows).contains("small-send"));
    }
}
