//! What is collected of the communicators on which a rank ran out of time, and this rank's own report (`trial`).

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

/// Topic prefix of fault announcements; the communicator's key follows.
pub(super) const FAULT: &str = "fault/";

/// Topic prefixes of the announcement that a rank ran out of time, and of the reports to the elector; the communicator's
/// key follows.
pub(super) const SYMPTOM: &str = "symptom/";
pub(super) const REPORT: &str = "report/";

/// A coordinator without a heartbeat for this long counts as standing still.
pub(super) const PATIENCE: Duration = Duration::from_millis(1500);

/// Maximum number of trials kept: for communicators that this rank does not have, no notice closes them.
const MOST: usize = 64;

#[derive(Default)]
pub(super) struct Trials {
    pub(super) all: Mutex<VecDeque<(String, Trial)>>,
    /// Rings when a symptom or a report arrives, or a trial is over.
    pub(super) bell: Condvar,
}

#[derive(Clone)]
pub(super) struct Trial {
    /// The rank of the line that collects the reports.
    pub(super) elector: usize,
    pub(super) opened: Instant,
    pub(super) members: Vec<usize>,
    pub(super) symptoms: Vec<Fault>,
    pub(super) reports: BTreeMap<usize, Report>,
}

impl Trial {
    /// Returns the ranks that have neither reported nor left.
    pub(super) fn missing(&self, left: &BTreeSet<usize>) -> Vec<usize> {
        let ranks = 0..self.members.len();
        ranks
            .filter(|rank| !self.reports.contains_key(rank) && !left.contains(rank))
            .collect()
    }
}

impl Trials {
    /// Records that a rank ran out of time. Returns the elector if this opens the trial. `is_own` returns whether this rank
    /// has the communicator of a key, and so learns when its trial is over.
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

    /// Records the report that rank `from` of the line sent.
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

    /// Closes the trial of a communicator on which there is a verdict.
    pub(super) fn close(&self, key: &str) {
        self.all.lock().retain(|(known, _)| known != key);
        self.bell.notify_all();
    }
}

/// Sends this rank's report to the elector, on a thread of its own.
pub(super) fn answer(line: &Arc<Line>, key: &str, rank: usize, elector: usize) {
    let (line, key) = (Arc::clone(line), key.to_owned());
    let work = move || {
        let phase = line.phase().map(|(what, ago)| Earlier::new(what, ago));
        let report = Report::of(&key, rank, home_of(&line).place(), phase);
        // The report holds plain values, all of which can be serialized.
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
