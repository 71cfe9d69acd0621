//! An observer of a job: a process that watches its ranks without being one of them.

use std::time::Duration;

use crate::recorder::Timeline;
use crate::supervision::{decode, register_with_control, timeline};
#[cfg(doc)]
use crate::world::World;
#[cfg(doc)]
use nccl_base::error::ErrorKind;
use nccl_base::error::Result;
use nccl_control::{self, Events, Rendezvous, WorldState};

/// Receives the events of a world's ranks without being a rank.
///
/// An observer loads neither CUDA nor NCCL, is not counted among the ranks, and outlives the world. It is meant for a
/// server process that reports faults, and for a launcher. A world admits 64 observers, and one more for each rank.
///
/// An observer belongs to one attempt of the job, as a rank does, and follows the ranks into their next generations; it
/// may join in any of them. When rank 0 departs, the observer follows the rank that takes over; when no rank does, that
/// world has ended. When only its own connection breaks, it reconnects within 2 s, and the changes meanwhile arrive as
/// events.
///
/// ```
/// use std::time::Duration;
/// use nccl::control::WorldEvent;
/// use nccl::{Observer, Rendezvous, World};
///
/// let path = std::env::temp_dir().join(format!("nccl-observed-{}.sock", std::process::id()));
/// let world = World::join(Rendezvous::unix(&path, 0, 1)?)?;
/// let observer = Observer::join(Rendezvous::observer(&format!("unix:{}", path.display()))?)?;
///
/// let mut events = observer.events();
/// let event = events.next_within(Duration::from_secs(5));
/// assert!(matches!(event, Some(WorldEvent::Joined { rank: 0, .. })));
/// world.phase("load weights");
/// let event = events.next_within(Duration::from_secs(5));
/// assert!(matches!(event, Some(WorldEvent::Phase { name, .. }) if name == "load weights"));
/// # Ok::<(), nccl::Error>(())
/// ```
pub struct Observer {
    inner: nccl_control::Observer,
}

impl Observer {
    /// Observes the world that meets at this rendezvous, and waits until rank 0 is there. The rank of the rendezvous is
    /// ignored.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`] when rank 0 does not answer within the rendezvous' timeout, has another
    /// secret, job, generation or number of ranks, or has too many observers.
    ///
    /// ```no_run
    /// use nccl::{Observer, Rendezvous};
    ///
    /// let observer = Observer::join(Rendezvous::observer("unix:/run/my-job.sock")?)?;
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn join(rendezvous: Rendezvous) -> Result<Self> {
        register_with_control();
        nccl_control::Observer::join(rendezvous).map(|inner| Self { inner })
    }

    /// As [`join`](Self::join), but returns at once and looks for rank 0 in the background: for a launcher. If rank 0
    /// does not answer in time, the observer's last event reports it.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] when no thread can be started. [`ErrorKind::Rendezvous`] for a secret of less than 16 bytes,
    /// and for a job beyond the limits. [`ErrorKind::InvalidConfig`] for a limit in the environment that cannot be
    /// read.
    ///
    /// ```
    /// use nccl::{Observer, Rendezvous};
    ///
    /// let observer = Observer::start(Rendezvous::unix("/tmp/nccl-doc-nobody.sock", 0, 4)?)?;
    /// let state = observer.snapshot();
    /// assert!(!state.connected && state.ranks.iter().all(|rank| rank.phase.is_none()));
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn start(rendezvous: Rendezvous) -> Result<Self> {
        register_with_control();
        nccl_control::Observer::start(rendezvous).map(|inner| Self { inner })
    }

    /// Returns the state of every rank, as far as this observer has received it.
    ///
    /// ```
    /// # use nccl::{Observer, Rendezvous};
    /// # let observer = Observer::start(Rendezvous::unix("/tmp/nccl-doc-nobody.sock", 0, 4)?)?;
    /// for rank in observer.snapshot().ranks {
    ///     println!("rank {}: {:?}, {:?}", rank.rank, rank.phase, rank.end);
    /// }
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn snapshot(&self) -> WorldState {
        self.inner.snapshot()
    }

    /// Returns the events since this observer was started, and those to come. Each reader has its own position; the
    /// last 4096 events are kept.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use nccl::{Observer, Rendezvous};
    /// # let observer = Observer::start(Rendezvous::unix("/tmp/nccl-doc-nobody.sock", 0, 4)?)?;
    /// let mut events = observer.events();
    /// assert_eq!(events.next_within(Duration::from_millis(1)), None);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn events(&self) -> Events {
        self.inner.events()
    }

    /// Reports that this process has started `rank`, as process `pid`, and will report how it ends, with
    /// [`rank_ended`](Self::rank_ended). `rank` is the number under which the process was started, also when a later
    /// generation has numbered the ranks again.
    ///
    /// When a rank dies, the kernel closes its connection at the moment at which its parent learns of the death. After
    /// this call, the other ranks wait up to 500 ms for the parent's report, so that their errors contain it.
    ///
    /// # Errors
    /// [`ErrorKind::NoSuchRank`].
    ///
    /// ```
    /// # use nccl::{Observer, Rendezvous};
    /// # let observer = Observer::start(Rendezvous::unix("/tmp/nccl-doc-nobody.sock", 0, 4)?)?;
    /// let child = std::process::Command::new("true").spawn().unwrap();
    /// observer.rank_started(2, child.id())?;
    /// # child.wait_with_output().unwrap();
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn rank_started(&self, rank: usize, pid: u32) -> Result<()> {
        self.inner.rank_started(rank, pid)
    }

    /// Reports how the process `pid` of `rank` ended, and its last output to stderr (of which the last lines are used;
    /// it may be empty). Every rank's errors then contain this, instead of "its connection closed without goodbye".
    /// Reports nothing when the rank has sent its leave message, or has reported why it fails. `rank` is the number
    /// under which the process was started.
    ///
    /// Returns at once. When rank 0 itself has died, this observer reports that to every other rank at its own listener; when
    /// rank 0 has died before it could listen, this observer listens in its place and reports it to the ranks that connect, until
    /// it is dropped.
    ///
    /// # Errors
    /// [`ErrorKind::NoSuchRank`].
    ///
    /// ```
    /// # use nccl::{Observer, Rendezvous};
    /// # let observer = Observer::start(Rendezvous::unix("/tmp/nccl-doc-nobody.sock", 0, 4)?)?;
    /// # let pid = 4711;
    /// observer.rank_ended(2, pid, "killed by SIGKILL", "")?;
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn rank_ended(&self, rank: usize, pid: u32, how: &str, stderr_tail: &str) -> Result<()> {
        self.inner.rank_ended(rank, pid, how, stderr_tail)
    }

    /// Gives the operator's decision after a network partition, as [`World::decide_split`], from a process that is not
    /// a rank: `ranks` may form the next generation, although no more than half of the voters reach each other.
    /// `nccl-doctor decide` does so from a command line.
    ///
    /// Returns at once. The decision is sent to the ranks that this observer reaches, and
    /// [`WorldEvent::SplitDecided`](crate::control::WorldEvent::SplitDecided) reports that they have received it.
    ///
    /// # Errors
    /// [`ErrorKind::NoSuchRank`].
    ///
    /// ```
    /// # use nccl::{Observer, Rendezvous};
    /// # let observer = Observer::start(Rendezvous::unix("/tmp/nccl-doc-nobody.sock", 0, 4)?)?;
    /// observer.decide_split(&[0, 1])?;
    /// assert!(observer.decide_split(&[4]).is_err());
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn decide_split(&self, ranks: &[usize]) -> Result<()> {
        self.inner.decide_split(ranks)
    }

    /// Returns the last calls of all ranks, as [`World::recordings`], for a process that is not a rank: an HTTP server,
    /// or a tool that examines a hanging job.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use nccl::{Observer, Rendezvous};
    /// # let observer = Observer::start(Rendezvous::unix("/tmp/nccl-doc-nobody.sock", 0, 4)?)?;
    /// let timeline = observer.recordings(Duration::from_secs(2));
    /// assert_eq!(timeline.missing.len(), 4);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn recordings(&self, timeout: Duration) -> Timeline {
        let host = crate::host::name();
        let reference = format!("an observer ({host}, pid {})", std::process::id());
        timeline(
            reference,
            Vec::new(),
            self.inner.ask_for_recordings(timeout, &decode),
        )
    }
}

impl std::fmt::Debug for Observer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.inner.fmt(f)
    }
}
