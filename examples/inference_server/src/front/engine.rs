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
//! anything: what the ranks are sent is the order.

#[cfg(test)]
mod tests;

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nccl::launch::Event as FleetEvent;
use nccl::launch::{Exit, RankEnd};
use nccl::{Fault, RootCause};

use super::caller::{Caller, Said};
use super::crew::{Crew, Failure, Serves};
use super::links::Heard;
use super::scheduler::{Request, Scheduler};
use super::view::{LastFault, Member, Trouble, View};
use crate::wire::{FromRank, Step};

/// How often it is looked whether clients have gone away, and whether something takes too long.
const TICK: Duration = Duration::from_millis(50);
/// How a process ended is known a moment after its connection is closed, and says more. Clients are not told earlier than this
/// why nothing comes, unless it is known.
const KNOWN: Duration = Duration::from_secs(1);
/// How often ranks are started again with nothing achieved in between.
const IN_VAIN: usize = 10;

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
    /// The number of the step that was sent last, and whether it is under way.
    number: u64,
    under_way: bool,
    troubled: Instant,
    in_vain: usize,
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
            under_way: false,
            troubled: Instant::now(),
            in_vain: 0,
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
        for client in self.scheduler.clients() {
            client.tell(Said::Failed(why.clone()));
        }
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

    /// Tells clients why nothing comes.
    fn stall(&mut self) {
        let why = self.lock().trouble.cause.clone();
        let clients = self.scheduler.clients();
        clients.for_each(|client| client.stall(&why));
    }

    fn hear(&mut self, place: usize, message: FromRank) -> Result<(), Failure> {
        let worker = &mut self.crew.members[place];
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
                worker.serves = Some(Serves {
                    epoch,
                    rank,
                    shard,
                    shards,
                    device,
                });
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
                if self.under_way && self.epoch == Some(epoch) && self.number == number {
                    self.under_way = false;
                    self.in_vain = 0;
                    self.lock().took(seconds, communicating);
                    let made = self.scheduler.took(&tokens).ok_or_else(|| {
                        format!(
                            "step {number} has {} tokens, and not as planned",
                            tokens.len()
                        )
                    })?;
                    self.lock().numbers.made_tokens += made as u64;
                }
            }
            FromRank::Failed {
                epoch,
                error,
                fault,
            } => {
                worker.serves = None;
                self.crew.go_on(epoch);
                if self.epoch == Some(epoch) || self.epoch.is_none() {
                    self.failed(place, epoch, &error, fault.as_deref());
                }
            }
        }
        Ok(())
    }

    /// A rank could not go on, and tells why.
    fn failed(&mut self, place: usize, epoch: u64, error: &str, fault: Option<&Fault>) {
        let root = fault.and_then(|fault| self.crew.place_of_process(fault.pid()));
        let trouble = Trouble {
            cause: match fault {
                Some(fault) => fault.cause().to_owned(),
                None => format!("rank {place}: {error}"),
            },
            rank: root,
            pid: fault.map(Fault::pid),
            signal: None,
        };
        self.interrupt(trouble.clone());
        let Some(fault) = fault else {
            // Nobody else tells of it; what is known of the same interruption already says more.
            note!("rank {place} could not go on: {error}");
            let mut view = self.lock();
            let known = view.last_fault.as_ref();
            if known.is_none_or(|known| known.ready_after_seconds.is_some()) {
                view.last_fault = Some(LastFault {
                    epoch: Some(epoch),
                    ..LastFault::of(trouble)
                });
            }
            return;
        };
        let mut view = self.lock();
        let known = view.last_fault.as_mut();
        // All ranks tell the same, and the launcher may have told how the process ended.
        let known = known.filter(|known| {
            known.trouble.pid == Some(fault.pid()) && known.ready_after_seconds.is_none()
        });
        match known {
            Some(known) if known.report.is_none() => {
                known.report = Some(fault.explain());
                known.evidence = fault.evidence().to_vec();
                known.hint = fault.hint().map(str::to_owned);
            }
            Some(_) => {}
            None => {
                view.last_fault = Some(LastFault {
                    epoch: Some(fault.epoch()),
                    report: Some(fault.explain()),
                    evidence: fault.evidence().to_vec(),
                    hint: fault.hint().map(str::to_owned),
                    ..LastFault::of(trouble)
                });
            }
        }
        drop(view);
        if let RootCause::NotAnswering { .. } = fault.root() {
            // The others would wait for it for ever.
            self.crew.kill_frozen(fault.pid());
        }
    }

    /// A process has ended.
    fn ended(&mut self, end: &RankEnd) -> Result<(), Failure> {
        let (place, pid) = (end.rank(), end.pid());
        let gave_up = matches!(end.exit(), Exit::Code(_))
            && self.epoch.is_none()
            && self.crew.members[place].serves.is_none();
        // The others may have gone on without it before it is known how it ended.
        let late = self.epoch.is_some() && !self.serves_now(place);
        let served = self.crew.members[place].serves.map(|serves| serves.epoch);
        if !self.crew.ended(place, pid) {
            return Ok(());
        }
        let trouble = Trouble {
            cause: format!("rank {place} (pid {pid}) is gone: {}", end.exit()),
            rank: Some(place),
            pid: Some(pid),
            signal: match end.exit() {
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
                epoch: served.or(of.and_then(|fault| fault.epoch)),
                report: of.and_then(|fault| fault.report.clone()),
                evidence: of.map(|fault| fault.evidence.clone()).unwrap_or_default(),
                hint: of.and_then(|fault| fault.hint.clone()),
                stderr: end.stderr().to_vec(),
                ready_after_seconds: late.then_some(took),
                ..LastFault::of(trouble)
            });
        }
        if !late {
            self.stall();
        }
        self.show();
        self.in_vain += 1;
        if self.in_vain > IN_VAIN {
            let why =
                format!("ranks ended {IN_VAIN} times with no step in between; the last: {end}");
            return Err(why.into());
        }
        let done = self.crew.mend(place, gave_up);
        note!("{end}; {done}");
        Ok(())
    }

    /// Whether this rank is one of those that serve.
    fn serves_now(&self, place: usize) -> bool {
        let serves = self.crew.members[place].serves;
        serves.is_some_and(|serves| self.epoch == Some(serves.epoch))
    }

    /// Nobody serves any more.
    fn interrupt(&mut self, trouble: Trouble) {
        if self.epoch.take().is_some() {
            self.troubled = Instant::now();
            self.under_way = false;
            self.scheduler.begin_again();
            let mut view = self.lock();
            view.trouble = trouble;
            view.serving = None;
            view.step = None;
        }
    }

    /// An epoch serves.
    fn ready(&mut self, epoch: u64, parts: usize) {
        self.epoch = Some(epoch);
        let took = self.troubled.elapsed().as_secs_f64();
        if self.scheduler.is_idle() {
            self.in_vain = 0;
        }
        let mut view = self.lock();
        view.serving = Some((epoch, Instant::now(), parts));
        let fault = view.last_fault.as_mut();
        let fault = fault.filter(|fault| fault.ready_after_seconds.is_none());
        let again = self.served || fault.is_some();
        if let Some(fault) = fault {
            fault.ready_after_seconds = Some(took);
        }
        if again {
            view.numbers.recoveries += 1;
            view.numbers.recovery_seconds += took;
            view.numbers.last_recovery_seconds = took;
        }
        let word = if again { "ready again" } else { "ready" };
        let how = format!("{word} after {took:.3} s, in epoch {epoch}, on {parts} ranks");
        drop(view);
        self.served = true;
        note!("{how}");
        self.scheduler
            .clients()
            .for_each(|client| client.go_on(&how));
    }

    /// The next step, if it is time for it.
    fn go(&mut self) {
        let Some(epoch) = self.epoch else { return };
        if self.under_way {
            return;
        }
        let rows = self.scheduler.plan();
        if rows.is_empty() {
            return;
        }
        self.number += 1;
        self.under_way = true;
        let number = self.number;
        self.lock().step = Some((number, Instant::now()));
        self.crew.send(Step {
            epoch,
            number,
            rows,
        });
    }

    fn tick(&mut self) -> Result<(), Failure> {
        self.crew.catch_up();
        if !self.under_way {
            self.scheduler.forget_the_gone();
        }
        if self.epoch.is_some() {
            return Ok(());
        }
        self.crew.kill_stopped();
        let troubled = self.troubled.elapsed();
        if troubled > KNOWN {
            self.stall();
        }
        if troubled > self.crew.patience() {
            note!("the ranks do not come together: all are started again");
            self.troubled = Instant::now();
            self.in_vain += 1;
            if self.in_vain > IN_VAIN {
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
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
