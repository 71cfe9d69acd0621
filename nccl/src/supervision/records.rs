//! The recorder's home for the calls of a rank, attached to its line.

use std::any::Any;
use std::sync::Arc;

use crate::rendezvous::{Attached, ClockReading, Line};
use nccl_core::recorder::{self, Clock, Home, Snapshot};

/// The recorder's home for the calls of a rank.
pub(super) struct Records(pub(super) Arc<Home>);

impl Attached for Records {
    fn recording(&self, most: usize) -> Vec<u8> {
        written(recorder::of_place(self.0.place()), most)
    }

    fn progress(&self) -> u64 {
        recorder::progress_of(&self.0)
    }

    fn wants_clock(&self) -> bool {
        recorder::is_wanted(&self.0)
    }

    fn goes_on_from(&self, past: &Arc<dyn Attached>) {
        self.0.goes_on_from(&home(past));
    }

    fn set_clock(&self, measured: Option<ClockReading>) {
        // The offset that turns times of this process into times of rank 0.
        let clock = measured.map_or(Clock::REFERENCE, |reading| {
            Clock::measured(-reading.ahead, reading.round_trip)
        });
        self.0.set_clock(clock);
    }
}

/// Returns the home under which the communicators of a line record their calls.
pub(super) fn home_of(line: &Line) -> Arc<Home> {
    home(line.attached())
}

fn home(attached: &Arc<dyn Attached>) -> Arc<Home> {
    let attached: Arc<dyn Any + Send + Sync> = Arc::clone(attached) as _;
    match attached.downcast::<Records>() {
        Ok(records) => Arc::clone(&records.0),
        Err(_) => unreachable!("a line was opened before this crate had introduced itself"),
    }
}

pub(super) fn written(mut snapshot: Snapshot, most: usize) -> Vec<u8> {
    snapshot.limit_to(most);
    snapshot.to_json().into_bytes()
}
