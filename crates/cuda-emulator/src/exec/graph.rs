//! Graphs: captured work.
//!
//! A [`Graph`] is what a capture writes down, and what is added to it by hand: nodes, each after some others. An
//! executable ([`super::executable`]) replays it as it was when the executable was made.
//!
//! A node never leaves its graph, so its place there is its name; it has a handle ([`NODES`]) from when it is first
//! asked for until the graph is gone. User objects ([`UserObject`]) have a reference of each graph that needs them.

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

/// Every graph that was not destroyed.
pub static GRAPHS: Registry<Graph> = Registry::new(0x49);
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

    /// Takes part in what another graph's nodes need.
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
