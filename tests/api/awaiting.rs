//! Awaited requests: on any executor, on any of its threads, dropped at any time, and without a thread for each.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake};
use std::time::{Duration, Instant};

use nccl::cudarc::driver::{CudaSlice, CudaStream};
use nccl::fault::{FaultClass, RootCause};
use nccl::{Communicator, ReduceOp, Request, World};
use nccl_emulator::faults;

use crate::support::{self, ranks_as_processes, ranks_as_threads};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// Far above the duration of any operation here.
const SOON: Duration = Duration::from_secs(15);

fn start(world: &World) -> Outcome<(Arc<CudaStream>, Communicator)> {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("test").stream(&stream).build()?;
    comm.warm_up(SOON)?;
    Ok((stream, comm))
}

/// A receive from rank 1 that stays open until `send` is called there.
fn receive(comm: &Communicator, y: &mut CudaSlice<f32>) -> nccl::Result<Request> {
    comm.group(|group| group.irecv(y, 1))
}

fn send(comm: &Communicator, stream: &Arc<CudaStream>, value: f32) -> Outcome {
    let x = stream.clone_htod(&[value; 64])?;
    Ok(comm.group(|group| group.isend(&x, 0))?.wait()?)
}

/// Sums and messages, each awaited before the next.
async fn exchange(
    comm: Communicator,
    stream: Arc<CudaStream>,
    rounds: usize,
) -> Result<(), String> {
    let text = |error: &dyn std::fmt::Display| format!("{error:#}");
    let ranks = comm.world_size();
    for round in 0..rounds {
        let mut y = stream
            .clone_htod(&[round as u32; 100])
            .map_err(|e| text(&e))?;
        let done = comm.all_reduce_in_place(&mut y, ReduceOp::Sum);
        done.map_err(|e| text(&e))?.await.map_err(|e| text(&e))?;
        let sum = stream.clone_dtoh(&y).map_err(|e| text(&e))?;
        if sum != [(round * ranks) as u32; 100] {
            return Err(format!("round {round}: {sum:?}"));
        }
    }
    Ok(())
}

fn tokio(threads: usize) -> tokio::runtime::Runtime {
    let mut builder = match threads {
        0 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    builder
        .worker_threads(threads.max(1))
        .enable_time()
        .build()
        .expect("a runtime")
}

#[test]
fn tokio_awaits_on_one_thread_and_on_several() {
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world)?;
        tokio(0).block_on(exchange(comm.clone(), stream.clone(), 20))?;
        let runtime = tokio(3);
        // As a task of its own, which any of the threads may resume.
        let task = runtime.spawn(exchange(comm.clone(), stream, 20));
        runtime.block_on(async { tokio::time::timeout(SOON, task).await })???;
        comm.finalize()?;
        Ok(())
    });
}

/// A rank whose every call is a future. Returns the rank that it has in the generation after.
async fn rank_as_a_task(world: World) -> Outcome<usize> {
    let world = Arc::new(world);
    let stream = support::device(&world)?.new_stream()?;
    let theirs = stream.clone();
    let comm = world.communicator_async("task", move |comm| comm.stream(&theirs));
    let comm = comm.await?;
    world.barrier_async("the communicator is there").await?;
    exchange(comm.clone(), stream.clone(), 20).await?;
    // Operations and sizes for which NCCL chooses other algorithms.
    for count in [64, 1 << 12, 1 << 16, 1 << 20] {
        let x = stream.alloc_zeros::<u32>(count)?;
        let mut both = stream.alloc_zeros::<u32>(2 * count)?;
        comm.all_gather(&x, &mut both)?.await?;
        comm.all_reduce_in_place(&mut both, ReduceOp::Sum)?.await?;
        comm.broadcast(Some(&x), &mut both.slice_mut(..count), 1)?
            .await?;
        let mut half = stream.alloc_zeros::<u32>(count)?;
        comm.reduce_scatter(&both, &mut half, ReduceOp::Max)?
            .await?;
        comm.all_to_all(&both, &mut stream.alloc_zeros::<u32>(2 * count)?)?
            .await?;
    }
    // Each message waits until the other rank enters.
    let mut y = stream.clone_htod(&[world.rank() as u32; 4096])?;
    match world.rank() {
        0 => comm.send(&y, 1)?.await?,
        _ => comm.recv(&mut y, 0)?.await?,
    }
    assert_eq!(stream.clone_dtoh(&y)?, [0; 4096]);
    comm.warm_up_async(SOON).await?;
    comm.barrier_async().await?;
    let split = comm.split_async("split", Some(0), 0).await?;
    exchange(split.ok_or("it is in it")?, stream.clone(), 5).await?;
    let smaller = comm.shrink_async("smaller", &[]).await?;
    exchange(smaller.communicator, stream, 5).await?;
    drop(comm);
    let next = world.next_generation_async(SOON).await?;
    Ok(next.rank())
}

#[test]
fn two_ranks_are_tasks_of_one_thread_and_no_call_keeps_the_other_from_running() {
    // More threads would hide a blocking call: on one thread, a call that waits for the other rank waits forever.
    nccl_tools::perf::install(2).expect("an emulator or GPUs");
    let mut worlds = World::threads(2).into_iter();
    let mut task = || rank_as_a_task(worlds.next().expect("two ranks"));
    let (one, other) = tokio(0).block_on(smol::future::zip(task(), task()));
    assert_eq!((one.unwrap(), other.unwrap()), (0, 1));
}

#[test]
fn smol_awaits_beside_other_tasks() {
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world)?;
        let ticks = AtomicUsize::new(0);
        let executor = smol::LocalExecutor::new();
        let other = executor.spawn(async {
            loop {
                smol::Timer::after(Duration::from_millis(1)).await;
                ticks.fetch_add(1, Ordering::Relaxed);
            }
        });
        let mut y = stream.alloc_zeros::<f32>(64)?;
        if world.rank() == 0 {
            let done = receive(&comm, &mut y)?;
            smol::block_on(executor.run(async {
                let ahead = async {
                    // The executor is free while the request is pending.
                    while ticks.load(Ordering::Relaxed) < 5 {
                        smol::Timer::after(Duration::from_millis(1)).await;
                    }
                    world.barrier("now")
                };
                let (opened, done) = smol::future::zip(ahead, done).await;
                opened.and(done)
            }))?;
            assert_eq!(stream.clone_dtoh(&y)?, [2.5; 64]);
        } else {
            world.barrier("now")?;
            send(&comm, &stream, 2.5)?;
        }
        drop(other);
        comm.finalize()?;
        Ok(())
    });
}

#[test]
fn a_time_out_of_the_executor_cancels_nothing() {
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world)?;
        let mut y = stream.alloc_zeros::<f32>(64)?;
        if world.rank() == 0 {
            let mut done = receive(&comm, &mut y)?;
            tokio(0).block_on(async {
                let short = Duration::from_millis(30);
                // By reference, so that it can be awaited again; and dropped before completion.
                let late = tokio::time::timeout(short, &mut done).await;
                assert!(late.is_err(), "it was not sent yet");
                let late = tokio::time::timeout(short, receive(&comm, &mut y)?).await;
                assert!(late.is_err(), "it was not sent yet");
                world.barrier("now")?;
                done.await
            })?;
            // Both messages have arrived, and the drop of the second future lost nothing.
            comm.barrier_on_stream()?;
            assert_eq!(stream.clone_dtoh(&y)?, [4.0; 64]);
        } else {
            world.barrier("now")?;
            send(&comm, &stream, 3.0)?;
            send(&comm, &stream, 4.0)?;
            comm.barrier_on_stream()?;
        }
        comm.finalize()?;
        Ok(())
    });
}

/// A barrier of all ranks' streams.
trait Meet {
    fn barrier_on_stream(&self) -> Outcome;
}

impl Meet for Communicator {
    fn barrier_on_stream(&self) -> Outcome {
        let mut y = self.stream().alloc_zeros::<u8>(1)?;
        Ok(self.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?)
    }
}

/// Counts how often it is woken.
#[derive(Default)]
struct Counter(AtomicUsize);

impl Wake for Counter {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Release);
    }
}

#[test]
fn the_waker_of_the_last_poll_is_the_one_that_is_woken() {
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world)?;
        let mut y = stream.alloc_zeros::<f32>(64)?;
        if world.rank() == 0 {
            let mut done = pin!(receive(&comm, &mut y)?);
            let (first, last) = (Arc::new(Counter::default()), Arc::new(Counter::default()));
            for counter in [&first, &last] {
                let waker = Arc::clone(counter).into();
                assert!(
                    done.as_mut()
                        .poll(&mut Context::from_waker(&waker))
                        .is_pending()
                );
            }
            world.barrier("now")?;
            let deadline = Instant::now() + SOON;
            while last.0.load(Ordering::Acquire) == 0 {
                assert!(Instant::now() < deadline, "nobody was woken");
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(first.0.load(Ordering::Acquire), 0, "the task has moved on");
            let waker = last.into();
            match done.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(done) => done?,
                Poll::Pending => return Err("woken too early".into()),
            }
        } else {
            world.barrier("now")?;
            send(&comm, &stream, 1.0)?;
        }
        comm.finalize()?;
        Ok(())
    });
}

/// The threads of this process.
fn threads() -> Outcome<usize> {
    Ok(std::fs::read_dir("/proc/self/task")?.count())
}

#[test]
fn three_hundred_awaited_requests_cost_one_thread() {
    const REQUESTS: usize = 300;
    ranks_as_processes(2, |world| -> Outcome {
        let (stream, comm) = start(&world)?;
        if world.rank() == 0 {
            let mut ys = (0..REQUESTS)
                .map(|_| stream.alloc_zeros::<f32>(64))
                .collect::<Result<Vec<_>, _>>()?;
            let executor = smol::LocalExecutor::new();
            let mut tasks = Vec::new();
            for (index, y) in ys.iter_mut().enumerate() {
                let done = receive(&comm, y)?;
                if index == 0 {
                    // The resources of the emulator and of the first request exist.
                    let waker = Arc::new(Counter::default()).into();
                    let mut done = pin!(done);
                    assert!(
                        done.as_mut()
                            .poll(&mut Context::from_waker(&waker))
                            .is_pending()
                    );
                    std::thread::sleep(Duration::from_millis(50));
                } else {
                    tasks.push(executor.spawn(done));
                }
            }
            let before = threads()?;
            while executor.try_tick() {}
            let during = threads()?;
            world.barrier("all are awaited")?;
            smol::block_on(executor.run(async {
                for task in tasks {
                    task.await?;
                }
                Ok::<_, nccl::Error>(())
            }))?;
            assert!(during <= before + 1, "{before} threads became {during}");
            assert_eq!(stream.clone_dtoh(&ys[REQUESTS - 1])?, [299.0; 64]);
        } else {
            world.barrier("all are awaited")?;
            for index in 0..REQUESTS {
                send(&comm, &stream, index as f32)?;
            }
        }
        comm.finalize()?;
        Ok(())
    });
}

#[test]
fn who_awaits_on_a_device_that_fails_for_good_is_told_what_all_ranks_are() {
    if !support::needs_emulator("a device that fails") {
        return;
    }
    ranks_as_processes(2, |world| -> Outcome {
        let (stream, comm) = start(&world)?;
        let mut y = stream.alloc_zeros::<f32>(64)?;
        world.barrier("now")?;
        let error = match world.rank() {
            0 => {
                let sum = comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
                // No event can be created for it any more. Other threads would detect that first.
                let calls = ["cuEventCreate", "cuEventRecord", "cuEventQuery"];
                let _fault = calls.map(|call| faults::at_call(call).on_this_thread().fail(719));
                smol::block_on(sum)
            }
            _ => {
                while comm.fault().is_none() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                comm.all_reduce_in_place(&mut y, ReduceOp::Sum).map(drop)
            }
        };
        let error = error.expect_err("the device of rank 0 has failed");
        let fault = error.fault().ok_or_else(|| format!("{error:#}"))?;
        assert_eq!(
            (fault.culprit(), fault.class),
            (Some(0), FaultClass::Failed)
        );
        let RootCause::CallFailed {
            cuda: Some(719), ..
        } = fault.root
        else {
            return Err(fault.to_string().into());
        };
        let all = world.all_gather("what all are told", fault.explain().as_bytes())?;
        assert_eq!(all[0], all[1]);
        Ok(())
    });
}
