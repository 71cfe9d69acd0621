//! Random deaths, stops and changes of the number of ranks of one server whose experts have copies, under constant load: all
//! texts are unchanged, the server recovers completely each time, and the surviving processes leak no resources.
//!
//! Each test makes 15 changes, or 5 on NVIDIA's library, unless `NCCL_TEST_CHANGES` is set. The seed is printed, and
//! `NCCL_TEST_SEED` repeats it:
//! `NCCL_TEST_SEED=7 NCCL_TEST_CHANGES=250 cargo test -p inference-server --test server elastic_soak -- --nocapture`.

use std::fmt::Write as _;
use std::io::Write as _;
use std::time::Duration;

use rustix::process::Signal;

use crate::belongings::{Belongings, nothing_is_left, settled};
use crate::client::post;
use crate::clients::under_load;
use crate::program::{Server, lives, signal};
use crate::until;

const COPIES: usize = 2;

/// The number of changes; fewer on NVIDIA's library, whose kernels the emulator interprets.
struct Extent {
    ranks: usize,
    /// The default number of changes.
    changes: usize,
    /// The least number of changes after which all code has run once.
    warm: usize,
    deadline: &'static str,
}

fn extent() -> Extent {
    let (on_its_own, on_nvidias) = (
        Extent {
            ranks: 8,
            changes: 15,
            warm: 5,
            deadline: "3",
        },
        Extent {
            ranks: 4,
            changes: 5,
            warm: 2,
            deadline: "5",
        },
    );
    match std::env::var_os("NCCL_EMULATOR_NCCL") {
        None => on_its_own,
        Some(_) => on_nvidias,
    }
}

/// The launcher's process that ends the ranks if the front is killed.
const HELPERS: usize = 1;

/// The most freed memory of a device that the emulator keeps.
const QUARANTINE_KIB: usize = 128 << 10;

/// A change to the ranks.
#[derive(Clone, Debug)]
enum Change {
    /// Kills this many serving ranks at once.
    Kill(usize),
    /// Stops one of them.
    Stop,
    /// Requests this number of ranks.
    Scale(usize),
}

#[test]
fn whatever_happens_to_ranks_no_word_changes_and_nothing_is_left_in_the_front() {
    soak(0);
}

#[test]
fn a_rank_that_lives_through_everything_has_nothing_left_of_the_others() {
    soak(1);
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}: a number")))
}

/// Makes changes; ranks before `first` are never killed or stopped.
fn soak(first: usize) {
    let Extent {
        ranks,
        changes: usual,
        warm,
        deadline,
    } = extent();
    let all = number("NCCL_TEST_CHANGES").map_or(usual, |all| all as usize);
    // A long run also begins to measure after all that a process keeps within a bound is there, such as the recordings of the
    // last communicators that ended.
    let warm = warm.max(all / 5);
    assert!(all > warm, "NCCL_TEST_CHANGES: more than {warm}");
    let seed = number("NCCL_TEST_SEED").unwrap_or_else(|| fastrand::u64(..1_000_000));
    println!("NCCL_TEST_SEED={seed}");
    let (started, copies) = (ranks.to_string(), COPIES.to_string());
    let server = Server::start_thrifty(&[
        "--ranks",
        &started,
        "--recovery",
        "elastic",
        "--copies",
        &copies,
        "--deadline",
        deadline,
    ]);
    under_load(&server, |_| {
        let mut measured = vec![("the front", server.pid())];
        if first > 0 {
            measured.push(("rank 0", server.ranks()[0]));
        }
        let mut changes = Changes {
            server: &server,
            measured: measured.clone(),
            victims: first..ranks,
            ranks,
            random: fastrand::Rng::with_seed(seed),
            target: ranks,
            left: Some(ranks),
        };
        changes.make(warm);
        changes.scale(ranks);
        changes.is_whole();
        let before: Vec<_> = measured.iter().map(|(_, pid)| settled(*pid)).collect();
        changes.make(all - warm);
        // The resources of a process depend on the number of ranks.
        changes.scale(ranks);
        changes.is_whole();
        for ((what, pid), before) in measured.iter().zip(before) {
            assert!(lives(*pid), "{what}");
            nothing_is_left(what, *pid, before, QUARANTINE_KIB);
        }
    });
}

/// Shows the progress of a long run, past the test harness, which captures what `println` writes.
fn report(done: usize, count: usize, measured: &[(&str, u32)]) {
    let mut line = format!("elastic_soak: {done} of {count} changes");
    for (what, pid) in measured {
        if lives(*pid) {
            let _ = write!(line, "; {what}: {:?}", Belongings::of(*pid));
        }
    }
    line.push('\n');
    let _ = std::io::stderr().write_all(line.as_bytes());
}

struct Changes<'a> {
    server: &'a Server,
    /// The processes whose resources are measured.
    measured: Vec<(&'static str, u32)>,
    /// The most ranks.
    ranks: usize,
    /// The ranks that may be killed and stopped.
    victims: std::ops::Range<usize>,
    random: fastrand::Rng,
    /// The last requested number of ranks, which is also started when no rank is left.
    target: usize,
    /// The number of ranks that must remain, if it is known.
    left: Option<usize>,
}

impl Changes<'_> {
    /// Makes `count` changes, some of them while the previous one is in progress, and waits until the server has recovered.
    fn make(&mut self, count: usize) {
        for number in 0..count {
            std::thread::sleep(Duration::from_millis(self.random.u64(0..60)));
            self.change();
            if (number + 1) % 10 == 0 {
                report(number + 1, count, &self.measured);
            }
            if number + 1 < count && self.random.u8(0..3) == 0 {
                self.left = None;
                continue;
            }
            self.is_whole();
        }
    }

    fn change(&mut self) {
        let serving = self.serving();
        let mut victims: Vec<_> = serving
            .iter()
            .filter(|(place, _)| self.victims.contains(place))
            .map(|(_, pid)| *pid)
            .collect();
        self.random.shuffle(&mut victims);
        let change = match self.random.u8(0..10) {
            0..=4 if !victims.is_empty() => {
                Change::Kill(self.random.usize(1..=3.min(victims.len())))
            }
            5 if !victims.is_empty() && serving.len() > 1 && self.left.is_some() => Change::Stop,
            _ => Change::Scale(self.random.usize(1..=self.ranks)),
        };
        println!("{} serve: {change:?}", serving.len());
        match change {
            // A victim may have ended in the previous change, which counted it.
            Change::Kill(number) => {
                let victims = victims.iter().take(number).filter(|pid| lives(**pid));
                let killed = victims.inspect(|pid| signal(**pid, Signal::KILL)).count();
                self.lose(killed);
            }
            Change::Stop if !lives(victims[0]) => {}
            Change::Stop => {
                signal(victims[0], Signal::STOP);
                self.lose(1);
                self.is_whole();
            }
            Change::Scale(ranks) => self.scale(ranks),
        }
    }

    fn scale(&mut self, ranks: usize) {
        let body = format!("{{\"ranks\": {ranks}}}");
        let answer = post(&format!("{}/admin/ranks", self.server.url), &body);
        assert_eq!(answer.status, 202, "{}", answer.text);
        until("that the number is known", || {
            let health = self.server.health();
            let is_known = health["scaling_to"] == ranks
                || (health["scaling_to"].is_null() && health["parts"] == ranks);
            is_known.then_some(())
        });
        self.target = ranks;
        self.left = Some(ranks).filter(|_| self.left.is_some());
    }

    /// Records the loss of `number` ranks. If none is left, all are restarted.
    fn lose(&mut self, number: usize) {
        self.left = self.left.map(|left| match left - number {
            0 => self.target,
            left => left,
        });
    }

    /// Returns the serving ranks, and their processes.
    fn serving(&self) -> Vec<(usize, u32)> {
        let health = self.server.health();
        let ranks = health["ranks"].as_array().unwrap();
        let serving = ranks.iter().enumerate().filter_map(|(place, rank)| {
            let pid = rank["pid"]
                .as_u64()
                .filter(|_| rank["state"] == "serving")?;
            Some((place, pid as u32))
        });
        serving.collect()
    }

    /// Waits until all ranks serve, with all copies.
    fn is_whole(&mut self) {
        let known = self.left;
        let left = until("a whole server", || {
            let health = self.server.health();
            let number = |name: &str| health[name].as_u64().map(|number| number as usize);
            let (parts, copies) = (number("parts")?, number("copies")?);
            let serving = self.serving();
            let is_whole = health["ready"] == true
                && health["scaling_to"].is_null()
                && known.is_none_or(|known| known == parts)
                && serving.len() == parts
                && serving.iter().all(|(_, pid)| lives(*pid))
                && number("copies_planned") == Some(copies)
                && copies == COPIES.min(parts);
            is_whole.then_some(parts)
        });
        // There is one process for each rank, and no other.
        assert_eq!(self.server.children().len(), left + HELPERS);
        self.left = Some(left);
    }
}
