//! One rank's view of all ranks.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::coordinator_message::Answer;
use super::environment::Rendezvous;
use super::events::Events;
use super::inbox::Inbox;
use super::launcher;
use super::node::{ActiveGeneration, Node};
use super::panics;
use super::rank_process::RankProcess;
use super::request::Request;
use super::round::RequestError;
use super::session::{RankSession, SessionBackend};
use super::slot::Slot;
use super::thread_world::ThreadWorld;
use crate::departure::{Departure, Failure};
use crate::error::{Error, ErrorKind, Result};
use crate::fault::Fault;
use crate::forked::{self, ForkGuarded};
use crate::time::deadline_after;
use nccl_base::env_timeouts::{EnvTimeouts, world_timeout};

/// All ranks of a job, seen from one of them.
pub struct World {
    pub(super) local_rank: usize,
    timeout: Duration,
    /// The session, shared with its communicators.
    pub(crate) session: ForkGuarded<Arc<RankSession>>,
    /// The departure that is reported when this value is dropped.
    final_departure: Departure,
    /// The network interface that the program chose.
    pub(super) interface: Option<String>,
    /// For each rank, its rank in the previous generation; empty in the first generation.
    pub(super) previous_ranks: Vec<Option<usize>>,
    slot_count: usize,
}

impl World {
    /// Joins the first generation of the world, with the other ranks.
    pub fn join(mut rendezvous: Rendezvous) -> Result<Self> {
        let conflict = rendezvous.launcher_conflict.take();
        Self::join_first_generation(rendezvous).map_err(|error| match (conflict, error.kind()) {
            (Some(conflict), ErrorKind::Rendezvous { reason }) => {
                Error::rendezvous(format!("{reason}; {conflict}"))
            }
            _ => error,
        })
    }

    fn join_first_generation(rendezvous: Rendezvous) -> Result<Self> {
        forked::begin()?;
        if rendezvous.world_size == 0 {
            return Err(Error::rendezvous(
                "an observer's rendezvous has no rank to join as: use Observer::join",
            ));
        }
        rendezvous.job_identity().check()?;
        EnvTimeouts::of_process()?;
        launcher::launched_rank()?;
        let deadline = deadline_after(world_timeout(rendezvous.timeout));
        let (rank, nranks) = (rendezvous.rank, rendezvous.world_size);
        let generation = rendezvous.generation;
        let span = tracing::info_span!(target: "nccl", "nccl.rendezvous", rank, nranks, generation);
        let _entered = span.enter();
        let inbox = Arc::new(Inbox::default());
        let node = Node::start_rank(&rendezvous, deadline, &inbox, None)?;
        let job = (rendezvous.job.clone(), generation);
        let backend = SessionBackend::Node {
            node: Arc::clone(&node),
            generation,
        };
        let session = RankSession::open(rank, nranks, job, backend, inbox);
        let active = node
            .wait_until_formed(deadline)
            .map_err(|why| session.error_of("join", &why))?;
        let slot_count = active.membership.slot_count();
        let mut world = Self::new(
            session,
            slot_count,
            rendezvous.local_rank,
            rendezvous.timeout,
        );
        world.session.set_members(active.members());
        world.apply_rendezvous(&rendezvous);
        let address = &rendezvous.address;
        tracing::info!(name: "nccl.rendezvous.met", target: "nccl", rank, nranks, %address, "all ranks have met");
        Ok(world)
    }

    /// Applies the settings that follow from the rendezvous and the processes of the ranks.
    pub(super) fn apply_rendezvous(&mut self, rendezvous: &Rendezvous) {
        if let (true, Some(members)) = (rendezvous.counts_local_rank, self.session.members().get())
        {
            let host = &members[self.rank()].host;
            let before = members[..self.rank()].iter();
            self.local_rank = before.filter(|member| member.host == *host).count();
        }
        self.session.compare_clocks();
        self.interface = rendezvous.address.interface();
    }

    /// Creates the world of an active generation of which this process is a member.
    pub(super) fn of_generation(
        active: &ActiveGeneration,
        local_rank: usize,
        timeout: Duration,
    ) -> Self {
        let slot_count = active.membership.slot_count();
        Self::new(
            RankSession::of_generation(active),
            slot_count,
            local_rank,
            timeout,
        )
    }

    /// Creates the worlds of `size` ranks that are threads of this process.
    pub fn threads(size: usize) -> Vec<Self> {
        assert!(size > 0, "a world has at least one rank");
        let threads = ThreadWorld::new(size);
        (0..size)
            .map(|rank| Self::local(&threads, rank, rank, Duration::from_secs(60)))
            .collect()
    }

    /// Creates a world of one rank, for a program that can run alone.
    pub fn single() -> Self {
        Self::local(&ThreadWorld::new(1), 0, 0, Duration::from_secs(60))
    }

    /// Creates the world of a rank that is a thread of this process.
    pub(super) fn local(
        threads: &Arc<ThreadWorld>,
        rank: usize,
        local_rank: usize,
        timeout: Duration,
    ) -> Self {
        let inbox = Arc::clone(threads.inbox(rank));
        let backend = SessionBackend::Threads(Arc::clone(threads));
        let job = (threads.job(), threads.generation());
        let session = RankSession::open(rank, threads.size(), job, backend, inbox);
        let slots = (0..threads.size()).map(|rank| threads.slot(rank));
        session.set_members(slots.map(RankProcess::here).collect());
        Self::new(session, threads.slot_count(), local_rank, timeout)
    }

    fn new(
        session: Arc<RankSession>,
        slot_count: usize,
        local_rank: usize,
        timeout: Duration,
    ) -> Self {
        Self {
            slot_count,
            local_rank,
            timeout,
            session: ForkGuarded::new(session),
            final_departure: Departure::Left,
            interface: None,
            previous_ranks: Vec::new(),
        }
    }

    /// Sets how long [`barrier`](Self::barrier) and [`all_gather`](Self::all_gather) wait for the other ranks;
    /// default 60 s, or the timeout of the [`Rendezvous`].
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Returns the session, which its communicators share.
    pub fn session(&self) -> &Arc<RankSession> {
        &self.session
    }

    /// Returns the network interface that the program chose for the ranks' own connections.
    pub fn interface(&self) -> Option<&str> {
        self.interface.as_deref()
    }

    /// Returns the launcher rank of the process that is rank `rank` here: the rank as which `nccl-run`, torchrun, MPI
    /// or Slurm started the process, and which prefixes the lines of its output. After a reconfiguration the two ranks
    /// differ. `None` if no launcher assigned a rank, and for a rank that the world does not have.
    pub fn launcher_rank(&self, rank: usize) -> Option<usize> {
        self.session.members().get()?.get(rank)?.launcher_rank
    }

    /// Returns the slot of a rank; `None` for a rank that the world does not have.
    pub fn slot(&self, rank: usize) -> Option<Slot> {
        self.session.members().get()?.get(rank)?.slot
    }

    /// Returns the rank that has the slot of this number; `None` if no rank of this generation has it.
    pub fn rank_in_slot(&self, number: usize) -> Option<usize> {
        let members = self.session.members();
        let has_it = |slot: Slot| slot.number == number;
        let mut members = members.get()?.iter();
        members.position(|member| member.slot.is_some_and(has_it))
    }

    /// Returns the number of slots that have been used, in this generation or an earlier one.
    pub fn slot_count(&self) -> usize {
        self.slot_count
    }

    /// Returns this rank.
    pub fn rank(&self) -> usize {
        self.session.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.session.size
    }

    /// Returns this rank's number among the ranks of its host: the usual index of its device.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Returns the fault of the communicator of this world that ended last on this rank; `None` if none has.
    pub fn fault(&self) -> Option<Fault> {
        forked::check().ok()?;
        self.session.fault().map(|fault| Fault::clone(&fault))
    }

    /// Returns a reader of the events of this world's ranks and of this rank's communicators. The ranks present come
    /// first; then follow departures, failures, deaths, silence and answers, late operations, new coordinators, each
    /// [`Fault`], and the next generations. The events end when the world, in its last generation, is dropped.
    pub fn events(&self) -> Events {
        Events::of(self.session.event_bus())
    }

    #[doc(hidden)]
    pub fn timeout(&self) -> Duration {
        world_timeout(self.timeout)
    }

    /// Takes part in one exchange of `topic`: contributes `part`, and returns the parts of all ranks.
    pub fn exchange_all(
        &self,
        topic: &str,
        part: &[u8],
        deadline: Instant,
        interrupted: impl Fn() -> bool,
    ) -> Result<Vec<Vec<u8>>> {
        self.exchange(topic, None, part, deadline, Some(&interrupted))
    }

    /// Takes part in one exchange of all ranks, or of `members`.
    pub(super) fn exchange(
        &self,
        topic: &str,
        members: Option<&Arc<[usize]>>,
        part: &[u8],
        deadline: Instant,
        interrupted: Option<&dyn Fn() -> bool>,
    ) -> Result<Vec<Vec<u8>>> {
        self.session
            .exchange(topic, members, part, deadline, interrupted)
    }

    /// As [`RankSession::ask`].
    pub(super) fn ask(
        &self,
        topic: &str,
        request: impl FnOnce(Duration) -> Request,
        deadline: Instant,
        interrupted: Option<&dyn Fn() -> bool>,
    ) -> Result<Answer> {
        self.session.ask(topic, request, deadline, interrupted)
    }

    /// As [`RankSession::send`].
    pub(super) fn send(&self, id: u64, request: Request) {
        self.session.send(id, request);
    }

    /// Returns the error for a failed request about `topic`.
    pub(super) fn error_of(&self, topic: &str, error: &RequestError) -> Error {
        self.session.error_of(topic, error)
    }

    /// Sets the departure that is reported when this value is dropped.
    pub(super) fn set_final_departure(&mut self, final_departure: Departure) {
        self.final_departure = final_departure;
    }
}

impl Drop for World {
    /// Leaves, so that the end of this rank is not reported as its death. A panicking rank reports the panic. A rank
    /// that still has communicators takes part in no further exchange of this world, and stays connected for the
    /// communicators.
    fn drop(&mut self) {
        if forked::is_child() {
            return;
        }
        let mut final_departure = std::mem::replace(&mut self.final_departure, Departure::Left);
        if final_departure == Departure::Left && std::thread::panicking() {
            final_departure = Departure::Failed(Failure::Error(panics::of_this_thread()));
        }
        self.session
            .inbox
            .record_world_end("this rank has left its world");
        let alone = Arc::strong_count(&self.session) == 1;
        self.session.end_world(final_departure, alone);
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World")
            .field("rank", &self.rank())
            .field("size", &self.size())
            .field("local_rank", &self.local_rank)
            .finish_non_exhaustive()
    }
}
