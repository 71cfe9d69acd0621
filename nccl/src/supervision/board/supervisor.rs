//! The board as the communicator's supervisor.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Board, code_of, is_of_kernels, let_go_of, needs_all};
use crate::peers::{AbortHandle, LetGo, Peers, Supervisor};
use crate::rendezvous::{Member, Subject, Suspicion};
use crate::supervision::trial;
use crate::supervision::trials::FAULT;
use crate::supervision::watch::{Watched as _, end_alone};
use crate::supervision::words;
use nccl_base::departure::Ended;
use nccl_base::fault::{Cause, Fault};
use nccl_core::recorder::Turn;

impl Supervisor for Board {
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

    fn was_asked_about(&self, turn: u64) {
        self.asked_about.fetch_max(turn, Ordering::Relaxed);
    }

    fn is_asked_about(&self, turn: u64) -> bool {
        self.asked_about.load(Ordering::Relaxed) >= turn
    }

    fn place_of(&self, member: usize) -> usize {
        let place = self.members.iter().position(|&other| other == member);
        place.unwrap_or(member)
    }

    fn name_of(&self, rank: usize) -> String {
        let members = self.line.members();
        let known = members.get().zip(self.members.get(rank));
        match known.and_then(|(known, &member)| known.get(member)) {
            Some(Member { host, pid, .. }) => {
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

    fn protects(&self, target: AbortHandle) -> Option<Arc<Fault>> {
        let set = || drop(self.target.set(target));
        self.watch.docket().protect(&self.verdict, set)
    }

    fn fault(&self) -> Option<&Arc<Fault>> {
        self.complete.get().or_else(|| self.verdict.get())
    }

    fn cause(&self) -> Option<&Arc<Fault>> {
        self.fault().or_else(|| self.announced.get())
    }

    fn is_own(&self, fault: &Fault) -> bool {
        self.announced.get().is_some_and(|own| fault.is_of(own))
    }

    fn announce(self: Arc<Self>, cause: Cause) {
        let cause = words::with_words_of_nccl(cause);
        let cause = match self.members.len() {
            1 => cause.of_one_rank(),
            _ => cause,
        };
        let began = cause.began;
        // The cause that ended another communicator is known.
        let is_told = cause.told.is_some();
        let fault = Fault::here(
            cause,
            (&self.name, &self.roster),
            self.rank,
            self.line.job().1,
            |world_rank| self.members.iter().position(|member| *member == world_rank),
        );
        let fault = Arc::new(fault);
        if self.fault().is_some() || self.announced.set(Arc::clone(&fault)).is_err() {
            return;
        }
        if let Some(began) = began {
            let _ = self.began.set(began);
        }
        if fault.is_certain() || is_told || self.members.len() == 1 {
            let bytes = fault.encode(&self.members);
            self.line.announce(&format!("{FAULT}{}", self.key), &bytes);
        } else {
            trial::open(&self, &fault);
        }
    }

    fn let_go(&self, so_far: LetGo) -> bool {
        let _saying = self.saying.lock();
        if self.conclusion.get().is_some() {
            return true;
        }
        self.await_verdict();
        if so_far == LetGo::Nothing {
            // A rank that could not end its own does not wait for others.
            let part = [code_of(so_far)];
            end_alone(&self.line, &self.key, &self.members, &part, self.patience);
            self.await_own();
            return self.conclusion.set(None).is_ok();
        }
        if self.needs_more.load(Ordering::Acquire) {
            return !is_of_kernels(so_far) && self.end_of_all(so_far);
        }
        let part = [&[code_of(so_far)], self.standing().as_bytes()].concat();
        let ended = self
            .line
            .end(&self.key, &self.members, &part, self.patience, None);
        self.line.catch_up();
        // When the line was lost before this rank's own fault came back, that fault is the verdict.
        if let Some(own) = self.announced.get() {
            let _ = self.verdict.set(Arc::clone(own));
            self.tell();
        }
        self.complete(&ended);
        let has_all = |ended: &Ended| match ended {
            Ended::All(parts) => {
                let said = || parts.iter().filter_map(|part| let_go_of(part));
                !(said().any(needs_all) && said().any(is_of_kernels))
            }
            _ => true,
        };
        if has_all(&ended) {
            return self.conclusion.set(self.sentence(&ended)).is_ok();
        }
        self.needs_more.store(true, Ordering::Release);
        !is_of_kernels(so_far) && self.end_of_all(so_far)
    }

    fn next_check(&self) -> u64 {
        self.checked.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn gather(
        &self,
        topic: &str,
        part: &[u8],
        patience: Duration,
        interrupted: &dyn Fn() -> bool,
    ) -> Ended {
        let name = format!("{}/{topic}", self.key);
        let ended = self
            .line
            .end(&name, &self.members, part, patience, Some(interrupted));
        if matches!(ended, Ended::All(_)) {
            // The departure of a rank whose part is missing was announced before.
            self.line.catch_up();
        }
        ended
    }

    fn conclusion(&self) -> Option<&str> {
        let said = self.conclusion.get().and_then(Option::as_deref);
        let Some(generation) = self.line.gone_on() else {
            return said;
        };
        let past = self.past.get_or_init(|| {
            let own = self.line.job().1;
            let past = format!(
                "it is of generation {own} of its world, which has gone on to generation {generation}: make it anew there"
            );
            match said {
                Some(said) => format!("{said}; {past}"),
                None => past,
            }
        });
        Some(past)
    }

    fn suspect(&self, turn: u64, call: &Turn, since: Duration, is_sample: bool) {
        let everybody = self.members.iter().copied().eq(0..self.line.size());
        self.line.suspect(Suspicion {
            subject: Subject {
                key: String::from(&*self.key),
                name: String::from(&*self.name),
                turn,
                kind: call.kind,
                sequence: call.number,
            },
            members: match everybody {
                true => Vec::new(),
                false => self.members.to_vec(),
            },
            since,
            is_sample,
        });
    }
}
