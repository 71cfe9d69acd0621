//! Merges snapshots of several ranks: which rank is behind, whose clock is trusted, and what is left out.

use std::time::Duration;

use super::{NAME, call, origin, recording, reduce, snapshot, two_of_three};
use crate::timeline::Timeline;
use nccl_core::recorder::{CallState, Clock, ClockSource, Snapshot};

#[test]
fn who_is_behind_is_said_with_the_call_and_who_is_not_there() {
    let timeline = two_of_three();
    let [standing] = &timeline.standings()[..] else {
        panic!("one communicator");
    };
    assert_eq!(standing.behind, [1]);
    assert_eq!(
        standing.sentence,
        "rank 1 (node-1, pid 4001) is behind, at group #2 (done); rank 0 is at all_reduce #3 (issued, and not \
         known to be done); nothing is known of rank 2"
    );
    assert_eq!(timeline.missing.len(), 1);
    assert_eq!(timeline.missing[0].rank, 2);
}

#[test]
fn communicators_of_one_name_are_told_apart_and_their_ranks_are_found_in_the_world() {
    // Two communicators of ranks 1 and 2 of the world, and one of rank 0 alone.
    let call = || call(1, 100, CallState::Issued, &[]);
    let part = |rank: usize, key: &str, calls| {
        let mut part = recording(rank, calls);
        part.key = Some(key.to_owned());
        part.world_size = 2;
        part.members = Some(vec![1, 2]);
        part.launcher_ranks = Some(vec![2, 3]);
        part
    };
    let mut alone = recording(0, vec![]);
    alone.key = Some("00000000aa".to_owned());
    alone.world_size = 1;
    alone.members = Some(vec![0]);
    let of = |rank: usize, communicators| {
        let mut snapshot = snapshot(rank, "", vec![]);
        snapshot.communicators = communicators;
        snapshot
    };
    let both = |rank: usize| {
        let calls = (0..1 - rank).map(|_| call()).collect();
        vec![
            part(rank, "11111111aa", calls),
            part(rank, "22222222aa", vec![]),
        ]
    };
    let timeline = Timeline::merge(vec![of(0, vec![alone]), of(1, both(0)), of(2, both(1))]);
    let timeline = timeline.unwrap();
    let standings = timeline.standings();
    let named: Vec<_> = standings.iter().map(|one| &*one.named).collect();
    assert_eq!(
        named,
        [
            format!("{NAME:?} (world rank 0)"),
            format!("{NAME:?} (world ranks 1-2), key 11111111"),
            format!("{NAME:?} (world ranks 1-2), key 22222222"),
        ]
    );
    let says = &standings[1].sentence;
    assert!(
        says.starts_with(
            "rank 1 (world rank 2, launcher rank 3, node-2, pid 4002) has called nothing yet"
        ),
        "{says}"
    );
    assert!(
        says.contains("; rank 0 (world rank 1, launcher rank 2) is at "),
        "{says}"
    );
    let launched = [0, 1, 2, 3].map(|rank| timeline.launcher_rank(rank));
    assert_eq!(launched, [Some(0), Some(2), Some(3), None]);
    assert!(
        timeline
            .to_html()
            .contains("rank 2 (launcher rank 3, node-2, pid 4002)")
    );
}

#[test]
fn communicators_without_a_key_are_told_apart_by_their_members_and_their_order() {
    let part = |rank: usize, members: Option<Vec<usize>>, calls: u64| {
        let calls = (1..=calls).map(|number| call(number, number, CallState::Done, &[reduce(1)]));
        let mut part = recording(rank, calls.collect());
        (part.key, part.members, part.world_size) = (None, members, 2);
        part
    };
    let of = |rank: usize, calls: [u64; 3]| {
        let mut snapshot = snapshot(rank, "a", vec![]);
        let first = part(rank, None, calls[0]);
        let second = part(rank, None, calls[1]);
        let other = part(rank, Some(vec![5, 7]), calls[2]);
        snapshot.communicators = vec![first, second, other];
        snapshot
    };
    let timeline = Timeline::merge(vec![of(0, [3, 1, 2]), of(1, [3, 1, 1])]).unwrap();
    let standings = timeline.standings();
    let behind: Vec<_> = standings.iter().map(|one| &one.behind[..]).collect();
    assert_eq!(behind, [&[][..], &[], &[1]]);
    let page = timeline.to_html();
    assert!(page.contains("\"comm\":2") && !page.contains("\"comm\":3"));
}

#[test]
fn of_a_rank_that_was_started_again_the_new_process_is_named() {
    let calls = |last: u64| {
        let calls = (1..=last).map(|number| call(number, number, CallState::Done, &[reduce(1)]));
        calls.collect()
    };
    let mut old = snapshot(1, "a", calls(2));
    (old.pid, old.taken) = (17, origin());
    let timeline = Timeline::merge(vec![
        old,
        snapshot(0, "a", calls(3)),
        snapshot(1, "a", calls(1)),
    ]);
    let standings = timeline.unwrap().standings();
    let sentence = &standings[0].sentence;
    assert!(
        sentence.starts_with("rank 1 (node-1, pid 4001) is behind, at all_reduce #1"),
        "{sentence}"
    );
}

#[test]
fn clocks_are_one_on_one_machine_corrected_where_measured_and_otherwise_said_to_be_wrong() {
    let sources = |mut snapshots: Vec<Snapshot>, measured: bool| {
        for (at, snapshot) in snapshots.iter_mut().enumerate() {
            let clock = Clock::measured(1_000_000 * at as i128, 2_000);
            snapshot.clock = measured.then_some(clock);
        }
        let timeline = Timeline::merge(snapshots).unwrap();
        let clock = timeline.ranks[1].clock;
        (clock.source, clock.offset_ns, clock.uncertainty_ns)
    };
    let two = |boots: [&str; 2]| {
        let ranks = boots.into_iter().enumerate();
        ranks
            .map(|(rank, boot)| snapshot(rank, boot, vec![]))
            .collect()
    };
    assert_eq!(
        sources(two(["a", "b"]), false),
        (ClockSource::Wall, 0, None)
    );
    assert_eq!(
        sources(two(["a", "a"]), true),
        (ClockSource::SameMachine, 0, None)
    );
    assert_eq!(
        sources(two(["a", "b"]), true),
        (ClockSource::RoundTrip, -1_000_000, Some(2_000))
    );
}

#[test]
fn of_several_worlds_the_latest_is_merged_and_of_one_process_the_last_recording() {
    let mut old = snapshot(0, "a", vec![]);
    old.place.as_mut().unwrap().generation = 2;
    old.taken = origin();
    let mut early = snapshot(1, "a", vec![]);
    early.taken = origin() + Duration::from_millis(1);
    let late = snapshot(1, "a", vec![call(1, 2, CallState::Done, &[reduce(1)])]);
    let timeline = Timeline::merge(vec![old, late.clone(), early]).unwrap();
    assert_eq!(timeline.generation, 3);
    assert_eq!(timeline.ranks.len(), 1);
    assert_eq!(timeline.ranks[0].snapshot, late);
    assert!(
        timeline.left_out[0].contains("generation 2"),
        "{timeline:?}"
    );
}

#[test]
fn a_pipe_in_the_place_of_a_recording_is_left_out_and_not_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    std::fs::write(path("rank-0.json"), snapshot(0, "a", vec![]).to_json()).unwrap();
    let made = rustix::fs::mkfifoat(rustix::fs::CWD, path("rank-1.json"), rustix::fs::Mode::RWXU);
    made.unwrap();
    let (say, said) = std::sync::mpsc::channel();
    let all = directory.path().to_owned();
    std::thread::spawn(move || drop(say.send(Timeline::read(&[all]))));
    let read = said.recv_timeout(Duration::from_secs(20));
    let timeline = read.expect("it does not wait").unwrap();
    assert_eq!(timeline.ranks.len(), 1);
    let left_out = &timeline.left_out[0];
    assert!(left_out.ends_with("it is no regular file"), "{left_out}");
}

#[test]
fn what_is_too_much_is_left_out_from_the_oldest_on_and_counted() {
    let calls = (1..=500).map(|number| call(number, number, CallState::Done, &[reduce(number)]));
    let mut limited = snapshot(0, "a", calls.collect());
    limited.limit_to(20_000);
    let recording = &limited.communicators[0];
    let length = limited.to_json().len();
    assert!((15_000..20_500).contains(&length), "{length}");
    assert_eq!(recording.calls.last().unwrap().sequence, 500);
    assert_eq!(recording.calls.len() + recording.left_out, 500);
    assert_eq!(recording.calls[0].sequence as usize, recording.left_out + 1);
    let mut nothing = limited.clone();
    nothing.limit_to(0);
    assert_eq!(nothing.communicators[0].left_out, 500);
    assert_eq!((nothing.notes.len(), nothing.notes_left_out), (0, 1));
}
