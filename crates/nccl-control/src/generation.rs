//! Reconfiguration from a rank's side: the next generation of a world, and how a new process joins it.

use std::time::{Duration, Instant};

use super::environment::Rendezvous;
use super::node::{NextGenerationError, Node};
use super::request::Request;
use super::round::RequestError;
use super::session::SessionBackend;
use super::world::World;
use crate::departure::{Departure, LossKind, UnfinishedExchange};
use crate::error::{Error, ErrorKind, Result};
use crate::forked;
use crate::time::deadline_after;
use nccl_base::env_timeouts::{EnvTimeouts, world_timeout};
use nccl_base::ranges::ranges;

/// How long the coordinator may take to report the phases of the missing ranks.
const PHASES_TIMEOUT: Duration = Duration::from_secs(1);

/// The topic in errors.
const TOPIC: &str = "the next generation";

impl World {
    /// Returns the generation of this world in its job: 0 unless the [`Rendezvous`] or the launcher sets another
    /// number. Each next generation increases it by at least one.
    pub fn generation(&self) -> u64 {
        self.session.job().1
    }

    /// Returns the rank that `rank` had in the previous generation; `None` for a new rank, and in the first generation.
    pub fn previous_rank(&self, rank: usize) -> Option<usize> {
        *self.previous_ranks.get(rank)?
    }

    /// Returns the number of processes that wait to be admitted to the next generation
    /// ([`join_running`](Self::join_running)).
    pub fn joiners(&self) -> usize {
        self.session.inbox.joiners()
    }

    /// Returns the ranks that have departed, and how each departed.
    pub fn departed(&self) -> Vec<(usize, String)> {
        if forked::is_child() {
            return Vec::new();
        }
        let mut departed = self.session.departures();
        departed.sort_by_key(|(rank, _)| *rank);
        let text = |(rank, departure): (usize, Departure)| (rank, departure.to_string());
        departed.into_iter().map(text).collect()
    }

    /// Joins a running world as a new rank, in place of a process that died or as an additional rank.
    pub fn join_running(rendezvous: Rendezvous) -> Result<Self> {
        forked::begin()?;
        rendezvous.job_identity().check()?;
        EnvTimeouts::of_process()?;
        let deadline = deadline_after(world_timeout(rendezvous.timeout));
        let active = Node::join_running_world(&rendezvous, deadline)?;
        let mut world = Self::of_generation(&active, rendezvous.local_rank, rendezvous.timeout);
        world.apply_rendezvous(&rendezvous);
        world.previous_ranks = vec![None; world.size()];
        Ok(world)
    }

    /// Forms the next generation with the remaining ranks and the joiners; returns its world. With `leaves_behind`,
    /// ranks that make no request in time are excluded, if all requesting ranks agree. Communicators with the keys
    /// `kept` do not end with this world.
    pub fn reconfigure(
        &self,
        timeout: Duration,
        leaves_behind: bool,
        kept: &[&str],
    ) -> Result<Self> {
        forked::check()?;
        let begun = Instant::now();
        let timeout = world_timeout(timeout);
        // The number of the next generation is only known at the end.
        let span =
            tracing::info_span!(target: "nccl", "nccl.recover", generation = self.generation());
        let _entered = span.enter();
        self.session.check_takes_part(TOPIC)?;
        let next = match self.session.backend() {
            SessionBackend::Node { node, generation } => {
                let active = node
                    .reconfigure(generation, timeout, leaves_behind)
                    .map_err(|error| self.next_generation_error(error))?;
                let mut next = Self::of_generation(&active, self.local_rank, self.timeout());
                next.previous_ranks = node.ranks_before(generation, &active.membership);
                next
            }
            SessionBackend::Threads(threads) => {
                let agreed = threads
                    .reconfigure(self.rank(), timeout, leaves_behind)
                    .map_err(|why| self.error_of(TOPIC, &why))?;
                let previous = &agreed.previous_ranks;
                let rank = previous.iter().position(|&before| before == self.rank());
                let rank = rank.expect("a rank that agreed to reconfigure is a member");
                let timeout = self.timeout();
                let mut next = Self::local(&agreed.threads, rank, self.local_rank, timeout);
                next.previous_ranks = agreed.previous_ranks.iter().copied().map(Some).collect();
                next
            }
        };
        Ok(self.replace_with(next, kept, begun))
    }

    /// Applies an operator's decision that `ranks` may continue although they are fewer than a majority of this
    /// generation.
    pub fn decide_split(&self, ranks: &[usize]) -> Result<()> {
        forked::check()?;
        self.session.check_takes_part(TOPIC)?;
        if let Some(&rank) = ranks.iter().find(|rank| **rank >= self.size()) {
            return Err(Error::new(ErrorKind::NoSuchRank {
                role: "rank",
                rank,
                world_size: self.size(),
            }));
        }
        if !ranks.contains(&self.rank()) {
            return Err(Error::rendezvous(format!(
                "rank {} cannot decide that ranks {} continue, because it is not one of them",
                self.rank(),
                ranges(ranks)
            )));
        }
        match self.session.backend() {
            SessionBackend::Node { node, generation } => node.decide(generation, ranks),
            SessionBackend::Threads(_) => {}
        }
        Ok(())
    }

    /// Returns the error of a failed request for the next generation.
    fn next_generation_error(&self, error: NextGenerationError) -> Error {
        let now = Instant::now();
        match error {
            NextGenerationError::Missing { ranks, waited } => {
                let late = RequestError::TimedOut {
                    missing: Vec::new(),
                    waited,
                    notes: Vec::new(),
                };
                // The coordinator knows the phases of the missing ranks.
                let request = |_| Request::Missing { ranks, waited };
                let answer = self.ask(TOPIC, request, now + PHASES_TIMEOUT, None);
                answer.map_or_else(|error| error, |_| self.error_of(TOPIC, &late))
            }
            NextGenerationError::Twice => self.error_of(TOPIC, &RequestError::Twice),
            NextGenerationError::Excluded => match (
                self.session.check_takes_part(TOPIC),
                self.session.inbox.cut_off_from(),
            ) {
                (Err(error), _) => error,
                (Ok(()), Some((from, why))) => {
                    let rank = self.rank();
                    let text = format!("rank {rank} cannot take part in {TOPIC:?} any more: {why}");
                    Error::rendezvous(text)
                        .of_exchange(Some(UnfinishedExchange::CutOff { from, why }))
                }
                (Ok(()), None) => {
                    let lost = (self.session.coordinator(), LossKind::Superseded.into());
                    self.session.lost_with_coordinator(TOPIC, lost, now, None)
                }
            },
        }
    }

    fn replace_with(&self, mut next: Self, kept: &[&str], begun: Instant) -> Self {
        next.interface = self.interface.clone();
        tracing::info!(
            name: "nccl.rendezvous.next_generation",
            target: "nccl",
            generation = next.generation(),
            rank = next.rank(),
            nranks = next.size(),
            elapsed_ms = crate::time::millis(begun.elapsed()),
            "the world has a next generation"
        );
        next.session
            .recorder()
            .continue_from(self.session.recorder());
        next.session.continue_from(&self.session);
        self.session.end_reconfigured(next.generation(), kept);
        next
    }
}
