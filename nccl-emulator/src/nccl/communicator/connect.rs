//! Connecting on first use.
//!
//! NCCL sets up the connection to a peer at the first message between the two, and the rings at the
//! first collective of a communicator; the call that ends the group waits for the peer to do the same.
//! So does the emulator: a rank whose peer never makes the matching call hangs on the
//! host, not on the stream, until the communicator is aborted.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::connections::bit;
use super::peers;
use super::route::Route;
use super::session::Session;
use super::state::Communicator;
use crate::code::{INTERNAL, Result, SYSTEM};
use crate::nccl::debug::{info, subsystem, warn};
use crate::transport::Direction;

/// Logs the route of a pair's data in NCCL's terms: inside a host on the sender, between hosts on both
/// ranks.
fn announce(session: &Session, source: usize, destination: usize, direction: Direction) {
    let infos = session.infos();
    let peer = match direction {
        Direction::Send => destination,
        Direction::Receive => source,
    };
    let via = match (session.route(peer), direction) {
        (Route::Network, Direction::Send) => "[send] via NET/Emulator/0",
        (Route::Network, Direction::Receive) => "[receive] via NET/Emulator/0",
        (_, Direction::Receive) => return,
        (Route::SharedMemory, Direction::Send) => "via SHM/direct/direct",
        (Route::PeerToPeer, Direction::Send)
            if infos[source].process == infos[destination].process =>
        {
            "via P2P/direct pointer"
        }
        (Route::PeerToPeer, Direction::Send) => "via P2P/CUMEM",
    };
    info!(
        subsystem::INIT | subsystem::P2P,
        "Channel 00/1 : {source}[{}] -> {destination}[{}] {via}",
        infos[source].device,
        infos[destination].device
    );
}

/// Tells the peers that this rank is ready. Must be followed by [`finish_peers`] with the same
/// list.
pub(crate) fn start_peers(session: &Session, wanted: &[(usize, Direction)]) {
    for &(peer, direction) in wanted {
        let (source, destination) = ends(session.rank, peer, direction);
        announce(session, source, destination, direction);
        session
            .segment
            .exchange(source, destination)
            .connect(direction);
        session.segment.block(peer).bell.ring();
    }
}

/// Waits until the peers are ready too.
pub(crate) fn finish_peers(
    communicator: &Communicator,
    session: &Session,
    wanted: &[(usize, Direction)],
) -> Result {
    if wanted.is_empty() {
        return Ok(());
    }
    needs_descriptor()?;
    let opposite = |direction| match direction {
        Direction::Send => Direction::Receive,
        Direction::Receive => Direction::Send,
    };
    for &(peer, direction) in wanted {
        let (source, destination) = ends(session.rank, peer, direction);
        let exchange = session.segment.exchange(source, destination);
        wait(communicator, session, peer, || {
            exchange.is_connected(opposite(direction))
        })?;
    }
    let mut connections = communicator.connections.lock();
    if wanted.iter().any(|&(peer, _)| !session.is_local(peer)) {
        communicator.family.needs_proxy();
    }
    connections.peers.resize(session.ranks(), 0);
    for &(peer, direction) in wanted {
        connections.peers[peer] |= bit(direction);
    }
    Ok(())
}

/// Tells all ranks that this rank is ready for an algorithm. Must be followed by
/// [`finish_algorithm`].
pub(crate) fn start_algorithm(session: &Session, algorithm: u32) {
    let (own, ranks) = (session.rank, session.ranks());
    announce(session, own, (own + 1) % ranks, Direction::Send);
    announce(session, (own + ranks - 1) % ranks, own, Direction::Receive);
    session
        .own()
        .algorithms
        .fetch_or(algorithm, Ordering::SeqCst);
    session.segment.ring_others(session.rank);
}

/// Waits until all ranks are ready for the algorithm too.
pub(crate) fn finish_algorithm(
    communicator: &Communicator,
    session: &Session,
    algorithm: u32,
) -> Result {
    needs_descriptor()?;
    for rank in 0..session.ranks() {
        let block = session.segment.block(rank);
        wait(communicator, session, rank, || {
            block.algorithms.load(Ordering::SeqCst) & algorithm != 0
        })?;
    }
    if (0..session.ranks()).any(|rank| !session.is_local(rank)) {
        communicator.family.needs_proxy();
    }
    communicator.connections.lock().algorithms |= algorithm;
    info!(subsystem::INIT, "Connected all rings, use ring PXN 0 GDR 0");
    Ok(())
}

/// Checks that a descriptor is free: NCCL sends a descriptor of its buffers to the peer, or opens a socket
/// to it.
fn needs_descriptor() -> Result {
    match std::fs::File::open("/dev/null") {
        Err(error) if error.raw_os_error() == Some(libc::EMFILE) => {
            warn!("Call to socket failed: {error}");
            Err(SYSTEM)
        }
        _ => Ok(()),
    }
}

fn ends(own: usize, peer: usize, direction: Direction) -> (usize, usize) {
    match direction {
        Direction::Send => (own, peer),
        Direction::Receive => (peer, own),
    }
}

/// Waits until a peer is ready.
fn wait(
    communicator: &Communicator,
    session: &Session,
    peer: usize,
    condition: impl Fn() -> bool,
) -> Result {
    let bell = &session.own().bell;
    loop {
        let seen = bell.value();
        if condition() {
            return Ok(());
        }
        if communicator.abort.is_raised() {
            return Err(INTERNAL);
        }
        if peers::has_hung_up(session, peer) && !condition() {
            return peers::dial(communicator, session, peer);
        }
        bell.wait(seen, Duration::from_millis(100));
    }
}
