//! Communicators made from others: split, shrink, grow.
//!
//! The handle of a child is written when its job is over, on a thread of the library if the parent is non-blocking: its place
//! must stay valid until the parent is no longer busy. None of these functions returns `ncclInProgress`: the state of the
//! parent shows it, or, for a grow, that of the new communicator.

use std::ffi::c_int;
use std::sync::Arc;

use nccl_sys::{
    NCCL_SHRINK_ABORT, NCCL_SPLIT_NOCOLOR, ncclComm_t, ncclConfig_t, ncclResult_t, ncclUniqueId,
};

use super::guard::{call, not_null};
use super::init::{announce_version, current_device};
use crate::code::{IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, Result, SYSTEM, UNHANDLED_CUDA};
use crate::nccl::abort::AbortFlag;
use crate::nccl::bootstrap;
use crate::nccl::communicator::{
    self, ChildKind, ChildRequest, Communicator, InitRequest, Meeting, OutSlot,
};
use crate::nccl::config;
use crate::nccl::debug::{info, subsystem, warn};
use crate::nccl::environment;
use crate::nccl::group::{self, Job, JobKind};
use crate::nccl::timer;
use crate::nccl::unique_id::UniqueId;
use cuda_emulator::violations::{self, Violation, ViolationKind};

/// Ends the group that a call opened for itself. Work in the background counts as success here.
fn finish(result: Result) -> Result {
    let _ = group::record(result);
    match group::end() {
        Err(error) if error != IN_PROGRESS => Err(error),
        _ => result,
    }
}

/// `ncclCommInitChildComm`.
///
/// # Safety
/// `out` is null, or may be written to until the parent is no longer busy; `config` is null or a config.
unsafe fn queue_child(
    communicator: &Arc<Communicator>,
    kind: ChildKind,
    out: *mut ncclComm_t,
    config: *const ncclConfig_t,
    may_share: bool,
    function: &'static str,
) -> Result {
    communicator.ensure_ready()?;
    // SAFETY: the caller has checked that the pointer is not null.
    unsafe { out.write_unaligned(std::ptr::null_mut()) };
    let without = matches!(kind, ChildKind::Split { color, .. } if color == NCCL_SPLIT_NOCOLOR);
    let shares = may_share && !communicator.is_revoked();
    let child = if without {
        info!(
            subsystem::INIT,
            "Rank {} has color with NCCL_SPLIT_NOCOLOR, not creating a new communicator",
            communicator.rank
        );
        None
    } else {
        let abort = if shares {
            communicator.child_abort().take();
            Arc::clone(&communicator.abort)
        } else {
            let abort = Arc::new(AbortFlag::default());
            *communicator.child_abort() = Some(Arc::clone(&abort));
            abort
        };
        let config = if config.is_null() {
            communicator.config.inherit()
        } else {
            // SAFETY: the caller's promise.
            unsafe { config::parse(config)? }
        };
        Some((config, abort))
    };
    let number = match kind {
        ChildKind::Split { .. } => communicator.next_child(),
        ChildKind::Shrink { .. } => 0,
    };
    let request = ChildRequest {
        kind,
        number,
        child,
        shares,
        // SAFETY: the caller's promise.
        out: unsafe { OutSlot::new(out) },
        function,
    };
    group::add_job(Job {
        child: Some(Arc::new(request)),
        ..Job::new(JobKind::Child, communicator)
    })
}

pub(super) unsafe extern "C" fn ncclCommSplit(
    comm: ncclComm_t,
    color: c_int,
    key: c_int,
    newcomm: *mut ncclComm_t,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    call("ncclCommSplit", comm, || {
        group::start();
        let split = || {
            let communicator = communicator::lookup(comm, "ncclCommSplit")?;
            not_null(newcomm, "ncclCommSplit", "newcomm")?;
            let kind = ChildKind::Split { color, key };
            let share = communicator.config.split_share;
            // SAFETY: the function's contract.
            unsafe { queue_child(&communicator, kind, newcomm, config, share, "ncclCommSplit") }
        };
        finish(split())
    })
}

pub(super) unsafe extern "C" fn ncclCommShrink(
    comm: ncclComm_t,
    excludeRanksList: *mut c_int,
    excludeRanksCount: c_int,
    newcomm: *mut ncclComm_t,
    config: *mut ncclConfig_t,
    shrinkFlags: c_int,
) -> ncclResult_t {
    call("ncclCommShrink", comm, || {
        let aborts = shrinkFlags & NCCL_SHRINK_ABORT != 0;
        if comm.is_null() && aborts {
            let text = "ncclCommShrink of a null communicator with NCCL_SHRINK_ABORT: NCCL crashes";
            violations::record(Violation::new(ViolationKind::Misuse, None, text.to_owned()));
        }
        group::start();
        let shrink = || {
            let communicator = communicator::lookup(comm, "ncclCommShrink")?;
            if aborts {
                communicator::stop_launches(&communicator);
            }
            not_null(newcomm, "ncclCommShrink", "newcomm")?;
            not_null(excludeRanksList, "ncclCommShrink", "excludeRanksList")?;
            let count = usize::try_from(excludeRanksCount).unwrap_or(0);
            if count == 0 {
                return Err(INVALID_ARGUMENT);
            }
            // SAFETY: the function's contract: as many numbers, which NCCL sorts in place.
            let list = unsafe { std::slice::from_raw_parts_mut(excludeRanksList, count) };
            list.sort_unstable();
            if list.contains(&communicator.rank) {
                return Err(INVALID_ARGUMENT);
            }
            let excluded = list.to_vec();
            let kind = ChildKind::Shrink { excluded };
            let share = !aborts && communicator.config.shrink_share;
            // SAFETY: the function's contract.
            unsafe {
                queue_child(
                    &communicator,
                    kind,
                    newcomm,
                    config,
                    share,
                    "ncclCommShrink",
                )
            }
        };
        finish(shrink())
    })
}

pub(super) unsafe extern "C" fn ncclCommGetUniqueId(
    comm: ncclComm_t,
    uniqueId: *mut ncclUniqueId,
) -> ncclResult_t {
    call("ncclCommGetUniqueId", comm, || {
        let communicator = communicator::lookup(comm, "ncclCommGetUniqueId")?;
        communicator.ensure_ready()?;
        not_null(uniqueId, "CommGetUniqueId", "uniqueId")?;
        if environment::text("NCCL_COMM_ID").is_some() {
            warn!("ncclCommGetUniqueId should not be called when NCCL_COMM_ID is set");
            return Err(INVALID_USAGE);
        }
        let session = communicator.session().ok_or(INVALID_ARGUMENT)?;
        // The number of the grow, counted on all ranks when it begins.
        let number = communicator.children() + 1;
        let id = communicator::handle_id(session, number);
        bootstrap::start_root(&id).map_err(|error| {
            warn!("Bootstrap : no socket could be opened: {error}");
            SYSTEM
        })?;
        communicator::send_handle(session, number);
        // SAFETY: not null, and by the function's contract the caller's to write to.
        unsafe { uniqueId.write_unaligned(id.to_c()) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn ncclCommGrow(
    comm: ncclComm_t,
    nRanks: c_int,
    uniqueId: *const ncclUniqueId,
    rank: c_int,
    newcomm: *mut ncclComm_t,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    call("ncclCommGrow", comm, || {
        if newcomm.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        if nRanks <= 0 {
            warn!("ncclCommGrow: total ranks must be positive, got {nRanks}");
            return Err(INVALID_ARGUMENT);
        }
        if let Some(parent) = communicator::peek(comm)
            && nRanks <= parent.ranks
        {
            warn!(
                "ncclCommGrow: total ranks {nRanks} is less than current ranks {}",
                parent.ranks
            );
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: not null, and by the function's contract the caller's to write to.
        unsafe { newcomm.write_unaligned(std::ptr::null_mut()) };
        group::start();
        let grow = || {
            let (meeting, own, parent) = if comm.is_null() {
                // SAFETY: the function's contract.
                let id = unsafe { new_rank(nRanks, uniqueId, rank)? };
                (Meeting::At(vec![id]), rank, None)
            } else {
                let parent = communicator::lookup(comm, "ncclCommGrow")?;
                // SAFETY: the function's contract.
                let id = unsafe { old_rank(&parent, uniqueId, rank)? };
                let own = parent.rank;
                (Meeting::Grow(id, Arc::clone(&parent)), own, Some(parent))
            };
            info!(
                subsystem::INIT,
                "ncclCommGrow: {} rank creating new communicator with {nRanks} total ranks",
                if parent.is_some() { "existing" } else { "new" }
            );
            let config = match &parent {
                Some(parent) if config.is_null() => parent.config.inherit(),
                // SAFETY: the function's contract.
                _ => unsafe { config::parse(config)? },
            };
            let id = match &meeting {
                Meeting::At(ids) => &ids[0],
                Meeting::Grow(id, _) => id,
            };
            let hash = communicator::hash_of_grown(id, nRanks);
            let device = parent
                .as_ref()
                .map_or_else(current_device, |parent| parent.device);
            let blocking = config.blocking;
            let communicator = Arc::new(Communicator::new(own, nRanks, device, hash, config));
            let handle = communicator.publish()?;
            if !blocking {
                timer::watch(&communicator);
            }
            if let Some(session) = parent.as_ref().and_then(|parent| parent.session()) {
                communicator.abort.wakes(Arc::downgrade(session));
            }
            // SAFETY: as above. Written before the job begins, so that another thread can abort it.
            unsafe { newcomm.write_unaligned(handle) };
            group::add_job(Job {
                request: Some(Arc::new(InitRequest {
                    meeting,
                    function: "ncclCommGrow",
                })),
                ..Job::new(JobKind::Init, &communicator)
            })
        };
        finish(grow())
    })
}

/// Checks the arguments of a joining rank, and returns its id.
///
/// # Safety
/// `id` is null or an id.
unsafe fn new_rank(ranks: c_int, id: *const ncclUniqueId, rank: c_int) -> Result<UniqueId> {
    if rank < 0 {
        warn!("ncclCommGrow: new ranks must pass valid rank >= 0, got {rank}");
        return Err(INVALID_ARGUMENT);
    }
    if id.is_null() {
        warn!("ncclCommGrow: new ranks must pass non-NULL uniqueId");
        return Err(INVALID_ARGUMENT);
    }
    if rank >= ranks {
        warn!("ncclCommGrow: new rank {rank} exceeds total ranks {ranks}");
        return Err(INVALID_ARGUMENT);
    }
    announce_version(rank);
    let cuda = |error: cuda_emulator::driver::CUresult| {
        warn!("Cuda failure {} on device {}", error.0, current_device());
        UNHANDLED_CUDA
    };
    cuda_emulator::driver::context::primary(current_device())
        .map_err(cuda)?
        .check()
        .map_err(cuda)?;
    // SAFETY: not null, so an id by the caller's promise.
    UniqueId::from_c(&unsafe { id.read_unaligned() })
}

/// Checks the arguments of a rank of the parent; the first and the last rank wait for the coordinator.
///
/// # Safety
/// `id` is null or an id.
unsafe fn old_rank(
    parent: &Arc<Communicator>,
    id: *const ncclUniqueId,
    rank: c_int,
) -> Result<UniqueId> {
    parent.ensure_ready()?;
    if rank != -1 {
        warn!("ncclCommGrow: existing ranks must pass rank=-1, got {rank}");
        return Err(INVALID_ARGUMENT);
    }
    let number = parent.next_child();
    let session = parent.session().ok_or(INVALID_ARGUMENT)?;
    if parent.ranks > 1 {
        communicator::await_handle(parent, session, number)?;
        return Ok(communicator::handle_id(session, number));
    }
    if id.is_null() {
        warn!("ncclCommGrow: the only rank of a communicator must pass the id of the grow");
        return Err(SYSTEM);
    }
    // SAFETY: not null, so an id by the caller's promise.
    UniqueId::from_c(&unsafe { id.read_unaligned() })
}
