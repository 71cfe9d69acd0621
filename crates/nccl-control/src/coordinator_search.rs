//! How a new process finds the current coordinator of a world.
//!
//! Rank 0 may have ended, and another rank may coordinate. That rank listens at those of the job's addresses that
//! belong to its own host. A process that joins or observes therefore tries all addresses it was given, in turn. A peer
//! that answers proves that it belongs to the job, and either coordinates or names the coordinator and its address:
//!
//! ```text
//! the next address ──no answer, or not the coordinator──▶ the address after it, again and again
//!    │        ▲
//!    │        └── no answer there either
//!    ├─ "rank 2 coordinates, at …" ──▶ that address, at most MAX_REFERRALS such answers in a row
//!    └─ admitted
//! ```
//!
//! The answer of a follower is only a hint: only the coordinator itself admits a process, and only if it knows of no
//! later generation. An outdated answer costs one attempt.

use std::io;
use std::time::{Duration, Instant};

use super::address::Address;
use super::connect::{self, AttemptOutcome, AuthenticatedConnection, ClaimedRole};
use super::environment::Rendezvous;
use super::job::Job;
use super::service::WAIT_LOG_INTERVAL;
use crate::error::{Error, Result};

/// How many referrals in a row the search follows before it starts from the beginning.
const MAX_REFERRALS: usize = 8;

/// The longest pause between two rounds of attempts.
const PAUSE: Duration = Duration::from_millis(50);

/// The state of a search; see the module.
pub(super) struct CoordinatorSearch {
    addresses: Vec<Address>,
    job: Job,
    claimed_role: ClaimedRole,
    /// The number of attempts at addresses of the list.
    attempts: usize,
    /// The coordinator's address from the last answer, and the number of referrals in a row.
    referral: Option<Address>,
    referrals: usize,
    /// The last result at each address.
    last_results: Vec<Option<String>>,
    /// The last answer from a process of the job.
    last_answer: Option<String>,
}

/// The result of one attempt.
pub(super) enum SearchOutcome {
    Connected(AuthenticatedConnection, Address),
    /// The refusal is final: another attempt would end in the same way.
    Refused(String),
    /// A process of the job has answered, and will soon coordinate or know the coordinator.
    Alive(String),
    NoAnswer(io::Error),
}

impl CoordinatorSearch {
    pub(super) fn new(rendezvous: &Rendezvous, claimed_role: ClaimedRole) -> Self {
        let addresses = rendezvous.addresses();
        Self {
            last_results: vec![None; addresses.len()],
            addresses,
            job: rendezvous.job_identity(),
            claimed_role,
            attempts: 0,
            referral: None,
            referrals: 0,
            last_answer: None,
        }
    }

    /// Makes one attempt: at the address from the last referral, or at the next address of the list.
    pub(super) fn step(&mut self, deadline: Instant) -> SearchOutcome {
        // A referral is tried on behalf of the address whose process named it: the last one.
        let number = match self.referral {
            Some(_) => self.attempts.saturating_sub(1),
            None => self.attempts,
        };
        let index = number % self.addresses.len();
        // An address with several ports is tried at its next port in each round.
        let port = self.attempts / self.addresses.len();
        let (address, is_referral) = match self.referral.take() {
            Some(referral) => (referral, true),
            None => {
                self.attempts += 1;
                self.referrals = 0;
                (self.addresses[index].clone(), false)
            }
        };
        let attempt_deadline = deadline.min(Instant::now() + connect::ATTEMPT_TIMEOUT);
        match connect::attempt(
            &address,
            &self.job,
            self.claimed_role,
            port,
            attempt_deadline,
        ) {
            AttemptOutcome::Connected(connection) => SearchOutcome::Connected(connection, address),
            AttemptOutcome::Follows { at, why, .. } => {
                let referral = Address::parse(&at).filter(|referral| *referral != address);
                if self.referrals < MAX_REFERRALS {
                    self.referrals += 1;
                    self.referral = referral;
                }
                self.note(index, is_referral, &address, &why);
                self.last_answer = Some(why.clone());
                SearchOutcome::Alive(why)
            }
            // Another address of the list may be the right one.
            AttemptOutcome::Refused(why) if is_referral || self.addresses.len() > 1 => {
                self.note(index, is_referral, &address, &why);
                self.last_answer = Some(why.clone());
                SearchOutcome::NoAnswer(io::Error::other(why))
            }
            AttemptOutcome::Refused(why) => SearchOutcome::Refused(why),
            AttemptOutcome::NotYet(error, answer) => {
                self.note(index, is_referral, &address, &error.to_string());
                match answer {
                    Some(why) => {
                        self.last_answer = Some(why.clone());
                        SearchOutcome::Alive(why)
                    }
                    None => SearchOutcome::NoAnswer(error),
                }
            }
        }
    }

    fn note(&mut self, index: usize, is_referral: bool, address: &Address, why: &str) {
        self.last_results[index] = Some(match is_referral {
            true => format!("a process there referred to {address}: {why}"),
            false => why.to_owned(),
        });
    }

    /// Whether the last answer named an address, which is then tried at once.
    pub(super) fn has_referral(&self) -> bool {
        self.referral.is_some()
    }

    /// Describes why no coordinator was found.
    pub(super) fn failure(&self) -> String {
        let results = self.addresses.iter().zip(&self.last_results);
        let results =
            results.filter_map(|(address, why)| Some(format!("{address} ({})", why.as_ref()?)));
        let results: Vec<_> = results.collect();
        let last_answer = self.last_answer.as_ref();
        let last_answer =
            last_answer.map_or_else(String::new, |why| format!("; last answer: {why}"));
        let (job, claimed_role) = (&self.job.name, self.claimed_role);
        match &self.addresses[..] {
            [_] => format!(
                "neither rank 0 nor a rank that took over from it answers {claimed_role} at {}: is it running? If the \
                 coordinator of job {job:?} is now on another host, add its address to NCCL_RUN_RENDEZVOUS (several \
                 addresses, separated by commas){last_answer}",
                results.join("")
            ),
            _ => format!(
                "no coordinator of job {job:?} answers {claimed_role} at any of {}: is the job running? If all of its \
                 ranks have ended, start it again{last_answer}",
                results.join(", ")
            ),
        }
    }

    /// Tries until a coordinator has admitted this process.
    ///
    /// # Errors
    /// The reason of the refusal, or the failed attempts until the deadline.
    pub(super) fn run(&mut self, deadline: Instant) -> Result<(AuthenticatedConnection, Address)> {
        let mut pause = Duration::from_millis(2);
        let mut report = Instant::now() + WAIT_LOG_INTERVAL;
        loop {
            let why = match self.step(deadline) {
                SearchOutcome::Connected(connection, address) => {
                    return Ok((connection, address));
                }
                SearchOutcome::Refused(why) => return Err(Error::rendezvous(why)),
                SearchOutcome::Alive(_) if self.has_referral() => continue,
                SearchOutcome::Alive(why) => why,
                SearchOutcome::NoAnswer(error) => error.to_string(),
            };
            let now = Instant::now();
            if now >= deadline {
                return Err(Error::rendezvous(self.failure()));
            }
            // The coordinator does not know this process, so the coordinator's log does not mention it.
            if now >= report {
                report += WAIT_LOG_INTERVAL;
                let claimed_role = self.claimed_role;
                tracing::info!(name: "nccl.rendezvous.waiting", target: "nccl", "still waiting: {claimed_role} finds no coordinator: {why}");
            }
            // Pauses once all addresses have been tried.
            if self.attempts.is_multiple_of(self.addresses.len()) {
                std::thread::sleep(pause.min(deadline.saturating_duration_since(now)));
                pause = (pause * 2).min(PAUSE);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_referral_is_reported_at_the_address_that_gave_it() {
        let address = |name: &str| {
            let path = format!("nccl-search-{name}-{}.sock", std::process::id());
            format!("unix:{}", std::env::temp_dir().join(path).display())
        };
        for len in [1, 2, 3] {
            let names: Vec<_> = (0..len).map(|n| address(&n.to_string())).collect();
            let rendezvous = Rendezvous::observer(&names.join(",")).unwrap();
            let mut search = CoordinatorSearch::new(&rendezvous, ClaimedRole::observer(1));
            let soon = Instant::now() + Duration::from_secs(5);
            assert!(matches!(search.step(soon), SearchOutcome::NoAnswer(_)));
            // The first address names another one, at which no process answers.
            search.referral = Address::parse(&address("referred"));
            assert!(matches!(search.step(soon), SearchOutcome::NoAnswer(_)));
            let first = search.last_results[0].as_ref().unwrap();
            assert!(first.contains("referred to"), "{first}");
            assert!(search.last_results[1..].iter().all(Option::is_none));
        }
    }
}
