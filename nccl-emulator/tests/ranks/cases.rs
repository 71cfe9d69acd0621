//! Collectives, and reference results that are computed in the plainest way.
//!
//! The values are such that every result is exact in every type, whatever the order of the ranks.

use std::ffi::c_void;

use half::{bf16, f16};
use nccl_sys::{ncclDataType_t as Kind, ncclRedOp_t as Op, ncclScalarResidence_t as Residence};

use super::{Memory, Rank, last_error, nccl};

/// A generator of numbers that are the same on all ranks (splitmix64).
#[derive(Clone)]
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Function {
    AllReduce,
    Reduce,
    ReduceScatter,
    Broadcast,
    Bcast,
    AllGather,
    AlltoAll,
    Gather,
    Scatter,
}

use Function::*;

pub(crate) const FUNCTIONS: [Function; 9] = [
    AllReduce,
    Reduce,
    ReduceScatter,
    Broadcast,
    Bcast,
    AllGather,
    AlltoAll,
    Gather,
    Scatter,
];

/// The collectives that the loaded library has: some were added in 2.28.
pub(crate) fn functions() -> Vec<Function> {
    let api = super::api();
    let (all_to_all, gather, scatter) = (api.ncclAlltoAll(), api.ncclGather(), api.ncclScatter());
    let there = |function: &Function| match function {
        AlltoAll => all_to_all.is_ok(),
        Gather => gather.is_ok(),
        Scatter => scatter.is_ok(),
        _ => true,
    };
    FUNCTIONS.into_iter().filter(there).collect()
}

impl Function {
    pub(crate) fn reduces(self) -> bool {
        matches!(self, AllReduce | Reduce | ReduceScatter)
    }

    /// The name in NCCL's error messages.
    pub(crate) fn name(self) -> String {
        match self {
            Bcast => "Broadcast".to_owned(),
            other => format!("{other:?}"),
        }
    }
}

/// How elements are reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reduction {
    BuiltIn(Op),
    /// The factor is `factor(rank)`.
    PreMulSum(Residence),
}

pub(crate) const KINDS: [Kind; 12] = [
    Kind::ncclInt8,
    Kind::ncclUint8,
    Kind::ncclInt32,
    Kind::ncclUint32,
    Kind::ncclInt64,
    Kind::ncclUint64,
    Kind::ncclFloat16,
    Kind::ncclFloat32,
    Kind::ncclFloat64,
    Kind::ncclBfloat16,
    Kind::ncclFloat8e4m3,
    Kind::ncclFloat8e5m2,
];

/// The code of a number that an 8-bit format has, by trying all codes.
fn float8(value: f64, mantissa: u32) -> u8 {
    let bias = (1 << (6 - mantissa)) - 1;
    let decode = |code: u8| {
        let fraction = f64::from(code & ((1 << mantissa) - 1)) / f64::from(1 << mantissa);
        match i32::from(code >> mantissa) {
            0 => fraction * 2f64.powi(1 - bias),
            exponent => (1.0 + fraction) * 2f64.powi(exponent - bias),
        }
    };
    let code = (0..0x7c).find(|&code| decode(code) == value.abs());
    let code = code.unwrap_or_else(|| panic!("the test needs {value} in 8 bits"));
    if value < 0.0 { code | 0x80 } else { code }
}

/// The bytes of a number.
pub(crate) fn encode(kind: Kind, value: f64) -> Vec<u8> {
    match kind {
        Kind::ncclInt8 => (value as i64 as i8).to_le_bytes().into(),
        Kind::ncclUint8 => (value as i64 as u8).to_le_bytes().into(),
        Kind::ncclInt32 => (value as i32).to_le_bytes().into(),
        Kind::ncclUint32 => (value as u32).to_le_bytes().into(),
        Kind::ncclInt64 => (value as i64).to_le_bytes().into(),
        Kind::ncclUint64 => (value as u64).to_le_bytes().into(),
        Kind::ncclFloat16 => f16::from_f64(value).to_le_bytes().into(),
        Kind::ncclFloat32 => (value as f32).to_le_bytes().into(),
        Kind::ncclFloat64 => value.to_le_bytes().into(),
        Kind::ncclBfloat16 => bf16::from_f64(value).to_le_bytes().into(),
        Kind::ncclFloat8e4m3 => vec![float8(value, 3)],
        Kind::ncclFloat8e5m2 => vec![float8(value, 2)],
        other => panic!("{other:?}"),
    }
}

pub(crate) fn is_float8(kind: Kind) -> bool {
    matches!(kind, Kind::ncclFloat8e4m3 | Kind::ncclFloat8e5m2)
}

fn is_float(kind: Kind) -> bool {
    is_float8(kind)
        || matches!(
            kind,
            Kind::ncclFloat16 | Kind::ncclFloat32 | Kind::ncclFloat64 | Kind::ncclBfloat16
        )
}

fn is_signed(kind: Kind) -> bool {
    is_float(kind) || matches!(kind, Kind::ncclInt8 | Kind::ncclInt32 | Kind::ncclInt64)
}

/// A rank's factor of a `PreMulSum`.
fn factor(rank: usize) -> f64 {
    (rank % 2) as f64
}

/// One collective.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) function: Function,
    pub(crate) kind: Kind,
    pub(crate) reduction: Reduction,
    pub(crate) count: usize,
    pub(crate) root: i32,
    pub(crate) in_place: bool,
    /// Elements in front of the buffers; makes them unaligned.
    pub(crate) shift: usize,
    /// Makes the values of this case different from those of others.
    pub(crate) salt: u64,
}

impl Case {
    pub(crate) fn new(function: Function, count: usize) -> Self {
        Self {
            function,
            kind: Kind::ncclInt32,
            reduction: Reduction::BuiltIn(Op::ncclSum),
            count,
            root: 0,
            in_place: function == Bcast,
            shift: 0,
            salt: count as u64,
        }
    }

    /// A random case whose result is exact.
    pub(crate) fn roll(dice: &mut Dice, ranks: i32) -> Self {
        let function = dice.pick(&functions());
        let kind = dice.pick(&KINDS);
        let count = match dice.below(8) {
            0 => 0,
            1 => 1,
            2..6 => dice.below(2000),
            6 => dice.below(50_000),
            _ => dice.below(200_000),
        };
        let reductions = [
            Reduction::BuiltIn(Op::ncclSum),
            Reduction::BuiltIn(Op::ncclProd),
            Reduction::BuiltIn(Op::ncclMax),
            Reduction::BuiltIn(Op::ncclMin),
            Reduction::BuiltIn(Op::ncclAvg),
            Reduction::PreMulSum(Residence::ncclScalarHostImmediate),
            Reduction::PreMulSum(Residence::ncclScalarDevice),
        ];
        let mut reduction = dice.pick(&reductions);
        let scales = match reduction {
            Reduction::PreMulSum(_) => true,
            Reduction::BuiltIn(op) => op == Op::ncclAvg && is_float(kind),
        };
        // An average is exact only for a power of two of ranks, and NCCL scales no 8-bit floats on a single rank.
        let inexact = scales
            && reduction == Reduction::BuiltIn(Op::ncclAvg)
            && !(ranks as u32).is_power_of_two();
        if inexact || scales && ranks == 1 && is_float8(kind) {
            reduction = Reduction::BuiltIn(Op::ncclSum);
        }
        Self {
            function,
            kind,
            reduction,
            count,
            root: dice.below(ranks as usize) as i32,
            in_place: function == Bcast || function != AlltoAll && dice.below(2) == 0,
            shift: dice.below(4),
            salt: dice.next(),
        }
    }

    fn size(&self) -> usize {
        encode(self.kind, 0.0).len()
    }

    /// Element `at` of a rank's input.
    fn value(&self, rank: usize, at: usize) -> f64 {
        let mut dice = Dice(self.salt ^ (rank as u64) << 48 ^ (at as u64) << 8);
        let dice = dice.next();
        let bit = (dice >> 7 & 1) as f64;
        match self.reduction {
            _ if !self.function.reduces() => bit,
            Reduction::BuiltIn(Op::ncclProd) => 1.0 + bit,
            Reduction::BuiltIn(Op::ncclMin | Op::ncclMax) if is_signed(self.kind) => {
                bit - (dice >> 8 & 1) as f64
            }
            _ => bit,
        }
    }

    fn reduced(&self, ranks: usize, at: usize) -> f64 {
        let values = (0..ranks).map(|rank| self.value(rank, at));
        match self.reduction {
            Reduction::BuiltIn(Op::ncclSum) => values.sum(),
            Reduction::BuiltIn(Op::ncclProd) => values.product(),
            Reduction::BuiltIn(Op::ncclMax) => values.fold(-9.0, f64::max),
            Reduction::BuiltIn(Op::ncclMin) => values.fold(9.0, f64::min),
            Reduction::BuiltIn(Op::ncclAvg) if is_float(self.kind) => {
                values.sum::<f64>() / ranks as f64
            }
            Reduction::BuiltIn(Op::ncclAvg) => (values.sum::<f64>() / ranks as f64).trunc(),
            Reduction::PreMulSum(_) => values
                .enumerate()
                .map(|(rank, value)| value * factor(rank))
                .sum(),
            other => panic!("{other:?}"),
        }
    }

    /// Elements of a rank's input, 0 if it has none.
    fn send_count(&self, rank: usize, ranks: usize) -> usize {
        let is_root = rank == self.root as usize;
        match self.function {
            ReduceScatter | AlltoAll => ranks * self.count,
            Scatter if is_root => ranks * self.count,
            Scatter => 0,
            Broadcast | Bcast if !is_root => 0,
            _ => self.count,
        }
    }

    /// The expected output of a rank.
    fn output(&self, rank: usize, ranks: usize) -> Vec<f64> {
        let count = self.count;
        let is_root = rank == self.root as usize;
        let root = self.root as usize;
        let of =
            |rank: usize, first: usize| (first..first + count).map(move |at| self.value(rank, at));
        match self.function {
            AllReduce => (0..count).map(|at| self.reduced(ranks, at)).collect(),
            Reduce if is_root => (0..count).map(|at| self.reduced(ranks, at)).collect(),
            ReduceScatter => (rank * count..(rank + 1) * count)
                .map(|at| self.reduced(ranks, at))
                .collect(),
            Broadcast | Bcast => of(root, 0).collect(),
            AllGather => (0..ranks).flat_map(|from| of(from, 0)).collect(),
            Gather if is_root => (0..ranks).flat_map(|from| of(from, 0)).collect(),
            AlltoAll => (0..ranks).flat_map(|from| of(from, rank * count)).collect(),
            Scatter => of(root, rank * count).collect(),
            Reduce | Gather => Vec::new(),
        }
    }

    /// Where the output begins in the input (or the other way round), in elements, when the two
    /// share memory.
    fn overlap(&self, rank: usize) -> (usize, usize) {
        match self.function {
            AllGather | Gather => (rank * self.count, 0),
            ReduceScatter | Scatter => (0, rank * self.count),
            _ => (0, 0),
        }
    }

    /// Prepares a rank's buffers.
    pub(crate) fn prepare(&self, rank: &Rank) -> Prepared {
        const GUARD: usize = 48;
        let (own, ranks, size) = (rank.rank as usize, rank.ranks as usize, self.size());
        let input: Vec<u8> = (0..self.send_count(own, ranks))
            .flat_map(|at| encode(self.kind, self.value(own, at)))
            .collect();
        let output: Vec<u8> = (self.output(own, ranks).iter())
            .flat_map(|&value| encode(self.kind, value))
            .collect();
        let start = GUARD + self.shift * size;
        let (send_at, receive_at) = if self.in_place {
            let (send, receive) = self.overlap(own);
            (start + send * size, start + receive * size)
        } else {
            (start, start + input.len() + GUARD)
        };
        let end = (send_at + input.len()).max(receive_at + output.len());
        let mut before = vec![0xa5; end + GUARD];
        before[send_at..send_at + input.len()].copy_from_slice(&input);
        let mut after = before.clone();
        after[receive_at..receive_at + output.len()].copy_from_slice(&output);
        // What a rank does not have may be null.
        let has_send = !input.is_empty() || self.in_place;
        let has_receive = !output.is_empty() || self.in_place;
        Prepared {
            case: *self,
            memory: rank.memory(&before),
            after,
            send_at: has_send.then_some(send_at),
            receive_at: has_receive.then_some(receive_at),
            scalar: rank.memory(&encode(self.kind, factor(own))),
        }
    }

    /// Runs the case alone, and checks the result.
    pub(crate) fn check(&self, rank: &Rank) {
        let prepared = self.prepare(rank);
        assert_eq!(prepared.issue(rank), 0, "{self:?}: {}", last_error());
        rank.sync();
        prepared.verify(rank);
    }
}

/// A case with its buffers on one rank.
pub(crate) struct Prepared {
    pub(crate) case: Case,
    memory: Memory<u8>,
    /// The expected contents of the memory afterwards, guards included.
    after: Vec<u8>,
    send_at: Option<usize>,
    receive_at: Option<usize>,
    scalar: Memory<u8>,
}

impl Prepared {
    fn pointer(&self, at: Option<usize>) -> *mut c_void {
        at.map_or(std::ptr::null_mut(), |at| {
            self.memory.ptr().wrapping_byte_add(at)
        })
    }

    /// Issues the collective.
    pub(crate) fn issue(&self, rank: &Rank) -> u32 {
        let Reduction::PreMulSum(residence) = self.case.reduction else {
            let Reduction::BuiltIn(op) = self.case.reduction else {
                unreachable!()
            };
            return self.issue_with(rank, op);
        };
        let mut op = Op::ncclSum;
        let mut value = self.scalar.read();
        let scalar = match residence {
            Residence::ncclScalarDevice => self.scalar.ptr(),
            _ => value.as_mut_ptr().cast(),
        };
        let (kind, comm) = (self.case.kind, rank.comm);
        let code = nccl!(ncclRedOpCreatePreMulSum(
            &mut op, scalar, kind, residence, comm
        ));
        assert_eq!(code, 0, "{}", last_error());
        value.fill(0xff);
        let code = self.issue_with(rank, op);
        // Destroyed at once, also inside a group: the call has a copy of the operator.
        assert_eq!(nccl!(ncclRedOpDestroy(op, comm)), 0, "{}", last_error());
        code
    }

    /// Issues the collective with this operator.
    pub(crate) fn issue_with(&self, rank: &Rank, op: Op) -> u32 {
        let Case {
            function,
            kind,
            count,
            root,
            ..
        } = self.case;
        let (send, receive) = (self.pointer(self.send_at), self.pointer(self.receive_at));
        let (comm, stream) = (rank.comm, rank.cuda_stream());
        match function {
            AllReduce => nccl!(ncclAllReduce(send, receive, count, kind, op, comm, stream)),
            Reduce => nccl!(ncclReduce(
                send, receive, count, kind, op, root, comm, stream
            )),
            ReduceScatter => nccl!(ncclReduceScatter(
                send, receive, count, kind, op, comm, stream
            )),
            Broadcast => nccl!(ncclBroadcast(
                send, receive, count, kind, root, comm, stream
            )),
            Bcast => nccl!(ncclBcast(receive, count, kind, root, comm, stream)),
            AllGather => nccl!(ncclAllGather(send, receive, count, kind, comm, stream)),
            AlltoAll => nccl!(ncclAlltoAll(send, receive, count, kind, comm, stream)),
            Gather => nccl!(ncclGather(send, receive, count, kind, root, comm, stream)),
            Scatter => nccl!(ncclScatter(send, receive, count, kind, root, comm, stream)),
        }
    }

    /// Checks the result, and that nothing else was written, and frees the memory.
    pub(crate) fn verify(self, rank: &Rank) {
        let got = self.memory.read();
        if got != self.after {
            let at = (0..got.len())
                .find(|&at| got[at] != self.after[at])
                .unwrap();
            panic!(
                "rank {} of {}: byte {at} is {:#x}, not {:#x}; send at {:?}, receive at {:?}: {:?}",
                rank.rank,
                rank.ranks,
                got[at],
                self.after[at],
                self.send_at,
                self.receive_at,
                self.case
            );
        }
        self.memory.free();
        self.scalar.free();
    }
}

/// Counts near the capacities of buffers and protocols.
const COUNTS: [usize; 6] = [0, 1, 127, 4096, 65_537, 200_003];

/// Every collective of several counts, in place and not.
pub(crate) fn every_function(rank: &Rank) {
    for function in functions() {
        for count in COUNTS {
            for in_place in [false, true] {
                let case = Case {
                    root: (count as i32 + 1) % rank.ranks,
                    in_place: (in_place && function != Function::AlltoAll)
                        || function == Function::Bcast,
                    ..Case::new(function, count)
                };
                case.check(rank);
            }
        }
    }
}

/// Random collectives, the same on all ranks, alone and in groups, one step after the other.
pub(crate) fn at_random(rank: &Rank, seed: u64, steps: usize) {
    let mut dice = Dice(seed);
    for step in 0..steps {
        let grouped = dice.below(2) == 0;
        let cases: Vec<Case> = (0..1 + dice.below(4))
            .map(|_| Case::roll(&mut dice, rank.ranks))
            .collect();
        let hint = || {
            format!(
                "seed {seed:#x}, {} ranks, step {step}: {cases:#?}",
                rank.ranks
            )
        };
        let prepared: Vec<Prepared> = cases.iter().map(|case| case.prepare(rank)).collect();
        if grouped {
            assert_eq!(nccl!(ncclGroupStart()), 0);
        }
        for prepared in &prepared {
            assert_eq!(prepared.issue(rank), 0, "{}: {}", last_error(), hint());
        }
        if grouped {
            assert_eq!(nccl!(ncclGroupEnd()), 0, "{}: {}", last_error(), hint());
        }
        rank.sync();
        for prepared in prepared {
            let outcome = std::panic::AssertUnwindSafe(|| prepared.verify(rank));
            if let Err(panic) = std::panic::catch_unwind(outcome) {
                eprintln!("{}", hint());
                std::panic::resume_unwind(panic);
            }
        }
    }
}

/// The seed of the random tests: fixed, unless one is given to repeat a failure elsewhere.
pub(crate) fn seed() -> u64 {
    let given = std::env::var("NCCL_EMULATOR_TEST_SEED").ok();
    given.map_or(0x5eed_0001, |seed| seed.parse().expect("a number"))
}
