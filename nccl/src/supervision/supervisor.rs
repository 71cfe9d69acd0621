//! One communicator as one of its ranks sees it: its members, its decided fault, and which ranks have released it.
//!
//! ```text
//! (registered) ──a fault arrives──▶ failed ──released, or given up, here──▶ ended
//! ```
//!
//! Only the fault listener writes the decided fault, once, in the order in which all ranks receive the faults. The thread that
//! ended the communicator on this rank sets the text about unconfirmed ranks, once; all other threads wait for it.

mod trait_impl;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::attach::SessionExt as _;
use super::fault_listener::{
    ALL_RELEASED, CommunicatorFaultListener, SupervisedCommunicator, full_abort_topic, report_end,
};
use super::fault_registry::{CommunicatorRef, FaultCell};
use super::pending_diagnoses::{HEARTBEAT_TIMEOUT, PendingDiagnoses};
use super::root_cause::{EvidencePart, SeenByRank, sentences};
use crate::events;
use crate::peers::{
    AbortHandle, Peers, PendingEnd, ReleaseProgress, SupervisionRequest, Supervisor,
};
use crate::stats;
use crate::sync::Mutex;
use crate::time::deadline_after;
use nccl_base::departure::GatherOutcome;
use nccl_base::fault::cause::Waiting;
use nccl_base::fault::{Fault, FaultClass};
use nccl_base::roster::Roster;
use nccl_control::RankSession;
use nccl_diagnose::host_evidence;

/// See the module.
pub(crate) struct ControlPlaneSupervisor {
    /// Key of the communicator on all ranks: made from NCCL's token, which is unique.
    key: Arc<str>,
    name: Arc<str>,
    /// The communicator's ranks, as ranks of the session, in order.
    members: Arc<[usize]>,
    roster: Arc<Roster>,
    rank: usize,
    session: Arc<RankSession>,
    peers: Arc<dyn Peers>,
    fault_listener: Arc<CommunicatorFaultListener>,
    decided: Arc<FaultCell<Arc<Fault>>>,
    /// The fault that this rank announced.
    announced: OnceLock<Arc<Fault>>,
    /// When this rank called the operation whose failure it announced.
    began: OnceLock<Instant>,
    target: OnceLock<AbortHandle>,
    /// How long the other ranks may take to report that they released the communicator.
    confirm_timeout: Duration,
    /// Set when the end is over: a sentence that names the ranks that did not release it, if any.
    unconfirmed_text: OnceLock<Option<String>>,
    /// Held by the thread that reports how far this rank has released it, and waits for the reports of the others.
    reporting: Mutex<()>,
    /// Whether all ranks have reported how far they released it, and the end of all aborts is needed as well.
    needs_more: AtomicBool,
    /// The decided fault, with the calls in which the ranks waited.
    complete: OnceLock<Arc<Fault>>,
    /// As `unconfirmed_text`, once the world has a next generation.
    superseded_text: OnceLock<String>,
    /// Whether the decided fault was logged.
    is_logged: AtomicBool,
    /// Number of calls that were compared before they were handed to NCCL.
    checks: AtomicU64,
    /// Index of the last collective about which a straggler query was received.
    last_queried: AtomicU64,
}

/// How long to wait for the end of a communicator on ranks that can no longer report it: they notice the loss of the
/// coordinator as well.
const GRACE: Duration = Duration::from_millis(250);

/// Above this number, ranks do not report to each other in which calls they waited: the traffic would be the square of their
/// number.
const MAX_DETAILED_RANKS: usize = 256;

/// Returns the code of `progress` in a report of the end; the call in which the rank waited follows it.
fn encode_release(progress: ReleaseProgress) -> u8 {
    match progress {
        ReleaseProgress::Nothing => 0,
        ReleaseProgress::All => 1,
        ReleaseProgress::AllAndNeedsAll => 2,
        ReleaseProgress::Kernels => 3,
        ReleaseProgress::KernelsAndNeedsAll => 4,
    }
}

/// Returns the decoded report; `None` for a rank that has departed.
fn decode_release(part: &[u8]) -> Option<ReleaseProgress> {
    Some(match part.first()? {
        1 => ReleaseProgress::All,
        2 => ReleaseProgress::AllAndNeedsAll,
        3 => ReleaseProgress::Kernels,
        4 => ReleaseProgress::KernelsAndNeedsAll,
        _ => ReleaseProgress::Nothing,
    })
}

/// Splits what a rank reports at the end of a communicator: the call in which it waited and, after a zero byte, the
/// evidence from its host.
fn split_part(part: &[u8]) -> (String, EvidencePart) {
    let part = part.get(1..).unwrap_or_default();
    let mut parts = part.splitn(2, |byte| *byte == 0);
    let call = parts.next().unwrap_or_default();
    let host = parts.next().map(EvidencePart::decode);
    (
        String::from_utf8_lossy(call).into_owned(),
        host.unwrap_or_default(),
    )
}

fn is_kernels_only(progress: ReleaseProgress) -> bool {
    matches!(
        progress,
        ReleaseProgress::Kernels | ReleaseProgress::KernelsAndNeedsAll
    )
}

fn needs_all(progress: ReleaseProgress) -> bool {
    matches!(
        progress,
        ReleaseProgress::KernelsAndNeedsAll | ReleaseProgress::AllAndNeedsAll
    )
}

impl ControlPlaneSupervisor {
    /// Creates the supervisor of a communicator that this rank of the session is about to make.
    pub(super) fn new(
        session: &Arc<RankSession>,
        peers: Arc<dyn Peers>,
        request: SupervisionRequest<'_>,
    ) -> Arc<Self> {
        let fault_listener = session.fault_listener();
        // Here, because a diagnosis calls nothing of CUDA's.
        host_evidence::watch_device(request.context);
        let supervisor = Arc::new(Self {
            key: request.key,
            name: Arc::clone(request.name),
            members: request.members,
            roster: request.roster,
            rank: request.rank,
            session: Arc::clone(session),
            peers,
            fault_listener,
            decided: Arc::default(),
            announced: OnceLock::new(),
            began: OnceLock::new(),
            target: OnceLock::new(),
            confirm_timeout: request.confirm_timeout,
            unconfirmed_text: OnceLock::new(),
            reporting: Mutex::new(()),
            needs_more: AtomicBool::new(false),
            complete: OnceLock::new(),
            superseded_text: OnceLock::new(),
            is_logged: AtomicBool::new(false),
            checks: AtomicU64::new(0),
            last_queried: AtomicU64::new(0),
        });
        let weak = Arc::downgrade(&supervisor);
        let communicator = CommunicatorRef {
            members: &supervisor.members,
            name: &supervisor.name,
        };
        if supervisor.fault_listener.register(
            &supervisor.key,
            &communicator,
            &supervisor.decided,
            weak,
        ) {
            // A second report of the end would wait in vain: the others do not report again. Nothing was lent yet.
            let _ = supervisor.unconfirmed_text.set(None);
        }
        supervisor.log_fault();
        supervisor
    }

    /// Returns which ranks of the world, and of the launcher, its ranks are.
    pub(crate) fn roster(&self) -> &Roster {
        &self.roster
    }

    /// Reports that this rank's abort has returned, and waits for the end of all aborts, which one rank needs.
    fn report_full_abort(&self, so_far: ReleaseProgress) -> bool {
        let part = [encode_release(so_far)];
        let ended = self.session.gather_parts(
            &full_abort_topic(&self.key),
            &self.members,
            &part,
            self.confirm_timeout,
            None,
        );
        self.unconfirmed_text
            .set(self.text_of_unconfirmed(&ended))
            .is_ok()
    }

    /// Delays the end report of a rank whose operation only timed out until a cause is decided: all other ranks may
    /// have reported before.
    fn await_fault(&self) {
        let waits = self.announced.get().is_some_and(|own| !own.is_certain());
        let deadline = deadline_after(HEARTBEAT_TIMEOUT + GRACE);
        while waits
            && self.members.len() > 1
            && self.fault().is_none()
            && !self.session.is_closed()
            && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits for this rank's own announcement to arrive in the order in which all ranks receive it, unless the session is lost.
    fn await_own_announcement(&self) {
        let deadline = deadline_after(GRACE);
        while self.announced.get().is_some()
            && self.fault().is_none()
            && !self.session.is_closed()
            && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Writes a decided fault that this rank derived itself, without the coordinator's ordering.
    pub(super) fn fail_derived(&self, fault: Fault) {
        self.fault_listener
            .fail(&self.key, Arc::new(fault), self.members.to_vec());
    }

    /// Returns the session, and the communicator's ranks as ranks of the session.
    pub(super) fn session(&self) -> (&Arc<RankSession>, &[usize]) {
        (&self.session, &self.members)
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn pending_diagnoses(&self) -> &PendingDiagnoses {
        self.fault_listener.pending_diagnoses()
    }

    /// Returns the call in which this rank was waiting, for the other ranks; empty for none, and above [`MAX_DETAILED_RANKS`]
    /// ranks.
    fn pending_call(&self) -> String {
        let pending_call = self.target.get().and_then(AbortHandle::pending_call);
        pending_call
            .filter(|_| self.members.len() <= MAX_DETAILED_RANKS)
            .unwrap_or_default()
    }

    /// Returns the evidence of this rank's host for the other ranks, encoded after a zero byte. Empty if a diagnosis
    /// has collected it, if the class of the fault needs none, and above [`MAX_DETAILED_RANKS`] ranks.
    fn host_part(&self) -> Vec<u8> {
        let is_wanted = self.fault().is_some_and(|fault| match fault.class {
            FaultClass::Gone | FaultClass::Failed => true,
            FaultClass::TimedOut => self.members.len() == 1,
            _ => false,
        });
        if !is_wanted || self.members.len() > MAX_DETAILED_RANKS {
            return Vec::new();
        }
        [&[0], &EvidencePart::gather().encode()[..]].concat()
    }

    /// Adds to the decided fault the calls in which the ranks waited, and what their hosts show: all ranks get the same parts.
    fn complete(&self, ended: &GatherOutcome) {
        let (GatherOutcome::All(parts), Some(decided)) = (ended, self.decided.get()) else {
            return;
        };
        let parts = parts.iter().map(|part| split_part(part));
        let (pending_calls, hosts): (Vec<_>, Vec<_>) = parts.unzip();
        let mut complete = Fault::clone(decided);
        let also = Waiting::together(pending_calls.into_iter().enumerate());
        let has_more = decided.also.is_empty() && !also.is_empty();
        if has_more {
            complete = complete.with_also(also);
        }
        let host_evidence = self.host_evidence(&hosts);
        let has_host_evidence = decided.host_evidence.is_empty() && !host_evidence.is_empty();
        if has_host_evidence {
            complete = complete.with_host_evidence(host_evidence);
        }
        let is_clean_alone = matches!(&hosts[..], [only] if only.is_clean());
        if is_clean_alone {
            complete = complete.with_clean_log_alone();
        }
        if has_more || has_host_evidence || is_clean_alone {
            let _ = self.complete.set(Arc::new(complete));
            self.fault_listener.complete_latest(self.fault());
        }
        if has_host_evidence && let Some(fault) = self.fault() {
            events::host_evidence(fault, Some(&self.key), self.rank);
        }
    }

    fn host_evidence(&self, hosts: &[EvidencePart]) -> Vec<String> {
        let seen = hosts.iter().enumerate().filter_map(|(rank, part)| {
            Some(SeenByRank {
                rank,
                evidence: part.evidence()?,
                is_stuck: false,
            })
        });
        let seen: Vec<_> = seen.collect();
        let places = self.members.iter();
        let places = places.map(|member| self.fault_listener.host_and_pid(*member));
        sentences(&seen, &places.collect::<Vec<_>>(), &self.roster)
    }

    fn text_of_unconfirmed(&self, ended: &GatherOutcome) -> Option<String> {
        let (unconfirmed, why): (Vec<usize>, _) = match ended {
            GatherOutcome::All(parts) => {
                let leaked = self.members.iter().zip(parts);
                let leaked = leaked
                    .filter(|(_, part)| decode_release(part) == Some(ReleaseProgress::Nothing));
                let leaked = leaked.map(|(&rank, _)| rank).collect();
                (leaked, String::from("could not end the communicator"))
            }
            GatherOutcome::Missing(ranks) => {
                let timeout = self.confirm_timeout;
                let why =
                    format!("did not confirm within {timeout:?} that it ended the communicator");
                (ranks.clone(), why)
            }
            GatherOutcome::ConnectionLost => {
                std::thread::sleep(GRACE.min(self.confirm_timeout));
                return Some(String::from(
                    "the control connection to the other ranks is lost, so that they could not confirm that they \
                     ended the communicator",
                ));
            }
        };
        if unconfirmed.is_empty() {
            return None;
        }
        // The coordinator need not be a rank of the communicator.
        let name_of = |&rank: &usize| match self.members.contains(&rank) {
            true => self.name_of(self.rank_of_member(rank)),
            false => self.session.describe(rank),
        };
        let names: Vec<_> = unconfirmed.iter().map(name_of).collect();
        Some(format!(
            "{} {why}, and may still write into memory that was lent to it",
            names.join(", ")
        ))
    }
}

impl SupervisedCommunicator for ControlPlaneSupervisor {
    fn begin_end(&self) -> Option<PendingEnd> {
        self.target.get()?.begin_end(self.fault()?)
    }

    fn log_fault(&self) {
        if let Some(fault) = self.fault()
            && !self.is_logged.swap(true, Ordering::AcqRel)
        {
            self.fault_listener.set_latest(fault);
            events::fault(fault, Some(&self.key), self.rank, self.members.len());
            events::host_evidence(fault, Some(&self.key), self.rank);
            if !fault.is_on_purpose() {
                self.session.scope().record_fault();
                if let Some(began) = self.began.get() {
                    stats::DETECT.add(began.elapsed());
                }
            }
        }
    }
}

impl Drop for ControlPlaneSupervisor {
    /// Forgets the communicator. If it has failed and its end is not over, reports the end.
    fn drop(&mut self) {
        let failed = self.fault_listener.fault_registry().forget(&self.key);
        if failed && self.unconfirmed_text.get().is_none() {
            report_end(
                &self.session,
                &self.key,
                &self.members,
                ALL_RELEASED,
                self.confirm_timeout,
            );
        }
    }
}
