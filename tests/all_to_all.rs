//! The all-to-all family on random worlds: every algorithm equals what each rank was to get, whatever is exchanged, on
//! whatever streams, late, in steps, in place, or from a graph.

mod support;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use nccl::cudarc::driver::{CudaSlice, CudaStream};
use nccl::{
    AllToAll, AllToAllAlgorithm as By, AllToAllBuilder, Communicator, CostModel, DataType, Erased,
    ErasedMut, ErrorKind, LinkCost, Parts, Request, World,
};
use nccl_emulator::faults;
use support::{Ranks, ranks_as_threads};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

const TYPES: [DataType; 6] = [
    DataType::UINT8,
    DataType::FLOAT16,
    DataType::BFLOAT16,
    DataType::FLOAT32,
    DataType::INT64,
    DataType::FLOAT64,
];

fn few(number: usize) -> NonZeroUsize {
    NonZeroUsize::new(number).expect("more than 0")
}

/// What every rank gives every rank: the same on all of them.
struct Matrix {
    data_type: DataType,
    size: usize,
    /// By sender and receiver, in elements.
    counts: Vec<Vec<usize>>,
    /// Elements between two parts.
    gap: usize,
    salt: usize,
}

impl Matrix {
    fn random(random: &mut fastrand::Rng, ranks: usize, uniform: bool) -> Self {
        let data_type = TYPES[random.usize(..TYPES.len())];
        let most = [1, 3, 40, 5000][random.usize(..4)];
        let mut count = || match random.u8(..4) {
            0 => 0,
            _ => random.usize(..most),
        };
        let counts = if uniform {
            vec![vec![count(); ranks]; ranks]
        } else {
            let mut row = || (0..ranks).map(|_| count()).collect();
            (0..ranks).map(|_| row()).collect()
        };
        Self {
            data_type,
            size: data_type.size_in_bytes().expect("a type with a size"),
            counts,
            gap: if uniform { 0 } else { random.usize(..3) },
            salt: random.usize(..256),
        }
    }

    fn byte(&self, from: usize, to: usize, at: usize) -> u8 {
        (self.salt + from * 89 + to * 31 + at * 7 + at / 251) as u8
    }

    fn part(&self, from: usize, to: usize) -> impl Iterator<Item = u8> {
        let bytes = self.counts[from][to] * self.size;
        (0..bytes).map(move |at| self.byte(from, to, at))
    }

    fn sent(&self, rank: usize) -> Vec<usize> {
        self.counts[rank].clone()
    }

    fn received(&self, rank: usize) -> Vec<usize> {
        self.counts.iter().map(|row| row[rank]).collect()
    }

    fn displacements(&self, counts: &[usize]) -> Vec<usize> {
        let mut next = 0;
        let at = |count: &usize| {
            let at = next;
            next += count + self.gap;
            at
        };
        counts.iter().map(at).collect()
    }

    /// What rank `rank` sends, and what it is to have afterwards; `rest` fills what no part covers.
    fn buffers(&self, rank: usize, rest: u8) -> (Vec<u8>, Vec<u8>) {
        let lay = |counts: Vec<usize>, part: &dyn Fn(usize) -> Vec<u8>| {
            let displacements = self.displacements(&counts);
            let elements: usize = counts.iter().map(|count| count + self.gap).sum();
            // No allocator gives memory for nothing.
            let mut bytes = vec![rest; elements.max(1) * self.size];
            for (peer, at) in displacements.iter().enumerate() {
                let part = part(peer);
                bytes[at * self.size..at * self.size + part.len()].copy_from_slice(&part);
            }
            bytes
        };
        let sent = lay(self.sent(rank), &|to| self.part(rank, to).collect());
        let expected = lay(self.received(rank), &|from| self.part(from, rank).collect());
        (sent, expected)
    }

    fn is_uniform(&self) -> bool {
        let first = self.counts[0][0];
        self.gap == 0 && self.counts.iter().flatten().all(|count| *count == first)
    }

    fn add_to<'c>(&self, plan: AllToAllBuilder<'c>, rank: usize) -> AllToAllBuilder<'c> {
        if self.is_uniform() {
            return plan.per_peer_of(self.data_type, self.counts[0][0]);
        }
        let (sent, received) = (self.sent(rank), self.received(rank));
        let (send_at, recv_at) = (self.displacements(&sent), self.displacements(&received));
        plan.parts_of(
            self.data_type,
            Parts::at(&sent, &send_at),
            Parts::at(&received, &recv_at),
        )
    }
}

/// One payload on the device of one rank.
struct Device {
    x: CudaSlice<u8>,
    y: CudaSlice<u8>,
    expected: Vec<u8>,
}

const REST: u8 = 0xA5;

impl Device {
    fn new(matrix: &Matrix, rank: usize, streams: [&Arc<CudaStream>; 2]) -> Outcome<Self> {
        let (sent, expected) = matrix.buffers(rank, REST);
        Ok(Self {
            x: streams[0].clone_htod(&sent)?,
            y: streams[1].clone_htod(&vec![REST; expected.len()])?,
            expected,
        })
    }

    fn check(&self, what: &str) -> Outcome {
        let found = self.y.stream().clone_dtoh(&self.y)?;
        assert!(found == self.expected, "{what}");
        Ok(())
    }
}

/// What a plan can be asked for; `nodes` of so many ranks, if they can be divided.
fn algorithms(ranks: usize, uniform: bool) -> Vec<(By, Option<usize>)> {
    let mut all = vec![
        (By::Auto, None),
        (By::Grouped, None),
        (By::Chunked { pieces: few(1) }, None),
        (By::Chunked { pieces: few(5) }, None),
        (By::Pairwise { width: few(1) }, None),
        (By::Pairwise { width: few(2) }, None),
    ];
    if uniform {
        all.push((By::Native, None));
        let divides = |local: &usize| ranks.is_multiple_of(*local) && *local < ranks;
        for local in (2..ranks).filter(divides) {
            all.push((By::TwoLevel, Some(local)));
            all.push((By::Auto, Some(local)));
        }
    }
    all
}

/// Models in whose eyes copies are cheap, or dear: packed or not.
fn model(packs: bool) -> CostModel {
    CostModel {
        copy_us: if packs { 1e-6 } else { 1e6 },
        copied_gbps: if packs { 1e9 } else { 1e-6 },
        wire_us: 1e-3,
        between: LinkCost {
            message_us: 100.0,
            bandwidth_gbps: 1e6,
        },
        ..CostModel::published()
    }
}

fn plan<'c>(
    comm: &'c Communicator,
    matrices: &[Matrix],
    (algorithm, nodes): (By, Option<usize>),
    packs: bool,
) -> AllToAllBuilder<'c> {
    let mut plan = AllToAll::plan(comm)
        .algorithm(algorithm)
        .cost_model(model(packs));
    if let Some(ranks) = nodes {
        plan = plan.ranks_per_node(ranks);
    }
    for matrix in matrices {
        plan = matrix.add_to(plan, comm.rank());
    }
    plan
}

fn erased<'a>(
    device: &'a mut Device,
    matrix: &Matrix,
) -> nccl::Result<(Erased<'a>, ErasedMut<'a>)> {
    Ok((
        Erased::from_bytes(device.x.as_view(), matrix.data_type)?,
        ErasedMut::from_bytes(device.y.as_view_mut(), matrix.data_type)?,
    ))
}

fn enqueue(
    plan: &mut AllToAll,
    devices: &mut [Device],
    matrices: &[Matrix],
) -> nccl::Result<Request> {
    match (devices, matrices) {
        ([a], [m]) => {
            let (x, y) = erased(a, m)?;
            plan.enqueue(x, y)
        }
        ([a, b], [m, n]) => plan.enqueue_all((erased(a, m)?, erased(b, n)?)),
        ([a, b, c], [m, n, o]) => plan.enqueue_all((erased(a, m)?, erased(b, n)?, erased(c, o)?)),
        _ => unreachable!("at most three"),
    }
}

/// Late enough that a rank that does not wait for the others, or for its own steps, reads what is not there yet.
const LATE: Duration = Duration::from_micros(300);

fn plans(world: &World, turns: u64) -> Outcome {
    let context = support::device(world)?;
    let [own, other, third] = [
        context.new_stream()?,
        context.new_stream()?,
        context.new_stream()?,
    ];
    let comm = world.communicator("family").stream(&own).build()?;
    let (rank, ranks) = (world.rank(), world.size());
    for turn in 0..turns {
        let mut random = fastrand::Rng::with_seed(turn * 64 + ranks as u64);
        let uniform = random.bool();
        let payloads = random.usize(1..=3);
        let matrices: Vec<_> = (0..payloads)
            .map(|_| Matrix::random(&mut random, ranks, uniform))
            .collect();
        let uniform = matrices.iter().all(Matrix::is_uniform);
        let late = random.bool().then(|| faults::late(LATE));
        let streams = match random.u8(..3) {
            0 => [&own, &own],
            1 => [&other, &own],
            _ => [&other, &third],
        };
        for how in algorithms(ranks, uniform) {
            let packs = random.bool();
            let what = format!("turn {turn}, {ranks} ranks, {how:?}, packs {packs}");
            let mut plan = plan(&comm, &matrices, how, packs)
                .build()
                .map_err(|error| format!("{what}: {error:#}"))?;
            // Two at once: the second is behind the first on the stream, and uses the same memory of the plan.
            let mut twice = Vec::new();
            for _ in 0..2 {
                let devices = matrices.iter().map(|one| Device::new(one, rank, streams));
                twice.push(devices.collect::<Outcome<Vec<_>>>()?);
            }
            let mut done = Vec::new();
            for devices in &mut twice {
                done.push(enqueue(&mut plan, devices, &matrices)?);
            }
            // The order of streams is enough for who reads the results.
            if random.bool() {
                done.iter().try_for_each(Request::wait)?;
            }
            for device in twice.iter().flatten() {
                device.check(&what)?;
            }
            drop(twice);
            done.iter().try_for_each(Request::wait)?;
        }
        drop(late);
    }
    comm.finalize()?;
    Ok(())
}

#[test]
fn every_algorithm_of_a_plan_moves_every_element() {
    if !support::needs_emulator("lateness on purpose") {
        return;
    }
    for ranks in [1, 2, 3, 4, 6, 8] {
        let turns = if ranks > 4 { 6 } else { 12 };
        ranks_as_threads(ranks, move |world| plans(&world, turns));
    }
}

#[test]
fn every_algorithm_of_a_plan_moves_every_element_between_processes() {
    if !support::needs_processes(4) {
        return;
    }
    Ranks::new(4).processes(|world| plans(&world, 4));
}

fn in_place(world: &World) -> Outcome {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("in place").stream(&stream).build()?;
    let (rank, ranks) = (world.rank(), world.size());
    for turn in 0..10 {
        let mut random = fastrand::Rng::with_seed(turn);
        let matrix = Matrix::random(&mut random, ranks, true);
        let count = matrix.counts[0][0];
        let (sent, expected) = matrix.buffers(rank, REST);
        let block = (count * matrix.size).next_multiple_of(16);
        let late = random.bool().then(|| faults::late(LATE));
        for room in 1..=ranks {
            let what = format!("turn {turn}, {ranks} ranks, room for {room}");
            let buffer = || {
                let mut y = stream.clone_htod(&sent)?;
                if count == 0 {
                    y = stream.alloc_zeros::<u8>(ranks * matrix.size)?;
                }
                Ok::<_, Box<dyn std::error::Error>>(y)
            };
            let elements = count * ranks * matrix.size;
            let check = |y: &CudaSlice<u8>| {
                let found = stream.clone_dtoh(y)?;
                assert!(found[..elements] == expected[..elements], "{what}");
                Ok::<_, Box<dyn std::error::Error>>(())
            };
            let mut y = buffer()?;
            let mut scratch = stream.alloc_zeros::<u8>((room * block).max(1))?;
            let view = ErasedMut::from_bytes(y.slice_mut(..elements), matrix.data_type)?;
            comm.all_to_all_in_place(view, &mut scratch)?;
            check(&y)?;
            let plan = AllToAll::plan(&comm).per_peer_of(matrix.data_type, count);
            let mut plan = plan.in_place().scratch_limit(room * block).build()?;
            for _ in 0..2 {
                let mut y = buffer()?;
                let view = ErasedMut::from_bytes(y.as_view_mut(), matrix.data_type)?;
                plan.enqueue_in_place(view)?;
                check(&y)?;
            }
        }
        drop(late);
    }
    let mut y = stream.alloc_zeros::<u64>(ranks * 4)?;
    let mut scratch = stream.alloc_zeros::<u8>(31)?;
    if ranks > 1 {
        let error = comm.all_to_all_in_place(&mut y, &mut scratch).unwrap_err();
        let ErrorKind::Length {
            given: 31,
            needed: 32,
            ..
        } = error.kind()
        else {
            panic!("{error}");
        };
    }
    comm.finalize()?;
    Ok(())
}

#[test]
fn blocks_of_one_buffer_change_places_whatever_room_there_is() {
    if !support::needs_emulator("lateness on purpose") {
        return;
    }
    for ranks in [1, 2, 3, 4, 5] {
        ranks_as_threads(ranks, |world| in_place(&world));
    }
}

fn captured(world: &World) -> Outcome {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("graph").stream(&stream).build()?;
    let (rank, ranks) = (world.rank(), world.size());
    let block = |from: usize, to: usize, round: usize| (from * 100 + to * 10 + round) as f32;
    let sent = |round| (0..ranks).flat_map(move |to| [block(rank, to, round); 3]);
    let received = |round| (0..ranks).flat_map(move |from| [block(from, rank, round); 3]);
    let memory = || stream.alloc_zeros::<f32>(ranks * 3);
    for (algorithm, nodes) in algorithms(ranks, true) {
        for packs in [false, true] {
            let mut plan = AllToAll::plan(&comm)
                .per_peer::<f32>(3)
                .algorithm(algorithm)
                .cost_model(model(packs));
            if let Some(nodes) = nodes {
                plan = plan.ranks_per_node(nodes);
            }
            let plan = plan.build()?;
            let mut captured = plan.capture(memory()?, memory()?)?;
            let in_place = AllToAll::plan(&comm).per_peer::<f32>(3).in_place();
            let in_place = in_place.scratch_limit(16).build()?;
            let mut swapped = in_place.capture_in_place(memory()?)?;
            // The memory that the graphs use is theirs.
            drop((plan, in_place));
            for round in 0..4 {
                let x: Vec<f32> = sent(round).collect();
                let expected: Vec<f32> = received(round).collect();
                stream.memcpy_htod(&x, &mut captured.views_mut().0)?;
                stream.memcpy_htod(&x, &mut swapped.views_mut())?;
                captured.launch()?;
                swapped.launch()?;
                let what = format!("{algorithm}, {nodes:?}, packs {packs}, round {round}");
                assert_eq!(stream.clone_dtoh(&captured.views().1)?, expected, "{what}");
                assert_eq!(stream.clone_dtoh(&swapped.views())?, expected, "{what}");
            }
            captured.into_buffers()?;
        }
    }
    comm.finalize()?;
    Ok(())
}

#[test]
fn a_graph_of_any_algorithm_exchanges_anew_with_each_launch() {
    for ranks in [1, 2, 4] {
        ranks_as_threads(ranks, |world| captured(&world));
    }
}

fn calls(world: &World) -> Outcome {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("calls").stream(&stream).build()?;
    let (rank, ranks) = (world.rank(), world.size());
    for by in ["chunked:3", "pairwise:1", "pairwise:2"] {
        let sent: Vec<u32> = (0..ranks * 9).map(|at| (rank * 1000 + at) as u32).collect();
        let from = |from: usize| (0..9).map(move |at| (from * 1000 + rank * 9 + at) as u32);
        let expected: Vec<u32> = (0..ranks).flat_map(from).collect();
        let (x, mut y) = (
            stream.clone_htod(&sent)?,
            stream.alloc_zeros::<u32>(ranks * 9)?,
        );
        comm.all_to_all_with(&x, &mut y, by.parse()?)?.wait()?;
        assert_eq!(stream.clone_dtoh(&y)?, expected, "{by}");
    }
    // As many elements to each rank as it has a number, from back to front.
    let counts: Vec<usize> = (0..ranks).map(|peer| peer + rank).collect();
    let mut at: Vec<usize> = counts.clone();
    let mut next = 1;
    for peer in (0..ranks).rev() {
        at[peer] = next;
        next += counts[peer] + 1;
    }
    let parts = Parts::at(&counts, &at);
    let mut sent = vec![0u64; next];
    let mut expected = vec![0u64; next];
    for peer in 0..ranks {
        for index in 0..counts[peer] {
            sent[at[peer] + index] = (rank * 100 + peer * 10 + index + 1) as u64;
            expected[at[peer] + index] = (peer * 100 + rank * 10 + index + 1) as u64;
        }
    }
    let (x, mut y) = (stream.clone_htod(&sent)?, stream.alloc_zeros::<u64>(next)?);
    comm.all_to_all_v_at(&x, parts, &mut y, parts)?.wait()?;
    assert_eq!(stream.clone_dtoh(&y)?, expected);
    // What would be written twice is refused, wherever it lies.
    if ranks > 1 {
        let twos = vec![2; ranks];
        let mut overlapping: Vec<_> = (0..ranks).map(|peer| 8 + 2 * peer).collect();
        overlapping[0] = 11;
        let mut long = stream.alloc_zeros::<u64>(16)?;
        let other = Parts::at(&twos, &overlapping);
        let error = comm.all_to_all_v_at(&x, Parts::packed(&twos), &mut long, other);
        let error = error.unwrap_err();
        let ErrorKind::InvalidConfig { reason, .. } = error.kind() else {
            panic!("{error}");
        };
        assert_eq!(
            reason,
            "what ranks 0 and 1 send would lie in the same place"
        );
    }
    for by in [By::TwoLevel, By::CopyEngine] {
        let error = comm.all_to_all_with(&x, &mut y, by).unwrap_err();
        assert!(error.to_string().contains("needs a plan"), "{error}");
    }
    comm.finalize()?;
    Ok(())
}

#[test]
fn calls_in_steps_and_with_displacements_are_right() {
    for ranks in [1, 2, 3] {
        ranks_as_threads(ranks, |world| calls(&world));
    }
}

fn refused(world: &World) -> Outcome {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("refused").stream(&stream).build()?;
    let rank = world.rank();
    let plan = || AllToAll::plan(&comm);
    let text = |builder: AllToAllBuilder<'_>| match builder.build() {
        Ok(plan) => panic!("{}", plan.explain()),
        Err(error) => (error.to_string(), error),
    };
    // The ranks want different ways: the same sentence on all.
    let by = if rank == 2 {
        By::Pairwise { width: few(1) }
    } else {
        By::Grouped
    };
    let (said, error) = text(plan().per_peer::<f32>(4).algorithm(by));
    assert!(
        matches!(error.kind(), ErrorKind::PlansDiffer { plan: 1, .. }),
        "{said}"
    );
    assert!(
        said.contains("wants pairwise:1; the others grouped"),
        "{said}"
    );
    assert!(said.contains("rank 2 ("), "{said}");
    // One expects more than it is sent.
    let mut counts = vec![3; 3];
    let send = counts.clone();
    if rank == 1 {
        counts[0] = 5;
    }
    let (said, error) = text(plan().parts::<f32>(Parts::packed(&send), Parts::packed(&counts)));
    assert!(
        matches!(error.kind(), ErrorKind::PlansDiffer { plan: 2, .. }),
        "{said}"
    );
    assert!(
        said.contains("rank 1") && said.contains('5') && said.contains('3'),
        "{said}"
    );
    // One has nothing to exchange: its own error there, and what it was elsewhere.
    let empty = if rank == 0 {
        plan()
    } else {
        plan().per_peer::<u8>(1)
    };
    let (said, error) = text(empty);
    match rank {
        0 => assert!(matches!(error.kind(), ErrorKind::Length { .. }), "{said}"),
        _ => assert!(
            said.contains("made none, because the payloads of the plan"),
            "{said}"
        ),
    }
    // What this communicator cannot do, with the reason.
    let cannot = |by| text(plan().per_peer::<f32>(4).algorithm(by)).0;
    assert!(cannot(By::TwoLevel).contains("all ranks are on one node"));
    assert!(cannot(By::CopyEngine).contains("cta_policy(CtaPolicy::Zero)"));
    let (said, _) = text(plan().per_peer::<f32>(4).ranks_per_node(2));
    assert!(
        said.contains("3 ranks cannot be divided into nodes of 2"),
        "{said}"
    );
    let parts = Parts::packed(&send);
    let (said, _) = text(plan().parts::<f32>(parts, parts).algorithm(By::Native));
    assert!(said.contains("it is for equal parts"), "{said}");
    // Nothing of this has cost the communicator anything.
    let mut good = plan().per_peer::<f32>(4).build()?;
    let said = good.explain().to_string();
    assert!(
        said.contains("two-level: no, all ranks are on one node"),
        "{said}"
    );
    assert!(
        said.starts_with("native: the model holds it for the fastest"),
        "{said}"
    );
    let (x, mut y) = (
        stream.alloc_zeros::<f32>(12)?,
        stream.alloc_zeros::<f32>(12)?,
    );
    good.enqueue(&x, &mut y)?.wait()?;
    // Nor what is wrong with buffers, later.
    let short = stream.alloc_zeros::<f32>(11)?;
    let error = good.enqueue(&short, &mut y).unwrap_err();
    assert!(error.to_string().contains("the send buffer"), "{error}");
    let (of_u8, mut to_u8) = (stream.alloc_zeros::<u8>(12)?, stream.alloc_zeros::<u8>(12)?);
    let error = good.enqueue(&of_u8, &mut to_u8).unwrap_err();
    assert!(error.to_string().contains("made for"), "{error}");
    let error = good.enqueue_in_place(&mut y).unwrap_err();
    assert!(
        error.to_string().contains("was not made in_place"),
        "{error}"
    );
    let two = ((&x, &mut y), (&of_u8, &mut to_u8));
    let error = good.enqueue_all(two).unwrap_err();
    assert!(
        error.to_string().contains("a pair for each payload"),
        "{error}"
    );
    good.enqueue(&x, &mut y)?.wait()?;
    comm.finalize()?;
    Ok(())
}

#[test]
fn plans_that_do_not_belong_together_are_told_on_all_ranks_before_anything_is_exchanged() {
    ranks_as_threads(3, |world| refused(&world));
}

fn measured(world: &World) -> Outcome {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("measured").stream(&stream).build()?;
    let ranks = world.size();
    for local in [ranks, 2] {
        let plan = AllToAll::plan(&comm)
            .per_peer::<f32>(64)
            .ranks_per_node(local);
        let mut plan = plan.measured().build()?;
        let model = *plan.explain().model();
        assert_ne!(model, CostModel::published());
        // All ranks have the same, to the bit.
        let all = world.all_gather(
            &format!("model {local}"),
            serde_json::to_string(&model)?.as_bytes(),
        )?;
        assert!(all.iter().all(|other| *other == all[0]));
        let (x, mut y) = (
            stream.alloc_zeros::<f32>(64 * ranks)?,
            stream.alloc_zeros::<f32>(64 * ranks)?,
        );
        plan.enqueue(&x, &mut y)?.wait()?;
    }
    // One that cannot make it keeps nobody from it for longer than that takes to tell.
    let plan = AllToAll::plan(&comm).per_peer::<f32>(64).measured();
    let plan = match world.rank() {
        0 => plan.ranks_per_node(3),
        _ => plan,
    };
    let error = plan.build().unwrap_err();
    assert!(error.to_string().contains("nodes of 3"), "{error}");
    assert!(comm.fault().is_none());
    comm.finalize()?;
    Ok(())
}

#[test]
fn measured_constants_are_the_same_on_all_ranks() {
    ranks_as_threads(4, |world| measured(&world));
}

fn windows(world: &World) -> Outcome {
    let stream = support::device(world)?.new_stream()?;
    let config = nccl::Config::new().cta_policy(nccl::CtaPolicy::Zero);
    let comm = world
        .communicator("windows")
        .stream(&stream)
        .config(config)
        .build()?;
    let (rank, ranks) = (world.rank(), world.size());
    let window = || comm.register_window(comm.buffer::<u32>(ranks * 5)?);
    let (mut x, mut y) = (window()?, window()?);
    let plan = || {
        AllToAll::plan(&comm)
            .per_peer::<u32>(5)
            .algorithm(By::CopyEngine)
    };
    let mut plan = plan().build()?;
    assert_eq!(plan.explain().algorithm(), By::CopyEngine);
    let sent: Vec<u32> = (0..ranks * 5).map(|at| (rank * 100 + at) as u32).collect();
    let of = |from: usize| (0..5).map(move |at| (from * 100 + rank * 5 + at) as u32);
    let expected: Vec<u32> = (0..ranks).flat_map(of).collect();
    stream.memcpy_htod(&sent, &mut x.view_mut())?;
    assert!(x.is_effective() && y.is_effective());
    plan.enqueue(&x, &mut y)?.wait()?;
    assert_eq!(stream.clone_dtoh(&y.view())?, expected);
    // Where NCCL would silently take another way, the plan says so.
    let mut elsewhere = comm.buffer::<u32>(ranks * 5)?;
    let error = plan.enqueue(&x, &mut elsewhere).unwrap_err();
    assert!(error.to_string().contains("symmetric windows"), "{error}");
    let y = y.into_inner()?;
    let mut y = comm.register_window(y)?;
    plan.enqueue(&x, &mut y)?.wait()?;
    assert_eq!(stream.clone_dtoh(&y.view())?, expected);
    // A window that is no more is none.
    let mut y = y.into_inner()?;
    assert!(plan.enqueue(&x, &mut y).is_err());
    drop(plan);
    comm.finalize()?;
    drop(x);
    Ok(())
}

#[test]
fn copy_engines_take_what_lies_in_symmetric_windows_and_nothing_else() {
    for ranks in [1, 2, 3] {
        ranks_as_threads(ranks, |world| windows(&world));
    }
    if support::needs_processes(2) {
        Ranks::new(2).processes(|world| windows(&world));
    }
}

/// What the model's formulas count for all ranks: messages, and the bytes of them.
fn counted(by: By, packed: bool, ranks: usize, local: usize, block: usize) -> (usize, usize) {
    let nodes = ranks / local;
    let (messages, bytes) = match by {
        By::Chunked { pieces } => (pieces.get() * ranks, ranks * block),
        By::TwoLevel => {
            let inside = if packed { local } else { ranks };
            (inside + nodes - 1, (ranks + (nodes - 1) * local) * block)
        }
        _ => (ranks, ranks * block),
    };
    (ranks * messages, ranks * bytes)
}

fn carried(world: &World) -> Outcome {
    const BLOCK: usize = 64;
    let stream = support::device(world)?.new_stream()?;
    let ranks = world.size();
    let local = 8;
    for (by, packs) in [
        (By::Grouped, false),
        (By::Chunked { pieces: few(4) }, false),
        (By::Pairwise { width: few(3) }, false),
        (By::TwoLevel, false),
        (By::TwoLevel, true),
    ] {
        let name = format!("{by}, {packs}");
        let comm = world.communicator(&name).stream(&stream).build()?;
        let plan = AllToAll::plan(&comm).per_peer::<u8>(BLOCK).algorithm(by);
        let mut plan = plan
            .ranks_per_node(local)
            .cost_model(model(packs))
            .build()?;
        let (x, mut y) = (
            stream.alloc_zeros::<u8>(ranks * BLOCK)?,
            stream.alloc_zeros::<u8>(ranks * BLOCK)?,
        );
        plan.enqueue(&x, &mut y)?.wait()?;
        world.barrier(&format!("{name} done"))?;
        let stats = nccl::stats();
        let of_this = stats.communicators.iter().filter(|one| one.name == name);
        let sends = of_this.flat_map(|one| &one.operations);
        let sends = sends.filter(|one| one.kind == nccl::OperationKind::Send);
        let found = sends.fold((0, 0), |(count, bytes), one| {
            (count + one.count as usize, bytes + one.bytes as usize)
        });
        let packed = plan.explain().copies() > 0;
        assert_eq!(packed, packs, "{name}");
        assert_eq!(found, counted(by, packed, ranks, local, BLOCK), "{name}");
        world.barrier(&format!("{name} looked"))?;
        drop(plan);
        comm.finalize()?;
    }
    Ok(())
}

#[test]
fn the_model_counts_the_messages_and_bytes_that_the_emulator_carries() {
    if !support::needs_emulator("more ranks than there are GPUs") {
        return;
    }
    for ranks in [16, 64] {
        ranks_as_threads(ranks, |world| carried(&world));
    }
}
