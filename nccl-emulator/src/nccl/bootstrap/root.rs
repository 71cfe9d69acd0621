//! The root: waits for all ranks of one communicator, then sends each the pools of all.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread;

use super::wire::{MAX_BYTES, Message};
use crate::nccl::abort::TICK;
use crate::nccl::debug::warn;
use crate::nccl::unique_id::{UniqueId, random};
use crate::options::options;
use crate::transport::{
    DESCRIPTORS_PER_MESSAGE, Listener, RankInfo, Received, Segment, Socket, wait_readable,
};

/// Starts the root of `id` in this process.
pub(crate) fn start(id: &UniqueId) -> io::Result<()> {
    let listener = Listener::bind(&id.address())?;
    raise_descriptor_limit();
    let magic = id.magic;
    thread::Builder::new()
        .name("nccl-root".to_owned())
        .spawn(move || {
            // An error ends the root. The ranks then wait for ever, as with NCCL's root.
            if let Err(error) = serve(listener, magic) {
                warn!("Bootstrap Root : {error}");
            }
        })?;
    Ok(())
}

/// Raises the soft limit of descriptors: a root holds one for each rank and one for each pool.
/// NCCL's root raises the limit as well.
fn raise_descriptor_limit() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the struct is ours to write to and to read from.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 && limit.rlim_cur < limit.rlim_max
        {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
        }
    }
}

struct Member {
    socket: Socket,
    info: RankInfo,
    pool: OwnedFd,
}

/// The connections of a root: those without a hello so far, and the ranks.
struct Roll {
    strangers: Vec<Socket>,
    /// The members by rank; `None` before the rank joins, and after it closed its connection.
    members: Vec<Option<Member>>,
    joined: Vec<bool>,
    left: usize,
    /// Whether a warning has said that connections cannot be accepted now.
    warned: bool,
}

enum Verdict {
    Wait,
    Complete,
    /// The mismatch, and the socket of the rank that came last.
    Mismatch(String, Socket),
    Dismissed,
}

fn serve(listener: Listener, magic: u64) -> io::Result<()> {
    let mut roll = Roll {
        strangers: Vec::new(),
        members: Vec::new(),
        joined: Vec::new(),
        left: 0,
        warned: false,
    };
    loop {
        match roll.next(&listener, magic)? {
            Verdict::Wait if roll.deserted() => return Ok(()),
            Verdict::Wait => {}
            Verdict::Dismissed => return Ok(()),
            Verdict::Complete => {
                // Before any rank is released: a later connection with this id finds no root.
                drop(listener);
                return roll.hand_out();
            }
            Verdict::Mismatch(why, socket) => {
                warn!("Bootstrap Root : {why}");
                if options().strict {
                    let refusal = Message::Refused { why }.encode();
                    for socket in roll
                        .members
                        .iter()
                        .flatten()
                        .map(|member| &member.socket)
                        .chain([&socket])
                    {
                        // A rank that is gone needs no refusal.
                        let _ = socket.send(&refusal, &[]);
                    }
                }
                return Ok(());
            }
        }
    }
}

/// Whether the error says that this process or the host has no room for another descriptor now.
fn is_shortage(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)
    )
}

impl Roll {
    /// Whether all ranks that had joined are gone again.
    fn deserted(&self) -> bool {
        let joined = self.joined.iter().filter(|&&joined| joined).count();
        joined > 0 && self.left == joined
    }

    /// Waits for the next event and handles it.
    fn next(&mut self, listener: &Listener, magic: u64) -> io::Result<Verdict> {
        let watch = |fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        let mut fds = vec![watch(listener.as_raw_fd())];
        fds.extend(
            self.strangers
                .iter()
                .map(|socket| watch(socket.as_raw_fd())),
        );
        // A negative descriptor is skipped.
        fds.extend(self.members.iter().map(|member| {
            watch(
                member
                    .as_ref()
                    .map_or(-1, |member| member.socket.as_raw_fd()),
            )
        }));
        wait_readable(&mut fds, None)?;
        let strangers = self.strangers.len();
        for (rank, fd) in fds[1 + strangers..].iter().enumerate() {
            // A rank sends nothing before its welcome, so the rank has closed its connection.
            if fd.revents != 0 && self.members[rank].take().is_some() {
                self.left += 1;
            }
        }
        for at in (0..strangers).rev().filter(|&at| fds[1 + at].revents != 0) {
            let socket = self.strangers.swap_remove(at);
            match self.admit(socket, magic)? {
                Verdict::Wait => {}
                verdict => return Ok(verdict),
            }
        }
        if fds[0].revents != 0 {
            match listener.accept() {
                Ok(socket) => self.strangers.extend(socket),
                Err(error) if is_shortage(&error) => {
                    // The connection waits in the queue until there is room for it.
                    if !std::mem::replace(&mut self.warned, true) {
                        warn!("Bootstrap Root : {error}");
                    }
                    thread::sleep(TICK);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Verdict::Wait)
    }

    /// Reads the hello of a connection. Drops the connection for any other message.
    fn admit(&mut self, socket: Socket, magic: u64) -> io::Result<Verdict> {
        let mut buffer = [0; MAX_BYTES];
        let (bytes, mut fds) = match socket.receive(&mut buffer) {
            Ok(Received::Message(bytes, fds)) => (bytes, fds),
            Ok(Received::Closed) => return Ok(Verdict::Wait),
            Err(error) => {
                // The rank would wait for ever.
                warn!("Bootstrap Root : {error}");
                let why = format!("the root of the communicator: {error}");
                let _ = socket.send(&Message::Refused { why }.encode(), &[]);
                return Ok(Verdict::Wait);
            }
        };
        match (Message::decode(&buffer[..bytes]), fds.pop()) {
            (Some(Message::Dismissed { magic: theirs }), _) if theirs == magic => {
                Ok(Verdict::Dismissed)
            }
            (
                Some(Message::Hello {
                    magic: theirs,
                    ranks,
                    rank,
                    info,
                }),
                Some(pool),
            ) if theirs == magic => {
                if self.members.is_empty() {
                    let ranks = usize::try_from(ranks).unwrap_or(0);
                    self.members.resize_with(ranks, || None);
                    self.joined.resize(ranks, false);
                }
                let first = self.members.len();
                if usize::try_from(ranks) != Ok(first) {
                    let why = format!(
                        "mismatch in info from procs, nranks {first} vs {ranks}, nroots 1 vs 1, iroot 0 vs 0, offset 0 vs 0"
                    );
                    return Ok(Verdict::Mismatch(why, socket));
                }
                let Some(at) = usize::try_from(rank).ok().filter(|&rank| rank < first) else {
                    return Ok(Verdict::Mismatch(
                        format!("localId {rank} is out of range"),
                        socket,
                    ));
                };
                if std::mem::replace(&mut self.joined[at], true) {
                    let why = format!("rank {rank} of {ranks} ranks has already checked in");
                    return Ok(Verdict::Mismatch(why, socket));
                }
                self.members[at] = Some(Member {
                    socket,
                    info: *info,
                    pool,
                });
                let complete = self.members.iter().all(Option::is_some);
                Ok(if complete {
                    Verdict::Complete
                } else {
                    Verdict::Wait
                })
            }
            _ => Ok(Verdict::Wait),
        }
    }

    /// Sends every rank the segment and the pools, one rank after the other: descriptors in flight
    /// are limited.
    fn hand_out(self) -> io::Result<()> {
        let mut members: Vec<Member> = self.members.into_iter().flatten().collect();
        let mut distinct: Vec<usize> = Vec::new();
        for rank in 0..members.len() {
            let token = members[rank].info.pool_token;
            let known = distinct
                .iter()
                .position(|&other| members[other].info.pool_token == token);
            members[rank].info.pool = known.unwrap_or_else(|| {
                distinct.push(rank);
                distinct.len() - 1
            }) as u32;
        }
        let infos: Vec<RankInfo> = members.iter().map(|member| member.info).collect();
        let (_segment, fd) = Segment::create(&infos)?;
        let pools: Vec<BorrowedFd<'_>> = distinct
            .iter()
            .map(|&rank| members[rank].pool.as_fd())
            .collect();
        let welcome = Message::Welcome {
            token: random(),
            pools: pools.len() as u32,
        }
        .encode();
        for member in &members {
            // The other ranks are welcomed even if one is gone; they find out when they wait for
            // it.
            let _ = welcome_one(&member.socket, &welcome, fd.as_fd(), &pools);
        }
        // All ranks are released at the end: the first action of a released rank may be to end
        // this process.
        members.iter().for_each(|member| member.socket.hang_up());
        Ok(())
    }
}

fn welcome_one(
    socket: &Socket,
    welcome: &[u8],
    segment: BorrowedFd<'_>,
    pools: &[BorrowedFd<'_>],
) -> io::Result<()> {
    socket.send(welcome, &[segment])?;
    for some in pools.chunks(DESCRIPTORS_PER_MESSAGE) {
        socket.send(&Message::Pools.encode(), some)?;
    }
    socket.receive(&mut [0; MAX_BYTES])?;
    Ok(())
}
