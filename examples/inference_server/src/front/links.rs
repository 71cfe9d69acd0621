//! The connections of the ranks: an abstract Unix socket, and a thread for each connection.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::time::Duration;

use rustix::net::sockopt::socket_peercred;

use super::engine::Event;
use crate::wire::{self, FromRank};

/// The timeout of a write to a rank: longer than any living rank needs, which reads all messages.
const SLOW: Duration = Duration::from_secs(2);

/// The number of connections of other users, which were closed at once.
static STRANGERS: AtomicU64 = AtomicU64::new(0);

pub(super) fn strangers() -> u64 {
    STRANGERS.load(Ordering::Relaxed)
}

/// An event of a connection.
pub(super) enum Heard {
    /// The connection is open: the process id by the kernel, and the stream to write to.
    Opened(u32, UnixStream),
    Said(FromRank),
    Closed,
}

/// Listens, and returns the name of the socket for the ranks.
pub(super) fn listen(to: Sender<Event>) -> io::Result<String> {
    let mut chance = [0; 16];
    rustix::rand::getrandom(&mut chance, rustix::rand::GetRandomFlags::empty())?;
    let chance: String = chance.iter().map(|byte| format!("{byte:02x}")).collect();
    let name = format!("inference-server-{}-{chance}", std::process::id());
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
    let accept = move || {
        // Each connection has a unique number.
        for (link, stream) in listener.incoming().enumerate() {
            match stream {
                Ok(stream) => {
                    if let Err(error) = open(stream, link, to.clone()) {
                        note!("somebody could not connect: {error}");
                    }
                }
                // The process may be out of descriptors for a while.
                Err(error) => {
                    note!("nobody can connect: {error}");
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
        }
    };
    std::thread::Builder::new()
        .name(String::from("links"))
        .spawn(accept)?;
    Ok(name)
}

fn open(stream: UnixStream, link: usize, to: Sender<Event>) -> io::Result<()> {
    let peer = socket_peercred(&stream)?;
    // Every user of the host can find the name. Any work for such a connection would keep ranks waiting.
    if peer.uid != rustix::process::geteuid() {
        STRANGERS.fetch_add(1, Ordering::Relaxed);
        return Ok(());
    }
    stream.set_write_timeout(Some(SLOW))?;
    let mut reading = stream.try_clone()?;
    let pid = u32::try_from(peer.pid.as_raw_pid()).unwrap_or_default();
    let read = move || {
        let tell = |heard| to.send(Event::Link(link, heard)).is_ok();
        if !tell(Heard::Opened(pid, stream)) {
            return;
        }
        while let Ok(Some(message)) = wire::read(&mut reading) {
            if !tell(Heard::Said(message)) {
                return;
            }
        }
        tell(Heard::Closed);
    };
    let thread = std::thread::Builder::new().name(format!("link {link}"));
    thread.spawn(read).map(drop)
}
