//! The reports collected for communicators on which an operation of a rank timed out, and this rank's own report (`diagnosis`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::rank_report::RankReport;
use super::ras_evidence::RasEvidence;
use super::scope_recorder::{log_start, scope_of};
use crate::events;
use crate::sync::{Condvar, Mutex};
use nccl_base::fault::Fault;
use nccl_base::fault::cause::PastEvent;
use nccl_control::RankSession;
use nccl_diagnose::host_evidence::HostEvidence;

/// Topic prefix of fault announcements; the communicator's key follows.
pub(super) const FAULT_TOPIC: &str = "fault/";

/// Topic prefixes of the announcement that a rank's operation timed out, and of the reports to the collector; the communicator's
/// key follows.
pub(super) const SYMPTOM_TOPIC: &str = "symptom/";
pub(super) const REPORT_TOPIC: &str = "report/";

/// A coordinator without a heartbeat for this long counts as unresponsive.
pub(super) const HEARTBEAT_TIMEOUT: Duration = Duration::from_millis(1500);

/// Maximum number of diagnoses kept. No notice closes a diagnosis of a communicator that this rank does not have.
const MAX_PENDING: usize = 64;

#[derive(Default)]
pub(super) struct PendingDiagnoses {
    pub(super) all: Mutex<VecDeque<(String, PendingDiagnosis)>>,
    /// Notified when a symptom or a report arrives, or a diagnosis is over.
    pub(super) changed: Condvar,
}

#[derive(Clone)]
pub(super) struct PendingDiagnosis {
    /// The rank of the session that collects the reports.
    pub(super) collector: usize,
    pub(super) opened: Instant,
    pub(super) members: Vec<usize>,
    pub(super) symptoms: Vec<Fault>,
    pub(super) reports: BTreeMap<usize, RankReport>,
}

impl PendingDiagnosis {
    /// Returns the ranks that have neither reported nor left.
    pub(super) fn missing(&self, departed_in_order: &BTreeSet<usize>) -> Vec<usize> {
        let ranks = 0..self.members.len();
        ranks
            .filter(|rank| !self.reports.contains_key(rank) && !departed_in_order.contains(rank))
            .collect()
    }
}

impl PendingDiagnoses {
    /// Records that a rank's operation timed out. Returns the collector if this opens the diagnosis. `is_own` returns whether
    /// this rank has the communicator of a key, and so learns when its diagnosis is over.
    pub(super) fn record_symptom(
        &self,
        key: &str,
        from: usize,
        fault: Fault,
        members: &[usize],
        is_own: impl Fn(&str) -> bool,
    ) -> Option<usize> {
        let mut all = self.all.lock();
        if let Some((_, pending)) = all.iter_mut().find(|(known, _)| known == key) {
            pending.symptoms.push(fault);
            return None;
        }
        if all.len() >= MAX_PENDING
            && let Some(foreign) = all.iter().position(|(key, _)| !is_own(key))
        {
            all.remove(foreign);
        }
        let pending = PendingDiagnosis {
            collector: from,
            opened: Instant::now(),
            members: members.to_vec(),
            symptoms: vec![fault],
            reports: BTreeMap::new(),
        };
        all.push_back((key.to_owned(), pending));
        drop(all);
        self.changed.notify_all();
        Some(from)
    }

    /// Records the report that rank `from` of the session sent.
    pub(super) fn record_report(&self, key: &str, from: usize, mut report: RankReport) {
        // The report comes from another process.
        report.host = report.host.map(HostEvidence::bounded);
        report.ras = report.ras.map(RasEvidence::bounded);
        let mut all = self.all.lock();
        let pending = all.iter_mut().find(|(known, _)| known == key);
        if let Some((_, pending)) = pending
            && pending.members.get(report.rank) == Some(&from)
        {
            let size = pending.members.len();
            report.inside = report.inside.map(|inside| inside.bounded(size));
            pending.reports.insert(report.rank, report);
        }
        drop(all);
        self.changed.notify_all();
    }

    /// Closes the diagnosis of a communicator on which there is a decided fault.
    pub(super) fn close(&self, key: &str) {
        self.all.lock().retain(|(known, _)| known != key);
        self.changed.notify_all();
    }
}

/// Sends this rank's report to the collector, on a thread of its own.
pub(super) fn send_report(session: &Arc<RankSession>, key: &str, rank: usize, collector: usize) {
    let (session, key) = (Arc::clone(session), key.to_owned());
    let work = move || {
        let phase = session.phase().map(|(what, ago)| PastEvent::new(what, ago));
        let report = RankReport::of(&key, rank, scope_of(&session).place(), phase)
            .with_nccl_warning(log_start(&session))
            .with_host();
        // The report holds plain values, all of which can be serialized.
        let bytes = serde_json::to_vec(&report).unwrap_or_default();
        session.send_direct(collector, &format!("{REPORT_TOPIC}{key}"), bytes);
    };
    let spawned = std::thread::Builder::new()
        .name(String::from("nccl-report"))
        .spawn(work);
    if let Err(error) = spawned {
        events::no_thread("to send a report", &error);
    }
}
