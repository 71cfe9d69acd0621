//! The end of a communicator that was dropped.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::free::{finalize_with, free_with};
use super::handle::RawComm;
use super::timeouts::Timeouts;
use super::{Inner, Switch};
use crate::abort::AbortSignal;
use crate::events;
use crate::inside;
use crate::library::Library;
use crate::peers::Supervisor;
use crate::reaper;
use crate::state::{State, retire};
use crate::time::deadline_after;
use nccl_base::fault::{Cause, Roster};

/// The remains of a dropped communicator.
struct Dropped {
    library: Library,
    raw: RawComm,
    switch: Option<Arc<Switch>>,
    name: Arc<str>,
    rank: usize,
    roster: Arc<Roster>,
    timeouts: Timeouts,
    /// The stream on which it captured, and the program's stream.
    streams: (Option<Arc<CudaStream>>, Arc<CudaStream>),
    in_use: Vec<Arc<CudaStream>>,
    board: Option<Arc<dyn Supervisor>>,
    abort_signal: AbortSignal,
}

impl Drop for Inner {
    /// Never blocks: a thread finalizes the communicator, and only then releases its resources.
    fn drop(&mut self) {
        self.end_revoked();
        inside::forget();
        let raw = self.phase.remains(&mut self.handle.get_mut().raw);
        let Some(raw) = raw else {
            if self.phase.get() == State::Leaked {
                // NCCL may still be at work in the context, with these streams.
                std::mem::forget((
                    self.own_stream.take(),
                    Arc::clone(&self.context),
                    Arc::clone(&self.stream),
                    std::mem::take(&mut *self.in_use.lock()),
                ));
            }
            return;
        };
        let dropped = Dropped {
            library: self.library.clone(),
            raw,
            switch: self.switch.take(),
            name: Arc::clone(&self.name),
            rank: self.rank,
            roster: Arc::clone(self.roster()),
            timeouts: self.timeouts,
            streams: (self.own_stream.take(), Arc::clone(&self.stream)),
            in_use: std::mem::take(&mut *self.in_use.lock()),
            board: self.board.take(),
            abort_signal: self.abort_signal.clone(),
        };
        if let Err(dropped) = reaper::on_a_thread(dropped, reap) {
            std::mem::forget(dropped);
        }
    }
}

fn reap(dropped: Dropped) {
    let timeout = dropped.timeouts.finalize;
    let (board, signal) = (dropped.board, dropped.abort_signal);
    let at_fault = || board.as_ref().is_some_and(|board| board.is_at_fault());
    let interrupted = || reaper::is_in_a_hurry() || at_fault() || signal.is_aborted();
    let switch = dropped.switch.as_ref();
    let retired = retire(
        dropped.raw,
        |raw| {
            let deadline = deadline_after(timeout);
            finalize_with(&dropped.library, raw, switch, deadline, interrupted)
        },
        |_| {
            // The others may be waiting in an operation that this rank never enters.
            if let (true, Some(board)) = (signal.is_aborted(), &board) {
                Arc::clone(board).announce(Cause::asked("its abort signal was given"));
            }
        },
        |way, raw| free_with(&dropped.library, way, raw, switch.map(|switch| &**switch)),
    );
    let (rank, roster) = (dropped.rank, &dropped.roster);
    if let Err(failure) = &retired.freed {
        events::not_freed(Some((&dropped.name, roster, rank)), failure);
    }
    if let Err(unsettled) = retired.settled {
        tracing::warn!(
            name: "nccl.comm.unclean",
            target: "nccl",
            comm = &*dropped.name,
            world_ranks = roster.world_ranks(),
            rank,
            world_rank = roster.world_rank(rank),
            launcher_rank = roster.launcher_rank(rank),
            ?unsettled,
            "a dropped communicator could not be finalized and was aborted"
        );
    }
    if retired.freed.is_err() {
        if let (true, Some(board)) = (at_fault(), &board) {
            board.conclude(false, false);
        }
        let why = "it was dropped, and NCCL did not give it back";
        crate::events::leaked_communicator((&dropped.name, roster), rank, why);
        std::mem::forget((dropped.streams, dropped.in_use));
    }
    // Only now: the part of this rank in the others' waits is over, and the line may say goodbye.
    drop(board);
}
