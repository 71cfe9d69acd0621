//! The engine and made-up events. The ranks are processes that do nothing, and say what the tests say for them.

use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};

use nccl::launch::Signal;
use tokio::sync::mpsc::UnboundedReceiver;

use super::*;
use crate::front::options::{Options, Role};
use crate::model::tokenizer::Tokenizer;
use crate::wire::{self, Draw, ToRank};

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

    /// These are in the epoch, and share the model in so many parts; the last ones have none.
    fn serve(&mut self, epoch: u64, places: &[usize], shards: usize) {
        for &place in places {
            self.say(place, FromRank::Entered { epoch });
        }
        for (rank, &place) in places.iter().enumerate() {
            let message = FromRank::Serves {
                epoch,
                rank,
                shard: (rank < shards).then_some(rank),
                shards,
                device: 0,
            };
            self.say(place, message);
        }
    }

    /// Ends a process. How it ended is for the engine to be told.
    fn kill(&mut self, place: usize) -> Event {
        self.engine.crew.signal(place, Signal::KILL);
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
        assert_eq!(scene.engine.epoch, Some(0));
        let end = scene.kill(1);
        scene.serve(1, &[0], 1);
        assert_eq!(scene.engine.epoch, Some(1));
        let mut late = [Event::Link(1, Heard::Closed), end];
        if !closed_first {
            late.reverse();
        }
        late.into_iter().for_each(|event| scene.tell(event));
        assert_eq!(scene.engine.epoch, Some(1));
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
        assert_eq!(scene.engine.epoch, Some(0));
        let end = scene.kill(place);
        scene.tell(end);
        assert_eq!(scene.engine.epoch, None);
        let trouble = scene.engine.lock().trouble().unwrap();
        assert_eq!(trouble.signal.as_deref(), Some("SIGKILL"));
        let fault = scene.engine.lock().last_fault.clone().unwrap();
        assert_eq!((fault.epoch, fault.ready_after_seconds), (Some(0), None));
    }
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
    let scene = Scene::with(&["--ranks", "1"], sleeping);
    let (request, mut heard) = request();
    scene.to.send(Event::Ask(request)).unwrap();
    let engine = std::thread::spawn(move || scene.engine.run());
    let begun = Instant::now();
    // Nobody serves, and the client is told so while other things go on happening.
    let mut said = Vec::new();
    while !matches!(said.last(), Some(Said::Stalled(_))) {
        assert!(begun.elapsed() < LIMIT, "{said:?}");
        scene.to.send(Event::Link(99, Heard::Closed)).unwrap();
        std::thread::sleep(TICK / 10);
        said.extend(heard.try_recv());
    }
    assert_eq!(said[0], Said::Taken);
    scene.to.send(Event::End(Duration::ZERO)).unwrap();
    engine.join().unwrap().unwrap();
}

#[test]
fn a_rank_that_cannot_go_on_by_itself_is_the_last_fault_until_more_is_known() {
    let mut scene = Scene::new(&["--ranks", "2"]);
    scene.serve(0, &[0, 1], 2);
    let failed = |error: &str| FromRank::Failed {
        epoch: 0,
        error: error.to_owned(),
        fault: None,
    };
    scene.say(1, failed("the device is full"));
    scene.say(0, failed("rank 1 went on"));
    assert_eq!(scene.engine.epoch, None);
    let fault = scene.engine.lock().last_fault.clone().unwrap();
    assert_eq!(fault.trouble.cause, "rank 1: the device is full");
    assert_eq!((fault.epoch, fault.ready_after_seconds), (Some(0), None));
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
        epoch: 3,
        error: String::from("it broke"),
        fault: None,
    };
    scene.say(0, failed);
    let mut heard = |place: usize| {
        let link = &mut scene.links[place];
        link.set_nonblocking(true).unwrap();
        wire::read::<ToRank>(link).ok().flatten()
    };
    assert_eq!(heard(2), Some(ToRank::GoOn { epoch: 3 }));
    // One that has not come yet need not be told.
    assert_eq!(heard(3), None);
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
    scene.engine.crew.signal(1, Signal::STOP);
    let ticks = |scene: &mut Scene| {
        let begun = Instant::now();
        while begun.elapsed() < deadline * 2 {
            scene.engine.tick().unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    // It may go on at any moment, and nobody waits for it.
    ticks(&mut scene);
    assert!(scene.engine.inbox.try_recv().is_err());
    let end = scene.kill(0);
    scene.tell(end);
    scene.started();
    let trouble = scene.engine.lock().trouble().unwrap();
    assert_eq!((trouble.rank, trouble.signal), (Some(1), None));
    ticks(&mut scene);
    let FleetEvent::Exited(end) = scene.happens() else {
        panic!("it has not ended");
    };
    assert_eq!(end.rank(), 1);
    assert!(matches!(end.exit(), Exit::Signal { .. }), "{end}");
}
