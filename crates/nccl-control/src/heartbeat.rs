//! Heartbeats: whose process is silent although its kernel answers.
//!
//! There are two clocks. The kernels' says that a process or a host is gone, and needs no processor time of
//! anybody. This one says only that a process does not speak: it was stopped, it is frozen, or it gets no
//! processor. Such a rank is a *suspect*, which may go on at any moment; nobody calls it dead, and no
//! communicator ends by it. When an operation runs into its deadline, the suspects are what to look at.
//!
//! The coordinator asks every rank once in [`BEAT`] whether it is there, and each answers on the thread that
//! reads its connections; whatever else it says counts as well. What is counted is beats without an answer, and
//! only of those that were on time: a coordinator that was itself stopped finds nobody silent. It tells all
//! ranks whom it suspects, and has one of the suspect's host look at the process. The other way round, each
//! rank counts the coordinator's beats that did not come.

use std::fmt;
use std::time::{Duration, Instant};

use super::hub::Outlet;
use super::incoming::Push;
use super::process;
use super::process_state::ProcessState;
use super::state::State;
use crate::departure::HeardOnly;

/// How often the coordinator asks.
pub(super) const BEAT: Duration = Duration::from_secs(1);

/// So many questions without an answer make a suspect, at the beat after the last of them: it has been silent for two
/// seconds at least, and for nearly three if it had answered the one before at once.
const MISSED: u32 = 2;

/// A rank that lives, as far as the kernels know, and is silent.
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct Suspect {
    pub rank: usize,
    /// For how long.
    pub silent: Duration,
    /// What the kernel says of its process, where somebody on its host could look.
    pub state: Option<ProcessState>,
}

impl fmt::Display for Suspect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { silent, state, .. } = self;
        write!(f, "alive, but silent for {:.1} s", silent.as_secs_f64())?;
        match state {
            Some(state) => write!(f, ": {state}"),
            None => Ok(()),
        }
    }
}

/// When somebody was heard last, and how often in vain.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pulse {
    heard: Instant,
    /// Since the last beat.
    spoke: bool,
    missed: u32,
    suspected: bool,
}

/// What a beat, or a word, says about somebody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    Same,
    /// It has become a suspect, silent for so long.
    Silent(Duration),
    /// It was one, for so long.
    Heard(Duration),
}

impl Pulse {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            heard: now,
            spoke: true,
            missed: 0,
            suspected: false,
        }
    }

    pub(super) fn hear(&mut self, now: Instant) -> Turn {
        let silent = self.age(now);
        (self.heard, self.spoke, self.missed) = (now, true, 0);
        match std::mem::take(&mut self.suspected) {
            true => Turn::Heard(silent),
            false => Turn::Same,
        }
    }

    /// A beat has passed. One that came late says nothing: what was said meanwhile may not have been read.
    pub(super) fn beat(&mut self, now: Instant, late: bool) -> Turn {
        if !std::mem::take(&mut self.spoke) && !late {
            self.missed += 1;
        }
        if self.missed < MISSED || self.suspected {
            return Turn::Same;
        }
        self.suspected = true;
        Turn::Silent(self.age(now))
    }

    pub(super) fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.heard)
    }
}

/// The beats of one end of a connection.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Beats {
    pub(super) next: Option<Instant>,
    /// Of the last question.
    pub(super) number: u64,
}

impl Beats {
    /// Whether it is time; then whether this process was too late to judge others.
    pub(super) fn fall_due(&mut self, now: Instant) -> Option<bool> {
        let next = self.next.filter(|next| *next <= now)?;
        self.next = Some(now + BEAT);
        Some(now.saturating_duration_since(next) > BEAT)
    }
}

impl State {
    /// A rank has come: from now on it is asked whether it is there.
    pub(super) fn feel(&mut self, rank: usize, kernel: &str, now: Instant) {
        let member = &mut self.members[rank];
        kernel.clone_into(&mut member.kernel);
        if matches!(member.outlet, Some(Outlet::Remote(_))) {
            member.pulse = Some(Pulse::new(now));
            let next = *self.beats.next.get_or_insert(now + BEAT);
            self.due(next);
        }
    }

    /// A rank has said something.
    pub(super) fn hear(&mut self, rank: usize, now: Instant) {
        let turn = self.members[rank].pulse.as_mut().map(|p| p.hear(now));
        if let Some(Turn::Heard(silent)) = turn {
            self.said.push(Said::HeardAgain(rank, silent));
            let (silent, state) = (None, None);
            self.push(&Push::Suspected {
                rank,
                silent,
                state,
            });
        }
    }

    /// Asks all whether they are there, and finds out who has not answered for long.
    pub(super) fn beat(&mut self, now: Instant) {
        let Some(late) = self.beats.fall_due(now) else {
            return;
        };
        self.beats.number += 1;
        let ping = Push::Ping(self.beats.number);
        let mut encoded = None;
        let mut silent = Vec::new();
        let mut asked = false;
        for (rank, member) in self.members.iter_mut().enumerate() {
            let (Some(outlet @ Outlet::Remote(_)), Some(pulse)) =
                (&member.outlet, &mut member.pulse)
            else {
                continue;
            };
            asked = true;
            if let Turn::Silent(age) = pulse.beat(now, late) {
                silent.push((rank, age));
            }
            outlet.push(&ping, &mut encoded);
            if let Outlet::Remote(connection) = outlet {
                connection.flush_and_mark(now);
            }
            self.dirty.push(outlet.clone());
        }
        if !asked {
            self.beats.next = None;
        }
        for (rank, age) in silent {
            self.suspect_process(rank, age);
        }
    }

    /// Tells all, with what can be seen of the process; what only others can see, they are asked for.
    fn suspect_process(&mut self, rank: usize, silent: Duration) {
        let member = &self.members[rank];
        let here = !member.kernel.is_empty() && member.kernel == process::kernel();
        let pid = self.service.rank(rank).pid;
        let state = here.then(|| process::state_of(pid)).flatten();
        if !here && let Some(outlet) = self.one_beside(rank) {
            outlet.push(&Push::Look { rank, pid }, &mut None);
            self.dirty.push(outlet);
        }
        self.said.push(Said::Silent(rank, silent, state.clone()));
        let silent = Some(silent);
        self.push(&Push::Suspected {
            rank,
            silent,
            state,
        });
    }

    /// A rank that runs under the same kernel, and speaks.
    fn one_beside(&self, rank: usize) -> Option<Outlet> {
        let kernel = &self.members[rank].kernel;
        let mut others = self.members.iter().enumerate();
        let (_, beside) = others.find(|(other, member)| {
            let speaks = member.pulse.is_some_and(|pulse| !pulse.suspected);
            *other != rank
                && speaks
                && !kernel.is_empty()
                && member.kernel == *kernel
                && member.outlet.is_some()
        })?;
        beside.outlet.clone()
    }

    /// Of a rank whose host acknowledges nothing any more: what tells that it lives all the same, if it has spoken
    /// since.
    pub(super) fn speaks_unheard(&self, rank: usize, now: Instant) -> Option<HeardOnly> {
        /// What it said may have been on the way when the last that it heard was sent.
        const ON_THE_WAY: Duration = Duration::from_millis(150);
        let member = &self.members[rank];
        let Some(Outlet::Remote(connection)) = &member.outlet else {
            return None;
        };
        let missing = connection.unacknowledged_for(now)?;
        let heard = member.pulse?.age(now);
        (heard + ON_THE_WAY < missing).then_some(HeardOnly {
            heard,
            unacknowledged: missing,
        })
    }

    /// A rank of the same host has looked.
    pub(super) fn saw(&mut self, rank: usize, mut state: ProcessState, now: Instant) {
        let Some(member) = self.members.get(rank) else {
            return;
        };
        if let Some(pulse) = member.pulse.filter(|pulse| pulse.suspected) {
            state.cut(super::service::LONGEST_NAME);
            let silent = pulse.age(now);
            let said = Said::Silent(rank, silent, Some(state.clone()));
            self.said.push(said);
            let (silent, state) = (Some(silent), Some(state));
            self.push(&Push::Suspected {
                rank,
                silent,
                state,
            });
        }
    }
}

impl super::hub::Hub {
    /// For how long each rank that is another process has not been heard.
    pub(super) fn heartbeat_ages(&self) -> Vec<(usize, Duration)> {
        let now = Instant::now();
        let state = self.state.lock();
        let members = state.members.iter().enumerate();
        let present = members.filter(|(_, member)| member.outlet.is_some());
        present
            .filter_map(|(rank, member)| Some((rank, member.pulse?.age(now))))
            .collect()
    }
}

/// What the log is told, when nothing is locked any more: whoever listens may ask how the world is, or be slow.
#[derive(Debug)]
pub(super) enum Said {
    /// A rank, for how long, and what was seen of its process.
    Silent(usize, Duration, Option<ProcessState>),
    HeardAgain(usize, Duration),
    /// This rank has taken over.
    Leads(usize),
}

impl Said {
    pub(super) fn say(self) {
        let millis = |silent: Duration| silent.as_millis() as u64;
        match self {
            Self::Silent(rank, silent, state) => {
                let silent_ms = millis(silent);
                let state =
                    state.map_or_else(|| String::from("unknown"), |state| state.to_string());
                tracing::warn!(name: "nccl.rendezvous.silent", target: "nccl", rank, silent_ms, state, "a rank is alive, and silent");
            }
            Self::HeardAgain(rank, silent) => {
                let silent_ms = millis(silent);
                tracing::info!(name: "nccl.rendezvous.heard_again", target: "nccl", rank, silent_ms, "a rank that was silent speaks again");
            }
            Self::Leads(rank) => {
                tracing::warn!(name: "nccl.rendezvous.handover", target: "nccl", rank, "this rank coordinates from now on");
            }
        }
    }
}

/// Whom a rank suspects, as far as it has heard or found itself.
#[derive(Debug, Default)]
pub(super) struct Suspects {
    known: Vec<Known>,
    /// What the coordinator before this one told, until this one has had time to find out for itself.
    before: Vec<Known>,
    until: Option<Instant>,
    /// When the coordinator was heard last.
    coordinator: Option<Instant>,
}

/// Who, since when, and what was seen of its process.
type Known = (usize, Instant, Option<ProcessState>);

impl Suspects {
    /// `silent` for so long, or heard again.
    pub(super) fn learn(
        &mut self,
        rank: usize,
        silent: Option<Duration>,
        state: Option<&ProcessState>,
    ) {
        self.forget(rank);
        if let Some(silent) = silent {
            let now = Instant::now();
            let since = now.checked_sub(silent).unwrap_or(now);
            self.known.push((rank, since, state.cloned()));
        }
    }

    pub(super) fn forget(&mut self, rank: usize) {
        for told in [&mut self.known, &mut self.before] {
            told.retain(|(known, ..)| *known != rank);
        }
    }

    /// There is another coordinator, which will tell anew. What was told before holds until it can know.
    pub(super) fn begin_anew(&mut self, now: Instant) {
        let mut before = self.all_known(now);
        before.sort_by_key(|(rank, ..)| *rank);
        *self = Self {
            before,
            until: Some(now + BEAT * (MISSED + 1)),
            ..Self::default()
        };
    }

    fn all_known(&self, now: Instant) -> Vec<Known> {
        let held = self.until.is_some_and(|until| now < until);
        let before = self.before.iter().filter(|_| held);
        self.known.iter().chain(before).cloned().collect()
    }

    pub(super) fn coordinator_heard(&mut self, now: Instant) {
        self.coordinator = Some(now);
    }

    pub(super) fn coordinator_age(&self) -> Option<Duration> {
        Some(self.coordinator?.elapsed())
    }

    pub(super) fn all(&self) -> Vec<Suspect> {
        self.all_at(Instant::now())
    }

    fn all_at(&self, now: Instant) -> Vec<Suspect> {
        let suspect = |(rank, since, state): Known| Suspect {
            rank,
            silent: now.saturating_duration_since(since),
            state,
        };
        let mut all: Vec<_> = self.all_known(now).into_iter().map(suspect).collect();
        all.sort_by_key(|suspect| suspect.rank);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_questions_without_an_answer_make_a_suspect_and_one_word_ends_it() {
        let begun = Instant::now();
        let at = |seconds: u64| begun + Duration::from_secs(seconds);
        let mut pulse = Pulse::new(begun);
        // The first beat ends the time in which it came.
        for second in 1..=2 {
            assert_eq!(pulse.beat(at(second), false), Turn::Same, "{second}");
        }
        let silent = Turn::Silent(Duration::from_secs(3));
        assert_eq!(pulse.beat(at(3), false), silent);
        assert_eq!(pulse.beat(at(5), false), Turn::Same, "said once");
        let silent = Duration::from_secs(6);
        assert_eq!(pulse.hear(at(6)), Turn::Heard(silent));
        assert_eq!(pulse.hear(at(7)), Turn::Same);
        assert_eq!(pulse.beat(at(8), false), Turn::Same);
    }

    #[test]
    fn who_spoke_right_before_a_beat_is_suspected_after_two_seconds_and_not_before() {
        let begun = Instant::now();
        let at = |millis: u64| begun + Duration::from_millis(millis);
        for (spoke, silent) in [(1, 2999), (999, 2001)] {
            let mut pulse = Pulse::new(begun);
            pulse.hear(at(spoke));
            for beat in [1000, 2000] {
                assert_eq!(pulse.beat(at(beat), false), Turn::Same, "{spoke}");
            }
            let silent = Turn::Silent(Duration::from_millis(silent));
            assert_eq!(pulse.beat(at(3000), false), silent, "{spoke}");
        }
    }

    #[test]
    fn one_that_was_stopped_itself_suspects_nobody() {
        let begun = Instant::now();
        let at = |seconds: u64| begun + Duration::from_secs(seconds);
        let next = Some(at(1));
        let mut beats = Beats { next, number: 0 };
        let mut pulse = Pulse::new(begun);
        assert_eq!(beats.fall_due(begun), None);
        for second in [10, 20, 30, 40, 50] {
            let late = beats.fall_due(at(second));
            assert_eq!(late, Some(true));
            assert_eq!(pulse.beat(at(second), late.unwrap()), Turn::Same);
        }
        assert_eq!(beats.fall_due(at(51)), Some(false));
    }

    #[test]
    fn what_the_former_coordinator_told_holds_until_its_successor_can_know() {
        let ranks = |suspects: &Suspects, now| -> Vec<usize> {
            suspects.all_at(now).iter().map(|s| s.rank).collect()
        };
        let mut suspects = Suspects::default();
        for rank in [5, 2, 3] {
            suspects.learn(rank, Some(Duration::from_secs(4)), None);
        }
        let now = Instant::now();
        suspects.begin_anew(now);
        assert_eq!(ranks(&suspects, now), [2, 3, 5]);
        // The successor says the same of one, and that another speaks.
        suspects.learn(3, Some(Duration::from_secs(2)), None);
        suspects.learn(2, None, None);
        assert_eq!(ranks(&suspects, now), [3, 5]);
        let three_beats = now + 3 * BEAT;
        assert_eq!(ranks(&suspects, three_beats), [3]);
    }

    #[test]
    fn a_suspect_is_said_to_be_alive_with_its_state() {
        let mut suspect = Suspect {
            rank: 3,
            silent: Duration::from_millis(3240),
            state: Some(ProcessState::stopped()),
        };
        let text = "alive, but silent for 3.2 s: process state T (stopped)";
        assert_eq!(suspect.to_string(), text);
        suspect.state = None;
        assert_eq!(suspect.to_string(), "alive, but silent for 3.2 s");
    }
}
