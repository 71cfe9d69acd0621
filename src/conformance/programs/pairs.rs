//! Two ranks that work together: what arrives, in which order, and what is derived from a communicator.

use std::ptr::null_mut;

use cudarc::driver::sys;
use nccl_sys::{ncclDataType_t as Kind, ncclRedOp_t as Op};

use super::super::{ENDS, Facts, HANGS, Program, name_of};
use crate::nccl_call;
use crate::raw::operations::{Stream, all_reduce, connect, group_end, group_start, recv, send};
use crate::raw::{Comm, Rank, Result, config, settle, stream_ends_within, wait_until};

const fn program(
    name: &'static str,
    about: &'static str,
    body: fn(&Rank, &Facts) -> Result,
) -> Program {
    Program::ranks(2, name, about, body)
}

pub(super) const PROGRAMS: &[Program] = &[
    program(
        "shared-device-refused",
        "two ranks on one device without leave",
        shared_device,
    )
    .with(&[("NCCL_MULTI_RANK_GPU_ENABLE", "0")]),
    program("shared-device", "two ranks on one device", shared_device),
    program(
        "late-rank",
        "init waits for a rank that comes late",
        late_rank,
    ),
    program(
        "reductions",
        "what all-reduce makes of whole numbers, overflow and NaN",
        reductions,
    ),
    program("in-place", "all-reduce in place", in_place),
    program(
        "message-order",
        "several messages to one peer, in and out of a group",
        message_order,
    ),
    program(
        "message-without-bytes",
        "a message without bytes, and who waits for it",
        without_bytes,
    ),
    program(
        "sizes-differ",
        "a receive longer than its send",
        sizes_differ,
    ),
    program(
        "small-send",
        "whether a small send ends before its receive is there",
        small_send,
    ),
    program(
        "first-use-blocks",
        "the first message to a peer that is not there, blocking",
        first_use,
    ),
    program(
        "in-progress",
        "what a non-blocking communicator allows while it works",
        in_progress,
    ),
    program(
        "collective-and-messages",
        "a collective and messages in one group",
        collective_and_messages,
    ),
    program(
        "two-streams",
        "a group with operations on two streams",
        two_streams,
    ),
    program(
        "group-drops-all",
        "a group with one operation that is refused",
        group_drops_all,
    ),
    program(
        "simulate-operations",
        "ncclGroupSimulateEnd with operations",
        simulate_operations,
    ),
    program("all-to-all", "ncclAlltoAll", all_to_all),
    program(
        "other-collectives",
        "collectives but all-reduce and all-to-all",
        other_collectives,
    ),
    program("split", "ncclCommSplit", split),
    program(
        "split-blocking-child",
        "a blocking child of a non-blocking parent",
        split_blocking_child,
    ),
    program("shrink", "ncclCommShrink", shrink),
    program(
        "window",
        "ncclCommWindowRegister on a device that ranks share",
        window,
    ),
    program(
        "capture",
        "an all-reduce while its stream is captured",
        capture,
    ),
    program(
        "destroy-only",
        "destroy without finalize, all ranks",
        destroy_only,
    ),
    program("finalize-one", "finalize on one rank alone", finalize_one),
];

const INT: (Kind, Op) = (Kind::ncclInt32, Op::ncclSum);

fn ints(values: &[i32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

fn shared_device(rank: &Rank, facts: &Facts) -> Result {
    let (comm, code) = Comm::init(rank, "comm", config(true))?;
    facts.code("init", code);
    if code == 0 {
        connect(rank, comm)?;
        facts.add("works", true);
    }
    rank.barrier("end")
}

fn late_rank(rank: &Rank, facts: &Facts) -> Result {
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

/// Makes two ranks' numbers into bytes of a type; whole numbers small enough to be exact in all of them.
fn reductions(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", true)?;
    connect(rank, comm)?;
    let stream = Stream::of(&rank.stream);
    let first = rank.world.rank() == 0;
    let choose = |a: Vec<u8>, b: Vec<u8>| if first { a } else { b };
    let f32s = |values: &[f32]| {
        values
            .iter()
            .flat_map(|v| v.to_le_bytes())
            .collect::<Vec<u8>>()
    };
    let f64s = |values: &[f64]| {
        values
            .iter()
            .flat_map(|v| v.to_le_bytes())
            .collect::<Vec<u8>>()
    };
    // 1, 2, NaN and infinity of 16 bits.
    let f16s = [0x3C00u16, 0x4000, 0x7E00, 0x7C00]
        .map(u16::to_le_bytes)
        .concat();
    let bf16s = [0x3F80u16, 0x4000, 0x7FC0, 0x7F80]
        .map(u16::to_le_bytes)
        .concat();
    let cases: [(&str, Kind, usize, Vec<u8>); 8] = [
        (
            "int8",
            Kind::ncclInt8,
            4,
            choose(vec![100, 0x80, 3, 0xFF], vec![100, 0xFF, 4, 0xFE]),
        ),
        (
            "uint8",
            Kind::ncclUint8,
            4,
            choose(vec![200, 0, 3, 255], vec![100, 1, 4, 1]),
        ),
        (
            "int32",
            Kind::ncclInt32,
            4,
            choose(ints(&[i32::MAX, -7, 3, 0]), ints(&[1, 2, 4, i32::MIN])),
        ),
        (
            "int64",
            Kind::ncclInt64,
            1,
            choose(i64::MAX.to_le_bytes().to_vec(), 1i64.to_le_bytes().to_vec()),
        ),
        (
            "float32",
            Kind::ncclFloat32,
            4,
            choose(
                f32s(&[1.5, f32::NAN, -0.0, f32::MAX]),
                f32s(&[2.5, 1.0, 0.0, f32::MAX]),
            ),
        ),
        (
            "float64",
            Kind::ncclFloat64,
            3,
            choose(f64s(&[1.5, f64::NAN, -1.0]), f64s(&[2.5, 1.0, 3.0])),
        ),
        ("float16", Kind::ncclFloat16, 4, f16s.clone()),
        ("bfloat16", Kind::ncclBfloat16, 4, bf16s.clone()),
    ];
    for (name, kind, count, bytes) in cases {
        for (operator, op) in [
            ("sum", Op::ncclSum),
            ("prod", Op::ncclProd),
            ("max", Op::ncclMax),
            ("min", Op::ncclMin),
            ("avg", Op::ncclAvg),
        ] {
            let (x, y) = (rank.memory(&bytes)?, rank.memory(&vec![0; bytes.len()])?);
            let code = all_reduce(comm, [x, y], count, (kind, op), stream);
            if code != 0 {
                facts.code(format!("{operator} of {name}"), code);
            } else if rank.ends_within(ENDS) != Ok(true) {
                facts.add(format!("{operator} of {name}"), "does not end");
                return Ok(());
            } else {
                facts.add(format!("{operator} of {name}"), shown(&rank.read(y)?, kind));
            }
        }
    }
    rank.barrier("end")
}

/// Elements in hexadecimal, NaN as that: its bits are nobody's promise.
fn shown(bytes: &[u8], kind: Kind) -> String {
    let size = match kind {
        Kind::ncclInt8 | Kind::ncclUint8 => 1,
        Kind::ncclFloat16 | Kind::ncclBfloat16 => 2,
        Kind::ncclInt32 | Kind::ncclFloat32 => 4,
        _ => 8,
    };
    let elements = bytes.chunks(size).map(|element| {
        let mut all = [0; 8];
        all[..size].copy_from_slice(element);
        let bits = u64::from_le_bytes(all);
        let is_nan = match kind {
            Kind::ncclFloat16 => bits & 0x7FFF > 0x7C00,
            Kind::ncclBfloat16 => bits & 0x7FFF > 0x7F80,
            Kind::ncclFloat32 => f32::from_bits(bits as u32).is_nan(),
            Kind::ncclFloat64 => f64::from_bits(bits).is_nan(),
            _ => false,
        };
        match is_nan {
            true => "NaN".to_owned(),
            false => format!("{bits:0width$x}", width = 2 * size),
        }
    });
    elements.collect::<Vec<_>>().join(" ")
}

fn in_place(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", true)?;
    let x = rank.memory(&ints(&[rank.world.rank() as i32 + 1; 1000]))?;
    let code = all_reduce(comm, [x, x], 1000, INT, Stream::of(&rank.stream));
    facts.code("all-reduce", code);
    facts.add("ends", format!("{:?}", rank.ends_within(ENDS)));
    facts.add("right", rank.read(x)? == ints(&[3; 1000]));
    rank.barrier("end")
}

fn message_order(rank: &Rank, facts: &Facts) -> Result {
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

fn without_bytes(rank: &Rank, facts: &Facts) -> Result {
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

fn sizes_differ(rank: &Rank, facts: &Facts) -> Result {
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

fn small_send(rank: &Rank, facts: &Facts) -> Result {
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

fn first_use(rank: &Rank, facts: &Facts) -> Result {
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

fn in_progress(rank: &Rank, facts: &Facts) -> Result {
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
        // The refused calls leave their code in the state until the launch is over.
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

fn collective_and_messages(rank: &Rank, facts: &Facts) -> Result {
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

fn two_streams(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", true)?;
    connect(rank, comm)?;
    let other = rank.another_stream()?;
    let (first, second) = (Stream::of(&rank.stream), Stream::of(&other));
    let (x, y) = (rank.memory(&[0; 8])?, rank.memory(&[0; 8])?);
    let peer = 1 - rank.world.rank();
    if rank.world.rank() == 0 {
        // Both streams wait for all of the group, the second for what is on the first.
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

fn group_drops_all(rank: &Rank, facts: &Facts) -> Result {
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

fn simulate_operations(rank: &Rank, facts: &Facts) -> Result {
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

fn all_to_all(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", true)?;
    let own = rank.world.rank() as u8;
    let (x, y) = (
        rank.memory(&[10 * own, 10 * own + 1])?,
        rank.memory(&[99; 2])?,
    );
    let stream = Stream::of(&rank.stream).raw();
    let code = nccl_call!(ncclAlltoAll(
        x.pointer(),
        y.pointer(),
        1,
        Kind::ncclInt8,
        comm.0,
        stream
    ));
    facts.code("call", code);
    facts.add("ends", format!("{:?}", rank.ends_within(ENDS)));
    facts.add("arrived", format!("{:?}", rank.read(y)?));
    rank.barrier("end")
}

fn other_collectives(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", true)?;
    let own = rank.world.rank() as u8;
    let stream = Stream::of(&rank.stream).raw();
    let (kind, sum) = (Kind::ncclInt8, Op::ncclSum);
    for name in [
        "broadcast",
        "bcast",
        "reduce",
        "all-gather",
        "reduce-scatter",
        "gather",
        "scatter",
    ] {
        let (x, y) = (rank.memory(&[own + 1, own + 5])?, rank.memory(&[0; 4])?);
        let (from, to, c) = (x.pointer(), y.pointer(), comm.0);
        let code = match name {
            "broadcast" => nccl_call!(ncclBroadcast(from, to, 2, kind, 1, c, stream)),
            "bcast" => nccl_call!(ncclBcast(from, 2, kind, 1, c, stream)),
            "reduce" => nccl_call!(ncclReduce(from, to, 2, kind, sum, 1, c, stream)),
            "all-gather" => nccl_call!(ncclAllGather(from, to, 2, kind, c, stream)),
            "reduce-scatter" => nccl_call!(ncclReduceScatter(from, to, 1, kind, sum, c, stream)),
            "gather" => nccl_call!(ncclGather(from, to, 2, kind, 1, c, stream)),
            _ => nccl_call!(ncclScatter(from, to, 1, kind, 1, c, stream)),
        };
        facts.code(name, code);
        facts.add(
            format!("{name} ends"),
            format!("{:?}", rank.ends_within(ENDS)),
        );
        facts.add(format!("{name} reads"), format!("{:?}", rank.read(x)?));
        facts.add(format!("{name} writes"), format!("{:?}", rank.read(y)?));
    }
    rank.barrier("end")
}

fn split(rank: &Rank, facts: &Facts) -> Result {
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

fn split_blocking_child(rank: &Rank, facts: &Facts) -> Result {
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

fn shrink(rank: &Rank, facts: &Facts) -> Result {
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

fn window(rank: &Rank, facts: &Facts) -> Result {
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

fn capture(rank: &Rank, facts: &Facts) -> Result {
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

fn destroy_only(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", true)?;
    connect(rank, comm)?;
    facts.code("destroy", nccl_call!(ncclCommDestroy(comm.0)));
    rank.barrier("end")
}

fn finalize_one(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", false)?;
    connect(rank, comm)?;
    if rank.world.rank() == 0 {
        let code = nccl_call!(ncclCommFinalize(comm.0));
        facts.code("finalize", code);
        facts.code("alone", settle(comm, code, HANGS));
        rank.barrier("now")?;
        facts.add("ends", format!("{:?}", rank.ends_within(ENDS)));
        // The refused calls leave their code in the state until the launch is over.
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
