//! Child communicators, made by `ncclCommSplit` and `ncclCommShrink`.
//!
//! ```text
//! split   every rank of the parent says its color and key; those of one color are a child
//! shrink  every survivor knows the list of those that are not
//! ```
//!
//! The first rank of a child starts a root whose id all its ranks can compute, and they meet there.
//! Meanwhile, and after a failure, an abort of the parent aborts the child: the child shares the
//! parent's flag, or the parent raises the child's flag along with its own.

use std::sync::Arc;

use nccl_sys::{NCCL_SPLIT_NOCOLOR, ncclComm_t};

use super::announce::Birth;
use super::init::establish;
use super::peers;
use super::session::Session;
use super::state::Communicator;
use crate::code::{INTERNAL, INVALID_ARGUMENT, REMOTE, Result, SYSTEM};
use crate::nccl::abort::AbortFlag;
use crate::nccl::bootstrap;
use crate::nccl::config::Config;
use crate::nccl::debug::{self, warn};
use crate::nccl::timer;
use crate::nccl::unique_id::{UniqueId, mix};

/// The caller's place for a handle, written at the end of the job.
pub(crate) struct OutSlot(*mut ncclComm_t);

// SAFETY: by the contract of the functions that fill one later, it stays valid until the
// communicator is not busy any more, and no other thread accesses it before.
unsafe impl Send for OutSlot {}
// SAFETY: as above; one job writes to it.
unsafe impl Sync for OutSlot {}

impl OutSlot {
    /// # Safety
    /// `out` may be written to until the job that fills it is over.
    pub(crate) unsafe fn new(out: *mut ncclComm_t) -> Self {
        Self(out)
    }

    fn fill(&self, handle: ncclComm_t) {
        // SAFETY: the promise made at `new`.
        unsafe { self.0.write_unaligned(handle) };
    }
}

/// The choice of a child's ranks among those of the parent.
pub(crate) enum ChildKind {
    Split {
        color: i32,
        key: i32,
    },
    /// All ranks but these, in order.
    Shrink {
        excluded: Vec<i32>,
    },
}

/// The arguments of the job besides the parent.
pub(crate) struct ChildRequest {
    pub(crate) kind: ChildKind,
    /// The number of the split.
    pub(crate) number: u64,
    /// The child's configuration and abort flag; `None` for a rank that gets no child.
    pub(crate) child: Option<(Config, Arc<AbortFlag>)>,
    /// Whether the child shares the parent's resources.
    pub(crate) shares: bool,
    pub(crate) out: OutSlot,
    /// The called function, for the log.
    pub(crate) function: &'static str,
}

/// Runs the job of a split or a shrink. Also hands out a child whose creation failed, so that the
/// caller can abort it.
pub(crate) fn create_child(parent: &Arc<Communicator>, request: &ChildRequest) -> Result {
    let _device = debug::on_device(parent.device);
    let mut made = None;
    let result = try_create(parent, request, &mut made);
    let handle = match (made, &request.child) {
        (Some(handle), _) => handle,
        (None, Some((config, abort))) => {
            let ruin = Communicator::new(0, 0, parent.device, 0, config.clone());
            Arc::new(ruin.with_abort(Arc::clone(abort))).publish()?
        }
        (None, None) => std::ptr::null_mut(),
    };
    request.out.fill(handle);
    if result.is_ok() && request.child.is_some() {
        parent.child_abort().take();
    }
    result
}

fn try_create(
    parent: &Arc<Communicator>,
    request: &ChildRequest,
    made: &mut Option<ncclComm_t>,
) -> Result {
    let session = parent.session().ok_or(INTERNAL)?;
    let aborted = || {
        let child = request.child.as_ref();
        parent.abort.is_raised() || child.is_some_and(|(_, abort)| abort.is_raised())
    };
    let (members, ranks, color, key) = match &request.kind {
        ChildKind::Split { color, key } => {
            let members = gather(session, *color, *key, &aborted)?;
            let ranks = members.len();
            (members, ranks, *color, *key)
        }
        ChildKind::Shrink { excluded } => {
            let (members, ranks) = survivors(session.ranks(), excluded);
            (members, ranks, 0, parent.rank)
        }
    };
    let Some((config, abort)) = &request.child else {
        return Ok(());
    };
    let rank = members
        .iter()
        .position(|&member| member == session.rank)
        .ok_or(INTERNAL)?;
    if rank >= ranks {
        // The list names a rank twice, or a rank that does not exist.
        warn!("rank {rank} exceeds ndev={ranks}");
        return Err(INVALID_ARGUMENT);
    }
    let hash = mix(&[parent.hash, request.number, color as u64]);
    let mut child = Communicator::new(
        rank as i32,
        ranks as i32,
        parent.device,
        hash,
        config.clone(),
    )
    .with_abort(Arc::clone(abort));
    if request.shares {
        child = child.sharing(parent);
    }
    let child = Arc::new(child);
    let handle = child.publish()?;
    *made = Some(handle);
    if !config.blocking {
        timer::watch(&child);
    }
    let birth = Birth::of_child(
        &child,
        request.function,
        (parent, request.number, color, key),
    );
    birth.start();
    // Only the parent's ranks know its token. A shrink has no number: its list identifies it.
    let id = match &request.kind {
        ChildKind::Split { .. } => {
            UniqueId::derived("split", &[session.token, request.number, color as u64])
        }
        ChildKind::Shrink { .. } => {
            let numbers: Vec<u64> = std::iter::once(session.token)
                .chain(members.iter().map(|&member| member as u64))
                .collect();
            UniqueId::derived("shrink", &numbers)
        }
    };
    if !request.shares {
        abort.wakes(Arc::downgrade(session));
    }
    let bootstrap = establish(&child, |who| {
        if rank == 0 {
            start_root(&id, &aborted)?;
            session.segment.ring_others(session.rank);
        }
        let bell = Some(&session.own().bell);
        bootstrap::join_soon(&id, bell, ranks, rank, who, &aborted)
    })?;
    birth.complete(bootstrap);
    Ok(())
}

/// Starts the root. Retries while the root of a failed attempt exists, which ends with its last rank.
fn start_root(id: &UniqueId, aborted: &dyn Fn() -> bool) -> Result {
    loop {
        match bootstrap::start_root(id) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() != std::io::ErrorKind::AddrInUse => {
                warn!("Bootstrap : no socket could be opened: {error}");
                return Err(SYSTEM);
            }
            Err(_) if aborted() => return Err(INTERNAL),
            Err(_) => std::thread::sleep(crate::nccl::abort::TICK),
        }
    }
}

/// The all-gather of a split: waits for color and key of every rank of the parent. Returns the
/// parent's ranks of this color, by key and then by rank; no ranks for a rank without a color.
fn gather(
    session: &Session,
    color: i32,
    key: i32,
    aborted: &dyn Fn() -> bool,
) -> Result<Vec<usize>> {
    let number = session.next_split();
    session.segment.say_split(session.rank, number, color, key);
    let said = |rank| session.segment.split(rank, number);
    peers::wait_for_each(session, aborted, |rank| said(rank).is_some())?;
    let mut members = Vec::new();
    for rank in 0..session.ranks() {
        // A rank that has failed since may have taken part in other splits.
        let (its_color, its_key) = said(rank).ok_or(REMOTE)?;
        if its_color == color && color != NCCL_SPLIT_NOCOLOR {
            members.push((its_key, rank));
        }
    }
    // Stable: ranks with the same key keep their order.
    members.sort_by_key(|&(key, _)| key);
    Ok(members.into_iter().map(|(_, rank)| rank).collect())
}

/// Returns the ranks that are not on a sorted list, and their nominal number: each entry of the list
/// subtracts one, whether it names a rank or not.
fn survivors(ranks: usize, excluded: &[i32]) -> (Vec<usize>, usize) {
    let mut list = excluded.iter().copied().peekable();
    let members = (0..ranks)
        .filter(|&rank| list.next_if_eq(&(rank as i32)).is_none())
        .collect();
    (members, ranks.saturating_sub(excluded.len()))
}

#[cfg(test)]
mod tests {
    use super::survivors;

    #[test]
    fn every_entry_of_a_list_takes_a_rank_away_whether_it_names_one_or_not() {
        assert_eq!(survivors(4, &[1, 3]), (vec![0, 2], 2));
        // NCCL walks the list along the ranks, and stops at an entry that names no further rank.
        assert_eq!(survivors(4, &[1, 1, 3]), (vec![0, 2, 3], 1));
        assert_eq!(survivors(3, &[7]), (vec![0, 1, 2], 2));
    }
}
