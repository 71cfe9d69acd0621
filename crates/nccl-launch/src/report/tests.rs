//! Artificial reports, and their texts.

use super::*;

fn end(rank: usize, exit: Exit) -> RankEnd {
    RankEnd {
        rank,
        pid: 970 + rank as u32,
        host: "node-a".into(),
        generation: 0,
        exit,
        ran: Duration::from_millis(1234),
        at: Duration::from_millis(1300),
        stderr: Vec::new(),
        oom: None,
        asked_by: None,
        was_stopped: false,
        was_ending: false,
    }
}

fn killed(signal: Signal) -> Exit {
    Exit::Signal {
        signal,
        core_dumped: false,
    }
}

fn report(ranks: Vec<RankEnd>, failures: Vec<RankEnd>) -> Report {
    let failures: Vec<_> = failures.into_iter().map(Arc::new).collect();
    Report {
        first: first_of(&failures),
        ranks: ranks.into_iter().map(Arc::new).collect(),
        left_behind: Vec::new(),
        interrupted: None,
        unread: false,
    }
}

#[test]
fn the_first_is_said_first_and_the_others_together() {
    let mut first = end(2, killed(Signal::Kill));
    first.stderr = vec![String::from("loading"), String::from("weights")];
    let asked = |rank| RankEnd {
        asked_by: Some(Signal::Term),
        ..end(rank, killed(Signal::Term))
    };
    let report = report(
        vec![
            asked(0),
            asked(1),
            first.clone(),
            asked(3),
            end(4, Exit::Code(1)),
        ],
        vec![first, end(4, Exit::Code(1))],
    );
    assert_eq!(
        report.to_string(),
        "rank 2 (node-a, pid 972) died first: killed by SIGKILL after 1.2 s\n  \
         the last it said on standard error:\n    loading\n    weights\n  \
         ranks 0, 1, 3: ended by SIGTERM from here\n  rank 4: exit code 1 as well"
    );
    assert_eq!(report.exit_code(), 137);
    assert!(!report.is_success());
}

#[test]
fn a_rank_that_was_being_killed_goes_before_one_that_noticed() {
    let noticed = end(0, Exit::Code(1));
    let killed_by = |signal| RankEnd {
        was_ending: true,
        ..end(3, killed(signal))
    };
    let first = |failures: Vec<RankEnd>| report(Vec::new(), failures).first.unwrap().rank;
    assert_eq!(first(vec![noticed.clone(), killed_by(Signal::Segv)]), 3);
    // A runtime aborts because of an error, so an abort is no cause by itself.
    assert_eq!(first(vec![noticed.clone(), killed_by(Signal::Abrt)]), 0);
    // The process was not being ended when the first end was noticed.
    assert_eq!(first(vec![noticed, end(3, killed(Signal::Segv))]), 0);
    let both = vec![end(1, killed(Signal::Segv)), killed_by(Signal::Kill)];
    assert_eq!(first(both), 1);
}

#[test]
fn the_exit_code_is_that_of_whoever_ended_it() {
    let mut interrupted = report(vec![end(0, Exit::Code(0))], Vec::new());
    interrupted.interrupted = Some(Signal::Int);
    assert_eq!(interrupted.exit_code(), 0);
    interrupted.ranks.push(Arc::new(end(1, Exit::Code(7))));
    assert_eq!(interrupted.exit_code(), 130);
    let mut left = report(Vec::new(), Vec::new());
    assert_eq!(left.to_string(), "every rank returned 0");
    left.left_behind.push(1);
    assert_eq!(left.exit_code(), 1);
    assert!(left.to_string().contains("rank 1: still there"), "{left}");
}

#[test]
fn many_ranks_are_listed_shortly() {
    assert_eq!(list(&[3]), "rank 3");
    assert_eq!(list(&[0, 1, 4, 5, 6, 9]), "ranks 0, 1, 4-6, 9");
}
