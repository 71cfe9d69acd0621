//! One rank's view of all ranks.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::environment::Rendezvous;
use super::events::Events;
use super::incoming::Answer;
use super::launcher;
use super::line::{Line, Link};
use super::mailbox::Mailbox;
use super::member::Member;
use super::message::Incomplete;
use super::node::{Entered, Node};
use super::panics;
use super::request::Request;
use super::threads::Threads;
use crate::departure::{Departure, Failure};
use crate::error::{Error, ErrorKind, Result};
use crate::fault::Fault;
use crate::forked::{self, Resident};
use crate::time::deadline_after;
use nccl_base::from_outside::{FromOutside, world as world_limit};

/// All ranks of a job, seen from one of them.
pub struct World {
    pub(super) local_rank: usize,
    timeout: Duration,
    /// The line, shared with its communicators.
    pub(crate) line: Resident<Arc<Line>>,
    /// The departure that is reported when this value is dropped.
    farewell: Departure,
    /// The network interface that the program named.
    pub(super) interface: Option<String>,
    /// For each rank, its rank in the generation before; empty in the first.
    pub(super) from: Vec<Option<usize>>,
}

impl World {
    /// Meets the other ranks.
    pub fn join(mut rendezvous: Rendezvous) -> Result<Self> {
        let said = rendezvous.said.take();
        Self::meet(rendezvous).map_err(|error| match (said, error.kind()) {
            (Some(said), ErrorKind::Rendezvous { reason }) => {
                Error::rendezvous(format!("{reason}; {said}"))
            }
            _ => error,
        })
    }

    fn meet(rendezvous: Rendezvous) -> Result<Self> {
        forked::begin()?;
        if rendezvous.world_size == 0 {
            return Err(Error::rendezvous(
                "an observer's rendezvous has no rank to join as: use Observer::join",
            ));
        }
        rendezvous.job.check()?;
        FromOutside::of_process()?;
        launcher::own_rank()?;
        let deadline = deadline_after(world_limit(rendezvous.timeout));
        let (rank, nranks) = (rendezvous.rank, rendezvous.world_size);
        let generation = rendezvous.job.generation;
        let span = tracing::info_span!(target: "nccl", "nccl.rendezvous", rank, nranks, generation);
        let _entered = span.enter();
        let mailbox = Arc::new(Mailbox::default());
        let node = Node::first(&rendezvous, deadline, &mailbox, None)?;
        let job = (rendezvous.job.name.clone(), generation);
        let link = Link::Node {
            node: Arc::clone(&node),
            generation,
        };
        let line = Line::open(rank, nranks, job, link, mailbox);
        let entered = node
            .meet(deadline)
            .map_err(|why| line.explain("join", &why))?;
        let mut world = Self::new(line, rendezvous.local_rank, rendezvous.timeout);
        world.line.meet(entered.members());
        world.settle_in(&rendezvous);
        let address = &rendezvous.address;
        tracing::info!(name: "nccl.rendezvous.met", target: "nccl", rank, nranks, %address, "all ranks have met");
        Ok(world)
    }

    /// Sets what follows from the rendezvous and the identities of the ranks.
    pub(super) fn settle_in(&mut self, rendezvous: &Rendezvous) {
        if let (true, Some(members)) = (rendezvous.counts_local, self.line.members().get()) {
            let host = &members[self.rank()].host;
            let before = members[..self.rank()].iter();
            self.local_rank = before.filter(|member| member.host == *host).count();
        }
        self.line.compare_clocks();
        self.interface = rendezvous.address.interface();
    }

    /// The world of a generation that this process has joined, or has gone on to.
    pub(super) fn entered(entered: &Entered, local_rank: usize, timeout: Duration) -> Self {
        Self::new(Line::of(entered), local_rank, timeout)
    }

    /// Makes the worlds of `size` ranks that are threads of this process.
    pub fn threads(size: usize) -> Vec<Self> {
        assert!(size > 0, "a world has at least one rank");
        let threads = Threads::new(size);
        (0..size)
            .map(|rank| Self::local(&threads, rank, rank, Duration::from_secs(60)))
            .collect()
    }

    /// Makes a world of one rank, for a program that can do without others.
    pub fn single() -> Self {
        Self::local(&Threads::new(1), 0, 0, Duration::from_secs(60))
    }

    /// Makes the world of a rank that is a thread of this process.
    pub(super) fn local(
        threads: &Arc<Threads>,
        rank: usize,
        local_rank: usize,
        timeout: Duration,
    ) -> Self {
        let mailbox = Arc::clone(threads.mailbox(rank));
        let link = Link::Threads(Arc::clone(threads));
        let job = (threads.job(), threads.generation());
        let line = Line::open(rank, threads.size(), job, link, mailbox);
        line.meet(vec![Member::here(); threads.size()]);
        Self::new(line, local_rank, timeout)
    }

    fn new(line: Arc<Line>, local_rank: usize, timeout: Duration) -> Self {
        Self {
            local_rank,
            timeout,
            line: Resident::new(line),
            farewell: Departure::Left,
            interface: None,
            from: Vec::new(),
        }
    }

    /// Sets how long [`barrier`](Self::barrier) and [`all_gather`](Self::all_gather) wait for the other ranks;
    /// default 60 s, or the timeout of the [`Rendezvous`].
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Returns the line, which its communicators share.
    pub fn line(&self) -> &Arc<Line> {
        &self.line
    }

    /// Returns the network interface that the program named for the ranks' own connections.
    pub fn interface(&self) -> Option<&str> {
        self.interface.as_deref()
    }

    /// Returns the rank as which `nccl-run`, torchrun, MPI or Slurm started the process that is rank `rank` here: the number before the
    /// lines of its output. After a recovery the two differ. `None` where no launcher gave a number, and for a rank that the world does
    /// not have.
    pub fn launcher_rank(&self, rank: usize) -> Option<usize> {
        self.line.members().get()?.get(rank)?.launched
    }

    /// Returns this rank.
    pub fn rank(&self) -> usize {
        self.line.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.line.size
    }

    /// Returns this rank's number among the ranks of its host: the usual index of its device.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Returns the fault of the communicator of this world that ended last on this rank; `None` if none has.
    pub fn fault(&self) -> Option<Fault> {
        forked::check().ok()?;
        self.line.fault().map(|fault| Fault::clone(&fault))
    }

    /// Returns a reader of the events of this world's ranks and of this rank's communicators: first the ranks present; then
    /// departures, failures, deaths, silence and answers, late operations, new coordinators, each
    /// [`Fault`], and the next generations. The events end when the world, in its last generation, is dropped.
    pub fn events(&self) -> Events {
        Events::of(self.line.happenings())
    }

    #[doc(hidden)]
    pub fn timeout(&self) -> Duration {
        world_limit(self.timeout)
    }

    /// Takes part in one round of `topic`: gives a part, and returns the parts of all.
    pub fn collect(
        &self,
        topic: &str,
        part: &[u8],
        deadline: Instant,
        interrupted: impl Fn() -> bool,
    ) -> Result<Vec<Vec<u8>>> {
        self.round(topic, None, part, deadline, Some(&interrupted))
    }

    /// Takes part in one round of all ranks or of `members`.
    pub(super) fn round(
        &self,
        topic: &str,
        members: Option<&Arc<[usize]>>,
        part: &[u8],
        deadline: Instant,
        interrupted: Option<&dyn Fn() -> bool>,
    ) -> Result<Vec<Vec<u8>>> {
        self.line.round(topic, members, part, deadline, interrupted)
    }

    /// As [`Line::ask`].
    pub(super) fn ask(
        &self,
        topic: &str,
        request: impl FnOnce(Duration) -> Request,
        deadline: Instant,
        interrupted: Option<&dyn Fn() -> bool>,
        refused: Option<Incomplete>,
    ) -> Result<Answer> {
        self.line
            .ask(topic, request, deadline, interrupted, refused)
    }

    /// As [`Line::send`].
    pub(super) fn send(&self, id: u64, request: Request) {
        self.line.send(id, request);
    }

    /// The error of a request about `topic` that failed.
    pub(super) fn explain(&self, topic: &str, incomplete: &Incomplete) -> Error {
        self.line.explain(topic, incomplete)
    }

    /// Sets the departure that is reported when this value is dropped.
    pub(super) fn set_farewell(&mut self, farewell: Departure) {
        self.farewell = farewell;
    }
}

impl Drop for World {
    /// Says goodbye, so that the end of a rank is not reported as its death. A panicking rank reports the panic. A rank whose
    /// communicators live on takes part in no exchange any more, and stays connected for them.
    fn drop(&mut self) {
        if forked::is_child() {
            return;
        }
        let mut farewell = std::mem::replace(&mut self.farewell, Departure::Left);
        if farewell == Departure::Left && std::thread::panicking() {
            farewell = Departure::Failed(Failure::Said(panics::of_this_thread()));
        }
        self.line
            .mailbox
            .nothing_happens("this rank has left its world");
        let alone = Arc::strong_count(&self.line) == 1;
        self.line.world_ends(farewell, alone);
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
