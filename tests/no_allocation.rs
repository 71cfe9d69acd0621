//! Communication in the steady state allocates nothing on the heap.
//!
//! An allocator counts the allocations of a test's thread, and keeps a backtrace of the first. The library below only
//! queues ([`queueing`]), and allocates nothing itself; streams and memory are the emulator's.

#[path = "support/gate.rs"]
#[allow(dead_code, unreachable_pub)]
mod gate;

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::cell::{Cell, RefCell};

use gate::Gate;
use nccl::all_to_all::{AllToAll, Parts};
use nccl::{DataType, ReduceOp};
use nccl_tools::overhead::{MOST_MESSAGES, Tracking, Workload};
use nccl_tools::queueing::{self, Ending};

struct Counting;

thread_local! {
    static COUNTING: Cell<bool> = const { Cell::new(false) };
    /// Whether allocations of the emulator, and of the stand-in for NCCL in a world of one rank, count as well.
    /// Distinguishing them takes milliseconds each time.
    static EMULATOR_COUNTS: Cell<bool> = const { Cell::new(true) };
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    static FIRST: RefCell<Option<Backtrace>> = const { RefCell::new(None) };
}

fn count() {
    if COUNTING.get() {
        COUNTING.set(false); // a backtrace allocates
        let is_ours = || {
            let callers = Backtrace::force_capture().to_string();
            let below = [
                "cuda_emulator::",
                "nccl_emulator::",
                "nccl_core::single_rank::",
            ];
            !below.iter().any(|library| callers.contains(library))
        };
        if EMULATOR_COUNTS.get() || is_ours() {
            ALLOCATIONS.set(ALLOCATIONS.get() + 1);
            FIRST.with_borrow_mut(|first| {
                first.get_or_insert_with(Backtrace::force_capture);
            });
        }
        COUNTING.set(true);
    }
}

// SAFETY: the system's allocator does all the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: passes on the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The allocations of this thread during `work`, and the backtrace of the first.
fn allocations(work: impl FnOnce()) -> (u64, Option<Backtrace>) {
    ALLOCATIONS.set(0);
    COUNTING.set(true);
    work();
    COUNTING.set(false);
    (ALLOCATIONS.get(), FIRST.take())
}

/// Installs the emulator, for one test at a time: cudarc waits for the whole device when it creates a stream, which
/// ends captures of other threads there.
fn alone() -> std::sync::MutexGuard<'static, ()> {
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    nccl_emulator::install().unwrap();
    ALONE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[track_caller]
fn assert_none(what: &str, work: impl FnOnce()) {
    let (count, first) = allocations(work);
    if let Some(first) = first {
        panic!("{what}: {count} allocations, the first at\n{first}");
    }
}

fn steady(mut operation: impl FnMut(&mut Workload)) {
    let _alone = alone();
    for ending in [Ending::InProgress, Ending::Success] {
        for tracking in [Tracking::Off, Tracking::On] {
            let mut workload = Workload::new(ending, tracking).unwrap();
            let mut thousand = || (0..1000).for_each(|_| operation(&mut workload));
            thousand();
            assert_none(&format!("{ending:?}, tracking {tracking:?}"), thousand);
        }
    }
}

#[test]
fn the_counting_allocator_counts() {
    let (count, first) = allocations(|| drop(std::hint::black_box(vec![1u8])));
    assert_eq!(count, 1);
    assert!(first.is_some());
}

#[test]
fn the_library_below_is_asked_for_every_message() {
    let _alone = alone();
    let workload = Workload::new(Ending::Success, Tracking::Off).unwrap();
    workload.raw_group(8).unwrap();
    assert_eq!(queueing::queued(), 0, "a group is forgotten at its end");
    workload.raw_all_to_all().unwrap();
    assert_eq!(queueing::queued(), 1);
}

#[test]
fn groups_allocate_nothing() {
    steady(|workload| {
        for messages in [2, 8, 16, MOST_MESSAGES] {
            workload.safe_group(messages).unwrap();
        }
    });
}

#[test]
fn all_to_all_allocates_nothing() {
    steady(|workload| workload.safe_all_to_all().unwrap());
}

#[test]
fn all_reduce_allocates_nothing() {
    steady(|workload| workload.safe_all_reduce().unwrap());
}

/// Whatever the algorithm, the number of steps, and whether the plan has memory of its own in between.
#[test]
fn plans_of_all_to_all_allocate_nothing() {
    let _alone = alone();
    for ending in [Ending::InProgress, Ending::Success] {
        for tracking in [Tracking::Off, Tracking::On] {
            let workload = Workload::new(ending, tracking).unwrap();
            let comm = workload.communicator();
            let (ranks, stream) = (comm.world_size(), comm.stream());
            let what = format!("{ending:?}, tracking {tracking:?}");
            let (x, mut y) = (
                stream.alloc_zeros::<f32>(8 * ranks).unwrap(),
                stream.alloc_zeros::<f32>(8 * ranks).unwrap(),
            );
            for by in ["native", "grouped", "chunked:3", "pairwise:4", "two-level"] {
                let plan = AllToAll::plan(comm)
                    .per_peer(DataType::Float32, 8)
                    .with(|plan| plan.algorithm = by.parse().unwrap());
                let mut plan = plan
                    .with(|plan| plan.ranks_per_node = Some(ranks / 2))
                    .build()
                    .unwrap();
                let mut hundred = || (0..100).for_each(|_| drop(plan.enqueue(&x, &mut y).unwrap()));
                hundred();
                assert_none(&format!("{by}, {what}"), hundred);
            }
            let plan = AllToAll::plan(comm)
                .per_peer(DataType::Float32, 8)
                .with(|plan| {
                    plan.in_place = true;
                    plan.scratch_limit = Some(64);
                });
            let mut plan = plan.build().unwrap();
            let plan_copies = plan.explain().copies;
            assert_eq!(plan_copies, ranks - 1);
            let mut hundred =
                || (0..100).for_each(|_| drop(plan.enqueue_in_place(&mut y).unwrap()));
            hundred();
            // The emulator's stream keeps each copy in memory of its own, and sometimes grows its queue. One allocation
            // for each of the exchanges would be a hundred more.
            let copies = 100 * plan_copies as u64;
            let (count, _) = allocations(hundred);
            assert!(
                (copies..copies + 50).contains(&count),
                "in place, {what}: {count}"
            );
            let counts: Vec<usize> = (0..ranks).map(|peer| peer % 3).collect();
            let parts = Parts::from(&counts);
            let plan = AllToAll::plan(comm)
                .parts(DataType::Float32, parts, parts)
                .per_peer(DataType::Float32, 1);
            let mut plan = plan.build().unwrap();
            let (z, mut w) = (
                stream.alloc_zeros::<f32>(ranks).unwrap(),
                stream.alloc_zeros::<f32>(ranks).unwrap(),
            );
            let mut hundred = || {
                for _ in 0..100 {
                    drop(plan.enqueue_all(((&x, &mut y), (&z, &mut w))).unwrap());
                }
            };
            hundred();
            assert_none(&format!("two payloads, {what}"), hundred);
            let mut hundred = || {
                for _ in 0..100 {
                    drop(comm.all_to_all_v(&x, parts, &mut y, parts).unwrap());
                }
            };
            hundred();
            assert_none(&format!("all-to-all-v, {what}"), hundred);
        }
    }
}

/// The graph is empty, because the library below only queues: this counts this crate's part, and what the emulator
/// needs to launch nothing.
#[test]
fn launches_of_a_plan_allocate_nothing() {
    let _alone = alone();
    for tracking in [Tracking::Off, Tracking::On] {
        let workload = Workload::new(Ending::InProgress, tracking).unwrap();
        let comm = workload.communicator();
        let elsewhere = comm.stream().context().new_stream().unwrap();
        let buffers = (
            comm.stream().alloc_zeros::<f32>(8).unwrap(),
            vec![elsewhere.alloc_zeros::<f32>(8).unwrap()],
        );
        let mut plan = comm
            .capture(buffers, |capture, (x, mut y)| {
                capture.group(|group| group.all_reduce(&x, &mut y[0], ReduceOp::Sum))
            })
            .unwrap();
        let mut launches = |count| (0..count).for_each(|_| drop(plan.launch().unwrap()));
        // The emulator's queues grow with what is pending, which is this many launches at most.
        let gate = Gate::closed_on(comm.stream()).unwrap();
        launches(128);
        gate.open();
        // The throttle of launches looks at the communicator's stream alone: the other one, too, may have that many at most.
        let mut thousand = || {
            for _ in 0..10 {
                launches(100);
                elsewhere.synchronize().unwrap();
            }
        };
        thousand();
        assert_none(&format!("tracking {tracking:?}"), thousand);
    }
}

/// With a library that only queues, the ranks would receive nothing when they compare their numbers. So this runs in a
/// world of one, on the emulator: allocations of the layers below this crate are distinguished by their callers.
#[test]
fn steps_of_a_mixture_of_experts_allocate_nothing() {
    // Names in its backtrace tell which code an allocation belongs to.
    if !Backtrace::force_capture()
        .to_string()
        .contains("steps_of_a_mixture")
    {
        nccl_tools::gpu_check::not_tested("a program with symbols: this one was stripped of them");
        return;
    }
    let _alone = alone();
    for tracking in [Tracking::Off, Tracking::On] {
        let context = nccl::cudarc::driver::CudaContext::new(0).unwrap();
        if tracking == Tracking::Off {
            // SAFETY: each buffer is used on its own stream and through operations only.
            unsafe { context.disable_event_tracking() };
        }
        let (stream, elsewhere) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let comm = nccl::World::single()
            .communicator("experts")
            .stream(&stream)
            .build()
            .unwrap();
        let mut ep = nccl::moe::ExpertParallel::builder(&comm)
            .with(|ep| {
                ep.experts = 4;
                ep.top_k = 2;
                ep.max_tokens = 8;
                ep.max_row_bytes = 64;
            })
            .build()
            .unwrap();
        let mut routing = ep.routing().unwrap();
        let topk = stream.clone_htod(&[0i32, 1, 3, -1]).unwrap();
        let (x, scales) = (
            elsewhere.alloc_zeros::<f32>(16).unwrap(),
            stream.alloc_zeros::<u8>(6).unwrap(),
        );
        let mut y = stream.alloc_zeros::<f32>(4 * 8 * 8).unwrap();
        let mut z = stream.alloc_zeros::<u8>(4 * 8 * 3).unwrap();
        let weights = stream.alloc_zeros::<f32>(4).unwrap();
        let mut out = elsewhere.alloc_zeros::<f32>(16).unwrap();
        let mut steps = || {
            for _ in 0..5 {
                ep.route(&topk, &mut routing).unwrap();
                ep.dispatch(&routing, &x, &mut y).unwrap();
                ep.dispatch_with_scales(&routing, &x, &mut y, &scales, &mut z)
                    .unwrap();
                ep.combine(&routing, &y, &weights, &mut out).unwrap();
            }
        };
        // Nothing completes meanwhile: a stream that was idle for a while is watched anew, which allocates.
        let gate = Gate::closed_on(&stream).unwrap();
        steps();
        EMULATOR_COUNTS.set(false);
        assert_none(&format!("tracking {tracking:?}"), steps);
        EMULATOR_COUNTS.set(true);
        gate.open();
        stream.synchronize().unwrap();
    }
}
