//! nccl-tests' method, for any collective and any world.
//!
//! [`sweep`] drives a [`Collective`] through the sizes, together with the other [`Ranks`], and hands
//! each row to a [`Reporter`] on rank 0. For one row:
//!
//! 1. the data is written, one untimed operation is run, and all ranks synchronise, on the host and then on the device;
//! 2. `-n` iterations are enqueued and waited for once, by the host's steady clock; each iteration uses
//!    another place of the buffers, so that caches do not flatter it;
//! 3. the times of the ranks are combined, by `-a`;
//! 4. fresh data is written, one more operation is run, and every element of every rank is compared.
//!
//! With `-G` the iterations of step 2 are captured once as a graph, which is launched the requested number of times
//! (`graph`).
//!
//! All steps are run first from one buffer to the other, then in place. Every rank runs the same code with the same
//! numbers, so that all of them reach the same barriers.

mod graph;
mod measure;
mod memcpy;
mod ratio;
mod sweep;

pub use measure::{Measurement, PerIteration};
pub use memcpy::HostCopy;
pub use ratio::Ratio;
pub use sweep::{Reporter, Row, Setting, Totals, sweep};

use crate::failure::Failure;
use crate::options::Average;
use crate::shape::{Case, Shape};

/// The ranks of a world, seen from one of them, on the host.
pub trait Ranks {
    /// This rank.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn size(&self) -> usize;

    /// Waits for all ranks, within the implementation's timeout.
    ///
    /// # Errors
    /// When a rank does not arrive in time, or has died.
    fn barrier(&self) -> Result<(), Failure>;

    /// Sends `bytes` to all ranks, and returns the bytes of each rank, in order.
    ///
    /// # Errors
    /// As [`barrier`](Self::barrier).
    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Failure>;
}

/// Where an operation's result goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Into another buffer than it comes from.
    OutOfPlace,
    /// Into the buffer that it comes from.
    InPlace,
}

/// The measured operation, seen from one rank.
pub trait Collective {
    /// The shape of a row with `bytes` per rank.
    fn shape(&self, bytes: u64, case: Case) -> Shape;

    /// Prepares operations of `shape`; called before the first of them, on all ranks at the same time.
    ///
    /// # Errors
    /// When a resource is not available.
    fn prepare(&mut self, shape: Shape) -> Result<(), Failure>;

    /// Writes the data of this rank in `repetition` to the beginning of the sending buffer, and zeros to that of the
    /// receiving one.
    ///
    /// # Errors
    /// When the device fails.
    fn fill(&mut self, shape: Shape, placement: Placement, repetition: u64) -> Result<(), Failure>;

    /// Enqueues one operation for each of `shifts`, which are byte offsets into the buffers; several of them as one
    /// group.
    ///
    /// # Errors
    /// When it could not be enqueued.
    fn start(&mut self, shape: Shape, placement: Placement, shifts: &[u64]) -> Result<(), Failure>;

    /// Captures one operation for each of the shifts, those of an iteration as one group, iteration after iteration.
    ///
    /// # Errors
    /// When they cannot be captured.
    fn capture(
        &mut self,
        shape: Shape,
        placement: Placement,
        iterations: &[Vec<u64>],
    ) -> Result<(), Failure>;

    /// Enqueues the captured graph.
    ///
    /// # Errors
    /// When it could not be enqueued.
    fn launch(&mut self) -> Result<(), Failure>;

    /// Releases the captured graph, after [`finish`](Self::finish).
    ///
    /// # Errors
    /// When the device fails.
    fn release(&mut self) -> Result<(), Failure>;

    /// Waits for all enqueued operations.
    ///
    /// # Errors
    /// When one failed, or did not finish in time.
    fn finish(&mut self) -> Result<(), Failure>;

    /// Synchronises with the other ranks on the device, after a barrier on the host: over sockets a rank leaves a
    /// barrier some ten microseconds after another, which would add to the time of a short row.
    ///
    /// # Errors
    /// As [`start`](Self::start) and [`finish`](Self::finish).
    fn align(&mut self) -> Result<(), Failure>;

    /// Returns how many elements at the beginning of the receiving buffer differ from the expected data of
    /// `repetition`.
    ///
    /// # Errors
    /// When the device fails.
    fn count_wrong(
        &mut self,
        shape: Shape,
        placement: Placement,
        repetition: u64,
    ) -> Result<u64, Failure>;

    /// Records the moment at which the device gets here, as number `index`.
    ///
    /// # Errors
    /// When the device cannot.
    fn mark(&mut self, index: usize) -> Result<(), Failure>;

    /// The seconds between two recorded moments, after [`finish`](Self::finish).
    ///
    /// # Errors
    /// When one of them was not recorded.
    fn seconds_between(&mut self, from: usize, to: usize) -> Result<f64, Failure>;

    /// Copies `bytes` from one buffer to another, at offset `shift` in both, without other ranks: the copy for
    /// comparison. May be enqueued, like an operation.
    ///
    /// # Errors
    /// When the device fails.
    fn copy(&mut self, bytes: u64, shift: u64) -> Result<(), Failure>;

    /// Waits for the copies.
    ///
    /// # Errors
    /// When the device fails.
    fn finish_copies(&mut self) -> Result<(), Failure>;

    /// Further lines about a measurement beside its row, if requested.
    fn notes(&self, shape: Shape, seconds: f64) -> Vec<String>;
}

/// The `value` of each rank, in order.
fn gather(ranks: &impl Ranks, value: f64) -> Result<Vec<f64>, Failure> {
    let gathered = ranks.all_gather(&value.to_le_bytes())?;
    let values = gathered
        .iter()
        .map(|bytes| Some(f64::from_le_bytes(bytes[..].try_into().ok()?)));
    values
        .collect::<Option<Vec<_>>>()
        .ok_or_else(not_our_numbers)
}

fn not_our_numbers() -> Failure {
    Failure::new(
        crate::failure::Exit::Failed,
        "a rank sent something else than was asked for: do all ranks run the same program?",
    )
}

impl Average {
    /// Combines the times of all ranks.
    fn of(self, times: &[f64]) -> f64 {
        match self {
            Self::RankZero => times.first().copied().unwrap_or(f64::NAN),
            Self::Mean => times.iter().sum::<f64>() / times.len() as f64,
            Self::Min => times.iter().copied().fold(f64::INFINITY, f64::min),
            Self::Max => times.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        }
    }
}

#[cfg(test)]
mod tests;
