//! What is collected of the communicators on which a rank ran out of time, and how this rank stands (`trial`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::records::home_of;
use super::report::Report;
use crate::events;
use crate::rendezvous::Line;
use crate::sync::{Condvar, Mutex};
use nccl_base::fault::Fault;
use nccl_base::fault::cause::Earlier;

/// What announcements of faults are called; the communicator's key follows.
pub(super) const FAULT: &str = "fault/";

/// What the announcement of one that ran out of time is called, and what is said to the one that collects; the
/// communicator's key follows.
pub(super) const SYMPTOM: &str = "symptom/";
pub(super) const REPORT: &str = "report/";

/// After so long without a beat of the one that coordinates it stands still.
pub(super) const PATIENCE: Duration = Duration::from_millis(1500);

/// So many trials are kept: of communicators that this rank does not have, nobody says that they are over.
const MOST: usize = 64;

#[derive(Default)]
pub(super) struct Trials {
    pub(super) all: Mutex<VecDeque<(String, Trial)>>,
    /// Something came, or a trial is over.
    pub(super) bell: Condvar,
}

#[derive(Clone)]
pub(super) struct Trial {
    /// The rank of the line that collects.
    pub(super) elector: usize,
    pub(super) opened: Instant,
    pub(super) members: Vec<usize>,
    pub(super) symptoms: Vec<Fault>,
    pub(super) reports: BTreeMap<usize, Report>,
}

impl Trial {
    /// The ranks that have not said how they stand, and have not left.
    pub(super) fn missing(&self, left: &BTreeSet<usize>) -> Vec<usize> {
        let ranks = 0..self.members.len();
        ranks
            .filter(|rank| !self.reports.contains_key(rank) && !left.contains(rank))
            .collect()
    }
}

impl Trials {
    /// A rank ran out of time. Who collects, if that was not known before. `is_own`: whether this rank has the
    /// communicator of a key, and hears when its trial is over.
    pub(super) fn hear(
        &self,
        key: &str,
        from: usize,
        fault: Fault,
        members: &[usize],
        is_own: impl Fn(&str) -> bool,
    ) -> Option<usize> {
        let mut all = self.all.lock();
        if let Some((_, trial)) = all.iter_mut().find(|(known, _)| known == key) {
            trial.symptoms.push(fault);
            return None;
        }
        if all.len() >= MOST
            && let Some(foreign) = all.iter().position(|(key, _)| !is_own(key))
        {
            all.remove(foreign);
        }
        let trial = Trial {
            elector: from,
            opened: Instant::now(),
            members: members.to_vec(),
            symptoms: vec![fault],
            reports: BTreeMap::new(),
        };
        all.push_back((key.to_owned(), trial));
        drop(all);
        self.bell.notify_all();
        Some(from)
    }

    /// Rank `from` of the line says how it stands.
    pub(super) fn receive(&self, key: &str, from: usize, report: Report) {
        let mut all = self.all.lock();
        let trial = all.iter_mut().find(|(known, _)| known == key);
        if let Some((_, trial)) = trial
            && trial.members.get(report.rank) == Some(&from)
        {
            trial.reports.insert(report.rank, report);
        }
        drop(all);
        self.bell.notify_all();
    }

    /// There is a verdict.
    pub(super) fn close(&self, key: &str) {
        self.all.lock().retain(|(known, _)| known != key);
        self.bell.notify_all();
    }
}

/// Says to the one that collects how this rank stands, on a thread of its own.
pub(super) fn answer(line: &Arc<Line>, key: &str, rank: usize, elector: usize) {
    let (line, key) = (Arc::clone(line), key.to_owned());
    let work = move || {
        let phase = line.phase().map(|(what, ago)| Earlier::new(what, ago));
        let report = Report::of(&key, rank, home_of(&line).place(), phase);
        // Of plain values, which can all be written.
        let bytes = serde_json::to_vec(&report).unwrap_or_default();
        line.tell(elector, &format!("{REPORT}{key}"), bytes);
    };
    let spawned = std::thread::Builder::new()
        .name(String::from("nccl-report"))
        .spawn(work);
    if let Err(error) = spawned {
        events::no_thread("to say how a rank stands", &error);
    }
}
