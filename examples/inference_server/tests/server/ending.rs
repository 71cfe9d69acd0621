//! The end of the server, orderly and otherwise: nothing of it remains.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

use crate::client::{Stream, complete, get};
use crate::program::{Server, lives, signal};
use crate::{Question, reference, until};

/// Returns the files of a server's processes that should not outlive them.
fn files(server: &Server) -> BTreeSet<PathBuf> {
    let mut files = BTreeSet::new();
    for pid in server.ranks() {
        let read = |what| std::fs::read(format!("/proc/{pid}/{what}")).unwrap();
        let maps = read("maps");
        for line in String::from_utf8_lossy(&maps).lines() {
            if let Some(at) = line
                .find("/dev/shm/")
                .filter(|_| !line.ends_with("(deleted)"))
            {
                files.insert(PathBuf::from(&line[at..]));
            }
        }
        for variable in read("environ").split(|&byte| byte == 0) {
            let variable = String::from_utf8_lossy(variable).into_owned();
            if let Some((name, value)) = variable.split_once('=')
                && name.starts_with("NCCL_RUN_")
            {
                let path = value.strip_prefix("unix:").unwrap_or(value);
                files.extend(path.starts_with('/').then(|| PathBuf::from(path)));
            }
        }
    }
    assert!(files.iter().any(|file| file.exists()), "{files:?}");
    files
}

/// Waits until processes and files are gone.
fn nothing_is_left(pids: &[u32], files: &BTreeSet<PathBuf>) {
    let begun = Instant::now();
    until("that all processes are gone", || {
        (!pids.iter().any(|&pid| lives(pid))).then_some(())
    });
    println!("all ranks were gone after {:?}", begun.elapsed());
    until("that all files are gone", || {
        (!files.iter().any(|file| file.exists())).then_some(())
    });
}

#[test]
fn a_server_that_is_killed_leaves_neither_processes_nor_files() {
    let mut server = Server::start(&["--ranks", "4"]);
    let (ranks, files) = (server.ranks(), files(&server));
    let mut stream = Stream::new(&server.url, &Question::long(50).streaming());
    stream.read(3);
    signal(server.pid(), Signal::KILL);
    let begun = Instant::now();
    nothing_is_left(&ranks, &files);
    // The kernel ends the ranks with the front, or they read the end of their connection. An operation would fail after 10 s.
    assert!(begun.elapsed().as_secs() < 10, "{:?}", begun.elapsed());
    assert!(!server.until_ended().success());
}

#[test]
fn a_server_that_is_told_to_end_finishes_what_it_has_begun() {
    let mut server = Server::start(&["--ranks", "2", "--grace", "100"]);
    let (ranks, files) = (server.ranks(), files(&server));
    let question = Question::long(51);
    let mut stream = Stream::new(&server.url, &question.streaming());
    stream.read(3);
    signal(server.pid(), Signal::TERM);
    until("that it is not ready", || {
        let answer = get(&format!("{}/readyz", server.url));
        (answer.status == 503).then(|| {
            assert_eq!(answer.json()["cause"], "the server is ending");
        })
    });
    assert_eq!(
        stream.finish().0,
        reference(std::slice::from_ref(&question))[0]
    );
    assert_eq!(server.until_ended().code(), Some(0));
    nothing_is_left(&ranks, &files);
}

#[test]
fn a_server_that_is_told_twice_does_not_wait_for_a_rank_that_does_not_end() {
    let mut server = Server::start(&["--ranks", "2"]);
    let (ranks, files) = (server.ranks(), files(&server));
    signal(ranks[1], Signal::STOP);
    signal(server.pid(), Signal::TERM);
    until("that it was heard", || {
        let answer = get(&format!("{}/readyz", server.url)).json();
        (answer["cause"] == "the server is ending").then_some(())
    });
    std::thread::sleep(Duration::from_millis(300));
    signal(server.pid(), Signal::TERM);
    // Not 0, as after the 3 s that the ranks have to end in order.
    assert_eq!(server.until_ended().code(), Some(1));
    nothing_is_left(&ranks, &files);
}

#[test]
fn a_server_that_is_told_twice_ends_at_once() {
    let mut server = Server::start(&["--ranks", "2", "--grace", "3600"]);
    let (ranks, files) = (server.ranks(), files(&server));
    let mut body = Question::long(52).streaming();
    body["max_tokens"] = json!(1000);
    let mut stream = Stream::new(&server.url, &body);
    stream.read(3);
    let url = server.url.clone();
    body["stream"] = json!(false);
    let answer = std::thread::scope(|scope| {
        let asking = scope.spawn(|| complete(&url, &body));
        until("both run", || {
            (server.metric("inference_requests_running") == 2.0).then_some(())
        });
        signal(server.pid(), Signal::INT);
        // Two signals that arrive at once count as one, so the second one waits until the server has handled the first.
        until("that it was heard", || {
            let answer = get(&format!("{}/readyz", server.url)).json();
            (answer["cause"] == "the server is ending").then_some(())
        });
        signal(server.pid(), Signal::INT);
        asking.join().unwrap()
    });
    // Both clients get the reason for the end of their text.
    while stream.next() {}
    assert!(!stream.done);
    assert_eq!(
        (answer.status, answer.retry_after.as_deref()),
        (503, Some("1"))
    );
    for error in [answer.json()["error"].clone(), stream.error.unwrap()] {
        assert_eq!(error["message"], "the server is ending");
        assert_eq!(error["type"], "server_error");
    }
    assert_eq!(server.until_ended().code(), Some(0));
    nothing_is_left(&ranks, &files);
}
