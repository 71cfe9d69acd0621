//! The launch of queued operations as a job on a stream.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::tasks::{Tasks, text};
use crate::code::{INVALID_USAGE, Result, UNHANDLED_CUDA};
use crate::faults;
use crate::nccl::communicator::{self, Connections, algorithm};
use crate::nccl::debug::warn;
use crate::nccl::work::{CapturedLaunch, Launch};
use crate::transport::Direction;
use cuda_emulator::driver::CUresult;
use cuda_emulator::exec::{Action, Event, Stream};

type Ends = Vec<(usize, Direction)>;

/// Returns the peers that these operations use for the first time, in NCCL's order.
fn missing_peers(tasks: &Tasks, connections: &Connections) -> Ends {
    let communicator = &tasks.communicator;
    let mut missing = Ends::new();
    for message in &tasks.lists.messages {
        let end = (message.peer as usize, message.direction);
        if end.0 != communicator.rank as usize
            && !connections.has(end.0, end.1)
            && !missing.contains(&end)
        {
            missing.push(end);
        }
    }
    missing
}

fn misses_ring(tasks: &Tasks, connections: &Connections) -> bool {
    !tasks.lists.collectives.is_empty() && !connections.has_algorithm(algorithm::RING)
}

/// Whether [`connect`] would wait.
pub(super) fn needs_connections(tasks: &Tasks) -> bool {
    let connections = tasks.communicator.connections.lock();
    misses_ring(tasks, &connections) || !missing_peers(tasks, &connections).is_empty()
}

/// Sets up the connections used for the first time: all peers of all communicators at once, then
/// the rings, one set of ranks after the other.
pub(super) fn connect(all: &[Tasks]) -> Result {
    if !all.iter().any(needs_connections) {
        return Ok(());
    }
    let _inside: Vec<_> = all.iter().map(|tasks| tasks.communicator.enter()).collect();
    let missing = |tasks: &Tasks| missing_peers(tasks, &tasks.communicator.connections.lock());
    let missing: Vec<Ends> = all.iter().map(missing).collect();
    for (tasks, ends) in all.iter().zip(&missing) {
        if let Some(session) = tasks.communicator.session() {
            communicator::start_peers(session, ends);
        }
    }
    for (tasks, ends) in all.iter().zip(&missing) {
        if let Some(session) = tasks.communicator.session() {
            communicator::finish_peers(&tasks.communicator, session, ends)?;
        }
    }
    for clique in all.chunk_by(|a, b| a.communicator.hash == b.communicator.hash) {
        let misses = |tasks: &&Tasks| misses_ring(tasks, &tasks.communicator.connections.lock());
        let without: Vec<&Tasks> = clique.iter().filter(misses).collect();
        for tasks in &without {
            if let Some(session) = tasks.communicator.session() {
                communicator::start_algorithm(session, algorithm::RING);
            }
        }
        for tasks in &without {
            if let Some(session) = tasks.communicator.session() {
                communicator::finish_algorithm(&tasks.communicator, session, algorithm::RING)?;
            }
        }
    }
    Ok(())
}

/// Checks that the group has at most one launch-completion event, as NCCL requires.
pub(super) fn check_events(tasks: &Tasks) -> Result {
    if tasks.events.len() > 1 {
        warn!("Only one launch-completion event may be provided in one NCCL group");
        return Err(INVALID_USAGE);
    }
    Ok(())
}

/// Records an event on the stream before the next job is enqueued: a GPU's stream records it when
/// the kernel has been launched.
pub(super) fn record_event(event: usize, stream: &Arc<Stream>) -> Result {
    let event = Event::lookup(std::ptr::without_provenance_mut(event));
    let recorded = event.and_then(|event| {
        if event.has_timing() {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        // A graph records the event at each replay.
        event.record(stream, stream.capture().is_some())
    });
    recorded.map_err(|error| {
        let text = text(error);
        warn!(
            "Cuda failure {} '{text}': the launch-completion event",
            error.0
        );
        UNHANDLED_CUDA
    })
}

fn record_events(events: &[usize], stream: &Arc<Stream>) -> Result {
    events
        .iter()
        .try_for_each(|&event| record_event(event, stream))
}

/// Checks that each message of the rank to itself has its other half in the same group.
fn check_self_messages(tasks: &Tasks) -> Result {
    let own = tasks.communicator.rank as u32;
    let mut balance = 0i64;
    for message in tasks
        .lists
        .messages
        .iter()
        .filter(|message| message.peer == own)
    {
        balance += if message.direction == Direction::Send {
            1
        } else {
            -1
        };
    }
    if balance > 0 {
        warn!("Trying to send to self without a matching recv");
    } else if balance < 0 {
        warn!("Trying to recv to self without a matching send");
    }
    if balance == 0 {
        Ok(())
    } else {
        Err(INVALID_USAGE)
    }
}

/// Enqueues the operations of one communicator on its stream, after its previous launch on any
/// stream. If the operations name several streams, the launch joins them all.
pub(super) fn launch(tasks: &mut Tasks) -> Result {
    tasks.resolve_per_thread()?;
    check_self_messages(tasks)?;
    let mut lists = std::mem::take(&mut tasks.lists);
    let (communicator, others) = (&tasks.communicator, &tasks.others);
    let (Some(session), Some(stream)) = (communicator.session(), &tasks.stream) else {
        return Ok(());
    };
    let refuse = |error: CUresult| {
        warn!("Cuda failure {} '{}'", error.0, text(error));
        UNHANDLED_CUDA
    };
    if let Some(capture) = &tasks.capture {
        record_events(&tasks.events, stream)?;
        let streams: Vec<_> = std::iter::once(stream).chain(others).collect();
        let launch = Arc::new(CapturedLaunch::new(communicator, session, &mut lists));
        let captured = Arc::clone(&launch);
        let add = || capture.add(&streams, Action::Work(launch)).map_err(refuse);
        return captured.capturing((tasks.handle, stream.context()), add);
    }
    let start = faults::lateness().map(|delay| Instant::now() + delay);
    if lists.profiles.is_empty() {
        // Otherwise the tracker counts them, when it tells of them.
        for task in &lists.collectives {
            let count = communicator.sequence(task.function);
            count.fetch_add(1, Ordering::Relaxed);
        }
    }
    let launch = Launch::new(communicator, session, stream.context(), lists, start, false);
    let tracker = launch.tracker().cloned();
    let mut issue = communicator.issue.lock();
    for other in others {
        stream.wait_for(other, other.submitted()).map_err(refuse)?;
    }
    if let Some((last, sequence)) = &issue.0
        && !Arc::ptr_eq(last, stream)
    {
        stream.wait_for(last, *sequence).map_err(refuse)?;
    }
    record_events(&tasks.events, stream)?;
    let enqueue = || stream.enqueue(launch).map_err(refuse);
    let sequence = match &tracker {
        Some(tracker) => tracker.launching(tasks.handle, enqueue)?,
        None => enqueue()?,
    };
    for other in others {
        other.wait_for(stream, sequence).map_err(refuse)?;
    }
    match &mut issue.0 {
        Some((last, at)) if Arc::ptr_eq(last, stream) => *at = sequence,
        last => *last = Some((Arc::clone(stream), sequence)),
    }
    drop(issue);
    if let Some(tracker) = tracker {
        tracker.post();
    }
    Ok(())
}

/// Checks that the ranks of one communicator in a group are all captured, or none is. NCCL checks
/// this just before the launch.
pub(super) fn check_captures(all: &[Tasks]) -> Result {
    let mixed = all
        .chunk_by(|a, b| a.communicator.hash == b.communicator.hash)
        .any(|clique| {
            let is_captured = |tasks: &Tasks| tasks.capture.is_some();
            clique.iter().any(is_captured) && !clique.iter().all(is_captured)
        });
    if mixed {
        warn!("Either none or all communicators in a ncclGroup() can be CUDA graph captured.");
        return Err(INVALID_USAGE);
    }
    Ok(())
}
