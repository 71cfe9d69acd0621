//! A process that forks while its communicators work: every call in the child is refused, the child ends soon, whatever
//! it drops, and the parent is not affected.

use std::any::Any;
use std::path::PathBuf;
use std::pin::Pin;
use std::process::Command;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use nccl::all_to_all::AllToAll;
use nccl::control::Events;
use nccl::cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use nccl::launch::Fleet;
use nccl::moe::{ExpertParallel, Routing};
use nccl::plan::CapturedPlan;
use nccl::{
    BackgroundCall, Buffer, Communicator, DataType, Error, ErrorKind, Observer, PreMulSum,
    ReduceOp, Registered, Rendezvous, Request, UniqueId, World,
};
use nccl_tools::testing::{Role, again, name};

use crate::support::{self, Ranks};

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// How a child ends.
#[derive(Clone, Copy, Debug)]
enum End {
    /// Without running any code of the program.
    AtOnce,
    /// With the handlers that are registered for the exit of a process.
    InOrder,
    /// By executing another program.
    AsAnother,
}

/// Longer than a test may take.
const LONG: Duration = Duration::from_secs(100);

const ENDS: [End; 3] = [End::AtOnce, End::InOrder, End::AsAnother];

/// An object of every type of this crate, in use.
struct All {
    plan: CapturedPlan<Registered<Buffer<f32>>>,
    registered: Registered<Buffer<u8>>,
    exchange: AllToAll,
    experts: ExpertParallel,
    routing: Routing,
    layer: CapturedPlan<(Routing, CudaSlice<i32>)>,
    operator: PreMulSum<f32>,
    buffer: Buffer<f32>,
    spare: Option<Buffer<f32>>,
    choice: CudaSlice<i32>,
    request: Request,
    events: Events,
    values: CudaSlice<f32>,
    comm: Communicator,
    stream: Arc<CudaStream>,
    context: Arc<CudaContext>,
}

impl All {
    fn new(world: &World) -> Result<Self> {
        let context = support::device(world)?;
        let stream = context.new_stream()?;
        let comm = world.communicator("all").stream(&stream).build()?;
        let plan = comm.capture(comm.register(comm.buffer::<f32>(1000)?)?, |capture, x| {
            capture.group(|group| group.all_reduce_in_place(x, ReduceOp::Sum))
        })?;
        let experts = ExpertParallel::builder(&comm)
            .with(|ep| {
                ep.experts = world.size();
                ep.top_k = 1;
                ep.max_tokens = 4;
                ep.max_row_bytes = 16;
            })
            .build()?;
        let choices = (experts.routing()?, stream.clone_htod(&[0i32; 4])?);
        let mut layer = comm.capture(choices, |capture, (mut routing, choices)| {
            experts.capture(capture)?.route(&choices, &mut routing)
        })?;
        layer.launch()?;
        let mut values = stream.clone_htod(&[1.0f32; 64])?;
        let request = comm.all_reduce_in_place(&mut values, ReduceOp::Sum)?;
        Ok(Self {
            plan,
            registered: comm.register(comm.buffer::<u8>(4096)?)?,
            exchange: AllToAll::plan(&comm)
                .per_peer(DataType::Float32, 8)
                .build()?,
            routing: experts.routing()?,
            layer,
            experts,
            operator: comm.pre_mul_sum(0.5f32)?,
            buffer: comm.buffer(64)?,
            spare: Some(comm.buffer(64)?),
            choice: stream.clone_htod(&[0i32; 4])?,
            request,
            events: world.events(),
            values,
            comm,
            stream,
            context,
        })
    }

    /// The error of each part in a child.
    fn use_all(&mut self, world: &World) -> Vec<(&'static str, Option<Error>)> {
        let (comm, values, buffer) = (&self.comm, &mut self.values, &mut self.buffer);
        let (count, spare) = (8 * world.size(), self.spare.take());
        let streams = [Arc::clone(&self.stream)];
        vec![
            ("is_complete", self.request.is_complete().err()),
            ("wait", self.request.wait().err()),
            (
                "all_reduce",
                comm.all_reduce_in_place(&mut *values, ReduceOp::Sum).err(),
            ),
            (
                "all_reduce with an operator",
                comm.all_reduce_in_place(&mut *buffer, &self.operator).err(),
            ),
            ("group", comm.group(|group| group.isend(&*values, 0)).err()),
            (
                "groups",
                nccl::group(|groups| groups.on(comm)?.isend(&*values, 0)).err(),
            ),
            ("launch", self.plan.launch().err()),
            (
                "all-to-all plan",
                self.exchange
                    .enqueue(&values.slice(..count), buffer.slice_mut(..count))
                    .err(),
            ),
            (
                "capture",
                comm.capture(Vec::<CudaSlice<f32>>::new(), |_, _| Ok(()))
                    .err(),
            ),
            (
                "dispatch",
                self.experts.route(&self.choice, &mut self.routing).err(),
            ),
            ("routing", self.experts.routing().err()),
            ("launch of experts", self.layer.launch().err()),
            ("counts", self.layer.views().0.counts().err()),
            (
                "register",
                spare.and_then(|spare| comm.register(spare).err()),
            ),
            ("pre_mul_sum", comm.pre_mul_sum(2.0f32).err()),
            ("buffer", comm.buffer::<u8>(1).err()),
            ("warm_up", comm.warm_up(LONG).err()),
            ("split", comm.split("part", Some(0), 0).err()),
            ("shrink", comm.shrink("less", &[0]).err()),
            ("revoke", comm.revoke("a test").err()),
            ("abort", comm.abort("a test").err()),
            ("finalize", comm.finalize().err()),
            (
                "build",
                world
                    .communicator("child")
                    .stream(&self.stream)
                    .build()
                    .err(),
            ),
            ("init_all", Communicator::init_all("child", &streams).err()),
            ("barrier", world.barrier("child").err()),
            ("barrier of a communicator", comm.barrier().err()),
            ("a call in the background", {
                let mut call = BackgroundCall::start(|| Ok(()));
                let mut context = Context::from_waker(Waker::noop());
                match Pin::new(&mut call).poll(&mut context) {
                    Poll::Ready(result) => result.err(),
                    Poll::Pending => None,
                }
            }),
            ("get", world.get("nothing").err()),
            ("channel", world.channel("child").recv(LONG).err()),
            ("next_generation", world.next_generation(LONG).err()),
            ("join_running", World::join_running(nowhere()).err()),
            (
                "fail of a rendezvous",
                nowhere().fail(&std::io::Error::other("a test")).err(),
            ),
            ("id", UniqueId::new(comm.library()).err()),
        ]
    }
}

/// A rendezvous at which no rank listens.
fn nowhere() -> Rendezvous {
    let path = std::env::temp_dir().join(format!("nccl-nowhere-{}", std::process::id()));
    let rendezvous = Rendezvous::unix(path, 1, 2).expect("a rendezvous");
    rendezvous.with(|meet| meet.timeout = Duration::from_secs(5))
}

/// Runs `work` in a child, and returns how it ended: an exit status as `waitpid` has it. A child that hangs is killed.
fn in_a_child(work: impl FnOnce()) -> Result<i32> {
    // SAFETY: the child runs `work` on the only thread that it has, and never returns from here.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error().into()),
        0 => {
            // SAFETY: has this process killed by SIGALRM.
            unsafe { libc::alarm(20) };
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_ok();
            // SAFETY: ends the child.
            unsafe { libc::_exit(if done { 0 } else { 101 }) }
        }
        child => {
            let mut status = 0;
            // SAFETY: a child of this process that no other code waits for.
            match unsafe { libc::waitpid(child, &mut status, 0) } {
                -1 => Err(std::io::Error::last_os_error().into()),
                _ => Ok(status),
            }
        }
    }
}

/// The state of a rank: the objects of this crate, the world, and more.
struct Rank {
    all: All,
    world: World,
    observer: Option<Observer>,
    fleet: Option<Fleet>,
    /// The file of the socket at which rank 0 listens.
    door: Option<PathBuf>,
}

impl Rank {
    fn into_parts(self) -> Vec<Box<dyn Any>> {
        let all = self.all;
        vec![
            Box::new(all.plan),
            Box::new(all.registered),
            Box::new((
                all.exchange,
                all.experts,
                all.routing,
                all.layer,
                all.choice,
            )),
            Box::new((all.operator, all.buffer, all.spare)),
            Box::new(all.comm),
            Box::new(self.world),
            Box::new((all.request, all.events)),
            Box::new((all.values, all.stream, all.context)),
            Box::new((self.observer, self.fleet)),
        ]
    }

    /// The code of a child: it uses everything, and drops it in an order that depends on `turns`.
    fn be_a_child(mut self, parent: u32, end: End, turns: usize) {
        for (what, error) in self.all.use_all(&self.world) {
            let error = error.unwrap_or_else(|| panic!("{what} succeeded"));
            let ErrorKind::Forked { made_by } = error.kind() else {
                panic!("{what}: {error:#}");
            };
            assert_eq!(*made_by, parent, "{what}");
        }
        assert!(self.all.events.next_within(LONG).is_none());
        assert!(self.world.fault().is_none() && self.all.comm.fault().is_none());
        assert!(self.all.comm.as_raw().is_none());
        assert!(nccl::process::abort_all("a test").communicators.is_empty());
        assert!(nccl::stats().communicators.is_empty());
        if let Some(fleet) = &self.fleet {
            assert!(!fleet.wait().is_success());
        }
        let mut parts = self.into_parts();
        let turns = turns % parts.len();
        parts.rotate_left(turns);
        parts.into_iter().for_each(drop);
        match end {
            End::AtOnce => {}
            End::InOrder => std::process::exit(0),
            End::AsAnother => {
                let argv = [c"true".as_ptr(), std::ptr::null()];
                // SAFETY: a list of C strings that ends with null.
                unsafe { libc::execvp(argv[0], argv.as_ptr()) };
                panic!("there is no `true`");
            }
        }
    }

    /// Asserts that everything works.
    fn goes_on(&mut self, number: usize) -> Result<()> {
        let ranks = self.world.size() as f32;
        let All {
            comm, plan, stream, ..
        } = &mut self.all;
        let mut values = stream.clone_htod(&[1.0f32; 64])?;
        comm.all_reduce_in_place(&mut values, ReduceOp::Sum)?
            .wait()?;
        assert_eq!(stream.clone_dtoh(&values)?, [ranks; 64]);
        plan.launch()?.wait()?;
        self.world.barrier(&format!("after child {number}"))?;
        assert!(self.door.as_ref().is_none_or(|door| door.exists()));
        if let Some(fleet) = &self.fleet {
            assert!(
                fleet.wait_timeout(Duration::ZERO).is_none(),
                "its rank lives"
            );
        }
        Ok(())
    }
}

fn forks_and_goes_on(rank: Rank) -> Result<()> {
    let parent = std::process::id();
    let mut rank = Some(rank);
    for turns in 0..12 {
        let end = match ENDS[turns % ENDS.len()] {
            // In an orderly exit, the RAS thread's object terminates a child that lacks this thread (`std::thread`).
            End::InOrder if support::on_nvidias() => End::AtOnce,
            end => end,
        };
        // The child takes its own copy.
        let status = in_a_child(|| {
            if let Some(rank) = rank.take() {
                rank.be_a_child(parent, end, turns);
            }
        })?;
        assert_eq!(status, 0, "the status of child {turns}, which ends {end:?}");
        rank.as_mut().ok_or("it has it still")?.goes_on(turns)?;
    }
    let rank = rank.ok_or("it has it still")?;
    rank.all.comm.finalize()?;
    Ok(())
}

#[test]
fn a_forked_child_of_a_process_that_is_a_rank_is_refused_and_leaves_the_parent_alone() {
    if !support::needs_emulator("as many devices as ranks") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let door = directory.path().join("door");
    Ranks::new(2)
        .variable("NCCL_TEST_DOOR", &door)
        .processes(|world| -> Result<()> {
            let door = std::env::var("NCCL_TEST_DOOR")?;
            let unix = |rank| Rendezvous::unix(&door, rank, 2);
            // With a socket that has a file.
            let world = World::join(unix(world.rank())?)?;
            let rank = Rank {
                all: All::new(&world)?,
                observer: Some(Observer::join(unix(0)?)?),
                fleet: Some(Fleet::builder(1).start(|_| {
                    let mut command = Command::new("sleep");
                    command.arg("60");
                    command
                })?),
                world,
                door: Some(PathBuf::from(&door)),
            };
            forks_and_goes_on(rank)?;
            Ok(())
        });
}

/// Other threads hold locks of this crate at the moment of the fork.
#[test]
fn a_forked_child_of_a_process_whose_threads_are_ranks_is_refused_and_leaves_the_others_alone() {
    if !support::needs_emulator("as many devices as ranks") {
        return;
    }
    support::ranks_as_threads(2, |world| -> Result<()> {
        let rank = Rank {
            all: All::new(&world)?,
            world,
            observer: None,
            fleet: None,
            door: None,
        };
        forks_and_goes_on(rank)
    });
}

#[test]
fn a_process_forks_before_its_first_use_of_this_crate_and_the_child_uses_it() {
    let test = &name(&|| ());
    if Role::of(test) == Role::Test {
        // A process that has used nothing of this crate yet.
        let status = again(test, "parent").status().expect("a process");
        assert!(status.success(), "{status}");
        return;
    }
    let status = in_a_child(|| {
        let stream = (|| -> Result<_> {
            nccl_tools::perf::install(1)?;
            Ok(CudaContext::new(0)?.new_stream()?)
        })();
        let world = World::threads(1).remove(0);
        let comm = world
            .communicator("child")
            .stream(&stream.expect("a stream"))
            .build();
        comm.expect("a communicator").finalize().expect("an end");
    });
    assert_eq!(status.expect("a child"), 0);
}

/// Memory alone, without a communicator or a world.
#[test]
fn a_forked_child_of_a_process_that_has_only_memory_of_nccls_leaves_it_alone() {
    let test = &name(&|| ());
    if Role::of(test) == Role::Test {
        let status = again(test, "parent").status().expect("a process");
        assert!(status.success(), "{status}");
        return;
    }
    nccl_tools::perf::install(1).expect("an emulator or a GPU");
    let library = nccl::Library::load().expect("a library");
    let stream = CudaContext::new(0).and_then(|context| context.new_stream());
    let stream = stream.expect("a stream");
    let buffer = Buffer::<f32>::zeroed(&library, &stream, 64).expect("memory");
    let parent = std::process::id();
    let mut buffer = Some(buffer);
    let status = in_a_child(|| {
        drop(buffer.take());
        let error = Buffer::<f32>::zeroed(&library, &stream, 64).expect_err("it is a child");
        assert!(
            matches!(error.kind(), ErrorKind::Forked { made_by } if *made_by == parent),
            "{error:#}"
        );
        std::process::exit(0);
    });
    assert_eq!(status.expect("a child"), 0);
    let buffer = buffer.expect("the child took its copy");
    assert_eq!(buffer.len(), 64);
    drop(buffer);
}
