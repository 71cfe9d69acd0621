//! Buffers in windows, and collectives over them.

use std::ffi::c_void;
use std::ptr::null_mut;

use cudarc::driver::result;
use half::{bf16, f16};
use nccl_sys::{NCCL_WIN_COLL_SYMMETRIC, ncclDataType_t as Kind, ncclRedOp_t as Op, ncclWindow_t};

use crate::ranks::cases::{self, is_float8};
use crate::ranks::{Rank, last_error, nccl};

/// A machine whose GPUs all reach each other over NVLink, without which NCCL uses no symmetric memory in kernels.
pub(crate) const MACHINE: (&str, &str) = (
    "NCCL_TOPO_FILE",
    concat!(env!("CARGO_MANIFEST_DIR"), "/topologies/nvswitch8.xml"),
);

/// Memory of `ncclMemAlloc` in a window.
pub(crate) struct Shown {
    pub(crate) address: *mut c_void,
    pub(crate) window: ncclWindow_t,
    pub(crate) bytes: usize,
}

impl Shown {
    pub(crate) fn new(rank: &Rank, bytes: usize) -> Self {
        let shown = Self::without_window(rank, bytes);
        let mut window = null_mut();
        let (flags, address) = (NCCL_WIN_COLL_SYMMETRIC, shown.address);
        let code = nccl!(ncclCommWindowRegister(
            rank.comm,
            address,
            bytes,
            &mut window,
            flags
        ));
        assert_eq!(code, 0, "{}", last_error());
        Self { window, ..shown }
    }

    pub(crate) fn without_window(rank: &Rank, bytes: usize) -> Self {
        rank.gpu.bind_to_thread().unwrap();
        let mut address = null_mut();
        let code = nccl!(ncclMemAlloc(&mut address, bytes));
        assert_eq!(code, 0, "{}", last_error());
        Self {
            address,
            window: null_mut(),
            bytes,
        }
    }

    /// The buffer from `bytes` on.
    pub(crate) fn at(&self, bytes: usize) -> *mut c_void {
        assert!(bytes <= self.bytes);
        self.address.wrapping_byte_add(bytes)
    }

    pub(crate) fn write(&self, at: usize, values: &[u8]) {
        assert!(at + values.len() <= self.bytes);
        // SAFETY: the memory is as large.
        unsafe { result::memcpy_htod_sync(self.at(at).addr() as u64, values) }.unwrap();
    }

    pub(crate) fn read(&self, at: usize, bytes: usize) -> Vec<u8> {
        assert!(at + bytes <= self.bytes);
        let mut values = vec![0; bytes];
        // SAFETY: the memory is as large.
        unsafe { result::memcpy_dtoh_sync(&mut values, self.at(at).addr() as u64) }.unwrap();
        values
    }

    pub(crate) fn end(self, rank: &Rank) {
        if !self.window.is_null() {
            let code = nccl!(ncclCommWindowDeregister(rank.comm, self.window));
            assert_eq!(code, 0, "{}", last_error());
        }
        assert_eq!(nccl!(ncclMemFree(self.address)), 0);
    }
}

pub(crate) fn encode(kind: Kind, values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values
        .into_iter()
        .flat_map(|value| match kind {
            Kind::ncclUint8 => vec![value as u8],
            Kind::ncclFloat => value.to_le_bytes().to_vec(),
            Kind::ncclHalf => f16::from_f32(value).to_le_bytes().to_vec(),
            Kind::ncclBfloat16 => bf16::from_f32(value).to_le_bytes().to_vec(),
            other => cases::encode(other, f64::from(value)),
        })
        .collect()
}

pub(crate) fn size(kind: Kind) -> usize {
    encode(kind, [0.0]).len()
}

/// The element that a rank sends at an index: a small integer, whose sums are the same in every order.
fn value(kind: Kind, rank: i32, at: usize) -> f32 {
    let rank = rank as usize;
    match is_float8(kind) {
        // Eight bits represent few sums exactly.
        true => ((rank + at) % 3) as f32,
        false => (rank + at % 5) as f32,
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Collective {
    AllGather,
    AllReduce,
    ReduceScatter,
}

/// The buffers of a rank, and the offsets in them at which a collective works.
pub(crate) struct Buffers {
    pub(crate) input: Shown,
    pub(crate) output: Shown,
    /// In bytes.
    pub(crate) offsets: [usize; 2],
}

impl Buffers {
    /// Writes the input and issues a collective.
    pub(crate) fn issue(
        &self,
        rank: &Rank,
        collective: Collective,
        kind: Kind,
        op: Op,
        count: usize,
    ) {
        self.fill(rank, collective, kind, count);
        self.call(rank, collective, kind, op, count);
    }

    /// Writes the input.
    pub(crate) fn fill(&self, rank: &Rank, collective: Collective, kind: Kind, count: usize) {
        let sent = match collective {
            Collective::ReduceScatter => count * rank.ranks as usize,
            _ => count,
        };
        let values = (0..sent).map(|at| value(kind, rank.rank, at));
        self.input.write(self.offsets[0], &encode(kind, values));
    }

    /// Issues a collective.
    pub(crate) fn call(
        &self,
        rank: &Rank,
        collective: Collective,
        kind: Kind,
        op: Op,
        count: usize,
    ) {
        let [from, to] = self.offsets;
        let (from, to, stream) = (self.input.at(from), self.output.at(to), rank.cuda_stream());
        let code = match collective {
            Collective::AllGather => {
                nccl!(ncclAllGather(from, to, count, kind, rank.comm, stream))
            }
            Collective::AllReduce => {
                nccl!(ncclAllReduce(from, to, count, kind, op, rank.comm, stream))
            }
            Collective::ReduceScatter => {
                nccl!(ncclReduceScatter(
                    from, to, count, kind, op, rank.comm, stream
                ))
            }
        };
        assert_eq!(code, 0, "{}", last_error());
    }

    pub(crate) fn check(
        &self,
        rank: &Rank,
        collective: Collective,
        kind: Kind,
        op: Op,
        count: usize,
    ) {
        let ranks = rank.ranks;
        let of = |at| {
            let sum: f32 = (0..ranks).map(|rank| value(kind, rank, at)).sum();
            match op {
                Op::ncclAvg => sum * (1.0 / ranks as f32),
                _ => sum,
            }
        };
        let expected = match collective {
            Collective::AllGather => encode(
                kind,
                (0..ranks).flat_map(|rank| (0..count).map(move |at| value(kind, rank, at))),
            ),
            Collective::AllReduce => encode(kind, (0..count).map(of)),
            Collective::ReduceScatter => {
                let first = rank.rank as usize * count;
                encode(kind, (first..first + count).map(of))
            }
        };
        let found = self.output.read(self.offsets[1], expected.len());
        let wrong = expected.iter().zip(&found).position(|(a, b)| a != b);
        let rank = rank.rank;
        assert_eq!(
            wrong, None,
            "{collective:?} of {count} {kind:?}: first wrong byte on rank {rank}"
        );
    }
}

/// Counts near the sizes of packs, cells, tiles, and the data that a block exchanges at a time.
pub(crate) const COUNTS: [usize; 6] = [1, 7, 1000, 4097, 30_000, 300_001];
pub(crate) const LARGEST: usize = 300_001;

/// Runs one collective after another over two windows, at several offsets.
pub(crate) fn over_windows(rank: &Rank, collective: Collective, kinds: &[Kind], op: Op) {
    of_counts(rank, collective, kinds, op, &COUNTS);
}

/// [`over_windows`] of these counts.
pub(crate) fn of_counts(
    rank: &Rank,
    collective: Collective,
    kinds: &[Kind],
    op: Op,
    counts: &[usize],
) {
    let ranks = rank.ranks as usize;
    let largest = counts.iter().max().unwrap_or(&0);
    let room = 8 * largest * ranks + 64;
    let mut buffers = Buffers {
        input: Shown::new(rank, room),
        output: Shown::new(rank, room),
        offsets: [0; 2],
    };
    assert!(!buffers.input.window.is_null());
    for &kind in kinds {
        for (turn, &count) in counts.iter().enumerate() {
            buffers.offsets = [turn, turn * (turn + 1) / 2].map(|at| at * size(kind));
            buffers.issue(rank, collective, kind, op, count);
            rank.sync();
            buffers.check(rank, collective, kind, op, count);
        }
    }
    buffers.input.end(rank);
    buffers.output.end(rank);
}
