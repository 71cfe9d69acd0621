//! How somebody who is new to a world finds who coordinates it by now.
//!
//! Rank 0 may be gone, and another rank coordinates. It listens at those of the job's addresses that are of its own
//! host. So a process that asks to come in, or wants
//! to observe, goes around all addresses that it was told. Whoever answers there proves that it belongs to the job,
//! and either coordinates or says who does, and where:
//!
//! ```text
//! the next address ──nobody there, or not the one──▶ the one after, again and again
//!    │        ▲
//!    │        └── there is nobody, either
//!    ├─ "rank 2 coordinates, at …" ──▶ there, at most LEADS such answers in a row
//!    └─ let in
//! ```
//!
//! What somebody says about another is a hint and nothing more: only the one that coordinates itself lets in, and
//! only when it knows of no later epoch. So an answer that is out of date
//! costs a try.

use std::io;
use std::time::{Duration, Instant};

use super::address::Address;
use super::client::{self, Claim, Met, Tried};
use super::environment::Rendezvous;
use super::job::Job;
use super::service::REPORT;
use crate::error::{Error, Result};

/// How long one try may take.
const TRY: Duration = Duration::from_secs(2);

/// How often in a row one is sent on to somebody else, before it starts from the beginning.
const LEADS: usize = 8;

/// The longest pause between two tries.
const PAUSE: Duration = Duration::from_millis(50);

/// See the module.
pub(super) struct Search {
    places: Vec<Address>,
    job: Job,
    claim: Claim,
    /// How many tries there were.
    turn: usize,
    /// Where somebody has said that the coordinator is, and how many have in a row.
    lead: Option<Address>,
    leads: usize,
    /// What came of each place the last time.
    heard: Vec<Option<String>>,
    /// The last that was said by somebody of the job.
    said: Option<String>,
}

/// What one try came to.
pub(super) enum Looked {
    Met(Met, Address),
    /// Another try would end alike.
    Refused(String),
    /// Somebody of the job has answered; it is the one who coordinates, or knows of it, soon.
    Alive(String),
    Nobody(io::Error),
}

impl Search {
    pub(super) fn new(rendezvous: &Rendezvous, claim: Claim) -> Self {
        let places = rendezvous.places();
        Self {
            heard: vec![None; places.len()],
            places,
            job: rendezvous.job.clone(),
            claim,
            turn: 0,
            lead: None,
            leads: 0,
            said: None,
        }
    }

    /// One try: where somebody has said, or at the next place.
    pub(super) fn step(&mut self, deadline: Instant) -> Looked {
        let index = self.turn % self.places.len();
        // Of an address with several ports, another one each time round.
        let port = self.turn / self.places.len();
        let (address, is_lead) = match self.lead.take() {
            Some(lead) => (lead, true),
            None => {
                self.turn += 1;
                self.leads = 0;
                (self.places[index].clone(), false)
            }
        };
        let limit = deadline.min(Instant::now() + TRY);
        match client::attempt(&address, &self.job, self.claim, port, limit) {
            Tried::Met(met) => Looked::Met(met, address),
            Tried::Follows { at, why, .. } => {
                let lead = Address::parse(&at).filter(|lead| *lead != address);
                if self.leads < LEADS {
                    self.leads += 1;
                    self.lead = lead;
                }
                self.note(index, is_lead, &address, &why);
                self.said = Some(why.clone());
                Looked::Alive(why)
            }
            // Where there are others, one of them may be right.
            Tried::Refused(why) if is_lead || self.places.len() > 1 => {
                self.note(index, is_lead, &address, &why);
                self.said = Some(why.clone());
                Looked::Nobody(io::Error::other(why))
            }
            Tried::Refused(why) => Looked::Refused(why),
            Tried::NotYet(error, said) => {
                self.note(index, is_lead, &address, &error.to_string());
                match said {
                    Some(why) => {
                        self.said = Some(why.clone());
                        Looked::Alive(why)
                    }
                    None => Looked::Nobody(error),
                }
            }
        }
    }

    fn note(&mut self, index: usize, is_lead: bool, address: &Address, why: &str) {
        self.heard[index] = Some(match is_lead {
            true => format!("somebody there named {address}: {why}"),
            false => why.to_owned(),
        });
    }

    /// Whether somebody was named where to go at once.
    pub(super) fn has_lead(&self) -> bool {
        self.lead.is_some()
    }

    /// Why nobody was found.
    pub(super) fn failure(&self) -> String {
        let heard = self.places.iter().zip(&self.heard);
        let heard = heard.filter_map(|(place, why)| Some(format!("{place} ({})", why.as_ref()?)));
        let heard: Vec<_> = heard.collect();
        let said = self.said.as_ref();
        let said = said.map_or_else(String::new, |why| format!("; what did answer: {why}"));
        let (job, claim) = (&self.job.name, self.claim);
        match &self.places[..] {
            [_] => format!(
                "rank 0 does not answer at {}, nor one that has taken over from it: has it been started? If it \
                 has ended, and the rank that coordinates job {job:?} now is on another host, {claim} has to be \
                 told where: NCCL_RUN_RENDEZVOUS takes several addresses, with commas between them{said}",
                heard.join("")
            ),
            _ => format!(
                "nobody who coordinates job {job:?} answers {claim}, at none of {}: has it been started? When all \
                 of its ranks have ended, start it anew{said}",
                heard.join(", ")
            ),
        }
    }

    /// Tries until somebody has let this process in.
    ///
    /// # Errors
    /// Why it may not come in, or what was tried in vain until the deadline.
    pub(super) fn run(&mut self, deadline: Instant) -> Result<(Met, Address)> {
        let mut pause = Duration::from_millis(2);
        let mut report = Instant::now() + REPORT;
        loop {
            let why = match self.step(deadline) {
                Looked::Met(met, address) => return Ok((met, address)),
                Looked::Refused(why) => return Err(Error::rendezvous(why)),
                Looked::Alive(_) if self.has_lead() => continue,
                Looked::Alive(why) => why,
                Looked::Nobody(error) => error.to_string(),
            };
            let now = Instant::now();
            if now >= deadline {
                return Err(Error::rendezvous(self.failure()));
            }
            // Nobody who waits as well knows of this one.
            if now >= report {
                report += REPORT;
                let claim = self.claim;
                tracing::info!(name: "nccl.rendezvous.waiting", target: "nccl", "still waiting: {claim} finds nobody who coordinates: {why}");
            }
            // All places one after another, and then a pause.
            if self.turn.is_multiple_of(self.places.len()) {
                std::thread::sleep(pause.min(deadline.saturating_duration_since(now)));
                pause = (pause * 2).min(PAUSE);
            }
        }
    }
}
