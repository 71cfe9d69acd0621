//! The engine and made-up events. The ranks are processes that do nothing, and say what the tests say for them.

use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};

use nccl::launch::{Exit, Signal};
use tokio::sync::mpsc::UnboundedReceiver;

use super::*;
use crate::front::options::{Options, Role};
use crate::model::tokenizer::Tokenizer;
use crate::wire::{self, Copies, Draw, ToRank};

/// How long the system may take to start or to end a process.
const LIMIT: Duration = Duration::from_secs(30);

struct Scene {
    engine: Engine,
    /// Events of the engine's inbox come from here as well.
    to: Sender<Event>,
    pids: Vec<u32>,
    /// The ranks' ends of their connections; the number of a connection is that of its rank.
    links: Vec<UnixStream>,
}

fn options(words: &[&str]) -> Options {
    match Role::from_args(lexopt::Parser::from_args(words.iter().copied())) {
        Ok(Role::Front(options)) => options,
        _ => panic!("not a front: {words:?}"),
    }
}

fn sleeping() -> Command {
    let mut command = Command::new("sleep");
    command.arg("600");
    command
}

impl Scene {
    /// Ranks that have connected.
    fn new(words: &[&str]) -> Self {
        let mut scene = Self::with(words, sleeping);
        scene.connect();
        scene
    }

    fn with(words: &[&str], rank: impl Fn() -> Command + Send + 'static) -> Self {
        let options = options(words);
        let (to, inbox) = mpsc::channel();
        let crew = Crew::start_as(&options, to.clone(), rank).unwrap();
        let scheduler = Scheduler::new(options.settings, 32, options.queue);
        let view = Arc::new(Mutex::new(View::new(options.ranks)));
        let mut scene = Self {
            engine: Engine::new(crew, scheduler, view, inbox),
            to,
            pids: vec![0; options.ranks],
            links: Vec::new(),
        };
        for _ in 0..options.ranks {
            scene.started();
        }
        scene
    }

    /// The next thing that happens to a process.
    fn happens(&mut self) -> FleetEvent {
        match self.engine.inbox.recv_timeout(LIMIT) {
            Ok(Event::Fleet(event)) => event,
            Ok(_) => panic!("something else has happened"),
            Err(error) => panic!("nothing has happened to a process: {error}"),
        }
    }

    /// Waits until a process is started, and tells the engine.
    fn started(&mut self) -> usize {
        let event = self.happens();
        let FleetEvent::Started { rank, pid, .. } = event else {
            panic!("no start: {event:?}");
        };
        self.pids[rank] = pid;
        self.tell(Event::Fleet(event));
        rank
    }

    fn connect(&mut self) {
        for (place, pid) in self.pids.clone().into_iter().enumerate() {
            let (front, rank) = UnixStream::pair().unwrap();
            self.links.push(rank);
            self.tell(Event::Link(place, Heard::Opened(pid, front)));
            self.say(place, FromRank::Hello { place });
        }
    }

    fn tell(&mut self, event: Event) {
        self.engine.handle(event).unwrap();
        self.engine.show();
    }

    fn say(&mut self, place: usize, message: FromRank) {
        self.tell(Event::Link(place, Heard::Said(message)));
    }

    /// These are in the generation, and share the model in so many parts; the last ones have none.
    fn serve(&mut self, generation: u64, places: &[usize], shards: usize) {
        self.serve_with(generation, places, shards, None);
    }

    fn serve_with(
        &mut self,
        generation: u64,
        places: &[usize],
        shards: usize,
        copies: Option<Copies>,
    ) {
        for &place in places {
            self.say(place, FromRank::Entered { generation });
        }
        for (rank, &place) in places.iter().enumerate() {
            let message = FromRank::Serves {
                generation,
                rank,
                shard: (rank < shards).then_some(rank),
                shards,
                device: 0,
                copies,
                kept: Vec::new(),
            };
            self.say(place, message);
        }
    }

    /// What a rank has been told.
    fn heard(&mut self, place: usize) -> Option<ToRank> {
        let link = &mut self.links[place];
        link.set_nonblocking(true).unwrap();
        wire::read(link).ok().flatten()
    }

    /// Ends a process. How it ended is for the engine to be told.
    fn kill(&mut self, place: usize) -> Event {
        self.engine.crew.signal(place, Signal::Kill);
        match self.happens() {
            FleetEvent::Exited(end) => Event::Fleet(FleetEvent::Exited(end)),
            other => panic!("no end: {other:?}"),
        }
    }
}

#[test]
fn those_that_went_on_without_a_rank_are_not_stopped_when_it_is_heard_how_it_ended() {
    for closed_first in [true, false] {
        let mut scene = Scene::new(&["--ranks", "2", "--recovery", "shrink"]);
        scene.serve(0, &[0, 1], 2);
        assert_eq!(scene.engine.generation, Some(0));
        let end = scene.kill(1);
        scene.serve(1, &[0], 1);
        assert_eq!(scene.engine.generation, Some(1));
        let mut late = [Event::Link(1, Heard::Closed), end];
        if !closed_first {
            late.reverse();
        }
        late.into_iter().for_each(|event| scene.tell(event));
        assert_eq!(scene.engine.generation, Some(1));
        let view = scene.engine.lock();
        assert_eq!(view.trouble(), None);
        let fault = view.last_fault.as_ref().unwrap();
        assert_eq!(fault.trouble.signal.as_deref(), Some("SIGKILL"));
        assert!(fault.ready_after_seconds.is_some());
        assert_eq!((view.numbers.rank_ends, view.numbers.recoveries), (1, 1));
    }
}

#[test]
fn the_end_of_a_rank_that_serves_or_is_there_in_its_place_interrupts() {
    for place in [0, 2] {
        let mut scene = Scene::new(&["--ranks", "4", "--recovery", "shrink"]);
        scene.serve(0, &[0, 1, 2], 2);
        assert_eq!(scene.engine.generation, Some(0));
        let end = scene.kill(place);
        scene.tell(end);
        assert_eq!(scene.engine.generation, None);
        let trouble = scene.engine.lock().trouble().unwrap();
        assert_eq!(trouble.signal.as_deref(), Some("SIGKILL"));
        let fault = scene.engine.lock().last_fault.clone().unwrap();
        assert_eq!(
            (fault.generation, fault.ready_after_seconds),
            (Some(0), None)
        );
    }
}

fn left(generation: u64) -> FromRank {
    let fault = None;
    FromRank::Left { generation, fault }
}

/// A request, and what its client hears.
fn request() -> (Request<Caller>, UnboundedReceiver<Said>) {
    let (to, heard) = tokio::sync::mpsc::unbounded_channel();
    let draw = Draw {
        temperature: 0.0,
        top_p: 1.0,
        seed: 0,
    };
    let request = Request {
        prompt: vec![65; 3],
        most: 2,
        draw,
        client: Caller::new(to, Tokenizer::default(), Vec::new()),
    };
    (request, heard)
}

#[test]
fn what_has_to_be_looked_after_is_looked_after_however_much_happens() {
    let mut scene = Scene::with(&["--ranks", "1"], sleeping);
    let (request, mut heard) = request();
    // The interruption is longer than the delay before clients are told, and the inbox is never empty.
    scene.engine.troubled = Instant::now().checked_sub(KNOWN * 2).unwrap();
    scene.to.send(Event::Ask(request)).unwrap();
    for _ in 0..1000 {
        scene.to.send(Event::Link(99, Heard::Closed)).unwrap();
    }
    scene.to.send(Event::End(Duration::ZERO)).unwrap();
    scene.engine.run().unwrap();
    let said: Vec<_> = std::iter::from_fn(|| heard.try_recv().ok()).collect();
    assert!(
        matches!(said[..], [Said::Taken, Said::Stalled(_), Said::Failed(_)]),
        "{said:?}"
    );
}

#[test]
fn a_rank_that_cannot_go_on_by_itself_is_the_last_fault_until_more_is_known() {
    let mut scene = Scene::new(&["--ranks", "2"]);
    scene.serve(0, &[0, 1], 2);
    let failed = |error: &str| FromRank::Failed {
        generation: 0,
        error: error.to_owned(),
        fault: None,
    };
    scene.say(1, failed("the device is full"));
    scene.say(0, failed("rank 1 went on"));
    assert_eq!(scene.engine.generation, None);
    let fault = scene.engine.lock().last_fault.clone().unwrap();
    assert_eq!(fault.trouble.cause, "rank 1: the device is full");
    assert_eq!(
        (fault.generation, fault.ready_after_seconds),
        (Some(0), None)
    );
    let end = scene.kill(1);
    scene.tell(end);
    let fault = scene.engine.lock().last_fault.clone().unwrap();
    assert_eq!(fault.trouble.signal.as_deref(), Some("SIGKILL"));
}

#[test]
fn a_process_that_was_given_up_is_not_taken_for_the_one_in_its_place() {
    let mut scene = Scene::new(&["--ranks", "2"]);
    let old = scene.pids.clone();
    scene.engine.crew.start_all_again();
    let say_hello = |scene: &mut Scene, link: usize, pid: u32| {
        let (front, rank) = UnixStream::pair().unwrap();
        scene.links.push(rank);
        scene.tell(Event::Link(link, Heard::Opened(pid, front)));
        scene.say(link, FromRank::Hello { place: 0 });
    };
    // Before it is heard that the new ones are started, and after it.
    say_hello(&mut scene, 10, old[0]);
    assert_eq!(scene.engine.crew.place_of(10), None);
    let mut started = 0;
    while started < 2 {
        match scene.happens() {
            event @ FleetEvent::Started { rank, pid, .. } => {
                (scene.pids[rank], started) = (pid, started + 1);
                scene.tell(Event::Fleet(event));
            }
            // The old ones'.
            event => scene.tell(Event::Fleet(event)),
        }
    }
    say_hello(&mut scene, 11, old[0]);
    assert_eq!(scene.engine.crew.place_of(11), None);
    // Nor is another process.
    say_hello(&mut scene, 12, std::process::id());
    assert_eq!(scene.engine.crew.place_of(12), None);
    let new = scene.pids[0];
    assert_ne!(new, old[0]);
    say_hello(&mut scene, 13, new);
    assert_eq!(scene.engine.crew.place_of(13), Some(0));
    assert_eq!(scene.engine.crew.members[0].pid, Some(new));
    assert_eq!(scene.engine.lock().numbers.rank_ends, 0);
}

#[test]
fn a_rank_without_a_part_is_told_when_another_can_do_no_more() {
    let mut scene = Scene::new(&["--ranks", "4", "--recovery", "shrink"]);
    scene.serve(3, &[0, 1, 2], 2);
    let failed = FromRank::Failed {
        generation: 3,
        error: String::from("it broke"),
        fault: None,
    };
    scene.say(0, failed);
    assert_eq!(scene.heard(2), Some(ToRank::GoOn { generation: 3 }));
    // One that has not come yet need not be told.
    assert_eq!(scene.heard(3), None);
}

/// A rank whose program is there only while this says so.
fn sometimes(possible: &Arc<AtomicBool>) -> impl Fn() -> Command + Send + 'static {
    let possible = Arc::clone(possible);
    move || match possible.load(Ordering::Relaxed) {
        true => sleeping(),
        false => Command::new("/there/is/no/such/program"),
    }
}

#[test]
fn ranks_that_cannot_be_started_are_tried_again() {
    for (survivors, expected) in [(1, 1), (0, 2)] {
        let possible = Arc::new(AtomicBool::new(true));
        let mut scene = Scene::with(&["--ranks", "2"], sometimes(&possible));
        scene.connect();
        scene.serve(0, &[0, 1], 2);
        possible.store(false, Ordering::Relaxed);
        for place in (survivors..2).rev() {
            let end = scene.kill(place);
            scene.tell(end);
        }
        // In vain, as long as it is not possible.
        std::thread::sleep(TICK * 4);
        scene.engine.tick().unwrap();
        possible.store(true, Ordering::Relaxed);
        let begun = Instant::now();
        let mut started = 0;
        while started < expected {
            assert!(begun.elapsed() < LIMIT, "{survivors} survivors");
            scene.engine.tick().unwrap();
            let limit = Instant::now() + TICK;
            let left = || limit.saturating_duration_since(Instant::now());
            while let Ok(event) = scene.engine.inbox.recv_timeout(left()) {
                let is_start = matches!(event, Event::Fleet(FleetEvent::Started { .. }));
                started += usize::from(is_start);
                scene.tell(event);
            }
        }
        scene.engine.tick().unwrap();
        assert_eq!(started, expected);
    }
}

#[test]
fn a_rank_that_is_stopped_is_ended_when_the_others_cannot_go_on_without_it() {
    let deadline = Duration::from_millis(200);
    let mut scene = Scene::new(&["--ranks", "2", "--deadline", "0.2"]);
    scene.serve(0, &[0, 1], 2);
    scene.engine.crew.signal(1, Signal::Stop);
    // It may go on at any moment, and nothing waits for it.
    let begun = Instant::now();
    while begun.elapsed() < deadline * 2 {
        scene.engine.tick().unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(scene.engine.inbox.try_recv().is_err());
    let end = scene.kill(0);
    scene.tell(end);
    scene.started();
    let trouble = scene.engine.lock().trouble().unwrap();
    assert_eq!((trouble.rank, trouble.signal), (Some(1), None));
    let begun = Instant::now();
    let end = loop {
        scene.engine.tick().unwrap();
        match scene.engine.inbox.recv_timeout(Duration::from_millis(5)) {
            Ok(Event::Fleet(FleetEvent::Exited(end))) => break end,
            Ok(_) => panic!("it has not ended"),
            Err(_) => assert!(begun.elapsed() < LIMIT, "nothing has ended"),
        }
    };
    assert_eq!(end.rank, 1);
    assert!(matches!(end.exit, Exit::Signal { .. }), "{end}");
}

#[test]
fn ranks_that_have_nothing_to_do_are_asked_for_a_sign_of_life() {
    let mut scene = Scene::new(&["--ranks", "2"]);
    scene.serve(7, &[0, 1], 2);
    // At once when they serve, and then not before a while has passed.
    let expected = Some(ToRank::Probe {
        generation: 7,
        number: 1,
    });
    scene.engine.go();
    assert_eq!(
        (scene.heard(0), scene.heard(1)),
        (expected.clone(), expected)
    );
    let (generation, number) = (7, 1);
    scene.say(0, FromRank::Probed { generation, number });
    scene.engine.go();
    assert_eq!(scene.heard(0), None);
    scene.engine.quiet = Instant::now().checked_sub(QUIET * 2).unwrap();
    scene.engine.go();
    let expected = Some(ToRank::Probe {
        generation: 7,
        number: 2,
    });
    assert_eq!(scene.heard(1), expected);

    // Who comes meanwhile waits for it, and no longer.
    let (request, _heard) = request();
    scene.tell(Event::Ask(request));
    scene.engine.go();
    assert_eq!((scene.heard(0), scene.heard(0)), (expected, None));
    // An answer to the one before is none.
    scene.say(0, FromRank::Probed { generation, number });
    scene.engine.go();
    assert_eq!(scene.heard(0), None);
    let number = 2;
    scene.say(0, FromRank::Probed { generation, number });
    scene.engine.go();
    assert!(matches!(scene.heard(0), Some(ToRank::Step(step)) if step.number == 3));
}

#[test]
fn a_sign_of_life_that_does_not_come_is_a_trouble() {
    let mut scene = Scene::new(&["--ranks", "2"]);
    scene.serve(0, &[0, 1], 2);
    scene.engine.go();
    assert_eq!(scene.engine.lock().trouble(), None);
    let begun = Instant::now();
    let trouble = loop {
        assert!(begun.elapsed() < LIMIT);
        if let Some(trouble) = scene.engine.lock().trouble() {
            break trouble;
        }
        std::thread::sleep(TICK);
    };
    assert!(trouble.cause.contains("sign of life"), "{trouble:?}");
    let number = 1;
    scene.say(
        0,
        FromRank::Probed {
            generation: 0,
            number,
        },
    );
    assert_eq!(scene.engine.lock().trouble(), None);
}

#[test]
fn a_rank_that_does_not_leave_a_generation_that_others_have_left_is_ended() {
    let mut scene = Scene::new(&["--ranks", "3", "--deadline", "0.2"]);
    scene.serve(4, &[0, 1, 2], 3);
    let error = String::from("rank 1 has not entered all_reduce");
    let failed = FromRank::Failed {
        generation: 4,
        error,
        fault: None,
    };
    scene.say(0, failed);
    scene.say(2, left(4));
    // It may be about to.
    scene.engine.tick().unwrap();
    assert!(scene.engine.inbox.try_recv().is_err());
    scene.engine.crew.age(Duration::from_secs(5));
    scene.engine.tick().unwrap();
    let FleetEvent::Exited(end) = scene.happens() else {
        panic!("it has not ended");
    };
    assert_eq!(end.rank, 1);
    scene.tell(Event::Fleet(FleetEvent::Exited(end)));
    scene.started();
    // The others are left alone, and so is the one that has just come.
    scene.engine.tick().unwrap();
    assert!(scene.engine.inbox.try_recv().is_err());
}

#[test]
fn a_rank_that_loads_is_not_taken_for_one_that_hangs() {
    let mut scene = Scene::new(&["--ranks", "2", "--deadline", "1"]);
    scene.say(0, FromRank::Entered { generation: 0 });
    scene.say(1, FromRank::Entered { generation: 0 });
    scene.say(0, left(0));
    let long = Duration::from_secs(5);
    scene.engine.crew.age(long);
    let nobody_ends = |scene: &mut Scene| {
        scene.engine.tick().unwrap();
        let limit = Duration::from_millis(100);
        assert!(scene.engine.inbox.recv_timeout(limit).is_err());
    };
    nobody_ends(&mut scene);
    // It has loaded, and is about to find out that the others have left.
    let serves = FromRank::Serves {
        generation: 0,
        rank: 1,
        shard: Some(1),
        shards: 2,
        device: 0,
        copies: None,
        kept: Vec::new(),
    };
    scene.say(1, serves);
    nobody_ends(&mut scene);
    // It does not.
    scene.engine.crew.age(long);
    scene.engine.tick().unwrap();
    let FleetEvent::Exited(end) = scene.happens() else {
        panic!("it has not ended");
    };
    assert_eq!(end.rank, 1);
}

#[test]
fn ranks_that_do_nothing_before_they_end_are_not_started_for_ever_and_each_time_later() {
    let mut scene = Scene::new(&["--ranks", "2"]);
    // One that did something begins at the beginning.
    for round in 0..=IN_VAIN + 2 {
        let generation = round as u64;
        scene.serve(generation, &[0, 1], 2);
        scene.engine.go();
        if round == 2 {
            let number = scene.engine.number;
            scene.say(0, FromRank::Probed { generation, number });
        }
        let end = scene.kill(1);
        if round == IN_VAIN + 2 {
            let error = scene.engine.handle(end).unwrap_err().to_string();
            assert!(error.contains("SIGKILL"), "{error}");
            return;
        }
        let begun = Instant::now();
        scene.tell(end);
        while scene.engine.crew.is_owed() {
            scene.engine.tick().unwrap();
            std::thread::sleep(Duration::from_millis(2));
        }
        if round >= 8 {
            assert!(begun.elapsed() >= Duration::from_millis(100), "{round}");
        }
        scene.started();
        let (front, rank) = UnixStream::pair().unwrap();
        scene.links[1] = rank;
        scene.tell(Event::Link(1, Heard::Opened(scene.pids[1], front)));
        scene.say(1, FromRank::Hello { place: 1 });
    }
}

const ELASTIC: [&str; 4] = ["--ranks", "3", "--recovery", "elastic"];

#[test]
fn a_rank_that_is_added_and_fails_leaves_the_others_as_they_are() {
    let mut scene = Scene::new(&ELASTIC);
    scene.serve(0, &[0, 1, 2], 3);
    let end = scene.kill(2);
    scene.tell(end);
    scene.serve(1, &[0, 1], 2);
    scene.tell(Event::Scale(3));
    scene.engine.go();
    assert_eq!(scene.started(), 2);
    // It has come, the others go on with it, and then it ends by itself.
    scene.engine.interrupt(Trouble::default());
    let Event::Fleet(FleetEvent::Exited(mut end)) = scene.kill(2) else {
        panic!("no end");
    };
    Arc::make_mut(&mut end).exit = Exit::Code(1);
    scene.tell(Event::Fleet(FleetEvent::Exited(end)));
    let pids = [0, 1].map(|place: usize| scene.engine.crew.members[place].pid);
    assert_eq!(pids, [Some(scene.pids[0]), Some(scene.pids[1])]);
}

/// Three ranks, of which the last one is dead, and the others serve in generation 1 and have just answered a probe.
fn without_the_last_one(words: &[&str]) -> Scene {
    let mut scene = Scene::new(&[&ELASTIC[..], words].concat());
    scene.serve(0, &[0, 1, 2], 3);
    let end = scene.kill(2);
    scene.tell(end);
    scene.serve(1, &[0, 1], 2);
    scene.engine.go();
    assert_eq!(answer(&mut scene, &[0]), "probe");
    scene
}

/// Nothing happens to a process for a while.
fn all_stay_as_they_are(scene: &Scene) {
    let event = scene.engine.inbox.recv_timeout(TICK * 4);
    assert!(event.is_err(), "something has happened");
}

#[test]
fn a_rank_that_was_started_a_moment_ago_is_not_started_once_more_by_a_second_request() {
    let mut scene = without_the_last_one(&[]);
    for _ in 0..2 {
        scene.tell(Event::Scale(3));
        scene.engine.go();
    }
    // The start is known only now.
    assert_eq!(scene.started(), 2);
    all_stay_as_they_are(&scene);
    assert_eq!(scene.engine.crew.scales_to(), Some(3));
    assert_eq!(scene.engine.lock().numbers.rank_ends, 1);
}

#[test]
fn a_rank_that_was_started_a_moment_ago_is_ended_when_it_is_not_asked_for_any_more() {
    let mut scene = without_the_last_one(&[]);
    for ranks in [3, 2] {
        scene.tell(Event::Scale(ranks));
        scene.engine.go();
    }
    assert_eq!(scene.started(), 2);
    let event = scene.happens();
    assert!(matches!(event, FleetEvent::Exited(_)), "{event:?}");
    scene.tell(Event::Fleet(event));
    scene.engine.go();
    assert_eq!(scene.engine.crew.scales_to(), None);
    assert_eq!(scene.engine.crew.members[2].pid, None);
    // That is no fault.
    assert_eq!(scene.engine.lock().numbers.rank_ends, 1);
}

/// A connection of this process, which names the last place. Returns the rank's end.
fn say_hello(scene: &mut Scene, link: usize, pid: u32) -> UnixStream {
    let (front, rank) = UnixStream::pair().unwrap();
    scene.tell(Event::Link(link, Heard::Opened(pid, front)));
    scene.say(link, FromRank::Hello { place: 2 });
    rank
}

#[test]
fn a_rank_that_is_added_and_does_not_come_is_ended_and_another_one_is_started() {
    for connects in [false, true] {
        let mut scene = without_the_last_one(&["--deadline", "0.2"]);
        scene.tell(Event::Scale(3));
        scene.engine.go();
        assert_eq!(scene.started(), 2);
        let _link = connects.then(|| {
            let pid = scene.pids[2];
            let link = say_hello(&mut scene, 10, pid);
            // The others go on for it, and it does not come: it may be stopped.
            scene.engine.go();
            assert_eq!(scene.engine.generation, None);
            scene.serve(2, &[0, 1], 2);
            link
        });
        all_stay_as_they_are(&scene);
        let patience = scene.engine.crew.patience();
        scene.engine.crew.age(patience);
        scene.engine.go();
        let FleetEvent::Exited(end) = scene.happens() else {
            panic!("it has not ended");
        };
        assert_eq!(end.rank, 2);
        scene.tell(Event::Fleet(FleetEvent::Exited(end)));
        assert!(scene.engine.generation.is_some());
        answer(&mut scene, &[0]);
        scene.engine.go();
        assert_eq!(scene.started(), 2);
    }
}

#[test]
fn a_process_that_is_heard_after_its_end_does_not_keep_its_place() {
    let mut scene = without_the_last_one(&[]);
    scene.tell(Event::Scale(3));
    scene.engine.go();
    assert_eq!(scene.started(), 2);
    let pid = scene.pids[2];
    let end = scene.kill(2);
    scene.tell(end);
    let _link = say_hello(&mut scene, 10, pid);
    scene.tell(Event::Link(10, Heard::Closed));
    assert_eq!(scene.engine.crew.members[2].pid, None);
    scene.engine.crew.age(Duration::from_secs(1));
    scene.engine.go();
    assert_eq!(scene.started(), 2);
    let pid = scene.pids[2];
    let _link = say_hello(&mut scene, 11, pid);
    assert_eq!(scene.engine.crew.place_of(11), Some(2));
}

#[test]
fn when_the_last_other_one_dies_while_a_rank_leaves_all_are_started_again() {
    let mut scene = Scene::new(&ELASTIC);
    scene.serve(0, &[0, 1], 2);
    scene.tell(Event::Scale(1));
    scene.engine.go();
    assert_eq!(scene.heard(1), Some(ToRank::Leave));
    assert_eq!(scene.heard(0), Some(ToRank::GoOn { generation: 0 }));
    assert_eq!(scene.engine.generation, None);
    let end = scene.kill(0);
    scene.tell(end);
    assert!(scene.engine.crew.members[0].restarts > 0);
}

#[test]
fn how_many_ranks_were_asked_for_is_known_when_all_are_started_again() {
    let mut scene = Scene::new(&ELASTIC);
    scene.serve(0, &[0, 1, 2], 3);
    let end = scene.kill(2);
    scene.tell(end);
    scene.serve(1, &[0, 1], 2);
    scene.tell(Event::Scale(2));
    scene.engine.go();
    assert_eq!(scene.engine.crew.scales_to(), None);
    for place in [0, 1] {
        let end = scene.kill(place);
        scene.tell(end);
    }
    assert_eq!(scene.engine.crew.scales_to(), Some(2));
}

/// Answers the last work as all ranks do, and returns what it was.
fn answer(scene: &mut Scene, places: &[usize]) -> &'static str {
    let (generation, number) = (scene.engine.generation.unwrap(), scene.engine.number);
    let work = scene.engine.under_way;
    let (word, message) = match work {
        Some(Work::Step) => (
            "step",
            FromRank::Drawn {
                generation,
                number,
                tokens: vec![65],
                seconds: 0.0,
                communicating: 0.0,
            },
        ),
        Some(Work::Move) => {
            let mut is_placed = false;
            while let Some(told) = scene.heard(0) {
                is_placed = matches!(told, ToRank::PlaceExperts { .. });
            }
            let (moved, placed) = (
                FromRank::Moved { generation, number },
                FromRank::Placed {
                    generation,
                    number,
                    copies: 2,
                },
            );
            let message = if is_placed { placed } else { moved };
            for &place in &places[1..] {
                scene.say(place, message.clone());
                assert_eq!(scene.engine.under_way, work, "one has not answered");
            }
            (if is_placed { "place" } else { "move" }, message)
        }
        Some(Work::Probe) => ("probe", FromRank::Probed { generation, number }),
        Some(Work::Balance) => (
            "balance",
            FromRank::Balanced {
                generation,
                number,
                copies: Copies {
                    now: 2,
                    planned: 2,
                    rounds: Some(1),
                },
                imbalance: [1.5, 1.1],
            },
        ),
        None => return "nothing",
    };
    scene.say(places[0], message);
    word
}

#[test]
fn texts_and_moving_experts_take_turns_however_fast_experts_may_move() {
    let mut scene = Scene::new(&[&ELASTIC[..], &["--move-rate", "1000000"]].concat());
    let copies = |rounds| Copies {
        now: 1,
        planned: 2,
        rounds,
    };
    scene.serve_with(0, &[0, 1, 2], 3, Some(copies(Some(3))));
    let (mut request, _heard) = request();
    request.most = 5;
    scene.tell(Event::Ask(request));
    scene.tell(Event::Balance);
    let next = |scene: &mut Scene, places: &[usize]| {
        std::thread::sleep(Duration::from_millis(1));
        scene.engine.go();
        answer(scene, places)
    };
    let all = [0, 1, 2];
    let words: Vec<_> = (0..8).map(|_| next(&mut scene, &all)).collect();
    let expected = [
        "move", "step", "move", "step", "move", "step", "place", "step",
    ];
    assert_eq!(words, expected);
    // What was asked for meanwhile comes after that. Another generation interrupts it, and it is asked for again.
    assert_eq!(next(&mut scene, &all), "balance");
    assert_eq!(scene.engine.crew.moves.as_ref().unwrap().progress(), (0, 1));
    let end = scene.kill(2);
    scene.tell(end);
    assert!(scene.engine.crew.moves.is_none());
    assert_eq!(scene.engine.lock().numbers.balances, 0);
    scene.serve_with(1, &[0, 1], 2, Some(copies(None)));
    let words: Vec<_> = (0..5).map(|_| next(&mut scene, &all[..2])).collect();
    assert_eq!(words, ["balance", "move", "step", "place", "nothing"]);
    let view = scene.engine.lock();
    assert_eq!((view.numbers.balances, view.imbalance), (1, Some(1.1)));
}

/// As if this work had been given to the ranks so long ago.
fn age_work(scene: &mut Scene, by: Duration) {
    scene.engine.begun = scene.engine.begun.checked_sub(by).unwrap();
    if let Some((_, _, since)) = &mut scene.engine.lock().given {
        *since = since.checked_sub(by).unwrap();
    }
    scene.engine.crew.age(by);
}

/// Answers the first probe, and gives the ranks a step.
fn step(scene: &mut Scene) -> UnboundedReceiver<Said> {
    scene.engine.go();
    assert_eq!(answer(scene, &[0]), "probe");
    let (request, heard) = request();
    scene.tell(Event::Ask(request));
    scene.engine.go();
    assert_eq!(scene.engine.under_way, Some(Work::Step));
    heard
}

/// What the ranks have been told last.
fn heard_last(scene: &mut Scene, place: usize) -> Option<ToRank> {
    std::iter::from_fn(|| scene.heard(place)).last()
}

/// Longer than the timeout of an operation, and what a rank may take besides.
const TOO_LONG: Duration = Duration::from_secs(20);

#[test]
fn a_rank_that_hangs_before_it_answers_is_ended_also_when_no_operation_waits_for_it() {
    for ranks in [1, 2] {
        let words = ["--ranks", &ranks.to_string(), "--deadline", "0.2"];
        let mut scene = Scene::new(&words);
        let places: Vec<_> = (0..ranks).collect();
        scene.serve(0, &places, ranks);
        let mut client = step(&mut scene);
        scene.engine.tick().unwrap();
        assert_eq!(scene.engine.generation, Some(0));
        age_work(&mut scene, TOO_LONG);
        scene.engine.tick().unwrap();
        assert_eq!(scene.engine.generation, None);
        let fault = scene.engine.lock().last_fault.clone().unwrap();
        let cause = &fault.trouble.cause;
        assert!(cause.contains("have not answered"), "{cause}");
        // It may only be slow.
        for &place in &places {
            let told = heard_last(&mut scene, place);
            assert_eq!(told, Some(ToRank::GoOn { generation: 0 }));
        }
        assert!(scene.engine.inbox.try_recv().is_err());
        if ranks == 2 {
            scene.say(1, left(0));
        }
        scene.engine.troubled = Instant::now().checked_sub(KNOWN * 2).unwrap();
        scene.engine.crew.age(TOO_LONG);
        scene.engine.tick().unwrap();
        let said: Vec<_> = std::iter::from_fn(|| client.try_recv().ok()).collect();
        assert!(matches!(said[..], [Said::Taken, Said::Stalled(_)]));
        let FleetEvent::Exited(end) = scene.happens() else {
            panic!("it has not ended");
        };
        assert_eq!(end.rank, 0);
        scene.tell(Event::Fleet(FleetEvent::Exited(end)));
        let restarts = |place: &usize| scene.engine.crew.members[*place].restarts;
        let restarts: Vec<_> = places.iter().map(restarts).collect();
        assert_eq!(restarts, [1, 0][..ranks]);
    }
}

#[test]
fn time_in_which_the_front_itself_did_not_run_does_not_count() {
    let mut scene = Scene::new(&["--ranks", "2", "--deadline", "0.2"]);
    scene.serve(0, &[0, 1], 2);
    let _client = step(&mut scene);
    age_work(&mut scene, TOO_LONG);
    scene.engine.disregard(TOO_LONG);
    scene.engine.tick().unwrap();
    assert_eq!(scene.engine.generation, Some(0));
}

#[test]
fn a_rank_that_is_stopped_before_it_answers_is_ended_when_the_work_is_given_up() {
    let mut scene = Scene::new(&["--ranks", "2", "--deadline", "0.2"]);
    scene.serve(0, &[0, 1], 2);
    let _client = step(&mut scene);
    scene.engine.crew.signal(0, Signal::Stop);
    age_work(&mut scene, KNOWN * 2);
    // The signal takes effect a moment later.
    let begun = Instant::now();
    while !scene.engine.crew.is_seen_stopped(0) {
        assert!(begun.elapsed() < LIMIT);
        scene.engine.tick().unwrap();
    }
    assert_eq!(scene.engine.generation, Some(0));
    assert!(scene.engine.inbox.try_recv().is_err());
    scene.engine.crew.age(Duration::from_secs(5));
    scene.engine.tick().unwrap();
    let fault = scene.engine.lock().last_fault.clone().unwrap();
    let its = (Some(0), Some(scene.pids[0]));
    assert_eq!((fault.trouble.rank, fault.trouble.pid), its);
    let FleetEvent::Exited(end) = scene.happens() else {
        panic!("it has not ended");
    };
    assert_eq!(end.rank, 0);
    // One that was stopped in earlier work is not known as stopped in the next.
    scene.engine.crew.watch_stopped(false);
    assert!(!scene.engine.crew.is_seen_stopped(0));
}

#[test]
fn steps_that_are_only_slow_get_more_time_with_each_attempt() {
    let mut scene = Scene::new(&["--ranks", "1", "--deadline", "0.2"]);
    scene.serve(0, &[0], 1);
    let _client = step(&mut scene);
    age_work(&mut scene, TOO_LONG);
    scene.engine.tick().unwrap();
    assert_eq!(scene.engine.generation, None);
    scene.say(0, left(0));
    scene.serve(1, &[0], 1);
    scene.engine.go();
    assert_eq!(scene.engine.under_way, Some(Work::Step));
    age_work(&mut scene, TOO_LONG);
    scene.engine.tick().unwrap();
    assert_eq!(scene.engine.generation, Some(1));
    assert_eq!(answer(&mut scene, &[0]), "step");
    // It is known now how slow they are.
    scene.engine.go();
    assert_eq!(scene.engine.under_way, Some(Work::Step));
    age_work(&mut scene, TOO_LONG);
    scene.engine.tick().unwrap();
    assert_eq!(scene.engine.generation, Some(1));
}

#[test]
fn a_rank_that_served_and_ends_with_an_exit_code_is_replaced_alone() {
    for closed_first in [true, false] {
        let mut scene = Scene::new(&["--ranks", "2"]);
        scene.serve(0, &[0, 1], 2);
        let Event::Fleet(FleetEvent::Exited(mut end)) = scene.kill(1) else {
            panic!("no end");
        };
        Arc::make_mut(&mut end).exit = Exit::Code(101);
        let mut events = [
            Event::Link(1, Heard::Closed),
            Event::Fleet(FleetEvent::Exited(end)),
        ];
        if !closed_first {
            events.reverse();
        }
        events.into_iter().for_each(|event| scene.tell(event));
        let restarts = [0, 1].map(|place: usize| scene.engine.crew.members[place].restarts);
        assert_eq!(restarts, [0, 1]);
        assert_eq!(scene.started(), 1);
    }
}

#[test]
fn a_rank_that_served_and_ends_between_two_generations_leaves_the_others_as_they_are() {
    for (recovery, is_replaced) in [("elastic", false), ("respawn", true)] {
        let mut scene = Scene::new(&["--ranks", "4", "--recovery", recovery]);
        scene.serve(0, &[0, 1, 2, 3], 4);
        let end = scene.kill(3);
        scene.tell(end);
        if is_replaced {
            assert_eq!(scene.started(), 3);
        }
        for place in 0..3 {
            scene.say(place, left(0));
        }
        let Event::Fleet(FleetEvent::Exited(mut end)) = scene.kill(1) else {
            panic!("no end");
        };
        Arc::make_mut(&mut end).exit = Exit::Code(1);
        scene.tell(Event::Fleet(FleetEvent::Exited(end)));
        if is_replaced {
            assert_eq!(scene.started(), 1);
        }
        all_stay_as_they_are(&scene);
        let pids = [0, 2].map(|place: usize| scene.engine.crew.members[place].pid);
        assert_eq!(pids, [Some(scene.pids[0]), Some(scene.pids[2])]);
    }
}

#[test]
fn a_planned_change_of_the_number_of_ranks_is_no_recovery_unless_a_rank_dies_meanwhile() {
    let mut scene = Scene::new(&["--ranks", "4", "--recovery", "elastic"]);
    scene.serve(0, &[0, 1, 2, 3], 4);
    scene.tell(Event::Scale(3));
    scene.engine.go();
    assert_eq!(scene.engine.generation, None);
    scene.serve(1, &[0, 1, 2], 3);
    let recoveries = |scene: &Scene| {
        let numbers = &scene.engine.lock().numbers;
        (numbers.recoveries, numbers.recovery_seconds > 0.0)
    };
    assert_eq!(recoveries(&scene), (0, false));
    let end = scene.kill(3);
    scene.tell(end);
    scene.tell(Event::Scale(2));
    scene.engine.go();
    let end = scene.kill(1);
    scene.tell(end);
    scene.serve(2, &[0], 1);
    assert_eq!(recoveries(&scene), (1, true));
}

#[test]
fn a_rank_that_is_to_leave_and_does_not_end_is_ended_and_the_number_of_ranks_can_change_again() {
    let mut scene = Scene::new(&[&ELASTIC[..], &["--deadline", "0.2"]].concat());
    scene.serve(0, &[0, 1, 2], 3);
    scene.tell(Event::Scale(2));
    scene.engine.go();
    assert_eq!(scene.heard(2), Some(ToRank::Leave));
    scene.serve(1, &[0, 1], 2);
    scene.engine.tick().unwrap();
    assert!(scene.engine.inbox.try_recv().is_err());
    // It goes on with the others once more, before it reads that it is to leave.
    scene.engine.crew.age(TOO_LONG);
    scene.say(2, FromRank::Entered { generation: 1 });
    scene.engine.tick().unwrap();
    assert!(scene.engine.inbox.try_recv().is_err());
    scene.engine.crew.age(TOO_LONG);
    scene.engine.tick().unwrap();
    let FleetEvent::Exited(end) = scene.happens() else {
        panic!("it has not ended");
    };
    assert_eq!(end.rank, 2);
    scene.tell(Event::Fleet(FleetEvent::Exited(end)));
    assert_eq!(scene.engine.generation, Some(1));
    scene.tell(Event::Scale(3));
    scene.engine.go();
    assert_eq!(scene.started(), 2);
}
