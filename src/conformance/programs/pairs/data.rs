//! The results of two ranks' collectives.

use nccl_sys::{ncclDataType_t as Kind, ncclRedOp_t as Op};

use super::super::super::{ENDS, Facts};
use super::{INT, ints};
use crate::nccl_call;
use crate::raw::operations::{Stream, all_reduce, connect};
use crate::raw::{Comm, Rank, Result};

/// Converts two ranks' numbers to bytes of a type; whole numbers small enough to be exact in all types.
pub(super) fn reductions(rank: &Rank, facts: &Facts) -> Result {
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

/// Elements in hexadecimal; NaN as `NaN`, because its bits are not specified.
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

pub(super) fn in_place(rank: &Rank, facts: &Facts) -> Result {
    let comm = Comm::new(rank, "comm", true)?;
    let x = rank.memory(&ints(&[rank.world.rank() as i32 + 1; 1000]))?;
    let code = all_reduce(comm, [x, x], 1000, INT, Stream::of(&rank.stream));
    facts.code("all-reduce", code);
    facts.add("ends", format!("{:?}", rank.ends_within(ENDS)));
    facts.add("right", rank.read(x)? == ints(&[3; 1000]));
    rank.barrier("end")
}

pub(super) fn all_to_all(rank: &Rank, facts: &Facts) -> Result {
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

pub(super) fn other_collectives(rank: &Rank, facts: &Facts) -> Result {
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
