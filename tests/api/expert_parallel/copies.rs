//! Copies of experts: what comes back is the same, to the bit, wherever the copies are and whichever of them serves a token.

use nccl::moe::{DispatchWay, ExpertLayout, ExpertParallel, ExpertPlacement, Routing};
use nccl::{Communicator, ErrorKind, World};

use super::reference::{Case, Step, assert_same, expert};
use super::{
    Outcome, flat, nothing_was_caught, random_rows, random_step, random_tokens, start, up,
};
use crate::support::{ranks_as_processes, ranks_as_threads};

fn made(
    comm: &Communicator,
    case: &Case,
    placement: &ExpertPlacement,
    row_bytes: usize,
) -> nccl::Result<ExpertParallel> {
    ExpertParallel::builder(comm)
        .with(|ep| {
            ep.placement = Some(placement.clone());
            ep.top_k = case.top_k;
            ep.max_tokens = case.max_tokens;
            ep.capacity = Some(case.capacity);
            ep.layout = case.layout;
            ep.way = case.way;
            ep.max_row_bytes = row_bytes;
        })
        .build()
}

/// The same tokens, which choose places in place of experts, by the rule that is documented: the tokens take turns, and each rank begins
/// with another.
fn placed(step: &Step, placement: &ExpertPlacement) -> Step {
    let mut placed = step.clone();
    for (rank, topk) in placed.topk.iter_mut().enumerate() {
        for (token, choices) in topk.iter_mut().enumerate() {
            for choice in choices.iter_mut().filter(|choice| **choice >= 0) {
                let replicas = placement.replicas(*choice as usize);
                *choice = replicas[(rank + token) % replicas.len()] as i32;
            }
        }
    }
    placed
}

/// Routes, dispatches, runs the experts, and combines; compares all results. Returns what came back.
fn one_step(
    what: &str,
    (ep, routing): (&mut ExpertParallel, &mut Routing),
    case: &Case,
    (step, x): (&Step, &[Vec<f32>]),
    width: usize,
) -> Result<Vec<f32>, Box<dyn std::error::Error>> {
    let comm = ep.communicator().clone();
    let (rank, stream) = (comm.rank(), comm.stream().clone());
    let placement = ep.placement().clone();
    // The places as experts of their own, in blocks.
    let places = Case {
        experts: placement.ranks() * placement.places_per_rank(),
        ..*case
    };
    let topk = up(&stream, &flat(&step.topk[rank]))?;
    ep.route(&topk, routing)?;

    let mut y = stream.clone_htod(&vec![7f32; ep.rows() * width])?;
    ep.dispatch(routing, &up(&stream, &x[rank])?, &mut y)?;
    let found = stream.clone_dtoh(&y)?;
    let by_place = placed(step, &placement);
    let expected = places.received(&by_place, rank, x, width);
    assert_same(&format!("{what}: received"), &found, &expected, width);

    let rows = found.chunks_exact(width).zip(places.places(rank));
    let z: Vec<f32> = rows
        .flat_map(|(row, (place, ..))| {
            let per_rank = placement.places_per_rank();
            // Nothing comes to an empty place.
            let number = placement.expert_at(place / per_rank, place % per_rank);
            let number = number.unwrap_or(usize::MAX);
            row.iter().map(move |element| expert(number, *element))
        })
        .collect();
    let weights = up(&stream, &flat(&step.weights[rank]))?;
    let mut out = up(&stream, &x[rank])?;
    ep.combine(routing, &up(&stream, &z)?, &weights, &mut out)?
        .wait()?;
    let found = match out.len() {
        0 => Vec::new(),
        _ => stream.clone_dtoh(&out)?,
    };
    let expected = case.combined(step, rank, &x[rank], width);
    assert_same(&format!("{what}: combined"), &found, &expected, width);

    let counts = routing.counts()?;
    assert_eq!(counts.sent, case.counts(step)[rank], "{what}: sent");
    let own = rank * places.own()..(rank + 1) * places.own();
    let received = places.counts(&by_place);
    let received = received.iter().flat_map(|counts| &counts[own.clone()]);
    assert!(counts.received.iter().eq(received), "{what}: {counts:?}");
    Ok(found)
}

/// Numbers that fit, and a placement of them: balanced, or with each expert somewhere and empty places.
fn random_placement(random: &mut fastrand::Rng, ranks: usize) -> (Case, ExpertPlacement) {
    let experts = random.usize(1..=9);
    let copies = random.usize(1..=ranks);
    let per_rank = (experts * copies).div_ceil(ranks) + random.usize(0..=2);
    let placement = match random.bool() {
        true => {
            let loads: Vec<_> = (0..experts).map(|_| random.u64(..100)).collect();
            ExpertPlacement::balanced(&loads, ranks, per_rank, copies)
        }
        false => {
            let mut held = vec![None; ranks * per_rank];
            let mut free: Vec<_> = (0..held.len()).collect();
            random.shuffle(&mut free);
            for (place, expert) in free.into_iter().zip(0..experts) {
                held[place] = Some(expert);
            }
            ExpertPlacement::new(experts, per_rank, &held)
        }
    };
    let max_tokens = random.usize(1..=16);
    let case = Case {
        ranks,
        experts,
        top_k: random.usize(1..=experts.min(4)),
        max_tokens,
        capacity: max_tokens,
        layout: match random.bool() {
            true => ExpertLayout::RankMajor,
            false => ExpertLayout::ExpertMajor,
        },
        way: match random.bool() {
            true => DispatchWay::Rows,
            false => DispatchWay::AllGather,
        },
    };
    (case, placement.expect("it fits"))
}

fn random_world(world: &World, seed: u64) -> Outcome {
    let comm = start(world)?;
    // The same on all ranks.
    let mut random = fastrand::Rng::with_seed(seed);
    for round in 0..6 {
        let (case, placement) = random_placement(&mut random, world.size());
        let width = random.usize(1..20);
        let mut ep = made(&comm, &case, &placement, width * 4)?;
        assert_eq!(ep.experts(), case.experts);
        let mut routing = ep.routing()?;
        for step in 0..3 {
            let what = format!("seed {seed}, round {round}, step {step}, {case:?}, {placement:?}");
            let tokens = random_tokens(&mut random, &case);
            let step = random_step(&mut random, &case, &tokens);
            let x = random_rows::<f32>(&mut random, &step, width);
            one_step(&what, (&mut ep, &mut routing), &case, (&step, &x), width)?;
        }
    }
    comm.finalize()?;
    nothing_was_caught();
    Ok(())
}

#[test]
fn what_comes_back_is_the_same_wherever_the_copies_are() {
    for (seed, ranks) in [1, 2, 3, 4, 3].into_iter().enumerate() {
        ranks_as_threads(ranks, move |world| random_world(&world, seed as u64));
    }
}

#[test]
fn processes_have_copies_as_threads_have() {
    ranks_as_processes(3, |world| random_world(&world, 11));
}

#[test]
fn ranks_that_are_left_go_on_with_the_copies_that_they_have() {
    ranks_as_threads(4, |world: World| -> Outcome {
        let comm = start(&world)?;
        let (experts, width) = (6, 5);
        let case = |ranks| Case {
            ranks,
            experts,
            top_k: 3,
            max_tokens: 8,
            capacity: 8,
            layout: ExpertLayout::ExpertMajor,
            way: DispatchWay::AllGather,
        };
        let mut random = fastrand::Rng::with_seed(5);
        let tokens = random_tokens(&mut random, &case(4));
        let step = random_step(&mut random, &case(4), &tokens);
        let x = random_rows::<f32>(&mut random, &step, width);
        let before = ExpertPlacement::balanced(&[5, 1, 1, 1, 1, 1], 4, 4, 2)?;
        let mut ep = made(&comm, &case(4), &before, width * 4)?;
        let mut routing = ep.routing()?;
        let all = one_step("all", (&mut ep, &mut routing), &case(4), (&step, &x), width)?;
        // Each rank in turn is excluded.
        for gone in 0..4 {
            let left: Vec<_> = (0..4).filter(|rank| *rank != gone).collect();
            let others = comm.split("left", (world.rank() != gone).then_some(0), 0)?;
            let Some(others) = others else {
                world.all_gather("the others are done", &[])?;
                continue;
            };
            let former: Vec<_> = left.iter().copied().map(Some).collect();
            let after = before.after(&former)?;
            assert_eq!(after.missing(), [0; 0]);
            let pick = |of: &[Vec<Vec<i32>>]| left.iter().map(|rank| of[*rank].clone()).collect();
            let theirs = Step {
                topk: pick(&step.topk),
                weights: left
                    .iter()
                    .map(|rank| step.weights[*rank].clone())
                    .collect(),
            };
            let rows: Vec<_> = left.iter().map(|rank| x[*rank].clone()).collect();
            let mut ep = made(&others, &case(3), &after, width * 4)?;
            let mut routing = ep.routing()?;
            let what = format!("without rank {gone}");
            let found = one_step(
                &what,
                (&mut ep, &mut routing),
                &case(3),
                (&theirs, &rows),
                width,
            )?;
            assert_same(&what, &found, &all, width);
            others.finalize()?;
            // A split waits for all.
            world.all_gather("the others are done", &[])?;
        }
        comm.finalize()?;
        nothing_was_caught();
        Ok(())
    });
}

#[test]
fn copies_share_what_would_be_too_much_for_one() {
    ranks_as_threads(2, |world: World| -> Outcome {
        let comm = start(&world)?;
        let stream = comm.stream().clone();
        let case = Case {
            ranks: 2,
            experts: 2,
            top_k: 1,
            max_tokens: 8,
            capacity: 4,
            layout: ExpertLayout::RankMajor,
            way: DispatchWay::Rows,
        };
        let topk = up(&stream, &[0i32; 8])?;
        let once = ExpertPlacement::new(2, 2, &[Some(0), None, Some(1), None])?;
        let ep = made(&comm, &case, &once, 4)?;
        let mut routing = ep.routing()?;
        ep.route(&topk, &mut routing)?;
        let error = routing.counts().unwrap_err();
        let kind = error.kind();
        assert!(
            matches!(
                kind,
                ErrorKind::ExpertCapacity {
                    expert: 0,
                    tokens: 8,
                    capacity: 4,
                    ..
                }
            ),
            "{error:#}"
        );
        let twice = ExpertPlacement::new(2, 2, &[Some(1), Some(0), Some(0), None])?;
        let ep = made(&comm, &case, &twice, 4)?;
        let mut routing = ep.routing()?;
        ep.route(&topk, &mut routing)?;
        assert_eq!(routing.counts()?.sent, [8, 0]);
        // One too many for each copy: the expert is named, and not the place.
        let nine = up(&stream, &[0i32; 8])?;
        let tight = Case {
            capacity: 3,
            ..case
        };
        let ep = made(&comm, &tight, &twice, 4)?;
        let mut routing = ep.routing()?;
        ep.route(&nine, &mut routing)?;
        let error = routing.counts().unwrap_err();
        let kind = error.kind();
        assert!(
            matches!(
                kind,
                ErrorKind::ExpertCapacity {
                    expert: 0,
                    tokens: 4,
                    capacity: 3,
                    ..
                }
            ),
            "{error:#}"
        );
        // An expert that does not exist.
        ep.route(&up(&stream, &[2i32, 1])?, &mut routing)?;
        let error = routing.counts().unwrap_err();
        let kind = error.kind();
        assert!(
            matches!(
                kind,
                ErrorKind::NoSuchExpert {
                    entries: 1,
                    experts: 2,
                    ..
                }
            ),
            "{error:#}"
        );
        comm.finalize()?;
        Ok(())
    });
}

#[test]
fn placements_that_do_not_fit_or_differ_are_refused_on_all_ranks() {
    ranks_as_threads(2, |world: World| -> Outcome {
        let comm = start(&world)?;
        let case = Case {
            ranks: 2,
            experts: 2,
            top_k: 1,
            max_tokens: 4,
            capacity: 4,
            layout: ExpertLayout::RankMajor,
            way: DispatchWay::Rows,
        };
        let refused = |placement: &ExpertPlacement| {
            let error = made(&comm, &case, placement, 4).unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::InvalidConfig { .. }),
                "{error:#}"
            );
            format!("{error:#}")
        };
        let three = ExpertPlacement::blocks(6, 3)?;
        assert!(refused(&three).contains("of 3 ranks, and the communicator has 2"));
        let missing = ExpertPlacement::new(3, 1, &[Some(0), Some(2)])?;
        assert!(refused(&missing).contains("no rank has expert 1 (1 are missing)"));
        // The two ranks disagree.
        let own = match world.rank() {
            0 => [Some(0), Some(1)],
            _ => [Some(1), Some(0)],
        };
        let text = refused(&ExpertPlacement::new(2, 1, &own)?);
        assert!(
            text.contains("`placement`") && text.contains("fingerprint"),
            "{text}"
        );
        let error = ExpertParallel::builder(&comm)
            .with(|ep| {
                ep.placement = Some(ExpertPlacement::blocks(2, 2).expect("it fits"));
                (ep.experts, ep.top_k, ep.max_tokens, ep.max_row_bytes) = (4, 1, 1, 4);
            })
            .build()
            .unwrap_err();
        assert!(
            error
                .to_string()
                .contains("of 2 experts, and `experts` is 4"),
            "{error:#}"
        );
        comm.finalize()?;
        Ok(())
    });
}
