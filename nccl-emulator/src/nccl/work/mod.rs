//! What a launch does when its stream reaches it.
//!
//! A [`Launch`] holds the operations of one group on one communicator: first the one-sided ones, in the
//! order of their calls; then the collectives, one
//! after the other, largest first; then all messages at once. That is NCCL's order, and nothing in
//! a group may depend on anything else in it. Addresses are looked up now, not when the call was
//! made.
//!
//! An abort ends a launch at its next step, and the stream goes on as if all were well: the data is
//! garbage, as on a GPU. What can never complete (sizes that differ, a peer's bad memory) leaves
//! the launch waiting for that.

mod collective;
mod connection;
mod lane;
mod local;
mod one_sided;
mod point_to_point;
mod replay;
mod trouble;

use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Weak};
use std::time::Instant;

pub(crate) use local::LocalCopy;
pub(crate) use replay::CapturedLaunch;

use super::communicator::{Communicator, Session};
use super::debug::{self, warn};
use super::group::{self, CollectiveTask, MessageTask, OneSidedTask};
use super::timer;
use crate::code;
use crate::faults::{self, OperationFault};
use crate::numbers::datatype::{DataType, Scalar};
use crate::options::options;
use collective::Collective;
use cuda_emulator::driver::context;
use cuda_emulator::exec::{Bell, Step, Work};
use cuda_emulator::memory::{self, Span};
use cuda_emulator::violations::{self, Violation, ViolationKind};
use lane::Lane;
use one_sided::OneSided;
use point_to_point::PointToPoint;

/// What a launch is made of. Kept by the communicator between launches, for their room.
#[derive(Default)]
pub(crate) struct Lists {
    pub(crate) collectives: Vec<CollectiveTask>,
    pub(crate) messages: Vec<MessageTask>,
    pub(crate) one_sided: Vec<OneSidedTask>,
    lanes: Vec<Lane>,
}

impl Lists {
    /// Empties them.
    pub(crate) fn clear(&mut self) {
        self.collectives.clear();
        self.messages.clear();
        self.one_sided.clear();
        self.lanes.clear();
    }
}

/// What a part of a launch came to.
enum Outcome {
    /// It is complete.
    Done,
    /// It did something.
    Progress,
    /// It waits for the bell.
    Blocked,
    /// It can never complete, but the launch is not over before an abort.
    Stuck,
    /// This rank's own memory is bad: its context has failed.
    Failed,
}

/// What the parts of a launch work with.
struct Scope<'a> {
    communicator: &'a Communicator,
    session: &'a Session,
}

impl Scope<'_> {
    /// The span of an address range of this rank.
    fn resolve(&self, address: u64, bytes: u64) -> Result<Span, Violation> {
        if bytes == 0 {
            // Any address will do, also none.
            return Ok(Span {
                index: 0,
                generation: 0,
                offset: 0,
                len: 0,
            });
        }
        let (device, span) = memory::resolve(address, bytes)?;
        if device != self.communicator.device {
            return Err(Violation::new(
                ViolationKind::Misuse,
                Some(self.communicator.device),
                format!(
                    "{address:#x} is memory of device {device}, the communicator's is {}",
                    self.communicator.device
                ),
            ));
        }
        Ok(span)
    }

    /// The bits of an operator's scalar, read now if it lies in device memory.
    fn scalar(&self, scalar: Scalar, data_type: DataType) -> Result<u64, Violation> {
        let address = match scalar {
            Scalar::Value(bits) => return Ok(bits),
            Scalar::At(address) => address,
        };
        let span = self
            .resolve(address, data_type.size())
            .map_err(|violation| violation.during("reading the operator's scalar"))?;
        let view = self.session.pool(self.session.rank).view(&span)?;
        let mut bits = [0; 8];
        let size = data_type.size() as usize;
        // SAFETY: the view is valid for one element, which is no longer than the bits.
        unsafe { std::ptr::copy_nonoverlapping(view, bits.as_mut_ptr(), size) };
        Ok(u64::from_le_bytes(bits))
    }

    /// This rank's own memory is bad: its context fails, as on a GPU.
    fn fail(&self, violation: Violation, operation: &str) -> Outcome {
        let violation = violation.during(&format!("{operation} on {}", self.communicator));
        context::fail(self.communicator.device, violation);
        Outcome::Failed
    }

    /// Ranks disagree. NCCL hangs then; only under STRICT is it an error.
    fn mismatch(&self, first: bool, text: &str) -> Outcome {
        if first {
            let text = format!("{}: {text}", self.communicator);
            violations::record(Violation::new(
                ViolationKind::Misuse,
                Some(self.communicator.device),
                text,
            ));
        }
        if options().strict {
            let _device = debug::on_device(self.communicator.device);
            warn!("{text}");
            self.communicator.fail(code::INVALID_USAGE);
            return Outcome::Done;
        }
        Outcome::Stuck
    }
}

/// See the module.
pub(crate) struct Launch {
    communicator: Arc<Communicator>,
    session: Arc<Session>,
    lists: Lists,
    /// The collective that runs, counted from 0.
    at: usize,
    /// Its state, once it has begun.
    collective: Option<Collective>,
    messages: PointToPoint,
    one_sided: OneSided,
    /// Not to begin before.
    start: Option<Instant>,
    fault: Option<OperationFault>,
    /// Faults of the next part were looked up.
    prepared: bool,
    stuck: bool,
    connection: connection::Watch,
}

impl Launch {
    /// The operations of one group.
    pub(crate) fn new(
        communicator: &Arc<Communicator>,
        session: &Arc<Session>,
        mut lists: Lists,
        start: Option<Instant>,
    ) -> Box<Self> {
        let (own, ranks) = (session.rank as u32, session.ranks() as u32);
        // All ranks sort alike.
        group::sort(&mut lists.collectives, u64::from(ranks));
        lists.messages.sort_unstable_by_key(|message| {
            let (from, to) = match message.direction {
                crate::transport::Direction::Send => (own, message.peer),
                crate::transport::Direction::Receive => (message.peer, own),
            };
            let distance = if to < from {
                to + ranks - from
            } else {
                to - from
            };
            (distance, message.direction, message.order)
        });
        let lanes = std::mem::take(&mut lists.lanes);
        if let Some(start) = start {
            ring_at(start, session);
        }
        Box::new(Self {
            communicator: Arc::clone(communicator),
            session: Arc::clone(session),
            lists,
            at: 0,
            collective: None,
            messages: PointToPoint::new(lanes),
            one_sided: OneSided::default(),
            start,
            fault: None,
            prepared: false,
            stuck: false,
            connection: connection::Watch::default(),
        })
    }

    /// Looks up the faults of the part that is about to begin.
    fn prepare(&mut self) {
        self.prepared = true;
        if !faults::any() {
            return;
        }
        let subject = self.communicator.subject();
        self.fault = match self.lists.collectives.get(self.at) {
            Some(task) => faults::check_operation(task.function.name(), subject),
            None => {
                let calls = self
                    .lists
                    .messages
                    .iter()
                    .filter(|message: &&MessageTask| message.leads);
                calls
                    .filter_map(|message| faults::check_operation(message.function.name(), subject))
                    .reduce(OperationFault::and)
            }
        };
        if let Some(fault) = &self.fault {
            if let Some(until) = fault.until() {
                ring_at(until, &self.session);
            }
            let session = Arc::downgrade(&self.session);
            fault.on_release(move || ring(&session));
        }
    }

    /// Whether something on purpose keeps the next part from beginning.
    fn is_held(&mut self) -> bool {
        if self.start.is_some_and(|start| Instant::now() < start) {
            return true;
        }
        self.start = None;
        let Some(fault) = &self.fault else {
            return false;
        };
        if fault.holds() {
            return true;
        }
        if let Some(code) = fault.code() {
            let _device = debug::on_device(self.communicator.device);
            warn!(
                "{}: fails with code {}, as it was told to",
                self.communicator,
                code.number()
            );
            self.communicator.fail(code);
            self.stuck = true;
            return true;
        }
        self.fault = None;
        false
    }

    fn part(&mut self, budget: usize) -> Outcome {
        if !self.prepared {
            self.prepare();
        }
        if self.is_held() {
            return Outcome::Blocked;
        }
        let scope = Scope {
            communicator: &self.communicator,
            session: &self.session,
        };
        let one_sided = &mut self.one_sided;
        if let Some(outcome) = one_sided.step(&scope, &self.lists.one_sided, budget) {
            return outcome;
        }
        let Some(task) = self.lists.collectives.get(self.at) else {
            return self.messages.step(&scope, &self.lists.messages, budget);
        };
        let collective = self
            .collective
            .get_or_insert_with(|| Collective::new(*task));
        match collective.step(&scope, budget) {
            Outcome::Done => {
                self.collective = None;
                self.at += 1;
                self.prepared = false;
                Outcome::Progress
            }
            other => other,
        }
    }
}

fn ring(session: &Weak<Session>) {
    if let Some(session) = session.upgrade() {
        session.own().bell.ring();
    }
}

fn ring_at(when: Instant, session: &Arc<Session>) {
    let session = Arc::downgrade(session);
    timer::at(when, move || ring(&session));
}

impl Work for Launch {
    fn step(&mut self, budget: usize) -> Step {
        let seen = self.session.own().bell.value();
        if self.communicator.abort.is_raised() {
            return Step::Done;
        }
        if self.stuck {
            return Step::Blocked { seen };
        }
        match self.part(budget) {
            Outcome::Done | Outcome::Failed => Step::Done,
            Outcome::Progress => Step::Progress,
            Outcome::Blocked if self.start.is_none() && self.fault.is_none() => {
                match self.look_at_connections() {
                    true => Step::Progress,
                    false => Step::Blocked { seen },
                }
            }
            Outcome::Blocked => Step::Blocked { seen },
            Outcome::Stuck => {
                self.stuck = true;
                Step::Blocked { seen }
            }
        }
    }

    fn bell(&self) -> &Bell {
        &self.session.own().bell
    }

    fn describe(&self) -> String {
        if let Some(task) = self.one_sided.current(&self.lists.one_sided) {
            return format!("{} on {}", one_sided::describe(task), self.communicator);
        }
        let operations = match (
            self.lists.collectives.get(self.at),
            self.lists.messages.as_slice(),
        ) {
            (Some(task), _) => {
                format!("{} of {} {}", task.function.name(), task.count, task.unit())
            }
            (None, [message]) => format!(
                "{} of {} bytes, peer {}",
                message.function.name(),
                message.bytes,
                message.peer
            ),
            (None, messages) => format!("{} sends and receives", messages.len()),
        };
        format!("{operations} on {}", self.communicator)
    }

    fn spinners(&self) -> &AtomicU32 {
        &self.session.segment.header().spinners.0
    }
}

impl Drop for Launch {
    fn drop(&mut self) {
        let mut lists = std::mem::take(&mut self.lists);
        lists.lanes = self.messages.take_lanes();
        self.communicator.give_back(lists);
    }
}
