//! Messages and groups of two ranks: their order, and which rank waits for which.

use nccl_sys::{ncclDataType_t as Kind, ncclRedOp_t as Op};

use super::super::super::{ENDS, Facts, HANGS, name_of};
use super::{INT, ints};
use crate::nccl_call;
use crate::raw::operations::{Stream, all_reduce, connect, group_end, group_start, recv, send};
use crate::raw::{Comm, Rank, Result, settle, stream_ends_within, wait_until};

pub(super) fn message_order(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", true)?;
    connect(rank, comm)?;
    let stream = Stream::of(&rank.stream);
    let (x, y) = (rank.memory(&[1, 2, 3, 4])?, rank.memory(&[0; 4])?);
    for grouped in [true, false] {
        if grouped {
            group_start();
        }
        for index in 0..4 {
            match rank.world.rank() {
                0 => send(comm, x.from(index), 1, 1, stream),
                _ => recv(comm, y.from(index), 1, 0, stream),
            };
        }
        if grouped {
            facts.code("end", group_end());
        }
        facts.add(
            format!("grouped {grouped}: ends"),
            format!("{:?}", rank.ends_within(ENDS)),
        );
        if rank.world.rank() == 1 {
            facts.add(
                format!("grouped {grouped}: arrived"),
                format!("{:?}", rank.read(y)?),
            );
        }
    }
    rank.barrier("end")
}

pub(super) fn without_bytes(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", true)?;
    connect(rank, comm)?;
    let (x, stream) = (rank.memory(&[0; 4])?, Stream::of(&rank.stream));
    if rank.world.rank() == 0 {
        facts.code("receive of nothing", recv(comm, x, 0, 1, stream));
        facts.add("ends alone", format!("{:?}", rank.ends_within(HANGS)));
        rank.barrier("now")?;
    } else {
        rank.barrier("now")?;
        facts.code("send of nothing", send(comm, x, 0, 0, stream));
    }
    facts.add("ends", format!("{:?}", rank.ends_within(ENDS)));
    rank.barrier("end")
}

pub(super) fn sizes_differ(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", true)?;
    connect(rank, comm)?;
    let bytes = 1 << 20;
    let (x, stream) = (rank.memory(&vec![0; bytes])?, Stream::of(&rank.stream));
    let code = match rank.world.rank() {
        0 => send(comm, x, bytes / 4, 1, stream),
        _ => recv(comm, x, bytes, 0, stream),
    };
    facts.code("call", code);
    facts.add("ends", format!("{:?}", rank.ends_within(HANGS)));
    rank.barrier("end")
}

pub(super) fn small_send(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", true)?;
    connect(rank, comm)?;
    let (x, stream) = (rank.memory(&[0; 8])?, Stream::of(&rank.stream));
    if rank.world.rank() == 0 {
        facts.code("send", send(comm, x, 8, 1, stream));
        facts.add(
            "ends before there is a receive",
            format!("{:?}", rank.ends_within(HANGS)),
        );
        rank.barrier("now")?;
    } else {
        rank.barrier("now")?;
        facts.code("receive", recv(comm, x, 8, 0, stream));
    }
    facts.add("ends", format!("{:?}", rank.ends_within(ENDS)));
    rank.barrier("end")
}

pub(super) fn first_use(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", true)?;
    let (x, stream) = (rank.memory(&[0; 8])?, Stream::of(&rank.stream));
    if rank.world.rank() == 0 {
        let (sender, done) = std::sync::mpsc::channel();
        std::thread::spawn(move || sender.send(recv(comm, x, 8, 1, stream)));
        facts.add("comes back alone", done.recv_timeout(HANGS).is_ok());
        rank.barrier("now")?;
        facts.code("receive", done.recv_timeout(ENDS)?);
    } else {
        rank.barrier("now")?;
        facts.code("send", send(comm, x, 8, 0, stream));
    }
    facts.add("ends", format!("{:?}", rank.ends_within(ENDS)));
    rank.barrier("end")
}

pub(super) fn in_progress(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", false)?;
    let (x, stream) = (rank.memory(&[0; 8])?, Stream::of(&rank.stream));
    if rank.world.rank() == 0 {
        facts.code("start", group_start());
        facts.code("receive", recv(comm, x, 8, 1, stream));
        let code = group_end();
        facts.code("end", code);
        facts.code("later", settle(comm, code, HANGS));
        let mut count = 0;
        facts.code(
            "count meanwhile",
            nccl_call!(ncclCommCount(comm.0, &mut count)),
        );
        facts.code("an operation meanwhile", recv(comm, x, 8, 1, stream));
        facts.code("finalize meanwhile", nccl_call!(ncclCommFinalize(comm.0)));
        rank.barrier("now")?;
        facts.add("ends", format!("{:?}", rank.ends_within(ENDS)));
        // The refused calls leave their code in the state until the launch is complete.
        wait_until(ENDS, || comm.state() == 0);
        facts.code("in the end", comm.state());
    } else {
        rank.barrier("now")?;
        let code = send(comm, x, 8, 0, stream);
        facts.code("send in the end", settle(comm, code, ENDS));
        facts.add("ends", format!("{:?}", rank.ends_within(ENDS)));
    }
    rank.barrier("end")
}

pub(super) fn collective_and_messages(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", true)?;
    let (stream, peer) = (Stream::of(&rank.stream), 1 - rank.world.rank());
    let own = rank.world.rank() as i32 + 1;
    let (x, sum, y) = (
        rank.memory(&ints(&[own]))?,
        rank.memory(&[0; 4])?,
        rank.memory(&[0; 4])?,
    );
    group_start();
    facts.code("send", send(comm, x, 4, peer, stream));
    facts.code("all-reduce", all_reduce(comm, [x, sum], 1, INT, stream));
    facts.code("receive", recv(comm, y, 4, peer, stream));
    facts.code("end", group_end());
    facts.add("ends", format!("{:?}", rank.ends_within(ENDS)));
    facts.add("sum", rank.read(sum)? == ints(&[3]));
    facts.add("message", rank.read(y)? == ints(&[3 - own]));
    rank.barrier("end")
}

pub(super) fn two_streams(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", true)?;
    connect(rank, comm)?;
    let other = rank.another_stream()?;
    let (first, second) = (Stream::of(&rank.stream), Stream::of(&other));
    let (x, y) = (rank.memory(&[0; 8])?, rank.memory(&[0; 8])?);
    let peer = 1 - rank.world.rank();
    if rank.world.rank() == 0 {
        // Both streams wait for all of the group, the second also for the work of the first.
        group_start();
        send(comm, x, 8, peer, first);
        recv(comm, y, 8, peer, second);
        facts.code("end", group_end());
        facts.add(
            "second stream waits",
            format!("{:?}", stream_ends_within(&other, HANGS)),
        );
        rank.barrier("now")?;
    } else {
        rank.barrier("now")?;
        group_start();
        send(comm, x, 8, peer, first);
        recv(comm, y, 8, peer, second);
        facts.code("end", group_end());
    }
    facts.add("first ends", format!("{:?}", rank.ends_within(ENDS)));
    facts.add(
        "second ends",
        format!("{:?}", stream_ends_within(&other, ENDS)),
    );
    rank.barrier("end")
}

pub(super) fn group_drops_all(rank: &Rank, facts: &Facts) -> Result {
    for blocking in [true, false] {
        let comm = Comm::new(rank, &format!("comm {blocking}"), blocking)?;
        connect(rank, comm)?;
        let (x, y) = (rank.memory(&ints(&[1]))?, rank.memory(&[0; 4])?);
        let stream = Stream::of(&rank.stream);
        group_start();
        facts.code(
            format!("blocking {blocking}: good"),
            all_reduce(comm, [x, y], 1, INT, stream),
        );
        let bad = all_reduce(comm, [x, y], 1, (Kind(99), Op::ncclSum), stream);
        facts.code(format!("blocking {blocking}: bad"), bad);
        facts.code(format!("blocking {blocking}: end"), group_end());
        facts.add(
            format!("blocking {blocking}: ends"),
            format!("{:?}", rank.ends_within(HANGS)),
        );
        facts.add(
            format!("blocking {blocking}: dropped"),
            rank.read(y)? == ints(&[0]),
        );
        facts.add(format!("blocking {blocking}: state"), name_of(comm.state()));
        rank.barrier(&format!("dropped {blocking}"))?;
        let code = all_reduce(comm, [x, y], 1, INT, stream);
        facts.code(
            format!("blocking {blocking}: afterwards"),
            settle(comm, code, ENDS),
        );
        facts.add(
            format!("blocking {blocking}: afterwards ends"),
            format!("{:?}", rank.ends_within(ENDS)),
        );
    }
    rank.barrier("end")
}

pub(super) fn simulate_operations(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", true)?;
    let (x, y) = (rank.memory(&ints(&[1]))?, rank.memory(&[0; 4])?);
    let mut info = nccl_sys::NCCL_SIM_INFO_INITIALIZER;
    group_start();
    facts.code(
        "all-reduce",
        all_reduce(comm, [x, y], 1, INT, Stream::of(&rank.stream)),
    );
    facts.code("simulate", nccl_call!(ncclGroupSimulateEnd(&mut info)));
    facts.add("an estimate", info.estimatedTime > 0.0);
    facts.add("ends", format!("{:?}", rank.ends_within(ENDS)));
    facts.add("nothing was done", rank.read(y)? == ints(&[0]));
    facts.code("end", group_end());
    rank.barrier("end")
}
