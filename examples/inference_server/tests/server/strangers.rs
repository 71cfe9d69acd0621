//! Other users of the host that connect to the ranks' socket.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::process::{Signal, Uid};
use rustix::thread::set_thread_res_uid;

use crate::program::{Server, signal};
use crate::until;

/// The user `nobody`, on most hosts.
const ANOTHER: u32 = 65_534;

/// Returns the name of the socket, which every user can read.
fn name_of_socket(server: &Server) -> String {
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    let begin = format!("@inference-server-{}-", server.pid());
    let mut words = sockets.split_whitespace();
    let found = words.find(|word| word.starts_with(&begin)).unwrap();
    found[1..].to_owned()
}

/// Connects continuously as another user, until it is dropped.
struct Flood {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<rustix::io::Result<()>>>,
}

impl Flood {
    fn at(address: SocketAddr) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&over);
        let thread = std::thread::spawn(move || {
            let user = Uid::from_raw(ANOTHER);
            // Changes the user of this thread only.
            set_thread_res_uid(user, user, user)?;
            while !is_over.load(Ordering::Relaxed) {
                let many = (0..100).map(|_| UnixStream::connect_addr(&address));
                drop(many.collect::<Vec<_>>());
            }
            Ok(())
        });
        let thread = Some(thread);
        Self { over, thread }
    }

    /// Returns the error that ended the connections.
    fn end(mut self) -> rustix::io::Result<()> {
        self.over.store(true, Ordering::Relaxed);
        let thread = self.thread.take();
        thread.map_or(Ok(()), |thread| thread.join().unwrap())
    }

    fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_rank_is_replaced_while_another_user_floods_the_ranks_socket() {
    let server = Server::start(&["--ranks", "2"]);
    let address = SocketAddr::from_abstract_name(name_of_socket(&server)).unwrap();
    let flood = Flood::at(address);
    let strangers = || server.metric("inference_strangers_total");
    until("strangers", || {
        (strangers() > 1000.0 || flood.has_ended()).then_some(())
    });
    if flood.has_ended() {
        let why = flood.end().unwrap_err();
        println!("NOT TESTED: nobody can become another user here (needs root): {why}");
        return;
    }
    let before = server.ranks();
    signal(before[1], Signal::KILL);
    until("another process", || {
        let now = server.ranks();
        (now[1] != before[1] && now[1] != 0).then_some(())
    });
    server.until_ready();
    // The other rank was not replaced, either.
    assert_eq!(server.ranks()[0], before[0]);
    println!("{} strangers", strangers());
    flood.end().unwrap();
    // The server does not print a line for each connection.
    assert!(server.lines() < 100, "{}", server.lines());
}
