//! What is kept of a long log, and what follows for those who are behind.

use super::*;
use crate::departure::How;

#[derive(Clone, Debug, PartialEq)]
enum Line {
    Fault(usize),
    Gone(usize),
}

impl Entry for Line {
    fn gone(rank: usize, _: &Lost) -> Self {
        Self::Gone(rank)
    }

    fn departed(&self) -> Option<(usize, bool)> {
        match self {
            Self::Fault(_) => None,
            Self::Gone(rank) => Some((*rank, false)),
        }
    }
}

/// A rank of four that has heard of the death of rank 3 and then of so many faults.
fn after(me: usize, faults: usize) -> Succession<Line> {
    let mut machine = Succession::new(me, 4);
    machine.record(Line::Gone(3));
    (0..faults).for_each(|number| machine.record(Line::Fault(number)));
    machine
}

/// What rank 1 does when rank 0 has died and rank 2 says how far it has heard.
fn succeed(mut heir: Succession<Line>, other: &Succession<Line>) -> Vec<Action<Line>> {
    let mut actions = heir.step(Event::Lost(Loss::Lost(How::Closed.into())));
    let report = other.report();
    actions.extend(heir.step(Event::Reported { from: 2, report }));
    actions
}

#[test]
fn a_log_is_bounded_and_deaths_of_long_ago_are_known() {
    let machine = after(1, 1000 * KEPT);
    assert_eq!(machine.log().len(), KEPT);
    assert_eq!(machine.report().end(), 1000 * KEPT + 1);
    assert!(machine.has_departed(3) && !machine.has_departed(2));
    // So nobody waits for its report.
    let mut heir = machine;
    let actions = heir.step(Event::Lost(Loss::Lost(How::Closed.into())));
    assert_eq!(actions, [Action::Collect(vec![2])]);
}

#[test]
fn a_rank_that_is_a_little_behind_hears_the_rest() {
    let actions = succeed(after(1, 3 * KEPT), &after(2, 3 * KEPT - 5));
    let admitted = actions.iter().find_map(|action| match action {
        Action::Admit { to, start, entries } => Some((*to, *start, entries.len())),
        _ => None,
    });
    // Five faults, and the death of rank 0.
    assert_eq!(admitted, Some((2, 3 * KEPT - 4, 6)));
}

#[test]
fn a_rank_that_is_behind_what_is_kept_is_turned_away_and_not_told_half() {
    let actions = succeed(after(1, 3 * KEPT), &after(2, 3));
    assert!(actions.contains(&Action::TurnAway(2)), "{actions:?}");
    let is_admitted = |action: &Action<Line>| matches!(action, Action::Admit { .. });
    assert!(!actions.iter().any(is_admitted), "{actions:?}");
}

#[test]
fn a_successor_that_is_behind_what_others_keep_decides_nothing() {
    let actions = succeed(after(1, 3), &after(2, 3 * KEPT));
    assert!(!actions.contains(&Action::Lead), "{actions:?}");
    let parts = |action: &Action<Line>| matches!(action, Action::CutOff { .. });
    assert!(actions.iter().any(parts), "{actions:?}");
}
