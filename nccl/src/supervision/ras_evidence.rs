//! What NCCL's own RAS service reports about a communicator on which a rank is late.
//!
//! The rank that reports a straggler queries RAS at that moment, and not when the operation times out: then the abort
//! begins, and RAS forgets the communicator. RAS is queried once per communicator: releases of NCCL have crashed when
//! queried repeatedly.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::events;
use crate::ras::{RasAnswer, RasClient, RasReport};
use crate::sync::Mutex;
use nccl_base::roster::Roster;
use nccl_base::sanitize;
use nccl_base::time::millis;
use nccl_plugin::environment;
use nccl_plugin::profiler::{self, CommunicatorQuery};
use nccl_sys::Version;

/// The time for an answer: RAS itself waits 5 s for a process that does not answer.
const TIMEOUT: Duration = Duration::from_secs(8);

/// Releases whose RAS thread has crashed the process when queried.
const CRASHES: [Version; 1] = [Version::new(2, 29, 7)];

/// Maximum number of communicators remembered, and of ranks of an answer.
const KEPT: usize = 64;
const RANKS: usize = 16;

/// What RAS reports about one communicator. Ranks are those of the communicator.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct RasEvidence {
    /// Time between the query and the report.
    age_ms: u64,
    lagging: Vec<Lagging>,
    /// Ranks whose RAS thread did not answer.
    unresponsive: Vec<usize>,
    /// Ranks that RAS considers dead.
    dead: Vec<usize>,
}

/// A rank that has launched fewer operations of a kind than others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Lagging {
    rank: usize,
    function: String,
    launched: u64,
    most: u64,
}

impl RasEvidence {
    /// Returns what a report says about the communicator with this number.
    fn of(report: &RasReport, hash: u64) -> Option<Self> {
        let is_asked = |text: &str| {
            let digits = text.trim_start_matches("0x");
            u64::from_str_radix(digits, 16) == Ok(hash)
        };
        let communicator = report
            .communicators
            .iter()
            .find(|one| is_asked(&one.hash))?;
        let missing = communicator.missing_ranks.iter();
        let (dead, unresponsive) = missing.partition::<Vec<_>, _>(|one| one.status.considered_dead);
        let ranks =
            |all: Vec<&crate::ras::MissingRasRank>| all.iter().map(|one| one.rank).collect();
        let lagging = report.lagging();
        let lagging = lagging.iter().filter(|one| is_asked(&one.communicator));
        Some(Self {
            age_ms: 0,
            lagging: lagging
                .map(|one| Lagging {
                    rank: one.rank,
                    function: one.function.clone(),
                    launched: one.launched,
                    most: one.most,
                })
                .collect(),
            unresponsive: ranks(unresponsive),
            dead: ranks(dead),
        })
    }

    /// Bounds values that another rank has sent.
    pub(super) fn bounded(mut self) -> Self {
        self.lagging.truncate(RANKS);
        self.unresponsive.truncate(RANKS);
        self.dead.truncate(RANKS);
        for one in &mut self.lagging {
            one.function = sanitize::name(&one.function.chars().take(32).collect::<String>());
        }
        self
    }

    pub(super) fn text(&self, roster: &Roster) -> String {
        let mut parts: Vec<String> = Vec::new();
        parts.extend(self.lagging.iter().map(|one| {
            format!(
                "{} has launched {} of {} {}",
                roster.who(&[one.rank]),
                one.launched,
                one.most,
                one.function
            )
        }));
        if !self.unresponsive.is_empty() {
            let who = roster.who(&self.unresponsive);
            parts.push(format!("{who} did not answer it"));
        }
        if !self.dead.is_empty() {
            parts.push(format!("it has given up {}", roster.who(&self.dead)));
        }
        if parts.is_empty() {
            parts.push(String::from(
                "all ranks answered it, and have launched the same collectives",
            ));
        }
        let seconds = self.age_ms as f64 / 1e3;
        format!(
            "NCCL's RAS service, asked {seconds:.1} s before: {}",
            parts.join(", ")
        )
    }
}

/// A communicator that RAS was queried about: its key and, once there is an answer, the time of the query with the
/// answer.
type Asked = (String, Option<(Instant, RasEvidence)>);

static ANSWERS: Mutex<VecDeque<Asked>> = Mutex::new(VecDeque::new());

/// Queries RAS about a communicator on a thread of its own, unless that was done before.
pub(super) fn ask(key: &str, name: &str, rank: usize, world_size: usize) {
    // Without the environment plugin, the RAS service may be another process's, or older than its JSON answers.
    let is_safe = |version| !CRASHES.contains(&version);
    if !environment::taken_by().is_some_and(is_safe) {
        return;
    }
    let query = CommunicatorQuery {
        name,
        rank,
        world_size,
        is_alone: false,
    };
    let address = nccl_core::recorder::ras_address();
    let (Some(hash), Some(address)) = (profiler::hash_of(query), address) else {
        return;
    };
    {
        let mut answers = ANSWERS.lock();
        if answers.iter().any(|(known, _)| known == key) {
            return;
        }
        if answers.len() >= KEPT {
            answers.pop_front();
        }
        answers.push_back((key.to_owned(), None));
    }
    let key = key.to_owned();
    let work = move || {
        let asked = Instant::now();
        let answer = RasClient::connect(&address, TIMEOUT).and_then(RasClient::status);
        let evidence = match answer {
            Ok(RasAnswer::Report(report)) => RasEvidence::of(&report, hash),
            Ok(RasAnswer::Text(_)) => None,
            Err(error) => {
                tracing::debug!(name: "nccl.ras.unanswered", target: "nccl", %error, "NCCL's RAS service does not answer");
                None
            }
        };
        let mut answers = ANSWERS.lock();
        if let (Some(evidence), Some((_, answer))) = (
            evidence,
            answers.iter_mut().find(|(known, _)| *known == key),
        ) {
            *answer = Some((asked, evidence.bounded()));
        }
    };
    let spawned = std::thread::Builder::new()
        .name(String::from("nccl-ras"))
        .spawn(work);
    if let Err(error) = spawned {
        events::no_thread("to ask NCCL's RAS service", &error);
    }
}

/// Returns RAS's answer about a communicator.
pub(super) fn of(key: &str) -> Option<RasEvidence> {
    let answers = ANSWERS.lock();
    let (_, answer) = answers.iter().find(|(known, _)| known == key)?;
    let (asked, evidence) = answer.clone()?;
    Some(RasEvidence {
        age_ms: millis(asked.elapsed()),
        ..evidence
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ras_says_of_the_communicator_is_told_and_what_it_says_of_others_is_not() {
        let rank = |rank: usize, launched: u64| serde_json::json!({"rank": rank, "pid": 7, "collective_counts": {"AllReduce": launched}});
        let report: RasReport = serde_json::from_value(serde_json::json!({
            "communicators": [
                {"hash": "0xabc1", "size": 2, "ranks": [rank(0, 9), rank(1, 1)]},
                {"hash": "0xabc", "size": 4, "ranks": [rank(0, 4), rank(1, 3)], "missing_ranks": [
                    {"rank": 2, "status": {"unresponsive": true}},
                    {"rank": 3, "status": {"unresponsive": true, "considered_dead": true}},
                ]},
            ],
        }))
        .unwrap();
        let mut evidence = RasEvidence::of(&report, 0xabc).unwrap();
        evidence.age_ms = 1200;
        assert_eq!(
            evidence.text(&Roster::default()),
            "NCCL's RAS service, asked 1.2 s before: rank 1 has launched 3 of 4 AllReduce, rank 2 did not answer it, it has given \
             up rank 3"
        );
        assert_eq!(RasEvidence::of(&report, 0xdef), None);
        let text = serde_json::to_string(&evidence).unwrap();
        assert_eq!(
            serde_json::from_str::<RasEvidence>(&text).unwrap(),
            evidence
        );
    }
}
