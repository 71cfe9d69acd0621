//! The rank's side of a row: its state, its actions, and its output.
//!
//! A rank prints lines that begin with: `ready`; `harm` when it is about to do the wrong thing itself; `fault: ` and
//! the cause as JSON; `kind: ` and the kind of the error; `ended: ` and the cause, or `refused: ` and an error, or
//! `unharmed`; `on: ` when it works again; `leaks: ` and the resources that it holds more than before, or nothing.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl::cudarc::driver::{CudaSlice, CudaStream};
use nccl::{Communicator, ReduceOp, Rendezvous, World};
use nccl_tools::perf;

use crate::row::{Cast, Ends, LONG, Row, Then};
use crate::support;
use crate::support::held::{Held, held};
use crate::switch::on_the_host;

/// Time within which the surviving ranks continue.
const SOON: Duration = Duration::from_secs(10);

/// The state of a rank of a row.
pub(crate) struct Actor {
    pub(crate) world: World,
    pub(crate) stream: Arc<CudaStream>,
    /// The communicator of all ranks; `None` in rows that begin without.
    comm: Option<Communicator>,
    pub(crate) timeout: Duration,
}

impl Actor {
    pub(crate) fn is(&self, rank: usize) -> bool {
        self.world.rank() == rank
    }

    pub(crate) fn comm(&self) -> &Communicator {
        self.comm.as_ref().expect("the row begins with one")
    }

    pub(crate) fn memory<
        T: nccl::cudarc::driver::DeviceRepr + nccl::cudarc::driver::ValidAsZeroBits,
    >(
        &self,
        len: usize,
    ) -> CudaSlice<T> {
        self.stream.alloc_zeros(len).expect("memory")
    }

    /// A communicator of all ranks.
    pub(crate) fn build(&self, name: &str) -> nccl::Result<Communicator> {
        build(&self.world, &self.stream, name, self.timeout)
    }

    pub(crate) fn all_reduce(&self) -> nccl::Result<()> {
        let mut y = self.memory::<f32>(1 << 10);
        self.comm()
            .all_reduce_in_place(&mut y, ReduceOp::Sum)?
            .wait()
    }

    /// Works until an error.
    pub(crate) fn work(&self) -> nccl::Result<()> {
        loop {
            self.all_reduce()?;
        }
    }

    /// Works for a while.
    pub(crate) fn work_for(&self, time: Duration) -> nccl::Result<()> {
        // All ranks do the same number of turns: a late rank makes the others wait.
        for _ in 0..time.as_millis() / 10 {
            self.all_reduce()?;
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// A buffer for each rank.
    fn buffers(&self) -> Vec<CudaSlice<f32>> {
        let ranks = 0..self.comm().world_size();
        ranks.map(|_| self.memory::<f32>(1 << 10)).collect()
    }

    /// As [`work_for`](Self::work_for), by groups of messages to all ranks.
    pub(crate) fn message_for(&self, time: Duration) -> nccl::Result<()> {
        let (x, mut y) = (self.buffers(), self.buffers());
        for _ in 0..time.as_millis() / 10 {
            let messages = self.comm().group(|group| {
                for (peer, (x, y)) in x.iter().zip(&mut y).enumerate() {
                    group.isend(x, peer)?;
                    group.irecv(y, peer)?;
                }
                Ok(())
            })?;
            messages.wait()?;
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// As [`work_for`](Self::work_for), by replays of messages to all ranks.
    pub(crate) fn replay_for(&self, time: Duration) -> nccl::Result<()> {
        let buffers = (self.buffers(), self.buffers());
        let mut plan = self.comm().capture(buffers, |capture, (x, mut y)| {
            capture.group(|group| {
                for (peer, (x, y)) in x.iter().zip(&mut y).enumerate() {
                    group.isend(x, peer)?;
                    group.irecv(y, peer)?;
                }
                Ok(())
            })
        })?;
        for _ in 0..time.as_millis() / 10 {
            plan.launch()?.wait()?;
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Waits for all ranks, and announces that the fault happens now.
    pub(crate) fn harm(&self) {
        self.world.barrier("harm").expect("all are there");
        println!("harm");
    }

    /// Makes no call until the communicator has ended; returns the result of the next call.
    pub(crate) fn hear(&self) -> nccl::Result<()> {
        hear(self.comm())?;
        self.all_reduce()
    }
}

/// Makes no call until a communicator has ended.
pub(crate) fn hear(comm: &Communicator) -> nccl::Result<()> {
    hear_any(&[comm]);
    Ok(())
}

/// As [`hear`], for several; returns the one that has ended.
pub(crate) fn hear_any<'c>(comms: &[&'c Communicator]) -> &'c Communicator {
    let begun = Instant::now();
    loop {
        let ended = comms.iter().find(|comm| comm.fault().is_some());
        if let Some(ended) = ended.or(comms.first().filter(|_| begun.elapsed() > LONG)) {
            return ended;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn build(
    world: &World,
    stream: &Arc<CudaStream>,
    name: &str,
    timeout: Duration,
) -> nccl::Result<Communicator> {
    let comm = world
        .communicator(name)
        .stream(stream)
        .with(|comm| comm.timeouts.operation = timeout);
    comm.with(|comm| {
        comm.timeouts.abort = Duration::from_secs(1);
        comm.preflight = false;
    })
    .build()
}

/// Checks a result with all ranks of `comm`, over the connections that the work of a row uses.
fn sum(comm: &Communicator, stream: &Arc<CudaStream>) -> nccl::Result<()> {
    let mut y = stream.clone_htod(&vec![1f32; 1 << 10]).expect("memory");
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    let y = stream.clone_dtoh(&y).expect("memory");
    assert!(
        y.iter().all(|&sum| sum == comm.world_size() as f32),
        "{y:?}"
    );
    Ok(())
}

/// A rank of `row`, until it ends.
pub(crate) fn rank(row: &'static Row) {
    let ranks = row.cast.ranks();
    perf::install(ranks).unwrap_or_else(|failure| panic!("{failure}"));
    nccl::process::install_panic_hook();
    let rendezvous = Rendezvous::from_env().expect("the test set our variables");
    let world = on_the_host(|| World::join(rendezvous)).expect("the ranks meet");
    let world = support::in_launch_mode(world);
    let stream = support::device(&world)
        .and_then(|context| context.new_stream())
        .expect("a stream");
    let mut actor = Actor {
        world,
        stream,
        comm: None,
        timeout: row.timeout,
    };
    // The first communicator creates permanent resources of a process.
    let first = actor.build("first").expect("all are there");
    sum(&first, &actor.stream).expect("all are there");
    first.finalize().expect("all are there");
    let before = held().expect("/proc says");
    if row.built {
        let comm = actor.build("work").expect("all are there");
        sum(&comm, &actor.stream).expect("all are there");
        actor.comm = Some(comm);
    }
    actor.world.barrier("ready").expect("all are there");
    // The test runner has begun a line.
    println!("\nready");
    let result = (row.play)(&actor);
    match &result {
        Ok(()) => println!("unharmed"),
        Err(error) => match error.fault() {
            Some(fault) => {
                println!("fault: {}", serde_json::to_string(fault).expect("values"));
                let kind = error.report().kind;
                println!("kind: {kind}, is_timeout: {}", error.is_timeout());
                let root = serde_json::to_value(fault.root.clone()).expect("values");
                let kind = root["kind"].as_str().unwrap_or_default();
                let class = fault.class;
                let culprit = match fault.culprit() {
                    Some(rank) => format!("rank {rank} (pid {})", fault.pid),
                    None => String::from("no rank"),
                };
                let evidence = fault.evidence.join("; ");
                println!("ended: {class:?} {kind} of {culprit}: {root}; {fault}; {evidence}");
            }
            None => println!("refused: {}", format!("{error:#}").replace('\n', " ")),
        },
    }
    if let Err(error) = result {
        println!("in full: {}", format!("{error:#}").replace('\n', " "));
    }
    let rank = actor.world.rank();
    if !row.aside.contains(&rank) && !row.leave.contains(&rank) {
        go_on(row, actor, &before);
    }
    println!("main returns");
    if !row.aside.is_empty() {
        // All hosts share one list of processes here: an end would be seen across a cut cable.
        std::thread::sleep(LONG);
    }
}

/// Shows that this process still works.
fn go_on(row: &Row, mut actor: Actor, before: &Held) {
    let rank = actor.world.rank();
    let is_successor = rank > 0 && (0..rank).all(|before| row.lost.contains(&before));
    let goes_on = matches!(row.then, Then::Generation | Then::Behind);
    // The current coordinator listens at the rendezvous address. The connections of the previous generation stay until the
    // next one: to the coordinator, to the launcher, and the watches of their processes.
    let line = match row.cast {
        Cast::Fleet(_) => 4,
        Cast::Processes(_) | Cast::Hosts(_) => 3,
    };
    let more = usize::from(is_successor) + line * usize::from(goes_on);
    let old = actor.comm.take();
    let next = match row.then {
        Then::Generation => Some(on_the_host(|| actor.world.next_generation(SOON))),
        Then::Behind => {
            let short = Duration::from_millis(500);
            Some(on_the_host(|| {
                actor.world.next_generation_leaving_behind(short)
            }))
        }
        _ => None,
    };
    if let Some(next) = next {
        actor.world = next.unwrap_or_else(|error| panic!("no next generation: {error:#}"));
    }
    let comm = match (row.then, old) {
        (Then::Same, Some(comm)) => comm,
        (Then::Shrink, Some(old)) => {
            let shrunk = old.shrink("rest", &[]);
            shrunk
                .unwrap_or_else(|error| panic!("no shrink: {error:#}"))
                .communicator
        }
        (_, old) => {
            drop(old);
            build(&actor.world, &actor.stream, "again", SOON)
                .unwrap_or_else(|error| panic!("no new communicator: {error:#}"))
        }
    };
    sum(&comm, &actor.stream).unwrap_or_else(|error| panic!("no right result: {error:#}"));
    println!("on: {} ranks", comm.world_size());
    if row.then == Then::Same || matches!(row.ends, Ends::Nothing) {
        assert!(comm.fault().is_none());
    }
    comm.finalize()
        .unwrap_or_else(|error| panic!("no orderly end: {error:#}"));
    println!("leaks: {}", leaks(before, more));
}

/// The resources that this process holds more than before, once dropped objects are gone; `allowed` descriptors may be
/// more.
fn leaks(before: &Held, allowed: usize) -> String {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let now = held().expect("/proc says");
        let mut more = String::new();
        // A descriptor that another thread is just closing may be counted.
        if now.descriptors > before.descriptors + allowed + 2 {
            let _ = write!(
                more,
                "{} descriptors instead of {}; ",
                now.descriptors, before.descriptors
            );
        }
        if now.threads > before.threads + 2 {
            let _ = write!(
                more,
                "{} threads instead of {}; ",
                now.threads, before.threads
            );
        }
        if now.segments > 0 {
            let _ = write!(more, "memory of {} communicators", now.segments);
        }
        if more.is_empty() || Instant::now() > deadline {
            return more;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
