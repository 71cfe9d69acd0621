//! Launches in graphs: each replay is a separate [`Launch`] of the same operations.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Instant;

use cuda_emulator::sync::Mutex;

use super::launch::Launch;
use super::lists::Lists;
use crate::faults;
use crate::nccl::communicator::{Captured, Communicator, Session};
use crate::nccl::profiler::Profile;
use crate::nccl::task::{CollectiveTask, MessageTask, OneSidedTask};
use cuda_emulator::driver::context::Context;
use cuda_emulator::exec::{Bell, Last, Recipe, Step, Stream, Work};

/// The operations of one group on one communicator, in a graph.
pub(crate) struct CapturedLaunch {
    captured: Arc<Captured>,
    session: Arc<Session>,
    collectives: Vec<CollectiveTask>,
    messages: Vec<MessageTask>,
    one_sided: Vec<OneSidedTask>,
    profiles: Vec<Profile>,
}

impl CapturedLaunch {
    /// Captures the operations. The communicator cannot be destroyed before this and all its
    /// replays are gone.
    pub(crate) fn new(
        communicator: &Arc<Communicator>,
        session: &Arc<Session>,
        lists: &mut Lists,
    ) -> Self {
        Self {
            captured: Captured::new(communicator),
            session: Arc::clone(session),
            collectives: std::mem::take(&mut lists.collectives),
            messages: std::mem::take(&mut lists.messages),
            one_sided: std::mem::take(&mut lists.one_sided),
            profiles: std::mem::take(&mut lists.profiles),
        }
    }

    fn launch(&self, context: &Arc<Context>, start: Option<Instant>) -> Box<Launch> {
        let communicator = self.captured.communicator();
        let mut lists = communicator.spare_lists();
        lists.collectives.extend_from_slice(&self.collectives);
        lists.messages.extend_from_slice(&self.messages);
        lists.one_sided.extend_from_slice(&self.one_sided);
        lists.profiles.extend_from_slice(&self.profiles);
        Launch::new(communicator, &self.session, context, lists, start, true)
    }

    /// Reports the capture by `add` to a profiler. As in NCCL, the operations are reported now if no proxy takes part in the
    /// replays.
    pub(crate) fn capturing<R>(
        &self,
        (stream, context): (usize, &Arc<Context>),
        add: impl FnOnce() -> R,
    ) -> R {
        if self.profiles.is_empty() {
            return add();
        }
        let launch = self.launch(context, None);
        let Some(tracker) = launch.tracker() else {
            return add();
        };
        let result = tracker.launching(stream, add);
        if !tracker.has_proxies() {
            tracker.post();
        }
        result
    }
}

impl Recipe for CapturedLaunch {
    fn job(&self, stream: &Arc<Stream>) -> Box<dyn Work> {
        self.captured.check();
        let start = faults::lateness().map(|delay| Instant::now() + delay);
        Box::new(Replay {
            launch: self.launch(stream.context(), start),
            is_posted: false,
            _captured: Arc::clone(&self.captured),
        })
    }

    fn sequence(&self) -> Option<&Mutex<Last>> {
        Some(&self.captured.communicator().issue)
    }
}

struct Replay {
    launch: Box<Launch>,
    /// Whether the operations were reported to a profiler.
    is_posted: bool,
    _captured: Arc<Captured>,
}

impl Work for Replay {
    fn step(&mut self, budget: usize) -> Step {
        if !std::mem::replace(&mut self.is_posted, true)
            && let Some(tracker) = self.launch.tracker()
            && tracker.has_proxies()
        {
            tracker.post();
        }
        self.launch.step(budget)
    }

    fn bell(&self) -> &Bell {
        self.launch.bell()
    }

    fn describe(&self) -> String {
        format!("{}, replayed by a graph", self.launch.describe())
    }

    fn spinners(&self) -> &AtomicU32 {
        self.launch.spinners()
    }
}
