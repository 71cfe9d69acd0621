//! How a new process finds the current coordinator of a world.
//!
//! Rank 0 may be gone and another rank may coordinate. That rank listens at those of the job's addresses that are of its own
//! host. A process that joins or observes therefore tries all addresses it was given, in turn. A peer that answers proves
//! that it belongs to the job, and either coordinates or names the coordinator and its address:
//!
//! ```text
//! the next address ──nobody there, or not the one──▶ the one after, again and again
//!    │        ▲
//!    │        └── there is nobody, either
//!    ├─ "rank 2 coordinates, at …" ──▶ there, at most LEADS such answers in a row
//!    └─ let in
//! ```
//!
//! The answer of a follower is only a hint: only the coordinator itself lets a process in, and only when it knows
//! of no later generation. An outdated answer costs one attempt.

use std::io;
use std::time::{Duration, Instant};

use super::address::Address;
use super::connect::{self, AttemptOutcome, AuthenticatedConnection, Identity};
use super::environment::Rendezvous;
use super::job::Job;
use super::service::REPORT;
use crate::error::{Error, Result};

/// Timeout of one attempt.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(2);

/// How many referrals in a row the search follows before it starts from the beginning.
const MAX_REFERRALS: usize = 8;

/// The longest pause between two rounds of attempts.
const PAUSE: Duration = Duration::from_millis(50);

/// The state of a search; see the module.
pub(super) struct CoordinatorSearch {
    addresses: Vec<Address>,
    job: Job,
    identity: Identity,
    /// How many attempts at an address of the list there were.
    turn: usize,
    /// The coordinator's address as the last answer named it, and how many referrals there were in a row.
    referral: Option<Address>,
    referrals: usize,
    /// The last result at each address.
    heard: Vec<Option<String>>,
    /// The last answer of a process of the job.
    said: Option<String>,
}

/// The result of one attempt.
pub(super) enum SearchOutcome {
    Connected(AuthenticatedConnection, Address),
    /// Another attempt would end alike.
    Refused(String),
    /// A process of the job has answered; it will coordinate, or know the coordinator, soon.
    Alive(String),
    Nobody(io::Error),
}

impl CoordinatorSearch {
    pub(super) fn new(rendezvous: &Rendezvous, identity: Identity) -> Self {
        let addresses = rendezvous.addresses();
        Self {
            heard: vec![None; addresses.len()],
            addresses,
            job: rendezvous.identity(),
            identity,
            turn: 0,
            referral: None,
            referrals: 0,
            said: None,
        }
    }

    /// Makes one attempt: at the address that the last answer named, or at the next address of the list.
    pub(super) fn step(&mut self, deadline: Instant) -> SearchOutcome {
        let index = self.turn % self.addresses.len();
        // An address with several ports is tried at the next port each time round.
        let port = self.turn / self.addresses.len();
        let (address, is_referral) = match self.referral.take() {
            Some(referral) => (referral, true),
            None => {
                self.turn += 1;
                self.referrals = 0;
                (self.addresses[index].clone(), false)
            }
        };
        let limit = deadline.min(Instant::now() + ATTEMPT_TIMEOUT);
        match connect::attempt(&address, &self.job, self.identity, port, limit) {
            AttemptOutcome::Connected(established) => {
                SearchOutcome::Connected(established, address)
            }
            AttemptOutcome::Follows { at, why, .. } => {
                let referral = Address::parse(&at).filter(|referral| *referral != address);
                if self.referrals < MAX_REFERRALS {
                    self.referrals += 1;
                    self.referral = referral;
                }
                self.note(index, is_referral, &address, &why);
                self.said = Some(why.clone());
                SearchOutcome::Alive(why)
            }
            // Another of several addresses may be right.
            AttemptOutcome::Refused(why) if is_referral || self.addresses.len() > 1 => {
                self.note(index, is_referral, &address, &why);
                self.said = Some(why.clone());
                SearchOutcome::Nobody(io::Error::other(why))
            }
            AttemptOutcome::Refused(why) => SearchOutcome::Refused(why),
            AttemptOutcome::NotYet(error, said) => {
                self.note(index, is_referral, &address, &error.to_string());
                match said {
                    Some(why) => {
                        self.said = Some(why.clone());
                        SearchOutcome::Alive(why)
                    }
                    None => SearchOutcome::Nobody(error),
                }
            }
        }
    }

    fn note(&mut self, index: usize, is_referral: bool, address: &Address, why: &str) {
        self.heard[index] = Some(match is_referral {
            true => format!("a process there named {address}: {why}"),
            false => why.to_owned(),
        });
    }

    /// Whether the last answer named an address to try at once.
    pub(super) fn has_referral(&self) -> bool {
        self.referral.is_some()
    }

    /// Describes why no coordinator was found.
    pub(super) fn failure(&self) -> String {
        let heard = self.addresses.iter().zip(&self.heard);
        let heard = heard.filter_map(|(place, why)| Some(format!("{place} ({})", why.as_ref()?)));
        let heard: Vec<_> = heard.collect();
        let said = self.said.as_ref();
        let said = said.map_or_else(String::new, |why| format!("; what did answer: {why}"));
        let (job, identity) = (&self.job.name, self.identity);
        match &self.addresses[..] {
            [_] => format!(
                "rank 0 does not answer at {}, nor one that has taken over from it: has it been started? If it \
                 has ended, and the rank that coordinates job {job:?} now is on another host, {identity} has to be \
                 told where: NCCL_RUN_RENDEZVOUS takes several addresses, with commas between them{said}",
                heard.join("")
            ),
            _ => format!(
                "no coordinator of job {job:?} answers {identity}, at none of {}: has it been started? When all \
                 of its ranks have ended, start it anew{said}",
                heard.join(", ")
            ),
        }
    }

    /// Tries until a coordinator has let this process in.
    ///
    /// # Errors
    /// The reason of the refusal, or the attempts made in vain until the deadline.
    pub(super) fn run(&mut self, deadline: Instant) -> Result<(AuthenticatedConnection, Address)> {
        let mut pause = Duration::from_millis(2);
        let mut report = Instant::now() + REPORT;
        loop {
            let why = match self.step(deadline) {
                SearchOutcome::Connected(established, address) => {
                    return Ok((established, address));
                }
                SearchOutcome::Refused(why) => return Err(Error::rendezvous(why)),
                SearchOutcome::Alive(_) if self.has_referral() => continue,
                SearchOutcome::Alive(why) => why,
                SearchOutcome::Nobody(error) => error.to_string(),
            };
            let now = Instant::now();
            if now >= deadline {
                return Err(Error::rendezvous(self.failure()));
            }
            // The coordinator does not know of this process, so its own log lines do not mention it.
            if now >= report {
                report += REPORT;
                let identity = self.identity;
                tracing::info!(name: "nccl.rendezvous.waiting", target: "nccl", "still waiting: {identity} finds no coordinator: {why}");
            }
            // Pauses once all addresses have been tried.
            if self.turn.is_multiple_of(self.addresses.len()) {
                std::thread::sleep(pause.min(deadline.saturating_duration_since(now)));
                pause = (pause * 2).min(PAUSE);
            }
        }
    }
}
