//! A rank's side of the bootstrap.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use super::wire::{MAX_BYTES, Message};
use crate::exec::Bell;
use crate::memory;
use crate::nccl::abort::TICK;
use crate::nccl::code::{INTERNAL, INVALID_USAGE, REMOTE, Result, SYSTEM};
use crate::nccl::communicator::Session;
use crate::nccl::debug::{info, subsystem, warn};
use crate::nccl::environment;
use crate::nccl::unique_id::UniqueId;
use crate::transport::{RankInfo, Received, Segment, Socket, wait_readable};

/// Whether the caller has given up.
type Aborted<'a> = &'a dyn Fn() -> bool;

/// Joins the communicator of `ids` as `rank` of `ranks`, and returns when everybody has. The first
/// id is the meeting point; the roots of the others are sent home.
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
            // Nobody else will; if its process is gone, so is the root.
            if let Ok(socket) = Socket::connect(&other.address()) {
                let _ = socket.send(&Message::Dismissed { magic: other.magic }.encode(), &[]);
            }
        }
    }
    Ok(session)
}

/// As [`join`], at a root that a rank of the same parent is about to start, however long that takes.
/// It rings `bell` then.
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
        crate::nccl::code::UNHANDLED_CUDA
    })?;
    let hello = Message::Hello {
        magic: id.magic,
        ranks: ranks as i32,
        rank: rank as i32,
        info: Box::new(info),
    };
    let parts = match socket
        .send(&hello.encode(), &[pool.fd()])
        .map_err(Trouble::Io)
        .and_then(|()| receive_parts(&socket, aborted))
    {
        Ok(Some(parts)) => parts,
        Ok(None) => return Err(INTERNAL),
        Err(Trouble::Refused(why)) => {
            warn!("Bootstrap : {why}");
            return Err(INVALID_USAGE);
        }
        Err(Trouble::Io(error)) => {
            warn!("Bootstrap : {error}");
            return Err(SYSTEM);
        }
    };
    drop(socket);
    assemble(parts, ranks, rank).map_err(|why| {
        warn!("Bootstrap : {why}");
        SYSTEM
    })
}

/// Connects to the root. Retries while nobody listens, as long as NCCL does: the root may be about
/// to start (`NCCL_COMM_ID`), or be gone for good.
fn connect(id: &UniqueId, aborted: Aborted<'_>) -> Result<Socket> {
    let attempts = environment::integer("NCCL_SOCKET_RETRY_CNT")
        .unwrap_or(34)
        .max(0);
    let unit = environment::integer("NCCL_SOCKET_RETRY_SLEEP_MSEC")
        .unwrap_or(100)
        .max(0);
    for attempt in 0.. {
        let error = match Socket::connect(&id.address()) {
            Ok(socket) => return Ok(socket),
            Err(error) => error,
        };
        let name = id.name();
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
        let until = Instant::now() + pause;
        while let Some(left) = until.checked_duration_since(Instant::now()) {
            if aborted() {
                return Err(INTERNAL);
            }
            thread::sleep(left.min(TICK));
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

struct Parts {
    token: u64,
    segment: OwnedFd,
    pools: Vec<OwnedFd>,
}

/// Waits for the welcome, the pools, and the end of the connection; `None` when aborted. If the root
/// goes too early, this waits for ever: NCCL's ranks then wait for a neighbour that does not know of
/// them.
fn receive_parts(
    socket: &Socket,
    aborted: Aborted<'_>,
) -> std::result::Result<Option<Parts>, Trouble> {
    let mut welcome: Option<(u64, u32, OwnedFd)> = None;
    let mut pools = Vec::new();
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
        let complete = |(_, count, _): &(u64, u32, OwnedFd)| *count as usize == pools.len();
        if !open && welcome.as_ref().is_some_and(complete) {
            return Ok(welcome.map(|(token, _, segment)| Parts {
                token,
                segment,
                pools,
            }));
        }
        if !open {
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
                        welcome = Some((token, pools, fds.pop().ok_or_else(invalid)?));
                    }
                    Message::Pools => pools.append(&mut fds),
                    Message::Refused { why } => return Err(Trouble::Refused(why)),
                    _ => return Err(invalid()),
                }
            }
        }
        let complete = |(_, count, _): &(u64, u32, OwnedFd)| *count as usize == pools.len();
        if open && welcome.as_ref().is_some_and(complete) {
            // The root goes on to the next rank; if it is gone, nobody minds.
            let _ = socket.send(&Message::Received.encode(), &[]);
        }
    }
}

/// Maps what was received.
fn assemble(parts: Parts, ranks: usize, rank: usize) -> std::result::Result<Session, String> {
    let segment = Segment::open(parts.segment.as_fd(), ranks)
        .map_err(|error| format!("the communicator's segment cannot be mapped: {error}"))?;
    let mut fds: Vec<Option<OwnedFd>> = parts.pools.into_iter().map(Some).collect();
    let mut mapped = vec![None; fds.len()];
    let mut pools = Vec::with_capacity(ranks);
    for rank in 0..ranks {
        let info = segment.info(rank);
        let at = info.pool as usize;
        if let Some(fd) = fds.get_mut(at).and_then(Option::take) {
            let token = u128::from(info.pool_token[0]) << 64 | u128::from(info.pool_token[1]);
            mapped[at] = Some(memory::import(fd, token).map_err(|error| error.to_string())?);
        }
        let pool = mapped.get(at).cloned().flatten();
        pools.push(pool.ok_or_else(|| format!("the root did not send the pool of rank {rank}"))?);
    }
    Ok(Session::new(segment, rank, parts.token, pools))
}
