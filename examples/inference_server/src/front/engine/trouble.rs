//! Interruptions of the service: their cause, their beginning, and the recovery until a generation
//! serves again.

use std::time::{Duration, Instant};

use nccl::fault::{Fault, RootCause};
use nccl::launch::{Exit, RankEnd};

use super::super::crew::Failure;
use super::super::view::{LastFault, Trouble};
use super::{Engine, IN_VAIN, KNOWN, QUIET};

/// How long the ranks may take to find and report the cause when an operation has timed out: they wait for each other's
/// reports, and until they have ended the communicator.
const DIAGNOSED: Duration = Duration::from_secs(13);

impl Engine {
    /// Tells clients the cause of the interruption.
    pub(super) fn stall(&mut self) {
        let why = self.lock().trouble.cause.clone();
        let clients = self.scheduler.clients();
        clients.for_each(|client| client.stall(&why));
    }

    /// Handles a rank's report that it could not continue.
    pub(super) fn failed(
        &mut self,
        place: usize,
        generation: u64,
        error: &str,
        fault: Option<&Fault>,
    ) {
        if let Some(fault) = fault {
            return self.told(fault);
        }
        let trouble = Trouble {
            cause: format!("rank {place}: {error}"),
            ..Trouble::default()
        };
        self.interrupt(trouble.clone());
        // This is the only report of the error.
        note!("rank {place} could not go on: {error}");
        self.record(generation, trouble);
    }

    /// Records a fault, unless one is already recorded for this interruption, which is more precise.
    fn record(&mut self, generation: u64, trouble: Trouble) {
        let mut view = self.lock();
        let known = view.last_fault.as_ref();
        if known.is_none_or(|known| known.ready_after_seconds.is_some()) {
            view.last_fault = Some(LastFault {
                generation: Some(generation),
                ..LastFault::of(trouble)
            });
        }
    }

    /// Handles the ranks' common diagnosis of a fault, reported by one of them.
    pub(super) fn told(&mut self, fault: &Fault) {
        let pid = fault.culprit().map(|_| fault.pid);
        let trouble = Trouble {
            cause: fault.cause.to_owned(),
            rank: pid.and_then(|pid| self.crew.place_of_process(pid)),
            pid,
            signal: None,
        };
        self.interrupt(trouble.clone());
        let mut view = self.lock();
        let known = view.last_fault.as_mut();
        // All ranks report the same fault, and the launcher may have reported the end of the
        // process.
        let known = known.filter(|known| {
            let is_same =
                known.trouble.pid == pid && (pid.is_some() || known.trouble.cause == fault.cause);
            is_same && known.ready_after_seconds.is_none()
        });
        match known {
            Some(known) if known.report.is_none() => {
                known.report = Some(fault.explain());
                known.evidence = fault.evidence.to_vec();
                known.hint = fault.hint().map(str::to_owned);
            }
            Some(_) => {}
            None => {
                view.last_fault = Some(LastFault {
                    generation: Some(fault.generation),
                    report: Some(fault.explain()),
                    evidence: fault.evidence.to_vec(),
                    hint: fault.hint().map(str::to_owned),
                    ..LastFault::of(trouble)
                });
            }
        }
        drop(view);
        if let RootCause::NotAnswering { .. } = fault.root {
            // The others would wait for it for ever.
            self.crew.kill_frozen(fault.pid);
        }
    }

    /// Ends the generation if its work takes too long. If a rank hangs or is stopped while the others are in no operation,
    /// for example between the last operation of a step and its answer, no timeout of an operation detects it.
    pub(super) fn give_up_overdue_work(&mut self, generation: u64) {
        let age = self.under_way.map(|_| self.begun.elapsed());
        let age = age.unwrap_or_default();
        self.crew.watch_stopped(age > KNOWN);
        let stopped = self.crew.stopped_too_long(generation);
        // Steps that are only slow get more time with each attempt, so that they are completed at last.
        let limit = (self.crew.timeout() + DIAGNOSED).max(self.lock().slow());
        if stopped.is_none() && age <= limit * (1 << self.attempts_given_up.min(8)) {
            return;
        }
        let seconds = age.as_secs_f64();
        let mut trouble = Trouble {
            cause: format!("the ranks have not answered for {seconds:.1} s, and report no fault"),
            ..Trouble::default()
        };
        match stopped {
            Some((place, pid)) => {
                trouble.cause += &format!("; rank {place} (pid {pid}) is stopped");
                (trouble.rank, trouble.pid) = (Some(place), Some(pid));
            }
            None => self.attempts_given_up += 1,
        }
        note!("{}: the generation is given up", trouble.cause);
        self.crew.give_up(generation);
        self.interrupt(trouble.clone());
        self.record(generation, trouble);
    }

    /// Handles the end of a process.
    pub(super) fn ended(&mut self, end: &RankEnd) -> Result<(), Failure> {
        let (place, pid) = (end.rank, end.pid);
        let gave_up = matches!(end.exit, Exit::Code(_))
            && self.generation.is_none()
            && !self.crew.members[place].has_served
            // What a new one lacks, those that have served have.
            && !self.crew.members[place].is_new();
        // The others may have moved to the next generation before the exit status is known.
        let late = self.generation.is_some() && !self.serves_now(place);
        let generation = self.crew.members[place].generation;
        let leaves = self.crew.members[place].leaves;
        if !self.crew.ended(place, pid) {
            return Ok(());
        }
        if leaves {
            let done = match self.generation.is_some() || self.crew.has_survivors() {
                true => "the others go on without it",
                false => {
                    self.crew.start_all_again();
                    "nobody is left to go on: all ranks are started again"
                }
            };
            note!("{end}; it was asked to, and {done}");
            return Ok(());
        }
        let trouble = Trouble {
            cause: format!("rank {place} (pid {pid}) is gone: {}", end.exit),
            rank: Some(place),
            pid: Some(pid),
            signal: match end.exit {
                Exit::Signal { signal, .. } => Some(signal.to_string()),
                _ => None,
            },
        };
        if !late {
            self.interrupt(trouble.clone());
            self.lock().trouble = trouble.clone();
        }
        {
            let mut view = self.lock();
            view.numbers.rank_ends += 1;
            let before = view.last_fault.take().filter(|known| {
                known.trouble.pid == Some(pid) && (late || known.ready_after_seconds.is_none())
            });
            let of = before.as_ref();
            let took = view.numbers.last_recovery_seconds;
            view.last_fault = Some(LastFault {
                generation: generation.or(of.and_then(|fault| fault.generation)),
                report: of.and_then(|fault| fault.report.clone()),
                evidence: of.map(|fault| fault.evidence.clone()).unwrap_or_default(),
                hint: of.and_then(|fault| fault.hint.clone()),
                stderr: end.stderr.to_vec(),
                ready_after_seconds: late.then_some(took),
                ..LastFault::of(trouble)
            });
        }
        if !late {
            self.stall();
        }
        self.show();
        if self.crew.in_vain() >= IN_VAIN {
            let why = format!(
                "ranks were started again {IN_VAIN} times with nothing done in between; the last end: {end}"
            );
            return Err(why.into());
        }
        let done = self.crew.mend(place, gave_up);
        note!("{end}; {done}");
        Ok(())
    }

    /// Whether this rank serves in the present generation.
    pub(super) fn serves_now(&self, place: usize) -> bool {
        let serves = self.crew.members[place].serves;
        serves.is_some_and(|serves| self.generation == Some(serves.generation))
    }

    /// Ends the service of the present generation.
    pub(super) fn interrupt(&mut self, trouble: Trouble) {
        self.is_planned = false;
        if self.generation.take().is_some() {
            self.troubled = Instant::now();
            self.under_way = None;
            self.scheduler.interrupt();
            // The next generation plans anew; what was asked for is asked for again.
            (self.crew.moves, self.balancing) = (None, None);
            let mut view = self.lock();
            view.trouble = trouble;
            view.serving = None;
            view.given = None;
        }
    }

    /// Begins the service of a generation.
    pub(super) fn ready(&mut self, generation: u64, parts: usize) {
        self.generation = Some(generation);
        self.parts = parts;
        self.crew.serves();
        self.crew.begin_moves(generation);
        self.scheduler.resume(self.crew.kept(generation));
        let took = self.troubled.elapsed().as_secs_f64();
        // Makes a probe due at once, to show that the ranks work.
        self.quiet = Instant::now()
            .checked_sub(QUIET)
            .unwrap_or_else(Instant::now);
        let mut view = self.lock();
        view.serving = Some((generation, Instant::now(), parts));
        let fault = view.last_fault.as_mut();
        let fault = fault.filter(|fault| fault.ready_after_seconds.is_none());
        let again = self.served || fault.is_some();
        // A planned change of the number of ranks is no recovery.
        let is_recovery = again && !self.is_planned;
        if let Some(fault) = fault {
            fault.ready_after_seconds = Some(took);
        }
        if is_recovery {
            view.numbers.recoveries += 1;
            view.numbers.recovery_seconds += took;
            view.numbers.last_recovery_seconds = took;
        }
        let word = if again { "ready again" } else { "ready" };
        let how = format!("{word} after {took:.3} s, in generation {generation}, on {parts} ranks");
        drop(view);
        self.served = true;
        note!("{how}");
        self.scheduler
            .clients()
            .for_each(|client| client.go_on(&how));
    }
}
