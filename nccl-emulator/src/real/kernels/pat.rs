//! The algorithm PAT (parallel aggregated trees): all-gather and reduce-scatter over peers at distances of powers of two.
//!
//! A [`schedule`] determines the steps of each group of the block's threads. The groups of a round synchronise twice: before
//! their data moves, when each has determined source and destination, and afterwards, when counters are raised.

mod schedule;

use std::sync::Arc;

use super::block::{STEPS, Stop};
use super::connection::{End, Registration};
use super::functions::Collective as Kind;
use super::memory::{self, View};
use super::task::Task;
use schedule::{Gather, Plan, Scatter, Step};

/// The most groups of threads: 512 threads in warps of 32.
const GROUPS: i64 = 16;

/// A peer at a distance of a power of two.
struct Dimension {
    end: End,
    /// The last element that holds data, counted over all steps.
    filled: i64,
    elements: i64,
}

impl Dimension {
    fn place(&self, step: u64, offset: i64, element: i64) -> u64 {
        let slot = (step % STEPS) as i64 * self.elements + offset;
        self.end.buffers[2].wrapping_add_signed(slot * element)
    }

    fn position(&self, step: u64, offset: i64) -> i64 {
        offset + step as i64 * self.elements
    }
}

/// The copy or reduction of a group in a round.
#[derive(Default)]
struct Move {
    sources: Vec<u64>,
    /// The first source is this rank's input, which the operator may scale.
    own: bool,
    destinations: Vec<u64>,
    count: i64,
    /// The end of the filled part of this rank's buffer afterwards.
    local: Option<i64>,
    /// The dimension that is filled, and the end of its filled part afterwards.
    filled: Option<(usize, i64)>,
}

pub(super) async fn run(task: &Task<'_>) -> Result<(), Stop> {
    let gather = task.function.collective == Kind::AllGather;
    let share = task.share;
    let comm = &task.block.comm;
    let element = task.arithmetic.element() as i64;
    let plan = Plan {
        step_bytes: share.chunk * element,
        depth: STEPS as i64,
        groups: GROUPS,
        begin: share.offset,
        end: share.offset + share.count,
        count: share.total,
        chunk: share.chunk,
        rank: comm.rank as i64,
        ranks: comm.ranks as i64,
        element,
    };
    if share.count == 0 {
        return Ok(());
    }
    let mut pat = Pat::open(task, gather)?;
    if gather {
        let mut schedule = Gather::new(plan);
        let groups = schedule.groups();
        pat.rounds(groups, || schedule.next()).await
    } else {
        let mut schedule = Scatter::new(plan);
        let groups = schedule.groups();
        pat.rounds(groups, || schedule.next()).await?;
        pat.divide().await
    }
}

struct Pat<'a> {
    task: &'a Task<'a>,
    gather: bool,
    sends: Vec<Dimension>,
    receives: Vec<Dimension>,
    /// The end of the filled part of this rank's buffer.
    local: i64,
    views: Vec<Arc<View>>,
}

impl<'a> Pat<'a> {
    fn open(task: &'a Task<'a>, gather: bool) -> Result<Self, Stop> {
        let block = task.block;
        let (rank, ranks) = (block.comm.rank as i64, block.comm.ranks as i64);
        let element = task.arithmetic.element();
        let mut pat = Self {
            task,
            gather,
            sends: Vec::new(),
            receives: Vec::new(),
            local: 0,
            views: Vec::new(),
        };
        let mut distance = 1;
        while distance < ranks {
            let (before, after) = (
                (rank - distance).rem_euclid(ranks),
                (rank + distance) % ranks,
            );
            let (from, to) = match gather {
                true => (after, before),
                false => (before, after),
            };
            for (peer, send) in [(from, false), (to, true)] {
                let end = End::open(block, peer, send, 0, Registration::default(), false, 1)?;
                let bytes = end.step_size * STEPS as usize;
                let view = memory::view(block.memory(), end.buffers[2], bytes)?;
                pat.views.push(Arc::new(view));
                let dimension = Dimension {
                    elements: (end.step_size / element) as i64,
                    end,
                    filled: 0,
                };
                match send {
                    true => pat.sends.push(dimension),
                    false => pat.receives.push(dimension),
                }
            }
            distance *= 2;
        }
        Ok(pat)
    }

    async fn rounds(&mut self, groups: usize, mut next: impl FnMut() -> Step) -> Result<(), Stop> {
        let mut over = false;
        while !over {
            let mut steps = Vec::with_capacity(groups);
            for _ in 0..groups {
                let step = next();
                over |= step.last;
                steps.push(step);
                if over {
                    break;
                }
            }
            let mut moves = Vec::with_capacity(groups);
            for step in steps.iter().filter(|step| !step.skipped) {
                moves.push((*step, self.prepare(step).await?));
            }
            for (step, work) in &moves {
                self.carry_out(step, work).await?;
            }
            for (step, _) in &moves {
                if step.post_send
                    && let Some(peer) = index(step.send, &self.sends)
                {
                    self.sends[peer].end.store_tail()?;
                }
                if step.post_receive
                    && let Some(peer) = index(step.receive, &self.receives)
                {
                    self.receives[peer].end.store_head()?;
                }
            }
            self.task.block.meter().progress();
        }
        Ok(())
    }

    /// Divides the result of a scatter, if the operator requires it. The step that completes an element is not known earlier.
    async fn divide(&self) -> Result<(), Stop> {
        const PIECE: i64 = 1 << 16;
        let (task, arithmetic) = (self.task, self.task.arithmetic);
        if !arithmetic.divides() {
            return Ok(());
        }
        let (mut at, end) = (task.share.offset, task.share.offset + task.share.count);
        while at < end {
            let count = (end - at).min(PIECE) as usize;
            let bytes = count * arithmetic.element();
            task.block.meter().grant(bytes).await;
            let place = self.user(task.work.output, at);
            let view = memory::view(task.block.memory(), place, bytes)?;
            let output: *mut u8 = view.at_address(place, bytes)?;
            // SAFETY: the pointer is that of a view of `bytes` bytes.
            unsafe { arithmetic.apply(&[output.cast_const()], &[output], count, false, true) };
            view.still_valid()?;
            at += count as i64;
        }
        Ok(())
    }

    fn user(&self, base: u64, index: i64) -> u64 {
        base.wrapping_add_signed(index * self.task.arithmetic.element() as i64)
    }

    /// Waits for the requirements of a step, and determines source and destination of its data.
    async fn prepare(&self, step: &Step) -> Result<Move, Stop> {
        let block = self.task.block;
        let element = self.task.arithmetic.element() as i64;
        let (input, output) = (self.task.work.input, self.task.work.output);
        let count = step.count.max(0);
        let receive = index(step.receive, &self.receives).map(|index| &self.receives[index]);
        let send = index(step.send, &self.sends).map(|index| (index, &self.sends[index]));
        // `step_offset` applies to the side that revisits data: the receiver of a gather, the sender of a scatter.
        let ahead = step.step_offset as u64;
        let (receive_ahead, send_ahead) = match self.gather {
            true => (ahead, 0),
            false => (0, ahead),
        };
        let mut work = Move {
            count,
            ..Move::default()
        };
        let received = match receive {
            Some(from) => {
                from.end.wait_data(block, receive_ahead + 1).await?;
                let at = from.end.step + receive_ahead;
                Some((from, at, from.place(at, step.receive_offset, element)))
            }
            None => None,
        };
        let sent = match send {
            Some((index, to)) => {
                let at = to.end.step + send_ahead;
                to.end.wait_room(block, at + 1).await?;
                Some((index, to, at, to.place(at, step.send_offset, element)))
            }
            None => None,
        };
        if self.gather {
            // From a peer or the input, to a peer, and to the output if the data is new there.
            let own = self.user(output, step.output);
            let source = match received {
                Some((from, at, place)) => {
                    let position = from.position(at, step.receive_offset) + count;
                    let new = from.filled < position;
                    work.filled = index(step.receive, &self.receives).map(|at| (at, position));
                    work.destinations.extend(new.then_some(own));
                    place
                }
                None => {
                    let position = step.input + count;
                    let new = self.local < position;
                    work.local = new.then_some(position);
                    let place = self.user(input, step.input);
                    work.destinations
                        .extend((new && place != own).then_some(own));
                    place
                }
            };
            work.sources.push(source);
            work.destinations.extend(sent.map(|(.., place)| place));
        } else {
            // From a peer, if any, and the input if nothing is there yet, to a peer or the output.
            let own = self.user(input, step.input);
            let (destination, new) = match sent {
                Some((at, to, step_at, place)) => {
                    let position = to.position(step_at, step.send_offset) + count;
                    work.filled = Some((at, position));
                    (place, to.filled < position)
                }
                None => {
                    let position = step.output + count;
                    let new = self.local < position;
                    work.local = new.then_some(position);
                    (self.user(output, step.output), new)
                }
            };
            work.own = new;
            work.sources.push(if new { own } else { destination });
            work.sources.extend(received.map(|(.., place)| place));
            work.destinations.push(destination);
        }
        Ok(work)
    }

    async fn carry_out(&mut self, step: &Step, work: &Move) -> Result<(), Stop> {
        let block = self.task.block;
        let arithmetic = self.task.arithmetic;
        let element = arithmetic.element();
        let bytes = work.count as usize * element;
        if bytes > 0 && !work.destinations.is_empty() {
            block.meter().grant(bytes).await;
            let resolve = |places: &[u64]| -> Result<Vec<(Arc<View>, u64)>, Stop> {
                let view = |&place: &u64| {
                    Ok(
                        match self.views.iter().find(|view| view.covers(place, bytes)) {
                            Some(view) => (view.clone(), place),
                            None => (Arc::new(memory::view(block.memory(), place, bytes)?), place),
                        },
                    )
                };
                places.iter().map(view).collect()
            };
            let (from, to) = (resolve(&work.sources)?, resolve(&work.destinations)?);
            let mut inputs: Vec<*const u8> = Vec::with_capacity(from.len());
            for (view, place) in &from {
                inputs.push(view.at_address(*place, bytes)?);
            }
            let mut outputs = Vec::with_capacity(to.len());
            for (view, place) in &to {
                outputs.push(view.at_address(*place, bytes)?);
            }
            // SAFETY: every pointer is that of a view of `bytes` bytes, which `from` and `to` keep.
            unsafe { arithmetic.apply(&inputs, &outputs, work.count as usize, work.own, false) };
            for (view, _) in from.iter().chain(&to) {
                view.still_valid()?;
            }
        }
        if step.post_send
            && let Some(peer) = index(step.send, &self.sends)
        {
            let end = &mut self.sends[peer].end;
            let size = (step.send_offset + work.count) * element as i64;
            end.store_size(block, end.step, size)?;
            end.step += 1;
            end.save(block)?;
        }
        if step.post_receive
            && let Some(peer) = index(step.receive, &self.receives)
        {
            let end = &mut self.receives[peer].end;
            end.step += 1;
            end.save(block)?;
        }
        if let Some(local) = work.local {
            self.local = self.local.max(local);
        }
        if let Some((peer, filled)) = work.filled {
            let dimension = match self.gather {
                true => &mut self.receives[peer],
                false => &mut self.sends[peer],
            };
            dimension.filled = dimension.filled.max(filled);
        }
        Ok(())
    }
}

/// Returns the dimension of a step; `None` for this rank's own buffer.
fn index(dimension: i64, of: &[Dimension]) -> Option<usize> {
    usize::try_from(dimension).ok().filter(|&at| at < of.len())
}
