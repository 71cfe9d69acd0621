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
    /// Its communicators keep it as well.
    pub(crate) line: Resident<Arc<Line>>,
    /// What the others are told when this value goes.
    farewell: Departure,
    /// The network interface that the program named.
    pub(super) interface: Option<String>,
    /// Which rank of the epoch before each of its ranks was; empty in the first.
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
        let epoch = rendezvous.job.epoch;
        let span = tracing::info_span!(target: "nccl", "nccl.rendezvous", rank, nranks, epoch);
        let _entered = span.enter();
        let mailbox = Arc::new(Mailbox::default());
        let node = Node::first(&rendezvous, deadline, &mailbox, None)?;
        let job = (rendezvous.job.name.clone(), epoch);
        let link = Link::Node {
            node: Arc::clone(&node),
            generation: epoch,
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

    /// What follows from where and as what it has come.
    pub(super) fn settle_in(&mut self, rendezvous: &Rendezvous) {
        if let (true, Some(members)) = (rendezvous.counts_local, self.line.members().get()) {
            let host = &members[self.rank()].host;
            let before = members[..self.rank()].iter();
            self.local_rank = before.filter(|member| member.host == *host).count();
        }
        self.line.compare_clocks();
        self.interface = rendezvous.address.interface();
    }

    /// The world of a generation that this process has come into, or has gone on to.
    pub(super) fn entered(entered: &Entered, local_rank: usize, timeout: Duration) -> Self {
        Self::new(Line::of(entered), local_rank, timeout)
    }

    /// The worlds of `size` ranks that are threads of this process.
    pub fn threads(size: usize) -> Vec<Self> {
        assert!(size > 0, "a world has at least one rank");
        let threads = Threads::new(size);
        (0..size)
            .map(|rank| Self::local(&threads, rank, rank, Duration::from_secs(60)))
            .collect()
    }

    /// A world of one rank, for a program that can do without others.
    pub fn single() -> Self {
        Self::local(&Threads::new(1), 0, 0, Duration::from_secs(60))
    }

    /// A rank that is a thread of this process.
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

    /// How long [`barrier`](Self::barrier) and [`all_gather`](Self::all_gather) wait for the other ranks;
    /// 60 s unless set, or what the [`Rendezvous`] was given.
    pub fn set_timeout(&mut self, limit: Duration) {
        self.timeout = limit;
    }

    /// What its communicators keep of it.
    pub fn line(&self) -> &Arc<Line> {
        &self.line
    }

    /// The network interface that the program named for the ranks' own connection.
    pub fn interface(&self) -> Option<&str> {
        self.interface.as_deref()
    }

    /// As what `nccl-run`, torchrun, MPI or Slurm started the process that is rank `rank` here: the number before the lines
    /// of its output. After a recovery the two differ. `None` where no launcher gave a number, and for a rank that the world
    /// does not have.
    pub fn launcher_rank(&self, rank: usize) -> Option<usize> {
        self.line.members().get()?.get(rank)?.launched
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.line.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.line.size
    }

    /// This rank's number among the ranks of its host: the device that it usually takes.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Why the communicator of this world was ended that was ended last, on this rank; `None` while there is none.
    pub fn fault(&self) -> Option<Fault> {
        forked::check().ok()?;
        self.line.fault().map(|fault| Fault::clone(&fault))
    }

    /// What happens to the ranks of this world and to the communicators of this one, as it comes: who is there, first; then
    /// who leaves, fails, dies, is silent or answers again, who has not entered an operation, who coordinates, each
    /// [`Fault`], and the next epochs. It ends when the world, in its last epoch, is dropped.
    pub fn events(&self) -> Events {
        Events::of(self.line.happenings())
    }

    #[doc(hidden)]
    pub fn timeout(&self) -> Duration {
        world_limit(self.timeout)
    }

    /// One round of `topic`: gives a part, gets the parts of all.
    pub fn collect(
        &self,
        topic: &str,
        part: &[u8],
        deadline: Instant,
        interrupted: impl Fn() -> bool,
    ) -> Result<Vec<Vec<u8>>> {
        self.round(topic, None, part, deadline, Some(&interrupted))
    }

    /// One round of all ranks or of `members`.
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

    /// The error of a request about `topic` that did not end well.
    pub(super) fn explain(&self, topic: &str, incomplete: &Incomplete) -> Error {
        self.line.explain(topic, incomplete)
    }

    /// What the others are told when this value goes.
    pub(super) fn set_farewell(&mut self, farewell: Departure) {
        self.farewell = farewell;
    }
}

impl Drop for World {
    /// Says goodbye: a rank that ends is not a rank that died. One that panics says that. A rank whose
    /// communicators live on takes part in no exchange any more, and stays connected for their sake.
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
