//! The proxies of an operation, which move its data to and from ranks of other hosts.
//!
//! ```text
//! send   SendGPUWait ──data ready──▶ SendPeerWait ──peer there──▶ SendWait ──copied──▶ stopped
//! recv   RecvWait ──copied──▶ RecvFlushWait ──▶ RecvGPUWait ──▶ stopped
//! ```
//!
//! As in NCCL, up to eight steps of an operation are open at a time. The emulator copies straight between the buffers of two ranks, so that
//! a step is over at once for both ends, and a receive never waits for its device.

use std::collections::VecDeque;

use super::context::Telling;
use super::event::{Event, Handle, Kind, State, bits};

/// The number of steps that are open at a time.
const WINDOW: u32 = 8;

/// The state of the data of a proxy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Flow {
    /// Whether this rank's device has the data of the next step to send.
    pub(crate) is_ready: bool,
    /// Whether the peer takes part in the operation.
    pub(crate) has_peer: bool,
    /// The number of finished steps.
    pub(crate) done: u32,
}

/// One proxy's part in an operation.
#[derive(Debug)]
pub(crate) struct Proxy {
    peer: i32,
    is_send: bool,
    steps: u32,
    /// The size of a step in bytes; the last one may be shorter.
    chunk: u64,
    bytes: u64,
    flow: Flow,
    event: Handle,
    /// The steps that have begun and not ended.
    open: VecDeque<Step>,
    begun: u32,
    ended: u32,
    is_over: bool,
}

#[derive(Debug)]
struct Step {
    event: Handle,
    state: State,
}

impl Proxy {
    /// Creates a proxy that moves `bytes` in steps of `chunk`.
    pub(crate) fn new(peer: usize, is_send: bool, bytes: u64, chunk: u64, steps: u32) -> Self {
        Self {
            peer: peer as i32,
            is_send,
            steps,
            chunk,
            bytes,
            flow: Flow::default(),
            event: Handle::NONE,
            open: VecDeque::new(),
            begun: 0,
            ended: 0,
            is_over: false,
        }
    }

    /// Records the present state of the data. The number of finished steps never decreases.
    pub(crate) fn see(&mut self, flow: Flow) {
        let done = flow.done.min(self.steps).max(self.flow.done);
        self.flow = Flow { done, ..flow };
    }

    /// Notes that all data was moved.
    pub(crate) fn see_end(&mut self) {
        self.flow.done = self.steps;
    }

    /// Whether it sends.
    pub(crate) fn is_send(&self) -> bool {
        self.is_send
    }

    /// Begins the events.
    pub(super) fn begin(&mut self, telling: &Telling<'_>, task: Handle, rank: i32, mask: i32) {
        if mask & (bits::PROXY_OP | bits::PROXY_STEP | bits::NET_PLUGIN) == 0 {
            return;
        }
        self.event = telling.start(&Event {
            parent: task,
            rank,
            kind: Kind::ProxyOp {
                peer: self.peer,
                steps: self.steps as i32,
                chunk: i32::try_from(self.chunk).unwrap_or(i32::MAX),
                is_send: self.is_send,
            },
        });
        telling.record(self.event, State::ProxyOpInProgress, 0);
    }

    /// Reports new states.
    pub(super) fn tell(&mut self, telling: &Telling<'_>, rank: i32, mask: i32) {
        let with_steps = mask & (bits::PROXY_STEP | bits::NET_PLUGIN) != 0;
        loop {
            while with_steps && self.begun < self.steps.min(self.ended + WINDOW) {
                self.begin_step(telling, rank);
            }
            if self.ended >= self.flow.done {
                break;
            }
            self.end_step(telling);
        }
        if let (true, Some(step)) = (self.is_send, self.open.front_mut()) {
            if self.flow.is_ready && step.state == State::SendGpuWait {
                step.tell(telling, State::SendPeerWait, 0);
            }
            if self.flow.has_peer && step.state == State::SendPeerWait {
                let size = self.size_of(self.ended);
                if let Some(step) = self.open.front_mut() {
                    step.tell(telling, State::SendWait, size);
                }
            }
        }
        if self.ended == self.steps && !self.is_over {
            self.is_over = true;
            telling.stop(&mut self.event);
        }
    }

    fn begin_step(&mut self, telling: &Telling<'_>, rank: i32) {
        let event = telling.start(&Event {
            parent: self.event,
            rank,
            kind: Kind::ProxyStep {
                step: self.begun as i32,
            },
        });
        let state = match self.is_send {
            true => State::SendGpuWait,
            false => State::RecvWait,
        };
        let mut step = Step { event, state };
        step.tell(telling, state, 0);
        self.open.push_back(step);
        self.begun += 1;
    }

    fn end_step(&mut self, telling: &Telling<'_>) {
        let size = self.size_of(self.ended);
        self.ended += 1;
        let Some(mut step) = self.open.pop_front() else {
            return;
        };
        if self.is_send {
            if step.state == State::SendGpuWait {
                step.tell(telling, State::SendPeerWait, 0);
            }
            if step.state == State::SendPeerWait {
                step.tell(telling, State::SendWait, size);
            }
        } else {
            step.tell(telling, State::RecvFlushWait, size);
            step.tell(telling, State::RecvGpuWait, size);
        }
        telling.stop(&mut step.event);
    }

    fn size_of(&self, step: u32) -> u64 {
        self.bytes
            .saturating_sub(u64::from(step) * self.chunk)
            .min(self.chunk)
    }
}

impl Step {
    fn tell(&mut self, telling: &Telling<'_>, state: State, size: u64) {
        self.state = state;
        telling.record(self.event, state, size);
    }
}
