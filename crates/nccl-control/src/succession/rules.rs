//! The rules one by one, where `check` would need more of the world to tell them apart.

use super::*;
use crate::departure::{How, ProcessEnd, Sign};

#[derive(Clone, Debug, PartialEq)]
enum Line {
    Fault(usize),
    Gone(usize, Lost),
}

use Line::{Fault, Gone};

impl Entry for Line {
    fn gone(rank: usize, lost: &Lost) -> Self {
        Gone(rank, lost.clone())
    }

    fn departed(&self) -> Option<(usize, bool)> {
        match self {
            Fault(_) => None,
            Gone(rank, lost) => Some((*rank, lost.may_live())),
        }
    }
}

fn closed() -> Loss {
    Loss::Lost(How::Closed.into())
}

fn silent() -> Loss {
    Loss::Lost(Sign::Error(String::from("silent")).into())
}

fn told() -> Loss {
    Loss::Lost(ProcessEnd::in_words("told", "").into())
}

/// The entry that says so.
fn entry(rank: usize, loss: Loss) -> Line {
    Line::gone(rank, &loss.into_lost())
}

fn gone(rank: usize, loss: Loss) -> Action<Line> {
    Action::Deliver(entry(rank, loss))
}

fn reported(from: usize, report: Report<Line>) -> Event<Line> {
    Event::Reported { from, report }
}

fn found(rank: usize, loss: Loss) -> Event<Line> {
    Event::Found { rank, loss }
}

/// What rank `me` of `size` does in the end when these happen.
fn all(me: usize, size: usize, events: Vec<Event<Line>>) -> (Succession<Line>, Vec<Action<Line>>) {
    let mut machine = Succession::new(me, size);
    let actions = events.into_iter().flat_map(|event| machine.step(event));
    let actions = actions.collect();
    (machine, actions)
}

fn cut_off(from: &[usize], with: &[usize]) -> Action<Line> {
    let (from, with) = (from.to_vec(), with.to_vec());
    Action::CutOff { from, with }
}

#[test]
fn of_two_ranks_one_goes_on_alone_when_the_other_is_gone_and_not_when_it_is_silent() {
    for loss in [closed(), told()] {
        let (machine, actions) = all(1, 2, vec![Event::Lost(loss.clone())]);
        let expected = [Action::Collect(vec![]), Action::Lead, gone(0, loss)];
        assert_eq!(actions, expected);
        assert_eq!(machine.report().synced, 1);
    }
    // Whoever has left is no death.
    let (_, actions) = all(1, 2, vec![Event::Lost(Loss::Left)]);
    assert_eq!(actions, [Action::Collect(vec![]), Action::Lead]);
    for loss in [silent(), Loss::Mute, Loss::Elsewhere] {
        let counts = loss == Loss::Mute;
        let (_, actions) = all(1, 2, vec![Event::Lost(loss)]);
        let expected = match counts {
            // Its kernel answers: nobody is cut off from it.
            true => Action::Lead,
            false => cut_off(&[0], &[]),
        };
        assert_eq!(actions, [Action::Collect(vec![]), expected]);
    }
}

#[test]
fn half_of_the_ranks_is_no_majority_and_the_dead_do_not_count() {
    let report = || Succession::new(3, 4).report();
    let events = |loss: Loss| vec![Event::Lost(silent()), reported(3, report()), found(2, loss)];
    let (_, actions) = all(1, 4, events(silent()));
    assert_eq!(actions.last(), Some(&cut_off(&[0, 2], &[3])));
    let (_, actions) = all(1, 4, events(closed()));
    assert!(actions.contains(&Action::Lead), "{actions:?}");
    // Nobody asks after the dead.
    let (_, actions) = all(
        1,
        4,
        vec![
            Event::Lost(closed()),
            found(2, silent()),
            found(3, silent()),
        ],
    );
    assert_eq!(actions.last(), Some(&cut_off(&[2, 3], &[])));
}

#[test]
fn one_that_is_gone_behind_its_report_is_gone() {
    let report = Succession::new(2, 4).report();
    let events = vec![
        Event::Lost(closed()),
        reported(2, report),
        found(2, closed()),
        found(3, closed()),
    ];
    let (_, actions) = all(1, 4, events);
    let expected = [
        Action::Collect(vec![2, 3]),
        Action::Lead,
        gone(0, closed()),
        gone(2, closed()),
        gone(3, closed()),
    ];
    assert_eq!(actions, expected);
}

#[test]
fn one_that_reports_is_there_whatever_was_found_or_others_say() {
    let mut two = Succession::<Line>::new(2, 4).report();
    let mut three = Succession::<Line>::new(3, 4).report();
    two.lost = vec![(1, closed()), (3, closed())];
    three.lost = vec![(0, told()), (2, silent())];
    let events = vec![
        Event::Lost(closed()),
        found(2, Loss::Mute),
        reported(2, two),
        reported(3, three),
    ];
    let (machine, actions) = all(1, 4, events);
    // The best account of rank 0's end counts, and nobody else is gone.
    let lost: Vec<_> = actions
        .iter()
        .filter(|action| matches!(action, Action::Deliver(_)))
        .collect();
    assert_eq!(lost, [&gone(0, told())]);
    assert_eq!(machine.log(), [entry(0, told())]);
    for rank in [2, 3] {
        let admitted = |action: &Action<Line>| matches!(action, Action::Admit { to, start: 0, .. } if *to == rank);
        assert!(actions.iter().any(admitted), "{actions:?}");
    }
    assert_eq!(machine.report().lost, [(0, closed())]);
}

#[test]
fn what_ranks_have_said_and_nobody_told_is_told_once() {
    let mut machine = Succession::new(1, 4);
    machine.say(Fault(1));
    machine.say(Fault(2));
    machine.record(Fault(1));
    assert_eq!(
        machine.report().unheard,
        [Fault(2)],
        "what was heard back is heard"
    );
    let mut two = Succession::new(2, 4);
    two.record(Fault(1));
    two.say(Fault(3));
    machine.step(Event::Lost(closed()));
    machine.step(reported(2, two.report()));
    machine.step(found(3, closed()));
    let how = |rank| entry(rank, closed());
    assert_eq!(
        machine.log(),
        [Fault(1), how(0), how(3), Fault(2), Fault(3)]
    );
    // A program that says very much while nobody tells it on is forgotten in part.
    let mut machine = Succession::new(1, 4);
    (0..10 * KEPT).for_each(|number| machine.say(Fault(number)));
    assert_eq!(machine.report().unheard.len(), KEPT);
}

#[test]
fn a_follower_hears_what_it_lacks_of_the_one_it_follows_and_of_nobody_else() {
    let mut machine = Succession::new(3, 4);
    machine.record(Fault(7));
    let actions = machine.step(Event::Lost(closed()));
    assert_eq!(actions, [Action::Seek(1)]);
    let succeeded = |by| Event::Succeeded {
        by,
        start: 0,
        entries: vec![Fault(7), Fault(8)],
    };
    assert_eq!(machine.step(succeeded(2)), []);
    assert_eq!(machine.step(succeeded(1)), [Action::Deliver(Fault(8))]);
    assert_eq!(machine.log(), [Fault(7), Fault(8)]);
    assert_eq!((machine.coordinator(), machine.report().synced), (1, 1));
}

#[test]
fn a_rank_goes_on_to_later_coordinators_only() {
    let (mut machine, actions) = all(3, 5, vec![Event::Lost(closed()), Event::Lost(closed())]);
    assert_eq!(actions, [Action::Seek(1), Action::Seek(2)]);
    for by in [0, 1, 2, 3] {
        assert_eq!(machine.step(Event::Overtaken { by }), [], "{by}");
    }
    assert_eq!(machine.step(Event::Overtaken { by: 4 }), [Action::Seek(4)]);
    // Nobody comes behind the last; rank 2 was passed over, and may be there.
    assert_eq!(machine.step(Event::Lost(closed())), [cut_off(&[2], &[])]);
    assert_eq!(machine.stage(), &Stage::Apart);
}

#[test]
fn who_is_turned_away_or_has_parted_takes_nobody_in() {
    let (mut machine, actions) = all(2, 4, vec![Event::Lost(closed()), Event::Refused]);
    assert_eq!(actions, [Action::Seek(1), cut_off(&[1, 3], &[])]);
    let report = || Succession::new(3, 4).report();
    assert_eq!(machine.step(reported(3, report())), [Action::TurnAway(3)]);
    let mut leader = Succession::new(0, 4);
    leader.step(Event::Parted);
    assert_eq!(leader.step(reported(3, report())), [Action::TurnAway(3)]);
}

#[test]
fn one_that_was_given_up_or_has_heard_something_else_is_turned_away() {
    let events = vec![
        Event::Lost(closed()),
        found(2, closed()),
        found(3, Loss::Mute),
    ];
    let (mut leader, _) = all(1, 4, events);
    let report = |log: Vec<Line>| Report {
        log,
        ..Succession::new(3, 4).report()
    };
    // Rank 2 was found dead, rank 3 only silent.
    assert_eq!(
        leader.step(reported(2, report(vec![]))),
        [Action::TurnAway(2)]
    );
    let actions = leader.step(reported(3, report(vec![Fault(5)])));
    assert_eq!(actions, [Action::TurnAway(3)]);
    let actions = leader.step(reported(3, report(vec![])));
    assert!(
        matches!(&actions[..], [Action::Admit { to: 3, .. }]),
        "{actions:?}"
    );
}

#[test]
fn a_successor_that_has_heard_something_else_than_a_later_view_decides_nothing() {
    let mut one = Succession::new(1, 4);
    one.record(Fault(1));
    let mut report = Succession::new(2, 4).report();
    (report.synced, report.log) = (1, vec![Fault(2), Fault(3)]);
    one.step(Event::Lost(closed()));
    one.step(reported(2, report));
    let actions = one.step(found(3, closed()));
    assert_eq!(actions, [cut_off(&[], &[2])]);
}

#[test]
fn the_log_of_the_latest_view_counts_and_not_the_longest() {
    let mut two = Succession::new(2, 5).report();
    (two.synced, two.log) = (0, vec![Fault(1), Fault(2)]);
    let mut three = Succession::new(3, 5).report();
    (three.synced, three.log) = (1, vec![Fault(3)]);
    let mut one = Succession::<Line>::new(1, 5);
    one.step(Event::Lost(closed()));
    for event in [reported(2, two), reported(3, three), found(4, closed())] {
        one.step(event);
    }
    assert_eq!(one.log()[0], Fault(3));
}

#[test]
fn those_out_of_reach_may_live_and_come_no_more_into_account_when_they_report() {
    // Rank 3 was declared lost, because its host was silent: it still counts among those who may live.
    let mut one = Succession::new(1, 4);
    one.record(entry(3, silent()));
    one.step(Event::Lost(silent()));
    let actions = one.step(reported(2, Succession::new(2, 4).report()));
    assert_eq!(actions, [cut_off(&[0], &[2])]);
    // One that died does not.
    let mut one = Succession::new(1, 4);
    one.record(entry(3, closed()));
    one.step(Event::Lost(silent()));
    let actions = one.step(reported(2, Succession::new(2, 4).report()));
    assert!(actions.contains(&Action::Lead), "{actions:?}");
}

/// It was given up before, and its own report says nothing about those whom this rank can reach.
#[test]
fn one_that_was_lost_before_is_none_of_the_majority_when_it_reports() {
    let mut one = Succession::new(1, 5);
    one.record(entry(4, silent()));
    one.step(Event::Lost(silent()));
    one.step(reported(4, Succession::new(4, 5).report()));
    one.step(reported(2, Succession::new(2, 5).report()));
    let actions = one.step(found(3, silent()));
    assert_eq!(actions, [cut_off(&[0, 3], &[2, 4])]);
}

#[test]
fn in_a_large_world_all_may_go_at_once_and_are_kept() {
    let size = 3 * KEPT;
    let mut machine = Succession::new(1, size);
    (2..size).for_each(|rank| machine.record(entry(rank, closed())));
    assert_eq!(machine.log().len(), size - 2);
}
