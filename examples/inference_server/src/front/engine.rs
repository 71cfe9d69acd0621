//! What happens, in order, and what follows from it: one thread that has the requests and the ranks.
//!
//! ```text
//!                 all parts of an epoch say that they serve
//!   not ready ───────────────────────────────────────────────▶ serving: one step after another, while anybody asks
//!       ▲                                                        │
//!       └────────────────────────────────────────────────────────┘
//!          a process ended, a connection closed, or a rank has failed: the step that was under way is nothing,
//!          the caches are void, clients are told to wait
//! ```
//!
//! There is one step under way at most. The next is planned when its tokens have come, so that nobody has to agree on
//! anything: what the ranks are sent is the order. When there is nothing to do, the ranks are asked for a sign of life now and then:
//! a small operation on the model's communicator, which one that hangs does not get through. So somebody finds out
//! before the next client does.
//!
//! - `trouble`: what becomes of a rank that is gone or can do no more, until somebody serves again.

#[cfg(test)]
mod tests;
mod trouble;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use nccl::launch::Event as FleetEvent;
use parking_lot::{Mutex, MutexGuard};

use super::caller::{Caller, Said};
use super::crew::{Crew, Failure, Serves};
use super::links::Heard;
use super::scheduler::{Request, Scheduler};
use super::view::{Member, Trouble, View};
use crate::wire::{FromRank, Step, ToRank};

/// How often it is looked whether clients have gone away, and whether something takes too long.
const TICK: Duration = Duration::from_millis(50);
/// How a process ended is known a moment after its connection is closed, and says more. Clients are not told earlier than this
/// why nothing comes, unless it is known.
const KNOWN: Duration = Duration::from_secs(1);
/// How often a rank, or all of them, are started again with nothing achieved in between.
const IN_VAIN: usize = 10;
/// After so long without a step the ranks are asked for a sign of life.
const QUIET: Duration = Duration::from_secs(2);

/// What the ranks have been given to do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Work {
    Step,
    /// To show that they can.
    Probe,
}

/// What the engine is told.
pub(super) enum Event {
    /// By a client.
    Ask(Request<Caller>),
    /// By a connection, which has this number.
    Link(usize, Heard),
    /// About the processes.
    Fleet(FleetEvent),
    /// To end: as soon as all requests are over, and after this long in any case.
    End(Duration),
}

pub(super) struct Engine {
    crew: Crew,
    scheduler: Scheduler<Caller>,
    view: Arc<Mutex<View>>,
    inbox: Receiver<Event>,
    /// The epoch that serves, and whether there has ever been one.
    epoch: Option<u64>,
    served: bool,
    /// The number of what was sent last, and what it is while it is under way.
    number: u64,
    under_way: Option<Work>,
    /// Since when nothing has been.
    quiet: Instant,
    troubled: Instant,
    next_tick: Instant,
    end: Option<Instant>,
}

impl Engine {
    pub(super) fn new(
        crew: Crew,
        scheduler: Scheduler<Caller>,
        view: Arc<Mutex<View>>,
        inbox: Receiver<Event>,
    ) -> Self {
        Self {
            crew,
            scheduler,
            view,
            inbox,
            epoch: None,
            served: false,
            number: 0,
            under_way: None,
            quiet: Instant::now(),
            troubled: Instant::now(),
            next_tick: Instant::now(),
            end: None,
        }
    }

    /// Until the end. The ranks have ended then as well.
    pub(super) fn run(mut self) -> Result<(), Failure> {
        let outcome = self.serve();
        let why = match &outcome {
            Ok(()) => String::from("the server is ending"),
            Err(error) => error.to_string(),
        };
        self.lock().ending = true;
        for client in self.scheduler.clients() {
            client.tell(Said::Failed(why.clone()));
        }
        // Who asks now finds nobody who would answer.
        drop(self.scheduler);
        for event in self.inbox.try_iter() {
            if let Event::Ask(request) = event {
                request.client.tell(Said::Failed(why.clone()));
            }
        }
        drop(self.inbox);
        self.crew.end();
        outcome
    }

    fn serve(&mut self) -> Result<(), Failure> {
        loop {
            let left = self.next_tick.saturating_duration_since(Instant::now());
            match self.inbox.recv_timeout(left) {
                Ok(event) => self.handle(event)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
            // However much is asked meanwhile.
            if Instant::now() >= self.next_tick {
                self.next_tick = Instant::now() + TICK;
                self.tick()?;
            }
            if let Some(end) = self.end
                && (self.scheduler.is_idle() || Instant::now() >= end)
            {
                return Ok(());
            }
            self.go();
            self.show();
        }
    }

    fn handle(&mut self, event: Event) -> Result<(), Failure> {
        match event {
            Event::Ask(request) => self.ask(request),
            Event::Link(link, Heard::Opened(pid, stream)) => self.crew.opened(link, pid, stream),
            Event::Link(link, Heard::Said(FromRank::Hello { place })) => {
                self.crew.hello(link, place);
            }
            Event::Link(link, Heard::Said(message)) => {
                // One that was given up may still have something to say.
                if let Some(place) = self.crew.place_of(link) {
                    self.hear(place, message)?;
                }
            }
            Event::Link(link, Heard::Closed) => {
                let place = self.crew.place_of(link);
                let place = place.filter(|&place| self.serves_now(place));
                self.crew.closed(link);
                if let Some(place) = place {
                    let pid = self.crew.members[place].pid;
                    let cause = format!(
                        "rank {place} (pid {}) has closed its connection",
                        pid.unwrap_or_default()
                    );
                    self.interrupt(Trouble {
                        cause,
                        rank: Some(place),
                        pid,
                        signal: None,
                    });
                }
            }
            Event::Fleet(FleetEvent::Started { rank, pid, epoch }) => {
                self.crew.started(rank, pid, epoch);
            }
            Event::Fleet(FleetEvent::Exited(end)) => self.ended(&end)?,
            Event::Fleet(_) => {}
            Event::End(grace) => {
                // Said twice: at once.
                let grace = match self.end {
                    None => grace,
                    Some(_) => Duration::ZERO,
                };
                self.end = Instant::now().checked_add(grace);
                self.lock().ending = true;
            }
        }
        Ok(())
    }

    fn ask(&mut self, request: Request<Caller>) {
        if self.end.is_some() {
            let why = String::from("the server is ending");
            request.client.tell(Said::Failed(why));
            return;
        }
        let prompt = request.prompt.len() as u64;
        match self.scheduler.submit(request) {
            Ok(()) => self.lock().numbers.prompt_tokens += prompt,
            Err(request) => request.client.tell(Said::Full),
        }
    }

    fn hear(&mut self, place: usize, message: FromRank) -> Result<(), Failure> {
        match message {
            FromRank::Hello { .. } => {}
            FromRank::Entered { epoch } => {
                self.crew.entered(place, epoch);
                if self.epoch.is_some_and(|serves| serves != epoch) {
                    let cause = format!("rank {place} has gone on to epoch {epoch}");
                    self.interrupt(Trouble {
                        cause,
                        rank: Some(place),
                        ..Trouble::default()
                    });
                }
            }
            FromRank::Serves {
                epoch,
                rank,
                shard,
                shards,
                device,
            } => {
                let serves = Serves {
                    epoch,
                    rank,
                    shard,
                    shards,
                    device,
                };
                self.crew.serves_in(place, serves);
                if self.epoch.is_none()
                    && let Some(parts) = self.crew.complete(epoch)
                {
                    self.ready(epoch, parts);
                }
            }
            FromRank::Drawn {
                epoch,
                number,
                tokens,
                seconds,
                communicating,
            } => {
                if self.is_over(Work::Step, epoch, number) {
                    {
                        let mut view = self.lock();
                        view.took(seconds, communicating);
                        // Before clients hear of them.
                        view.numbers.made_tokens += tokens.len() as u64;
                    }
                    self.scheduler.took(&tokens).ok_or_else(|| {
                        format!(
                            "step {number} has {} tokens, and not as planned",
                            tokens.len()
                        )
                    })?;
                }
            }
            FromRank::Probed { epoch, number } => {
                if self.is_over(Work::Probe, epoch, number) {
                    self.lock().answered();
                }
            }
            FromRank::Left { epoch, fault } => {
                self.crew.left(place, epoch);
                let Some(fault) = fault else { return Ok(()) };
                // Who has no part of the model may not have heard of it.
                self.crew.go_on(epoch);
                if self.epoch == Some(epoch) || self.epoch.is_none() {
                    self.told(&fault);
                }
            }
            FromRank::Failed {
                epoch,
                error,
                fault,
            } => {
                self.crew.left(place, epoch);
                self.crew.go_on(epoch);
                if self.epoch == Some(epoch) || self.epoch.is_none() {
                    self.failed(place, epoch, &error, fault.as_deref());
                }
            }
        }
        Ok(())
    }

    /// Whether this is the answer that is waited for: then the ranks have done what they were given.
    fn is_over(&mut self, work: Work, epoch: u64, number: u64) -> bool {
        let over = (Some(work), Some(epoch), number) == (self.under_way, self.epoch, self.number);
        if over {
            self.under_way = None;
            self.quiet = Instant::now();
            self.crew.achieved();
        }
        over
    }

    /// The next step, if it is time for it.
    fn go(&mut self) {
        let Some(epoch) = self.epoch else { return };
        if self.under_way.is_some() {
            return;
        }
        let rows = self.scheduler.plan();
        let (number, work) = (
            self.number + 1,
            match rows.is_empty() {
                false => Work::Step,
                true if self.quiet.elapsed() > QUIET => Work::Probe,
                true => return,
            },
        );
        (self.number, self.under_way) = (number, Some(work));
        self.lock().given(work, number);
        self.crew.send(
            epoch,
            &match work {
                Work::Probe => ToRank::Probe { epoch, number },
                Work::Step => ToRank::Step(Step {
                    epoch,
                    number,
                    rows,
                }),
            },
        );
    }

    fn tick(&mut self) -> Result<(), Failure> {
        self.crew.catch_up();
        if self.under_way.is_none() {
            self.scheduler.forget_the_gone();
        }
        if self.epoch.is_some() {
            return Ok(());
        }
        self.crew.kill_stopped();
        self.crew.kill_wedged();
        let troubled = self.troubled.elapsed();
        if troubled > KNOWN {
            self.stall();
        }
        if troubled > self.crew.patience() {
            note!("the ranks do not come together: all are started again");
            self.troubled = Instant::now();
            if self.crew.in_vain() >= IN_VAIN {
                return Err("the ranks do not come together".into());
            }
            self.crew.start_all_again();
        }
        Ok(())
    }

    /// Brings the view up to date.
    fn show(&self) {
        let members = self.crew.members.iter().map(|worker| Member {
            pid: worker.pid,
            epoch: worker.epoch,
            rank: worker.serves.map(|serves| serves.rank),
            shard: worker.serves.and_then(|serves| serves.shard),
            serves: worker.serves.is_some(),
            device: worker.serves.map(|serves| serves.device),
            restarts: worker.restarts,
        });
        let mut view = self.lock();
        view.members.clear();
        view.members.extend(members);
        view.numbers.waiting = self.scheduler.waiting();
        view.numbers.running = self.scheduler.running();
    }

    fn lock(&self) -> MutexGuard<'_, View> {
        self.view.lock()
    }
}
