//! Every interpreted kernel, in every release that has it.

use half::{bf16, f16};

use super::super::super::functions::Reason;
use super::super::super::launch::Progress;
use super::super::super::tests::types::Release;
use super::machine::{Call, Machine, Place, VERSIONS};
use crate::numbers::datatype::DataType;
use crate::numbers::float8::Float8;

const TYPES: [(&str, DataType); 5] = [
    ("f32", DataType::F32),
    ("f16", DataType::F16),
    ("bf16", DataType::Bf16),
    ("f8e4m3", DataType::F8E4M3),
    ("f8e5m2", DataType::F8E5M2),
];

/// Counts of elements around the edges of packs, cells, tiles and epochs.
const COUNTS: [usize; 10] = [1, 3, 8, 255, 1024, 1025, 4096, 9_999, 40_000, 130_001];

fn encode(ty: DataType, value: f32) -> Vec<u8> {
    match ty {
        DataType::F32 => value.to_le_bytes().to_vec(),
        DataType::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
        DataType::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
        DataType::F8E4M3 => vec![Float8::<3>::from_f32(value).0],
        DataType::F8E5M2 => vec![Float8::<2>::from_f32(value).0],
        other => panic!("{other:?}"),
    }
}

/// The bits of the factor of an average.
fn factor(ty: DataType, ranks: usize) -> u64 {
    let factor = 1.0 / ranks as f32;
    match ty {
        DataType::F8E4M3 | DataType::F8E5M2 => f16::from_f32(factor).to_bits().into(),
        _ => factor.to_bits().into(),
    }
}

/// A sum of small integers, as it is in every order, or its average.
fn result(ty: DataType, sum: u32, average: bool, ranks: usize) -> Vec<u8> {
    let (sum, factor) = (sum as f32, 1.0 / ranks as f32);
    match (average, ty) {
        (false, _) => encode(ty, sum),
        (true, DataType::F8E4M3 | DataType::F8E5M2) => {
            let product = f16::from_f32(sum) * f16::from_f32(factor);
            encode(ty, product.to_f32())
        }
        (true, _) => encode(ty, sum * factor),
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Gather,
    Reduce,
    Scatter,
}

/// One collective of all ranks, whose inputs are small integers.
struct Collective {
    kind: Kind,
    ty: DataType,
    average: bool,
    count: usize,
    inputs: Vec<Place>,
    outputs: Vec<Place>,
    values: Vec<Vec<u32>>,
}

impl Collective {
    fn new(machine: &Machine, kind: Kind, ty: DataType, average: bool, count: usize) -> Self {
        let ranks = machine.ranks;
        let size = ty.size() as usize;
        let (sent, received) = match kind {
            Kind::Gather => (count, count * ranks),
            Kind::Reduce => (count, count),
            Kind::Scatter => (count * ranks, count),
        };
        let offset = |steps| (machine.below(steps) * size) as u64;
        let (inputs, outputs) = if machine.below(3) == 0 {
            // In place.
            let all = machine.window(offset(40), sent.max(received) * size);
            let shift = |own| shifted(own, count * size);
            let part = |own| all.iter().enumerate().map(shift(own)).collect();
            (part(kind == Kind::Gather), part(kind == Kind::Scatter))
        } else {
            (
                machine.window(offset(40), sent * size),
                machine.window(offset(40), received * size),
            )
        };
        let values: Vec<Vec<u32>> = (0..ranks)
            .map(|_| (0..sent).map(|_| machine.below(2) as u32).collect())
            .collect();
        for (place, values) in inputs.iter().zip(&values) {
            let bytes: Vec<u8> = values
                .iter()
                .flat_map(|&value| encode(ty, value as f32))
                .collect();
            machine.devices.write(place.address, &bytes);
        }
        Self {
            kind,
            ty,
            average,
            count,
            inputs,
            outputs,
            values,
        }
    }

    /// All-gathers count bytes.
    fn element(&self) -> usize {
        match self.kind {
            Kind::Gather => 1,
            _ => self.ty.size() as usize,
        }
    }

    fn call(&self, rank: usize) -> Call {
        let size = self.ty.size() as usize;
        Call {
            input: self.inputs[rank],
            output: self.outputs[rank],
            elements: self.count * size / self.element(),
            argument: if self.average {
                factor(self.ty, self.inputs.len())
            } else {
                0
            },
        }
    }

    fn check(&self, machine: &Machine, what: &str) {
        let ranks = machine.ranks;
        for rank in 0..ranks {
            let sum = |at: usize| self.values.iter().map(|values| values[at]).sum();
            let reduced = |at| result(self.ty, sum(at), self.average, ranks);
            let expected: Vec<u8> = match self.kind {
                Kind::Gather => self
                    .values
                    .iter()
                    .flatten()
                    .flat_map(|&value| encode(self.ty, value as f32))
                    .collect(),
                Kind::Reduce => (0..self.count).flat_map(reduced).collect(),
                Kind::Scatter => (rank * self.count..(rank + 1) * self.count)
                    .flat_map(reduced)
                    .collect(),
            };
            let found = machine
                .devices
                .read(self.outputs[rank].address, expected.len());
            let wrong = expected.iter().zip(&found).position(|(a, b)| a != b);
            assert_eq!(wrong, None, "{what}: first wrong byte on rank {rank}");
        }
    }
}

fn shifted(own: bool, bytes: usize) -> impl Fn((usize, &Place)) -> Place {
    move |(rank, place)| {
        let shift = if own { (rank * bytes) as u64 } else { 0 };
        Place {
            offset: place.offset + shift,
            address: place.address + shift,
            ..*place
        }
    }
}

/// Runs collectives in one launch and compares all results.
fn check(machine: &Machine, kernel: &str, collectives: &[Collective], channels: usize) {
    let kernels = (0..machine.ranks)
        .map(|rank| {
            let calls: Vec<_> = collectives.iter().map(|one| one.call(rank)).collect();
            let element = collectives[0].element();
            let parameters = machine.parameters(rank, &calls, element, channels, 0, None);
            machine.launch(kernel, parameters).unwrap()
        })
        .collect();
    machine.finish(kernels).unwrap();
    for collective in collectives {
        let what = format!(
            "{kernel} {:?}, {} ranks, {} elements, {channels} channels",
            machine.release, machine.ranks, collective.count
        );
        collective.check(machine, &what);
    }
}

/// The reductions of a collective in a release.
fn averages(release: Release, kind: Kind) -> &'static [bool] {
    match kind {
        Kind::Scatter if release != Release::V2_27_7 => &[false, true],
        _ => &[false],
    }
}

fn every_size(kind: Kind, algorithms: &[&str]) {
    for release in VERSIONS {
        for ranks in [2, 3, 5, 8] {
            for algorithm in algorithms {
                if algorithm.contains("Tma") && release == Release::V2_27_7 {
                    continue;
                }
                let machine = Machine::new(release, ranks, 7 * ranks as u64);
                for count in COUNTS {
                    for &average in averages(release, kind) {
                        let (name, ty) = TYPES[machine.below(TYPES.len())];
                        let operator = if average { "avg" } else { "sum" };
                        let kernel = match kind {
                            Kind::Gather => algorithm.to_string(),
                            _ => format!("{algorithm}_{operator}_{name}"),
                        };
                        let one = Collective::new(&machine, kind, ty, average, count);
                        let channels = 1 + machine.below(16);
                        check(&machine, &kernel, &[one], channels);
                    }
                }
            }
        }
    }
}

#[test]
fn all_gathers_of_every_size_are_right() {
    every_size(
        Kind::Gather,
        &["AllGather_LL", "AllGather_ST", "AllGather_TmaST"],
    );
}

#[test]
fn all_reduces_of_every_size_are_right() {
    every_size(
        Kind::Reduce,
        &[
            "AllReduce_AGxLL_R",
            "AllReduce_RSxLD_AGxST",
            "AllReduce_RSxTmaLD_AGxTmaST",
        ],
    );
}

#[test]
fn reduce_scatters_of_every_size_are_right() {
    every_size(
        Kind::Scatter,
        &[
            "ReduceScatter_LL",
            "ReduceScatter_LD",
            "ReduceScatter_TmaLD",
        ],
    );
}

#[test]
fn every_type_is_reduced() {
    for release in VERSIONS {
        for (name, ty) in TYPES {
            for (kind, algorithm) in [
                (Kind::Reduce, "AllReduce_AGxLL_R"),
                (Kind::Reduce, "AllReduce_RSxLD_AGxST"),
                (Kind::Scatter, "ReduceScatter_LL"),
                (Kind::Scatter, "ReduceScatter_LD"),
            ] {
                for &average in averages(release, kind) {
                    let machine = Machine::new(release, 3, 99);
                    let operator = if average { "avg" } else { "sum" };
                    let one = Collective::new(&machine, kind, ty, average, 3001);
                    let kernel = format!("{algorithm}_{operator}_{name}");
                    check(&machine, &kernel, &[one], 4);
                }
            }
        }
    }
}

#[test]
fn several_works_share_a_launch() {
    for release in [Release::V2_32_3, Release::V2_30_7] {
        for (kind, kernel) in [
            (Kind::Gather, "AllGather_ST"),
            (Kind::Reduce, "AllReduce_RSxLD_AGxST_sum_bf16"),
            (Kind::Scatter, "ReduceScatter_LD_sum_bf16"),
        ] {
            for seed in 1..40 {
                let machine = Machine::new(release, 2 + seed as usize % 4, seed);
                let works = 2 + machine.below(6);
                let collectives: Vec<_> = (0..works)
                    .map(|_| {
                        let count = 1 + machine.below(1 << (4 + machine.below(13)));
                        Collective::new(&machine, kind, DataType::Bf16, false, count)
                    })
                    .collect();
                let channels = 1 + machine.below(20);
                check(&machine, kernel, &collectives, channels);
            }
        }
    }
}

#[test]
fn kernels_follow_each_other_over_the_same_barriers_and_lines_and_their_counts_wrap_around() {
    for release in VERSIONS {
        let machine = Machine::new(release, 3, 5);
        machine.set_epochs(u32::MAX - 9);
        for round in 0..12 {
            for kernel in ["AllReduce_AGxLL_R_sum_f32", "AllReduce_RSxLD_AGxST_sum_f32"] {
                let one = Collective::new(&machine, Kind::Reduce, DataType::F32, false, 5000);
                check(&machine, kernel, &[one], 1 + round % 3);
            }
        }
    }
}

#[test]
fn ranks_of_which_one_is_ahead_do_not_overtake_the_others_lines() {
    let machine = Machine::new(Release::V2_32_3, 2, 3);
    // Many launches of one rank before the first of the other.
    let collectives: Vec<_> = (0..6)
        .map(|_| Collective::new(&machine, Kind::Reduce, DataType::F32, false, 4000))
        .collect();
    let mut queues: Vec<Vec<_>> = (0..2)
        .map(|rank| {
            let launches = collectives.iter().rev().map(|one| {
                let parameters = machine.parameters(rank, &[one.call(rank)], 4, 2, 0, None);
                machine
                    .launch("AllReduce_AGxLL_R_sum_f32", parameters)
                    .unwrap()
            });
            launches.collect()
        })
        .collect();
    while queues.iter().any(|queue| !queue.is_empty()) {
        for queue in &mut queues {
            // The one goes on as far as it can.
            while let Some(kernel) = queue.last_mut() {
                match kernel.step(1 << 20).unwrap() {
                    Progress::Done => {
                        queue.pop();
                    }
                    Progress::Moved => {}
                    Progress::Waiting => break,
                }
            }
        }
    }
    for one in &collectives {
        one.check(&machine, "one ahead");
    }
}

#[test]
fn lines_serve_buffers_that_are_in_no_window() {
    for release in [Release::V2_32_3, Release::V2_30_7] {
        let machine = Machine::new(release, 4, 1);
        let mut one = Collective::new(&machine, Kind::Reduce, DataType::F32, false, 1001);
        for place in one.inputs.iter_mut().chain(&mut one.outputs) {
            (place.window, place.offset) = (0, place.address);
        }
        check(&machine, "AllReduce_AGxLL_R_sum_f32", &[one], 3);
    }
}

#[test]
fn a_tile_of_an_all_reduce_is_summed_from_its_owner_on() {
    // In 32 bits big + 1 + ... loses every one that is added to big; the order tells who began.
    let ranks = 4;
    let machine = Machine::new(Release::V2_30_7, ranks, 2);
    let count = 3 * 4 * ranks * 512 + 100;
    let places = machine.window(0, 4 * count);
    let inputs = [1f32, 16_777_216.0, 1.0, 1.0];
    for (place, value) in places.iter().zip(inputs) {
        machine
            .devices
            .write(place.address, &value.to_le_bytes().repeat(count));
    }
    let kernels = (0..ranks)
        .map(|rank| {
            let call = Call {
                input: places[rank],
                output: places[rank],
                elements: count,
                argument: 0,
            };
            let parameters = machine.parameters(rank, &[call], 4, 1, 0, None);
            machine
                .launch("AllReduce_RSxLD_AGxST_sum_f32", parameters)
                .unwrap()
        })
        .collect();
    machine.finish(kernels).unwrap();
    let from = |owner: usize| {
        let order = (owner..owner + ranks).map(|rank| inputs[rank % ranks]);
        order.reduce(|sum, value| sum + value).unwrap()
    };
    // Two ones that meet before the big value are not lost.
    assert_eq!(
        [0, 1, 2, 3].map(from),
        [0., 0., 4., 4.].map(|more| 16_777_216.0 + more)
    );
    for place in &places {
        let bytes = machine.devices.read(place.address, 4 * count);
        let value = |at: usize| f32::from_le_bytes(bytes[4 * at..][..4].try_into().unwrap());
        // Tiles of 2 KiB are dealt to ranks in turn, and at the end warps of 32 elements.
        for tile in 0..12 * ranks {
            assert_eq!(value(512 * tile), from(tile % ranks), "tile {tile}");
            assert_eq!(value(512 * tile + 511), from(tile % ranks), "tile {tile}");
        }
        let ends = count - 100;
        for at in 0..100 {
            assert_eq!(
                value(ends + at),
                from(at / 32 % ranks),
                "element {at} of the end"
            );
        }
    }
}

#[test]
fn an_aborted_communicator_ends_kernels_that_wait() {
    for (kernel, element) in [("AllGather_ST", 1), ("AllReduce_AGxLL_R_sum_f32", 4)] {
        let machine = Machine::new(Release::V2_32_3, 2, 1);
        let one = Collective::new(&machine, Kind::Reduce, DataType::F32, false, 100);
        let flag = machine.private(4);
        let parameters = machine.parameters(0, &[one.call(0)], element, 1, flag, None);
        let mut running = machine.launch(kernel, parameters).unwrap();
        while running.step(1 << 20).unwrap() != Progress::Waiting {}
        assert!(
            running.describe().contains("rank 1"),
            "{}",
            running.describe()
        );
        assert_eq!(running.step(1 << 20).unwrap(), Progress::Waiting);
        machine.devices.write(flag, &[1, 0, 0, 0]);
        assert_eq!(running.step(1 << 20).unwrap(), Progress::Done);
    }
}

#[test]
fn a_window_that_is_freed_under_a_kernel_is_named() {
    let machine = Machine::new(Release::V2_32_3, 2, 4);
    let one = Collective::new(&machine, Kind::Reduce, DataType::F32, false, 100);
    let kernels = (0..2)
        .map(|rank| {
            let parameters = machine.parameters(rank, &[one.call(rank)], 4, 1, 0, None);
            machine
                .launch("AllReduce_RSxLD_AGxST_sum_f32", parameters)
                .unwrap()
        })
        .collect();
    machine.devices.free(one.inputs[1].address);
    let failure = machine.finish(kernels).unwrap_err();
    assert!(failure.to_string().contains("freed"), "{failure}");
}

#[test]
fn a_buffer_without_window_cannot_be_used_in_place() {
    let machine = Machine::new(Release::V2_32_3, 2, 4);
    let mut one = Collective::new(&machine, Kind::Reduce, DataType::F32, false, 100);
    for place in one.inputs.iter_mut() {
        (place.window, place.offset) = (0, place.address);
    }
    let kernels = (0..2)
        .map(|rank| {
            let parameters = machine.parameters(rank, &[one.call(rank)], 4, 1, 0, None);
            machine
                .launch("AllReduce_RSxLD_AGxST_sum_f32", parameters)
                .unwrap()
        })
        .collect();
    let failure = machine.finish(kernels).unwrap_err();
    assert!(failure.to_string().contains("no buffer"), "{failure}");
}

#[test]
fn multicast_network_and_broken_arguments_are_refused() {
    let machine = Machine::new(Release::V2_32_3, 2, 1);
    let one = Collective::new(&machine, Kind::Reduce, DataType::F32, false, 100);
    let parameters = || machine.parameters(0, &[one.call(0)], 4, 1, 0, None);
    let reason = |kernel, parameters| machine.launch(kernel, parameters).err().unwrap().reason;
    let multicast = reason("AllReduce_RSxLDMC_AGxSTMC_sum_f32", parameters());
    assert_eq!(multicast, Reason::Multicast);
    let rail = reason("AllGather_RailRing_LsaSTMC", parameters());
    assert_eq!(rail, Reason::DeviceNetwork);
    let kernel = "AllReduce_RSxLD_AGxST_sum_f32";
    let short = (parameters().0[..340].to_vec(), 1);
    assert!(matches!(
        reason(kernel, short),
        Reason::Parameters { found: 340, .. }
    ));
    let many = (parameters().0, 2);
    assert_eq!(
        reason(kernel, many),
        Reason::Grid {
            channels: 1,
            blocks: 2
        }
    );
    let unknown = reason("AllReduce_NewAlgorithm_sum_f32", parameters());
    assert_eq!(unknown, Reason::UnknownKernel);
}

#[test]
fn profiled_kernels_tell_their_times() {
    let machine = Machine::new(Release::V2_32_3, 2, 1);
    for (kernel, number) in [
        ("AllReduce_RSxLD_AGxST_sum_f32_profile", 70),
        ("AllReduce_AGxLL_R_sum_f32_profile", 3),
    ] {
        let one = Collective::new(&machine, Kind::Reduce, DataType::F32, false, 5000);
        let targets = [1024, 1024, 2560].map(|length| machine.private(2 * length));
        let kernels = (0..2)
            .map(|rank| {
                let targets = if rank == 0 {
                    targets
                } else {
                    [1024, 1024, 2560].map(|length| machine.private(2 * length))
                };
                let profile = Some((targets, number));
                let parameters = machine.parameters(rank, &[one.call(rank)], 4, 2, 0, profile);
                machine.launch(kernel, parameters).unwrap()
            })
            .collect();
        machine.finish(kernels).unwrap();
        one.check(&machine, kernel);
        for channel in 0..2 {
            // The host numbers the channels' works.
            let number = number + channel;
            let entry = number % 64;
            let event = |base: u64, word: u64| {
                machine
                    .devices
                    .word(base + 1024 * channel + 16 * entry + 8 * word)
            };
            let phase = |word: u64| {
                machine
                    .devices
                    .word(targets[2] + 2560 * channel + 40 * entry + 8 * word)
            };
            assert_eq!(
                [event(targets[0], 0), event(targets[1], 0), phase(0)],
                [number; 3]
            );
            let times: Vec<_> = (1..5).map(phase).collect();
            assert!(times.is_sorted() && times[0] > 0, "{times:?}");
            assert_eq!(event(targets[0], 1), times[0]);
            assert_eq!(event(targets[1], 1), times[3]);
        }
    }
}
