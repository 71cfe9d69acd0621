//! The single thread of a process that reads all its connections and runs their timers.
//!
//! The thread waits in `epoll_wait`, however many worlds and connections there are, and nothing that it calls may
//! block. The first world with a connection starts the thread, which then runs until the process ends.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, Timespec, epoll};

use crate::forked;
use crate::sync::Mutex;

pub(super) use rustix::event::epoll::EventFlags;

/// A source of events: a file descriptor, or deadlines.
pub(super) trait Source: Send + Sync {
    /// The descriptor is ready. Must not block.
    fn ready(self: Arc<Self>, events: EventFlags);

    /// A time requested with [`Reactor::wake_at`] has been reached.
    fn due(self: Arc<Self>, now: Instant) {
        let _ = now;
    }
}

pub(super) struct Reactor {
    epoll: OwnedFd,
    bell: OwnedFd,
    sources: Mutex<Sources>,
    alarms: Mutex<BinaryHeap<Reverse<Alarm>>>,
}

#[derive(Default)]
struct Sources {
    next: u64,
    by_token: HashMap<u64, Arc<dyn Source>>,
}

struct Alarm {
    at: Instant,
    source: Weak<dyn Source>,
}

impl PartialEq for Alarm {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}
impl Eq for Alarm {}
impl PartialOrd for Alarm {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Alarm {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.cmp(&other.at)
    }
}

const WAKE_TOKEN: u64 = u64::MAX;

impl Reactor {
    /// Returns the reactor of this process.
    ///
    /// # Errors
    /// It cannot be started; or this process is a forked child, whose descriptors would be added to the parent's `epoll`.
    pub(super) fn get() -> io::Result<&'static Self> {
        static REACTOR: OnceLock<Arc<Reactor>> = OnceLock::new();
        // Before the lock, which another thread of the parent may hold for ever.
        forked::check().map_err(io::Error::other)?;
        Self::get_or_start(&REACTOR, |reactor| {
            let thread = std::thread::Builder::new().name(String::from("nccl-control"));
            thread.spawn(move || reactor.run()).map(drop)
        })
    }

    /// Returns the reactor in `cell`. If there is none, creates one, and calls `spawn` to run it.
    fn get_or_start(
        cell: &'static OnceLock<Arc<Self>>,
        spawn: impl FnOnce(Arc<Self>) -> io::Result<()>,
    ) -> io::Result<&'static Self> {
        static STARTING: Mutex<()> = Mutex::new(());
        let _one = STARTING.lock();
        if let Some(reactor) = cell.get() {
            return Ok(reactor);
        }
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let data = epoll::EventData::new_u64(WAKE_TOKEN);
        epoll::add(&epoll, &bell, data, EventFlags::IN)?;
        let reactor = Arc::new(Self {
            epoll,
            bell,
            sources: Mutex::default(),
            alarms: Mutex::default(),
        });
        // First, because a reactor in `cell` is used by all later worlds, also if no thread runs it.
        spawn(Arc::clone(&reactor))?;
        Ok(cell.get_or_init(|| reactor))
    }

    pub(super) fn add(
        &self,
        fd: impl AsFd,
        events: EventFlags,
        source: Arc<dyn Source>,
    ) -> io::Result<u64> {
        let mut sources = self.sources.lock();
        let token = sources.next;
        sources.next += 1;
        sources.by_token.insert(token, source);
        let added = epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), events);
        if let Err(error) = added {
            sources.by_token.remove(&token);
            return Err(error.into());
        }
        Ok(token)
    }

    pub(super) fn modify(&self, fd: impl AsFd, token: u64, events: EventFlags) {
        // Fails only for a removed descriptor, for which no events are needed.
        let _ = epoll::modify(&self.epoll, fd, epoll::EventData::new_u64(token), events);
    }

    /// Removes a source: it is not called any more, except by a call that is already running.
    pub(super) fn remove(&self, fd: impl AsFd, token: u64) {
        let _ = epoll::delete(&self.epoll, fd);
        let source = self.sources.lock().by_token.remove(&token);
        // Dropping the source may call this function again.
        drop(source);
    }

    /// Calls [`Source::due`] at `at` or a little later.
    pub(super) fn wake_at(&self, at: Instant, source: Weak<dyn Source>) {
        let mut alarms = self.alarms.lock();
        let first = alarms.peek().is_none_or(|Reverse(alarm)| at < alarm.at);
        alarms.push(Reverse(Alarm { at, source }));
        drop(alarms);
        if first {
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
    }

    fn run(&self) {
        let mut events = Vec::with_capacity(256);
        loop {
            let next = self.alarms.lock().peek().map(|Reverse(alarm)| alarm.at);
            let timeout = next.map(|at| timespec(at.saturating_duration_since(Instant::now())));
            events.clear();
            let buffer = rustix::buffer::spare_capacity(&mut events);
            match epoll::wait(&self.epoll, buffer, timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(name: "nccl.internal", target: "nccl", what = "control", %error, "the control thread cannot wait");
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
            for event in &events {
                let token = event.data.u64();
                if token == WAKE_TOKEN {
                    let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
                    continue;
                }
                let source = self.sources.lock().by_token.get(&token).cloned();
                if let Some(source) = source {
                    let flags = event.flags;
                    protect(|| source.ready(flags));
                }
            }
            let now = Instant::now();
            loop {
                let mut alarms = self.alarms.lock();
                if alarms.peek().is_none_or(|Reverse(alarm)| alarm.at > now) {
                    break;
                }
                let source = alarms
                    .pop()
                    .and_then(|Reverse(alarm)| alarm.source.upgrade());
                drop(alarms);
                if let Some(source) = source {
                    protect(|| source.due(now));
                }
            }
        }
    }
}

/// Makes a call and catches panics, so that a defect in one world does not end the connections of the others.
fn protect(call: impl FnOnce()) {
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).is_err() {
        tracing::error!(name: "nccl.internal", target: "nccl", what = "control", "the control thread survived a panic");
    }
}

pub(super) fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

/// Waits until the descriptor is ready for `flags`, or until the deadline; returns whether it is ready.
pub(super) fn poll(
    fd: impl AsFd,
    flags: rustix::event::PollFlags,
    deadline: Instant,
) -> io::Result<bool> {
    let fd = fd.as_fd();
    loop {
        let left = timespec(deadline.saturating_duration_since(Instant::now()));
        match rustix::event::poll(&mut [PollFd::from_borrowed_fd(fd, flags)], Some(&left)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reactor_whose_thread_cannot_be_started_is_tried_again_by_the_next_world() {
        static REACTOR: OnceLock<Arc<Reactor>> = OnceLock::new();
        let no_thread = |_| Err(io::ErrorKind::WouldBlock.into());
        assert!(Reactor::get_or_start(&REACTOR, no_thread).is_err());
        let mut was_started = false;
        let started = Reactor::get_or_start(&REACTOR, |_| {
            was_started = true;
            Ok(())
        });
        assert!(started.is_ok() && was_started);
        // A running reactor is not started a second time.
        assert!(Reactor::get_or_start(&REACTOR, no_thread).is_ok());
    }
}
