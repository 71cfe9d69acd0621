//! Graphs: captured work.
//!
//! A [`Graph`] holds nodes, recorded by a capture or added by hand, each after some others. An
//! executable ([`super::executable`]) replays the graph as it was when the executable was made.
//!
//! A node never leaves its graph, so its index there identifies it. A node gets a handle ([`NODES`]) at the first
//! query and keeps it until the graph is gone. Each graph holds references to the user objects
//! ([`UserObject`]) that it needs.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use super::context::Context;
use super::event::Event;
use super::host_call::HostCall;
use super::object::{Share, UserObject};
use super::stream::Stream;
use super::work::Work;
use crate::registry::Registry;
use crate::result::CUresult;
use crate::sync::{Mutex, MutexGuard};

/// All graphs that were not destroyed.
pub static GRAPHS: Registry<Graph> = Registry::new(0x49);
/// All nodes with a handle.
pub static NODES: Registry<NodeOf> = Registry::new(0x51);

/// Work that can be replayed.
pub trait Recipe: Send + Sync {
    /// Returns the job of one replay, which is going to run on `stream`.
    fn job(&self, stream: &Arc<Stream>) -> Box<dyn Work>;

    /// Returns the job of work that runs only once.
    fn into_job(self, stream: &Arc<Stream>) -> Box<dyn Work>
    where
        Self: Sized,
    {
        self.job(stream)
    }

    /// Returns the sequence of jobs that this job must not overlap with, in and outside graphs. The
    /// nodes of one sequence in a graph keep the order of their capture.
    fn sequence(&self) -> Option<&Mutex<Last>> {
        None
    }
}

/// The last job of a sequence. The next job waits for it, also on another stream. The lock is held
/// while a job is enqueued.
#[derive(Default)]
pub struct Last(pub Option<(Arc<Stream>, u64)>);

/// The action of a node.
#[derive(Clone)]
pub enum Action {
    /// Enqueues a job of its recipe.
    Work(Arc<dyn Recipe>),
    /// Calls a host function.
    Host(HostCall),
    /// Waits for the job that an event marks at the launch.
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
    /// The context of the stream that captured it.
    pub(super) context: Arc<Context>,
    /// Added to the graph by hand: a capture need not join it.
    pub(super) by_hand: bool,
}

/// The node of a handle.
pub struct NodeOf {
    graph: Weak<Graph>,
    place: usize,
}

impl NodeOf {
    /// Returns the node's index in `graph`.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if the node belongs to another graph.
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
    /// A capture into the graph is in progress. Its end gives the graph to the caller.
    pub(super) captured: AtomicBool,
}

/// The contents of a graph.
#[derive(Default)]
pub(super) struct Body {
    pub(super) nodes: Vec<Node>,
    /// The addresses of the nodes' handles; 0 for a node without a handle.
    handles: Vec<usize>,
    pub(super) objects: Vec<Share>,
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

    /// Adds references to the user objects that another graph's nodes need.
    pub(super) fn share(&mut self, objects: &[Share]) -> Result<(), CUresult> {
        for share in objects {
            self.objects.push(share.again()?);
        }
        Ok(())
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

    /// Ends a graph's handle. Executables that were made from the graph are not affected.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if the handle names no graph, or during the graph's capture.
    pub fn destroy(handle: *mut c_void) -> Result<(), CUresult> {
        let graph = GRAPHS.get(handle).ok_or(CUresult::ERROR_INVALID_VALUE)?;
        if graph.captured.load(Ordering::Acquire) {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        GRAPHS.remove(handle);
        Ok(())
    }

    /// Returns the number of nodes.
    pub(crate) fn len(&self) -> usize {
        self.body().nodes.len()
    }

    /// Adds a node by hand.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the node gets no handle; the node is not added.
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

    /// Adds the edges, all or none: for each `(from, to)`, `to` comes after `from`.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if an edge exists already or would close a cycle.
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

    /// Returns the handles of nodes.
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

    /// Takes references to a user object: the caller's own with `moved`, else new ones.
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

    /// Releases references of the graph to a user object.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if the graph holds none, or fewer than `count` in the retention that is found
    /// first.
    pub fn release(&self, object: &Arc<UserObject>, count: u32) -> Result<(), CUresult> {
        let mut body = self.body();
        let at = body.objects.iter().position(|share| share.is_of(object));
        let at = at.ok_or(CUresult::ERROR_INVALID_VALUE)?;
        if body.objects[at].release(count)? {
            body.objects.swap_remove(at);
        }
        Ok(())
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

/// Adds the places of `more` that `places` lacks.
pub(super) fn add_places(places: &mut Vec<usize>, more: &[usize]) {
    for place in more {
        if !places.contains(place) {
            places.push(*place);
        }
    }
}
