//! Every rank can read the events of its world, as they happen, over all generations.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nccl::control::WorldEvent;
use nccl::{ReduceOp, World};
use nccl_tools::testing::name;
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

use crate::support::{self, apart};

/// Timeout of operations: reaching it means that no report of another rank ended the operation.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The text of an event.
fn told(event: &WorldEvent) -> String {
    match event {
        WorldEvent::Joined { rank, .. } => format!("joined {rank}"),
        WorldEvent::Left { rank, .. } => format!("left {rank}"),
        WorldEvent::Silent { rank, process, .. } => format!("silent {rank} {process:?}"),
        WorldEvent::Answers { rank, .. } => format!("answers {rank}"),
        WorldEvent::Coordinator { rank, .. } => format!("coordinator {rank}"),
        WorldEvent::Gone { rank, .. } => format!("gone {rank}"),
        WorldEvent::Fault { fault, .. } => {
            format!("fault {:?} {:?}", fault.class, fault.culprit())
        }
        WorldEvent::NextGeneration { generation, .. } => format!("generation {generation}"),
        WorldEvent::Ended { .. } => String::from("ended"),
        other => format!("{other:?}"),
    }
}

/// For how long a rank was silent, in milliseconds, as the coordinator's log has it when the rank answers again.
static SILENT: AtomicU64 = AtomicU64::new(0);

struct Silences;

#[derive(Default)]
struct Milliseconds(Option<u64>);

impl Visit for Milliseconds {
    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "silent_ms" {
            self.0 = Some(value);
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

impl<S: tracing::Subscriber> Layer<S> for Silences {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        if event.metadata().name() == "nccl.rendezvous.heard_again" {
            let mut silent = Milliseconds::default();
            event.record(&mut silent);
            SILENT.store(silent.0.expect("it has the duration"), Ordering::SeqCst);
        }
    }
}

/// The duration in the log entry that accompanies the event.
fn await_silent() -> u64 {
    let deadline = Instant::now() + TIMEOUT;
    while SILENT.load(Ordering::SeqCst) == 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    SILENT.load(Ordering::SeqCst)
}

/// Works with the others until one dies, and then once more with the remaining ranks.
fn survivor(mut world: World) -> Result<(), Box<dyn std::error::Error>> {
    let (events, coordinates) = (world.events(), world.rank() == 0);
    let reading = std::thread::spawn(move || {
        let mut all = Vec::new();
        for event in events {
            all.push(told(&event));
            println!("event: {}", told(&event));
            if coordinates && matches!(event, WorldEvent::Answers { .. }) {
                println!("after {} ms", await_silent());
            }
        }
        all
    });
    let stream = support::device(&world)?.new_stream()?;
    let mut turns = usize::MAX;
    loop {
        let comm = world
            .communicator("work")
            .stream(&stream)
            .with(|comm| comm.timeouts.operation = TIMEOUT);
        let comm = comm.build()?;
        println!("working");
        let mut ended = None;
        for _ in 0..turns {
            let mut y = stream.alloc_zeros::<f32>(64)?;
            let done = comm.all_reduce_in_place(&mut y, ReduceOp::Sum);
            if let Err(error) = done.and_then(|request| request.wait()) {
                ended = Some(error);
                break;
            }
        }
        if ended.is_none() {
            comm.finalize()?;
            break;
        }
        drop(comm);
        world = world.next_generation(TIMEOUT)?;
        turns = 5;
    }
    drop(world);
    let all = reading.join().expect("it reads to the end");
    println!("all: {}", all.join("; "));
    Ok(())
}

#[test]
fn a_rank_reads_who_stands_still_answers_again_and_dies_who_coordinates_and_which_generation_begins()
 {
    const RANKS: usize = 4;
    let test = name(&|| ());
    if let Some((_, world)) = apart::rank(&test, RANKS) {
        let subscriber = tracing_subscriber::registry().with(Silences);
        tracing::subscriber::set_global_default(subscriber).expect("the first");
        survivor(world).expect("this rank survives");
        return;
    }
    if !support::needs_processes(RANKS) {
        return;
    }
    let mut ranks = apart::start(&test, "", RANKS, &[]);
    apart::all_say(&mut ranks, "working");
    ranks[2].stop();
    for rank in [0, 1, 3] {
        ranks[rank].says("event: silent 2");
    }
    ranks[2].resume();
    for rank in [0, 1, 3] {
        ranks[rank].says("event: answers 2");
    }
    let said = ranks[0].says("after ");
    let silent = said.split(' ').nth(1).and_then(|text| text.parse().ok());
    // A rank is a suspect after 2 s.
    assert!(silent > Some(1000_u64), "{said}");
    let mut zero = ranks.remove(0);
    zero.kill();
    for rank in &mut ranks {
        let all = rank.says("all: ");
        for told in [
            "joined 0",
            "joined 3",
            "coordinator 1",
            "gone 0",
            "fault Gone Some(0)",
        ] {
            assert!(all.contains(told), "{told}: {all}");
        }
        let (_, after) = all.split_once("generation 1").expect("it says so");
        assert!(
            after.contains("joined 2") && !after.contains("joined 3"),
            "{all}"
        );
        assert!(after.ends_with("ended"), "{all}");
    }
}
