//! One rank's view of all ranks.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::client;
use super::connection::Connection;
use super::environment::Rendezvous;
use super::frame::{Fields, LARGEST, put_bytes, put_number};
use super::hub::{Hub, Outlet};
use super::mailbox::{Mailbox, Waited};
use super::message::{Answer, Departure, Incomplete, Missing, Request, Round};
use super::place;
use super::server::{PATIENCE, Server};
use crate::communicator::{CommunicatorBuilder, lock};
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Result};
use crate::time::deadline_after;

/// All ranks of a job, seen from one of them: who they are, and a way to talk beside NCCL.
///
/// ```
/// use nccl::World;
///
/// let worlds = World::threads(2);
/// std::thread::scope(|scope| {
///     for world in worlds {
///         scope.spawn(move || {
///             let names = world.all_gather("name", format!("rank {}", world.rank()).as_bytes())?;
///             assert_eq!(names, [b"rank 0", b"rank 1"]);
///             Ok::<(), nccl::Error>(())
///         });
///     }
/// });
/// ```
pub struct World {
    rank: usize,
    size: usize,
    local_rank: usize,
    timeout: Duration,
    link: Link,
    pub(super) mailbox: Arc<Mailbox>,
    members: Vec<Member>,
    /// How often each topic was used: the n-th use on one rank meets the n-th use on every other.
    rounds: Mutex<HashMap<String, u64>>,
    /// Whether its communicators are NCCL's.
    needs_nccl: bool,
    /// The job's name and epoch.
    job: (String, u64),
    /// What the others are told when this value goes.
    farewell: Departure,
}

enum Link {
    Here {
        hub: Arc<Hub>,
        _server: Option<Server>,
    },
    Elsewhere {
        connection: Arc<Connection>,
        /// This rank's own door, which stays open for the life of the world.
        _server: Server,
    },
}

/// How long a goodbye may take to be written.
const FAREWELL: Duration = Duration::from_secs(1);

/// What is known of a rank.
#[derive(Clone, Debug)]
struct Member {
    host: String,
    pid: u32,
    /// Where it listens, unless it is a thread of this process.
    at: Option<String>,
}

impl World {
    /// Meets the other ranks.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`] within the rendezvous' limit (60 s unless set): rank 0 does not answer,
    /// some ranks never came (they are named), another process claims this rank, or the ranks disagree
    /// on how many they are. [`ErrorKind::Io`] when the socket cannot be made.
    ///
    /// ```
    /// use nccl::{Rendezvous, World};
    ///
    /// let path = std::env::temp_dir().join(format!("nccl-doc-{}.sock", std::process::id()));
    /// let world = World::join(Rendezvous::unix(path, 0, 1)?)?;
    /// assert_eq!(world.size(), 1);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn join(rendezvous: Rendezvous) -> Result<Self> {
        let Rendezvous {
            rank,
            world_size,
            local_rank,
            address,
            timeout,
            job,
            counts_local,
        } = rendezvous;
        let deadline = deadline_after(timeout);
        let span = tracing::info_span!(target: "nccl", "nccl.rendezvous", rank, world_size);
        let _entered = span.enter();
        let mailbox = Arc::new(Mailbox::default());
        let identity = (job.name.clone(), job.epoch);
        let at: String;
        let link = if rank == 0 {
            let hub = Arc::new(Hub::new(world_size));
            attach(&hub, rank, &mailbox);
            let server = Server::start(&address, Arc::clone(&hub), job)?;
            at = server.at().to_owned();
            Link::Here {
                hub,
                _server: Some(server),
            }
        } else {
            let mailbox = Arc::clone(&mailbox);
            let connection = client::join(&address, &job, rank, world_size, deadline, mailbox)?;
            let listener = place::listen_beside(&address, rank, connection.fd())?;
            let server = Server::beside(listener, rank, job)?;
            at = server.at().to_owned();
            Link::Elsewhere {
                connection,
                _server: server,
            }
        };
        let mut world = Self::new(rank, world_size, local_rank, timeout, link, mailbox);
        world.job = identity;
        world.introduce(&at, deadline)?;
        if counts_local {
            let host = &world.members[rank].host;
            let before = world.members[..rank].iter();
            world.local_rank = before.filter(|member| member.host == *host).count();
        }
        tracing::info!(target: "nccl", %address, "all ranks have met");
        Ok(world)
    }

    /// The worlds of `size` ranks that are threads of this process.
    ///
    /// # Panics
    /// When `size` is 0.
    ///
    /// ```
    /// let worlds = nccl::World::threads(4);
    /// assert_eq!(worlds.len(), 4);
    /// assert_eq!(worlds[3].rank(), 3);
    /// ```
    #[must_use]
    pub fn threads(size: usize) -> Vec<Self> {
        assert!(size > 0, "a world has at least one rank");
        let hub = Arc::new(Hub::new(size));
        (0..size)
            .map(|rank| Self::local(&hub, rank, rank, Duration::from_secs(60)))
            .collect()
    }

    /// A world of one rank, for a program that can do without others.
    ///
    /// Its communicators load no libnccl: every operation is a copy on the device, or nothing. Only
    /// [`Communicator::pre_mul_sum`](crate::Communicator::pre_mul_sum) is missing. To have NCCL all the
    /// same, name the library ([`CommunicatorBuilder::library`]), or make a world with
    /// [`threads(1)`](Self::threads).
    ///
    /// ```
    /// assert_eq!(nccl::World::single().size(), 1);
    /// ```
    #[must_use]
    pub fn single() -> Self {
        let mut world = Self::local(&Arc::new(Hub::new(1)), 0, 0, Duration::from_secs(60));
        world.needs_nccl = false;
        world
    }

    fn local(hub: &Arc<Hub>, rank: usize, local_rank: usize, timeout: Duration) -> Self {
        let mailbox = Arc::new(Mailbox::default());
        attach(hub, rank, &mailbox);
        let link = Link::Here {
            hub: Arc::clone(hub),
            _server: None,
        };
        Self::new(rank, hub.size(), local_rank, timeout, link, mailbox)
    }

    pub(crate) fn needs_nccl(&self) -> bool {
        self.needs_nccl
    }

    fn new(
        rank: usize,
        size: usize,
        local_rank: usize,
        timeout: Duration,
        link: Link,
        mailbox: Arc<Mailbox>,
    ) -> Self {
        let own = Member {
            host: crate::host::name().to_string(),
            pid: std::process::id(),
            at: None,
        };
        let members = vec![own; size];
        Self {
            rank,
            size,
            local_rank,
            timeout,
            link,
            mailbox,
            members,
            rounds: Mutex::default(),
            needs_nccl: true,
            job: (String::new(), 0),
            farewell: Departure::Left,
        }
    }

    /// How long [`barrier`](Self::barrier) and [`all_gather`](Self::all_gather) wait for the other ranks;
    /// 60 s unless set, or what the [`Rendezvous`] was given.
    ///
    /// ```
    /// use std::time::Duration;
    /// let world = nccl::World::single().with_timeout(Duration::from_secs(5));
    /// ```
    #[must_use]
    pub fn with_timeout(mut self, limit: Duration) -> Self {
        self.timeout = limit;
        self
    }

    /// Everybody tells everybody host and process.
    fn introduce(&mut self, at: &str, deadline: Instant) -> Result<()> {
        let mut own = Vec::new();
        put_number(&mut own, u64::from(std::process::id()));
        put_bytes(&mut own, crate::host::name().as_bytes());
        put_bytes(&mut own, at.as_bytes());
        let parts = self.collect("join", &own, deadline, || false)?;
        for (member, part) in self.members.iter_mut().zip(&parts) {
            let mut fields = Fields(part);
            if let (Ok(pid), Ok(host), Ok(at)) = (fields.number(), fields.bytes(), fields.text()) {
                member.at = Some(at);
                member.pid = u32::try_from(pid).unwrap_or_default();
                member.host = String::from_utf8_lossy(host).into_owned();
            }
        }
        Ok(())
    }

    /// This rank.
    ///
    /// ```
    /// assert_eq!(nccl::World::single().rank(), 0);
    /// ```
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    ///
    /// ```
    /// assert_eq!(nccl::World::threads(4)[0].size(), 4);
    /// ```
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// This rank's number among the ranks of its host: the device that it usually takes.
    ///
    /// ```
    /// assert_eq!(nccl::World::threads(4)[3].local_rank(), 3);
    /// ```
    #[must_use]
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Starts to make a communicator of all ranks. Every rank has to make it, under the same name.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let world = nccl::World::single();
    /// let tensor_parallel = world.communicator("model/tp").stream(&stream).build()?;
    /// let expert_parallel = world.communicator("model/ep").stream(&stream).build()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn communicator<'a>(&'a self, name: &'a str) -> CommunicatorBuilder<'a> {
        CommunicatorBuilder::with_world(name, self)
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// One round of `topic`: gives a part, gets the parts of all.
    pub(crate) fn collect(
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
        let number = {
            let mut rounds = lock(&self.rounds);
            let key = match members {
                None => topic.to_owned(),
                Some(members) => format!("{topic} of {members:?}"),
            };
            let next = rounds.entry(key).or_insert(0);
            *next += 1;
            *next - 1
        };
        let round = Round {
            topic: topic.to_owned(),
            number,
            members: members.cloned(),
        };
        let too_large = part.len() > LARGEST;
        let request = |patience| Request::Collect {
            round,
            patience,
            // The hub has to hear of the round, so that it can end it for all.
            part: if too_large { Vec::new() } else { part.to_vec() },
        };
        let refused = too_large.then_some(Incomplete::TooLarge { bytes: part.len() });
        match self.ask(topic, request, deadline, interrupted, refused)? {
            Answer::Parts(parts) => {
                Ok(Arc::try_unwrap(parts).unwrap_or_else(|parts| parts.to_vec()))
            }
            _ => Err(self.explain(topic, &Incomplete::OtherMembers)),
        }
    }

    /// Sends a request and waits for its answer; with `refused`, only to take it back.
    pub(super) fn ask(
        &self,
        topic: &str,
        request: impl FnOnce(Duration) -> Request,
        deadline: Instant,
        interrupted: Option<&dyn Fn() -> bool>,
        refused: Option<Incomplete>,
    ) -> Result<Answer> {
        let started = Instant::now();
        let ticket = self.mailbox.ticket();
        self.send(
            ticket.id,
            request(deadline.saturating_duration_since(started)),
        );
        let give_up = |incomplete: &Incomplete, reason: &str| {
            let reason = reason.to_owned();
            self.send(ticket.id, Request::Cancel { reason });
            Err(self.explain(topic, incomplete))
        };
        if let Some(incomplete) = refused {
            return give_up(&incomplete, "its part is too large");
        }
        let mut patience = deadline;
        loop {
            match ticket.wait(patience, interrupted) {
                Waited::Answer(Answer::Incomplete(incomplete)) => {
                    return Err(self.explain(topic, &incomplete));
                }
                Waited::Answer(answer) => return Ok(answer),
                Waited::Closed(why) => {
                    let departure = self.mailbox.departure(0);
                    let departure = departure.unwrap_or(Departure::Lost(why));
                    let who = self.describe(0);
                    let mut text = format!("{who} is gone, and {topic:?} with it: {departure}");
                    // It may have left because of somebody else.
                    if let Some((rank, first)) = self.mailbox.first_failed()
                        && rank != 0
                    {
                        let first = format!("; before that, {}: {first}", self.describe(rank));
                        text.push_str(&first);
                    }
                    return Err(Error::rendezvous(text));
                }
                Waited::Interrupted => {
                    return give_up(&Incomplete::Interrupted, "its abort signal was given");
                }
                // The hub keeps the deadline, so that all hear the same.
                Waited::Late => match &self.link {
                    Link::Here { hub, .. } => {
                        hub.tick(Instant::now());
                        patience = Instant::now() + Duration::from_millis(1);
                    }
                    Link::Elsewhere { .. } if patience == deadline => {
                        patience = deadline + PATIENCE
                    }
                    // This is for the case that rank 0 stands still.
                    Link::Elsewhere { .. } => {
                        let silent = Incomplete::TimedOut {
                            missing: vec![Missing {
                                rank: 0,
                                phase: Some((String::from("no answer"), started.elapsed())),
                            }],
                            waited: started.elapsed(),
                            remarks: Vec::new(),
                        };
                        return give_up(&silent, "it got no answer");
                    }
                },
            }
        }
    }

    /// Sends a request whose answer, if any, comes under `id`.
    pub(super) fn send(&self, id: u64, request: Request) {
        match &self.link {
            Link::Here { hub, .. } => {
                hub.handle(self.rank, id, request);
                hub.flush();
            }
            Link::Elsewhere { connection, .. } => {
                connection.enqueue(request.encode(id));
                connection.flush_quietly();
            }
        }
    }

    pub(super) fn job(&self) -> (&str, u64) {
        (&self.job.0, self.job.1)
    }

    /// Where a rank listens; `None` for one that is a thread of this process.
    #[allow(dead_code, reason = "what takes over from rank 0 needs it")]
    pub(crate) fn address_of(&self, rank: usize) -> Option<&str> {
        self.members.get(rank)?.at.as_deref()
    }

    /// What the others are told when this value goes.
    pub(super) fn set_farewell(&mut self, farewell: Departure) {
        self.farewell = farewell;
    }

    /// A rank with its host and process.
    pub(crate) fn describe(&self, rank: usize) -> String {
        match self.members.get(rank) {
            Some(Member { host, pid, .. }) => format!("rank {rank} ({host}, pid {pid})"),
            None => format!("rank {rank}"),
        }
    }
}

fn attach(hub: &Hub, rank: usize, mailbox: &Arc<Mailbox>) {
    let who = format!("{}, pid {}", crate::host::name(), std::process::id());
    // Nobody can be there before the ranks of the hub's own process.
    let _ = hub.attach(rank, Outlet::Local(Arc::clone(mailbox)), who, None);
}

impl Drop for World {
    /// Says goodbye: a rank that ends is not a rank that died. One that panics says that.
    fn drop(&mut self) {
        let mut farewell = std::mem::replace(&mut self.farewell, Departure::Left);
        if farewell == Departure::Left && std::thread::panicking() {
            farewell = Departure::Failed(String::from("its thread panicked"));
        }
        match &self.link {
            Link::Here { hub, .. } => hub.leave(self.rank, farewell),
            Link::Elsewhere { connection, .. } => {
                let last = match farewell {
                    Departure::Failed(chain) => Request::Fail { chain },
                    _ => Request::Goodbye,
                };
                connection.enqueue(last.encode(0));
                // A rank 0 that is gone misses nothing.
                let _ = connection.drain(Instant::now() + FAREWELL);
                connection.forget();
                connection.shut();
            }
        }
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World")
            .field("rank", &self.rank)
            .field("size", &self.size)
            .field("local_rank", &self.local_rank)
            .finish_non_exhaustive()
    }
}
