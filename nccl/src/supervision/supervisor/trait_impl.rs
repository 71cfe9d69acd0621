//! The trait [`Supervisor`] for [`ControlPlaneSupervisor`].

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{ControlPlaneSupervisor, decode_release, encode_release, is_kernels_only, needs_all};
use crate::peers::{AbortHandle, Peers, ReleaseProgress, Supervisor};
use crate::supervision::diagnosis;
use crate::supervision::fault_listener::{SupervisedCommunicator as _, report_end};
use crate::supervision::inside_nccl;
use crate::supervision::local_evidence;
use crate::supervision::pending_diagnoses::FAULT_TOPIC;
use crate::supervision::scope_recorder::log_start;
use nccl_base::departure::GatherOutcome;
use nccl_base::fault::{Cause, Fault};
use nccl_control::{QueriedOperation, RankProcess, StragglerQueryRequest};
use nccl_core::recorder::IndexedCall;

impl Supervisor for ControlPlaneSupervisor {
    fn key(&self) -> &str {
        &self.key
    }

    fn peers(&self) -> &Arc<dyn Peers> {
        &self.peers
    }

    fn members(&self) -> &[usize] {
        &self.members
    }

    fn target(&self) -> Option<AbortHandle> {
        self.target.get().cloned()
    }

    fn set_queried(&self, collective_index: u64) {
        self.last_queried
            .fetch_max(collective_index, Ordering::Relaxed);
    }

    fn is_queried(&self, collective_index: u64) -> bool {
        self.last_queried.load(Ordering::Relaxed) >= collective_index
    }

    fn rank_of_member(&self, member: usize) -> usize {
        let rank = self.members.iter().position(|&other| other == member);
        rank.unwrap_or(member)
    }

    fn name_of(&self, rank: usize) -> String {
        let members = self.session.members();
        let known = members.get().zip(self.members.get(rank));
        match known.and_then(|(known, &member)| known.get(member)) {
            Some(RankProcess { host, pid, .. }) => {
                format!(
                    "rank {rank} ({}{host}, pid {pid})",
                    self.roster.others(rank)
                )
            }
            None => self.roster.who(&[rank]),
        }
    }

    fn names_of(&self, ranks: &[usize]) -> String {
        match *ranks {
            [rank] => self.name_of(rank),
            _ => self.roster.who(ranks),
        }
    }

    fn attach(&self, target: AbortHandle) -> Option<Arc<Fault>> {
        let set = || drop(self.target.set(target));
        self.fault_listener
            .fault_registry()
            .attach(&self.decided, set)
    }

    fn fault(&self) -> Option<&Arc<Fault>> {
        self.complete.get().or_else(|| self.decided.get())
    }

    fn fault_or_announced(&self) -> Option<&Arc<Fault>> {
        self.fault().or_else(|| self.announced.get())
    }

    fn is_own(&self, fault: &Fault) -> bool {
        self.announced.get().is_some_and(|own| fault.is_of(own))
    }

    fn announce(self: Arc<Self>, cause: Cause) {
        let cause = local_evidence::with_nccl_warning(cause, log_start(&self.session));
        let cause = match self.members.len() {
            1 => cause.of_one_rank(),
            _ => cause,
        };
        let began = cause.began;
        // The cause that ended another communicator is known.
        let has_origin = cause.origin_fault.is_some();
        let fault = Fault::here(
            cause,
            (&self.name, &self.roster),
            self.rank,
            self.session.job().1,
            |world_rank| self.members.iter().position(|member| *member == world_rank),
        );
        let fault = Arc::new(fault);
        if self.fault().is_some() || self.announced.set(Arc::clone(&fault)).is_err() {
            return;
        }
        if let Some(began) = began {
            let _ = self.began.set(began);
        }
        if fault.is_certain() || has_origin || self.members.len() == 1 {
            let bytes = fault.encode(&self.members);
            self.session
                .announce(&format!("{FAULT_TOPIC}{}", self.key), &bytes);
        } else {
            // Before the abort, which ends what is to be seen.
            inside_nccl::keep(&self.key, self.rank);
            diagnosis::open(&self, &fault);
        }
    }

    fn report_release(&self, so_far: ReleaseProgress) -> bool {
        let _reporting = self.reporting.lock();
        if self.unconfirmed_text.get().is_some() {
            return true;
        }
        self.await_fault();
        if so_far == ReleaseProgress::Nothing {
            // A rank that could not end its own does not wait for others.
            let part = [encode_release(so_far)];
            report_end(
                &self.session,
                &self.key,
                &self.members,
                &part,
                self.confirm_timeout,
            );
            self.await_own_announcement();
            return self.unconfirmed_text.set(None).is_ok();
        }
        if self.needs_more.load(Ordering::Acquire) {
            return !is_kernels_only(so_far) && self.report_full_abort(so_far);
        }
        let call = self.pending_call();
        let part = [
            &[encode_release(so_far)],
            call.as_bytes(),
            &self.host_part(),
        ];
        let part = part.concat();
        let ended =
            self.session
                .gather_parts(&self.key, &self.members, &part, self.confirm_timeout, None);
        self.session.catch_up();
        // When the session was lost before this rank's own fault arrived, that fault is the decided fault.
        if let Some(own) = self.announced.get() {
            let _ = self.decided.set(Arc::clone(own));
            self.log_fault();
        }
        self.complete(&ended);
        let has_all = |ended: &GatherOutcome| match ended {
            GatherOutcome::All(parts) => {
                let reported = || parts.iter().filter_map(|part| decode_release(part));
                !(reported().any(needs_all) && reported().any(is_kernels_only))
            }
            _ => true,
        };
        if has_all(&ended) {
            return self
                .unconfirmed_text
                .set(self.text_of_unconfirmed(&ended))
                .is_ok();
        }
        self.needs_more.store(true, Ordering::Release);
        !is_kernels_only(so_far) && self.report_full_abort(so_far)
    }

    fn next_check(&self) -> u64 {
        self.checks.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn gather(
        &self,
        topic: &str,
        part: &[u8],
        timeout: Duration,
        interrupted: &dyn Fn() -> bool,
    ) -> GatherOutcome {
        let name = format!("{}/{topic}", self.key);
        let ended =
            self.session
                .gather_parts(&name, &self.members, part, timeout, Some(interrupted));
        if matches!(ended, GatherOutcome::All(_)) {
            // The departure of a rank whose part is missing was announced before.
            self.session.catch_up();
        }
        ended
    }

    fn unconfirmed_text(&self) -> Option<&str> {
        let text = self.unconfirmed_text.get().and_then(Option::as_deref);
        let Some(generation) = self.session.reconfigured_to() else {
            return text;
        };
        let superseded_text = self.superseded_text.get_or_init(|| {
            let own = self.session.job().1;
            let superseded_text = format!(
                "it belongs to generation {own} of its world, which is now in generation {generation}: make it again there"
            );
            match text {
                Some(text) => format!("{text}; {superseded_text}"),
                None => superseded_text,
            }
        });
        Some(superseded_text)
    }

    fn query_stragglers(
        &self,
        collective_index: u64,
        call: &IndexedCall,
        since: Duration,
        is_sample: bool,
    ) {
        let is_whole_world = self.members.iter().copied().eq(0..self.session.size());
        self.session.query_stragglers(StragglerQueryRequest {
            subject: QueriedOperation {
                key: String::from(&*self.key),
                name: String::from(&*self.name),
                collective_index,
                kind: call.kind,
                sequence: call.sequence,
            },
            members: match is_whole_world {
                true => Vec::new(),
                false => self.members.to_vec(),
            },
            since,
            is_sample,
        });
    }
}
