//! One rank's view of all ranks.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::client;
use super::environment::Rendezvous;
use super::events::Events;
use super::hub::{Hub, Outlet};
use super::incoming::Answer;
use super::launcher;
use super::line::{Line, Link, Member};
use super::mailbox::Mailbox;
use super::message::Incomplete;
use super::node::{self, Entered, Node};
use super::panics;
use super::place::{self, Address};
use super::process;
use super::reader::Sink;
use super::request::Request;
use super::server::{Job, Server};
use super::threads::Threads;
use crate::departure::{Departure, Failure, ProcessEnd};
use crate::error::{Error, ErrorKind, Result};
use crate::fault::Fault;
use crate::forked::{self, Resident};
use crate::time::deadline_after;
use crate::visible;
use nccl_base::from_outside::{FromOutside, world as world_limit};
use nccl_base::wire;

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
    /// Where its ranks meet; `None` for threads of this process.
    pub(super) origin: Option<Origin>,
    /// Which rank of the epoch before each of its ranks was; empty in the first.
    pub(super) from: Vec<Option<usize>>,
}

/// Where and as what the ranks of a world meet, for its next epochs.
#[derive(Clone)]
pub(super) struct Origin {
    /// Where somebody who is new looks for the coordinator.
    pub(super) places: Vec<Address>,
    /// Where this epoch's rank 0 was found.
    pub(super) address: Address,
    pub(super) job: Job,
}

/// What each rank tells all others of itself.
#[derive(Serialize, Deserialize)]
pub(super) struct Introduction {
    pub(super) pid: u32,
    pub(super) host: String,
    /// Where it listens.
    pub(super) at: String,
    /// Of rank 0, under which its process has its number; empty for others.
    pub(super) kernel: String,
    pub(super) kernel_sum: u64,
    /// Which rank its launcher made it.
    pub(super) launched: Option<usize>,
}

/// Opens rank 0's door.
pub(super) type Open = Box<dyn FnOnce(Arc<Hub>) -> Result<Server>>;

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
        if node::is_chosen() {
            return Self::meet_by_node(rendezvous, deadline);
        }
        let job = rendezvous.job.clone();
        let coordinating = (rendezvous.rank == 0).then(|| {
            let hub = Arc::new(Hub::of_epoch(rendezvous.world_size, job.epoch));
            let address = rendezvous.address.clone();
            let open: Open = Box::new(move |hub| Server::start(&address, hub, job));
            (hub, open)
        });
        let beside = rendezvous.rank.to_string();
        let address = rendezvous.address.clone();
        Self::enter(rendezvous, address, coordinating, &beside, deadline, None)
            .map_err(|(error, _)| error)
    }

    /// Meets the others with the machines.
    fn meet_by_node(rendezvous: Rendezvous, deadline: Instant) -> Result<Self> {
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
    fn settle_in(&mut self, rendezvous: &Rendezvous) {
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
        let job = entered.node.job_name().to_owned();
        Self::new(node::line(entered, &job), local_rank, timeout)
    }

    /// As [`rejoin`](Self::rejoin), with the machines.
    pub(super) fn rejoin_by_node(rendezvous: &Rendezvous, deadline: Instant) -> Result<Self> {
        let entered = Node::joiner(rendezvous, deadline)?;
        let mut world = Self::entered(&entered, rendezvous.local_rank, rendezvous.timeout);
        world.settle_in(rendezvous);
        world.from = vec![None; world.size()];
        Ok(world)
    }

    /// Meets the ranks of an epoch at `found`, where its rank 0 is, unless `in_vain`. That one opens its door for its hub; another
    /// rank has a door of its own, beside the place of the rendezvous and with the name `beside`.
    ///
    /// # Errors
    /// With what there was of its line: others may have to hear from rank 0 that it came to nothing.
    pub(super) fn enter(
        rendezvous: Rendezvous,
        found: Address,
        coordinating: Option<(Arc<Hub>, Open)>,
        beside: &str,
        deadline: Instant,
        in_vain: client::InVain<'_>,
    ) -> Result<Self, (Error, Option<Arc<Line>>)> {
        let places = rendezvous.places();
        let Rendezvous {
            rank,
            world_size,
            local_rank,
            address,
            others: _,
            timeout,
            job,
            counts_local,
            restarted: _,
            witnesses: _,
            said: _,
        } = rendezvous;
        let span = tracing::info_span!(
            target: "nccl",
            "nccl.rendezvous",
            rank,
            nranks = world_size,
            epoch = job.epoch
        );
        let _entered = span.enter();
        let alone = |error| (error, None);
        let mailbox = Arc::new(Mailbox::default());
        mailbox.keep_log(rank, world_size);
        let identity = (job.name.clone(), job.epoch);
        let origin = Origin {
            places: places.clone(),
            address: found.clone(),
            job: job.clone(),
        };
        let at: String;
        let mut reader = None;
        let link = if let Some((hub, open)) = coordinating {
            attach(&hub, rank, &mailbox);
            let server = open(Arc::clone(&hub)).map_err(alone)?;
            at = server.at().to_owned();
            Link::Here {
                hub,
                server: Arc::new(server),
            }
        } else {
            let sink = Arc::clone(&mailbox) as Arc<dyn Sink>;
            let claim = client::Claim::rank(rank, world_size);
            let coming =
                client::join(&found, &job, claim, deadline, sink, in_vain).map_err(alone)?;
            let connection = Arc::clone(&coming.connection);
            reader = Some(Arc::clone(&coming));
            let listener =
                place::listen_beside(&address, beside, connection.fd()).map_err(alone)?;
            let hub = Hub::dormant(world_size, rank, job.epoch, Arc::clone(&mailbox));
            let on_word = move |end: &ProcessEnd| coming.rank_0_ended(end);
            let server =
                Server::beside(listener, rank, hub, job, places, on_word).map_err(alone)?;
            at = server.at().to_owned();
            Link::Elsewhere {
                connection,
                server: Arc::new(server),
            }
        };
        let line = Line::open(rank, world_size, identity, link, mailbox);
        let mut world = Self::new(line, local_rank, timeout);
        world.origin = Some(origin);
        world.send(u64::MAX, Request::Listens { at: at.clone() });
        let (members, kernel) = match world.introduce(&at, deadline) {
            Ok(introduced) => introduced,
            Err(error) => return Err((error, Some(Arc::clone(&world.line)))),
        };
        if let Some(reader) = reader {
            reader.watch_rank_0(members[0].pid.into(), &kernel);
        }
        if counts_local {
            let host = &members[rank].host;
            let before = members[..rank].iter();
            world.local_rank = before.filter(|member| member.host == *host).count();
        }
        if let Some(server) = world.line.own_door() {
            server.know(members.iter().map(|member| member.at.clone()).collect());
        }
        world.line.meet(members);
        world.line.compare_clocks();
        world.interface = address.interface();
        tracing::info!(name: "nccl.rendezvous.met", target: "nccl", rank, nranks = world_size, address = %found, "all ranks have met");
        Ok(world)
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
            origin: None,
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

    /// Everybody tells everybody host and process. With them comes where rank 0's process has its number.
    fn introduce(&self, at: &str, deadline: Instant) -> Result<(Vec<Member>, String)> {
        // Everybody watches rank 0 alone.
        let kernel = match self.rank() {
            0 => process::kernel(),
            _ => "",
        };
        let own = Introduction {
            pid: std::process::id(),
            host: crate::host::name().to_string(),
            at: at.to_owned(),
            kernel: kernel.to_owned(),
            kernel_sum: process::kernel_sum(),
            launched: launcher::own_rank()?,
        };
        let parts = self.collect("join", &wire::encode(&own), deadline, || false)?;
        let mut members = vec![Member::here(); self.size()];
        let mut kernel = String::new();
        for (rank, (member, part)) in members.iter_mut().zip(&parts).enumerate() {
            if let Ok(other) = wire::decode::<Introduction>(part) {
                member.at = Some(other.at);
                member.pid = other.pid;
                member.host = visible::name(&other.host);
                member.kernel = other.kernel_sum;
                member.launched = other.launched;
                if rank == 0 {
                    kernel = other.kernel;
                }
            }
        }
        // Processes that were started by hand under a launcher all have its variables of one rank.
        let launched = members.iter().filter_map(|member| member.launched);
        let known = launched.clone().count();
        if launched.collect::<HashSet<_>>().len() < known {
            members.iter_mut().for_each(|member| member.launched = None);
        }
        Ok((members, kernel))
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
        Events::of_rank(self.line.happenings())
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

    /// Where a rank listens; `None` for one that is a thread of this process.
    #[allow(dead_code, reason = "what takes over from rank 0 needs it")]
    pub(crate) fn address_of(&self, rank: usize) -> Option<&str> {
        self.line.address_of(rank)
    }

    /// What the others are told when this value goes.
    pub(super) fn set_farewell(&mut self, farewell: Departure) {
        self.farewell = farewell;
    }
}

fn attach(hub: &Hub, rank: usize, mailbox: &Arc<Mailbox>) {
    let host = crate::host::name();
    let who = (&host[..], std::process::id().into(), process::kernel());
    // Nobody can be there before the ranks of the hub's own process.
    let _ = hub.attach(rank, Outlet::Local(Arc::clone(mailbox)), who, None);
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
