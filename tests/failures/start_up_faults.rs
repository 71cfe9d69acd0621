//! The error on every rank when the ranks of a job cannot meet, and how soon it comes: docs/start-up-faults.md has the
//! output of these tests (`--nocapture`).

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use nccl::{Observer, Rendezvous};

use crate::meeting::{results, start_with};

/// A rendezvous address of a test's own.
struct Meeting {
    directory: tempfile::TempDir,
}

impl Meeting {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self { directory }
    }

    fn place(&self) -> String {
        format!("unix:{}/meet", self.directory.path().display())
    }

    fn start(&self, rank: usize, size: usize, script: &str, limit: &str) -> Child {
        let place = self.place();
        let more = [
            ("NCCL_RUN_RENDEZVOUS", &place[..]),
            ("NCCL_TEST_LIMIT", limit),
        ];
        start_with(&[], rank, size, script, &more)
    }

    /// Waits until a rank other than 0 has joined: then its own socket exists.
    fn wait_for(&self, rank: usize) {
        let door = self.directory.path().join(format!("meet.{rank}"));
        let deadline = Instant::now() + Duration::from_secs(10);
        while !door.exists() {
            assert!(Instant::now() < deadline, "rank {rank} comes");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Asserts that the outputs of all ranks contain these words, within this time of the fault.
fn said(fault: &str, begun: Instant, limit: Duration, ranks: Vec<Child>, words: &[&str]) {
    let said = results(ranks);
    let after = begun.elapsed();
    println!("{fault}: all had ended after {after:.1?}");
    for said in &said {
        println!("    {said}");
        for word in words {
            assert!(said.contains(word), "{word:?} in {said:?}");
        }
    }
    assert!(after < limit, "{after:?}");
}

/// A limit in milliseconds that is not meant to pass.
const LONG: &str = "20000";
/// Sooner than that, on a loaded machine too: the actual time is printed.
const SOON: Duration = Duration::from_secs(15);

#[test]
fn a_port_that_another_process_holds() {
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let place = format!("tcp:127.0.0.1:{port}");
    let begun = Instant::now();
    let zero = start_with(&[], 0, 2, "meet", &[("NCCL_RUN_RENDEZVOUS", &place)]);
    let words = [
        &format!("pid {} (", std::process::id())[..],
        "on lo (127.0.0.1)",
    ];
    said("port held", begun, SOON, vec![zero], &words);
}

#[test]
fn a_rank_that_is_never_started() {
    let meeting = Meeting::new();
    let begun = Instant::now();
    let ranks = [0, 1, 3].map(|rank| meeting.start(rank, 4, "meet", "4000"));
    let words = ["rank 2 of 4 did not come", "2 has never reached rank 0"];
    said(
        "never started (limit 4 s)",
        begun,
        SOON,
        ranks.into(),
        &words,
    );
}

/// Rank 2 of three ends before it joins; `later`: rank 1 starts after rank 0 knows that.
fn rank_2_ends(later: bool) {
    let meeting = Meeting::new();
    let place = meeting.place();
    let watched = Rendezvous::observer(&place)
        .unwrap()
        .with(|meet| meet.secret = Some("hush, and nobody hears it".into()));
    let observer = Observer::start(watched).unwrap();
    let mut ranks = vec![meeting.start(0, 3, "meet", LONG)];
    if !later {
        ranks.push(meeting.start(1, 3, "meet", LONG));
        meeting.wait_for(1);
    }
    let begun = Instant::now();
    let dead = Command::new("sh")
        .args(["-c", "echo 'no CUDA device' >&2; exit 1"])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let pid = dead.id();
    observer.rank_started(2, pid).unwrap();
    let ended = dead.wait_with_output().unwrap();
    let tail = String::from_utf8_lossy(&ended.stderr);
    observer
        .rank_ended(2, pid, &ended.status.to_string(), &tail)
        .unwrap();
    if later {
        let mut events = observer.events();
        while !matches!(
            events.next_within(Duration::from_secs(10)),
            Some(
                nccl::control::WorldEvent::Gone { rank: 2, .. }
                    | nccl::control::WorldEvent::Ended { .. }
            )
        ) {}
        ranks.push(meeting.start(1, 3, "meet", LONG));
    }
    let words = ["rank 2", "exit status: 1", "no CUDA device"];
    said("ended before it joined", begun, SOON, ranks, &words);
}

#[test]
fn a_rank_whose_process_ends_before_it_joins() {
    rank_2_ends(false);
}

#[test]
fn a_rank_that_comes_a_moment_later_hears_of_it_as_well() {
    rank_2_ends(true);
}

#[test]
fn two_processes_that_are_one_rank() {
    let meeting = Meeting::new();
    let ranks = [0, 1].map(|rank| meeting.start(rank, 3, "meet", LONG));
    meeting.wait_for(1);
    let begun = Instant::now();
    let second = meeting.start(1, 3, "meet", LONG);
    let words = [
        "rank 1 has joined already, as",
        "two processes cannot be one rank",
    ];
    said("the second rank 1", begun, SOON, vec![second], &words);
    // The others still wait for rank 2, and continue when it joins.
    let last = meeting.start(2, 3, "meet", LONG);
    let mut all = Vec::from(ranks);
    all.push(last);
    assert_eq!(results(all), ["fine"; 3]);
}

#[test]
fn ranks_that_disagree_on_how_many_they_are() {
    let meeting = Meeting::new();
    let zero = meeting.start(0, 2, "meet", "5000");
    let begun = Instant::now();
    let one = meeting.start(1, 4, "meet", LONG);
    let words = ["rank 1 expects 4 ranks, rank 0 expects 2"];
    said(
        "another number, the odd one",
        begun,
        SOON,
        vec![one],
        &words,
    );
    said(
        "another number, rank 0 (limit 1.5 s)",
        begun,
        SOON,
        vec![zero],
        &words,
    );
}

#[test]
fn a_rank_that_fails_while_it_starts() {
    let meeting = Meeting::new();
    let begun = Instant::now();
    let ranks = [0, 1, 2].map(|rank| {
        let script = if rank == 1 {
            "fail while starting"
        } else {
            "wait for all"
        };
        meeting.start(rank, 3, script, LONG)
    });
    let [zero, one, two] = ranks;
    let words = [
        "rank 1 (",
        "cannot tell which ranks are on this host: permission denied",
    ];
    said(
        "failed while starting",
        begun,
        SOON,
        vec![zero, two],
        &words,
    );
    results(vec![one]);
}

#[test]
fn a_port_scanner() {
    let directory = tempfile::tempdir().unwrap();
    let published = directory.path().join("address").display().to_string();
    let more = [
        ("NCCL_RUN_RENDEZVOUS", "tcp:127.0.0.1:0"),
        ("NCCL_RUN_PUBLISH", &published[..]),
    ];
    let zero = start_with(&[], 0, 2, "meet", &more);
    let deadline = Instant::now() + Duration::from_secs(10);
    let address = loop {
        if let Ok(address) = std::fs::read_to_string(&published) {
            break address;
        }
        assert!(Instant::now() < deadline, "rank 0 listens");
        std::thread::sleep(Duration::from_millis(5));
    };
    for n in 0..50u8 {
        let mut stream = TcpStream::connect(address.trim()).unwrap();
        let _ = stream.write_all(&[n; 200]);
    }
    let begun = Instant::now();
    let one = start_with(&[], 1, 2, "meet", &more);
    assert_eq!(results(vec![zero, one]), ["fine"; 2]);
    println!(
        "50 strangers: the ranks had met after {:.1?}",
        begun.elapsed()
    );
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
}
