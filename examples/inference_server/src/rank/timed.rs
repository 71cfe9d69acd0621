//! The time of communication in a step, and the agreement of the ranks on the step before its first collective.

use std::cell::Cell;
use std::time::{Duration, Instant};

use nccl::control::ProposedStep;
use nccl::moe::ExpertPlacement;

use crate::model::{Arrived, Collectives, Result};

/// Collectives with a sum of their time, which includes the wait for the other ranks.
pub(super) struct Timed<C> {
    ranks: C,
    spent: Duration,
    proposed: Cell<Option<ProposedStep>>,
}

impl<C> Timed<C> {
    pub(super) fn new(ranks: C) -> Self {
        Self {
            ranks,
            spent: Duration::ZERO,
            proposed: Cell::default(),
        }
    }

    /// Agrees on this step before the next collective; what comes before that is done meanwhile.
    pub(super) fn propose(&self, step: ProposedStep) {
        self.proposed.set(Some(step));
    }

    /// Returns the sum since the connection was made.
    pub(super) fn spent(&self) -> Duration {
        self.spent
    }

    fn time<T>(&mut self, work: impl FnOnce(&mut C) -> Result<T>) -> Result<T> {
        let begun = Instant::now();
        if let Some(step) = self.proposed.take() {
            step.agree()?;
        }
        let made = work(&mut self.ranks);
        self.spent += begun.elapsed();
        made
    }
}

impl<C: Collectives> Collectives for Timed<C> {
    fn rank(&self) -> usize {
        self.ranks.rank()
    }

    fn ranks(&self) -> usize {
        self.ranks.ranks()
    }

    fn placement(&self) -> Option<&ExpertPlacement> {
        self.ranks.placement()
    }

    fn exchange(
        &mut self,
        sent: &[(usize, &[f32])],
        received: &mut [(usize, Vec<f32>)],
    ) -> Result<()> {
        self.time(|ranks| ranks.exchange(sent, received))
    }

    fn all_to_all(&mut self, x: &[f32], y: &mut [f32]) -> Result<()> {
        self.time(|ranks| ranks.all_to_all(x, y))
    }

    fn all_gather(&mut self, x: &[f32], y: &mut [f32]) -> Result<()> {
        self.time(|ranks| ranks.all_gather(x, y))
    }

    fn dispatch(&mut self, choices: &[i32], x: &[f32], arrived: &mut Arrived) -> Result<()> {
        self.time(|ranks| ranks.dispatch(choices, x, arrived))
    }

    fn combine(&mut self, made: &[f32], weights: &[f32], out: &mut [f32]) -> Result<()> {
        self.time(|ranks| ranks.combine(made, weights, out))
    }
}
