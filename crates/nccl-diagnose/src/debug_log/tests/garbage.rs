//! Input that is no log, or only half of one.

use std::time::{Duration, Instant};

use super::{read, read_text, text};
use crate::debug_log::{Class, DebugLog, Link, Transport};

const LOGS: [&str; 13] = [
    "2.18-no-p2p.log",
    "2.21-other-network-h1.log",
    "2.21-other-network-h2.log",
    "2.26-shared-memory.log",
    "2.27-node-a-of-two.log",
    "2.27-node-b-of-two.log",
    "2.28-without-gdr.log",
    "2.30-fine.log",
    "2.32-missing-rank.log",
    "garbage.log",
    "real-2.18.3-without-gpu.log",
    "real-2.27.7-without-gpu.log",
    "real-2.32.3-without-gpu.log",
];

#[test]
fn nccls_lines_are_found_among_bytes_halves_and_other_programs() {
    let log = read(&["garbage.log"]);
    assert_eq!(log.processes().len(), 1, "{:?}", log.processes());
    let process = &log.processes()[0];
    assert_eq!((&process.host[..], process.pid), ("box", 9));
    assert_eq!(process.bootstrap.as_ref().unwrap().interface, "eth0");
    assert_eq!(process.warnings[0].text, "something new");
    assert_eq!(process.warnings[0].class, Class::Unknown);
    assert_eq!(
        process.variables["NCCL_ALGO"], "Ring",
        "behind somebody's unfinished line"
    );
    assert_eq!(log.counts().nccl, 6);
    assert_eq!(log.counts().broken, 2);
}

#[test]
fn the_ends_of_lines_that_others_began_belong_to_the_host_that_is_known() {
    let log = read_text(
        "node-a:7:7 [0] NCCL INFO x\nloss=3node-a:7:7 [0] NCCL INFO Bootstrap: Using e:10.0.0.1<0>\n",
    );
    assert_eq!(log.processes().len(), 1);
    assert!(log.processes()[0].bootstrap.is_some());
}

#[test]
fn memory_does_not_grow_with_the_length_of_a_log() {
    let mut log = DebugLog::new();
    let mut line = String::new();
    for number in 0..20_000 {
        use std::fmt::Write as _;
        line.clear();
        let _ = writeln!(line, "a:1:{number} [0] x.cc:1 NCCL WARN number {number}");
        let _ = writeln!(
            line,
            "a:1:{number} [0] NCCL INFO NCCL_X{number} set by environment to {number}."
        );
        let _ = writeln!(
            line,
            "a:1:{number} [0] NCCL INFO ncclCommInitRank comm 0x{number:x} rank 0 nranks 20000 cudaDev 0 nvmlDev 0 busId 1 commId 0x{number:x} - Init START"
        );
        let _ = writeln!(
            line,
            "a:1:{number} [0] NCCL INFO Channel 00/0 : 0[0] -> {number}[0] via P2P/IPC"
        );
        let _ = writeln!(
            line,
            "a:1:{number} [0] NCCL INFO Channel 00/0 : 0[0] -> {number}[0] [send] via NET/IB/{number}"
        );
        let _ = writeln!(
            line,
            "a:1:{number} [0] NCCL INFO C{number}: 1 Bytes -> Algo A proto B"
        );
        let _ = writeln!(
            line,
            "a:1:{number} [0] NCCL INFO f: connect to 10.0.{}.{}<1> returned no, retrying (1/2)",
            number / 256,
            number % 256
        );
        log.read("log", line.as_bytes()).unwrap();
    }
    let process = &log.processes()[0];
    assert_eq!(process.warnings.len(), 64);
    assert_eq!(process.more_warnings, 20_000 - 64);
    assert!(process.variables.len() <= 256 && process.tuning.len() <= 256);
    assert!(process.retries.len() <= 256);
    assert!(process.communicators.len() <= 256);
    for one in &process.communicators {
        let over_network = |link: &&Link| matches!(link.via, Transport::Net { .. });
        let net = one.links.keys().filter(over_network).count();
        assert!(one.links.len() <= 4096 && net <= 128, "{net}");
    }
    // And a report can still be made.
    assert!(!log.report().findings.is_empty());
}

/// Changes bytes of a log: flips, doubles, cuts them, swaps them with another log's.
fn mutate(random: &mut fastrand::Rng, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = corpus[random.usize(..corpus.len())].clone();
    for _ in 0..random.usize(1..12) {
        if bytes.is_empty() {
            break;
        }
        let at = random.usize(..bytes.len());
        let end = (at + random.usize(1..200)).min(bytes.len());
        match random.u8(..8) {
            0 => bytes[at] = random.u8(..),
            1 => drop(bytes.drain(at..end)),
            2 => {
                let part = bytes[at..end].to_vec();
                bytes.splice(at..at, part);
            }
            3 => bytes.truncate(at.max(bytes.len() / 2)),
            4 => {
                let other = &corpus[random.usize(..corpus.len())];
                let from = random.usize(..other.len());
                let to = (from + random.usize(1..300)).min(other.len());
                bytes.splice(at..end, other[from..to].iter().copied());
            }
            5 => {
                let word: &[u8] = [
                    b"NCCL INFO ".as_slice(),
                    b"[",
                    b"]",
                    b":",
                    b" -> ",
                    b"via NET/",
                    b"\n",
                    b"99999999999999999999",
                    b"rank 18446744073709551615 ",
                    b"nranks 18446744073709551615 ",
                    "\u{fffd}ü".as_bytes(),
                    b"\x1b[",
                    b"<",
                ][random.usize(..13)];
                bytes.splice(at..at, word.iter().copied());
            }
            6 => bytes[at..end]
                .iter_mut()
                .for_each(|byte| *byte = byte.wrapping_add(1)),
            _ => bytes[at..end].reverse(),
        }
    }
    bytes
}

#[test]
fn no_log_however_spoilt_makes_this_panic() {
    let corpus: Vec<Vec<u8>> = LOGS.iter().map(|name| text(name)).collect();
    let seed = std::env::var("NCCL_TEST_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(7);
    let mut random = fastrand::Rng::with_seed(seed);
    let until = Instant::now() + Duration::from_secs(3);
    let mut rounds = 0;
    while rounds < 300 || (rounds < 3000 && Instant::now() < until) {
        let mut log = DebugLog::new();
        for name in ["one", "two"] {
            log.read(name, &mutate(&mut random, &corpus)[..]).unwrap();
        }
        let report = log.report();
        assert!(
            report.to_string().len() < 1 << 20,
            "seed {seed}, round {rounds}"
        );
        rounds += 1;
    }
}

/// The shortest of a few readings.
fn time(bytes: &[u8]) -> Duration {
    let once = || {
        let started = Instant::now();
        let mut log = DebugLog::new();
        log.read("log", bytes).unwrap();
        std::hint::black_box(log.report());
        started.elapsed()
    };
    (0..5).map(|_| once()).min().expect("five times")
}

#[test]
fn long_lines_cost_no_more_than_short_ones_of_the_same_bytes() {
    for part in [
        "NCCL INFO ",
        "x] NCCL WARN ",
        "a:1:1 [0] NCCL INFO ",
        "[0] ",
        "1:",
    ] {
        let lines = |length: usize| {
            let mut line = part.repeat(length / part.len());
            line.push('\n');
            line.repeat(512 * 1024 / line.len())
        };
        let (short, long) = (
            time(lines(256).as_bytes()),
            time(lines(16 * 1024).as_bytes()),
        );
        assert!(
            long < short * 4 + Duration::from_millis(50),
            "{part:?}: {short:?} in short lines, {long:?} in long ones"
        );
    }
}

#[test]
fn time_grows_with_the_length_and_no_faster() {
    let nasty: [&[u8]; 6] = [
        b"NCCL INFO ",
        b"[0] NCCL WARN ",
        b"a:1:1 [0] NCCL INFO ",
        b"1:1:1:1:",
        b"2026-11-21 02:17:39 ",
        b"Channel 00/0 : 0[0] -> 1[1] via P2P/IPC\n",
    ];
    for part in nasty {
        let (small, large) = (
            part.repeat(40_000 / part.len()),
            part.repeat(640_000 / part.len()),
        );
        let (small, large) = (time(&small), time(&large));
        // Sixteen times as much; thirty-two times as long would not be linear any more.
        assert!(
            large < small * 48 + Duration::from_millis(50),
            "{:?}: {small:?}, then {large:?}",
            String::from_utf8_lossy(part)
        );
    }
}
