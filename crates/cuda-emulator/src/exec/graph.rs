//! Graphs: captured work, and its replays.
//!
//! A [`Graph`] is what a capture left: nodes, each after some of those before it. An
//! [`Executable`] replays it. Nodes that come one after the other run on one *lane*: lane 0 is the
//! stream of the launch, the others are streams of the executable's own, so that branches of a
//! graph run side by side, which ranks that share a graph depend on. All jobs of a replay are
//! enqueued by the launch; the stream goes on when all lanes are through.
//!
//! Nodes are shared by graph, executables and the jobs of replays that need them, so each of these
//! may be destroyed before the others.

use std::ffi::c_void;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::run;
use super::work::{HostCall, Job};
use super::{Event, Kind, Stream, Work};
use crate::driver::CUresult;
use crate::driver::context::Context;
use crate::registry::Registry;

/// Every graph that was not destroyed.
pub static GRAPHS: Registry<Graph> = Registry::new(0x49);
/// Every executable graph that was not destroyed.
pub static EXECUTABLES: Registry<Executable> = Registry::new(0x4A);

/// Work that can be done again and again.
pub trait Recipe: Send + Sync {
    /// The job of one replay, which is going to run on `stream`.
    fn job(&self, stream: &Arc<Stream>) -> Box<dyn Work>;

    /// The job of the only time that it is done.
    fn into_job(self, stream: &Arc<Stream>) -> Box<dyn Work>
    where
        Self: Sized,
    {
        self.job(stream)
    }

    /// The jobs that this one must not overlap with, in and outside of graphs. Those of one graph
    /// keep the order in which they were captured.
    fn sequence(&self) -> Option<&Mutex<Last>> {
        None
    }
}

/// The last of the jobs that must not overlap: the next one waits for it, also on another stream.
/// Held while one is enqueued.
#[derive(Default)]
pub struct Last(pub Option<(Arc<Stream>, u64)>);

/// What a node does.
#[derive(Clone)]
pub enum Action {
    /// Enqueues a job of its recipe.
    Work(Arc<dyn Recipe>),
    /// Calls a host function.
    Host(HostCall),
    /// Waits for what an event marks at the launch.
    Wait(Arc<Event>),
    /// Records an event.
    Record(Arc<Event>),
}

impl Action {
    /// Tells sequences apart.
    pub(super) fn sequence(&self) -> Option<usize> {
        match self {
            Self::Work(recipe) => recipe
                .sequence()
                .map(|last| std::ptr::from_ref(last).addr()),
            _ => None,
        }
    }
}

/// A node of a graph.
#[derive(Clone)]
pub struct Node {
    pub(super) action: Action,
    /// The nodes that it comes after, all of which have smaller numbers.
    pub(super) after: Vec<usize>,
    /// Of the stream it was captured on.
    pub(super) context: Arc<Context>,
}

/// See the module.
pub struct Graph {
    nodes: Arc<[Node]>,
}

impl Graph {
    /// A graph of captured nodes, and its handle.
    pub fn create(nodes: Vec<Node>) -> Result<*mut c_void, CUresult> {
        let graph = Self {
            nodes: nodes.into(),
        };
        GRAPHS
            .insert(Arc::new(graph))
            .ok_or(CUresult::ERROR_OUT_OF_MEMORY)
    }

    /// How many nodes it has.
    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Something that can be launched, and its handle.
    pub fn instantiate(&self) -> Result<*mut c_void, CUresult> {
        let (lane_of, lanes) = plan(&self.nodes);
        let executable = Executable {
            nodes: Arc::clone(&self.nodes),
            lane_of,
            launched: Mutex::new(Launched { lanes, last: None }),
        };
        EXECUTABLES
            .insert(Arc::new(executable))
            .ok_or(CUresult::ERROR_OUT_OF_MEMORY)
    }
}

/// Gives each node a lane: that of a node it comes after, if that one is the last there so far and
/// of the same context. Returns the streams of all lanes but the first, too.
fn plan(nodes: &[Node]) -> (Vec<usize>, Vec<Arc<Stream>>) {
    // The last node of each lane.
    let mut ends: Vec<Option<usize>> = vec![None];
    let mut lanes = Vec::new();
    let mut lane_of = Vec::with_capacity(nodes.len());
    for (at, node) in nodes.iter().enumerate() {
        let same_context = |other: usize| Arc::ptr_eq(&nodes[other].context, &node.context);
        let lane = ends.iter().position(|end| match *end {
            None => node.after.is_empty(),
            Some(end) => node.after.contains(&end) && same_context(end),
        });
        let lane = lane.unwrap_or_else(|| {
            ends.push(None);
            lanes.push(Stream::new(&node.context, Kind::NonBlocking, 0));
            ends.len() - 1
        });
        ends[lane] = Some(at);
        lane_of.push(lane);
    }
    (lane_of, lanes)
}

/// See the module.
pub struct Executable {
    nodes: Arc<[Node]>,
    lane_of: Vec<usize>,
    launched: Mutex<Launched>,
}

struct Launched {
    /// The streams of the lanes from 1 on.
    lanes: Vec<Arc<Stream>>,
    /// The end of the launch before: launches of one executable come one after the other.
    last: Option<(Arc<Stream>, u64)>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Executable {
    /// Enqueues one replay on a stream. In a capture the nodes become part of it.
    ///
    /// # Errors
    /// As [`Stream::enqueue`].
    pub fn launch(&self, stream: &Arc<Stream>) -> Result<(), CUresult> {
        if let Some(capture) = stream.capture() {
            return capture.add_graph(stream, &self.nodes);
        }
        let mut launched = lock(&self.launched);
        // All sequences are held until all jobs are enqueued; by address, as everyone does who
        // holds several.
        let mut sequences: Vec<&Mutex<Last>> = Vec::new();
        for node in &*self.nodes {
            if let Action::Work(recipe) = &node.action
                && let Some(sequence) = recipe.sequence()
                && !sequences.iter().any(|known| std::ptr::eq(*known, sequence))
            {
                sequences.push(sequence);
            }
        }
        sequences.sort_by_key(|sequence| std::ptr::from_ref(*sequence).addr());
        let mut lasts: Vec<(usize, MutexGuard<'_, Last>)> = sequences
            .into_iter()
            .map(|sequence| (std::ptr::from_ref(sequence).addr(), lock(sequence)))
            .collect();

        let _order = stream.admit()?;
        run::remember(stream);
        let mut queue = stream.open();
        if let Some((before, sequence)) = &launched.last {
            queue.push_wait(before, *sequence);
        }
        let start = queue.last();
        let mut numbers: Vec<u64> = Vec::with_capacity(self.nodes.len());
        for (node, &lane) in self.nodes.iter().zip(&self.lane_of) {
            let own = match lane {
                0 => stream,
                _ => &launched.lanes[lane - 1],
            };
            let mut push = |job: Job| match lane {
                0 => queue.push(job),
                _ => own.open().push(job),
            };
            let mut wait_for = |other: &Arc<Stream>, sequence: u64| {
                if !Arc::ptr_eq(own, other) && other.completed() < sequence {
                    push(Job::Wait {
                        stream: Arc::clone(other),
                        sequence,
                    });
                }
            };
            if node.after.is_empty() {
                wait_for(stream, start);
            }
            for &before in &node.after {
                match self.lane_of[before] {
                    0 => wait_for(stream, numbers[before]),
                    other => wait_for(&launched.lanes[other - 1], numbers[before]),
                }
            }
            let key = node.action.sequence();
            let last = lasts.iter_mut().find(|(address, _)| Some(*address) == key);
            if let Some((_, last)) = &last
                && let Some((other, sequence)) = &last.0
            {
                wait_for(other, *sequence);
            }
            let number = match &node.action {
                Action::Work(recipe) => push(Job::Work(recipe.job(own))),
                Action::Host(call) => push(Job::Host(*call)),
                Action::Wait(event) => {
                    // Also if there is nothing to wait for: the node has its number.
                    match event.recorded() {
                        Some((other, sequence)) if !Arc::ptr_eq(own, &other) => push(Job::Wait {
                            stream: other,
                            sequence,
                        }),
                        _ => push(Job::Stamp(Arc::default())),
                    }
                }
                Action::Record(event) => {
                    let time = Arc::new(AtomicU64::new(0));
                    let number = push(Job::Stamp(Arc::clone(&time)));
                    event.set_recorded(own, number, time);
                    number
                }
            };
            if let Some((_, last)) = last {
                last.0 = Some((Arc::clone(own), number));
            }
            numbers.push(number);
        }
        for lane in &launched.lanes {
            queue.push_wait(lane, lane.submitted());
        }
        let end = queue.last();
        drop(queue);
        launched.last = Some((Arc::clone(stream), end));
        Ok(())
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        for lane in &lock(&self.launched).lanes {
            // What is queued on it still runs.
            lane.destroy();
        }
    }
}
