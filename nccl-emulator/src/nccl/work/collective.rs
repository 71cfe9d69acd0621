//! A collective, which all ranks process together.
//!
//! ```text
//! Entering ──own memory looked up, offer written, arrived──▶ Waiting
//! Waiting  ──all have arrived──▶ Working       Waiting ──offers differ──▶ stuck
//! Working  ──no block left──▶ Leaving          Leaving ──all blocks finished──▶ done
//! Working  ──a rank has given up──▶ Waiting
//! ```
//!
//! The work is one row of elements, cut into blocks: `count` elements, or `count` for each rank
//! where every rank has a part of its own (all-gather, reduce-scatter). The rank that takes a block
//! reads it from its source ranks, and writes it to all its destination ranks.

use std::sync::atomic::Ordering;

use super::lane::view;
use super::scope::{Outcome, Scope};
use crate::nccl::communicator::Session;
use crate::nccl::task::{CollectiveTask, Function};
use crate::numbers::reduction;
use crate::transport::{self, Arrival, Offer, Taken, busy};
use cuda_emulator::violations::Violation;

/// The limits of a block in bytes. Small enough that all ranks get some blocks, large enough to be
/// worth the overhead.
const SMALLEST_BLOCK: u64 = 32 << 10;
const LARGEST_BLOCK: u64 = 256 << 10;

enum Phase {
    Entering,
    Waiting,
    Working,
    Leaving,
}

/// See the module.
pub(super) struct Collective {
    task: CollectiveTask,
    phase: Phase,
    /// The number of this collective on its communicator; the first is 1.
    number: u64,
    attention: u32,
    offer: Option<Offer>,
    /// The addresses of each rank's data in this process, if it has any, and the scalar of its
    /// operator.
    inputs: Vec<*const u8>,
    outputs: Vec<*mut u8>,
    scalars: Vec<u64>,
    /// The addresses of the current piece, for its ranks. Kept to reuse the allocations.
    from: Vec<*const u8>,
    to: Vec<*mut u8>,
    /// The block in progress: the next element, and the end.
    block: Option<(u64, u64)>,
}

// SAFETY: the pointers are into pools that the session keeps mapped, and are used by one executor
// at a time.
unsafe impl Send for Collective {}

impl Collective {
    pub(super) fn new(task: CollectiveTask) -> Self {
        Self {
            task,
            phase: Phase::Entering,
            number: 0,
            attention: 0,
            offer: None,
            inputs: Vec::new(),
            outputs: Vec::new(),
            scalars: Vec::new(),
            from: Vec::new(),
            to: Vec::new(),
            block: None,
        }
    }

    /// Returns the number of elements of the whole row.
    fn elements(&self, ranks: usize) -> u64 {
        self.task.count * self.task.parts(ranks as u64)
    }

    /// Returns the number of elements of a block, which is the same on all ranks.
    fn block_elements(&self, ranks: usize) -> u64 {
        let size = self.task.data_type.size();
        let share = self.elements(ranks) * size / (2 * ranks as u64);
        share.clamp(SMALLEST_BLOCK, LARGEST_BLOCK) / size
    }

    fn blocks(&self, ranks: usize) -> u32 {
        self.elements(ranks).div_ceil(self.block_elements(ranks)) as u32
    }

    /// Returns the number of this collective on its communicator; 0 before it has entered.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Returns the finished blocks and all blocks, once all ranks have arrived.
    pub(super) fn progress(&self, session: &Session) -> Option<(u32, u32)> {
        let shared = &session.segment.header().collective.0;
        let has_opened = shared.state(self.number) == Arrival::Open;
        has_opened.then(|| (shared.finished(), self.blocks(session.ranks())))
    }

    /// Makes one bounded step.
    pub(super) fn step(&mut self, scope: &Scope<'_>, budget: usize) -> Outcome {
        match self.try_step(scope, budget) {
            Ok(outcome) => outcome,
            Err(violation) => scope.fail(violation, self.task.function.name()),
        }
    }

    fn try_step(&mut self, scope: &Scope<'_>, budget: usize) -> Result<Outcome, Violation> {
        let session = scope.session;
        let shared = &session.segment.header().collective.0;
        if matches!(self.phase, Phase::Entering) {
            self.enter(scope)?;
        }
        let attention = session.own().attention.load(Ordering::SeqCst);
        if attention != self.attention {
            self.attention = attention;
            self.check_own(scope)?;
        }
        if matches!(self.phase, Phase::Waiting) {
            match shared.state(self.number) {
                Arrival::Open => self.phase = Phase::Working,
                Arrival::Spoiled => return Ok(self.mismatch(scope, false)),
                // The others may have completed it before a rank gave up this one or the next one.
                Arrival::Waiting | Arrival::Withdrawn if shared.is_done(self.number) => {
                    self.phase = Phase::Leaving;
                }
                Arrival::Waiting | Arrival::Withdrawn => return Ok(Outcome::Blocked),
            }
        }
        if matches!(self.phase, Phase::Working) {
            return self.work(scope, budget);
        }
        if !shared.is_done(self.number) {
            return Ok(Outcome::Blocked);
        }
        self.check_own(scope)?;
        Ok(Outcome::Done)
    }

    /// Publishes this rank's offer and arrives. The last rank to arrive compares the offers.
    fn enter(&mut self, scope: &Scope<'_>) -> Result<(), Violation> {
        let session = scope.session;
        let task = &self.task;
        let (rank, ranks) = (session.rank, session.ranks() as u64);
        let offer = Offer {
            signature: signature(task),
            count: task.count,
            scalar: scope.scalar(task.reduction.scalar, task.data_type)?,
            send: scope.resolve(task.send, task.send_bytes(rank, ranks))?,
            receive: scope.resolve(task.receive, task.receive_bytes(rank, ranks))?,
        };
        self.offer = Some(offer);
        self.check_own(scope)?;
        let own = session.own();
        self.attention = own.attention.load(Ordering::SeqCst);
        own.offer.store(&offer);
        self.number = session.next_collective();
        self.phase = Phase::Waiting;
        own.collective.store(self.number, Ordering::Relaxed);
        let shared = &session.segment.header().collective.0;
        let ranks = session.ranks();
        if !shared.arrive(self.number, ranks as u64) {
            return Ok(());
        }
        if (0..ranks).any(session.is_lost()) {
            // The kernel of an aborted or dead rank is gone, so its part is never done.
            return Ok(());
        }
        let agrees = |rank| {
            let other = session.segment.block(rank).offer.load();
            other.signature == offer.signature && other.count == offer.count
        };
        if (0..ranks).all(agrees) {
            shared.open(self.number);
            // A single block is done before another rank wakes up.
            if self.blocks(ranks) > 1 {
                session.segment.ring_others(session.rank);
            }
        } else {
            self.mismatch(scope, true);
            shared.spoil(self.number);
            session.segment.ring_others(session.rank);
        }
        Ok(())
    }

    /// Gives the collective up, if it is not complete.
    pub(super) fn withdraw(&mut self, session: &Session) {
        self.block = None;
        if self.number > 0 {
            let shared = &session.segment.header().collective.0;
            shared.withdraw(self.number);
        }
    }

    fn check_own(&self, scope: &Scope<'_>) -> Result<(), Violation> {
        let pool = scope.session.pool(scope.session.rank);
        if let Some(offer) = &self.offer {
            view(pool, &offer.send)?;
            view(pool, &offer.receive)?;
        }
        Ok(())
    }

    /// Looks up the data of all ranks. Returns false if the data of one of them is not valid.
    fn look_up(&mut self, scope: &Scope<'_>) -> bool {
        let session = scope.session;
        self.inputs.clear();
        self.outputs.clear();
        self.scalars.clear();
        for rank in 0..session.ranks() {
            let offer = session.segment.block(rank).offer.load();
            let pool = session.pool(rank);
            let views =
                view(pool, &offer.send).and_then(|send| Ok((send, view(pool, &offer.receive)?)));
            match views {
                Ok((send, receive)) => {
                    self.inputs.push(send);
                    self.outputs.push(receive);
                    self.scalars.push(offer.scalar);
                }
                Err(violation) => {
                    eprintln!(
                        "nccl-emulator: {}: {} waits for ever: the memory of rank {rank} is bad ({violation})",
                        scope.communicator,
                        self.task.function.name()
                    );
                    session.segment.call_attention(rank);
                    return false;
                }
            }
        }
        true
    }

    /// Works on the block in progress, or takes a new one.
    fn work(&mut self, scope: &Scope<'_>, budget: usize) -> Result<Outcome, Violation> {
        let session = scope.session;
        let shared = &session.segment.header().collective.0;
        let ranks = session.ranks();
        let (at, end) = match self.block {
            Some(block) => block,
            None => {
                session.segment.set_busy(session.rank, busy::ALL);
                let taken = shared.take(self.blocks(ranks));
                let Taken::Block(index) = taken else {
                    session.segment.set_busy(session.rank, busy::IDLE);
                    self.phase = match taken {
                        Taken::Withdrawn => Phase::Waiting,
                        _ => Phase::Leaving,
                    };
                    return Ok(Outcome::Progress);
                };
                // Looked up for every block: memory may be freed while the collective runs.
                if !self.look_up(scope) {
                    session.segment.set_busy(session.rank, busy::IDLE);
                    self.check_own(scope)?;
                    return Ok(Outcome::Stuck);
                }
                let start = u64::from(index) * self.block_elements(ranks);
                let end = start + self.block_elements(ranks);
                (start, end.min(self.elements(ranks)))
            }
        };
        let (part, first) = (at / self.task.count, at % self.task.count);
        let share = (budget as u64 / self.task.data_type.size() / ranks as u64).max(1);
        let n = (end - at).min(self.task.count - first).min(share);
        self.piece(part as usize, first, n);
        if at + n < end {
            self.block = Some((at + n, end));
            return Ok(Outcome::Progress);
        }
        self.block = None;
        session.segment.set_busy(session.rank, busy::IDLE);
        if shared.finish(self.number, self.blocks(ranks)) {
            session.segment.ring_others(session.rank);
        }
        Ok(Outcome::Progress)
    }

    /// Processes `n` elements of a rank's part, or of the only part.
    fn piece(&mut self, part: usize, first: u64, n: u64) {
        let Self { task, from, to, .. } = self;
        let size = task.data_type.size();
        let (at, root) = ((first * size) as usize, task.root as usize);
        let in_part = (part as u64 * task.bytes()) as usize + at;
        // The source ranks and the destination ranks of this piece, and its offset in their buffers.
        let one = |rank: usize| rank..rank + 1;
        let all = 0..self.inputs.len();
        let (givers, give_at, takers, take_at) = match task.function {
            Function::Broadcast => (one(root), at, all, at),
            Function::AllGather => (one(part), at, all, in_part),
            Function::Reduce => (all, at, one(root), at),
            Function::ReduceScatter => (all, in_part, one(part), at),
            _ => (all.clone(), at, all, at),
        };
        from.clear();
        to.clear();
        let bytes = (n * size) as usize;
        // SAFETY: the views are as long as the task says for their rank, and so long that the piece
        // is inside, for each of its givers and takers.
        unsafe {
            from.extend(self.inputs[givers].iter().map(|input| input.add(give_at)));
            to.extend(
                self.outputs[takers]
                    .iter()
                    .map(|output| output.add(take_at)),
            );
            if let Function::Broadcast | Function::AllGather = task.function {
                // Skip a destination that is the source itself.
                for &to in to.iter().filter(|&&to| to.cast_const() != from[0]) {
                    transport::copy(from[0], to, bytes);
                }
            } else {
                let operator = task.reduction.operator;
                reduction::reduce(
                    task.data_type,
                    operator,
                    from,
                    &self.scalars,
                    to,
                    n as usize,
                );
            }
        }
    }

    fn mismatch(&self, scope: &Scope<'_>, first: bool) -> Outcome {
        let session = scope.session;
        let own = self.offer.as_ref().map_or(0, |offer| offer.count);
        let (rank, other) = (0..session.ranks())
            .map(|rank| (rank, session.segment.block(rank).offer.load()))
            .find(|(_, other)| other.signature != signature(&self.task) || other.count != own)
            .unwrap_or((
                session.rank,
                Offer {
                    signature: 0,
                    count: own,
                    ..self.offer.expect("it has arrived")
                },
            ));
        let (name, unit) = (self.task.function.name(), self.task.unit());
        let text = if other.count == own {
            format!(
                "rank {} and rank {rank} run different collectives, types, operators or roots ({name} here)",
                session.rank
            )
        } else {
            format!(
                "{name}: rank {} gives {own} {unit}, rank {rank} gives {}",
                session.rank, other.count
            )
        };
        scope.mismatch(first, &text)
    }
}

/// Returns the arguments that must be the same on all ranks, besides the count, packed into a
/// number.
fn signature(task: &CollectiveTask) -> u64 {
    let root = u64::from(task.root) << 32;
    let event = u64::from(task.has_event) << 24;
    let operator = (task.reduction.operator as u64) << 16;
    root | event | operator | (task.function as u64) << 8 | task.data_type as u64
}
