//! Ranks that do not work together: hanging operations, operations that an abort ends, and the state afterwards.

use nccl_sys::{ncclDataType_t as Kind, ncclRedOp_t as Op};

use super::super::{ENDS, Facts, HANGS, Program, name_of};
use crate::nccl_call;
use crate::raw::operations::{Stream, all_reduce, connect, group_end, group_start, recv};
use crate::raw::{Comm, Rank, Result, bounded, config, leave, settle};

const fn program(
    name: &'static str,
    about: &'static str,
    body: fn(&Rank, &Facts) -> Result,
) -> Program {
    Program::ranks(2, name, about, body)
}

pub(super) const PROGRAMS: &[Program] = &[
    program(
        "abort-init",
        "abort while init waits for a rank",
        abort_init,
    ),
    program(
        "abort-connect",
        "abort while the first message waits for its peer",
        abort_connect,
    ),
    program(
        "abort-kernel",
        "abort while a receive waits on the device",
        abort_kernel,
    ),
    program(
        "abort-blocking-kernel",
        "the same on a blocking communicator",
        abort_blocking_kernel,
    ),
    program(
        "abort-all-reduce",
        "abort of an all-reduce that one rank does not join",
        abort_all_reduce,
    ),
    program(
        "abort-twice-used",
        "the other rank after an abort",
        other_after_abort,
    ),
    program(
        "ranks-disagree",
        "ranks that disagree about their number",
        ranks_disagree,
    ),
    program(
        "same-rank-twice",
        "two ranks with one number",
        same_rank_twice,
    ),
    program(
        "peer-leaves",
        "a peer whose process ends without a word",
        peer_leaves,
    ),
];

fn abort(comm: Comm) -> String {
    match bounded(ENDS, move || comm.abort()) {
        Some(code) => name_of(code),
        None => "hangs".into(),
    }
}

fn abort_init(rank: &Rank, facts: &Facts) -> Result {
    let id = rank.unique_id("comm")?;
    if rank.world.rank() == 0 {
        let mut comm = Comm::NULL;
        let mut config = config(false);
        let code = nccl_call!(ncclCommInitRankConfig(&mut comm.0, 2, id, 0, &mut config));
        facts.code("init", code);
        facts.code("later", settle(comm, code, HANGS));
        facts.add("abort", abort(comm));
    }
    rank.barrier("end")
}

fn abort_connect(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", false)?;
    if rank.world.rank() == 0 {
        let (y, stream) = (rank.memory(&[0; 8])?, Stream::of(&rank.stream));
        group_start();
        recv(comm, y, 8, 1, stream);
        let code = group_end();
        facts.code("receive", code);
        facts.code("later", settle(comm, code, HANGS));
        facts.add("abort", abort(comm));
        facts.add("the stream ends", format!("{:?}", rank.ends_within(ENDS)));
    }
    rank.barrier("end")
}

fn kernel(rank: &Rank, facts: &Facts, blocking: bool) -> Result {
    let comm = Comm::new(rank, "comm", blocking)?;
    connect(rank, comm)?;
    if rank.world.rank() == 0 {
        let (y, stream) = (rank.memory(&vec![0; 1 << 20])?, Stream::of(&rank.stream));
        let code = recv(comm, y, 1 << 20, 1, stream);
        facts.code("receive", settle(comm, code, ENDS));
        facts.add("the stream ends", format!("{:?}", rank.ends_within(HANGS)));
        facts.add("state", name_of(comm.state()));
        facts.add("abort", abort(comm));
        facts.add(
            "the stream ends after it",
            format!("{:?}", rank.ends_within(ENDS)),
        );
        facts.add("memory can be read", rank.read(y).is_ok());
    }
    rank.barrier("end")
}

fn abort_kernel(rank: &Rank, facts: &Facts) -> Result {
    kernel(rank, facts, false)
}

fn abort_blocking_kernel(rank: &Rank, facts: &Facts) -> Result {
    kernel(rank, facts, true)
}

fn abort_all_reduce(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", false)?;
    connect(rank, comm)?;
    if rank.world.rank() == 0 {
        let (x, stream) = (rank.memory(&[0; 64])?, Stream::of(&rank.stream));
        let code = all_reduce(comm, [x, x], 16, (Kind::ncclInt32, Op::ncclSum), stream);
        facts.code("all-reduce", settle(comm, code, ENDS));
        facts.add("the stream ends", format!("{:?}", rank.ends_within(HANGS)));
        facts.add("abort", abort(comm));
        facts.add(
            "the stream ends after it",
            format!("{:?}", rank.ends_within(ENDS)),
        );
    }
    rank.barrier("end")
}

fn other_after_abort(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", false)?;
    connect(rank, comm)?;
    if rank.world.rank() == 0 {
        facts.add("abort", abort(comm));
        rank.barrier("aborted")?;
    } else {
        rank.barrier("aborted")?;
        facts.code("state", settle(comm, 7, HANGS));
        let (y, stream) = (rank.memory(&vec![0; 1 << 20])?, Stream::of(&rank.stream));
        facts.code(
            "receive",
            settle(comm, recv(comm, y, 1 << 20, 0, stream), HANGS),
        );
        facts.add("the stream ends", format!("{:?}", rank.ends_within(HANGS)));
        facts.add("abort", abort(comm));
        facts.add(
            "the stream ends after it",
            format!("{:?}", rank.ends_within(ENDS)),
        );
    }
    rank.barrier("end")
}

/// Inits with these contradictory numbers, and records the result.
fn misfit(rank: &Rank, facts: &Facts, ranks: i32, number: i32) -> Result {
    let id = rank.unique_id("comm")?;
    let mut comm = Comm::NULL;
    let mut config = config(false);
    let code = nccl_call!(ncclCommInitRankConfig(
        &mut comm.0,
        ranks,
        id,
        number,
        &mut config
    ));
    facts.code("init", code);
    facts.code("later", settle(comm, code, HANGS * 2));
    rank.barrier("end")
}

fn ranks_disagree(rank: &Rank, facts: &Facts) -> Result {
    let number = rank.world.rank() as i32;
    misfit(rank, facts, 2 + number, number)
}

fn same_rank_twice(rank: &Rank, facts: &Facts) -> Result {
    misfit(rank, facts, 2, 0)
}

fn peer_leaves(rank: &Rank, facts: &Facts) -> Result {
    let pids = rank
        .world
        .all_gather("pid", &std::process::id().to_le_bytes())?;
    if pids[0] == pids[1] {
        facts.add("peer", "is a thread of this process");
        return Ok(());
    }
    let comm = Comm::new(rank, "comm", false)?;
    connect(rank, comm)?;
    rank.barrier("connected")?;
    if rank.world.rank() == 1 {
        leave(0);
    }
    let (x, stream) = (rank.memory(&[0; 64])?, Stream::of(&rank.stream));
    let code = all_reduce(comm, [x, x], 16, (Kind::ncclInt32, Op::ncclSum), stream);
    facts.code("all-reduce", settle(comm, code, HANGS));
    facts.add("the stream ends", format!("{:?}", rank.ends_within(HANGS)));
    facts.add("state", name_of(comm.state()));
    facts.add("abort", abort(comm));
    facts.add(
        "the stream ends after it",
        format!("{:?}", rank.ends_within(ENDS)),
    );
    Ok(())
}
