//! Graphs: captured work, and its replays.
//!
//! A [`Graph`] is what a capture writes down, and what is added to it by hand: nodes, each after some others. An
//! [`Executable`] replays it as it was when the executable was made. Nodes that come one after the other run on one *lane*: lane 0 is the
//! stream of the launch, the others are streams of the executable's own, so that branches of a
//! graph run side by side, which ranks that share a graph depend on. All jobs of a replay are
//! enqueued by the launch; the stream goes on when all lanes are through.
//!
//! A node never leaves its graph, so its place there is its name; it has a handle ([`NODES`]) from when it is first
//! asked for until the graph is gone. An executable has nodes of its own, which the jobs of its replays share, so
//! graph, executable and replays may end in any order. User objects ([`super::UserObject`]) have a reference of each.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use super::object::Share;
use super::run;
use super::work::{HostCall, Job};
use super::{Event, Kind, Step, Stream, UserObject, Work};
use crate::driver::CUresult;
use crate::driver::context::Context;
use crate::registry::Registry;
use crate::sync::{Mutex, MutexGuard};

/// Every graph that was not destroyed.
pub static GRAPHS: Registry<Graph> = Registry::new(0x49);
/// Every executable graph that was not destroyed.
pub static EXECUTABLES: Registry<Executable> = Registry::new(0x4A);
/// Every node that has a handle.
pub static NODES: Registry<NodeOf> = Registry::new(0x51);

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
pub(super) struct Node {
    pub(super) action: Action,
    /// The nodes that it comes after.
    pub(super) after: Vec<usize>,
    /// Of the stream it was captured on.
    pub(super) context: Arc<Context>,
    /// Added to the graph by hand: a capture need not join it.
    pub(super) by_hand: bool,
}

/// Which node a handle names.
pub struct NodeOf {
    graph: Weak<Graph>,
    place: usize,
}

impl NodeOf {
    /// Its place among the nodes of `graph`.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if it is one of another graph.
    pub fn place_in(&self, graph: &Arc<Graph>) -> Result<usize, CUresult> {
        if std::ptr::eq(self.graph.as_ptr(), Arc::as_ptr(graph)) {
            Ok(self.place)
        } else {
            Err(CUresult::ERROR_INVALID_VALUE)
        }
    }
}

/// See the module.
#[derive(Default)]
pub struct Graph {
    body: Mutex<Body>,
    /// A capture goes on, whose end gives the graph to the caller.
    pub(super) captured: AtomicBool,
}

/// What a graph is made of.
#[derive(Default)]
pub(super) struct Body {
    pub(super) nodes: Vec<Node>,
    /// The addresses of the nodes' handles, 0 of those without one.
    handles: Vec<usize>,
    objects: Vec<Share>,
}

impl Body {
    /// Whether `node` is one of `tips` or comes before one of them.
    pub(super) fn reaches(&self, tips: &[usize], node: usize) -> bool {
        let mut seen = vec![false; self.nodes.len()];
        let mut open = tips.to_vec();
        while let Some(at) = open.pop() {
            if at == node {
                return true;
            }
            if !std::mem::replace(&mut seen[at], true) {
                open.extend_from_slice(&self.nodes[at].after);
            }
        }
        false
    }

    /// Takes part in what another graph's nodes need.
    pub(super) fn share(&mut self, objects: &[Share]) -> Result<(), CUresult> {
        for share in objects {
            self.objects.push(share.again()?);
        }
        Ok(())
    }

    /// The nodes in an order in which each comes after those it depends on, otherwise as they were added.
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
            // All of them have their places already.
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
    pub(super) fn body(&self) -> MutexGuard<'_, Body> {
        self.body.lock()
    }

    /// Gives the graph a handle.
    pub(super) fn publish(self: &Arc<Self>) -> Result<*mut c_void, CUresult> {
        GRAPHS
            .insert(Arc::clone(self))
            .ok_or(CUresult::ERROR_OUT_OF_MEMORY)
    }

    /// Ends a graph's handle. Executables that were made from it are not disturbed.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if it has none, or while it is captured.
    pub fn destroy(handle: *mut c_void) -> Result<(), CUresult> {
        let graph = GRAPHS.get(handle).ok_or(CUresult::ERROR_INVALID_VALUE)?;
        if graph.captured.load(Ordering::Acquire) {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        GRAPHS.remove(handle);
        Ok(())
    }

    /// How many nodes it has.
    pub(crate) fn len(&self) -> usize {
        self.body().nodes.len()
    }

    /// Adds a node by hand.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` without a handle for it, and it is not added.
    pub fn add(
        self: &Arc<Self>,
        action: Action,
        after: &[usize],
        context: &Arc<Context>,
    ) -> Result<*mut c_void, CUresult> {
        let mut body = self.body();
        let place = body.nodes.len();
        let handle = self.handle_of(&mut body, place)?;
        let mut own = Vec::with_capacity(after.len());
        add_places(&mut own, after);
        body.nodes.push(Node {
            action,
            after: own,
            context: Arc::clone(context),
            by_hand: true,
        });
        Ok(handle)
    }

    /// Makes nodes depend on others: each `(from, to)` has `to` come after `from`. All or none.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if one does already, or the two came one after the other in a circle.
    pub fn depend(&self, edges: &[(usize, usize)]) -> Result<(), CUresult> {
        let mut body = self.body();
        for (added, &(from, to)) in edges.iter().enumerate() {
            if body.nodes[to].after.contains(&from) || body.reaches(&[from], to) {
                for &(_, to) in edges[..added].iter().rev() {
                    body.nodes[to].after.pop();
                }
                return Err(CUresult::ERROR_INVALID_VALUE);
            }
            body.nodes[to].after.push(from);
        }
        Ok(())
    }

    /// The handles of nodes.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn handles(self: &Arc<Self>, places: &[usize]) -> Result<Vec<*mut c_void>, CUresult> {
        let mut body = self.body();
        places
            .iter()
            .map(|&place| self.handle_of(&mut body, place))
            .collect()
    }

    fn handle_of(self: &Arc<Self>, body: &mut Body, place: usize) -> Result<*mut c_void, CUresult> {
        if body.handles.len() <= place {
            body.handles.resize(place + 1, 0);
        }
        if body.handles[place] == 0 {
            let node = NodeOf {
                graph: Arc::downgrade(self),
                place,
            };
            let handle = NODES
                .insert(Arc::new(node))
                .ok_or(CUresult::ERROR_OUT_OF_MEMORY)?;
            body.handles[place] = handle.addr();
        }
        Ok(std::ptr::without_provenance_mut(body.handles[place]))
    }

    /// Takes references of a user object: the caller's own if they are `moved`, else new ones.
    ///
    /// # Errors
    /// As [`UserObject::retain`].
    pub fn retain(&self, object: Arc<UserObject>, count: u32, moved: bool) -> Result<(), CUresult> {
        if count == 0 {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        if !moved {
            object.retain(count)?;
        }
        self.body().objects.push(Share::of(object, count));
        Ok(())
    }

    /// Releases references that the graph has of a user object.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if it has not as many in one retention.
    pub fn release(&self, object: &Arc<UserObject>, count: u32) -> Result<(), CUresult> {
        let mut body = self.body();
        let at = body.objects.iter().position(|share| share.is_of(object));
        let at = at.ok_or(CUresult::ERROR_INVALID_VALUE)?;
        if body.objects[at].release(count)? {
            body.objects.swap_remove(at);
        }
        Ok(())
    }

    /// Something that can be launched, and its handle.
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

impl Drop for Graph {
    fn drop(&mut self) {
        let handles = std::mem::take(&mut self.body().handles);
        for handle in handles.into_iter().filter(|&handle| handle != 0) {
            NODES.remove(std::ptr::without_provenance_mut(handle));
        }
    }
}

/// Adds those that are not there.
pub(super) fn add_places(places: &mut Vec<usize>, more: &[usize]) {
    for place in more {
        if !places.contains(place) {
            places.push(*place);
        }
    }
}

/// The last job of a replay that needs user objects: they are there until it is done.
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
    objects: Arc<[Share]>,
    lane_of: Vec<usize>,
    launched: Mutex<Launched>,
}

struct Launched {
    /// The streams of the lanes from 1 on.
    lanes: Vec<Arc<Stream>>,
    /// The end of the launch before: launches of one executable come one after the other.
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
