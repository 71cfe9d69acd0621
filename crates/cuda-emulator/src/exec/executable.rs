//! Executables: graphs as they were when they were instantiated, ready for repeated launches.
//!
//! Nodes that come one after the other run on one *lane*. Lane 0 is the stream of the launch; the others are streams of
//! the executable, so that branches of a graph run concurrently, which ranks that share a graph depend on. The launch
//! enqueues all jobs of a replay; later jobs of the stream wait for all lanes.
//!
//! An executable has nodes of its own, which the jobs of its replays share, so graph, executable and replays may end in
//! any order. Each of them holds references to its user objects ([`super::UserObject`]).

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::graph::{Action, Body, Graph, Last, Node};
use super::job::Job;
use super::object::Share;
use super::run;
use super::stream::{Kind, Stream};
use super::work::{Step, Work};
use crate::registry::Registry;
use crate::result::CUresult;
use crate::sync::{Mutex, MutexGuard};

/// All executables that were not destroyed.
pub static EXECUTABLES: Registry<Executable> = Registry::new(0x4A);
impl Body {
    /// Returns the nodes in topological order, otherwise in the order in which they were added.
    fn in_order(&self) -> Vec<Node> {
        let sorted = |(at, node): (usize, &Node)| node.after.iter().all(|&before| before < at);
        if self.nodes.iter().enumerate().all(sorted) {
            return self.nodes.clone();
        }
        let mut missing: Vec<usize> = self.nodes.iter().map(|node| node.after.len()).collect();
        let mut next = vec![Vec::new(); missing.len()];
        for (at, node) in self.nodes.iter().enumerate() {
            node.after.iter().for_each(|&before| next[before].push(at));
        }
        let mut ready: BinaryHeap<_> = (0..missing.len())
            .filter(|&at| missing[at] == 0)
            .map(Reverse)
            .collect();
        let mut place = vec![0; missing.len()];
        let mut nodes: Vec<Node> = Vec::with_capacity(missing.len());
        while let Some(Reverse(at)) = ready.pop() {
            place[at] = nodes.len();
            let mut node = self.nodes[at].clone();
            // All predecessors have their places already.
            node.after
                .iter_mut()
                .for_each(|before| *before = place[*before]);
            nodes.push(node);
            for &later in &next[at] {
                missing[later] -= 1;
                if missing[later] == 0 {
                    ready.push(Reverse(later));
                }
            }
        }
        nodes
    }
}

impl Graph {
    /// Creates an executable and returns its handle.
    pub fn instantiate(&self) -> Result<*mut c_void, CUresult> {
        let (nodes, objects) = {
            let body = self.body();
            let objects: Result<Vec<_>, _> = body.objects.iter().map(Share::again).collect();
            (body.in_order(), objects?)
        };
        let (lane_of, lanes) = plan(&nodes);
        let executable = Executable {
            nodes: nodes.into(),
            objects: objects.into(),
            lane_of,
            launched: Mutex::new(Launched { lanes, last: None }),
        };
        EXECUTABLES
            .insert(Arc::new(executable))
            .ok_or(CUresult::ERROR_OUT_OF_MEMORY)
    }
}

/// The last job of a replay that needs user objects. It keeps them until the replay is done.
struct Keep {
    _objects: Arc<[Share]>,
}

impl Work for Keep {
    fn step(&mut self, _budget: usize) -> Step {
        Step::Done
    }

    fn describe(&self) -> String {
        "the end of a graph".to_owned()
    }
}

/// Assigns each node a lane: the lane of a predecessor, if the predecessor is the last node there so far
/// and of the same context. Also returns the streams of all lanes but the first.
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

/// A graph that can be launched; see the module.
pub struct Executable {
    nodes: Arc<[Node]>,
    objects: Arc<[Share]>,
    lane_of: Vec<usize>,
    launched: Mutex<Launched>,
}

struct Launched {
    /// The streams of the lanes from 1 on.
    lanes: Vec<Arc<Stream>>,
    /// The end of the previous launch: launches of one executable run one after the other.
    last: Option<(Arc<Stream>, u64)>,
}

impl Executable {
    /// Enqueues one replay on a stream. In a capture the nodes become part of it.
    ///
    /// # Errors
    /// As [`Stream::enqueue`].
    pub fn launch(&self, stream: &Arc<Stream>) -> Result<(), CUresult> {
        if let Some(capture) = stream.capture() {
            return capture.add_graph(stream, &self.nodes, &self.objects);
        }
        let mut launched = self.launched.lock();
        // All sequences stay locked until all jobs are enqueued. They are locked by address, as
        // everywhere that several are locked.
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
            .map(|sequence| (std::ptr::from_ref(sequence).addr(), sequence.lock()))
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
                    // Also if there is nothing to wait for, so that the node has a job number.
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
        if !self.objects.is_empty() {
            queue.push(Job::Work(Box::new(Keep {
                _objects: Arc::clone(&self.objects),
            })));
        }
        let end = queue.last();
        drop(queue);
        launched.last = Some((Arc::clone(stream), end));
        Ok(())
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        for lane in &self.launched.lock().lanes {
            // What is queued on it still runs.
            lane.destroy();
        }
    }
}
