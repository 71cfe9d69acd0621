//! Many deaths of ranks of one server under constant load: all texts are unchanged, the processes that were not killed stay, and
//! the survivors leak no resources of the dead.
//!
//! There are eight deaths unless `NCCL_TEST_DEATHS` says otherwise; 24 find smaller leaks, and those of a death in a recovery
//! alone:
//! `NCCL_TEST_DEATHS=24 cargo test -p inference-server --test server soak -- --nocapture`.

use std::collections::BTreeSet;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::belongings::{nothing_is_left, settled};
use crate::client::{Stream, get};
use crate::clients::{Clients, under_load};
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
    /// The other ranks still wait for the successor of the last killed rank.
    Recovery,
}

use Moment::{Decode, Idle, Prefill, Recovery};

/// The repeated moments of the deaths. After the first [`WARM`] deaths the server recovers five times: a disturbed recovery
/// counts as one together with the next.
const ROUND: [Moment; 8] = [
    Prefill, Recovery, Idle, Decode, Recovery, Idle, Prefill, Decode,
];
/// Deaths after which the resources are stable: a prompt has been read again, and where two ranks are killed, both have been,
/// so that the other ranks keep their numbers in the world.
const WARM: usize = 2;

/// Returns the number of ranks to kill.
fn deaths() -> usize {
    let asked = std::env::var("NCCL_TEST_DEATHS").ok();
    let deaths = asked.map_or(ROUND.len(), |asked| asked.parse().expect("a number"));
    let least = ROUND.len();
    assert!(deaths >= least, "NCCL_TEST_DEATHS: {least} at least");
    deaths
}

/// The most time until `/readyz` names the killed rank.
const NAMED: Duration = Duration::from_millis(250);

#[test]
fn many_deaths_at_all_moments_change_no_word_and_leave_nothing_in_the_front() {
    let named = soak(&[0, 1, 2, 3], 14);
    // A single death may be reported late on a machine with other work. A front that waits this long before it reports, or
    // checks only twice a second, is late for half of the deaths on any machine.
    let median = named[named.len() / 2];
    println!("named after {named:?}");
    assert!(
        median < NAMED,
        "named after {median:?} in the median: {named:?}"
    );
}

#[test]
fn ranks_that_survive_many_deaths_have_nothing_left_of_them() {
    // One that is the first rank of the world and coordinates it, and one that is not.
    soak(&[1, 2], 12);
}

/// Kills some of these ranks. Returns the times until the server named each killed rank, ascending. With the seeds above, the
/// second rank killed in a recovery is the successor for which the others wait; the first never is.
fn soak(victims: &[usize], seed: u64) -> Vec<Duration> {
    let all = deaths();
    let server = Server::start_thrifty(&["--ranks", "4"]);
    under_load(&server, |clients| {
        let mut deaths = Deaths::new(&server, clients, victims, seed);
        deaths.go_on_until(WARM);
        let survivors = (0..4).filter(|place| !victims.contains(place));
        let mut measured: Vec<_> = survivors
            .map(|place| (format!("rank {place}"), deaths.pids[place]))
            .collect();
        measured.push((String::from("the front"), server.pid()));
        let before: Vec<_> = measured.iter().map(|(_, pid)| settled(*pid)).collect();
        deaths.go_on_until(all);
        for ((what, pid), before) in measured.iter().zip(before) {
            // Quarantined memory: 200 KiB for each death. The quarantine holds at most 1024 allocations.
            nothing_is_left(what, *pid, before, 200 * (all - WARM));
        }
        deaths.finish()
    })
}

/// The deaths of ranks, and their results.
struct Deaths<'a> {
    server: &'a Server,
    clients: &'a Clients,
    victims: &'a [usize],
    /// The victims that have not been killed yet, in any order.
    spared: Vec<usize>,
    random: fastrand::Rng,
    /// A long prompt, and its expected continuation.
    prompt: (Question, String),
    /// The thread that waits for the continuation.
    reading: Option<JoinHandle<String>>,
    /// The processes of the ranks, by place, and all processes of the server, when all ranks served.
    pids: Vec<u32>,
    children: BTreeSet<u32>,
    /// The ranks killed since all ranks served.
    killed: BTreeSet<usize>,
    all_killed: Vec<usize>,
    named: Vec<Duration>,
    /// The deaths that occurred as intended, in a prompt and in a recovery.
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

    /// Kills until this many ranks are dead, and waits until all ranks serve.
    fn go_on_until(&mut self, deaths: usize) {
        let moment = |number: usize| ROUND[number % ROUND.len()];
        for number in self.all_killed.len()..deaths {
            // Each victim once, and then random ones.
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

    /// Kills a rank of a server that is ready, and waits until the server names it.
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
            // The interruption may be over before the first check.
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

    /// Kills the successor of the last killed rank, at a random moment of its start, or another rank.
    fn kill_in_recovery(&mut self, place: usize) {
        let mut pid = self.pids[place];
        if self.killed.contains(&place) {
            pid = until("a successor", || {
                let children = self.server.children();
                children.difference(&self.children).next().copied()
            });
        }
        // Early, until one kill was in time.
        let most = if self.in_recovery == 0 { 5 } else { 60 };
        std::thread::sleep(Duration::from_millis(self.random.u64(0..most)));
        let answer = get(&format!("{}/readyz", self.server.url));
        self.kill(place, pid);
        self.in_recovery += usize::from(answer.status == 503);
    }

    /// Waits until all ranks serve, and checks that only the processes of killed ranks were replaced.
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
