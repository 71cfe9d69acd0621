//! One rank's view of all ranks.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use super::environment::Rendezvous;
use super::store::{Incomplete, LARGEST, Store};
use super::wire::{Client, Fields, Server, put_bytes, put_number};
use crate::communicator::{CommunicatorBuilder, lock};
use crate::error::{Error, ErrorKind, Result};
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
    members: Vec<Member>,
    /// How often each topic was used: the n-th use on one rank meets the n-th use on every other.
    rounds: Mutex<HashMap<String, u64>>,
    /// Whether its communicators are NCCL's.
    needs_nccl: bool,
}

enum Link {
    Here {
        store: Arc<Store>,
        _server: Option<Server>,
    },
    Elsewhere(Mutex<Client>),
}

/// What is known of a rank.
#[derive(Clone, Debug)]
struct Member {
    host: String,
    pid: u32,
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
        } = rendezvous;
        let deadline = deadline_after(timeout);
        let span = tracing::info_span!(target: "nccl", "nccl.rendezvous", rank, world_size);
        let _entered = span.enter();
        let link = if rank == 0 {
            let store = Arc::new(Store::new(world_size));
            let server = Server::start(&address, Arc::clone(&store), world_size)?;
            Link::Here {
                store,
                _server: Some(server),
            }
        } else {
            Link::Elsewhere(Mutex::new(Client::connect(
                &address, rank, world_size, deadline,
            )?))
        };
        let mut world = Self::new(rank, world_size, local_rank, timeout, link);
        world.introduce(deadline)?;
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
        let store = Arc::new(Store::new(size));
        (0..size)
            .map(|rank| {
                let link = Link::Here {
                    store: Arc::clone(&store),
                    _server: None,
                };
                Self::new(rank, size, rank, Duration::from_secs(60), link)
            })
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
        let link = Link::Here {
            store: Arc::new(Store::new(1)),
            _server: None,
        };
        let mut world = Self::new(0, 1, 0, Duration::from_secs(60), link);
        world.needs_nccl = false;
        world
    }

    pub(crate) fn needs_nccl(&self) -> bool {
        self.needs_nccl
    }

    fn new(rank: usize, size: usize, local_rank: usize, timeout: Duration, link: Link) -> Self {
        let own = Member {
            host: crate::host::name().to_string(),
            pid: std::process::id(),
        };
        let members = vec![own; size];
        Self {
            rank,
            size,
            local_rank,
            timeout,
            link,
            members,
            rounds: Mutex::default(),
            needs_nccl: true,
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
    fn introduce(&mut self, deadline: Instant) -> Result<()> {
        let mut own = Vec::new();
        put_number(&mut own, u64::from(std::process::id()));
        put_bytes(&mut own, crate::host::name().as_bytes());
        let parts = self.collect("join", &own, deadline, || false)?;
        for (member, part) in self.members.iter_mut().zip(&parts) {
            let mut fields = Fields(part);
            if let (Some(pid), Some(host)) = (fields.number(), fields.bytes()) {
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

    /// Waits until every rank has come here.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`] names the ranks that did not come within the world's limit, or the one
    /// that is gone.
    ///
    /// ```
    /// nccl::World::single().barrier("weights are loaded")?;
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn barrier(&self, name: &str) -> Result<()> {
        let topic = format!("barrier/{name}");
        self.collect(&topic, &[], deadline_after(self.timeout), || false)
            .map(drop)
    }

    /// Gives `bytes` to every rank, and returns those of all ranks, by rank.
    ///
    /// For small host values: addresses, settings, hashes.
    ///
    /// # Errors
    /// As [`barrier`](Self::barrier); [`ErrorKind::Io`] beyond 64 MiB for all ranks together.
    ///
    /// ```
    /// let hosts = nccl::World::single().all_gather("host", b"node-a")?;
    /// assert_eq!(hosts, [b"node-a"]);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn all_gather(&self, name: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let topic = format!("gather/{name}");
        self.collect(&topic, bytes, deadline_after(self.timeout), || false)
    }

    /// One round of `topic`: gives a part, gets the parts of all.
    pub(crate) fn collect(
        &self,
        topic: &str,
        part: &[u8],
        deadline: Instant,
        interrupted: impl Fn() -> bool,
    ) -> Result<Vec<Vec<u8>>> {
        let started = Instant::now();
        let round = {
            let mut rounds = lock(&self.rounds);
            let next = rounds.entry(topic.to_owned()).or_insert(0);
            *next += 1;
            *next - 1
        };
        let collected = match &self.link {
            Link::Here { store, .. } => store
                .collect(
                    topic,
                    round,
                    self.rank,
                    part.to_vec(),
                    deadline,
                    interrupted,
                )
                .map(|parts| parts.to_vec()),
            Link::Elsewhere(client) => match turn(client, deadline, &interrupted) {
                Ok(mut client) => client
                    .collect(topic, round, part, self.size, deadline, interrupted)
                    .map_err(|error| {
                        Error::rendezvous(format!(
                            "{} is gone: its connection failed during {topic:?}: {error}",
                            self.describe(0)
                        ))
                    })?,
                Err(incomplete) => Err(incomplete),
            },
        };
        collected.map_err(|incomplete| self.explain(topic, incomplete, started))
    }

    fn explain(&self, topic: &str, incomplete: Incomplete, started: Instant) -> Error {
        match incomplete {
            Incomplete::TimedOut { missing } => {
                let who = match missing[..] {
                    [rank] => format!("rank {rank}"),
                    _ => format!("ranks {}", ranges(&missing)),
                };
                Error::rendezvous(format!(
                    "{who} of {} did not come to {topic:?} within {:.1} s",
                    self.size,
                    started.elapsed().as_secs_f64()
                ))
            }
            Incomplete::Gone { rank, reason } => Error::rendezvous(format!(
                "{} will not come to {topic:?}: {reason}",
                self.describe(rank)
            )),
            Incomplete::Twice { rank } => Error::rendezvous(format!(
                "rank {rank} came to {topic:?} twice: two processes or threads use one rank"
            )),
            Incomplete::TooLarge { bytes } => {
                let limit = LARGEST >> 20;
                let error = std::io::Error::new(
                    std::io::ErrorKind::InvalidInput,
                    format!("{bytes} bytes are more than the {limit} MiB of all ranks together"),
                );
                Error::io(format!("exchanging {topic:?}"))(error)
            }
            Incomplete::Busy => Error::rendezvous(format!(
                "{topic:?} had no turn within {:.1} s: another thread of rank {} was in an exchange \
                 of its own, and a world has one at a time",
                started.elapsed().as_secs_f64(),
                self.rank
            )),
            Incomplete::Interrupted => Error::new(ErrorKind::Aborted {
                reason: format!("its abort signal was given during {topic:?}"),
            }),
        }
    }

    /// A rank with its host and process.
    pub(crate) fn describe(&self, rank: usize) -> String {
        match self.members.get(rank) {
            Some(Member { host, pid }) => format!("rank {rank} ({host}, pid {pid})"),
            None => format!("rank {rank}"),
        }
    }
}

/// The one connection to rank 0, which another thread of this rank may be using.
fn turn<'c>(
    client: &'c Mutex<Client>,
    deadline: Instant,
    interrupted: impl Fn() -> bool,
) -> Result<MutexGuard<'c, Client>, Incomplete> {
    loop {
        match client.try_lock() {
            Ok(client) => return Ok(client),
            Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {}
        }
        if interrupted() {
            return Err(Incomplete::Interrupted);
        }
        if Instant::now() >= deadline {
            return Err(Incomplete::Busy);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// `0-2,5` for 0, 1, 2 and 5.
fn ranges(ranks: &[usize]) -> String {
    let mut text = String::new();
    let mut rest = ranks;
    while let Some((&first, _)) = rest.split_first() {
        let length = rest
            .iter()
            .zip(first..)
            .take_while(|(rank, next)| **rank == *next)
            .count();
        if !text.is_empty() {
            text.push(',');
        }
        text.push_str(&first.to_string());
        if length > 1 {
            text.push_str(&format!("-{}", first + length - 1));
        }
        rest = &rest[length..];
    }
    text
}

impl Drop for World {
    /// Says goodbye: a rank that ends is not a rank that died.
    fn drop(&mut self) {
        match &self.link {
            Link::Here { store, .. } => store.leave(self.rank, "it left the world"),
            Link::Elsewhere(client) => lock(client).goodbye(),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_listed_in_ranges() {
        assert_eq!(ranges(&[0, 1, 2, 5]), "0-2,5");
        assert_eq!(ranges(&[3]), "3");
        assert_eq!(ranges(&[1, 3, 4]), "1,3-4");
    }

    fn rendezvous(name: &str, rank: usize, size: usize) -> Rendezvous {
        let path = std::env::temp_dir().join(format!("nccl-{name}-{}.sock", std::process::id()));
        Rendezvous::unix(path, rank, size)
            .unwrap()
            .timeout(Duration::from_secs(20))
    }

    #[test]
    fn ranks_meet_at_a_socket_and_talk() {
        std::thread::scope(|scope| {
            for rank in [2, 0, 1] {
                scope.spawn(move || {
                    let world = World::join(rendezvous("meet", rank, 3)).unwrap();
                    for turn in 0..5u8 {
                        let parts = world.all_gather("x", &[rank as u8, turn]).unwrap();
                        assert_eq!(parts, [[0, turn], [1, turn], [2, turn]]);
                    }
                    world.barrier("end").unwrap();
                });
            }
        });
    }

    #[test]
    fn a_rank_that_leaves_is_named_at_once() {
        std::thread::scope(|scope| {
            scope.spawn(|| drop(World::join(rendezvous("leave", 1, 2)).unwrap()));
            let world = World::join(rendezvous("leave", 0, 2)).unwrap();
            let error = world.barrier("never").unwrap_err().to_string();
            assert!(
                error.contains("rank 1") && error.contains("left the world"),
                "{error}"
            );
        });
    }

    #[test]
    fn a_connection_that_ends_without_goodbye_is_a_rank_that_died() {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let Rendezvous { address, .. } = rendezvous("died", 1, 2);
                let deadline = Instant::now() + Duration::from_secs(20);
                let mut client = Client::connect(&address, 1, 2, deadline).unwrap();
                client
                    .collect("join", 0, &[], 2, deadline, || false)
                    .unwrap()
                    .unwrap();
            });
            let world = World::join(rendezvous("died", 0, 2)).unwrap();
            let error = world.barrier("never").unwrap_err().to_string();
            assert!(
                error.contains("rank 1") && error.contains("it died"),
                "{error}"
            );
        });
    }

    #[test]
    fn what_is_too_large_is_refused_on_every_rank_and_the_world_goes_on() {
        std::thread::scope(|scope| {
            for rank in 0..3 {
                scope.spawn(move || {
                    let world = World::join(rendezvous("large", rank, 3)).unwrap();
                    let error = world.all_gather("x", &vec![0; 22 << 20]).unwrap_err();
                    assert!(matches!(error.kind(), ErrorKind::Io { .. }), "{error}");
                    assert!(error.to_string().contains("64 MiB"), "{error}");
                    world.all_gather("x", &vec![0; 21 << 20]).unwrap();
                });
            }
        });
    }

    /// Rank 1 has one connection: its second exchange waits for the first, no longer than it may.
    #[test]
    fn an_exchange_waits_for_another_of_the_same_rank_within_its_own_limit() {
        let zero = std::thread::spawn(|| World::join(rendezvous("turn", 0, 2)).unwrap());
        let one = World::join(rendezvous("turn", 1, 2)).unwrap();
        let zero = zero.join().unwrap();
        let soon = Instant::now() + Duration::from_secs(20);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| one.collect("first", &[], soon, || false));
            std::thread::sleep(Duration::from_millis(100));
            let begun = Instant::now();
            let limit = begun + Duration::from_millis(50);
            let error = one.collect("second", &[], limit, || false).unwrap_err();
            assert!(error.to_string().contains("another thread"), "{error}");
            let error = one.collect("third", &[], soon, || true).unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::Aborted { .. }), "{error}");
            assert!(begun.elapsed() < Duration::from_secs(10));
            zero.collect("first", &[], soon, || false).unwrap();
            first.join().unwrap().unwrap();
        });
    }

    #[test]
    fn two_processes_cannot_be_one_rank_and_sizes_must_agree() {
        std::thread::scope(|scope| {
            let zero = scope.spawn(|| {
                World::join(rendezvous("claim", 0, 3).timeout(Duration::from_secs(2))).map(drop)
            });
            let first = scope.spawn(|| {
                World::join(rendezvous("claim", 1, 3).timeout(Duration::from_secs(2))).map(drop)
            });
            std::thread::sleep(Duration::from_millis(300));
            let other = World::join(rendezvous("claim", 1, 3))
                .unwrap_err()
                .to_string();
            assert!(other.contains("joined already"), "{other}");
            let other = World::join(rendezvous("claim", 1, 4))
                .unwrap_err()
                .to_string();
            assert!(
                other.contains("expects 4") && other.contains("expects 3"),
                "{other}"
            );
            // Both learn who never came.
            for rank in [zero, first] {
                let error = rank.join().unwrap().unwrap_err().to_string();
                assert!(error.contains("rank 2 of 3"), "{error}");
            }
        });
    }

    #[test]
    fn a_second_rank_0_is_told_who_holds_the_address() {
        let first = World::join(rendezvous("held", 0, 1)).unwrap();
        let error = World::join(rendezvous("held", 0, 1))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(&format!("pid {}", std::process::id())),
            "{error}"
        );
        drop(first);
        World::join(rendezvous("held", 0, 1)).unwrap();
    }
}
