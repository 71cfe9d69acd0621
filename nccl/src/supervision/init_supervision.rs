//! Communicators before NCCL is called: while their ranks exchange which of them take part, the results of their
//! checks, and NCCL's token; and the faults of communicators that fail in this phase.
//!
//! There is no supervisor yet, and none is needed: such an exchange ends once, with the same outcome on all ranks, and
//! everything here is derived from that outcome. So all ranks have the same rank, root, class and text, without another
//! message.

use super::local_evidence;
use std::sync::Arc;
use std::time::Duration;

use super::attach::SessionExt as _;
use super::fault_registry::CommunicatorRef;
use super::scope_recorder::log_start;
use crate::communicator::LaunchMode;
use crate::events;
use crate::peers::InitSupervisor;
use nccl_base::departure::Departure;
use nccl_base::departure::{Reason, UnfinishedExchange};
use nccl_base::error::Error;
use nccl_base::fault::FaultOperation;
use nccl_base::fault::cause::{FaultRole, MismatchField, MismatchSide, PastEvent, RootCause};
use nccl_base::fault::{Cause, Fault, FaultClass, FaultSite};
use nccl_base::roster::Roster;
use nccl_control::RankSession;

/// A communicator that its ranks are about to make.
pub(crate) struct InitSupervision {
    session: Arc<RankSession>,
    name: Arc<str>,
    members: Arc<[usize]>,
    roster: Roster,
    /// This rank, among the members.
    rank: usize,
}

impl InitSupervision {
    /// Describes communicator `name` of the ranks `members` of the session.
    pub(crate) fn new(
        session: &Arc<RankSession>,
        name: &str,
        members: Arc<[usize]>,
        rank: usize,
    ) -> Self {
        Self {
            session: Arc::clone(session),
            name: Arc::from(name),
            roster: session.roster(&members),
            members,
            rank,
        }
    }

    fn fault_of(&self, how: &UnfinishedExchange) -> Arc<Fault> {
        let cause = match how {
            UnfinishedExchange::Departed { rank, departure } => {
                let (members, name) = (&self.members, &self.name);
                let communicator = CommunicatorRef { members, name };
                if *departure != Departure::Left
                    && let Some(fault) = self.session.fault_listener().departure_fault(
                        *rank,
                        departure,
                        &communicator,
                    )
                {
                    return fault;
                }
                let text = format!(
                    "has left its world, and takes no part in making {}",
                    self.named()
                );
                (*rank, self.missing_rank(None, FaultClass::Gone, text))
            }
            UnfinishedExchange::GivenUp {
                rank,
                reason: reason @ Reason::Aborted,
            } => {
                let text = format!("{reason} before NCCL was started");
                (*rank, Cause::asked(&text))
            }
            UnfinishedExchange::GivenUp { rank, reason } => {
                let root = RootCause::ProgramFailed {
                    reason: reason.to_string(),
                };
                let role = FaultRole::Initiating;
                let text = format!("gave up making {}: {reason}", self.named());
                (*rank, Cause::of(FaultClass::Failed, role, root, text))
            }
            UnfinishedExchange::Late {
                missing,
                phase,
                waited,
            } => {
                let first = missing.first().copied().unwrap_or_default();
                (first, self.late_ranks(missing, phase.as_ref(), *waited))
            }
            UnfinishedExchange::Unanswered { by } => {
                let ranks = self.ranks_of_members(&[*by]);
                let root = RootCause::NotAnswering { ranks, state: None };
                let role = FaultRole::Initiating;
                let text = format!(
                    "is the coordinator and does not answer, so that {} could not be made",
                    self.named()
                );
                let mut cause = Cause::of(FaultClass::TimedOut, role, root, text);
                cause.hint = String::from(
                    "check whether its process is stopped, frozen or without CPU time",
                );
                (*by, cause)
            }
            UnfinishedExchange::CutOff { from, why } => {
                let own = self.members[self.rank];
                (
                    own,
                    Cause::cut_off(why, &self.ranks_of_members(from), &self.roster),
                )
            }
        };
        let (member, cause) = cause;
        let rank = self
            .ranks_of_members(&[member])
            .first()
            .copied()
            .unwrap_or_default();
        Arc::new(self.fault(cause, rank))
    }

    fn late_ranks(
        &self,
        missing: &[usize],
        phase: Option<&(String, Duration)>,
        waited: Duration,
    ) -> Cause {
        let text = format!(
            "has not come to make {}; the others waited {:.1} s for it",
            self.named(),
            waited.as_secs_f64()
        );
        let phase = phase.map(|(what, ago)| PastEvent::new(what.clone(), *ago));
        let mut evidence = Vec::new();
        if let Some(phase) = &phase {
            evidence.push(format!(
                "it has been in phase {:?} for {:.1} s",
                phase.what,
                phase.ago.as_secs_f64()
            ));
        }
        let others = self.ranks_of_members(missing.get(1..).unwrap_or_default());
        if !others.is_empty() {
            let verb = if others.len() == 1 { "has" } else { "have" };
            evidence.push(format!(
                "{} {verb} not joined either",
                self.roster.who(&others)
            ));
        }
        let mut cause = self.missing_rank(phase, FaultClass::TimedOut, text);
        cause.operation = FaultOperation::init(&self.named());
        cause.timeout = Some(waited);
        cause.evidence = evidence;
        cause
    }

    /// Returns the cause for a rank that has not taken part.
    fn missing_rank(&self, phase: Option<PastEvent>, class: FaultClass, text: String) -> Cause {
        let root = RootCause::NeverEntered {
            operation: format!("init of {}", self.named()),
            last: None,
            phase,
        };
        let mut cause = Cause::of(class, FaultRole::Initiating, root, text);
        cause.hint = String::from(
            "look at what that rank's program does instead: all ranks have to make the same communicators in the same \
             order",
        );
        cause
    }

    fn named(&self) -> String {
        self.roster.named(&self.name)
    }

    /// Returns which ranks of the communicator `ranks` of the session are.
    fn ranks_of_members(&self, ranks: &[usize]) -> Vec<usize> {
        let own_rank = |rank: &usize| self.members.iter().position(|member| member == rank);
        ranks.iter().filter_map(own_rank).collect()
    }

    /// Returns the fault of rank `rank` of the communicator; the same on every rank.
    fn fault(&self, cause: Cause, rank: usize) -> Fault {
        let member = self.members.get(rank).copied().unwrap_or_default();
        let (host, pid) = self.session.fault_listener().host_and_pid(member);
        let site = FaultSite {
            communicator: &self.name,
            roster: &self.roster,
            rank,
            host: &host,
            pid,
            generation: self.session.job().1,
        };
        Fault::derived(cause, site)
    }
}

impl InitSupervisor for InitSupervision {
    fn explain_failure(&self, own: Option<Error>, exchange: Error) -> Error {
        let fault = exchange.unfinished().map(|how| self.fault_of(how));
        let error = own.unwrap_or(exchange);
        match fault {
            Some(fault) => self.failed_by(error, fault),
            None => error,
        }
    }

    fn encode_failure(&self, error: &Error) -> Vec<u8> {
        let fault = match (error.fault(), error.unfinished()) {
            (Some(fault), _) => fault.clone(),
            // An exchange before this one failed; the others have received the same.
            (None, Some(how)) => Fault::clone(&self.fault_of(how)),
            (None, None) => Fault::here(
                local_evidence::with_nccl_warning(Cause::from(error), log_start(&self.session)),
                (&self.name, &self.roster),
                self.rank,
                self.session.job().1,
                |world_rank| self.ranks_of_members(&[world_rank]).first().copied(),
            ),
        };
        fault.encode(&self.members)
    }

    fn choose_fault(&self, encoded: &[(usize, &[u8])]) -> Option<(usize, Fault)> {
        let encoded = encoded.iter();
        let faults =
            encoded.filter_map(|(rank, bytes)| Some((*rank, Fault::decode(bytes).ok()?.0)));
        faults.min_by_key(|(rank, fault)| (fault.role, *rank))
    }

    fn mode_mismatch(&self, modes: &[Option<LaunchMode>]) -> Fault {
        let mut sides: Vec<MismatchSide> = Vec::new();
        for (rank, mode) in modes.iter().enumerate() {
            let value = mode.map_or_else(|| String::from("unknown"), |mode| mode.to_string());
            match sides.iter_mut().find(|side| side.value == value) {
                Some(side) => side.ranks.push(rank),
                None => sides.push(MismatchSide::of(rank, value)),
            }
        }
        // Of two sides of equal size, the one with the lower rank stays first.
        sides.sort_by_key(|side| std::cmp::Reverse(side.ranks.len()));
        let side_texts: Vec<_> = sides
            .iter()
            .map(|side| format!("{} in {}", self.roster.who(&side.ranks), side.value))
            .collect();
        let rank = sides.last().map_or(0, |side| side.ranks[0]);
        let root = RootCause::Mismatch {
            field: MismatchField::LaunchMode,
            sequence: None,
            sides,
        };
        let text = match root.is_of_no_rank() {
            true => format!("ranks differ in the launch mode: {}", side_texts.join(", ")),
            false => format!("makes it in another launch mode: {}", side_texts.join(", ")),
        };
        let mut cause = Cause::of(FaultClass::Failed, FaultRole::Initiating, root, text);
        cause.hint = String::from("choose the same launch mode on all ranks");
        self.fault(cause, rank)
    }

    fn failed_by(&self, error: Error, fault: Arc<Fault>) -> Error {
        self.session.fault_listener().set_latest(&fault);
        events::fault(&fault, None, self.rank, self.members.len());
        if !matches!(fault.class, FaultClass::Asked) {
            self.session.scope().record_fault();
        }
        match fault.root {
            // All ranks have found the mismatch, and have one error.
            RootCause::Mismatch { .. } => error.with_fault(&fault),
            _ if self.members.len() == 1 => error.with_fault(&fault),
            _ => error.before_nccl(&fault),
        }
    }

    fn roster(&self) -> &Roster {
        &self.roster
    }
}
