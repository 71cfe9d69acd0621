//! An observer, which is not a rank, watches ranks that are processes, and reports how they ended.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use nccl::control::{RankEnd, WorldEvent};
use nccl::{Observer, Rendezvous, World};
use nccl_tools::testing::{Role, again, end_with, eventually, name};

use crate::meeting::{last_words, results, start_with};

const LONG: Duration = Duration::from_secs(30);

/// How the ranks know that a launcher will report their ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Teller {
    Observer,
    Environment,
}

/// Ranks that this process has started and observes, all of which wait for each other.
struct Family {
    ranks: Vec<Child>,
    observer: Observer,
    _directory: tempfile::TempDir,
}

impl Family {
    fn new(size: usize, tcp: bool, before: &[&str]) -> Self {
        Self::doing("wait in a phase", size, tcp, before)
    }

    fn doing(script: &str, size: usize, tcp: bool, before: &[&str]) -> Self {
        Self::told_by(Teller::Observer, script, size, tcp, before)
    }

    fn told_by(teller: Teller, script: &str, size: usize, tcp: bool, before: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("meet");
        let path = path.display().to_string();
        let place = match tcp {
            true => String::from("tcp:127.0.0.1:0"),
            false => format!("unix:{path}"),
        };
        let mut more = vec![("NCCL_RUN_RENDEZVOUS", &place[..])];
        if teller == Teller::Environment {
            more.push(("NCCL_RUN_OBSERVED", "1"));
        }
        let mut rendezvous = Rendezvous::unix(&path, 0, size).unwrap();
        if tcp {
            more.push(("NCCL_RUN_PUBLISH", &path));
            rendezvous = Rendezvous::tcp("127.0.0.1", 0, 0, size)
                .unwrap()
                .publish(&path);
        }
        let observer = Observer::start(rendezvous.with(|meet| {
            meet.secret = Some("hush, and nobody hears it".into());
            meet.timeout = LONG;
        }))
        .unwrap();
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let child = start_with(before, rank, size, script, &more);
                if teller == Teller::Observer {
                    observer.rank_started(rank, child.id()).unwrap();
                }
                child
            })
            .collect();
        let deadline = Instant::now() + LONG;
        let waits = || {
            let state = observer.snapshot();
            let all = state.ranks.into_iter();
            all.filter_map(|rank| rank.phase)
                .filter(|(phase, _)| phase == "waiting")
                .count()
        };
        while waits() < size {
            assert!(Instant::now() < deadline, "{:?}", observer.snapshot());
            std::thread::sleep(Duration::from_millis(5));
        }
        // Gives the ranks time to print their last line, that they wait.
        std::thread::sleep(Duration::from_millis(100));
        Self {
            ranks,
            observer,
            _directory: directory,
        }
    }

    /// The last output of the remaining ranks. Their children hold the output open.
    fn said(&mut self) -> Vec<String> {
        let rest = std::mem::take(&mut self.ranks);
        rest.into_iter().map(last_words).collect()
    }

    /// Kills a rank, reports how it ended, and returns the output of the others and how long they took to end.
    fn kill(&mut self, rank: usize) -> (Vec<String>, Duration) {
        let pid = self.ranks[rank].id();
        let target = self.observer.snapshot().ranks[rank].pid.unwrap();
        let begun = Instant::now();
        let target = rustix::process::Pid::from_raw(target.cast_signed()).unwrap();
        rustix::process::kill_process(target, rustix::process::Signal::KILL).unwrap();
        let mut dead = self.ranks.remove(rank);
        let status = dead.wait().unwrap();
        let how = match status.signal() {
            Some(9) => String::from("killed by SIGKILL"),
            _ => format!("{status}"),
        };
        self.observer
            .rank_ended(rank, pid, &how, "its last line\n")
            .unwrap();
        let said = results(std::mem::take(&mut self.ranks));
        (said, begun.elapsed())
    }
}

#[test]
fn how_a_rank_was_killed_is_what_all_others_say_also_when_it_was_rank_0() {
    for (tcp, dead) in [(false, 2), (false, 0), (true, 0)] {
        let mut family = Family::new(4, tcp, &[]);
        let (said, after) = family.kill(dead);
        for said in said {
            let word = "its process ended: killed by SIGKILL; stderr ended with: its last line";
            assert!(
                said.contains(&format!("rank {dead} (")) && said.contains(word),
                "{said}"
            );
        }
        println!("rank {dead}, tcp {tcp}: the others had ended after {after:?}");
        assert!(after < Duration::from_secs(10), "{after:?}");
        // The reporting observer receives its own report a moment later.
        let end = || family.observer.snapshot().ranks[dead].end.clone();
        let deadline = Instant::now() + LONG;
        while end().is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        let Some(RankEnd::Gone(how)) = end() else {
            panic!("{:?}", end())
        };
        assert!(how.contains("killed by SIGKILL"), "{how}");
    }
}

#[test]
fn the_word_about_a_process_that_ran_the_rank_counts_when_the_ranks_connection_ends() {
    // The rank is a child of `timeout`, which exits with the rank's status.
    let mut family = Family::new(3, false, &["timeout", "30"]);
    let (said, _) = family.kill(1);
    for said in said {
        let word = "its process ended: killed by SIGKILL; stderr ended with: its last line";
        assert!(said.contains("rank 1 (") && said.contains(word), "{said}");
    }
}

/// So a rank cannot die too early for its launcher: the membership tells all ranks that a report will come.
#[test]
fn the_word_of_a_launcher_counts_that_the_ranks_know_from_their_environment_alone() {
    for dead in [2, 0] {
        let script = "wait in a phase";
        let mut family = Family::told_by(Teller::Environment, script, 3, false, &[]);
        let (said, _) = family.kill(dead);
        for said in said {
            let word = "its process ended: killed by SIGKILL; stderr ended with: its last line";
            assert!(
                said.contains(&format!("rank {dead} (")) && said.contains(word),
                "{said}"
            );
        }
    }
}

#[test]
fn an_observer_survives_the_world_and_says_how_it_ended() {
    let mut family = Family::new(2, false, &[]);
    let mut events = family.observer.events();
    for mut rank in family.ranks.drain(..).rev() {
        rank.kill().unwrap();
        rank.wait().unwrap();
    }
    let mut gone = Vec::new();
    let why = loop {
        match events.next_within(LONG).expect("an event") {
            WorldEvent::Gone { rank, .. } => gone.push(rank),
            WorldEvent::Ended { why, .. } => break why,
            _ => {}
        }
    };
    assert_eq!(gone.last(), Some(&0));
    assert!(why.contains("rank 0 is gone"), "{why}");
    assert_eq!(events.next_within(LONG), None);
}

/// The report about the end of a later coordinator reaches the others as well, through its successor.
#[test]
fn an_observer_follows_the_ranks_that_take_over_and_its_word_counts_with_them() {
    for tcp in [false, true] {
        let mut family = Family::doing("hear of ranks 0 and 1", 4, tcp, &[]);
        let mut events = family.observer.events();
        let mut wait_for = |what: &str, wanted: &dyn Fn(&WorldEvent) -> bool| {
            let mut seen = Vec::new();
            loop {
                let event = events.next_within(LONG);
                let event = event.unwrap_or_else(|| panic!("{what}: {seen:#?}"));
                if wanted(&event) {
                    return event;
                }
                seen.push(event);
            }
        };
        for dead in 0..2 {
            // By now all ranks know which process will report the coordinator's end.
            std::thread::sleep(Duration::from_millis(300));
            let mut process = family.ranks.remove(0);
            let pid = process.id();
            process.kill().unwrap();
            process.wait().unwrap();
            let how = format!("killed by SIGKILL as number {dead}");
            family.observer.rank_ended(dead, pid, &how, "").unwrap();
            wait_for("its end", &|event| match event {
                WorldEvent::Gone {
                    rank, how: said, ..
                } => *rank == dead && said.contains(&how),
                _ => false,
            });
            let phase = format!("heard of rank {dead}");
            wait_for("what the others do then", &|event| match event {
                WorldEvent::Phase { rank, name, .. } => *rank > 1 && *name == phase,
                _ => false,
            });
        }
        for said in family.said() {
            for dead in 0..2 {
                let word = format!("its process ended: killed by SIGKILL as number {dead}");
                assert!(said.contains(&word), "{word:?} in {said:?}");
            }
        }
        let begun = Instant::now();
        let WorldEvent::Ended { why, .. } = wait_for("the end", &|event| {
            matches!(event, WorldEvent::Ended { .. })
        }) else {
            panic!("no end")
        };
        println!("tcp {tcp}: ended after {:?}: {why}", begun.elapsed());
        assert!(
            why.starts_with("rank 0 is gone: ") && why.contains("; then rank 1 "),
            "{why}"
        );
        // The last two end at the same moment, and no rank is left to report both.
        let ranks = family.observer.snapshot().ranks;
        for rank in &ranks[..3] {
            assert!(rank.end.is_some(), "{ranks:?}");
        }
    }
}

/// Rank 3 is stopped, so that the successor of rank 0 receives nothing from it, and dies after that; before or after
/// the successor has decided without it.
#[test]
fn the_end_of_a_rank_that_a_successor_has_never_heard_of_is_told_to_it() {
    // An end counts only while the lease of the rank that sees it is valid: four seconds. After that, the rank is cut
    // off.
    for (tcp, after) in [(false, 2500), (true, 2500), (false, 1500), (false, 100)] {
        let mut family = Family::doing("go on without the dead", 4, tcp, &[]);
        let mut events = family.observer.events();
        let mut wait_for = |what: &str| {
            let mut seen = Vec::new();
            loop {
                let event = events.next_within(LONG);
                let event = event.unwrap_or_else(|| panic!("{what}: {seen:#?}"));
                if matches!(&event, WorldEvent::Phase { name, .. } if name == what) {
                    return;
                }
                seen.push(event);
            }
        };
        let kill = |family: &mut Family, rank: usize| {
            let mut process = family.ranks.remove(rank);
            let pid = process.id();
            process.kill().unwrap();
            process.wait().unwrap();
            pid
        };
        let dead = kill(&mut family, 1);
        family.observer.rank_ended(1, dead, "killed", "").unwrap();
        wait_for("in a generation of 3");
        std::thread::sleep(Duration::from_millis(300));
        let stopped = rustix::process::Pid::from_child(&family.ranks[2]);
        rustix::process::kill_process(stopped, rustix::process::Signal::STOP).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        let dead = kill(&mut family, 0);
        family.observer.rank_ended(0, dead, "killed", "").unwrap();
        std::thread::sleep(Duration::from_millis(after));
        let dead = kill(&mut family, 1);
        family.observer.rank_ended(3, dead, "killed", "").unwrap();
        let begun = Instant::now();
        wait_for("in a generation of 1");
        println!("tcp {tcp}, {after} ms: alone after {:?}", begun.elapsed());
        assert_eq!(family.said(), ["alone"]);
    }
}

#[test]
fn a_killed_rank_is_heard_of_although_a_child_of_it_keeps_its_connection_open() {
    for (tcp, dead) in [(false, 1), (false, 0), (true, 1), (true, 0)] {
        let mut family = Family::doing("leave a child and wait", 3, tcp, &[]);
        // No launcher reports: the kernel closes the connection.
        let mut dead_rank = family.ranks.remove(dead);
        let pid = dead_rank.id();
        let begun = Instant::now();
        dead_rank.kill().unwrap();
        dead_rank.wait().unwrap();
        for said in family.said() {
            let word = format!("its process (pid {pid}) ended without goodbye");
            assert!(
                said.contains(&format!("rank {dead} (")) && said.contains(&word),
                "{said}"
            );
        }
        let after = begun.elapsed();
        println!("rank {dead} left a child, tcp {tcp}: the others had ended after {after:?}");
        // Before the child ends.
        assert!(after < Duration::from_secs(11), "{after:?}");
    }
}

#[test]
fn an_observer_is_given_what_the_ranks_did_last_and_why_it_has_none_of_others() {
    let mut family = Family::new(4, false, &[]);
    let process = |rank: usize| {
        let pid = family.observer.snapshot().ranks[rank].pid.unwrap();
        rustix::process::Pid::from_raw(pid.cast_signed()).unwrap()
    };
    let [zero, stopped] = [0, 1].map(process);
    let kill = |process, signal| rustix::process::kill_process(process, signal).unwrap();
    // Rank 0 as well: the answers do not pass through it.
    kill(zero, rustix::process::Signal::STOP);
    kill(stopped, rustix::process::Signal::STOP);
    let mut dead = family.ranks.remove(3);
    dead.kill().unwrap();
    dead.wait().unwrap();
    let begun = Instant::now();
    let timeline = family.observer.recordings(Duration::from_millis(1500));
    let took = begun.elapsed();
    kill(zero, rustix::process::Signal::CONT);
    kill(stopped, rustix::process::Signal::CONT);
    println!("asked for {took:?}");
    assert!(took < LONG / 2, "{took:?}");
    let there: Vec<_> = timeline.ranks.iter().map(|one| one.rank).collect();
    assert_eq!(there, [2], "{:?}", timeline.missing);
    let notes = &timeline.ranks[0].snapshot.notes;
    assert!(
        notes
            .iter()
            .any(|note| note.is_phase && note.text == "waiting")
    );
    let why: Vec<_> = timeline
        .missing
        .iter()
        .map(|one| (one.rank, &one.why))
        .collect();
    for (rank, word) in [
        (0, "its process is stopped (SIGSTOP)"),
        (1, "its process is stopped (SIGSTOP)"),
        (1, "it had been in phase \"waiting\" for "),
        (3, "no process listens at "),
    ] {
        let found = why
            .iter()
            .any(|(other, why)| *other == rank && why.contains(word));
        assert!(found, "rank {rank}, {word:?}: {why:?}");
    }
    for rank in &mut family.ranks {
        rank.kill().unwrap();
        rank.wait().unwrap();
    }
}

/// Their launcher has no name for its jobs: they are identified by their parent process, and children of another
/// process do not count.
#[test]
fn ranks_of_mpich_are_found_by_the_process_of_one() {
    let test = name(&|| ());
    if Role::of(&test) != Role::Test {
        end_with(|| {
            let _world = World::join(Rendezvous::from_env()?)?;
            // The rank runs until the test has seen enough.
            std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
            Ok::<(), Box<dyn std::error::Error>>(())
        });
    }
    let ranks: Vec<Child> = (0..2)
        .map(|rank: usize| {
            let mut command = again(&test, "rank");
            for (name, _) in std::env::vars_os() {
                let name = name.to_string_lossy().into_owned();
                let launchers = ["NCCL_RUN_", "SLURM_", "OMPI_", "PMIX_"];
                if launchers.iter().any(|prefix| name.starts_with(prefix)) {
                    command.env_remove(name);
                }
            }
            command.envs([
                ("PMI_RANK", rank.to_string()),
                ("PMI_SIZE", String::from("2")),
                ("MPI_LOCALRANKID", rank.to_string()),
                ("MPI_LOCALNRANKS", String::from("2")),
            ]);
            command.stdin(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    let mut meet = None;
    // The system shows no environment for a process that just begins.
    eventually("an environment", || {
        meet = Rendezvous::of_process(ranks[1].id()).ok();
        meet.is_some()
    });
    let observer = Observer::join(meet.unwrap().with(|meet| meet.timeout = LONG)).unwrap();
    eventually("both ranks answer", || {
        let timeline = observer.recordings(LONG);
        let numbers: Vec<_> = timeline.ranks.iter().map(|one| one.rank).collect();
        numbers == [0, 1]
    });
    drop(observer);
    for mut rank in ranks {
        drop(rank.stdin.take());
        assert!(rank.wait().unwrap().success());
    }
}
