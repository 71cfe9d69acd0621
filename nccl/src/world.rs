//! One rank's view of all ranks: its world in the control plane, and the defaults of its communicators.

use std::error::Error as StdError;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::communicator::{Communicator, LaunchMode, Timeouts};
use crate::forked;
use crate::json_values::{self, SentValue};
use crate::nccl_environment;
use crate::peers::{AsWorld, InitSetup, PreflightCheck, WorldParameters};
use crate::preflight::{Checks, Report, Settings};
use crate::recorder::Timeline;
use crate::supervision::{SessionExt as _, WorldPeers, recordings, register_with_control};
use crate::{BackgroundCall, CommunicatorBuilder, Mesh};
#[cfg(doc)]
use nccl_base::error::ErrorKind;
use nccl_base::error::Result;
use nccl_base::fault::Fault;
use nccl_control::{self, Channel, CompareSet, Events, RankSession, Rendezvous, Slot, Subgroup};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// All ranks of a job, seen from one of them: their identities, and exchange of small data without NCCL.
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
    pub(crate) control: nccl_control::World,
    /// Default timeouts of its communicators.
    timeouts: Timeouts,
    /// Whether its communicators use NCCL.
    needs_nccl: bool,
    /// How its communicators call NCCL.
    launch_mode: Option<LaunchMode>,
    /// State of the checks before its communicators are made.
    checks: Checks,
}

impl World {
    fn of(control: nccl_control::World) -> Self {
        Self {
            timeouts: Timeouts::default(),
            needs_nccl: true,
            launch_mode: None,
            checks: Checks::default(),
            control,
        }
    }

    /// Joins the other ranks at the rendezvous.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`] within the rendezvous' timeout (60 s unless set): rank 0 does not answer,
    /// some ranks never came (they are named), another process claims this rank, or the ranks disagree
    /// on their number. [`ErrorKind::Io`] when the socket cannot be made.
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
        register_with_control();
        nccl_environment::use_interface_of(&rendezvous)?;
        nccl_control::World::join(rendezvous).map(Self::of)
    }

    /// As [`join`](Self::join), without blocking the calling thread: for tasks of an executor.
    ///
    /// ```
    /// # use nccl::{Rendezvous, World};
    /// # async fn example() -> nccl::Result<()> {
    /// let world = World::join_async(Rendezvous::from_env()?).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn join_async(rendezvous: Rendezvous) -> BackgroundCall<Self> {
        BackgroundCall::start(move || Self::join(rendezvous))
    }

    /// Returns the worlds of `size` ranks that are threads of this process.
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
        register_with_control();
        nccl_environment::install();
        let worlds = nccl_control::World::threads(size).into_iter();
        worlds.map(Self::of).collect()
    }

    /// Returns a world of one rank, for a program that can run alone.
    ///
    /// Its communicators load no libnccl: every operation copies on the device, or does nothing. Only
    /// [`Communicator::pre_mul_sum`](crate::Communicator::pre_mul_sum) is missing. To use NCCL anyway, name the library
    /// ([`CommunicatorBuilder::library`]), or make a world with [`threads(1)`](Self::threads).
    ///
    /// ```
    /// assert_eq!(nccl::World::single().size(), 1);
    /// ```
    #[must_use]
    pub fn single() -> Self {
        register_with_control();
        Self {
            needs_nccl: false,
            ..Self::of(nccl_control::World::single())
        }
    }

    /// Sets how long the operations of its communicators may take, unless [a builder](CommunicatorBuilder::timeouts) says
    /// otherwise.
    ///
    /// ```
    /// use std::time::Duration;
    /// let world = nccl::World::single().with_timeouts(|timeouts| timeouts.operation = Duration::from_secs(5));
    /// ```
    #[must_use]
    pub fn with_timeouts(mut self, set: impl FnOnce(&mut Timeouts)) -> Self {
        set(&mut self.timeouts);
        self
    }

    /// Sets how long [`barrier`](Self::barrier) and [`all_gather`](Self::all_gather) wait for the other ranks;
    /// 60 s unless set, or the timeout of the [`Rendezvous`].
    ///
    /// ```
    /// use std::time::Duration;
    /// let world = nccl::World::single().with_timeout(Duration::from_secs(5));
    /// ```
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.control.set_timeout(timeout);
        self
    }

    /// Sets how the communicators of this world call NCCL, unless their builders say otherwise. Unless set, the ranks agree on
    /// [`LaunchMode::BlockingChild`] where all support it, and on [`LaunchMode::NonBlocking`] otherwise. Ranks that set
    /// different modes get an error.
    ///
    /// ```
    /// let world = nccl::World::single().with_launch_mode(nccl::LaunchMode::BlockingChild);
    /// ```
    #[must_use]
    pub fn with_launch_mode(mut self, mode: LaunchMode) -> Self {
        self.launch_mode = Some(mode);
        self
    }

    /// Sets the directory into which the last calls of this rank are written whenever a communicator of this world is aborted,
    /// whatever the reason, as `rank-3.pid-4021.json`: `nccl-doctor timeline`, or
    /// [`Timeline::read`](crate::recorder::Timeline::read), merges the files of all ranks. Unless set,
    /// `NCCL_RUN_RECORD_DIR` names the directory.
    ///
    /// A separate thread writes the file, and the abort does not wait for it. No file is overwritten; a process writes
    /// at most 16. A file that cannot be written causes one warning.
    ///
    /// ```
    /// let world = nccl::World::single().record_faults_to("/var/log/server/faults");
    /// ```
    #[must_use]
    pub fn record_faults_to(self, directory: impl Into<std::path::PathBuf>) -> Self {
        self.session().scope().set_directory(directory.into());
        self
    }

    /// Returns the number under which `nccl-run`, torchrun, MPI or Slurm started the process that is rank `rank` here;
    /// it prefixes the lines of the process's output. After a reconfiguration the two numbers differ. `None` where no
    /// launcher gave a number, and for a rank that does not exist in this world.
    ///
    /// ```
    /// fn output_of(world: &nccl::World, rank: usize) -> String {
    ///     format!("the lines that begin with [{}]", world.launcher_rank(rank).unwrap_or(rank))
    /// }
    /// assert_eq!(nccl::World::single().launcher_rank(0), None);
    /// ```
    #[must_use]
    pub fn launcher_rank(&self, rank: usize) -> Option<usize> {
        self.control.launcher_rank(rank)
    }

    /// Returns the slot of a rank; `None` for a rank that this world does not have. A process keeps its slot as long as
    /// it is in the world, whatever its rank is in later generations.
    ///
    /// ```
    /// let worlds = nccl::World::threads(2);
    /// assert_eq!(worlds[0].slot(1).unwrap().number, 1);
    /// assert_eq!(worlds[0].slot(2), None);
    /// ```
    #[must_use]
    pub fn slot(&self, rank: usize) -> Option<Slot> {
        self.control.slot(rank)
    }

    /// Returns the rank whose slot has this number; `None` if the slot is free, or does not exist.
    ///
    /// ```
    /// assert_eq!(nccl::World::single().rank_in_slot(0), Some(0));
    /// ```
    #[must_use]
    pub fn rank_in_slot(&self, number: usize) -> Option<usize> {
        self.control.rank_in_slot(number)
    }

    /// Returns the number of slots that ranks have had, in this generation or an earlier one. Their numbers are below it.
    ///
    /// ```
    /// /// Which slots have a rank, as a mask for a kernel.
    /// fn active(world: &nccl::World) -> Vec<u8> {
    ///     let slots = 0..world.slot_count();
    ///     slots.map(|slot| world.rank_in_slot(slot).is_some().into()).collect()
    /// }
    /// assert_eq!(active(&nccl::World::single()), [1]);
    /// ```
    #[must_use]
    pub fn slot_count(&self) -> usize {
        self.control.slot_count()
    }

    /// Returns this rank.
    ///
    /// ```
    /// assert_eq!(nccl::World::single().rank(), 0);
    /// ```
    #[must_use]
    pub fn rank(&self) -> usize {
        self.control.rank()
    }

    /// Returns the number of ranks.
    ///
    /// ```
    /// assert_eq!(nccl::World::threads(4)[0].size(), 4);
    /// ```
    #[must_use]
    pub fn size(&self) -> usize {
        self.control.size()
    }

    /// Returns this rank's number among the ranks of its host: the device that it usually takes.
    ///
    /// ```
    /// assert_eq!(nccl::World::threads(4)[3].local_rank(), 3);
    /// ```
    #[must_use]
    pub fn local_rank(&self) -> usize {
        self.control.local_rank()
    }

    /// Arranges the ranks along named axes, of which the last varies fastest.
    ///
    /// # Errors
    /// As [`Mesh::new`].
    ///
    /// ```
    /// let mesh = nccl::World::single().mesh(&[("dp", 1), ("tp", 1)])?;
    /// assert_eq!(mesh.ranks(&["tp"]), [0]);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn mesh(&self, axes: &[(&str, usize)]) -> Result<Mesh> {
        Mesh::new(self.rank(), self.size(), axes)
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
        CommunicatorBuilder::with_world(name, self.parameters())
    }

    /// Makes a communicator of all ranks, and connects them, without blocking the calling thread: for tasks of an
    /// executor. `set` configures the builder, between [`communicator`](Self::communicator) and its `build`; the thread
    /// on which `set` runs is unspecified.
    ///
    /// The ranks are connected as by [`Communicator::warm_up`], with the same timeout again as for making the
    /// communicator (`timeouts.init`). Afterwards, calling an operation does not wait for other ranks. `docs/async.md`
    /// lists the connections that are still made later, and for which a call then waits.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use nccl::{ReduceOp, Rendezvous, World};
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// let world = Arc::new(World::join_async(Rendezvous::from_env()?).await?);
    /// let stream = nccl::device(world.local_rank())?.new_stream()?;
    /// let theirs = stream.clone();
    /// let comm = world.communicator_async("model/tp", move |comm| comm.stream(&theirs)).await?;
    /// let mut y = stream.clone_htod(&[1.0f32; 8])?;
    /// comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn communicator_async(
        self: &Arc<Self>,
        name: &str,
        set: impl FnOnce(CommunicatorBuilder<'_>) -> CommunicatorBuilder<'_> + Send + 'static,
    ) -> BackgroundCall<Communicator> {
        let (world, name) = (Arc::clone(self), name.to_owned());
        BackgroundCall::start(move || {
            let builder = set(world.communicator(&name));
            let timeout = builder.timeouts.init;
            let comm = builder.build()?;
            comm.warm_up(timeout)?;
            Ok(comm)
        })
    }

    /// Returns the fault of the communicator of this world that failed last on this rank; `None` while there is none.
    ///
    /// For programs whose layers in between lose the error: the fault is available before the call that fails because
    /// of it returns.
    ///
    /// ```
    /// let world = nccl::World::single();
    /// if let Some(fault) = world.fault() {
    ///     eprintln!("{}", fault.explain());
    /// }
    /// # assert!(world.fault().is_none());
    /// ```
    #[must_use]
    pub fn fault(&self) -> Option<Fault> {
        self.control.fault()
    }

    /// Returns the events of this world's ranks and of this rank's communicators, as they happen: the present ranks
    /// first; then ranks that leave, fail, die, are silent or answer again, ranks that have not entered an operation,
    /// changes of the coordinator, each [`Fault`], and the next generations. The iterator ends when the last generation
    /// of this world is dropped.
    ///
    /// Each reader has its own position, also readers in other threads. Events that a reader has not read in time are
    /// dropped, the oldest first, and their number is reported as an event
    /// ([`WorldEvent::Missed`](crate::control::WorldEvent::Missed)): the last 4096 are kept, from the first call of
    /// this method on. No operation waits for a reader, or does work for it.
    ///
    /// ```
    /// use std::time::Duration;
    /// use nccl::control::WorldEvent;
    ///
    /// let mut worlds = nccl::World::threads(2);
    /// let (one, zero) = (worlds.pop().unwrap(), worlds.pop().unwrap());
    /// let mut events = zero.events();
    /// let watching = std::thread::spawn(move || {
    ///     events.find_map(|event| match event {
    ///         WorldEvent::Failed { rank, chain, .. } => Some(format!("rank {rank}: {chain}")),
    ///         _ => None,
    ///     })
    /// });
    /// one.fail(&std::io::Error::other("no such file: weights.safetensors"));
    /// let says = watching.join().unwrap();
    /// assert_eq!(says.as_deref(), Some("rank 1: no such file: weights.safetensors"));
    /// ```
    #[must_use]
    pub fn events(&self) -> Events {
        self.control.events()
    }

    /// Waits until every rank has called it with this name.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`] names the ranks that did not come within the world's timeout, or the rank
    /// that is gone.
    ///
    /// ```
    /// nccl::World::single().barrier("weights are loaded")?;
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn barrier(&self, name: &str) -> Result<()> {
        self.control.barrier(name)
    }

    /// As [`barrier`](Self::barrier), without blocking the calling thread: for tasks of an executor. The world is kept
    /// alive until the call has returned, even if the future is dropped.
    ///
    /// ```
    /// # async fn example(world: std::sync::Arc<nccl::World>) -> nccl::Result<()> {
    /// world.barrier_async("weights are loaded").await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn barrier_async(self: &Arc<Self>, name: &str) -> BackgroundCall<()> {
        let (world, name) = (Arc::clone(self), name.to_owned());
        BackgroundCall::start(move || world.barrier(&name))
    }

    /// Sends `bytes` to every rank, and returns the bytes of all ranks, by rank.
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
        self.control.all_gather(name, bytes)
    }

    /// Sends the `bytes` of rank `root` to every rank; the `bytes` of the other ranks are ignored.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather); [`ErrorKind::NoSuchRank`] for a root that does not exist.
    ///
    /// ```
    /// let seed = nccl::World::single().broadcast("seed", 0, b"42")?;
    /// assert_eq!(seed, b"42");
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn broadcast(&self, name: &str, root: usize, bytes: &[u8]) -> Result<Vec<u8>> {
        self.control.broadcast(name, root, bytes)
    }

    /// Sends `value` to every rank, and returns the values of all ranks, by rank. Values travel as JSON, with at most
    /// 64 MiB for all ranks together.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather). [`ErrorKind::Rendezvous`] on all ranks when the value of a rank cannot be
    /// written as JSON (a number that is not finite, or a map whose keys are neither strings nor numbers), and on the
    /// ranks that cannot decode a value as a `T`. The error names the rank that has sent the value.
    ///
    /// ```
    /// #[derive(serde::Serialize, serde::Deserialize)]
    /// struct Shard {
    ///     file: String,
    ///     rows: u64,
    /// }
    ///
    /// let world = nccl::World::single();
    /// let own = Shard { file: String::from("part-0"), rows: 1000 };
    /// let all = world.all_gather_value("shards", &own)?;
    /// assert_eq!(all.iter().map(|shard| shard.rows).sum::<u64>(), 1000);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn all_gather_value<T: Serialize + DeserializeOwned>(
        &self,
        name: &str,
        value: &T,
    ) -> Result<Vec<T>> {
        let own = json_values::encode(SentValue::of(value));
        let all = self.all_gather(name, &own)?.into_iter().enumerate();
        all.map(|(rank, bytes)| json_values::decode(name, rank, &bytes))
            .collect()
    }

    /// Sends the `value` of rank `root` to every rank, as JSON; the other ranks may pass `None`, and their values are
    /// ignored.
    ///
    /// # Errors
    /// As [`broadcast`](Self::broadcast). [`ErrorKind::Rendezvous`] on all ranks when `root` passes `None` or a value
    /// that cannot be written as JSON ([`all_gather_value`](Self::all_gather_value)), and on the ranks that cannot
    /// decode the value as a `T`.
    ///
    /// ```
    /// let world = nccl::World::single();
    /// let rates = (world.rank() == 0).then(|| vec![0.1, 0.01]);
    /// assert_eq!(world.broadcast_value("rates", 0, rates.as_ref())?, [0.1, 0.01]);
    ///
    /// let error = world.broadcast_value("rates", 0, Some(&f64::NAN)).unwrap_err();
    /// assert!(error.to_string().contains("rank 0"));
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn broadcast_value<T: Serialize + DeserializeOwned>(
        &self,
        name: &str,
        root: usize,
        value: Option<&T>,
    ) -> Result<T> {
        let own = match value {
            _ if self.rank() != root => Vec::new(),
            Some(value) => json_values::encode(SentValue::of(value)),
            None => json_values::encode(SentValue::<T>::None),
        };
        let bytes = self.broadcast(name, root, &own)?;
        json_values::decode(name, root, &bytes)
    }

    /// Stores `value` under `key`, for any rank to [`get`](Self::get); an earlier value is replaced.
    ///
    /// The coordinator keeps the store, for one generation of the world: the next generation begins with an empty one.
    /// Calls are atomic and in one order for all ranks, and each change is made exactly once, even if the connection to
    /// the coordinator is lost and restored meanwhile. When the coordinator is lost, the store is lost with it: until
    /// the next generation, every call returns an error that names the cause. A change whose call returns an error may
    /// have been made.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] when all keys and values together have more than 64 MiB, or the key more than 1024 bytes;
    /// [`ErrorKind::Rendezvous`] when the coordinator is gone.
    ///
    /// ```
    /// let world = nccl::World::single();
    /// world.set("model/hash", b"c0ffee")?;
    /// assert_eq!(world.get("model/hash")?, b"c0ffee");
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.control.set(key, value)
    }

    /// Returns the value under `key`; waits until a rank has stored one.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`] when no rank stores a value within the world's timeout, or when a rank dies or fails
    /// meanwhile: it may be the rank that would have stored the value.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let world = nccl::World::single().with_timeout(Duration::from_millis(10));
    /// let error = world.get("nobody sets this").unwrap_err();
    /// assert!(error.to_string().contains("no rank set"));
    /// ```
    pub fn get(&self, key: &str) -> Result<Vec<u8>> {
        self.control.get(key)
    }

    /// Returns the value under `key` if there is one now, without waiting for a rank to store it.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`] when the coordinator is gone.
    ///
    /// ```
    /// let world = nccl::World::single();
    /// assert_eq!(world.try_get("step")?, None);
    /// world.set("step", b"1")?;
    /// assert_eq!(world.try_get("step")?.as_deref(), Some(&b"1"[..]));
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.control.try_get(key)
    }

    /// Waits until all `keys` are set at the same time.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`] names the keys that are missing after the world's timeout; or the rank that has died or failed
    /// meanwhile, as [`get`](Self::get) does. [`ErrorKind::Io`] for more than 65,536 keys, or one of more than 1024 bytes.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let world = nccl::World::single().with_timeout(Duration::from_millis(10));
    /// world.set("loaded/0", b"")?;
    /// world.wait(&["loaded/0"])?;
    /// let error = world.wait(&["loaded/0", "loaded/1"]).unwrap_err();
    /// assert!(error.to_string().contains("no rank set \"loaded/1\""));
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn wait(&self, keys: &[&str]) -> Result<()> {
        self.control.wait(keys)
    }

    /// Adds `amount` to the counter under `key`, and returns the sum. A counter is stored as a decimal number in text,
    /// and is 0 when the key is not set.
    ///
    /// # Errors
    /// As [`set`](Self::set). [`ErrorKind::Rendezvous`] when the stored value is not a decimal 64-bit number, in which
    /// case the error contains the value, or when the sum would overflow; the value is unchanged.
    ///
    /// ```
    /// let world = nccl::World::single();
    /// assert_eq!(world.add("ready", 1)?, 1);
    /// assert_eq!(world.add("ready", -3)?, -2);
    /// assert_eq!(world.get("ready")?, b"-2");
    ///
    /// world.set("model", b"llama")?;
    /// let error = world.add("model", 1).unwrap_err();
    /// assert!(error.to_string().contains("its value is \"llama\""));
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.control.add(key, amount)
    }

    /// Stores `value` under `key` if the current value is `expected`; with `None`, if the key is not set.
    ///
    /// # Errors
    /// As [`set`](Self::set); the limits hold for `expected` as well.
    ///
    /// ```
    /// use nccl::control::CompareSet;
    ///
    /// let world = nccl::World::single();
    /// let own = world.rank().to_string();
    /// match world.compare_set("leader", None, own.as_bytes())? {
    ///     CompareSet::Set => println!("this rank leads"),
    ///     CompareSet::Unchanged { current } => println!("rank {current:?} leads"),
    /// }
    /// assert!(world.compare_set("leader", Some(b"0"), b"1")?.is_set());
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn compare_set(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        value: &[u8],
    ) -> Result<CompareSet> {
        self.control.compare_set(key, expected, value)
    }

    /// Removes `key` and its value. Returns whether it was set.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`] when the coordinator is gone.
    ///
    /// ```
    /// let world = nccl::World::single();
    /// world.set("step", b"1")?;
    /// assert!(world.delete("step")?);
    /// assert!(!world.delete("step")?);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn delete(&self, key: &str) -> Result<bool> {
        self.control.delete(key)
    }

    /// Sets what this rank does now: errors of ranks that wait for it in vain name this phase.
    ///
    /// ```
    /// let world = nccl::World::single();
    /// world.phase("load weights");
    /// ```
    pub fn phase(&self, name: &str) {
        if !forked::is_child() {
            nccl_core::recorder::phase(name);
            self.control.phase(name);
        }
    }

    /// Leaves the world and sends every rank the reason: whatever waits for this rank ends at once, with this error and
    /// the chain of its sources.
    ///
    /// A `World` that is dropped by a panic reports the panic, with its message if
    /// [`install_panic_hook`](crate::process::install_panic_hook) was called. A `World` that is dropped otherwise sends
    /// a leave message, and the other ranks report that it left in order.
    ///
    /// ```
    /// let mut worlds = nccl::World::threads(2);
    /// let (one, zero) = (worlds.pop().unwrap(), worlds.pop().unwrap());
    /// one.fail(&std::io::Error::other("no such file: weights.safetensors"));
    /// let error = zero.barrier("loaded").unwrap_err();
    /// assert!(error.to_string().contains("weights.safetensors"));
    /// ```
    pub fn fail(mut self, error: &(dyn StdError + 'static)) {
        self.control.fails(error);
    }

    /// Makes a group of some of the ranks, in this order, under a name. All of them have to name the same ranks.
    ///
    /// Groups without a common rank may have the same name. A rank that is in two groups needs two names: with one name, an
    /// exchange of this rank fails if ranks of the other group have begun theirs.
    ///
    /// # Errors
    /// [`ErrorKind::NoSuchRank`]; [`ErrorKind::Rendezvous`] when a rank is named twice, or this rank is not named.
    ///
    /// ```
    /// std::thread::scope(|scope| {
    ///     for world in nccl::World::threads(4) {
    ///         scope.spawn(move || {
    ///             let ranks = if world.rank() % 2 == 0 { [0, 2] } else { [1, 3] };
    ///             let half = world.subgroup("parity", &ranks)?;
    ///             let both = half.all_gather("rank", &[world.rank() as u8])?;
    ///             assert_eq!(both, ranks.map(|rank| vec![rank as u8]));
    ///             Ok::<(), nccl::Error>(())
    ///         });
    ///     }
    /// });
    /// ```
    pub fn subgroup(&self, name: &str, ranks: &[usize]) -> Result<Subgroup<'_>> {
        self.control.subgroup(name, ranks)
    }

    /// Forms the next generation from the remaining ranks and the processes that have asked to join
    /// ([`join_running`](Self::join_running)), and returns the world of that generation.
    ///
    /// Every rank that is not gone has to call it. The ranks that wait for each other here agree on the remaining
    /// ranks, once for each generation and all alike. The remaining ranks keep their order and become ranks 0, 1, …;
    /// new ranks follow them. [`previous_rank`](Self::previous_rank) maps the ranks to those of the previous
    /// generation. Processes, CUDA contexts and memory are not affected.
    ///
    /// `timeout` is how long the ranks wait for each other's calls; `NCCL_RUN_WORLD_TIMEOUT` in the environment
    /// overrides it. Agreement on the generation may take up to [`Rendezvous::majority_timeout`] plus 8 s longer. A
    /// rank that dies during the agreement is not an error: the others agree again. If a rank makes no such call, there
    /// is no next generation; this world is unchanged, and the program can call this method again, or
    /// [`next_generation_leaving_behind`](Self::next_generation_leaving_behind).
    ///
    /// The communicators of this world end with it, on every rank: the next generation needs new ones. Drop this value
    /// when the next generation exists.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`] names the ranks that did not call within `timeout`, or states that this rank reaches
    /// no majority of the others, or that another call of this rank still waits for the next generation.
    ///
    /// ```
    /// use std::time::Duration;
    /// use nccl::World;
    ///
    /// let mut worlds = World::threads(3);
    /// worlds.remove(1).fail(&std::io::Error::other("it broke"));
    /// std::thread::scope(|scope| {
    ///     for world in worlds {
    ///         scope.spawn(move || {
    ///             let next = world.next_generation(Duration::from_secs(5))?;
    ///             assert_eq!((next.generation(), next.size()), (1, 2));
    ///             assert_eq!(next.previous_rank(1), Some(2));
    ///             next.barrier("all that are left")
    ///         });
    ///     }
    /// });
    /// ```
    pub fn next_generation(&self, timeout: Duration) -> Result<Self> {
        self.reconfigure(timeout, false, &[])
    }

    /// As [`next_generation`](Self::next_generation), without blocking the calling thread: for tasks of an executor.
    ///
    /// If the future is dropped, the call continues in the background until it ends; until then, another one fails.
    ///
    /// ```
    /// # use std::{sync::Arc, time::Duration};
    /// # async fn example(world: Arc<nccl::World>) -> nccl::Result<()> {
    /// let next = Arc::new(world.next_generation_async(Duration::from_secs(20)).await?);
    /// # Ok(())
    /// # }
    /// ```
    pub fn next_generation_async(self: &Arc<Self>, timeout: Duration) -> BackgroundCall<Self> {
        let world = Arc::clone(self);
        BackgroundCall::start(move || world.next_generation(timeout))
    }

    /// As [`next_generation`](Self::next_generation), but without the ranks that make no such call within `timeout`,
    /// because they hang or are busy. All ranks have to call this method; when only some do, no rank is left behind.
    ///
    /// A rank that is left behind counts as departed. If it runs again, its communicators end and its world reports
    /// that it was left behind; it may end, or call [`join_running`](Self::join_running).
    ///
    /// # Errors
    /// As [`next_generation`](Self::next_generation). [`ErrorKind::Rendezvous`] on a rank that was left behind.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let mut worlds = nccl::World::threads(2);
    /// let hangs = worlds.pop();
    /// let next = worlds[0].next_generation_leaving_behind(Duration::from_millis(50))?;
    /// assert_eq!(next.size(), 1);
    /// let error = hangs.unwrap().barrier("too late").unwrap_err();
    /// assert!(error.to_string().contains("left behind"), "{error}");
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn next_generation_leaving_behind(&self, timeout: Duration) -> Result<Self> {
        self.reconfigure(timeout, true, &[])
    }

    /// As [`next_generation`](Self::next_generation), but keeps the communicators `kept`, to be grown by the ranks that
    /// join ([`Communicator::grow`]). All ranks of such a communicator have to keep it; otherwise it ends as all others
    /// do.
    ///
    /// The kept communicators can be used as before, as long as none of their ranks is gone. Drop them when the grown
    /// communicator exists.
    ///
    /// # Errors
    /// As [`next_generation`](Self::next_generation).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// use std::time::Duration;
    ///
    /// let world = nccl::World::threads(1).remove(0);
    /// let comm = world.communicator("model").stream(&stream).build()?;
    /// let world = world.next_generation_keeping(&[&comm], Duration::from_secs(1))?;
    /// let mut y = stream.clone_htod(&[1.0f32])?;
    /// comm.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum)?.wait()?;
    /// if world.size() > comm.world_size() {
    ///     let grown = comm.grow(&world, "model")?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn next_generation_keeping(
        &self,
        kept: &[&Communicator],
        timeout: Duration,
    ) -> Result<Self> {
        self.reconfigure(timeout, false, kept)
    }

    /// Returns the generation of the job that this world is: 0 unless the [`Rendezvous`] or the launcher sets another,
    /// and at least one more with each next generation.
    ///
    /// ```
    /// assert_eq!(nccl::World::single().generation(), 0);
    /// ```
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.control.generation()
    }

    /// Returns the rank that `rank` was in the previous generation; `None` for a new rank, and in the first generation.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let next = nccl::World::single().next_generation(Duration::from_secs(1))?;
    /// assert_eq!(next.previous_rank(0), Some(0));
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn previous_rank(&self, rank: usize) -> Option<usize> {
        self.control.previous_rank(rank)
    }

    /// Gives the operator's decision after a network partition: `ranks`, this rank among them, may form the next
    /// generation although no more than half of this generation's voters reach each other.
    ///
    /// The operator has to make sure that the other ranks do not continue, for example by ending them. A decision given
    /// on one of the ranks counts on all ranks that it names, once, and is in the log of each
    /// (`nccl.rendezvous.operator`). The ranks then continue as by [`next_generation`](Self::next_generation), which
    /// has to be called before they have waited for the others for 12 s in vain: after that they count as cut off for
    /// good.
    ///
    /// # Errors
    /// [`ErrorKind::NoSuchRank`]; [`ErrorKind::Rendezvous`] when this rank is not among `ranks`, or no longer takes
    /// part.
    ///
    /// ```
    /// let world = nccl::World::single();
    /// world.decide_split(&[0])?;
    /// assert!(world.decide_split(&[0, 1]).is_err());
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn decide_split(&self, ranks: &[usize]) -> Result<()> {
        self.control.decide_split(ranks)
    }

    /// Returns the number of processes that wait to be taken into the next generation
    /// ([`join_running`](Self::join_running)).
    ///
    /// Ranks learn of these processes at different times: to decide, use the number on one rank, or the maximum of all,
    /// before every rank calls [`next_generation`](Self::next_generation).
    ///
    /// ```
    /// assert_eq!(nccl::World::single().joiners(), 0);
    /// ```
    #[must_use]
    pub fn joiners(&self) -> usize {
        self.control.joiners()
    }

    /// Returns the ranks that are gone, and how each ended.
    ///
    /// ```
    /// let mut worlds = nccl::World::threads(2);
    /// worlds.remove(1).fail(&std::io::Error::other("it broke"));
    /// assert_eq!(worlds[0].departed(), [(1, "it failed: it broke".to_string())]);
    /// ```
    #[must_use]
    pub fn departed(&self) -> Vec<(usize, String)> {
        self.control.departed()
    }

    /// Joins a running world as a new rank: in the place of a process that died, or in addition.
    ///
    /// Waits at the address of the rendezvous until the existing ranks form their next generation
    /// ([`next_generation`](Self::next_generation)), at most for the rendezvous' timeout. The existing ranks number the
    /// new rank after their own. Rank, number of ranks and generation of the rendezvous are ignored; its job, secret
    /// and local rank are used.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`] when no rank answers there, or the ranks do not form the next generation in time.
    ///
    /// ```no_run
    /// use nccl::{Rendezvous, World};
    ///
    /// // Started by `Fleet::restart`, or by hand with the same variables.
    /// let world = World::join_running(Rendezvous::from_env()?)?;
    /// println!("rank {} of {} in generation {}", world.rank(), world.size(), world.generation());
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn join_running(rendezvous: Rendezvous) -> Result<Self> {
        register_with_control();
        nccl_environment::use_interface_of(&rendezvous)?;
        nccl_control::World::join_running(rendezvous).map(Self::of)
    }

    /// Returns an ordered channel between all ranks, under a name: for commands that the ranks execute step by step.
    ///
    /// All messages of a channel arrive at every receiver in one order, whichever rank sent them. Up to 64 messages may
    /// wait for a rank; then the sender waits for that rank. Channels of different names do not wait for each other.
    /// Another call with the same name returns the same channel. If two ranks send at the same time, each has to
    /// receive meanwhile on another thread; otherwise both may wait for the other to take its messages.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let soon = Duration::from_secs(5);
    /// std::thread::scope(|scope| {
    ///     for world in nccl::World::threads(2) {
    ///         scope.spawn(move || {
    ///             let steps = world.channel("steps");
    ///             if world.rank() == 0 {
    ///                 steps.send(b"decode 7")?;
    ///                 let answer = steps.recv(soon)?.expect("an answer");
    ///                 assert_eq!((answer.from, &answer.bytes[..]), (1, &b"token 42"[..]));
    ///             } else {
    ///                 let step = steps.recv(soon)?.expect("a step");
    ///                 assert_eq!(&step.bytes[..], b"decode 7");
    ///                 steps.send_to(0, b"token 42")?;
    ///             }
    ///             world.barrier("done")
    ///         });
    ///     }
    /// });
    /// ```
    #[must_use]
    pub fn channel(&self, name: &str) -> Channel<'_> {
        self.control.channel(name)
    }

    /// Checks what has to agree between the ranks, and whether they reach each other at the addresses that NCCL will
    /// use. Every rank has to call it, and gets the same report.
    ///
    /// The same check runs when the first communicator of several ranks is made, unless
    /// [`without_preflight`](Self::without_preflight) or `NCCL_RUN_PREFLIGHT=off` disables it: an error prevents the
    /// communicator on every rank, and rank 0 logs the warnings.
    ///
    /// On one host it takes a few milliseconds; between hosts that do not reach each other, 5 s at most.
    ///
    /// # Errors
    /// As [`barrier`](Self::barrier), when a rank does not come. Findings of the checks are in the report, and are not
    /// errors.
    ///
    /// ```
    /// use nccl::preflight::Settings;
    ///
    /// std::thread::scope(|scope| {
    ///     for world in nccl::World::threads(2) {
    ///         scope.spawn(move || {
    ///             let report = world.preflight(&Settings::default())?;
    ///             for error in &report.findings {
    ///                 eprintln!("{error}");
    ///             }
    ///             Ok::<(), nccl::Error>(())
    ///         });
    ///     }
    /// });
    /// ```
    pub fn preflight(&self, settings: &Settings) -> Result<Report> {
        self.checks.report(&self.control, settings)
    }

    /// Makes communicators without checking first. All ranks have to set this; when only some do, no rank is checked,
    /// and rank 0 logs a warning.
    ///
    /// ```
    /// let worlds: Vec<_> = nccl::World::threads(2)
    ///     .into_iter()
    ///     .map(nccl::World::without_preflight)
    ///     .collect();
    /// # drop(worlds);
    /// ```
    #[must_use]
    pub fn without_preflight(mut self) -> Self {
        self.checks.switch_off();
        self
    }

    /// Returns what all ranks did last, on one time axis: to find out why no operation makes progress.
    ///
    /// Each rank answers from the thread that reads its connections, so the answer depends neither on where its other
    /// threads hang nor on whether rank 0 lives. Ranks that do not answer within `timeout` are in
    /// [`Timeline::missing`], with what is known about them. Clocks are compared by round trips.
    ///
    /// All answers together have at most about 64 MiB or, of more than 2048 ranks, 32 KiB for each rank. Where there are too
    /// many calls, the oldest are left out, and counted (`Recording::left_out`).
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let worlds = nccl::World::threads(2);
    /// let timeline = worlds[1].recordings(Duration::from_secs(2));
    /// assert_eq!((timeline.ranks.len(), timeline.missing.len()), (2, 0));
    /// ```
    #[must_use]
    pub fn recordings(&self, timeout: Duration) -> Timeline {
        recordings(self.session(), timeout)
    }

    fn reconfigure(
        &self,
        timeout: Duration,
        leaves_behind: bool,
        kept: &[&Communicator],
    ) -> Result<Self> {
        let kept: Vec<&str> = kept.iter().filter_map(|comm| comm.key()).collect();
        let control = self.control.reconfigure(timeout, leaves_behind, &kept)?;
        let all_known = (0..control.size()).all(|rank| control.previous_rank(rank).is_some());
        Ok(Self {
            timeouts: self.timeouts,
            needs_nccl: self.needs_nccl,
            launch_mode: self.launch_mode,
            checks: self.checks.of_next(all_known),
            control,
        })
    }

    /// Returns the session, which its communicators share.
    pub(crate) fn session(&self) -> &Arc<RankSession> {
        self.control.session()
    }
}

#[doc(hidden)]
impl AsWorld for World {
    fn parameters(&self) -> WorldParameters<'_> {
        WorldParameters {
            peers: WorldPeers::of(self.session()),
            timeouts: self.timeouts,
            launch_mode: self.launch_mode,
            needs_nccl: self.needs_nccl,
            check: self,
        }
    }
}

#[doc(hidden)]
impl PreflightCheck for World {
    fn check(
        &self,
        setup: Option<InitSetup>,
        deadline: Instant,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<()> {
        if self.size() < 2 || !self.needs_nccl {
            return Ok(());
        }
        self.checks
            .ensure_passed(&self.control, setup, deadline, interrupted)
    }
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.control.fmt(f)
    }
}
