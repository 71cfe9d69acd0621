//! Many deaths of ranks of one server under constant load: all texts are unchanged, the processes that were not killed stay, and
//! the survivors leak no resources of the dead.
//!
//! There are eight deaths unless `NCCL_TEST_DEATHS` says otherwise; 24 find smaller leaks, and those of a death in a recovery
//! alone:
//! `NCCL_TEST_DEATHS=24 cargo test -p inference-server --test server soak -- --nocapture`.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::client::{Stream, get};
use crate::program::{Server, signal};
use crate::{Question, reference, until};

/// When a rank is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    /// No request is open.
    Idle,
    /// A prompt is being read.
    Prefill,
    /// Texts are being written.
    Decode,
    /// The others still wait for the successor of the last one that was killed.
    Recovery,
}

use Moment::{Decode, Idle, Prefill, Recovery};

/// What is done again and again. The server goes on five times after the first [`WARM`] of them: a recovery that is disturbed
/// is one with what it follows.
const ROUND: [Moment; 8] = [
    Prefill, Recovery, Idle, Decode, Recovery, Idle, Prefill, Decode,
];
/// Deaths after which what is there is what there should be: a prompt has been read again, and where two ranks are killed, both
/// have been, so that the others keep their numbers in the world.
const WARM: usize = 2;

/// How many ranks are killed.
fn deaths() -> usize {
    let asked = std::env::var("NCCL_TEST_DEATHS").ok();
    let deaths = asked.map_or(ROUND.len(), |asked| asked.parse().expect("a number"));
    let least = ROUND.len();
    assert!(deaths >= least, "NCCL_TEST_DEATHS: {least} at least");
    deaths
}

/// How soon `/readyz` names the rank that was killed.
const NAMED: Duration = Duration::from_millis(250);

const CLIENTS: usize = 3;

#[test]
fn many_deaths_at_all_moments_change_no_word_and_leave_nothing_in_the_front() {
    let named = soak(&[0, 1, 2, 3], 14);
    // Of each death alone that cannot be said on a machine that has other work to do. A front that waits so long before it tells,
    // or looks only twice a second, is late for half of them on any machine.
    let median = named[named.len() / 2];
    println!("named after {named:?}");
    assert!(
        median < NAMED,
        "named after {median:?} in the median: {named:?}"
    );
}

#[test]
fn ranks_that_survive_many_deaths_have_nothing_left_of_them() {
    // One that is first in the world and coordinates it, and one that does not.
    soak(&[1, 2], 12);
}

/// Kills ranks, of these. How long it took each time until the server named the one, ascending. With the seeds above, the second
/// one that is killed in a recovery is the successor for which the others wait; the first one never is.
fn soak(victims: &[usize], seed: u64) -> Vec<Duration> {
    let all = deaths();
    let server = Server::start_thrifty(&["--ranks", "4"]);
    let questions: Vec<_> = (0..12).map(Question::number).collect();
    let expected = reference(&questions);
    let clients = Clients::default();
    std::thread::scope(|scope| {
        // Also ends the clients when this thread panics.
        let _closing = Closing(&clients);
        for client in 0..CLIENTS {
            let (clients, questions, expected) = (&clients, &questions, &expected);
            let url = &server.url;
            scope.spawn(move || {
                let turns = (client..).step_by(CLIENTS);
                for number in turns.map(|turn| turn % questions.len()) {
                    let Some(_asking) = clients.ask() else { return };
                    let (text, _) = Stream::new(url, &questions[number].streaming()).finish();
                    assert_eq!(text, expected[number], "question {number}");
                }
            });
        }
        let mut deaths = Deaths::new(&server, &clients, victims, seed);
        deaths.go_on_until(WARM);
        let survivors = (0..4).filter(|place| !victims.contains(place));
        let mut measured: Vec<_> = survivors
            .map(|place| (format!("rank {place}"), deaths.pids[place]))
            .collect();
        measured.push((String::from("the front"), server.pid()));
        let before: Vec<_> = measured.iter().map(|(_, pid)| settled(*pid)).collect();
        deaths.go_on_until(all);
        for ((what, pid), before) in measured.iter().zip(before) {
            nothing_is_left(what, *pid, before, all);
        }
        deaths.finish()
    })
}

/// The state of the clients, which ask repeatedly unless they are paused.
#[derive(Default)]
struct Clients {
    state: Mutex<Asking>,
    changed: Condvar,
}

#[derive(Default)]
struct Asking {
    under_way: usize,
    paused: bool,
    over: bool,
}

impl Clients {
    fn lock(&self) -> MutexGuard<'_, Asking> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until it may be asked; `None` at the end.
    fn ask(&self) -> Option<UnderWay<'_>> {
        let waits = |state: &mut Asking| state.paused && !state.over;
        let state = self.changed.wait_while(self.lock(), waits);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        (!state.over).then(|| {
            state.under_way += 1;
            UnderWay(self)
        })
    }

    /// Pauses the clients, and waits until no question is open.
    fn pause(&self) {
        self.lock().paused = true;
        until("the end of all texts", || {
            (self.lock().under_way == 0).then_some(())
        });
    }

    fn resume(&self) {
        self.lock().paused = false;
        self.changed.notify_all();
    }
}

/// A question that has no answer yet.
struct UnderWay<'a>(&'a Clients);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.lock().under_way -= 1;
    }
}

struct Closing<'a>(&'a Clients);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.lock().over = true;
        self.0.changed.notify_all();
    }
}

/// What is done to the ranks, and what came of it.
struct Deaths<'a> {
    server: &'a Server,
    clients: &'a Clients,
    victims: &'a [usize],
    /// The victims that have not been killed yet, in any order.
    spared: Vec<usize>,
    random: fastrand::Rng,
    /// The prompt that takes a while, and what follows it.
    prompt: (Question, String),
    /// Who waits for what follows it.
    reading: Option<JoinHandle<String>>,
    /// The processes of the ranks, by place, and all that the server has started, as they were when all served.
    pids: Vec<u32>,
    children: BTreeSet<u32>,
    /// Who was killed since all served.
    killed: BTreeSet<usize>,
    all_killed: Vec<usize>,
    named: Vec<Duration>,
    /// Deaths that were where they should be, in a prompt and in a recovery.
    in_prefill: usize,
    in_recovery: usize,
}

impl<'a> Deaths<'a> {
    fn new(server: &'a Server, clients: &'a Clients, victims: &'a [usize], seed: u64) -> Self {
        let prompt = Question {
            prompt: "A rank that is gone is named. ".repeat(32),
            most: 12,
            ..Question::long(seed)
        };
        let said = reference(std::slice::from_ref(&prompt)).remove(0);
        let mut random = fastrand::Rng::with_seed(seed);
        let mut spared = victims.to_vec();
        random.shuffle(&mut spared);
        Self {
            server,
            clients,
            victims,
            spared,
            random,
            prompt: (prompt, said),
            reading: None,
            pids: server.ranks(),
            children: server.children(),
            killed: BTreeSet::new(),
            all_killed: Vec::new(),
            named: Vec::new(),
            in_prefill: 0,
            in_recovery: 0,
        }
    }

    /// Kills until so many are dead, and waits until all serve.
    fn go_on_until(&mut self, deaths: usize) {
        let moment = |number: usize| ROUND[number % ROUND.len()];
        for number in self.all_killed.len()..deaths {
            // Each once, and then any.
            let place = match self.spared.pop() {
                Some(place) => place,
                None => *self.random.choice(self.victims).unwrap(),
            };
            match moment(number) {
                Idle => {
                    self.clients.pause();
                    self.kill_first(place);
                    self.clients.resume();
                }
                Prefill => self.kill_in_prefill(place),
                Decode => {
                    let made = || self.server.metric("inference_generated_tokens_total");
                    let before = made();
                    until("texts", || (made() > before + 20.0).then_some(()));
                    self.kill_first(place);
                }
                Recovery => self.kill_in_recovery(place),
            }
            if number + 1 == deaths || moment(number + 1) != Recovery {
                self.is_whole_again();
            }
        }
    }

    /// Kills a rank of a server that is ready, and waits until it is named.
    fn kill_first(&mut self, place: usize) {
        let pid = self.pids[place];
        let readyz = format!("{}/readyz", self.server.url);
        let generation = get(&readyz).json()["generation"].clone();
        let begun = Instant::now();
        self.kill(place, pid);
        let named = until("that a rank is named", || {
            let answer = get(&readyz);
            let json = answer.json();
            let is_named = answer.status == 503 && json["signal"] == "SIGKILL";
            if is_named {
                assert_eq!((&json["rank"], &json["pid"]), (&place.into(), &pid.into()));
                return Some(Some(begun.elapsed()));
            }
            // It may be over before it is looked.
            (answer.status == 200 && json["generation"] != generation).then_some(None)
        });
        self.named.extend(named);
    }

    fn kill(&mut self, place: usize, pid: u32) {
        signal(pid, Signal::KILL);
        self.killed.insert(place);
        self.all_killed.push(place);
    }

    fn kill_in_prefill(&mut self, place: usize) {
        self.clients.pause();
        let steps = || self.server.metric("inference_steps_total");
        let made = || self.server.metric("inference_generated_tokens_total");
        let (steps_before, made_before) = (steps(), made());
        let url = self.server.url.clone();
        let body = self.prompt.0.streaming();
        self.reading = Some(std::thread::spawn(move || {
            Stream::new(&url, &body).finish().0
        }));
        until("some of the prompt was read", || {
            (steps() > steps_before + 3.0).then_some(())
        });
        self.kill_first(place);
        self.in_prefill += usize::from(made() == made_before);
        self.clients.resume();
    }

    /// Kills the successor of the one that was killed last, at any moment of its coming, or another one.
    fn kill_in_recovery(&mut self, place: usize) {
        let mut pid = self.pids[place];
        if self.killed.contains(&place) {
            pid = until("a successor", || {
                let children = self.server.children();
                children.difference(&self.children).next().copied()
            });
        }
        // Soon, until one has been in time.
        let most = if self.in_recovery == 0 { 5 } else { 60 };
        std::thread::sleep(Duration::from_millis(self.random.u64(0..most)));
        let answer = get(&format!("{}/readyz", self.server.url));
        self.kill(place, pid);
        self.in_recovery += usize::from(answer.status == 503);
    }

    /// All serve, and only those that were killed are other processes than before.
    fn is_whole_again(&mut self) {
        let deaths = self.all_killed.len() as f64;
        until("that all deaths were heard of", || {
            (self.server.metric("inference_rank_ends_total") >= deaths).then_some(())
        });
        self.server.until_ready();
        let health = self.server.health();
        assert_eq!(health["pid"], self.server.pid());
        let after = self.server.ranks();
        for (place, (old, new)) in self.pids.iter().zip(&after).enumerate() {
            let stays = !self.killed.contains(&place);
            assert_eq!(
                stays,
                old == new,
                "rank {place}: {:?}, {after:?}",
                self.pids
            );
        }
        if let Some(reading) = self.reading.take() {
            assert_eq!(reading.join().unwrap(), self.prompt.1);
        }
        self.killed.clear();
        self.pids = after;
        self.children = self.server.children();
    }

    fn finish(mut self) -> Vec<Duration> {
        // Only killed processes have ended.
        let deaths = self.all_killed.len();
        let ends = self.server.metric("inference_rank_ends_total");
        assert_eq!(ends, deaths as f64);
        let victims: BTreeSet<_> = self.all_killed.iter().copied().collect();
        assert!(victims.into_iter().eq(self.victims.iter().copied()));
        println!(
            "of {deaths} deaths, {} in a prompt, {} in a recovery; ranks {:?}",
            self.in_prefill, self.in_recovery, self.all_killed
        );
        assert!(self.in_prefill > 0 && self.in_recovery > 0);
        assert!(self.named.len() > deaths / 4, "seldom named");
        self.named.sort();
        self.named
    }
}

/// What a process has, of that of which something may be left.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Belongings {
    descriptors: usize,
    threads: usize,
    mappings: usize,
    /// Memory of its own, and that of its device, which other ranks can see.
    own_kib: usize,
    device_kib: usize,
}

impl Belongings {
    /// Of a process, now.
    fn of(pid: u32) -> Self {
        let read = |what: &str| std::fs::read_to_string(format!("/proc/{pid}/{what}")).unwrap();
        let count = |what: &str| {
            let entries = std::fs::read_dir(format!("/proc/{pid}/{what}"));
            entries.unwrap().count()
        };
        let status = read("status");
        // Not what it has of files: the program's own code comes when it is needed.
        let kib = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|line| line.split_whitespace().next());
            number.and_then(|number| number.parse().ok()).unwrap_or(0)
        };
        Self {
            descriptors: count("fd"),
            threads: count("task"),
            mappings: read("maps").lines().count(),
            own_kib: kib("RssAnon:"),
            device_kib: kib("RssShmem:"),
        }
    }

    fn least(self, other: Self) -> Self {
        Self {
            descriptors: self.descriptors.min(other.descriptors),
            threads: self.threads.min(other.threads),
            mappings: self.mappings.min(other.mappings),
            own_kib: self.own_kib.min(other.own_kib),
            device_kib: self.device_kib.min(other.device_kib),
        }
    }
}

/// How long what ends by itself may take to do so: connections, and threads that wait for more work.
const A_WHILE: Duration = Duration::from_secs(15);

/// What a process has when nothing happens for a moment.
fn settled(pid: u32) -> Belongings {
    let mut least = Belongings::of(pid);
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(50));
        least = least.least(Belongings::of(pid));
    }
    least
}

/// Waits until a process has no more than before, or little: what is left behind each time that the server goes on, is left five
/// times at least.
fn nothing_is_left(what: &str, pid: u32, before: Belongings, deaths: usize) {
    let most = Belongings {
        descriptors: before.descriptors + 4,
        threads: before.threads + 4,
        mappings: before.mappings + 40,
        own_kib: before.own_kib + 5 * 1024,
        // The emulator keeps freed memory in quarantine for a while, to detect late uses: 200 KiB of each death, and at most
        // 1024 allocations.
        device_kib: before.device_kib + 5 * 1024 + 200 * (deaths - WARM),
    };
    let begun = Instant::now();
    let mut least = Belongings::of(pid);
    loop {
        least = least.least(Belongings::of(pid));
        if least.least(most) == least {
            println!("{what}: {before:?}, later {least:?}");
            return;
        }
        assert!(
            begun.elapsed() < A_WHILE,
            "{what} (pid {pid}) keeps something of each death: {before:?} after {WARM} of them, {least:?} after {deaths}",
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}
