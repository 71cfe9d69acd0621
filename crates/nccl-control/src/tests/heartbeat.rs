//! Who is silent although its kernel answers: found by beats, looked at by a neighbour, told to all.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use super::*;
use crate::connection::Connection;
use crate::departure::How;
use crate::frame::{Decoder, LARGEST_FRAME};
use crate::heartbeat::{BEAT, Turn};
use crate::hub::{Hub, Outlet};
use crate::incoming::{Incoming, Push};
use crate::noise::Seal;
use crate::process_state::ProcessState;
use crate::reader::Sink as _;
use crate::succession::Loss;

/// The other end of a rank's connection.
struct Far(Connection, Decoder);

impl Far {
    fn attach(hub: &Hub, rank: usize, kernel: &str) -> Self {
        let (near, far) = UnixStream::pair().unwrap();
        for end in [&near, &far] {
            end.set_nonblocking(true).unwrap();
        }
        let (ours, theirs) = Seal::pair();
        let near = Connection::new(near.into());
        near.seal(ours);
        let mut decoder = Decoder::new(LARGEST_FRAME);
        decoder.seal(theirs);
        let outlet = Outlet::Remote(Arc::new(near));
        let who = ("node", 70 + rank as u64, kernel);
        hub.attach(rank, outlet, who, None).unwrap();
        Self(Connection::new(far.into()), decoder)
    }

    /// What has come, but for the questions whether it is there.
    fn told(&mut self) -> Vec<Push> {
        self.0.receive(&mut self.1).unwrap();
        let mut told = Vec::new();
        while let Some(frame) = self.1.next().unwrap() {
            match Incoming::decode(&frame).unwrap() {
                Incoming::Push(Push::Ping(_)) => {}
                Incoming::Push(push) => told.push(push),
                Incoming::Answer(..) => panic!("nobody asked"),
            }
        }
        told
    }
}

#[test]
fn one_that_is_silent_is_looked_at_by_its_neighbour_and_all_hear_of_it() {
    let hub = Hub::new(4);
    let mailbox = Arc::new(Mailbox::default());
    let outlet = Outlet::Local(Arc::clone(&mailbox));
    hub.attach(0, outlet, ("here", 1, "this"), None).unwrap();
    let begun = Instant::now();
    let mut one = Far::attach(&hub, 1, "a third");
    let mut two = Far::attach(&hub, 2, "another");
    let mut three = Far::attach(&hub, 3, "another");
    for beat in 1..=5 {
        hub.tick(begun + beat * BEAT + Duration::from_millis(10));
        for rank in [1, 3] {
            hub.handle(rank, u64::MAX, Request::Pong(beat.into()));
        }
        hub.flush();
    }
    let silent = |push: &Push| match push {
        Push::Suspected { rank, silent, .. } => Some((*rank, *silent)),
        _ => None,
    };
    let told = one.told();
    let [told] = &told[..] else {
        panic!("{told:?}");
    };
    let (rank, age) = silent(told).expect("a suspect");
    assert_eq!(rank, 2);
    let age = age.expect("silent");
    assert!(
        age > Duration::from_secs(2) && age < Duration::from_secs(4),
        "{age:?}"
    );
    // Only its neighbour is asked to look.
    let told = three.told();
    assert!(told.contains(&Push::Look { rank: 2, pid: 72 }), "{told:?}");
    assert_eq!(mailbox.suspects().len(), 1);
    assert_eq!(mailbox.suspects()[0].state, None);

    let state = ProcessState::stopped();
    hub.handle(
        3,
        u64::MAX,
        Request::Saw {
            rank: 2,
            state: state.clone(),
        },
    );
    hub.flush();
    assert_eq!(mailbox.suspects()[0].state.as_ref(), Some(&state));
    // What is seen of somebody who speaks is no suspicion.
    hub.handle(3, u64::MAX, Request::Saw { rank: 1, state });
    hub.handle(
        3,
        u64::MAX,
        Request::Saw {
            rank: 9,
            state: ProcessState::stopped(),
        },
    );
    hub.flush();
    assert_eq!(mailbox.suspects().len(), 1);
    assert!(
        one.told()
            .iter()
            .all(|push| silent(push).is_some_and(|(rank, _)| rank == 2))
    );

    two.told();
    hub.handle(2, u64::MAX, Request::Pong(1));
    hub.flush();
    assert_eq!(mailbox.suspects(), []);
    let told = one.told();
    assert_eq!(
        told.iter().filter_map(silent).collect::<Vec<_>>(),
        [(2, None)]
    );
}

#[test]
fn one_that_dies_is_no_suspect_any_more() {
    let hub = Hub::new(2);
    let mailbox = Arc::new(Mailbox::default());
    let outlet = Outlet::Local(Arc::clone(&mailbox));
    hub.attach(0, outlet, ("here", 1, "this"), None).unwrap();
    let begun = Instant::now();
    let _one = Far::attach(&hub, 1, "another");
    for beat in 1..=5 {
        hub.tick(begun + beat * BEAT + Duration::from_millis(10));
    }
    assert_eq!(mailbox.suspects().len(), 1);
    let ages = hub.heartbeat_ages();
    assert_eq!(ages.len(), 1);
    assert_eq!(ages[0].0, 1);
    hub.leave(1, crate::departure::Departure::Left);
    assert_eq!(mailbox.suspects(), []);
    assert_eq!(hub.heartbeat_ages(), []);
}

#[test]
fn what_a_rank_said_last_is_told_of_one_that_dies_and_of_no_other() {
    let hub = Hub::new(4);
    let mailbox = Arc::new(Mailbox::default());
    let outlet = Outlet::Local(Arc::clone(&mailbox));
    hub.attach(0, outlet, ("here", 1, "this"), None).unwrap();
    let _far = [1, 2, 3].map(|rank| Far::attach(&hub, rank, "another"));
    for rank in [1, 2] {
        let call = format!("all_reduce #{rank} on \"tp\", called 0.1 s before that");
        hub.handle(rank, u64::MAX, Request::Last { call });
    }
    let died = |rank| {
        hub.lost(rank, Loss::Lost(How::Unknown.into()));
        mailbox.departure(rank).map(|how| how.to_string())
    };
    let words = "it died; its last heartbeat, 0.0 s before, told of all_reduce #1 on \"tp\", called 0.1 s before that";
    assert_eq!(died(1).as_deref(), Some(words));
    assert_eq!(died(3).as_deref(), Some("it died"));
    hub.leave(2, crate::departure::Departure::Left);
    let left = mailbox.departure(2).expect("it left");
    assert_eq!(left, crate::departure::Departure::Left);
}

/// Listens to the log, and asks how the world is whenever something is said.
struct Curious<F>(F, Arc<AtomicUsize>);

impl<F: Fn() + Send + Sync + 'static> tracing::Subscriber for Curious<F> {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        if event.metadata().name().starts_with("nccl.rendezvous.") {
            (self.0)();
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn whoever_listens_to_the_log_may_ask_how_the_world_is() {
    let (done, over) = mpsc::channel();
    // Which waits for ever if it is said under a lock.
    std::thread::spawn(move || {
        let hub = Arc::new(Hub::new(2));
        let mailbox = Arc::new(Mailbox::default());
        let outlet = Outlet::Local(Arc::clone(&mailbox));
        hub.attach(0, outlet, ("here", 1, "this"), None).unwrap();
        let _one = Far::attach(&hub, 1, "another");
        let (asked, of) = (Arc::clone(&hub), Arc::clone(&mailbox));
        let ask = move || drop((asked.heartbeat_ages(), of.suspects(), crate::lines()));
        let said = Arc::new(AtomicUsize::new(0));
        let curious = Curious(ask, Arc::clone(&said));
        tracing::subscriber::with_default(curious, || {
            let begun = Instant::now();
            for beat in 1..=5 {
                hub.tick(begun + beat * BEAT + Duration::from_millis(10));
            }
            let state = ProcessState::stopped();
            let saw = Request::Saw { rank: 1, state };
            hub.handle(0, u64::MAX, saw);
            hub.flush();
            hub.handle(1, u64::MAX, Request::Pong(1));
            hub.flush();
            mailbox.coordinator_turns(Turn::Silent(Duration::from_secs(3)), None);
            mailbox.coordinator_turns(Turn::Heard(Duration::from_secs(4)), None);
        });
        done.send(said.load(Ordering::Relaxed)).unwrap();
    });
    let said = over.recv_timeout(Duration::from_secs(20));
    assert_eq!(said, Ok(5), "silent, seen, heard; and the coordinator");
}
