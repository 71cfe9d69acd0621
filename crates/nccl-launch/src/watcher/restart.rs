//! Restarts one rank while the others run.

use std::sync::mpsc::Sender;
use std::time::Instant;

use super::{KILL_TIMEOUT, Restart, Watcher};
use crate::departure::Signal;
use crate::error::{Error, Result};

impl Watcher {
    pub(super) fn restart(&mut self, rank: usize, reply: Sender<Result<u64>>) {
        if self.stage.is_some() {
            let _ = reply.send(Err(Error::launch(format!(
                "rank {rank} cannot be restarted while the fleet is being ended: wait for its end, and \
                 restart all ranks"
            ))));
            return;
        }
        let until = Instant::now() + self.plan.grace;
        if let Some(running) = self.running.get_mut(&rank) {
            running.end(Signal::Term);
        }
        let restart = Restart {
            reply,
            until,
            killed: false,
        };
        self.restarts.insert(rank, restart);
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
            match self.running.get_mut(&rank) {
                None => {
                    let reply = self.restarts.remove(&rank).map(|restart| restart.reply);
                    self.generation += 1;
                    let addresses = self.join_world_again();
                    let started = self.start(rank, Some(&addresses)).map(|()| self.generation);
                    let _ = reply.map(|reply| reply.send(started));
                }
                Some(running) if restart.until <= now && !restart.killed => {
                    running.end(Signal::Kill);
                    restart.killed = true;
                    restart.until = now + KILL_TIMEOUT;
                }
                Some(_) if restart.until <= now => {
                    let reply = self.restarts.remove(&rank).map(|restart| restart.reply);
                    let error = Error::launch(format!(
                        "rank {rank} cannot be restarted: its process is still there {} s after SIGKILL, \
                         waiting inside the kernel",
                        KILL_TIMEOUT.as_secs()
                    ));
                    let _ = reply.map(|reply| reply.send(Err(error)));
                }
                Some(_) => {}
            }
        }
    }
}
