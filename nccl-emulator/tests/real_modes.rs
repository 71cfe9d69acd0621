//! What launch mode `BlockingChild` builds on in NVIDIA's own library: an idle parent that does not block, and a blocking
//! child, split from it, that shares its abort flag and carries the data.

mod ranks;
mod real;

use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::thread;
use std::time::Duration;

use nccl_sys::{NCCL_CONFIG_INITIALIZER, ncclComm, ncclComm_t, ncclConfig_t, ncclUniqueId};
use ranks::{Process, Rank, is_child_of, nccl};
use real::{Buffers, P2P, SHM, SOCKETS, last_error, on_each, stays, version, within};

const IN_PROGRESS: u32 = 7;
/// Longer than any call takes that does not wait.
const SOON: Duration = Duration::from_secs(20);

/// A communicator's handle that another thread may use.
#[derive(Clone, Copy)]
struct Handle(ncclComm_t);

// SAFETY: a number for NCCL; the tests say which thread uses it when.
unsafe impl Send for Handle {}

impl Handle {
    fn abort(self) -> u32 {
        nccl!(ncclCommAbort(self.0))
    }

    fn revoke(self) -> u32 {
        nccl!(ncclCommRevoke(self.0, 0))
    }
}

/// Memory to which NCCL writes a communicator, perhaps some time later; never freed.
fn place() -> &'static AtomicPtr<ncclComm> {
    Box::leak(Box::default())
}

fn config(blocking: i32, shares: i32) -> ncclConfig_t {
    let mut config = NCCL_CONFIG_INITIALIZER;
    (config.blocking, config.splitShare) = (blocking, shares);
    config
}

/// A rank on the device of `other`, with a stream of its own.
fn beside(other: &Rank, ranks: i32, rank: i32, comm: ncclComm_t) -> Rank {
    Rank {
        rank,
        ranks,
        comm,
        gpu: other.gpu.clone(),
        stream: other.gpu.new_stream().unwrap(),
    }
}

/// The idle parent of the first `ranks` processes; none on the others.
fn idle(process: &Process, ranks: i32) -> Option<Rank> {
    (process.rank < ranks).then(|| {
        let mut this = Rank::alone(ranks, process.rank);
        let (id, mut config) = (process.id("idle"), config(0, 1));
        let place = &mut this.comm;
        let code = nccl!(ncclCommInitRankConfig(
            place,
            ranks,
            id,
            process.rank,
            &mut config
        ));
        assert!(matches!(code, 0 | IN_PROGRESS), "{}", last_error());
        assert_eq!(this.settle(), 0, "{}", last_error());
        this
    })
}

/// The blocking child of an idle parent.
fn child(parent: &Rank) -> Rank {
    let (made, mut config) = (place(), config(1, 0));
    let code = nccl!(ncclCommSplit(
        parent.comm,
        0,
        parent.rank,
        made.as_ptr(),
        &mut config
    ));
    assert!(matches!(code, 0 | IN_PROGRESS), "{}", last_error());
    assert_eq!(parent.settle(), 0, "{}", last_error());
    beside(
        parent,
        parent.ranks,
        parent.rank,
        made.load(Ordering::Acquire),
    )
}

/// An idle parent of all processes, grown from `old` on the processes that have one.
fn grown(process: &Process, old: Option<&Rank>) -> Rank {
    let (rank, ranks) = (process.rank, process.ranks);
    let id = match (old, rank) {
        (Some(old), 0) => {
            let mut id = ncclUniqueId::default();
            let code = nccl!(ncclCommGetUniqueId(old.comm, &mut id));
            assert_eq!(code, 0, "{}", last_error());
            process.put_id("grown", &id);
            id
        }
        _ => process.get_id("grown"),
    };
    let (parent, token, number) = match (old, rank) {
        (Some(old), 0) => (old.comm, &raw const id, -1),
        (Some(old), _) => (old.comm, null(), -1),
        (None, rank) => (null_mut(), &raw const id, rank),
    };
    let alone = Rank::alone(ranks, rank);
    alone.gpu.bind_to_thread().unwrap();
    let (made, mut config) = (place(), config(0, 1));
    let to = made.as_ptr();
    let code = nccl!(ncclCommGrow(parent, ranks, token, number, to, &mut config));
    assert!(matches!(code, 0 | IN_PROGRESS), "{}", last_error());
    let grown = beside(&alone, ranks, rank, made.load(Ordering::Acquire));
    assert_eq!(grown.settle(), 0, "{}", last_error());
    grown
}

fn can_grow(test: &str) -> bool {
    let can = version() >= 22902;
    if !can {
        println!("NOT TESTED: {test}: this release has no ncclCommGrow");
    }
    can
}

/// NCCL's own grow in launch mode `BlockingChild`: the child grows, because it shares nothing with a child of its own.
#[test]
fn a_blocking_child_grows_to_an_idle_parent_whose_child_works() {
    let name = "a_blocking_child_grows_to_an_idle_parent_whose_child_works";
    for transport in [&SHM[..], &P2P, &SOCKETS] {
        on_each(name, 3, transport, |process| {
            if !can_grow(name) {
                return;
            }
            let old = idle(&process, 2);
            let old_child = old.as_ref().map(child);
            if let Some(child) = &old_child {
                Buffers::of(child).check(child);
            }
            let all = grown(&process, old_child.as_ref());
            let all_child = child(&all);
            Buffers::of(&all_child).check(&all_child);
            // The old communicator still works, and its end does not affect the new one.
            if let (Some(child), Some(old)) = (old_child, old) {
                Buffers::of(&child).check(&child);
                child.destroy();
                old.destroy();
            }
            Buffers::of(&all_child).check(&all_child);
            all_child.destroy();
            all.destroy();
        });
        if is_child_of(name) {
            return;
        }
    }
}

/// Why the idle parent does not grow: a communicator grown from one that was split with shared resources uses the proxy of
/// the latter, which discards the connections of new ranks (`initTransportsRank`, init.cc).
#[test]
fn what_has_grown_from_an_idle_parent_with_a_child_cannot_connect() {
    let name = "what_has_grown_from_an_idle_parent_with_a_child_cannot_connect";
    on_each(name, 3, &SHM, |process| {
        if !can_grow(name) {
            return;
        }
        let old = idle(&process, 2);
        let _child = old.as_ref().map(child);
        let all = grown(&process, old.as_ref());
        assert!(matches!(Buffers::of(&all).issue(&all), 0 | IN_PROGRESS));
        // On the old ranks the operation fails or waits; on the new rank it waits.
        let is_over = || all.state() == 0 && all.is_idle();
        assert!(stays(Duration::from_secs(3), || !is_over()), "it works now");
        process.meet("over");
        // An operation that waits for a peer prevents an orderly exit.
        std::process::exit(0);
    });
}

/// Ends an operation of `child` that rank 2 does not enter, as launch mode `BlockingChild` does: the abort of the idle parent
/// makes the blocked call return. Then the child is revoked.
fn revoked(process: &Process, idle: &Rank, child: Rank) -> Rank {
    let parent = Handle(idle.comm);
    if process.rank == 2 {
        process.wait_for("out");
        assert_eq!(parent.abort(), 0, "{}", last_error());
    } else {
        let aborting = thread::spawn(move || {
            thread::sleep(Duration::from_millis(300));
            parent.abort()
        });
        // The first operation of the child, which connects its ranks.
        Buffers::of(&child).issue(&child);
        assert_eq!(aborting.join().unwrap(), 0, "{}", last_error());
        process.mark("out");
    }
    let comm = Handle(child.comm);
    let code = within(SOON, move || comm.revoke());
    assert_eq!(code, Some(0), "{}", last_error());
    assert_eq!(child.settle(), 0, "{}", last_error());
    child
}

/// Creates an idle parent without rank 2 by `ncclCommShrink`, which blocks.
fn shrunk(child: &Rank) -> Rank {
    let (made, mut config, mut without) = (place(), config(0, 1), [2]);
    let (to, list) = (made.as_ptr(), without.as_mut_ptr());
    let code = nccl!(ncclCommShrink(child.comm, list, 1, to, &mut config, 0));
    assert_eq!(code, 0, "{}", last_error());
    let shrunk = beside(child, 2, child.rank, made.load(Ordering::Acquire));
    assert_eq!(shrunk.settle(), 0, "{}", last_error());
    shrunk
}

fn can_revoke(test: &str) -> bool {
    let can = version() >= 22807;
    if !can {
        println!("NOT TESTED: {test}: this release has no ncclCommRevoke");
    }
    can
}

#[test]
fn a_child_that_is_revoked_behind_the_abort_of_its_idle_parent_shrinks() {
    let name = "a_child_that_is_revoked_behind_the_abort_of_its_idle_parent_shrinks";
    on_each(name, 3, &SHM, |process| {
        if !can_revoke(name) {
            return;
        }
        let all = idle(&process, 3).unwrap();
        let child_of_all = revoked(&process, &all, child(&all));
        if process.rank < 2 {
            let two = shrunk(&child_of_all);
            let child_of_two = child(&two);
            Buffers::of(&child_of_two).check(&child_of_two);
            child_of_two.destroy();
            two.destroy();
        }
        assert_eq!(child_of_all.abort(), 0);
    });
}

/// Why this crate creates a new communicator instead: with the idle parent gone, nothing can raise the child's abort flag while
/// a thread is inside the child, and NCCL frees a blocking communicator under such a thread.
#[test]
fn the_shrink_of_a_revoked_child_waits_for_a_rank_that_does_not_come() {
    let name = "the_shrink_of_a_revoked_child_waits_for_a_rank_that_does_not_come";
    on_each(name, 3, &SHM, |process| {
        if !can_revoke(name) {
            return;
        }
        let all = idle(&process, 3).unwrap();
        let child = revoked(&process, &all, child(&all));
        if process.rank == 0 {
            let shrunk = within(Duration::from_secs(5), move || {
                shrunk(&child).comm.is_null()
            });
            assert_eq!(shrunk, None, "the call is back");
            process.mark("over");
        }
        process.wait_for("over");
        // A thread is still inside NCCL.
        std::process::exit(0);
    });
}
