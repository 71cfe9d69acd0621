//! Creating a communicator: the job behind every `ncclCommInitRank…`.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock, Weak};
use std::time::Instant;

use super::announce::Birth;
use super::clique::Clique;
use super::identity;
use super::nodes::nodes;
use super::peers;
use super::session::Session;
use super::state::Communicator;
use crate::code::{INVALID_USAGE, Result, UNHANDLED_CUDA};
use crate::nccl::bootstrap;
use crate::nccl::debug::{self, info, subsystem, warn};
use crate::nccl::environment;
use crate::nccl::network;
use crate::nccl::profiler;
use crate::nccl::ras;
use crate::nccl::unique_id::UniqueId;
use crate::version;
use cuda_emulator::memory;
use cuda_emulator::sync::Mutex;

/// The meeting point of the ranks of a new communicator.
pub(crate) enum Meeting {
    /// A root that a process has started or is about to start; the first id counts.
    At(Vec<UniqueId>),
    /// The root of a grow. The ranks of the parent know its id before it exists.
    Grow(UniqueId, Arc<Communicator>),
}

/// The arguments of the job besides the communicator.
pub(crate) struct InitRequest {
    pub(crate) meeting: Meeting,
    /// The called function, for the log.
    pub(crate) function: &'static str,
}

/// Meets the other ranks and waits until all of them are ready. Waits for ever, unless aborted.
pub(crate) fn init(communicator: &Arc<Communicator>, request: &InitRequest) -> Result {
    let _device = debug::on_device(communicator.device);
    let (rank, ranks) = (communicator.rank as usize, communicator.ranks as usize);
    let birth = Birth::new(communicator, request.function);
    network::check_network()?;
    if version::is_at_least(2, 32, 0) {
        // A successful init leaves this text as the last error.
        warn!("RMA/Socket : rma_socket requires GDRCopy; and GDR Copy is not available");
    }
    birth.start();
    let abort = &communicator.abort;
    let bootstrap = establish(communicator, |who| match &request.meeting {
        Meeting::At(ids) => bootstrap::join(ids, ranks, rank, who, &|| abort.is_raised()),
        Meeting::Grow(id, parent) => {
            let _inside = parent.enter();
            let bell = parent.session().map(|session| &session.own().bell);
            bootstrap::join_soon(id, bell, ranks, rank, who, &|| {
                abort.is_raised() || parent.abort.is_raised()
            })
        }
    })?;
    birth.complete(bootstrap);
    Ok(())
}

/// Initializes a communicator; `join` meets the other ranks. Returns the duration of `join` in seconds.
pub(super) fn establish(
    communicator: &Arc<Communicator>,
    join: impl FnOnce(crate::transport::RankInfo) -> Result<Session>,
) -> Result<f64> {
    let (rank, ranks) = (communicator.rank as usize, communicator.ranks as usize);
    let device = communicator.device;
    let pool = memory::pool(device).map_err(|error| {
        warn!(
            "Cuda failure {} 'the memory of device {device} cannot be set up'",
            error.0
        );
        UNHANDLED_CUDA
    })?;
    let began = Instant::now();
    let session = join(identity::rank_info(device, pool, ras::place()))?;
    let bootstrap = began.elapsed().as_secs_f64();
    check_ranks(&session)?;
    let session = Arc::new(session);
    communicator.abort.wakes(Arc::downgrade(&session));
    let nodes = nodes(&session);
    let local: Vec<usize> = (0..ranks)
        .filter(|&other| nodes[other] == nodes[rank])
        .collect();
    info!(
        subsystem::INIT,
        "comm {:#x} rank {rank} nRanks {ranks} nNodes {} localRanks {} localRank {} MNNVL 0",
        communicator.handle(),
        nodes.iter().max().map_or(0, |last| last + 1),
        local.len(),
        local.iter().position(|&other| other == rank).unwrap_or(0)
    );
    let name = communicator.config.name.as_deref();
    let nodes = nodes.iter().max().map_or(0, |last| last + 1);
    if let Some(profiler) = profiler::init(
        communicator.hash,
        name,
        nodes,
        communicator.ranks,
        communicator.rank,
    ) {
        communicator
            .profiler
            .set(profiler)
            .unwrap_or_else(|_| unreachable!("init runs once"));
    }
    let clique = clique_of(&session);
    clique.join(communicator);
    communicator
        .clique
        .set(clique)
        .unwrap_or_else(|_| unreachable!("init runs once"));
    communicator
        .session
        .set(Arc::clone(&session))
        .unwrap_or_else(|_| unreachable!("init runs once"));
    ras::join(communicator);
    wait_for_all(&session, communicator)?;
    communicator.initialized.store(true, Ordering::Release);
    Ok(bootstrap)
}

static CLIQUES: LazyLock<Mutex<HashMap<u64, Weak<Clique<Communicator>>>>> =
    LazyLock::new(Mutex::default);

/// Returns the clique of a session's communicator in this process.
fn clique_of(session: &Session) -> Arc<Clique<Communicator>> {
    let mut cliques = CLIQUES.lock();
    cliques.retain(|_, clique| clique.strong_count() > 0);
    if let Some(clique) = cliques.get(&session.token).and_then(Weak::upgrade) {
        return clique;
    }
    let clique = Arc::new(Clique::default());
    cliques.insert(session.token, Arc::downgrade(&clique));
    clique
}

/// Checks all ranks of the communicator, on each rank by itself.
fn check_ranks(session: &Session) -> Result {
    let own = session.info(session.rank);
    let shared_gpus = environment::switch("NCCL_MULTI_RANK_GPU_ENABLE");
    for (rank, info) in session.infos().iter().enumerate() {
        if info.version != own.version && version::is_at_least(2, 23, 4) {
            warn!(
                "Mismatched NCCL version detected : rank {rank} version {} rank {} version {}",
                info.version, session.rank, own.version
            );
            return Err(INVALID_USAGE);
        }
        let shared = |other: &crate::transport::RankInfo| {
            other.host_hash == info.host_hash && other.uuid == info.uuid
        };
        if !shared_gpus && session.infos()[..rank].iter().any(shared) {
            warn!(
                "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this \
                 configuration."
            );
            return Err(INVALID_USAGE);
        }
    }
    Ok(())
}

/// The last step of every rank's init: waits until all ranks have mapped the segment and the pools.
fn wait_for_all(session: &Session, communicator: &Communicator) -> Result {
    session.own().ready.store(1, Ordering::SeqCst);
    let ready = &session.segment.header().ready;
    if ready.fetch_add(1, Ordering::SeqCst) + 1 == session.ranks() as u32 {
        session.segment.ring_others(session.rank);
        return Ok(());
    }
    peers::wait_for_each(session, &|| communicator.abort.is_raised(), |rank| {
        session.segment.block(rank).ready.load(Ordering::SeqCst) != 0
    })
}
