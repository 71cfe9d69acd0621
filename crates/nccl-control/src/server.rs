//! What a rank has of its door: rank 0 opens it for all, others beside it, and it changes hands when the world goes on.

use std::fmt;
use std::io::{self, Write as _};
use std::sync::{Arc, Once, Weak};
use std::time::{Duration, Instant};

use super::attached::Attached;
use super::door::{Door, OnWord, PATIENCE};
use super::hub::Hub;
use super::place::{self, Address, Listener};
use super::secret::Secret;
use crate::departure::ProcessEnd;
use crate::error::{Error, Result};

/// What all ranks of one launch have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Job {
    pub(super) name: String,
    pub(super) epoch: u64,
    pub(super) secret: Option<Secret>,
    /// Addresses are translated on the way, and tell nothing.
    pub(super) translated: bool,
}

/// Rank 0's side. Dropped, it lets what is answerable be answered, within bounds, and closes.
pub(super) struct Server {
    door: Arc<Door>,
}

impl Server {
    /// Rank 0's, which coordinates.
    pub(super) fn start(address: &Address, hub: Arc<Hub>, job: Job) -> Result<Self> {
        let listener = place::listen(address)?;
        if let Some(why) = place::unreachable(address, &listener) {
            hub.remark(why);
        }
        tracing::info!(name: "nccl.rendezvous.listening", target: "nccl", at = listener.at, "rank 0 listens");
        if let (Address::Tcp(_), None) = (address, &job.secret) {
            warn_of_open_door(&listener.at);
        }
        let door = Door::open(vec![listener], 0, hub, job, Vec::new(), None)?;
        Ok(Self { door })
    }

    /// Rank 0's of the next epoch, where the coordinator of the last one listened, and at those of `places` that
    /// were a coordinator's who is gone.
    pub(super) fn of_next(
        listeners: Vec<Listener>,
        hub: Arc<Hub>,
        job: Job,
        places: Vec<Address>,
    ) -> Result<Self> {
        let door = Door::open(listeners, 0, hub, job, places, None)?;
        let server = Self { door };
        server.take_places();
        Ok(server)
    }

    /// The listeners, for the next epoch: who is here stays here, who comes from now on comes there. Empty when
    /// they were handed over already.
    pub(super) fn hand_over(&self) -> Vec<Listener> {
        self.door.hand_over()
    }

    /// What was handed over comes back: there was no next epoch.
    pub(super) fn take_back(&self, listeners: Vec<Listener>) -> Result<()> {
        self.door.take_back(listeners)
    }

    /// From now on, this rank is found where those look for the coordinator who are new: at each of the places
    /// on this host that nobody has any more. One that is still taken is tried again for a while, on a thread
    /// of its own.
    pub(super) fn take_places(&self) {
        let left = self.door.take_places();
        if left.is_empty() {
            return;
        }
        let door = Arc::downgrade(&self.door);
        let spawned = std::thread::Builder::new()
            .name(String::from("nccl-places"))
            .spawn(move || insist(&door));
        if let Err(error) = spawned {
            untaken(&left, &error.to_string());
        }
    }

    /// This rank is in a later epoch. What is left of this one may lose its coordinator all the same, and this rank be the next:
    /// it is not to be found then where those look who are new, who belong to the later epoch.
    pub(super) fn has_gone_on(&self) {
        self.door.hub.has_gone_on();
        self.door.leave_places();
    }

    /// Where the ranks listen, as far as they do: for those who come to the wrong one.
    pub(super) fn know(&self, addresses: Vec<Option<String>>) {
        self.door.hub.know(addresses);
    }

    /// Another rank's, whose `hub` is dormant: those who can prove that they belong to the job learn who
    /// coordinates, and an observer may say there that rank 0 is dead.
    pub(super) fn beside(
        listener: Listener,
        rank: usize,
        hub: Hub,
        job: Job,
        places: Vec<Address>,
        on_word: impl Fn(&ProcessEnd) + Send + Sync + 'static,
    ) -> Result<Self> {
        let (hub, listeners) = (Arc::new(hub), vec![listener]);
        let on_word: OnWord = Box::new(on_word);
        let door = Door::open(listeners, rank, hub, job, places, Some(on_word))?;
        Ok(Self { door })
    }

    /// Who wants to know from now on how the coordinator's process ended.
    pub(super) fn on_word(&self, on_word: impl Fn(&ProcessEnd) + Send + Sync + 'static) {
        self.door.on_word(Box::new(on_word));
    }

    /// Wakes up when the hub needs it.
    pub(super) fn schedule(&self) {
        self.door.schedule();
    }

    pub(super) fn hub(&self) -> &Arc<Hub> {
        &self.door.hub
    }

    /// Where it listens.
    pub(super) fn at(&self) -> &str {
        self.door.at()
    }

    /// Whose recordings this door gives out.
    pub(super) fn attach(&self, attached: &Arc<dyn Attached>) {
        self.door.attach(attached);
    }

    pub(super) fn job(&self) -> &Job {
        &self.door.job
    }

    /// As if this process died.
    #[cfg(test)]
    pub(super) fn cut_for_a_test(&self) {
        self.door.close();
    }

    /// Lets what is answerable be answered, and closes.
    pub(super) fn finish(&self) {
        let mut deadline = Instant::now() + PATIENCE;
        let mut backlog = usize::MAX;
        loop {
            let now = self.door.backlog();
            if now == 0 && !self.door.hub.is_waited_for() || Instant::now() >= deadline {
                break;
            }
            // A slow network may take longer, as long as it takes something.
            if now < backlog {
                (backlog, deadline) = (now, Instant::now() + PATIENCE);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.door.close();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Says once per process that nothing keeps strangers out: in the log, and where a program without a log shows it.
pub(super) fn warn_of_open_door(at: &str) {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        tracing::warn!(
            name: "nccl.rendezvous.open_door",
            target: "nccl",
            at,
            "anybody who reaches this address may join the job: set NCCL_RUN_SECRET"
        );
        // A program that has closed its stderr does not want to hear it.
        let _ = writeln!(
            io::stderr(),
            "nccl: rank 0 listens at {at} without a secret: anybody who reaches this address may join the job, read and change \
             what its ranks tell each other; make a secret with (umask 077; openssl rand -hex 32 > FILE) and set \
             NCCL_RUN_SECRET_FILE=FILE on all ranks"
        );
    });
}

/// How long a place is waited for that is still taken: by what a rank that is gone has left running, say.
pub(super) const INSISTENCE: Duration = Duration::from_secs(30);

fn insist(door: &Weak<Door>) {
    let until = Instant::now() + INSISTENCE;
    let mut pause = Duration::from_millis(10);
    loop {
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(500));
        let Some(door) = door.upgrade() else { return };
        if door.has_no_places() || door.is_closed() {
            return;
        }
        let left = door.take_places();
        if left.is_empty() {
            return;
        }
        if Instant::now() >= until {
            return untaken(&left, "it is still taken");
        }
    }
}

pub(super) fn untaken(left: &[(Address, Error)], why: &str) {
    for (place, error) in left {
        tracing::warn!(name: "nccl.rendezvous.trouble", target: "nccl", what = "place", %place, %error, why, "new processes cannot come in by this address");
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").finish_non_exhaustive()
    }
}
