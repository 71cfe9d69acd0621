//! How communicators of two ranks begin and end, and communicators derived from them.

use std::ptr::null_mut;

use cudarc::driver::sys;

use super::super::super::{ENDS, Facts, HANGS};
use super::{INT, ints};
use crate::nccl_call;
use crate::raw::operations::{Stream, all_reduce, connect};
use crate::raw::{Comm, Rank, Result, config, settle, wait_until};

pub(super) fn shared_device(rank: &Rank, facts: &Facts) -> Result {
    let (comm, code) = Comm::init(rank, "comm", config(true))?;
    facts.code("init", code);
    if code == 0 {
        connect(rank, comm)?;
        facts.add("works", true);
    }
    rank.barrier("end")
}

pub(super) fn late_rank(rank: &Rank, facts: &Facts) -> Result {
    let id = rank.unique_id("comm")?;
    if rank.world.rank() == 1 {
        std::thread::sleep(HANGS * 2);
    }
    let mut comm = Comm::NULL;
    let number = rank.world.rank() as i32;
    let mut config = config(false);
    let code = nccl_call!(ncclCommInitRankConfig(
        &mut comm.0,
        2,
        id,
        number,
        &mut config
    ));
    facts.code("init", code);
    if rank.world.rank() == 0 {
        facts.code("while the other is not there", settle(comm, code, HANGS));
    }
    facts.code("in the end", settle(comm, code, ENDS));
    rank.barrier("end")
}

pub(super) fn split(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", true)?;
    let own = rank.world.rank() as i32;
    for (name, color, key) in [("all, turned round", 0, -own), ("one of them", own - 1, 0)] {
        let mut child = Comm::NULL;
        let code = nccl_call!(ncclCommSplit(comm.0, color, key, &mut child.0, null_mut()));
        facts.code(name, code);
        facts.add(format!("{name}: a communicator"), !child.0.is_null());
        let (mut number, mut count) = (-1, -1);
        if code == 0 && !child.0.is_null() {
            nccl_call!(ncclCommUserRank(child.0, &mut number));
            nccl_call!(ncclCommCount(child.0, &mut count));
        }
        facts.add(format!("{name}: place"), format!("{number} of {count}"));
    }
    rank.barrier("end")
}

pub(super) fn split_blocking_child(rank: &Rank, facts: &Facts) -> Result {
    let mut sharing = config(false);
    sharing.splitShare = 1;
    let (parent, code) = Comm::init(rank, "comm", sharing)?;
    facts.code("parent", code);
    let mut child = Comm::NULL;
    let mut blocking = config(true);
    blocking.splitShare = 0;
    let number = rank.world.rank() as i32;
    let code = nccl_call!(ncclCommSplit(
        parent.0,
        0,
        number,
        &mut child.0,
        &mut blocking
    ));
    facts.code("split", code);
    facts.code("split in the end", settle(parent, code, ENDS));
    facts.add("a child", !child.0.is_null());
    if !child.0.is_null() {
        let x = rank.memory(&ints(&[1]))?;
        let code = all_reduce(child, [x, x], 1, INT, Stream::of(&rank.stream));
        facts.code("an operation of the child", code);
        facts.add("ends", format!("{:?}", rank.ends_within(ENDS)));
    }
    rank.barrier("end")
}

pub(super) fn shrink(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", true)?;
    if rank.world.rank() == 0 {
        let mut child = Comm::NULL;
        let mut without = [1];
        let code = nccl_call!(ncclCommShrink(
            comm.0,
            without.as_mut_ptr(),
            1,
            &mut child.0,
            null_mut(),
            0
        ));
        facts.code("without rank 1", code);
        let mut count = -1;
        if code == 0 {
            nccl_call!(ncclCommCount(child.0, &mut count));
        }
        facts.add("ranks", count);
        let code = nccl_call!(ncclCommShrink(
            comm.0,
            without.as_mut_ptr(),
            0,
            &mut child.0,
            null_mut(),
            0
        ));
        facts.code("without nobody", code);
        let mut without = [0];
        let code = nccl_call!(ncclCommShrink(
            comm.0,
            without.as_mut_ptr(),
            1,
            &mut child.0,
            null_mut(),
            0
        ));
        facts.code("without the caller", code);
    }
    rank.barrier("end")
}

pub(super) fn window(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", true)?;
    let mut buffer = null_mut();
    let size = 2 << 20;
    facts.code("memory", nccl_call!(ncclMemAlloc(&mut buffer, size)));
    let mut window = null_mut();
    facts.code(
        "register",
        nccl_call!(ncclCommWindowRegister(comm.0, buffer, size, &mut window, 1)),
    );
    facts.add("a window", !window.is_null());
    facts.code(
        "deregister",
        nccl_call!(ncclCommWindowDeregister(comm.0, window)),
    );
    rank.barrier("end")
}

pub(super) fn capture(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", true)?;
    connect(rank, comm)?;
    let (x, y) = (rank.memory(&ints(&[1]))?, rank.memory(&[0; 4])?);
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    facts.add(
        "begin",
        format!("{:?}", rank.stream.begin_capture(mode).is_ok()),
    );
    facts.code(
        "all-reduce",
        all_reduce(comm, [x, y], 1, INT, Stream::of(&rank.stream)),
    );
    let graph = rank.stream.end_capture(sys::CUgraphInstantiate_flags(0));
    let graph = graph.ok().flatten();
    facts.add("a graph", graph.is_some());
    if let Some(graph) = &graph {
        facts.add("launch", graph.launch().is_ok());
        facts.add("ends", format!("{:?}", rank.ends_within(ENDS)));
        facts.add("right", rank.read(y)? == ints(&[2]));
    }
    std::mem::forget(graph);
    rank.barrier("end")
}

pub(super) fn destroy_only(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", true)?;
    connect(rank, comm)?;
    facts.code("destroy", nccl_call!(ncclCommDestroy(comm.0)));
    rank.barrier("end")
}

pub(super) fn finalize_one(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", false)?;
    connect(rank, comm)?;
    if rank.world.rank() == 0 {
        let code = nccl_call!(ncclCommFinalize(comm.0));
        facts.code("finalize", code);
        facts.code("alone", settle(comm, code, HANGS));
        rank.barrier("now")?;
        facts.add("ends", format!("{:?}", rank.ends_within(ENDS)));
        // The refused calls leave their code in the state until the launch is complete.
        wait_until(ENDS, || comm.state() == 0);
        facts.code("in the end", comm.state());
    } else {
        rank.barrier("now")?;
        let code = nccl_call!(ncclCommFinalize(comm.0));
        facts.code("in the end", settle(comm, code, ENDS));
    }
    facts.code("destroy", nccl_call!(ncclCommDestroy(comm.0)));
    rank.barrier("end")
}
