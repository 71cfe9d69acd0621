//! The limits of clients' connections: their number, and the time of a client.
//!
//! ```text
//!        up to --connections          up to RESERVED more                  beyond
//! ──────────────────────────── ┬ ─────────────────────────────────── ┬ ──────────────────────────
//!  everything is answered       │  /livez, /readyz, /metrics; others  │  they wait until one of these
//!                               │  503 and Retry-After; one request   │  is over: not long, since the
//!                               │  each, and little time for it       │  reserve is not kept
//! ```
//!
//! So monitoring clients get an answer however many completions are running. If silent connections fill the reserve, the answer
//! is delayed by one second for each time that they fill it. Slots and the queue limit the number of concurrent completions.
//!
//! The server closes the connection of a client that does not send its request within `--client-timeout`, takes nothing of
//! an answer for that long, or sends no further request for that long.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::net::sockopt::set_tcp_user_timeout;
use rustix::process::{Resource, getrlimit};
use tokio::net::{TcpListener, TcpStream};
use tokio::select;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{sleep, timeout};

use super::router;
use super::server::Server;
use crate::front::options::Options;

/// The reserved connections for monitoring clients, besides `--connections`.
const RESERVED: usize = 32;
/// How long a client on a reserved connection may take to send its headers, and then its body.
pub(super) const RESERVED_TIMEOUT: Duration = Duration::from_secs(1);
/// The default number of connections, if the descriptor limit allows it.
const USUAL: usize = 1024;
/// Other open files: of the front itself, and of each rank (pipes, its connection, those of the control plane, twice
/// during a restart).
const OWN_FILES: usize = 64;
const FILES_OF_A_RANK: usize = 16;

/// How long the ending server waits for the ends of answers.
const LINGER: Duration = Duration::from_secs(1);
/// The pause after a failed accept, for want of descriptors or memory.
const PAUSE: Duration = Duration::from_millis(100);

/// The limits of clients.
#[derive(Clone, Copy, Debug)]
pub(in crate::front) struct Limits {
    connections: usize,
    client_timeout: Duration,
}

impl Limits {
    /// Returns the requested limits, or the most connections that the descriptor limit allows.
    ///
    /// # Errors
    /// If the limits need more descriptors than this process may open.
    pub(in crate::front) fn new(options: &Options) -> Result<Self, String> {
        let most = getrlimit(Resource::Nofile).current;
        let most = most.map_or(usize::MAX, |most| {
            usize::try_from(most).unwrap_or(usize::MAX)
        });
        Ok(Self {
            connections: connections(options.connections, options.ranks, most)?,
            client_timeout: options.client_timeout,
        })
    }
}

fn connections(wished: Option<usize>, ranks: usize, most: usize) -> Result<usize, String> {
    let others = OWN_FILES + RESERVED + FILES_OF_A_RANK * ranks;
    let room = most.saturating_sub(others);
    match wished {
        Some(wished) if wished > room => Err(format!(
            "--connections {wished}: this process may have {most} open files, which is enough for {room}; \
             `ulimit -n {}` allows more",
            others + wished
        )),
        Some(wished) => Ok(wished),
        None if room == 0 => Err(format!(
            "this process may have {most} open files, and needs {others} beside those of clients: \
             `ulimit -n {}` allows more",
            others + USUAL
        )),
        None => Ok(room.min(USUAL)),
    }
}

/// Serves until `over`, and then until all begun answers are over, at most for [`LINGER`].
pub(in crate::front) async fn serve(
    listener: TcpListener,
    server: &Arc<Server>,
    limits: Limits,
    over: impl Future<Output = ()>,
) {
    let (ending, is_ending) = watch::channel(());
    let accepting = accept(listener, server, limits, is_ending);
    select! {
        () = accepting => {}
        () = over => {}
    }
    // The first tells the connections, the second waits for them.
    ending.send_replace(());
    let _ = timeout(LINGER, ending.closed()).await;
}

async fn accept(
    listener: TcpListener,
    server: &Arc<Server>,
    limits: Limits,
    is_ending: watch::Receiver<()>,
) {
    let places = Places {
        usual: Arc::new(Semaphore::new(limits.connections)),
        reserved: Arc::new(Semaphore::new(RESERVED)),
    };
    let all = router::all(Arc::clone(server));
    let narrow = router::narrow(Arc::clone(server));
    loop {
        let stream = accept_one(&listener).await;
        let place = places.take().await;
        let connection = match place.reserved {
            false => Connection {
                router: all.clone(),
                header_timeout: limits.client_timeout,
                keep_alive: true,
            },
            true => Connection {
                router: narrow.clone(),
                header_timeout: limits.client_timeout.min(RESERVED_TIMEOUT),
                keep_alive: false,
            },
        };
        // Send each piece of a text at once, not together with the next.
        let _ = stream.set_nodelay(true);
        // Where the system lacks this option, a client that does not read keeps its place.
        let taking = u32::try_from(limits.client_timeout.as_millis()).unwrap_or(u32::MAX);
        let _ = set_tcp_user_timeout(&stream, taking);
        let is_ending = is_ending.clone();
        tokio::spawn(async move {
            connection.answer(stream, is_ending).await;
            drop(place);
        });
    }
}

async fn accept_one(listener: &TcpListener) -> TcpStream {
    let mut told = false;
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            // The client disconnected before the accept.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                if !std::mem::replace(&mut told, true) {
                    note!("no client can be accepted: {error}");
                }
                sleep(PAUSE).await;
            }
        }
    }
}

struct Places {
    usual: Arc<Semaphore>,
    reserved: Arc<Semaphore>,
}

/// A connection's place, freed on drop.
struct Place {
    reserved: bool,
    _permit: OwnedSemaphorePermit,
}

impl Places {
    /// Takes the next free place, an ordinary one if possible.
    async fn take(&self) -> Place {
        let (usual, reserved) = (Arc::clone(&self.usual), Arc::clone(&self.reserved));
        let (reserved, permit) = select! {
            biased;
            permit = usual.acquire_owned() => (false, permit),
            permit = reserved.acquire_owned() => (true, permit),
        };
        Place {
            reserved,
            _permit: permit.expect("nobody closes the semaphores"),
        }
    }
}

struct Connection {
    router: Router,
    header_timeout: Duration,
    keep_alive: bool,
}

impl Connection {
    async fn answer(self, stream: TcpStream, mut is_ending: watch::Receiver<()>) {
        let mut builder = http1::Builder::new();
        builder
            .timer(TokioTimer::new())
            .header_read_timeout(self.header_timeout)
            .keep_alive(self.keep_alive);
        let service = TowerToHyperService::new(self.router);
        let mut answering = pin!(builder.serve_connection(TokioIo::new(stream), service));
        // A client that disconnected or was too slow is no error of the server.
        select! {
            _ = answering.as_mut() => return,
            _ = is_ending.changed() => {}
        }
        answering.as_mut().graceful_shutdown();
        let _ = answering.await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_as_many_connections_as_files_may_be_open() {
        assert_eq!(connections(None, 2, usize::MAX), Ok(USUAL));
        assert_eq!(connections(None, 2, 256), Ok(256 - 64 - 32 - 32));
        assert_eq!(connections(Some(20_000), 2, usize::MAX), Ok(20_000));
        let error = connections(Some(200), 2, 256).unwrap_err();
        assert!(
            error.contains("--connections 200") && error.contains("enough for 128"),
            "{error}"
        );
        assert!(error.contains("`ulimit -n 328`"), "{error}");
        assert_eq!(connections(Some(200), 2, 328), Ok(200));
        let error = connections(None, 2, 100).unwrap_err();
        assert!(error.contains("ulimit -n"), "{error}");
    }
}
