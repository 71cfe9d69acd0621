//! Who has not entered an operation: what the coordinator asks, and what it says.

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::departure::{Departure, How};
use crate::hub::{Hub, Outlet};
use crate::mailbox::{Mailbox, Notice};
use crate::operation::OperationKind;
use crate::request::Request;
use crate::sync::Mutex;
use crate::{Attendance, Lateness, Subject, Suspicion};

/// What a rank has heard.
type Heard = Arc<Mutex<Vec<Notice>>>;

fn hub(ranks: usize) -> (Hub, Vec<Heard>) {
    let hub = Hub::new(ranks);
    let heard = (0..ranks).map(|rank| {
        let mailbox = Arc::new(Mailbox::default());
        let heard = Heard::default();
        let into = Arc::clone(&heard);
        mailbox.on_notice(Box::new(move |notice| {
            into.lock().push(notice.clone());
        }));
        let outlet = Outlet::Local(mailbox);
        hub.attach(rank, outlet, ("here", 70 + rank as u64, "this"), None)
            .unwrap();
        heard
    });
    let heard = heard.collect();
    hub.flush();
    (hub, heard)
}

fn suspects(turn: u64, is_sample: bool, members: &[usize]) -> Request {
    Request::Suspect(Suspicion {
        subject: Subject {
            key: String::from("k"),
            name: String::from("tp"),
            turn,
            kind: OperationKind::AllReduce,
            sequence: 2 * turn,
        },
        members: members.to_vec(),
        since: Duration::from_secs(2),
        is_sample,
    })
}

fn attends(turn: u64, entered: Option<Duration>) -> Request {
    Request::Attends(Attendance {
        key: String::from("k"),
        turn,
        entered,
        last: String::from("its last call was #7"),
    })
}

fn say(hub: &Hub, rank: usize, request: Request) {
    hub.handle(rank, u64::MAX, request);
    hub.flush();
}

fn taken(heard: &Heard) -> Vec<Notice> {
    std::mem::take(&mut *heard.lock())
}

fn late(heard: &Heard) -> Arc<Lateness> {
    match &taken(heard)[..] {
        [Notice::Late(late)] => Arc::clone(late),
        other => panic!("one word on who is late: {other:?}"),
    }
}

#[test]
fn ranks_are_asked_once_and_all_hear_who_is_late_and_when_it_has_come() {
    let (hub, heard) = hub(4);
    say(
        &hub,
        2,
        Request::Phase {
            name: String::from("load"),
        },
    );
    // Of three of the four, of which all suspect somebody.
    say(&hub, 3, suspects(9, false, &[3, 2, 0]));
    say(&hub, 0, suspects(9, false, &[3, 2, 0]));
    let inquired = |heard: &Heard| {
        let taken = taken(heard);
        taken
            .iter()
            .filter(|notice| matches!(notice, Notice::Inquired { turn: 9, .. }))
            .count()
    };
    assert_eq!(
        [0, 1, 2, 3].map(|rank| inquired(&heard[rank])),
        [1, 0, 1, 0]
    );
    say(&hub, 2, attends(9, None));
    for rank in [0, 2, 3] {
        let late = late(&heard[rank]);
        assert_eq!((late.ranks, late.more), (3, 0));
        assert_eq!((late.subject.sequence, &*late.subject.name), (18, "tp"));
        let [one] = &late.late[..] else {
            panic!("one is late: {late:?}")
        };
        assert_eq!((one.rank, one.place, one.pid), (2, 1, 72));
        assert!(one.answers && !one.has_entered, "{one:?}");
        assert_eq!((&*one.phase, &*one.last), ("load", "its last call was #7"));
        assert!(one.behind >= Duration::from_secs(2), "{one:?}");
    }
    assert_eq!(taken(&heard[1]), []);
    // Another that waits, or an older suspicion, changes nothing.
    say(&hub, 0, suspects(9, false, &[3, 2, 0]));
    say(&hub, 0, suspects(8, false, &[3, 2, 0]));
    assert_eq!(taken(&heard[2]), []);
    say(&hub, 2, attends(9, Some(Duration::from_millis(1))));
    let late = late(&heard[0]);
    assert!(late.late[0].has_entered, "{late:?}");
    let behind = late.late[0].behind;
    assert!(
        (Duration::from_millis(1900)..Duration::from_secs(5)).contains(&behind),
        "{behind:?}"
    );
}

#[test]
fn nobody_is_named_when_all_have_entered_and_one_that_is_silent_is_when_it_is_due() {
    let (hub, heard) = hub(3);
    say(&hub, 0, suspects(1, false, &[]));
    say(&hub, 1, attends(1, Some(Duration::from_secs(2))));
    say(&hub, 2, attends(1, Some(Duration::ZERO)));
    assert_eq!(taken(&heard[0]), []);
    // The next: rank 2 does not answer.
    say(&hub, 0, suspects(2, false, &[]));
    say(&hub, 1, attends(2, Some(Duration::from_secs(2))));
    assert_eq!(taken(&heard[0]), []);
    hub.tick(Instant::now() + Duration::from_millis(1100));
    let late = late(&heard[0]);
    assert_eq!((late.late.len(), late.late[0].rank), (1, 2));
    assert!(!late.late[0].answers);
    // One that is gone is told of otherwise.
    say(&hub, 0, suspects(3, false, &[]));
    say(&hub, 1, attends(3, Some(Duration::from_secs(2))));
    hub.leave(2, Departure::lost(How::Unknown));
    taken(&heard[0]);
    hub.tick(Instant::now() + Duration::from_millis(1100));
    assert_eq!(taken(&heard[0]), []);
    // Who is not a member does not ask, nor one that names ranks that there are not.
    taken(&heard[1]);
    say(&hub, 0, suspects(4, false, &[1]));
    say(&hub, 0, suspects(4, false, &[0, 1, 7]));
    assert_eq!(taken(&heard[1]), []);
}

#[test]
fn a_sample_tells_how_far_apart_the_ranks_came_and_nobody_else_hears_of_it() {
    let (hub, heard) = hub(3);
    say(&hub, 0, suspects(5, true, &[]));
    say(&hub, 1, attends(5, Some(Duration::from_millis(1500))));
    assert_eq!(taken(&heard[0]), []);
    say(&hub, 2, attends(5, Some(Duration::from_secs(2))));
    let [Notice::Skewed { skew, last: 1, .. }] = &taken(&heard[0])[..] else {
        panic!("rank 1 came last");
    };
    assert!(
        skew.abs_diff(Duration::from_millis(500)) < Duration::from_millis(200),
        "{skew:?}"
    );
    let asked = taken(&heard[1]);
    assert!(
        matches!(
            asked[..],
            [Notice::Inquired {
                is_sample: true,
                ..
            }]
        ),
        "{asked:?}"
    );
    // What is not known in full is not told; and a suspicion is more than a sample.
    say(&hub, 0, suspects(6, true, &[]));
    say(&hub, 1, attends(6, None));
    say(&hub, 2, attends(6, Some(Duration::ZERO)));
    assert_eq!(taken(&heard[0]), []);
    say(&hub, 0, suspects(7, false, &[]));
    taken(&heard[1]);
    say(&hub, 0, suspects(8, true, &[]));
    assert_eq!(taken(&heard[1]), []);
}
