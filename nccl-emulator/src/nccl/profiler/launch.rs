//! Events of a launch: its group, its operations, and their progress on the device and in the proxies.
//!
//! Two threads write to a [`Tracker`]. The launching thread posts the operations after the launch of their kernel, as NCCL
//! does. The thread that runs the stream records the progress ([`Tracker::see`]). Events below an operation are reported once
//! the operation is posted, by whichever thread comes later.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use cuda_emulator::sync::Mutex;

use super::context::{Context, Telling};
use super::event::{Event, Handle, Kind, State, bits};
use super::profile::Profile;
use super::proxy::Proxy;
use crate::nccl::communicator::Communicator;
use crate::nccl::task::{CollectiveTask, Function, MessageTask, ProfileIndex};
use crate::numbers::datatype::DataType;
use crate::transport::Direction;

/// Returns the time of the device's clock, which CUDA calls `globaltimer`.
fn now() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |time| time.as_nanos() as u64)
}

/// See the module.
pub(crate) struct Tracker {
    context: Arc<Context>,
    communicator: Arc<Communicator>,
    /// Whether the launch is in a graph.
    is_persistent: bool,
    state: Mutex<Operations>,
}

/// The operations of a launch.
struct Operations {
    is_posted: bool,
    collectives: Vec<Operation>,
    messages: Vec<Operation>,
}

/// An operation, with the events that the plugin may get.
pub(crate) struct Operation {
    profile: Option<Profile>,
    kind: Kind,
    event: Handle,
    /// The times at which the device began and ended the operation.
    begun: Option<u64>,
    ended: Option<u64>,
    /// The event of the operation on the device, once it has begun.
    channel: Option<Handle>,
    /// Whether the end of that event was reported.
    is_told: bool,
    pub(crate) proxies: Vec<Proxy>,
}

impl Operation {
    fn new(profile: Option<Profile>, kind: Kind, proxies: Vec<Proxy>) -> Self {
        Self {
            profile,
            kind,
            event: Handle::NONE,
            begun: None,
            ended: None,
            channel: None,
            is_told: false,
            proxies,
        }
    }

    fn mask(&self) -> i32 {
        self.profile.map_or(0, |profile| profile.mask)
    }

    /// Notes that the device has begun the operation.
    pub(crate) fn see_begin(&mut self) {
        if self.begun.is_none() {
            self.begun = Some(now());
        }
    }

    /// Notes that the operation is over.
    pub(crate) fn see_end(&mut self) {
        self.see_begin();
        if self.ended.is_none() {
            self.ended = Some(now());
            self.proxies.iter_mut().for_each(Proxy::see_end);
        }
    }

    fn tell(&mut self, telling: &Telling<'_>, rank: i32) {
        let mask = self.mask();
        if mask & bits::KERNEL_CH != 0 && !self.is_told {
            if let (None, Some(time)) = (self.channel, self.begun) {
                self.channel = Some(telling.start(&Event {
                    parent: self.event,
                    rank: 0,
                    kind: Kind::KernelCh { time },
                }));
            }
            if let (Some(mut channel), Some(time)) = (self.channel, self.ended) {
                self.is_told = true;
                telling.record(channel, State::KernelChStop, time);
                telling.stop(&mut channel);
            }
        }
        for proxy in &mut self.proxies {
            proxy.tell(telling, rank, mask);
        }
    }
}

impl Tracker {
    /// Creates the tracker of a launch, whose lists are sorted. Returns `None` if the plugin wants no events. The last two
    /// arguments return the proxies of an operation.
    pub(crate) fn new(
        communicator: &Arc<Communicator>,
        is_persistent: bool,
        (profiles, collectives, messages): (&[Profile], &[CollectiveTask], &[MessageTask]),
        of_collective: impl Fn(&CollectiveTask) -> Vec<Proxy>,
        of_message: impl Fn(&MessageTask) -> Vec<Proxy>,
    ) -> Option<Arc<Self>> {
        if profiles.is_empty() {
            return None;
        }
        let context = Arc::clone(communicator.profiler()?);
        let profile =
            |index: Option<ProfileIndex>| profiles.get(index?.get() as usize - 1).copied();
        let collectives = collectives.iter().map(|task| {
            let profile = profile(task.profile);
            Operation::new(profile, collective(task, profile), of_collective(task))
        });
        let messages = messages.iter().map(|task| {
            let mut profile = profile(task.profile);
            if task.peer == communicator.rank as u32
                && let Some(profile) = &mut profile
            {
                // NCCL has no proxy that reads the times of such a message.
                profile.mask &= !bits::KERNEL_CH;
            }
            Operation::new(profile, message(task, profile), of_message(task))
        });
        let state = Mutex::new(Operations {
            is_posted: false,
            collectives: collectives.collect(),
            messages: messages.collect(),
        });
        Some(Arc::new(Self {
            context,
            communicator: Arc::clone(communicator),
            is_persistent,
            state,
        }))
    }

    /// Returns whether NCCL's proxies take part in the launch: those of the network, or the one that reads a kernel's times. A
    /// graph posts the operations of such a launch at each replay; other operations are posted only when they are captured.
    pub(crate) fn has_proxies(&self) -> bool {
        let state = self.state.lock();
        let mut all = state.collectives.iter().chain(&state.messages);
        all.any(|operation| {
            !operation.proxies.is_empty() || operation.mask() & bits::KERNEL_CH != 0
        })
    }

    /// Reports the launch of the kernel, which `launch` makes.
    pub(crate) fn launching<R>(&self, stream: usize, launch: impl FnOnce() -> R) -> R {
        let profile = {
            let state = self.state.lock();
            let mut all = state.collectives.iter().chain(&state.messages);
            all.find_map(|operation| operation.profile)
        };
        let wanted = |profile: &Profile| profile.mask & bits::KERNEL_LAUNCH != 0;
        let Some(profile) = profile.filter(wanted) else {
            return launch();
        };
        let begin = |telling: Telling<'_>| {
            telling.start(&Event {
                parent: profile.group_api,
                rank: 0,
                kind: Kind::KernelLaunch { stream },
            })
        };
        let telling = self.context.telling().filter(Telling::knows_calls);
        let mut event = telling.map_or(Handle::NONE, begin);
        let result = launch();
        if let Some(telling) = self.context.telling() {
            telling.stop(&mut event);
        }
        result
    }

    /// Reports the operations, once.
    pub(crate) fn post(&self) {
        let mut state = self.state.lock();
        if std::mem::replace(&mut state.is_posted, true) {
            return;
        }
        let Operations {
            collectives,
            messages,
            ..
        } = &mut *state;
        let mut all = collectives.iter().chain(&*messages);
        let Some(telling) = self.context.telling() else {
            for operation in collectives {
                self.count(operation);
            }
            return;
        };
        // NCCL goes by the first operation of which the plugin wants something.
        let mask = all
            .find_map(|operation| operation.profile)
            .map_or(0, |p| p.mask);
        let mut group = Handle::NONE;
        if mask & (bits::GROUP | bits::COLL | bits::P2P | bits::BELOW_TASK) != 0 {
            group = telling.start(&Event {
                parent: Handle::NONE,
                rank: 0,
                kind: Kind::Group,
            });
        }
        for operation in &mut *collectives {
            self.count(operation);
            self.post_operation(&telling, operation, group, bits::COLL);
        }
        for operation in &mut *messages {
            self.post_operation(&telling, operation, group, bits::P2P);
        }
        let rank = self.communicator.rank;
        for operation in collectives.iter_mut().chain(&mut *messages) {
            let (event, mask) = (operation.event, operation.mask());
            for proxy in &mut operation.proxies {
                proxy.begin(&telling, event, rank, mask);
            }
        }
        for operation in collectives.iter_mut().chain(&mut *messages) {
            // The handle remains the parent of the events below.
            telling.stop(&mut { operation.event });
        }
        telling.stop(&mut group);
        for operation in collectives.iter_mut().chain(&mut *messages) {
            operation.tell(&telling, rank);
        }
    }

    /// Counts a collective operation, and notes its number.
    fn count(&self, operation: &mut Operation) {
        let mask = operation.mask();
        if let Kind::Coll {
            sequence, function, ..
        } = &mut operation.kind
        {
            let counter = self.communicator.sequence(*function);
            // As in NCCL, whose replays reach this place on all ranks only with this kind of events.
            *sequence = match !self.is_persistent || mask & bits::KERNEL_CH != 0 {
                true => counter.fetch_add(1, Ordering::Relaxed),
                false => counter.load(Ordering::Relaxed),
            };
        }
    }

    fn post_operation(
        &self,
        telling: &Telling<'_>,
        operation: &mut Operation,
        of_launch: Handle,
        own: i32,
    ) {
        if operation.mask() & (own | bits::BELOW_TASK) == 0 {
            return;
        }
        if let Kind::Coll { group, .. } | Kind::P2p { group, .. } = &mut operation.kind {
            *group = of_launch;
        }
        operation.event = telling.start(&Event {
            parent: operation
                .profile
                .map_or(Handle::NONE, |profile| profile.api),
            rank: self.communicator.rank,
            kind: operation.kind,
        });
    }

    /// Records the progress of collectives and messages by `look`, and reports it.
    pub(crate) fn see(&self, look: impl FnOnce(&mut [Operation], &mut [Operation])) {
        let mut state = self.state.lock();
        let Operations {
            is_posted,
            collectives,
            messages,
        } = &mut *state;
        look(collectives, messages);
        if *is_posted && let Some(telling) = self.context.telling() {
            for operation in collectives.iter_mut().chain(messages) {
                operation.tell(&telling, self.communicator.rank);
            }
        }
    }
}

fn collective(task: &CollectiveTask, profile: Option<Profile>) -> Kind {
    Kind::Coll {
        sequence: 0,
        function: task.function,
        send: task.send,
        receive: task.receive,
        count: task.count,
        root: task.root as i32,
        data_type: task.data_type,
        group: Handle::NONE,
        tag: profile.map_or(0, |profile| profile.tag),
    }
}

fn message(task: &MessageTask, profile: Option<Profile>) -> Kind {
    let function = match task.direction {
        Direction::Send => Function::Send,
        Direction::Receive => Function::Recv,
    };
    Kind::P2p {
        function,
        address: task.address,
        data_type: profile.map_or(DataType::I8, |profile| profile.data_type),
        count: profile.map_or(task.bytes, |profile| profile.count),
        peer: task.peer as i32,
        group: Handle::NONE,
    }
}
