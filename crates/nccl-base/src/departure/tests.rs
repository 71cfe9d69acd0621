use std::time::Duration;

use super::*;
use crate::wire;

fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

fn oom() -> OomKill {
    OomKill {
        group: String::from("/job/rank1"),
        killed: 1,
        limit: Some(64 << 20),
    }
}

fn seen(exit: Exit, sent: Option<Signal>, oom: Option<OomKill>, stderr: &str) -> Lost {
    ProcessEnd::seen(exit, sent, oom, stderr).into()
}

fn unreachable(
    evidence: UnreachableEvidence,
    heard: Option<HeardOnly>,
    undecided: Option<&str>,
) -> Lost {
    let undecided = undecided.map(str::to_owned);
    LossKind::Unreachable(Box::new(UnreachableHost {
        evidence,
        heard,
        undecided,
    }))
    .into()
}

fn killed() -> Exit {
    Exit::Signal {
        signal: Signal::Kill,
        core_dumped: false,
    }
}

/// Returns a departure of each kind, with its sentence.
fn all() -> Vec<(Departure, &'static str)> {
    let text = String::from;
    let lost = |how: LossKind| Departure::lost(how);
    let heard = HeardOnly {
        heard: seconds(0.31),
        unacknowledged: seconds(2.96),
    };
    let timed_out = || UnreachableEvidence::Error(text("Connection timed out (os error 110)"));
    let last_call = |lost: Lost| {
        Departure::Lost(Lost {
            last_call: Some(LastCall {
                call: text("all_reduce #4 on \"tp\", called 0.1 s before that"),
                before: seconds(0.3),
            }),
            ..lost
        })
    };
    vec![
        (Departure::Left, "it left the world"),
        (
            Departure::Failed(Failure::Error(String::from("no weights: no such file"))),
            "it failed: no weights: no such file",
        ),
        (
            Departure::Failed(Failure::Exits(-7)),
            "it failed: its process ended with exit status -7",
        ),
        (
            lost(LossKind::Closed),
            "its connection closed without goodbye: it died",
        ),
        (
            lost(LossKind::Exited { pid: 4711 }),
            "its process (pid 4711) ended without goodbye: it died",
        ),
        (
            Departure::Lost(unreachable(UnreachableEvidence::Refused, None, None)),
            "its connection broke without goodbye: its host refuses connections to the address at which it listened: \
             its process has ended, or a firewall refuses them",
        ),
        (
            Departure::Lost(unreachable(UnreachableEvidence::Closed, None, None)),
            "its connection broke without goodbye: it was closed from the other end, which did not reconnect",
        ),
        (lost(LossKind::NoAddress), "it has no address"),
        (
            lost(LossKind::ProtocolViolation(text(
                "a frame that is too long",
            ))),
            "it sent a frame that is too long",
        ),
        (
            lost(LossKind::LeftBehind {
                after: seconds(2.04),
            }),
            "it did not come to the next generation within 2.0 s, and was left behind",
        ),
        (lost(LossKind::Superseded), "the others went on without it"),
        (
            lost(LossKind::CutOff(text("cut off from rank 2"))),
            "it cannot be reached: this rank is cut off from rank 2",
        ),
        (lost(LossKind::Unknown), "it died"),
        (lost(LossKind::Reported(text("it gave up"))), "it gave up"),
        (
            Departure::Lost(seen(Exit::Code(3), None, None, "")),
            "its process ended: exit code 3",
        ),
        (
            Departure::Lost(seen(killed(), None, Some(oom()), "a\n\nb\n")),
            "its process ended: killed by SIGKILL; out of memory: the kernel's OOM killer ended 1 process of control \
             group /job/rank1 (limit 64 MiB) while it ran; stderr ended with: a | b",
        ),
        (
            Departure::Lost(seen(
                Exit::Signal {
                    signal: Signal::Segv,
                    core_dumped: true,
                },
                Some(Signal::Term),
                None,
                "",
            )),
            "its process ended: killed by SIGSEGV (core dumped), after SIGTERM from the process that started it",
        ),
        (
            Departure::Lost(seen(Exit::Unknown, None, None, "")),
            "its process ended: exit status unknown (other code of the process that started it took it away)",
        ),
        (
            Departure::Lost(ProcessEnd::in_words("killed by SIGBUS", "oh\n").into()),
            "its process ended: killed by SIGBUS; stderr ended with: oh",
        ),
        (
            Departure::Lost(timed_out().into()),
            "its connection broke without goodbye: Connection timed out (os error 110)",
        ),
        (
            Departure::Lost(unreachable(
                UnreachableEvidence::GaveUp {
                    unacknowledged: seconds(2.96),
                },
                None,
                None,
            )),
            "its connection broke without goodbye: packets come through one way only: its host gave it up, and had \
             acknowledged nothing that was sent to it for 3.0 s",
        ),
        (
            Departure::Lost(unreachable(
                UnreachableEvidence::Unheard {
                    unheard: seconds(3.0),
                    unacknowledged: seconds(3.12),
                },
                None,
                None,
            )),
            "its connection broke without goodbye: it was not heard for 3.0 s, and its host has acknowledged nothing \
             that was sent to it for 3.1 s",
        ),
        (
            last_call(unreachable(
                timed_out(),
                Some(heard.clone()),
                Some("cut off from rank 0"),
            )),
            "its connection broke without goodbye: Connection timed out (os error 110); packets come through one way \
             only: it was heard 0.3 s ago, and its host has acknowledged nothing that was sent to it for 3.0 s; cut \
             off from rank 0; its last heartbeat, 0.3 s before, told of all_reduce #4 on \"tp\", called 0.1 s before \
             that",
        ),
        (
            last_call(LossKind::Closed.into()),
            "its connection closed without goodbye: it died; its last heartbeat, 0.3 s before, told of all_reduce #4 \
             on \"tp\", called 0.1 s before that",
        ),
    ]
}

#[test]
fn the_sentences_are_these() {
    for (departure, sentence) in all() {
        assert_eq!(departure.to_string(), sentence, "{departure:?}");
    }
}

#[test]
fn a_departure_comes_over_the_wire_as_it_was_and_is_cut_off_nowhere() {
    for (departure, _) in all() {
        let bytes = wire::encode(&departure);
        assert_eq!(wire::decode(&bytes).as_ref(), Ok(&departure));
        for length in 0..bytes.len() {
            let cut = wire::decode::<Departure>(&bytes[..length]);
            assert!(cut.is_err(), "{departure:?} in {length} bytes");
        }
    }
}

#[test]
fn nothing_that_another_process_says_moves_a_cursor_or_overflows_a_clock() {
    let text = || String::from("\x1b[2Jline\r\n");
    let time = Duration::MAX;
    let end = |report| {
        let stderr = Some(text());
        LossKind::Ended(Box::new(ProcessEnd { report, stderr }))
    };
    let unreachable = |evidence| {
        LossKind::Unreachable(Box::new(UnreachableHost {
            evidence,
            heard: Some(HeardOnly {
                heard: time,
                unacknowledged: time,
            }),
            undecided: Some(text()),
        }))
    };
    let oom = OomKill {
        group: text(),
        ..oom()
    };
    let hows = [
        end(ExitReport::Text {
            words: text(),
            exit: None,
            out_of_memory: false,
        }),
        end(ExitReport::Status {
            exit: killed(),
            sent: None,
            oom: Some(oom),
        }),
        LossKind::ProtocolViolation(text()),
        LossKind::LeftBehind { after: time },
        LossKind::CutOff(text()),
        LossKind::Reported(text()),
        unreachable(UnreachableEvidence::Error(text())),
        unreachable(UnreachableEvidence::GaveUp {
            unacknowledged: time,
        }),
        unreachable(UnreachableEvidence::Unheard {
            unheard: time,
            unacknowledged: time,
        }),
    ];
    let lost = hows.map(|how| {
        Departure::Lost(Lost {
            how,
            last_call: Some(LastCall {
                call: text(),
                before: time,
            }),
        })
    });
    let failed = Departure::Failed(Failure::Error(text()));
    for departure in lost.into_iter().chain([failed]) {
        let heard: Departure = wire::decode(&wire::encode(&departure)).unwrap();
        let (said, heard) = (format!("{departure:?}"), format!("{heard:?}"));
        assert!(said.contains("\\u{1b}") || said.contains("18446744073709551615"));
        for bad in ["\\u{1b}", "\\r", "18446744073709551615"] {
            assert!(!heard.contains(bad), "{heard}");
        }
    }
}

#[test]
fn only_an_unreachable_host_may_have_a_rank_that_lives() {
    let live =
        |departure: &Departure| matches!(departure, Departure::Lost(lost) if lost.may_live());
    for (departure, sentence) in all() {
        let is_unreachable = sentence.starts_with("its connection broke without goodbye");
        assert_eq!(live(&departure), is_unreachable, "{sentence}");
        let one_way = sentence.contains("packets come through one way only");
        if let Departure::Lost(lost) = &departure {
            let is = lost
                .unreachable_host()
                .is_some_and(UnreachableHost::is_one_way);
            assert_eq!(is, one_way, "{sentence}");
        }
    }
}

#[test]
fn the_word_of_the_parent_is_the_best_account_and_an_unreachable_host_the_worst() {
    let word = seen(Exit::Code(3), None, None, "");
    let unreachable = Lost::from(UnreachableEvidence::Error(String::from("no route")));
    for how in [LossKind::Closed, LossKind::Reported(String::new())] {
        let closed = Lost::from(how);
        assert!(word < closed && closed < unreachable, "{closed:?}");
    }
}

#[test]
fn an_undecided_account_is_not_longer_than_a_page() {
    let long = "ä".repeat(5000);
    let lost = unreachable(
        UnreachableEvidence::Error(String::from("x")),
        None,
        Some(&long),
    );
    assert!(lost.to_string().len() <= 4096);
}

#[test]
fn how_a_process_ended_is_read_once_from_the_words_of_a_launcher_that_is_not_ours() {
    let signal = |signal: i32, core_dumped| {
        let signal = Signal::new(signal);
        Some(Exit::Signal {
            signal,
            core_dumped,
        })
    };
    for (words, exit, out_of_memory) in [
        ("exit code 3", Some(Exit::Code(3)), false),
        ("exit status 7", Some(Exit::Code(7)), false),
        ("killed by SIGKILL (out of memory)", signal(9, false), true),
        (
            "killed by SIGSEGV (core dumped)",
            signal(libc::SIGSEGV, true),
            false,
        ),
        ("killed by signal 40", signal(40, false), false),
        ("exit status: 3", None, false),
        ("it died", None, false),
    ] {
        let end = ProcessEnd::in_words(words, "");
        assert_eq!(end.exit(), exit, "{words}");
        assert_eq!(end.is_out_of_memory(), out_of_memory, "{words}");
        assert_eq!(end.to_string(), words);
    }
}

#[test]
fn of_what_a_process_wrote_the_last_lines_count() {
    let end = |tail: &str| ProcessEnd::in_words("exited with 1", tail).to_string();
    assert_eq!(end(" \n\n"), "exited with 1");
    assert_eq!(
        end("a\nb\n\nc\nd\ne\nf\n"),
        "exited with 1; stderr ended with: b | c | d | e | f"
    );
    let long = end(&"ä".repeat(5000));
    assert!(long.len() < 1100 && long.contains("…ä"), "{long}");
}

#[test]
fn what_another_process_says_is_cut() {
    let mut end = ProcessEnd::in_words(&"ä".repeat(100), &"b".repeat(100));
    end.cut(11);
    assert_eq!(
        end.to_string(),
        format!("{}; stderr ended with: {}", "ä".repeat(5), "b".repeat(11))
    );
}
