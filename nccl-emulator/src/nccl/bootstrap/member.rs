//! A rank's side of the bootstrap.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::wire::{MAX_BYTES, Message};
use crate::code::{INTERNAL, INVALID_USAGE, REMOTE, Result, SYSTEM};
use crate::nccl::abort::TICK;
use crate::nccl::communicator::Session;
use crate::nccl::debug::{info, subsystem, warn};
use crate::nccl::environment;
use crate::nccl::unique_id::UniqueId;
use crate::transport::{RankInfo, Received, Segment, Socket, wait_readable};
use cuda_emulator::exec::Bell;
use cuda_emulator::memory::{self, Mapping};

/// Whether the caller has given up.
type Aborted<'a> = &'a dyn Fn() -> bool;

/// Joins the communicator of `ids` as `rank` of `ranks`, and returns when all ranks have joined. The
/// ranks meet at the root of the first id; the roots of the others are dismissed.
pub(crate) fn join(
    ids: &[UniqueId],
    ranks: usize,
    rank: usize,
    info: RankInfo,
    aborted: Aborted<'_>,
) -> Result<Session> {
    let socket = connect(&ids[0], aborted)?;
    let session = meet(socket, &ids[0], ranks, rank, info, aborted)?;
    if rank == 0 {
        for other in &ids[1..] {
            // No other rank dismisses this root. If its process is gone, so is the root.
            if let Ok(socket) = Socket::connect(&other.address()) {
                let _ = socket.send(&Message::Dismissed { magic: other.magic }.encode(), &[]);
            }
        }
    }
    Ok(session)
}

/// Joins as [`join`] does, at a root that a rank of the same parent is about to start. Waits for the root
/// without a limit; its start rings `bell`.
pub(crate) fn join_soon(
    id: &UniqueId,
    bell: Option<&Bell>,
    ranks: usize,
    rank: usize,
    info: RankInfo,
    aborted: Aborted<'_>,
) -> Result<Session> {
    let socket = loop {
        let seen = bell.map(Bell::value);
        match Socket::connect(&id.address()) {
            Ok(socket) => break socket,
            Err(error) if error.kind() != io::ErrorKind::ConnectionRefused => {
                warn!("Bootstrap : {error}");
                return Err(SYSTEM);
            }
            Err(_) if aborted() => return Err(INTERNAL),
            Err(_) => match (bell, seen) {
                (Some(bell), Some(seen)) => drop(bell.wait(seen, TICK)),
                _ => thread::sleep(TICK),
            },
        }
    };
    meet(socket, id, ranks, rank, info, aborted)
}

fn meet(
    socket: Socket,
    id: &UniqueId,
    ranks: usize,
    rank: usize,
    info: RankInfo,
    aborted: Aborted<'_>,
) -> Result<Session> {
    let pool = memory::pool(info.device).map_err(|error| {
        warn!(
            "The memory of device {} cannot be set up: CUDA error {}",
            info.device, error.0
        );
        crate::code::UNHANDLED_CUDA
    })?;
    let hello = Message::Hello {
        magic: id.magic,
        ranks: ranks as i32,
        rank: rank as i32,
        info: Box::new(info),
    };
    match socket
        .send(&hello.encode(), &[pool.fd()])
        .map_err(Trouble::Io)
        .and_then(|()| receive_parts(&socket, ranks, aborted))
    {
        Ok(Some(parts)) => Ok(parts.into_session(rank)),
        Ok(None) => Err(INTERNAL),
        Err(Trouble::Refused(why)) => {
            warn!("Bootstrap : {why}");
            Err(INVALID_USAGE)
        }
        Err(Trouble::Io(error)) => {
            warn!("Bootstrap : {error}");
            Err(SYSTEM)
        }
    }
}

/// Connects to the root.
fn connect(id: &UniqueId, aborted: Aborted<'_>) -> Result<Socket> {
    dial(id.name(), aborted, || Socket::connect(&id.address()))
}

/// Connects to the listener of that name. Retries a refused connection as often as NCCL does: a root may be about to start
/// (`NCCL_COMM_ID`), or be gone for good.
pub(crate) fn dial<T>(
    name: &str,
    aborted: Aborted<'_>,
    connect: impl Fn() -> io::Result<T>,
) -> Result<T> {
    let attempts = environment::integer("NCCL_SOCKET_RETRY_CNT")
        .unwrap_or(34)
        .max(0);
    let unit = environment::integer("NCCL_SOCKET_RETRY_SLEEP_MSEC")
        .unwrap_or(100)
        .max(0);
    for attempt in 0.. {
        let error = match connect() {
            Ok(connection) => return Ok(connection),
            Err(error) => error,
        };
        if error.kind() != io::ErrorKind::ConnectionRefused {
            warn!("ncclOsSocketStartConnect: connect to @{name} failed : {error}");
            return Err(SYSTEM);
        }
        if attempt == attempts {
            warn!(
                "ncclOsSocketStartConnect: connect to @{name} returned Connection refused, exceeded error retry count \
                 after {} attempts",
                attempt + 1
            );
            return Err(REMOTE);
        }
        let pause = Duration::from_millis(u64::from((unit * (attempt + 1)).unsigned_abs()));
        info!(
            subsystem::INIT | subsystem::NET,
            "ncclOsSocketStartConnect: connect to @{name} returned Connection refused, retrying ({}/{attempts}) after \
             sleep for {} msec",
            attempt + 1,
            pause.as_millis()
        );
        // Like NCCL, sleep without a check of the abort flag.
        thread::sleep(pause);
        if aborted() {
            return Err(INTERNAL);
        }
    }
    unreachable!("the loop returns")
}

enum Trouble {
    Refused(String),
    Io(io::Error),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// The segment and the pools from the root. Pools are mapped as they arrive: a process with many ranks as
/// threads could not hold all their descriptors at once.
struct Parts {
    token: u64,
    segment: Segment,
    /// The index of each rank's pool.
    of_ranks: Vec<usize>,
    /// The expected token of each pool, in the order of their arrival.
    tokens: Vec<u128>,
    pools: Vec<Arc<Mapping>>,
}

impl Parts {
    /// Creates the parts from the contents of the welcome.
    fn new(token: u64, pools: usize, segment: &OwnedFd, ranks: usize) -> io::Result<Self> {
        let segment = Segment::open(segment.as_fd(), ranks).map_err(|error| {
            io::Error::other(format!(
                "the communicator's segment cannot be mapped: {error}"
            ))
        })?;
        let mut tokens = vec![None; pools];
        let mut of_ranks = Vec::with_capacity(ranks);
        for rank in 0..ranks {
            let info = segment.info(rank);
            let token = u128::from(info.pool_token[0]) << 64 | u128::from(info.pool_token[1]);
            let of_rank = tokens.get_mut(info.pool as usize);
            *of_rank.ok_or_else(|| {
                io::Error::other(format!("the root does not send the pool of rank {rank}"))
            })? = Some(token);
            of_ranks.push(info.pool as usize);
        }
        let tokens: Option<_> = tokens.into_iter().collect();
        Ok(Self {
            token,
            segment,
            of_ranks,
            tokens: tokens.ok_or_else(|| io::Error::other("the root sends a pool of no rank"))?,
            pools: Vec::with_capacity(pools),
        })
    }

    fn add(&mut self, pool: OwnedFd) -> io::Result<()> {
        let token = self.tokens.get(self.pools.len());
        let token = *token.ok_or_else(|| io::Error::other("the root sends too many pools"))?;
        self.pools.push(
            memory::import(pool, token).map_err(|error| io::Error::other(error.to_string()))?,
        );
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.pools.len() == self.tokens.len()
    }

    fn into_session(self, rank: usize) -> Session {
        let pool = |&at: &usize| Arc::clone(&self.pools[at]);
        let pools = self.of_ranks.iter().map(pool).collect();
        Session::new(self.segment, rank, self.token, pools)
    }
}

/// Waits for the welcome, the pools, and the end of the connection. Returns `None` when aborted. If the
/// root ends too early, this waits for ever: NCCL's ranks then wait for a neighbour that does not know
/// of them.
fn receive_parts(
    socket: &Socket,
    ranks: usize,
    aborted: Aborted<'_>,
) -> std::result::Result<Option<Parts>, Trouble> {
    let mut parts: Option<Parts> = None;
    let mut open = true;
    let invalid = || {
        Trouble::Io(io::Error::new(
            io::ErrorKind::InvalidData,
            "unexpected message from the root",
        ))
    };
    loop {
        if aborted() {
            return Ok(None);
        }
        if !open {
            if parts.as_ref().is_some_and(Parts::is_complete) {
                return Ok(parts);
            }
            thread::sleep(TICK);
            continue;
        }
        let mut fds = [libc::pollfd {
            fd: socket.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        }];
        if wait_readable(&mut fds, Some(TICK))? == 0 {
            continue;
        }
        let mut buffer = [0; MAX_BYTES];
        match socket.receive(&mut buffer)? {
            Received::Closed => open = false,
            Received::Message(bytes, mut fds) => {
                match Message::decode(&buffer[..bytes]).ok_or_else(invalid)? {
                    Message::Welcome { token, pools } => {
                        let segment = fds.pop().ok_or_else(invalid)?;
                        parts = Some(Parts::new(token, pools as usize, &segment, ranks)?);
                    }
                    Message::Pools => {
                        let parts = parts.as_mut().ok_or_else(invalid)?;
                        fds.into_iter().try_for_each(|pool| parts.add(pool))?;
                    }
                    Message::Refused { why } => return Err(Trouble::Refused(why)),
                    _ => return Err(invalid()),
                }
            }
        }
        if open && parts.as_ref().is_some_and(Parts::is_complete) {
            // The root continues with the next rank. A root that is gone needs no answer.
            let _ = socket.send(&Message::Received.encode(), &[]);
        }
    }
}
