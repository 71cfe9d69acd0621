//! The engine: one thread that owns the requests and the ranks, and handles all events in order.
//!
//! ```text
//!                 all parts of a generation say that they serve
//!   not ready ───────────────────────────────────────────────▶ serving: one step after another, while anybody asks
//!       ▲                                                        │
//!       └────────────────────────────────────────────────────────┘
//!          a process ended, a connection closed, or a rank has failed: the step that was under way is nothing,
//!          the caches are void, clients are told to wait
//! ```
//!
//! At most one step is in progress. The engine plans the next step when the tokens of the last one have arrived, so the ranks
//! need no agreement: they follow the order of the messages. While idle, the engine probes the ranks now and then with
//! a small operation on the model's communicator, which a hung rank does not complete. So the fault is detected
//! before the next request.
//!
//! - `trouble`: the handling of failed ranks, until a generation serves again.

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
use super::moves::{Due, Moves};
use super::scheduler::{Request, Scheduler};
use super::view::{Member, Trouble, View};
use crate::wire::{FromRank, Step, ToRank};

/// The interval of the checks for clients that have disconnected, and for timeouts.
const TICK: Duration = Duration::from_millis(50);

/// A tick that is this late was delayed with its process, which was stopped or had no CPU time. The ranks may have answered
/// meanwhile.
const OWN_DELAY: Duration = Duration::from_secs(1);
/// The delay before clients are told the cause of an interruption, unless the cause is known: the exit status of a process
/// arrives a moment after its connection closes, and is more precise.
const KNOWN: Duration = Duration::from_secs(1);
/// The most restarts of a rank, or of all ranks, without completed work in between.
const IN_VAIN: usize = 10;
/// The time without a step after which the ranks are probed.
const QUIET: Duration = Duration::from_secs(2);

/// The work of the ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Work {
    Step,
    /// A small operation that shows that the ranks work.
    Probe,
    /// A part of the experts that move, or their new places.
    Move,
    /// The plan for other places of the experts.
    Balance,
}

/// An event for the engine.
pub(super) enum Event {
    /// A request of a client.
    Ask(Request<Caller>),
    /// A message or change of the connection of this number.
    Link(usize, Heard),
    /// An event of the processes.
    Fleet(FleetEvent),
    /// The request to go on with so many ranks.
    Scale(usize),
    /// The request to place the experts by how often each is chosen.
    Balance,
    /// The request to end: as soon as all requests are over, and after this time in any case.
    End(Duration),
}

pub(super) struct Engine {
    crew: Crew,
    scheduler: Scheduler<Caller>,
    view: Arc<Mutex<View>>,
    inbox: Receiver<Event>,
    /// The generation that serves, and whether any generation has ever served.
    generation: Option<u64>,
    served: bool,
    /// The number of the last work sent, and its kind while it is in progress.
    number: u64,
    under_way: Option<Work>,
    /// The beginning of the last work, and how often work was given up since a step was completed.
    begun: Instant,
    attempts_given_up: u32,
    /// How many ranks have said that they have moved experts, of how many.
    moved: usize,
    parts: usize,
    /// Whether the last work was that.
    has_just_moved: bool,
    /// The end of the last work.
    quiet: Instant,
    /// Whether the experts are to be placed anew; and while they move for that, how uneven the ranks will be.
    wants_balance: bool,
    balancing: Option<f64>,
    troubled: Instant,
    /// Whether the last interruption was planned, and no fault has become known since.
    is_planned: bool,
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
            generation: None,
            served: false,
            number: 0,
            under_way: None,
            begun: Instant::now(),
            attempts_given_up: 0,
            moved: 0,
            parts: 0,
            has_just_moved: false,
            quiet: Instant::now(),
            wants_balance: false,
            balancing: None,
            troubled: Instant::now(),
            is_planned: false,
            next_tick: Instant::now(),
            end: None,
        }
    }

    /// Runs until the end of the server. The ranks have ended then as well.
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
        // Requests from now on find no receiver.
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
            let next = self
                .next_move()
                .map_or(self.next_tick, |at| at.min(self.next_tick));
            let left = next.saturating_duration_since(Instant::now());
            match self.inbox.recv_timeout(left) {
                Ok(event) => self.handle(event)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
            // The tick is due under any load.
            let now = Instant::now();
            if now >= self.next_tick {
                let late = now.duration_since(self.next_tick);
                if late > OWN_DELAY {
                    self.disregard(late);
                }
                self.next_tick = now + TICK;
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
                // A rank that was given up may still send messages.
                if let Some(place) = self.crew.place_of(link) {
                    self.hear(place, message)?;
                }
            }
            Event::Link(link, Heard::Closed) => {
                let place = self.crew.place_of(link);
                if self.generation.is_none()
                    && place.is_some_and(|place| !self.crew.members[place].leaves)
                {
                    // The report of its end may come after the others are ready.
                    self.is_planned = false;
                }
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
            Event::Scale(ranks) => self.crew.scale_to(ranks),
            Event::Balance => self.wants_balance = true,
            Event::Fleet(FleetEvent::Started {
                rank,
                pid,
                generation,
            }) => {
                self.crew.started(rank, pid, generation);
            }
            Event::Fleet(FleetEvent::Exited(end)) => self.ended(&end)?,
            Event::Fleet(_) => {}
            Event::End(grace) => {
                // A second request ends the server at once.
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
            FromRank::Entered { generation } => {
                self.crew.entered(place, generation);
                if self.generation.is_some_and(|serves| serves != generation) {
                    let cause = format!("rank {place} has gone on to generation {generation}");
                    self.interrupt(Trouble {
                        cause,
                        rank: Some(place),
                        ..Trouble::default()
                    });
                }
            }
            FromRank::Serves {
                generation,
                rank,
                shard,
                shards,
                device,
                copies,
                kept,
            } => {
                let serves = Serves {
                    copies,
                    generation,
                    rank,
                    shard,
                    shards,
                    device,
                };
                self.crew.serves_in(place, serves, kept);
                if self.generation.is_none()
                    && let Some(parts) = self.crew.complete(generation)
                {
                    self.ready(generation, parts);
                }
            }
            FromRank::Moved { generation, number } => {
                if self.have_all_moved(generation, number)
                    && let Some(moves) = &mut self.crew.moves
                {
                    moves.moved();
                    self.lock().numbers.expert_rounds += 1;
                }
            }
            FromRank::Placed {
                generation,
                number,
                copies,
            } => {
                self.crew.placed(place, generation, copies);
                if self.have_all_moved(generation, number) {
                    self.crew.moves = None;
                    if let Some(imbalance) = self.balancing.take() {
                        self.is_balanced(imbalance);
                    }
                }
            }
            FromRank::Balanced {
                generation,
                number,
                copies,
                imbalance: [before, after],
            } => {
                if self.is_over(Work::Balance, generation, number) {
                    self.lock().answered();
                    self.crew.balanced(generation, copies);
                    if copies.rounds.is_some() {
                        note!(
                            "experts move: the busiest rank had {before:.2} times the mean, and will have {after:.2}"
                        );
                        self.balancing = Some(after);
                    } else {
                        note!(
                            "experts stay: the busiest rank has {before:.2} times the mean, and no other places are better"
                        );
                        self.is_balanced(before);
                    }
                }
            }
            FromRank::Drawn {
                generation,
                number,
                tokens,
                seconds,
                communicating,
            } => {
                if self.is_over(Work::Step, generation, number) {
                    self.attempts_given_up = 0;
                    {
                        let mut view = self.lock();
                        view.took(seconds, communicating);
                        // Counted before clients receive the tokens.
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
            FromRank::Probed { generation, number } => {
                if self.is_over(Work::Probe, generation, number) {
                    self.lock().answered();
                }
            }
            FromRank::Left { generation, fault } => {
                self.crew.left(place, generation);
                let Some(fault) = fault else { return Ok(()) };
                // A rank without a part of the model may not know of the fault.
                self.crew.go_on(generation);
                if self.generation == Some(generation) || self.generation.is_none() {
                    self.told(&fault);
                }
            }
            FromRank::Failed {
                generation,
                error,
                fault,
            } => {
                self.crew.left(place, generation);
                self.crew.go_on(generation);
                if self.generation == Some(generation) || self.generation.is_none() {
                    self.failed(place, generation, &error, fault.as_deref());
                }
            }
        }
        Ok(())
    }

    /// Whether this is the expected answer. If so, the work in progress is over.
    fn is_over(&mut self, work: Work, generation: u64, number: u64) -> bool {
        let over = (Some(work), Some(generation), number)
            == (self.under_way, self.generation, self.number);
        if over {
            self.under_way = None;
            self.quiet = Instant::now();
            self.crew.achieved();
        }
        over
    }

    /// Counts a rank that has moved experts. Returns whether all have, and the work is over.
    fn have_all_moved(&mut self, generation: u64, number: u64) -> bool {
        let work = (self.under_way, self.generation, self.number);
        if work != (Some(Work::Move), Some(generation), number) {
            return false;
        }
        self.moved += 1;
        let all = self.moved == self.parts;
        if all {
            self.is_over(Work::Move, generation, number);
            self.lock().answered();
        }
        all
    }

    fn is_balanced(&mut self, imbalance: f64) {
        self.wants_balance = false;
        let mut view = self.lock();
        view.imbalance = Some(imbalance);
        view.numbers.balances += 1;
    }

    /// Sends the next step or probe, if one is due.
    fn go(&mut self) {
        let Some(generation) = self.generation else {
            return;
        };
        if self.under_way.is_some() {
            return;
        }
        if self.crew.scale(generation) {
            let cause = String::from("a rank comes or goes: the number of ranks changes");
            self.interrupt(Trouble {
                cause,
                ..Trouble::default()
            });
            self.is_planned = true;
            return;
        }
        // Texts wait for one part of experts at most.
        let is_turn_of_texts =
            std::mem::take(&mut self.has_just_moved) && !self.scheduler.is_idle();
        if !is_turn_of_texts && self.move_experts(generation) {
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
        let message = match work {
            Work::Step => ToRank::Step(Step {
                generation,
                number,
                rows,
            }),
            _ => ToRank::Probe { generation, number },
        };
        self.give(generation, work, &message);
    }

    /// Sends the next work, which has the next number.
    fn give(&mut self, generation: u64, work: Work, message: &ToRank) {
        self.number += 1;
        (self.under_way, self.begun) = (Some(work), Instant::now());
        (self.moved, self.has_just_moved) = (0, work == Work::Move);
        self.lock().given(work, self.number);
        self.crew.send(generation, message);
    }

    /// Takes the next part of moving experts, if it is due, between the same two steps on all ranks. Returns whether it is.
    fn move_experts(&mut self, generation: u64) -> bool {
        let number = self.number + 1;
        let Some(moves) = &mut self.crew.moves else {
            // Other places are planned when the experts are where they are to be.
            if self.wants_balance {
                let message = ToRank::Balance { generation, number };
                self.give(generation, Work::Balance, &message);
            }
            return self.wants_balance;
        };
        let message = match moves.due(generation) {
            None => return false,
            Some(Due::Round) => {
                moves.begun();
                ToRank::MoveExperts { generation, number }
            }
            Some(Due::Place) => ToRank::PlaceExperts { generation, number },
        };
        self.give(generation, Work::Move, &message);
        true
    }

    /// When the next part of moving experts is due, while the ranks have nothing else to do.
    fn next_move(&self) -> Option<Instant> {
        let generation = self.generation.filter(|_| self.under_way.is_none())?;
        self.crew.moves.as_ref()?.due_at(generation)
    }

    /// Does not count time in which this process did not run as time that ranks have taken.
    fn disregard(&mut self, delay: Duration) {
        self.begun += delay;
        self.troubled += delay;
        self.crew.shift(|at| at + delay);
    }

    fn tick(&mut self) -> Result<(), Failure> {
        self.crew.catch_up();
        if self.under_way.is_none() {
            self.scheduler.forget_the_gone();
        }
        if let Some(generation) = self.generation {
            self.crew.kill_those_that_do_not_leave();
            self.give_up_overdue_work(generation);
        }
        if self.generation.is_some() {
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
            (self.troubled, self.is_planned) = (Instant::now(), false);
            if self.crew.in_vain() >= IN_VAIN {
                return Err("the ranks do not come together".into());
            }
            self.crew.start_all_again();
        }
        Ok(())
    }

    /// Updates the view.
    fn show(&self) {
        let members = self.crew.members.iter().map(|worker| Member {
            pid: worker.pid,
            generation: worker.generation,
            rank: worker.serves.map(|serves| serves.rank),
            shard: worker.serves.and_then(|serves| serves.shard),
            serves: worker.serves.is_some(),
            device: worker.serves.map(|serves| serves.device),
            copies: worker.serves.and_then(|serves| serves.copies),
            restarts: worker.restarts,
        });
        let mut view = self.lock();
        view.members.clear();
        view.members.extend(members);
        view.scaling_to = self.crew.scales_to();
        view.moving = self.crew.moves.as_ref().map(Moves::progress);
        view.numbers.waiting = self.scheduler.waiting();
        view.numbers.running = self.scheduler.running();
    }

    fn lock(&self) -> MutexGuard<'_, View> {
        self.view.lock()
    }
}
