//! Restarts one rank while the others run, or all ranks; and refuses to while the fleet is being ended.

use std::fmt::Display;
use std::time::Instant;

use super::{KILL_TIMEOUT, Restart, RestartReply, Watcher, later};
use crate::departure::Signal;
use crate::error::{Error, ErrorKind, Result};

impl Watcher {
    pub(super) fn restart(&mut self, rank: usize, reply: RestartReply) {
        let refusal = if !self.restart_all.is_empty() {
            Some(with_all(rank))
        } else if self.stage.is_some() {
            Some(being_ended(rank))
        } else if self.fleet_state.lock().unreported_stop {
            Some(told_to_end(format_args!("rank {rank}")))
        } else {
            None
        };
        if let Some(error) = refusal {
            let _ = reply.send(Err(error));
            return;
        }
        if let Some(restart) = self.restarts.get_mut(&rank) {
            restart.replies.push(reply);
            return;
        }
        let until = later(Instant::now(), self.plan.grace);
        if let Some(running) = self.running.get_mut(&rank) {
            running.end(Signal::Term);
        }
        let restart = Restart {
            replies: vec![reply],
            until,
            killed: false,
        };
        self.restarts.insert(rank, restart);
    }

    pub(super) fn restart_all(&mut self, reply: RestartReply) {
        if self.fleet_state.lock().unreported_stop {
            let _ = reply.send(Err(told_to_end("the ranks")));
            return;
        }
        for (rank, restart) in self.restarts.drain() {
            reply_to_all(restart.replies, Err(with_all(rank)));
        }
        if !self.running.is_empty() && self.stage.is_none() {
            self.ask_to_end(Signal::Term);
        }
        self.restart_all.push(reply);
    }

    /// Fails the pending restarts, because the fleet is to end, and new ones until a caller has got a report.
    /// `interrupts` is the signal that interrupts the ranks, for the report.
    pub(super) fn refuse_restarts(&mut self, interrupts: Option<Signal>) {
        self.fleet_state.post(None, |fleet_state| {
            fleet_state.unreported_stop = true;
            fleet_state.interrupted = fleet_state.interrupted.or(interrupts);
        });
        self.fail_single_restarts();
        self.reply_restart_all(Err(told_to_end("the ranks")));
    }

    /// Tells all callers of the pending restart of all ranks its outcome.
    pub(super) fn reply_restart_all(&mut self, outcome: Result<u64>) {
        reply_to_all(std::mem::take(&mut self.restart_all), outcome);
    }

    /// Fails the pending restarts of single ranks, because all ranks are being ended.
    pub(super) fn fail_single_restarts(&mut self) {
        for (rank, restart) in self.restarts.drain() {
            reply_to_all(restart.replies, Err(being_ended(rank)));
        }
    }

    /// Observes the world that the restarted rank will belong to as well. Returns the addresses where the other ranks
    /// listen.
    fn join_world_again(&mut self) -> Vec<String> {
        let Some(exit_reporter) = &mut self.exit_reporter else {
            return Vec::new();
        };
        let addresses = exit_reporter.addresses();
        exit_reporter.start_again(&self.plan.environment, self.generation, &addresses);
        for running in self.running.values() {
            exit_reporter.started(running.rank(), running.id());
        }
        addresses
    }

    pub(super) fn advance_restarts(&mut self, now: Instant) {
        let ranks: Vec<usize> = self.restarts.keys().copied().collect();
        for rank in ranks {
            let Some(restart) = self.restarts.get_mut(&rank) else {
                continue;
            };
            let outcome = match self.running.get_mut(&rank) {
                None => {
                    self.generation += 1;
                    let addresses = self.join_world_again();
                    self.start(rank, Some(&addresses)).map(|()| self.generation)
                }
                Some(running) if restart.until <= now && !restart.killed => {
                    running.end(Signal::Kill);
                    restart.killed = true;
                    restart.until = now + KILL_TIMEOUT;
                    continue;
                }
                Some(_) if restart.until <= now => Err(Error::launch(format!(
                    "rank {rank} cannot be restarted: its process is still there {} s after SIGKILL, waiting \
                     inside the kernel",
                    KILL_TIMEOUT.as_secs()
                ))),
                Some(_) => continue,
            };
            if let Some(restart) = self.restarts.remove(&rank) {
                reply_to_all(restart.replies, outcome);
            }
        }
    }
}

/// Tells all callers of a restart its outcome.
fn reply_to_all(replies: Vec<RestartReply>, outcome: Result<u64>) {
    let mut replies = replies.into_iter();
    let first = replies.next();
    for reply in replies {
        let _ = reply.send(match &outcome {
            Ok(generation) => Ok(*generation),
            Err(error) => Err(copy_of(error)),
        });
    }
    let _ = first.map(|reply| reply.send(outcome));
}

fn copy_of(error: &Error) -> Error {
    Error::launch(match error.kind() {
        ErrorKind::Launch { reason } => reason.clone(),
        _ => error.to_string(),
    })
}

fn being_ended(rank: usize) -> Error {
    Error::launch(format!(
        "rank {rank} cannot be restarted while the fleet is being ended: wait for its end, and restart all ranks"
    ))
}

fn told_to_end(what: impl Display) -> Error {
    Error::launch(format!(
        "{what} cannot be restarted: the fleet has been told to end. Wait for its report (Fleet::wait) before a \
         restart"
    ))
}

fn with_all(rank: usize) -> Error {
    Error::launch(format!(
        "rank {rank} is not restarted alone: all ranks are being restarted"
    ))
}
