//! What launch mode `BlockingChild` builds on in NVIDIA's own library: an idle parent that does not block, and a blocking
//! child, split from it, that shares its abort flag and carries the data.

mod ranks;
mod real;

use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::thread;
use std::time::Duration;

use nccl_sys::{NCCL_CONFIG_INITIALIZER, ncclComm, ncclComm_t, ncclConfig_t, ncclUniqueId};
use ranks::{Process, Rank, is_child_of, nccl, wait_until};
use real::{Buffers, P2P, SHM, SOCKETS, last_error, on_each, stays, version, within};

const IN_PROGRESS: u32 = 7;
/// Long enough for anything that does not wait.
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
}

/// Where NCCL writes a communicator, perhaps some time later; never freed.
fn place() -> &'static AtomicPtr<ncclComm> {
    Box::leak(Box::default())
}

fn config(blocking: i32, shares: i32) -> ncclConfig_t {
    let mut config = NCCL_CONFIG_INITIALIZER;
    (config.blocking, config.splitShare) = (blocking, shares);
    config
}

/// The same device, and a stream of its own.
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

/// An idle parent of all processes, grown from `old` where a process has that.
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

/// NCCL's own grow of launch mode `BlockingChild`: the child grows, because it shares nothing with a child of its own.
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
            // The old one stays, and ends, and the new one does not notice.
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

/// Why it is not the idle parent that grows: what has grown from a communicator that was split with shared resources uses
/// the proxy of that one, which discards the connections of ranks that are new (`initTransportsRank`, init.cc).
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
        // On the old ranks it fails or waits, on the new one it waits.
        let is_over = || all.state() == 0 && all.is_idle();
        assert!(stays(Duration::from_secs(3), || !is_over()), "it works now");
        process.meet("over");
        // What waits for a peer keeps the process from an end in order.
        std::process::exit(0);
    });
}
