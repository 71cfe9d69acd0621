//! Children: what `ncclCommSplit` and `ncclCommShrink` make of a communicator.
//!
//! ```text
//! split   every rank of the parent says its color and key; those of one color are a child
//! shrink  every survivor knows the list of those that are not
//! ```
//!
//! The first rank of a child starts a root whose place all of them can compute, and they meet there.
//! While that lasts the parent's abort breaks it: the child shares the parent's flag, or the parent
//! raises the child's along with its own. After a failure it still does.

use std::sync::Arc;
use std::time::Duration;

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

/// A sleep that only a ring should end; it ends by itself because a process that is killed does not
/// ring.
const SAFETY_NET: Duration = Duration::from_millis(100);

/// Where the caller wants a handle; written when the job is over.
pub(crate) struct OutSlot(*mut ncclComm_t);

// SAFETY: by the contract of the functions that fill one later, it stays valid until the
// communicator is not busy any more, and nobody else touches it before.
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

/// Which ranks of the parent a child has.
pub(crate) enum ChildKind {
    Split {
        color: i32,
        key: i32,
    },
    /// All but these, in order.
    Shrink {
        excluded: Vec<i32>,
    },
}

/// What the job needs besides the parent.
pub(crate) struct ChildRequest {
    pub(crate) kind: ChildKind,
    /// The split's number.
    pub(crate) number: u64,
    /// Its configuration and its abort flag; none for a rank that gets no child.
    pub(crate) child: Option<(Config, Arc<AbortFlag>)>,
    /// It shares the parent's resources.
    pub(crate) shares: bool,
    pub(crate) out: OutSlot,
    /// The function that was called, for the log.
    pub(crate) function: &'static str,
}

/// The job of a split and a shrink. A child that was not made is handed out as well, to be aborted.
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
            let Some(members) = gather(session, *color, *key, &aborted)? else {
                return Err(INTERNAL);
            };
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
        // The list names a rank twice, or one that does not exist.
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
    // The parent's token is known to its ranks alone. A shrink has no number: its ranks know that they
    // mean the same one by its list.
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

/// Starts the root; one of an attempt that failed goes when its last rank has.
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

/// The all-gather of a split: waits for what every rank of the parent says. The parent's ranks of this
/// color, by key and then by rank; nobody's for a rank without a color. `None` when aborted.
fn gather(
    session: &Session,
    color: i32,
    key: i32,
    aborted: &dyn Fn() -> bool,
) -> Result<Option<Vec<usize>>> {
    let number = session.next_split();
    session.segment.say_split(session.rank, number, color, key);
    let bell = &session.own().bell;
    let mut members = Vec::new();
    for rank in 0..session.ranks() {
        let (its_color, its_key) = loop {
            let seen = bell.value();
            if let Some(said) = session.segment.split(rank, number) {
                break said;
            }
            if aborted() {
                return Ok(None);
            }
            if peers::has_hung_up(session, rank) && session.segment.split(rank, number).is_none() {
                peers::warn_of_closed_connection(session, rank);
                return Err(REMOTE);
            }
            bell.wait(seen, SAFETY_NET);
        };
        if its_color == color && color != NCCL_SPLIT_NOCOLOR {
            members.push((its_key, rank));
        }
    }
    // Stable: ranks with the same key keep their order.
    members.sort_by_key(|&(key, _)| key);
    Ok(Some(members.into_iter().map(|(_, rank)| rank).collect()))
}

/// The ranks that are not on a sorted list, and how many there should be: each entry takes one away,
/// whether it names somebody or not.
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
        // NCCL walks the list along the ranks, and stops at an entry that is none.
        assert_eq!(survivors(4, &[1, 1, 3]), (vec![0, 2, 3], 1));
        assert_eq!(survivors(3, &[7]), (vec![0, 1, 2], 2));
    }
}
