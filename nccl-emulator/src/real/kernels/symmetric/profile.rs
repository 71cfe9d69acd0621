//! The reports of `_profile` kernels to the host: when each block began, passed its first barrier, had moved its data, and
//! ended.
//!
//! The host numbers the works of a channel and passes the numbers. A kernel stores times in the channel's rings of events, and
//! then the number, which tells the host that the times are valid.

use std::sync::atomic::Ordering;

use super::super::asked::Field;
use super::super::block::Stop;
use super::super::counters::{EVENTS, now};
use super::super::memory::{self, Memory};
use super::layout::Phases;

/// The bit of the mode that requests phases, `ncclDevProfilerModeKernelPhase`.
const PHASES: u64 = 2;
/// The bytes of an event: a number and a time.
const EVENT: u64 = 16;

/// The phases of a block, in the order of `ncclDevProfilerPhases`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Begin,
    /// The initial barrier is passed.
    Ready,
    /// The data is moved.
    Moved,
    End,
}

/// The places for the times of a launch.
#[derive(Debug)]
pub(super) struct Profile {
    started: u64,
    completed: u64,
    phases: Option<(u64, Phases)>,
    /// The numbers of the works, by channel.
    numbers: Vec<u64>,
}

impl Profile {
    /// Creates a profile; `targets` are `workStarted`, `workCompleted` and `workPhases`.
    pub(super) fn new(
        mode: u64,
        targets: [u64; 3],
        phases: Option<&Phases>,
        numbers: &[u8],
    ) -> Self {
        let [started, completed, target] = targets;
        let word = Field {
            offset: 0,
            size: 8,
            bits: None,
        };
        Self {
            started,
            completed,
            phases: phases
                .filter(|_| mode & PHASES != 0 && target != 0)
                .map(|phases| (target, phases.clone())),
            numbers: numbers
                .chunks_exact(8)
                .map(|bytes| word.get(bytes))
                .collect(),
        }
    }

    fn number(&self, block: usize) -> u64 {
        self.numbers.get(block).copied().unwrap_or(0)
    }

    /// Stores a time, and then the number.
    fn event(&self, memory: &dyn Memory, block: usize, base: u64, time: u64) -> Result<(), Stop> {
        let number = self.number(block);
        let at = base + EVENT * (block as u64 * EVENTS + number % EVENTS);
        let view = memory::view(memory, at, EVENT as usize)?;
        view.word(8)?.store(time, Ordering::Relaxed);
        view.word(0)?.store(number, Ordering::Release);
        Ok(())
    }

    fn store_phase(
        &self,
        memory: &dyn Memory,
        block: usize,
        phase: Phase,
        time: u64,
    ) -> Result<(), Stop> {
        let Some((base, fields)) = &self.phases else {
            return Ok(());
        };
        let number = self.number(block);
        let entry = fields.size as u64 / EVENTS;
        let at = base + block as u64 * fields.size as u64 + number % EVENTS * entry;
        let view = memory::view(memory, at, entry as usize)?;
        let word = fields.times.offset + 8 * phase as usize;
        view.word(word)?.store(time, Ordering::Relaxed);
        if phase == Phase::End {
            view.word(fields.counter.offset)?
                .store(number, Ordering::Release);
        }
        Ok(())
    }

    pub(super) fn started(&self, memory: &dyn Memory, block: usize) -> Result<(), Stop> {
        let time = now();
        self.store_phase(memory, block, Phase::Begin, time)?;
        self.event(memory, block, self.started, time)
    }

    /// Stores the time of a phase between start and end.
    pub(super) fn reached(
        &self,
        memory: &dyn Memory,
        block: usize,
        phase: Phase,
    ) -> Result<(), Stop> {
        self.store_phase(memory, block, phase, now())
    }

    pub(super) fn completed(&self, memory: &dyn Memory, block: usize) -> Result<(), Stop> {
        let time = now();
        self.store_phase(memory, block, Phase::End, time)?;
        self.event(memory, block, self.completed, time)
    }
}
