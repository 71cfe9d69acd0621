//! The recorded outcomes of every row, so that a change of the crate's structure shows where it changes what users are
//! told: `outcomes.json`, beside this file.
//!
//! For each row it has the outcomes that were seen: what the surviving ranks are told, as values, and how every process
//! ended. Class, root, culprit, role, kind and the ends must be those of a recorded outcome. Sentences vary with
//! timing: an unknown sentence is printed, and is an error with `NCCL_TEST_OUTCOMES=strict`. `NCCL_TEST_OUTCOMES=write`
//! adds new outcomes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use serde::{Deserialize, Serialize};
use serde_json::Value;

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fault_matrix/outcomes.json");

/// The outcome of a row, without values that vary: process numbers, times, host names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Outcome {
    /// Of the fault that all ranks get; empty where the row ends otherwise.
    pub(crate) class: String,
    pub(crate) root: String,
    pub(crate) role: String,
    pub(crate) culprit: Option<usize>,
    /// The kind of all ranks' errors: its name, and whether it is a timeout.
    pub(crate) kind: String,
    /// How each process ended: its exit code, its signal, or that it runs.
    pub(crate) ends: Vec<String>,
}

/// The recorded outcomes of a row.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Seen {
    outcomes: BTreeSet<Outcome>,
    /// Cause, hint, operation, evidence, errors.
    sentences: BTreeSet<String>,
}

/// By the row's name.
type Kept = BTreeMap<String, Seen>;

/// The recorded outcomes, and how to treat new ones.
pub(crate) struct Outcomes {
    kept: Mutex<Kept>,
    how: How,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Compare,
    Strict,
    Write,
}

impl Outcomes {
    pub(crate) fn read() -> Self {
        let how = match std::env::var("NCCL_TEST_OUTCOMES").as_deref() {
            Ok("strict") => How::Strict,
            Ok("write") => How::Write,
            _ => How::Compare,
        };
        let kept =
            std::fs::read_to_string(PATH).unwrap_or_else(|error| panic!("{PATH}: {error:#}"));
        let kept = serde_json::from_str(&kept).unwrap_or_else(|error| panic!("{PATH}: {error:#}"));
        Self {
            kept: Mutex::new(kept),
            how,
        }
    }

    /// Compares an outcome with those of the row; returns what is new.
    pub(crate) fn compare(
        &self,
        row: &str,
        outcome: Outcome,
        sentences: BTreeSet<String>,
    ) -> Result<(), String> {
        let mut kept = self.kept.lock().unwrap();
        let seen = kept.entry(row.to_owned()).or_default();
        if self.how == How::Write {
            seen.outcomes.insert(outcome);
            seen.sentences.extend(sentences);
            return Ok(());
        }
        if !seen.outcomes.contains(&outcome) {
            let known = &seen.outcomes;
            return Err(format!(
                "outcomes.json has no such outcome: {outcome:?}, but {known:?}"
            ));
        }
        let new: Vec<_> = sentences.difference(&seen.sentences).cloned().collect();
        match self.how {
            How::Strict if !new.is_empty() => Err(format!("it was not told before: {new:#?}")),
            _ => {
                for sentence in new {
                    println!("{row}: it was not told before: {sentence}");
                }
                Ok(())
            }
        }
    }

    /// Writes the recorded outcomes, if requested.
    pub(crate) fn write(self) {
        if self.how == How::Write {
            let kept = self.kept.into_inner().unwrap();
            let mut text = serde_json::to_string_pretty(&kept).expect("values");
            text.push('\n');
            std::fs::write(PATH, text).unwrap_or_else(|error| panic!("{PATH}: {error:#}"));
        }
    }
}

impl Outcome {
    /// From the serde form of a fault; `None` where the row ends otherwise.
    pub(crate) fn of(fault: Option<&Value>, kind: String, ends: Vec<String>) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let none = Value::Null;
        let fault = fault.unwrap_or(&none);
        Self {
            class: text(&fault["class"]),
            root: text(&fault["root"]["kind"]),
            role: text(&fault["role"]),
            culprit: fault["culprit"]
                .as_u64()
                .and_then(|rank| usize::try_from(rank).ok()),
            kind,
            ends,
        }
    }
}

/// Collects every sentence in a value, without parts that vary.
pub(crate) fn sentences(value: &Value, host: &str, into: &mut BTreeSet<String>) {
    match value {
        Value::String(text) if text.contains(' ') => {
            into.insert(lasting(text, host));
        }
        Value::Array(values) => values.iter().for_each(|value| sentences(value, host, into)),
        // What the kernel of this machine has said is of this machine.
        Value::Object(fields) => fields
            .iter()
            .filter(|(name, _)| *name != "host_evidence")
            .for_each(|(_, value)| sentences(value, host, into)),
        _ => {}
    }
}

/// A text without the name of this host, and with `#` for every number that is not a rank.
pub(crate) fn lasting(text: &str, host: &str) -> String {
    let text = match host {
        "" => text.to_owned(),
        host => text.replace(host, "HOST"),
    };
    let mut lasting = String::with_capacity(text.len());
    let mut rest = &text[..];
    while let Some(at) = rest.find(|letter: char| letter.is_ascii_digit()) {
        let (before, number) = rest.split_at(at);
        let end = number
            .find(|letter: char| !(letter.is_ascii_digit() || letter == '.'))
            .unwrap_or(number.len());
        let number_alone = number[..end].trim_end_matches('.');
        lasting.push_str(before);
        let is_rank = ["rank ", "ranks ", "["]
            .iter()
            .any(|word| lasting.ends_with(word));
        lasting.push_str(if is_rank { number_alone } else { "#" });
        rest = &number[number_alone.len()..];
    }
    lasting.push_str(rest);
    lasting
}

#[test]
fn what_differs_each_time_is_left_out_of_a_text_and_ranks_are_not() {
    let told = "rank 3 on box7 (pid 4711) was silent for 3.25 s; ranks 0 and 12 wait. [2] 5.";
    assert_eq!(
        lasting(told, "box7"),
        "rank 3 on HOST (pid #) was silent for # s; ranks 0 and # wait. [2] #."
    );
}

#[test]
fn an_outcome_that_was_never_seen_is_an_error_and_a_new_sentence_one_when_it_is_asked_for() {
    let outcomes = |how| Outcomes {
        kept: Mutex::new(Kept::new()),
        how,
    };
    let outcome = |culprit| Outcome {
        class: String::from("Gone"),
        root: String::from("died"),
        role: String::from("Began"),
        culprit: Some(culprit),
        kind: String::from("aborted, is_timeout: false"),
        ends: vec![String::from("exit code 0")],
    };
    let said = |text: &str| BTreeSet::from([text.to_owned()]);
    let mut kept = outcomes(How::Write);
    kept.compare("row", outcome(1), said("it died")).unwrap();
    for (how, fails) in [(How::Compare, false), (How::Strict, true)] {
        kept.how = how;
        kept.compare("row", outcome(1), said("it died")).unwrap();
        let found = kept.compare("row", outcome(1), said("it fell asleep"));
        assert_eq!(found.is_err(), fails);
        let wrong = kept
            .compare("row", outcome(2), said("it died"))
            .unwrap_err();
        assert!(wrong.contains("Some(2)"), "{wrong}");
        kept.compare("other", outcome(1), said("it died"))
            .unwrap_err();
    }
}
