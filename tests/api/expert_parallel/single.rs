//! Tests of one guarantee each.

use std::time::{Duration, Instant};

use half::f16;
use nccl::cudarc::driver::sys::CUstreamCaptureMode;
use nccl::error::StreamRefusal;
use nccl::moe::{DispatchWay, ExpertLayout, ExpertParallel};
use nccl::{DataType, ErrorKind, OperationKind, World};
use nccl_emulator::faults;

use super::reference::{Case, Step, assert_same};
use super::{Outcome, experts_work, flat, made, nothing_was_caught, random_rows, start, up};
use crate::support::{needs_emulator, ranks_as_threads};

/// Two experts on each of two ranks; each expert has room for two tokens of each rank.
const CASE: Case = Case {
    ranks: 2,
    experts: 4,
    top_k: 2,
    max_tokens: 4,
    capacity: 2,
    layout: ExpertLayout::RankMajor,
    way: DispatchWay::Rows,
};

const WIDTH: usize = 3;

/// An error of CUDA that costs no context.
const OUT_OF_MEMORY: u32 = 2;

/// The same tokens on both ranks.
fn both(topk: &[[i32; 2]]) -> Step {
    let topk: Vec<Vec<i32>> = topk.iter().map(|choices| choices.to_vec()).collect();
    let weights = topk.iter().map(|_| vec![0.5, 2.0]).collect::<Vec<_>>();
    Step {
        topk: vec![topk; 2],
        weights: vec![weights; 2],
    }
}

fn kind_of<T: std::fmt::Debug>(result: nccl::Result<T>) -> String {
    let error = result.expect_err("an error");
    format!("{:?}", error.kind())
}

#[test]
fn an_expert_that_is_full_is_told_by_both_ends_and_the_tokens_are_not_numbers() {
    ranks_as_threads(2, |world: World| -> Outcome {
        let comm = start(&world)?;
        let (rank, stream) = (world.rank(), comm.stream().clone());
        let mut ep = made(&comm, &CASE, WIDTH * 4)?;
        let mut routing = ep.routing()?;
        // Rank 0 alone has a third token for expert 3, which is on rank 1.
        let mut step = both(&[[3, 0], [1, 3], [-1, 2], [0, 3]]);
        step.topk[1][3][1] = 2;
        let x = random_rows::<f32>(&mut fastrand::Rng::with_seed(1), &step, WIDTH);
        ep.route(&up(&stream, &flat(&step.topk[rank]))?, &mut routing)?;
        let mut y = stream.alloc_zeros::<f32>(CASE.rows() * WIDTH)?;
        ep.dispatch(&routing, &up(&stream, &x[rank])?, &mut y)?;
        let received = stream.clone_dtoh(&y)?;
        let z = up(&stream, &experts_work(&CASE, rank, &received, WIDTH))?;
        let weights = up(&stream, &flat(&step.weights[rank]))?;
        let mut out = stream.alloc_zeros::<f32>(4 * WIDTH)?;
        ep.combine(&routing, &z, &weights, &mut out)?.wait()?;
        let out = stream.clone_dtoh(&out)?;
        let expected = CASE.combined(&step, rank, &x[rank], WIDTH);
        assert_same("combined", &out, &expected, WIDTH);
        let lost: Vec<bool> = out
            .chunks(WIDTH)
            .map(|row| row.iter().all(|one| one.is_nan()))
            .collect();
        assert_eq!(lost, [false, false, false, rank == 0], "{out:?}");

        let error = routing.counts().expect_err("expert 3 was full");
        let ErrorKind::ExpertCapacity {
            rank: source,
            expert,
            tokens,
            capacity,
        } = *error.kind()
        else {
            panic!("{error:#}")
        };
        assert_eq!(
            (source, expert, tokens, capacity),
            (0, 3, 3, 2),
            "{error:#}"
        );
        let operation = error.operation().expect("the routing");
        assert_eq!(operation.kind, OperationKind::Route);
        // The communicator and the handle still work.
        let step = both(&[[3, 0], [1, 3]]);
        ep.route(&up(&stream, &flat(&step.topk[rank]))?, &mut routing)?;
        assert_eq!(routing.counts()?.sent, [1, 1, 0, 2]);
        Ok(())
    });
}

#[test]
fn an_expert_that_does_not_exist_is_told_by_the_rank_that_named_it() {
    ranks_as_threads(2, |world: World| -> Outcome {
        let comm = start(&world)?;
        let (rank, stream) = (world.rank(), comm.stream().clone());
        let mut ep = made(&comm, &CASE, WIDTH * 4)?;
        let mut routing = ep.routing()?;
        let mut step = both(&[[3, 0], [1, 2]]);
        step.topk[1][0][1] = 4;
        step.topk[1][1][0] = i32::MAX;
        let x = random_rows::<f32>(&mut fastrand::Rng::with_seed(2), &step, WIDTH);
        ep.route(&up(&stream, &flat(&step.topk[rank]))?, &mut routing)?;
        let mut y = stream.alloc_zeros::<f32>(CASE.rows() * WIDTH)?;
        ep.dispatch(&routing, &up(&stream, &x[rank])?, &mut y)?;
        let weights = up(&stream, &flat(&step.weights[rank]))?;
        let mut out = stream.alloc_zeros::<f32>(2 * WIDTH)?;
        ep.combine(&routing, &y, &weights, &mut out)?.wait()?;
        let are_lost = stream.clone_dtoh(&out)?.iter().all(|one| one.is_nan());
        assert_eq!(are_lost, rank == 1);
        match rank {
            0 => assert_eq!(routing.counts()?.sent, [1, 1, 1, 1]),
            _ => assert_eq!(
                kind_of(routing.counts()),
                "NoSuchExpert { rank: 1, entries: 2, experts: 4 }"
            ),
        }
        Ok(())
    });
}

#[test]
fn a_token_may_choose_an_expert_twice() {
    ranks_as_threads(2, |world: World| -> Outcome {
        let comm = start(&world)?;
        let (rank, stream) = (world.rank(), comm.stream().clone());
        let mut ep = made(&comm, &CASE, WIDTH * 2)?;
        let mut routing = ep.routing()?;
        let step = both(&[[2, 2], [0, 1]]);
        let x = random_rows::<f16>(&mut fastrand::Rng::with_seed(3), &step, WIDTH);
        ep.route(&up(&stream, &flat(&step.topk[rank]))?, &mut routing)?;
        let mut y = stream.alloc_zeros::<f16>(CASE.rows() * WIDTH)?;
        ep.dispatch(&routing, &up(&stream, &x[rank])?, &mut y)?;
        let received = stream.clone_dtoh(&y)?;
        assert_same(
            "received",
            &received,
            &CASE.received(&step, rank, &x, WIDTH),
            WIDTH,
        );
        let z = up(&stream, &experts_work(&CASE, rank, &received, WIDTH))?;
        let weights = up(&stream, &flat(&step.weights[rank]))?;
        let mut out = stream.alloc_zeros::<f16>(2 * WIDTH)?;
        ep.combine(&routing, &z, &weights, &mut out)?.wait()?;
        let expected = CASE.combined(&step, rank, &x[rank], WIDTH);
        assert_same("combined", &stream.clone_dtoh(&out)?, &expected, WIDTH);
        assert_eq!(routing.counts()?.sent, [1, 1, 2, 0]);
        Ok(())
    });
}

/// Rows of any length: whole words of 16 and 4 bytes, and odd lengths, in both orders.
#[test]
fn rows_travel_with_their_scales() {
    ranks_as_threads(2, |world: World| -> Outcome {
        let comm = start(&world)?;
        let (rank, stream) = (world.rank(), comm.stream().clone());
        let ways = [DispatchWay::Rows, DispatchWay::AllGather];
        let layouts = [ExpertLayout::RankMajor, ExpertLayout::ExpertMajor];
        for (way, layout) in ways
            .into_iter()
            .flat_map(|way| layouts.map(|layout| (way, layout)))
        {
            let case = Case {
                layout,
                way,
                ..CASE
            };
            for (bytes, scales) in [(64, 4), (12, 1), (7, 3), (33, 5), (16, 2)] {
                let what = format!("{way:?}, {layout:?}, {bytes} bytes, {scales} scales");
                let mut ep = made(&comm, &case, bytes + scales * 4)?;
                let mut routing = ep.routing()?;
                let step = both(&[[3, 0], [1, -7], [2, 0], [3, 1]]);
                let mut random = fastrand::Rng::with_seed(4);
                let x = random_rows::<u8>(&mut random, &step, bytes);
                let s = random_rows::<f32>(&mut random, &step, scales);
                ep.route(&up(&stream, &flat(&step.topk[rank]))?, &mut routing)?;
                let mut y = stream.alloc_zeros::<u8>(case.rows() * bytes)?;
                let mut t = stream.alloc_zeros::<f32>(case.rows() * scales)?;
                let (mine, my_scales) = (up(&stream, &x[rank])?, up(&stream, &s[rank])?);
                let done = ep.dispatch_with_scales(&routing, &mine, &mut y, &my_scales, &mut t)?;
                done.wait()?;
                let (y, t) = (stream.clone_dtoh(&y)?, stream.clone_dtoh(&t)?);
                assert_same(&what, &y, &case.received(&step, rank, &x, bytes), bytes);
                assert_same(&what, &t, &case.received(&step, rank, &s, scales), scales);
                // The same in a plan.
                let topk = up(&stream, &flat(&step.topk[rank]))?;
                let empty = stream.alloc_zeros::<f32>(case.rows() * scales)?;
                let rows = (mine, stream.alloc_zeros::<u8>(case.rows() * bytes)?);
                let buffers = (ep.routing()?, topk, rows, (my_scales, empty));
                let mut plan = comm.capture(buffers, |capture, (mut routing, topk, rows, s)| {
                    let mut experts = ep.capture(capture)?;
                    experts.route(&topk, &mut routing)?;
                    experts.dispatch_with_scales(&routing, &rows.0, rows.1, &s.0, s.1)
                })?;
                plan.launch()?.wait()?;
                let (_, _, rows, received) = plan.views();
                assert_same(&what, &stream.clone_dtoh(&rows.1)?, &y, bytes);
                assert_same(&what, &stream.clone_dtoh(&received.1)?, &t, scales);
                drop(plan);
                // Without scales, from the middle of a buffer: at an unaligned address.
                let mut all = vec![9u8];
                all.extend(&x[rank]);
                let mine = up(&stream, &all)?;
                let mut shifted = stream.alloc_zeros::<u8>(case.rows() * bytes + 1)?;
                ep.dispatch(&routing, mine.slice(1..), shifted.slice_mut(1..))?
                    .wait()?;
                assert_same(&what, &stream.clone_dtoh(&shifted)?[1..], &y, bytes);
            }
        }
        nothing_was_caught();
        Ok(())
    });
}

#[test]
fn two_routings_are_in_use_at_once() {
    ranks_as_threads(2, |world: World| -> Outcome {
        let comm = start(&world)?;
        let (rank, stream) = (world.rank(), comm.stream().clone());
        let mut ep = made(&comm, &CASE, WIDTH * 4)?;
        let steps = [both(&[[3, 0], [1, 2]]), both(&[[0, 1], [2, 3], [-1, -1]])];
        let mut random = fastrand::Rng::with_seed(5);
        let x: Vec<_> = steps
            .iter()
            .map(|step| random_rows::<f32>(&mut random, step, WIDTH))
            .collect();
        let late = faults::late(Duration::from_millis(2));
        let mut routings = [ep.routing()?, ep.routing()?];
        let mut received = Vec::new();
        for (at, routing) in routings.iter_mut().enumerate() {
            ep.route(&up(&stream, &flat(&steps[at].topk[rank]))?, routing)?;
        }
        for (at, routing) in routings.iter().enumerate() {
            let mut y = stream.alloc_zeros::<f32>(CASE.rows() * WIDTH)?;
            ep.dispatch(routing, &up(&stream, &x[at][rank])?, &mut y)?;
            received.push(y);
        }
        drop(late);
        // Back in reverse order, and one of them twice.
        for at in [1, 0, 1] {
            let y = stream.clone_dtoh(&received[at])?;
            let z = up(&stream, &experts_work(&CASE, rank, &y, WIDTH))?;
            let weights = up(&stream, &flat(&steps[at].weights[rank]))?;
            let mut out = up(&stream, &x[at][rank])?;
            ep.combine(&routings[at], &z, &weights, &mut out)?.wait()?;
            let expected = CASE.combined(&steps[at], rank, &x[at][rank], WIDTH);
            assert_same("combined", &stream.clone_dtoh(&out)?, &expected, WIDTH);
        }
        assert_eq!(routings[0].counts()?.sent, [1, 1, 1, 1]);
        assert_eq!(routings[1].counts()?.sent, [1, 1, 1, 1]);
        nothing_was_caught();
        Ok(())
    });
}

#[test]
fn the_device_has_the_counts_without_the_host() {
    ranks_as_threads(2, |world: World| -> Outcome {
        let comm = start(&world)?;
        let (rank, stream) = (world.rank(), comm.stream().clone());
        let ep = made(&comm, &CASE, 4)?;
        let mut routing = ep.routing()?;
        assert_eq!(stream.clone_dtoh(&routing.received())?, [0; 4]);
        let mut step = both(&[[3, 0], [1, 2]]);
        // Beyond the capacity as well.
        step.topk[0] = vec![vec![0, 1], vec![0, 3], vec![0, 3]];
        ep.route(&up(&stream, &flat(&step.topk[rank]))?, &mut routing)?;
        let counts = stream.clone_dtoh(&routing.received())?;
        let expected = [[3, 1, 1, 1], [0, 2, 1, 1]];
        assert_eq!(counts, expected[rank]);
        Ok(())
    });
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_issued() {
    ranks_as_threads(2, |world: World| -> Outcome {
        let comm = start(&world)?;
        let (rank, stream) = (world.rank(), comm.stream().clone());
        let mut ep = made(&comm, &CASE, WIDTH * 4)?;
        let mut routing = ep.routing()?;
        let mut others = made(&comm, &CASE, WIDTH * 4)?.routing()?;
        let zeros = |len: usize| stream.alloc_zeros::<f32>(len).expect("memory");
        let topk = |len: usize| stream.alloc_zeros::<i32>(len).expect("memory");
        let given =
            |result: nccl::Result<nccl::Request>| match *result.expect_err("an error").kind() {
                ErrorKind::Length {
                    buffer,
                    given,
                    needed,
                    ..
                } => (buffer, given, needed),
                ref other => panic!("{other}"),
            };
        let refused = |result: nccl::Result<nccl::Request>| {
            let error = result.expect_err("an error");
            assert!(
                matches!(
                    error.kind(),
                    ErrorKind::InvalidConfig {
                        field: "routing",
                        ..
                    }
                ),
                "{error:#}"
            );
        };
        let rows = CASE.rows();
        refused(ep.dispatch(&routing, &zeros(2), &mut zeros(rows)));
        refused(ep.combine(&routing, &zeros(rows), &zeros(2), &mut zeros(2)));
        assert!(kind_of(routing.counts()).contains("routing"));
        refused(ep.route(&topk(4), &mut others));
        assert_eq!(given(ep.route(&topk(3), &mut routing)), ("topk", 3, 4));
        assert_eq!(given(ep.route(&topk(10), &mut routing)), ("topk", 10, 8));

        let before = ep.route(&topk(4), &mut routing)?.sequence();
        refused(ep.dispatch(&others, &zeros(2), &mut zeros(rows)));
        let (x, y) = (zeros(2 * WIDTH), zeros(rows * WIDTH));
        let wrong = |len: usize| zeros(len);
        assert_eq!(
            given(ep.dispatch(&routing, &x, &mut wrong(rows * WIDTH + 1))).0,
            "y"
        );
        assert_eq!(
            given(ep.dispatch(&routing, &x, &mut wrong(0))),
            ("y", 0, rows)
        );
        let wide = given(ep.dispatch(&routing, &wrong(8), &mut wrong(rows * 4)));
        assert_eq!(wide, ("the staging memory for a row", 12, 16));
        assert_eq!(
            given(ep.dispatch(&routing, &wrong(5), &mut wrong(rows * WIDTH))),
            ("x", 5, 6)
        );
        let scaled = given(ep.dispatch_with_scales(
            &routing,
            &x,
            &mut wrong(rows * WIDTH),
            &wrong(2),
            &mut wrong(rows),
        ));
        assert_eq!(scaled, ("the staging memory for a row", 12, 16));
        let scales = given(ep.dispatch_with_scales(
            &routing,
            &wrong(2),
            &mut wrong(rows),
            &wrong(3),
            &mut wrong(rows),
        ));
        assert_eq!(scales, ("scales", 3, 2));

        let (z, weights) = (y, zeros(4));
        let mut out = zeros(2 * WIDTH);
        assert_eq!(
            given(ep.combine(&routing, &wrong(7), &weights, &mut out)),
            ("expert_out", 7, 8)
        );
        assert_eq!(
            given(ep.combine(&routing, &z, &wrong(3), &mut out)),
            ("weights", 3, 4)
        );
        assert_eq!(
            given(ep.combine(&routing, &z, &weights, &mut wrong(7))),
            ("out", 7, 6)
        );
        let wide = given(ep.combine(&routing, &wrong(rows * 4), &weights, &mut wrong(8)));
        assert_eq!(wide, ("the staging memory for a row", 12, 16));
        let bytes = stream.alloc_zeros::<u8>(rows)?;
        let error = ep.combine(
            &routing,
            &bytes,
            &weights,
            &mut stream.alloc_zeros::<u8>(2)?,
        );
        assert_eq!(kind_of(error), format!("NotWeighed({:?})", DataType::UInt8));
        // Types that only the program knows.
        let erased = nccl::Erased::from_bytes(bytes.as_view(), DataType::Float16)?;
        let mut bytes = stream.alloc_zeros::<u8>(2 * WIDTH)?;
        let mismatch = nccl::ErasedMut::from_bytes(bytes.as_view_mut(), DataType::UInt8)?;
        let error = ep.combine(&routing, erased, &weights, mismatch);
        assert!(kind_of(error).starts_with("DataTypeMismatch"));

        // None of these calls was issued, on either rank.
        let mut y = zeros(rows * WIDTH);
        let done = ep.dispatch(&routing, &x, &mut y)?;
        assert_eq!(done.sequence(), before + 1, "rank {rank}");
        done.wait()?;
        Ok(())
    });
}

#[test]
fn a_stream_that_is_capturing_is_refused() {
    ranks_as_threads(2, |world: World| -> Outcome {
        let comm = start(&world)?;
        let stream = comm.stream().clone();
        let mut ep = made(&comm, &CASE, 4)?;
        let mut routing = ep.routing()?;
        let topk = stream.clone_htod(&[0i32, 1])?;
        let (x, mut y) = (
            stream.alloc_zeros::<f32>(1)?,
            stream.alloc_zeros::<f32>(CASE.rows())?,
        );
        ep.route(&topk, &mut routing)?.wait()?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream.begin_capture(mode)?;
        let refused = ep
            .dispatch(&routing, &x, &mut y)
            .expect_err("it is capturing");
        let graph = stream.end_capture(nccl::cudarc::driver::sys::CUgraphInstantiate_flags(0));
        let reason = StreamRefusal::Capturing;
        assert!(
            matches!(refused.kind(), ErrorKind::Stream { reason: found, .. } if *found == reason),
            "{refused}"
        );
        let operation = refused.operation().map(|operation| operation.kind);
        assert_eq!(operation, Some(OperationKind::Dispatch));
        // Nothing was captured into the graph, and the handle still works.
        assert!(graph?.is_some());
        ep.dispatch(&routing, &x, &mut y)?.wait()?;
        Ok(())
    });
}

#[test]
fn numbers_that_differ_between_the_ranks_are_refused_on_all_of_them() {
    ranks_as_threads(3, |world: World| -> Outcome {
        let comm = start(&world)?;
        let builder = || {
            ExpertParallel::builder(&comm).with(|ep| {
                ep.experts = 6;
                ep.top_k = 1;
                ep.max_row_bytes = 4;
            })
        };
        let text = |result: nccl::Result<ExpertParallel>| result.expect_err("an error").to_string();
        let own = if world.rank() == 2 { 8 } else { 4 };
        let error = text(builder().with(|ep| ep.max_tokens = own).build());
        assert!(
            error.contains("`capacity`: it is 4 on rank 0 and 8 on rank 2"),
            "{error:#}"
        );
        let layout = [ExpertLayout::RankMajor, ExpertLayout::ExpertMajor][world.rank() % 2];
        let error = text(
            builder()
                .with(|ep| {
                    ep.max_tokens = 4;
                    ep.layout = layout;
                })
                .build(),
        );
        assert!(
            error.contains("RankMajor on rank 0 and ExpertMajor on rank 1"),
            "{error:#}"
        );
        let way = [DispatchWay::Rows, DispatchWay::AllGather][world.rank() / 2];
        let error = text(
            builder()
                .with(|ep| (ep.max_tokens, ep.way) = (4, way))
                .build(),
        );
        assert!(
            error.contains("`way`: it is Rows on rank 0 and AllGather on rank 2"),
            "{error:#}"
        );
        // Gathered tokens are as many on each rank.
        let gathers = builder().with(|ep| {
            ep.max_tokens = world.rank() + 1;
            ep.capacity = Some(2);
            ep.way = DispatchWay::AllGather;
        });
        let error = text(gathers.build());
        assert!(
            error.contains("`max_tokens`: it is 1 on rank 0 and 2 on rank 1"),
            "{error:#}"
        );
        // And as long.
        let gathers = builder().with(|ep| {
            ep.max_tokens = 2;
            ep.max_row_bytes = 4 << (world.rank() / 2);
            ep.way = DispatchWay::AllGather;
        });
        let error = text(gathers.build());
        assert!(
            error.contains("`max_row_bytes`: it is 4 on rank 0 and 8 on rank 2"),
            "{error:#}"
        );
        // A rank with an invalid setting gets its own error, and the others do not wait for it.
        let own = if world.rank() == 1 { 0 } else { 4 };
        let error = text(
            builder()
                .with(|ep| {
                    ep.max_tokens = 4;
                    ep.capacity = Some(own);
                })
                .build(),
        );
        match world.rank() {
            1 => assert!(
                error.contains("`capacity`: it has to be given"),
                "{error:#}"
            ),
            _ => assert!(
                error.contains("rank 1 could not make its part"),
                "{error:#}"
            ),
        }
        // Settings that may differ.
        let ep = builder()
            .with(|ep| {
                ep.max_tokens = world.rank() + 1;
                ep.max_row_bytes = 4 * (world.rank() + 1);
                ep.capacity = Some(2);
            })
            .build()?;
        assert_eq!((ep.experts(), ep.own_experts(), ep.capacity()), (6, 2, 2));
        Ok(())
    });
}

/// The memory that a step uses is freed right after the call, on its own streams, while the step runs late; with
/// cudarc's events and without them.
#[test]
fn memory_outlives_kernels_and_messages_that_run_late() {
    if !needs_emulator("work that runs late on purpose") {
        return;
    }
    ranks_as_threads(2, |world: World| -> Outcome {
        let comm = start(&world)?;
        let (rank, context) = (world.rank(), comm.stream().context().clone());
        let (one, another) = (context.new_stream()?, context.new_stream()?);
        let width = 20_000;
        for tracking in [true, false] {
            if !tracking {
                // SAFETY: each buffer is used on its own stream and through operations only.
                unsafe { context.disable_event_tracking() };
            }
            let mut ep = made(&comm, &CASE, width * 4)?;
            let mut routing = ep.routing()?;
            let step = both(&[[3, 0], [1, 2]]);
            let x = random_rows::<f32>(&mut fastrand::Rng::with_seed(6), &step, width);
            let late = faults::late(Duration::from_millis(20));
            let topk = up(&one, &flat(&step.topk[rank]))?;
            ep.route(&topk, &mut routing)?;
            drop(topk);
            let mine = up(&another, &x[rank])?;
            let mut y = one.alloc_zeros::<f32>(CASE.rows() * width)?;
            ep.dispatch(&routing, &mine, &mut y)?;
            drop(mine);
            let received = one.clone_dtoh(&y)?;
            drop(y);
            assert_same(
                "received",
                &received,
                &CASE.received(&step, rank, &x, width),
                width,
            );
            let z = up(&another, &experts_work(&CASE, rank, &received, width))?;
            let weights = up(&one, &flat(&step.weights[rank]))?;
            let mut out = another.alloc_zeros::<f32>(2 * width)?;
            ep.combine(&routing, &z, &weights, &mut out)?;
            drop((z, weights));
            let combined = another.clone_dtoh(&out)?;
            let expected = CASE.combined(&step, rank, &x[rank], width);
            assert_same("combined", &combined, &expected, width);
            // Issued at once, behind work that has not begun.
            let mine = up(comm.stream(), &x[rank])?;
            let mut y = comm.stream().alloc_zeros::<f32>(CASE.rows() * width)?;
            let done = ep.dispatch(&routing, &mine, &mut y)?;
            drop((mine, y, routing, ep));
            done.wait()?;
            drop(late);
        }
        nothing_was_caught();
        Ok(())
    });
}

#[test]
fn a_rank_that_does_not_come_is_waited_for_no_longer_than_the_limit() {
    ranks_as_threads(2, |world: World| -> Outcome {
        let comm = start(&world)?;
        let stream = comm.stream().clone();
        let limit = Duration::from_millis(400);
        let ep = made(&comm.within(limit), &CASE, 4)?;
        let mut routing = ep.routing()?;
        if world.rank() == 0 {
            // Issued at once; the host waits for the other rank only here.
            ep.route(&stream.clone_htod(&[0i32, 1])?, &mut routing)?;
            let error = routing.counts().expect_err("nobody answered");
            assert!(error.is_timeout() || error.fault().is_some(), "{error:#}");
            let text = format!("{error:#}");
            assert!(text.contains("route #"), "{text}");
        }
        world.barrier("told")?;
        Ok(())
    });
}

#[test]
fn a_kernel_that_cannot_be_launched_is_the_cause_on_all_ranks() {
    if !needs_emulator("a launch that fails on purpose") {
        return;
    }
    ranks_as_threads(2, |world: World| -> Outcome {
        let comm = start(&world)?;
        let stream = comm.stream().clone();
        let ep = made(&comm, &CASE, 4)?;
        let mut routing = ep.routing()?;
        let topk = stream.clone_htod(&[0i32, 1])?;
        // Otherwise the other rank may still be waiting during its own build.
        world.barrier("built")?;
        let fault = (world.rank() == 0).then(|| {
            let here = faults::at_call("cuLaunchKernel").on_this_thread();
            here.fail(OUT_OF_MEMORY)
        });
        let routed = ep.route(&topk, &mut routing);
        let error = match fault {
            Some(_) => routed.expect_err("it cannot be launched"),
            // The message may have been in transit before the other rank failed.
            None => routed
                .and_then(|_| routing.counts())
                .expect_err("nobody answers"),
        };
        let fault = error.fault().unwrap_or_else(|| panic!("{error:#}"));
        assert_eq!(fault.culprit(), Some(0), "{error:#}");
        assert!(format!("{error:#}").contains("cuLaunchKernel"), "{error:#}");
        world.barrier("told")?;
        Ok(())
    });
}

/// The other rank would wait for the sizes of this one.
#[test]
fn a_rank_that_cannot_compare_its_sizes_is_not_waited_for() {
    if !needs_emulator("an allocation that fails on purpose") {
        return;
    }
    ranks_as_threads(2, |world: World| -> Outcome {
        let comm = start(&world)?;
        world.barrier("started")?;
        let fault = (world.rank() == 1).then(|| {
            ["cuMemAlloc", "cuMemAllocAsync"]
                .map(|call| faults::at_call(call).on_this_thread().fail(OUT_OF_MEMORY))
        });
        let begun = Instant::now();
        let error = made(&comm, &CASE, 4).expect_err("rank 1 has no memory");
        assert!(begun.elapsed() < Duration::from_secs(10), "{error:#}");
        match fault {
            Some(_) => assert!(matches!(error.kind(), ErrorKind::Cuda { .. }), "{error:#}"),
            None => {
                let fault = error.fault().unwrap_or_else(|| panic!("{error:#}"));
                assert_eq!(fault.culprit(), Some(1), "{error:#}");
            }
        }
        world.barrier("told")?;
        Ok(())
    });
}

/// The messages went out, and the kernel behind them is refused: the other rank counts the operation as done.
#[test]
fn what_is_refused_behind_its_messages_ends_the_communicator() {
    if !needs_emulator("a wait of a stream that fails on purpose") {
        return;
    }
    for operation in [OperationKind::Dispatch, OperationKind::Combine] {
        ranks_as_threads(2, move |world: World| -> Outcome {
            let comm = start(&world)?;
            let (stream, away) = (comm.stream().clone(), comm.stream().context().new_stream()?);
            let case = Case {
                way: DispatchWay::AllGather,
                ..CASE
            };
            let mut ep = made(&comm, &case, 4)?;
            let mut routing = ep.routing()?;
            ep.route(&stream.clone_htod(&[0i32, 1])?, &mut routing)?;
            let weights = stream.clone_htod(&[1.0f32, 1.0])?;
            // On another stream, so that streams wait for each other before and behind each part of an operation.
            let (x, mut y) = (away.clone_htod(&[1.0f32])?, away.alloc_zeros(CASE.rows())?);
            let mut out = away.alloc_zeros::<f32>(1)?;
            away.synchronize()?;
            let mut issue = || match operation {
                OperationKind::Dispatch => ep.dispatch(&routing, &x, &mut y),
                _ => ep.combine(&routing, &y, &weights, &mut out),
            };
            let waits = || faults::at_call("cuStreamWaitEvent").on_this_thread();
            let counted = waits().delay(Duration::ZERO);
            issue()?.wait()?;
            let all = counted.hits();
            drop(counted);
            world.barrier("counted")?;
            if world.rank() == 0 {
                // The last is behind the kernel, the one before it is ahead of it.
                let fault = waits().nth(all - 1).fail(OUT_OF_MEMORY);
                let error = issue().expect_err("the kernel is refused");
                assert_eq!(fault.hits(), 1);
                let fault = error.fault().unwrap_or_else(|| panic!("{error:#}"));
                assert_eq!(fault.culprit(), Some(0), "{error:#}");
            } else {
                // Or the abort was there first.
                let _ = issue();
            }
            world.barrier("issued")?;
            let next = comm.barrier().expect_err("rank 0 is out of step");
            let fault = next.fault().unwrap_or_else(|| panic!("{next:#}"));
            assert_eq!(fault.culprit(), Some(0), "{next:#}");
            Ok(())
        });
    }
}

/// The kernels of a call find that the communicator ends, and the abort needs the lock that the call holds meanwhile.
#[test]
fn a_call_that_meets_an_abort_ends_with_it_and_not_at_a_timeout() {
    ranks_as_threads(1, |world: World| -> Outcome {
        let context = crate::support::device(&world)?;
        let stream = context.new_stream()?;
        let mut random = fastrand::Rng::with_seed(3);
        // NVIDIA's library takes a hundred times as long to create a communicator.
        let rounds = if crate::support::on_nvidias() { 3 } else { 150 };
        for _ in 0..rounds {
            let comm = world.communicator("ends").stream(&stream).with(|comm| {
                // A finalize or abort that waits for the call takes as long as this.
                comm.timeouts.abort = Duration::from_secs(20);
                comm.timeouts.finalize = Duration::from_secs(20);
            });
            let comm = comm.build()?;
            let ep = made(&comm, &Case { ranks: 1, ..CASE }, WIDTH * 4)?;
            let mut routing = ep.routing()?;
            let topk = stream.clone_htod(&[0i32, 1])?;
            let (aborts, pause) = (comm.clone(), random.u64(0..150));
            let begun = std::time::Instant::now();
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    let until = std::time::Instant::now() + Duration::from_micros(pause);
                    while std::time::Instant::now() < until {
                        std::hint::spin_loop();
                    }
                    aborts.abort("the test")
                });
                while ep.route(&topk, &mut routing).is_ok() {}
            });
            assert!(
                begun.elapsed() < Duration::from_secs(10),
                "it waited for a timeout"
            );
        }
        Ok(())
    });
}
