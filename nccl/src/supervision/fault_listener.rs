//! The notices that a rank's session receives, and the communicators they concern.
//!
//! One fault listener per session, made with the first communicator of several ranks. It runs on the thread that
//! reads the connections, which must not wait: so it only writes decided faults, and leaves what follows from
//! them to other threads. A fault of a communicator that is not registered is kept for a while: a rank
//! may give the communicator up before the others have finished making it.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use super::fault_registry::{self, CommunicatorRef, FaultCell, FaultOutcome, FaultRegistry};
use super::pending_diagnoses::{
    FAULT_TOPIC, PendingDiagnoses, REPORT_TOPIC, SYMPTOM_TOPIC, send_report,
};
use super::ras_evidence;
use super::straggler_log::log_stragglers;
use crate::communicator::{end_failed, leak_failed};
use crate::events;
use crate::peers::{PendingEnd, StragglerQuery, Supervisor};
use crate::stats;
use crate::sync::Mutex;
use crate::threads;
use nccl_base::departure::{Departure, LossKind};
use nccl_base::fault::{Cause, Fault, FaultSite};
use nccl_base::roster::Roster;
use nccl_control::launcher_ranks;
use nccl_control::{EntryReport, Notice, RankProcess, RankSession};
use nccl_core::supervision::stragglers::OpenQuery;
use nccl_core::supervision::watchdog;

/// Report of a rank that has released all of the communicator.
pub(super) const ALL_RELEASED: &[u8] = &[1];

/// The timeout in the report of a rank that has nothing to end: other ranks wait for those that have.
const NOTHING_TO_END_TIMEOUT: Duration = Duration::from_secs(3);

/// A communicator, as seen by the fault listener that ends it.
pub(super) trait SupervisedCommunicator: Supervisor {
    /// Begins to end a failed communicator: no operation uses what it protects any more. Returns `None` while it is made or
    /// dropped: the thread that does so checks the decided fault.
    fn begin_end(&self) -> Option<PendingEnd>;

    /// Logs the decided fault, once.
    fn log_fault(&self);
}

/// See the module.
pub(crate) struct CommunicatorFaultListener {
    session: Weak<RankSession>,
    rank: usize,
    generation: u64,
    /// The members of the session.
    members: Arc<OnceLock<Vec<RankProcess>>>,
    fault_registry: FaultRegistry<Arc<Fault>, Weak<dyn SupervisedCommunicator>, Departure>,
    /// The decided fault that was written last.
    latest: Mutex<Option<Arc<Fault>>>,
    /// Diagnoses of communicators on which an operation of a rank timed out.
    pending_diagnoses: PendingDiagnoses,
    /// Number of stragglers reported to this rank, for the log.
    stragglers: AtomicU64,
}

type FailedCommunicator = fault_registry::FailedCommunicator<Weak<dyn SupervisedCommunicator>>;
/// A communicator that is not registered on this rank.
struct UnregisteredCommunicator {
    key: Arc<str>,
    members: Arc<[usize]>,
}

impl CommunicatorFaultListener {
    /// Starts to listen to the notices of `session`.
    pub(crate) fn start(session: &Arc<RankSession>) -> Arc<Self> {
        nccl_diagnose::host_evidence::begin();
        let fault_listener = Arc::new(Self {
            session: Arc::downgrade(session),
            rank: session.rank(),
            generation: session.job().1,
            members: session.members(),
            fault_registry: FaultRegistry::new(),
            latest: Mutex::new(None),
            pending_diagnoses: PendingDiagnoses::default(),
            stragglers: AtomicU64::new(0),
        });
        let handler = Arc::clone(&fault_listener);
        session.on_notice(move |notice| handler.handle_notice(notice));
        // Departures that another handler has received.
        for (rank, departure) in session.departures() {
            fault_listener.handle_notice(&Notice::Departed { rank, departure });
        }
        fault_listener
    }

    /// Registers a supervisor. From now on, it receives the faults of the communicator; a fault that arrived earlier
    /// becomes its decided fault at once. Returns whether this rank has already reported the end to the others.
    pub(super) fn register(
        &self,
        key: &Arc<str>,
        communicator: &CommunicatorRef<'_>,
        decided: &Arc<FaultCell<Arc<Fault>>>,
        supervisor: Weak<dyn SupervisedCommunicator>,
    ) -> bool {
        let departure_fault =
            |rank: usize, how: &Departure| self.departure_fault(rank, how, communicator);
        self.fault_registry
            .register(key, communicator, decided, supervisor, departure_fault)
    }

    /// Returns the fault registry.
    pub(super) fn fault_registry(
        &self,
    ) -> &FaultRegistry<Arc<Fault>, Weak<dyn SupervisedCommunicator>, Departure> {
        &self.fault_registry
    }

    /// Returns the decided fault that was written last.
    pub(crate) fn latest(&self) -> Option<Arc<Fault>> {
        self.latest.lock().clone()
    }

    /// Replaces the last decided fault by `fault`, if `fault` is the same fault with more detail.
    pub(super) fn complete_latest(&self, fault: Option<&Arc<Fault>>) {
        let mut latest = self.latest.lock();
        if latest.as_deref() == fault.map(|fault| &**fault) {
            *latest = fault.cloned();
        }
    }

    pub(super) fn set_latest(&self, fault: &Arc<Fault>) {
        *self.latest.lock() = Some(Arc::clone(fault));
        if let Some(session) = self.session.upgrade() {
            session.record_fault(fault);
        }
    }

    fn handle_notice(&self, notice: &Notice) {
        match notice {
            Notice::Announced { from, topic, bytes } if topic.starts_with(SYMPTOM_TOPIC) => {
                self.handle_symptom(&topic[SYMPTOM_TOPIC.len()..], *from, bytes);
            }
            Notice::Direct { from, topic, bytes } => {
                if let Some(key) = topic.strip_prefix(REPORT_TOPIC)
                    && let Ok(report) = serde_json::from_slice(bytes)
                {
                    self.pending_diagnoses.record_report(key, *from, report);
                }
            }
            Notice::Announced { topic, bytes, .. } => {
                let Some(key) = topic.strip_prefix(FAULT_TOPIC) else {
                    return;
                };
                match Fault::decode(bytes) {
                    Ok((fault, members)) => self.fail(key, Arc::new(fault), members),
                    Err(broken) => {
                        tracing::error!(name: "nccl.internal", target: "nccl", what = "fault", why = broken.0, "a broken fault was announced");
                    }
                }
            }
            Notice::Departed {
                departure: Departure::Left,
                ..
            } => {}
            Notice::Departed { rank, departure } => {
                self.mark_departed(*rank, departure);
            }
            Notice::CutOff { from, why } => self.fail_cut_off(from, why),
            Notice::StragglerQuery {
                key,
                collective_index,
                is_sample,
            } => {
                let query = RemoteStragglerQuery {
                    session: Weak::clone(&self.session),
                    supervisor: self.fault_registry.find(key),
                };
                watchdog::answer(OpenQuery::new(
                    Box::new(query),
                    key,
                    *collective_index,
                    *is_sample,
                ));
            }
            Notice::Stragglers(report) => {
                let members = self.fault_registry.members_of(&report.subject.key);
                let place = members.as_ref().and_then(|members| {
                    let rank = members.iter().position(|member| *member == self.rank)?;
                    Some((rank, members.len()))
                });
                if let (Some((rank, size)), true) = (place, report.reporter == self.rank) {
                    let subject = &report.subject;
                    ras_evidence::ask(&subject.key, &subject.name, rank, size);
                }
                let roster = members.map(|members| self.roster(&members));
                log_stragglers(
                    report,
                    &roster.unwrap_or_default(),
                    self.rank,
                    &self.stragglers,
                );
            }
            Notice::Skewed { key, skew, last } => {
                if let Some(name) = self.fault_registry.name_of(key) {
                    stats::arrival_skew(&name, *skew, *last);
                }
            }
        }
    }

    /// Handles a rank's symptom on a communicator: opens a diagnosis, and sends this rank's report to the collector.
    fn handle_symptom(&self, key: &str, from: usize, bytes: &[u8]) {
        let Ok((fault, members)) = Fault::decode(bytes) else {
            return;
        };
        let own = members.iter().position(|member| *member == self.rank);
        if self.fault_registry.has_fault(key) {
            return;
        }
        let is_own = |key: &str| self.fault_registry.find(key).is_some();
        let collector = self
            .pending_diagnoses
            .record_symptom(key, from, fault, &members, is_own);
        // A fault that was recorded meanwhile has closed the diagnosis before it was opened.
        if self.fault_registry.has_fault(key) {
            return self.pending_diagnoses.close(key);
        }
        if let (Some(rank), Some(collector), Some(session)) =
            (own, collector, self.session.upgrade())
        {
            send_report(&session, key, rank, collector);
        }
    }

    pub(super) fn pending_diagnoses(&self) -> &PendingDiagnoses {
        &self.pending_diagnoses
    }

    /// Fails the communicators whose members this rank cannot reach any more.
    fn fail_cut_off(&self, from: &[usize], why: &str) {
        let fault = |_: &str, communicator: &CommunicatorRef<'_>| {
            let own = communicator
                .members
                .iter()
                .position(|rank| *rank == self.rank)?;
            let roster = self.roster(communicator.members);
            let site = FaultSite {
                communicator: communicator.name,
                roster: &roster,
                rank: own,
                host: &crate::host::name(),
                pid: std::process::id(),
                generation: self.generation,
            };
            let unreached = communicator.members.iter().enumerate();
            let unreached = unreached.filter(|(_, member)| from.contains(member));
            let unreached: Vec<_> = unreached.map(|(rank, _)| rank).collect();
            (!unreached.is_empty()).then(|| {
                let cause = Cause::cut_off(why, &unreached, &roster);
                Arc::new(Fault::new(cause, site))
            })
        };
        self.end_in_background(self.fault_registry.fail_all(fault), Vec::new());
        let how = Departure::lost(LossKind::CutOff(why.to_owned()));
        for &rank in from {
            self.fault_registry
                .mark_departed(rank, how.clone(), |_| None);
        }
    }

    /// Fails a communicator that a rank has given up.
    pub(super) fn fail(&self, key: &str, fault: Arc<Fault>, members: Vec<usize>) {
        match self.fault_registry.fail(key, fault) {
            FaultOutcome::Failed(failed) => self.end_in_background(vec![failed], Vec::new()),
            FaultOutcome::AlreadyFailed => {}
            FaultOutcome::Deferred => {
                let unregistered = UnregisteredCommunicator {
                    key: key.into(),
                    members: members.into(),
                };
                self.end_in_background(Vec::new(), vec![unregistered])
            }
        }
    }

    /// Ends all registered communicators except those with the keys `kept`: this rank and all others are done with
    /// them.
    pub(crate) fn end_all(&self, why: &str, kept: &[&str]) {
        let fault = |key: &str, communicator: &CommunicatorRef<'_>| {
            if kept.contains(&key) {
                return None;
            }
            // The same on all ranks.
            let first = communicator.members.first().copied().unwrap_or_default();
            let (host, pid) = self.host_and_pid(first);
            let site = FaultSite {
                communicator: communicator.name,
                roster: &self.roster(communicator.members),
                rank: 0,
                host: &host,
                pid,
                generation: self.generation,
            };
            Some(Arc::new(Fault::new(Cause::asked_of_all(why), site)))
        };
        self.end_in_background(self.fault_registry.fail_all(fault), Vec::new());
    }

    pub(super) fn host_and_pid(&self, rank: usize) -> (String, u32) {
        let host_and_pid = self.members.get().and_then(|members| members.get(rank));
        match host_and_pid {
            Some(member) => (member.host.clone(), member.pid),
            None => (String::from("unknown host"), 0),
        }
    }

    fn roster(&self, members: &[usize]) -> Roster {
        Roster::new(members, &launcher_ranks(self.members.get()))
    }

    /// Returns whether both ranks are on one host, so that a partition cuts off both.
    fn share_host(&self, one: usize, other: usize) -> bool {
        let member = |rank: usize| self.members.get()?.get(rank);
        let is_beside = |one: Option<&RankProcess>| Some(one?.is_on_same_host(member(other)?));
        one == other || is_beside(member(one)) == Some(true)
    }

    /// Fails the communicators of a rank that died, failed or cannot be reached.
    fn mark_departed(&self, rank: usize, how: &Departure) {
        let departure_fault =
            |communicator: &CommunicatorRef<'_>| self.departure_fault(rank, how, communicator);
        self.end_in_background(
            self.fault_registry
                .mark_departed(rank, how.clone(), departure_fault),
            Vec::new(),
        );
    }

    /// Returns the fault that a rank's departure means for a communicator; `None` for a non-member, and for a rank that left
    /// in order.
    pub(super) fn departure_fault(
        &self,
        rank: usize,
        how: &Departure,
        communicator: &CommunicatorRef<'_>,
    ) -> Option<Arc<Fault>> {
        let communicator_rank = communicator
            .members
            .iter()
            .position(|&member| member == rank)?;
        let (host, pid) = self.host_and_pid(rank);
        let roster = self.roster(communicator.members);
        let cause = match how {
            Departure::Left => return None,
            Departure::Failed(why) => Cause::failed(why),
            Departure::Lost(lost) if lost.may_live() => {
                let members = communicator.members.iter().enumerate();
                // A refusal is sent by the host, and shows nothing about its other ranks.
                let is_lost = |member| match lost.is_refused() {
                    true => member == rank,
                    false => self.share_host(rank, member),
                };
                let lost_ranks = members.filter(|(_, member)| is_lost(**member));
                let lost_ranks = lost_ranks.map(|(rank, _)| rank).collect();
                Cause::host_lost(&host, lost_ranks, &roster, lost)
            }
            Departure::Lost(lost) => Cause::died(lost),
        };
        let site = FaultSite {
            communicator: communicator.name,
            roster: &roster,
            rank: communicator_rank,
            host: &host,
            pid,
            generation: self.generation,
        };
        Some(Arc::new(Fault::new(cause, site)))
    }

    /// Ends the `failed` communicators, all of them together, on a thread of its own. For an `unregistered`
    /// communicator, this rank has nothing to end, either any more or yet.
    fn end_in_background(
        &self,
        failed: Vec<FailedCommunicator>,
        mut unregistered: Vec<UnregisteredCommunicator>,
    ) {
        let (mut supervisors, mut pending_ends) = (Vec::new(), Vec::new());
        unregistered
            .iter()
            .for_each(|one| self.pending_diagnoses.close(&one.key));
        for one in failed {
            self.pending_diagnoses.close(&one.key);
            match one.supervisor.upgrade() {
                Some(supervisor) => {
                    pending_ends.extend(supervisor.begin_end());
                    supervisors.push(supervisor);
                }
                None => unregistered.push(UnregisteredCommunicator {
                    key: one.key,
                    members: one.members,
                }),
            }
        }
        if supervisors.is_empty() && unregistered.is_empty() {
            return;
        }
        supervisors
            .iter()
            .for_each(|supervisor| supervisor.log_fault());
        let session = Weak::clone(&self.session);
        let not_ended = pending_ends.clone();
        let end_in_background = move || {
            if let Some(session) = session.upgrade() {
                unregistered.retain(|one| one.members.contains(&session.rank()));
                for UnregisteredCommunicator { key, members } in &unregistered {
                    report_end(&session, key, members, ALL_RELEASED, NOTHING_TO_END_TIMEOUT);
                }
            }
            end_failed(pending_ends);
            // This thread also releases its hold on the supervisors: the last release lets the session send its leave message.
            drop(supervisors);
        };
        let spawned = threads::spawn("nccl-abort", end_in_background);
        if let Err(error) = spawned {
            events::no_thread("to abort communicators", &error);
            // Callers inside the communicators return, and the other ranks do not wait for this one.
            leak_failed(not_ended);
        }
    }
}

/// A straggler query of another rank about a collective, answered over the session.
struct RemoteStragglerQuery {
    session: Weak<RankSession>,
    /// `None` when this rank has no such communicator.
    supervisor: Option<Weak<dyn SupervisedCommunicator>>,
}

impl StragglerQuery for RemoteStragglerQuery {
    fn is_there(&self) -> bool {
        self.session.strong_count() > 0
    }

    fn supervisor(&self) -> Option<Arc<dyn Supervisor>> {
        Some(self.supervisor.as_ref()?.upgrade()?)
    }

    fn connection(&self) -> *const () {
        self.session.as_ptr().cast()
    }

    fn answer(&self, key: &str, collective_index: u64, entered: Option<Duration>, last: &str) {
        if let Some(session) = self.session.upgrade() {
            session.report_entry(EntryReport {
                key: key.to_owned(),
                collective_index,
                entered,
                last: last.to_owned(),
            });
        }
    }
}

/// Returns the topic of the end of all aborts.
pub(super) fn full_abort_topic(key: &str) -> String {
    format!("{key}/all")
}

/// Reports, for the last time, how far this rank has released the communicator, without waiting for other ranks.
pub(super) fn report_end(
    session: &RankSession,
    key: &str,
    members: &Arc<[usize]>,
    part: &[u8],
    timeout: Duration,
) {
    for topic in [key, &full_abort_topic(key)] {
        session.send_part(topic, members, part, timeout);
    }
}
