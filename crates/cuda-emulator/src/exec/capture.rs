//! Captures: work given to a stream is recorded instead of run, and becomes a graph.
//!
//! A [`Capture`] belongs to the streams that take part in it. For each of them it keeps its *tips*:
//! the nodes that the stream's next node depends on. A node replaces the tips of its stream; an
//! event that is recorded keeps them; a wait for that event adds them to the tips of the stream
//! that waits, which becomes part of the capture if it was not. The graph exists from the beginning: a program can
//! ask for it and for a stream's tips, add nodes to it by hand and set the tips ([`Capture::set_tips`]). Nodes added
//! by hand need not be joined.
//!
//! ```text
//! Active ──something forbidden──▶ Invalid      both ──end, or the origin is destroyed──▶ Over
//! ```
//!
//! Locks are taken in the order: the list of captures, a capture, its graph, a stream's slot. Two captures are
//! never locked at once.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::ThreadId;

use super::context::Context;
use super::graph::{Action, Body, GRAPHS, Graph, Node, add_places};
use super::object::Share;
use super::{Kind, Stream};
use crate::result::CUresult;
use crate::sync::Mutex;

/// All captures in progress.
static CAPTURES: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());
/// The number of captures in progress.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// The state of a capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// The capture takes work.
    Active,
    /// The capture is void; its end returns an error.
    Invalid,
    /// The capture has ended.
    Over,
}

/// See the module.
pub struct Capture {
    /// Tells captures apart.
    pub id: u64,
    /// The `CUstreamCaptureMode` of its begin.
    pub mode: u32,
    /// The thread that began the capture.
    pub thread: ThreadId,
    state: Mutex<State>,
}

/// A capture's information about one of its streams. The addresses are valid until the next query of the stream or
/// the end of the capture.
pub struct Info {
    /// The graph's handle, which is the caller's only after the end.
    pub graph: *mut c_void,
    /// Handles of the nodes that the stream's next node depends on.
    pub tips: *const *mut c_void,
    /// The data of those edges: all zero, the ordinary kind.
    pub edges: *const u64,
    /// How many there are.
    pub count: usize,
}

struct State {
    standing: Standing,
    /// Replaced by an empty graph once the capture is over, so that a kept capture keeps no nodes.
    graph: Arc<Graph>,
    /// The graph's handle, once it was asked for.
    handle: Option<Handle>,
    /// The tips of streams that were destroyed.
    lost: Vec<usize>,
    /// The streams that take part. The first is the one that the capture began on.
    members: Vec<Member>,
}

struct Member {
    stream: Arc<Stream>,
    tips: Vec<usize>,
    /// The answer to the last query of the tips: handles and edge data.
    shown: (Vec<Handle>, Vec<u64>),
}

impl Member {
    fn new(stream: &Arc<Stream>, tips: Vec<usize>) -> Self {
        Self {
            stream: Arc::clone(stream),
            tips,
            shown: Default::default(),
        }
    }
}

/// A handle, which is a number.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Handle(*mut c_void);

// SAFETY: it is looked up, never dereferenced.
unsafe impl Send for Handle {}

impl State {
    /// Returns the index of a stream in `members`, if work on it can be captured.
    fn member(&self, stream: &Arc<Stream>) -> Result<usize, CUresult> {
        if self.standing == Standing::Invalid {
            return Err(CUresult::ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        self.members
            .iter()
            .position(|member| Arc::ptr_eq(&member.stream, stream))
            .filter(|_| self.standing == Standing::Active)
            .ok_or(CUresult::ERROR_ILLEGAL_STATE)
    }

    fn invalidate(&mut self) {
        if self.standing == Standing::Active {
            self.standing = Standing::Invalid;
        }
    }

    /// Ends the capture: releases the streams, and returns the graph and its handle.
    fn release(&mut self) -> (Arc<Graph>, Option<Handle>) {
        self.standing = Standing::Over;
        for member in self.members.drain(..) {
            member.stream.set_capture(None);
        }
        self.graph.captured.store(false, Ordering::Release);
        (std::mem::take(&mut self.graph), self.handle.take())
    }

    /// Whether the stream that began the capture depends on all captured nodes.
    fn joined(&self) -> bool {
        let body = self.graph.body();
        self.members.split_first().is_some_and(|(origin, others)| {
            let mut tips = others
                .iter()
                .flat_map(|member| &member.tips)
                .chain(&self.lost);
            tips.all(|&tip| body.nodes[tip].by_hand || body.reaches(&origin.tips, tip))
        })
    }
}

impl Capture {
    /// Begins a capture on a stream.
    ///
    /// # Errors
    /// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` on the legacy stream, `CUDA_ERROR_ILLEGAL_STATE` if
    /// the stream takes part in a capture.
    pub fn begin(stream: &Arc<Stream>, mode: u32) -> Result<(), CUresult> {
        static ID: AtomicU64 = AtomicU64::new(1);
        if stream.kind() == Kind::Legacy {
            return Err(CUresult::ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        let mut captures = CAPTURES.lock();
        if stream.capturing() {
            return Err(CUresult::ERROR_ILLEGAL_STATE);
        }
        let graph = Arc::new(Graph::default());
        graph.captured.store(true, Ordering::Release);
        let capture = Arc::new(Self {
            id: ID.fetch_add(1, Ordering::Relaxed),
            mode,
            thread: std::thread::current().id(),
            state: Mutex::new(State {
                standing: Standing::Active,
                graph,
                handle: None,
                lost: Vec::new(),
                members: vec![Member::new(stream, Vec::new())],
            }),
        });
        stream.set_capture(Some(Arc::clone(&capture)));
        captures.push(capture);
        COUNT.store(captures.len(), Ordering::Release);
        Ok(())
    }

    /// Ends the capture that `stream` began, and returns the handle of its graph.
    ///
    /// # Errors
    /// `CUDA_ERROR_STREAM_CAPTURE_UNMATCHED` if another stream began it, which voids it;
    /// `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`, `CUDA_ERROR_STREAM_CAPTURE_UNJOINED` or the context's sticky error, and
    /// it is over.
    pub fn end(self: &Arc<Self>, stream: &Arc<Stream>) -> Result<*mut c_void, CUresult> {
        {
            let mut state = self.state.lock();
            let origin = state.members.first().map(|member| &member.stream);
            if !origin.is_some_and(|origin| Arc::ptr_eq(origin, stream)) {
                state.invalidate();
                return Err(CUresult::ERROR_STREAM_CAPTURE_UNMATCHED);
            }
        }
        self.unlist();
        let mut state = self.state.lock();
        let standing = state.standing;
        let joined = state.joined();
        let (graph, handle) = state.release();
        drop(state);
        let outcome = match standing {
            Standing::Active if joined => stream.context().check(),
            Standing::Active => Err(CUresult::ERROR_STREAM_CAPTURE_UNJOINED),
            _ => Err(CUresult::ERROR_STREAM_CAPTURE_INVALIDATED),
        };
        match (outcome, handle) {
            (Ok(()), Some(Handle(handle))) => Ok(handle),
            (Ok(()), None) => graph.publish(),
            (Err(error), handle) => {
                withdraw(handle);
                Err(error)
            }
        }
    }

    fn unlist(self: &Arc<Self>) {
        let mut captures = CAPTURES.lock();
        captures.retain(|other| !Arc::ptr_eq(other, self));
        COUNT.store(captures.len(), Ordering::Release);
    }

    /// Returns the state of the capture.
    pub fn standing(&self) -> Standing {
        self.state.lock().standing
    }

    /// Voids the capture, after a forbidden call.
    pub fn invalidate(&self) {
        self.state.lock().invalidate();
    }

    /// Adds a node that depends on the streams' tips and becomes their new tip.
    ///
    /// # Errors
    /// `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`; `CUDA_ERROR_ILLEGAL_STATE` if the capture is over.
    pub fn add(&self, streams: &[&Arc<Stream>], action: Action) -> Result<(), CUresult> {
        let mut state = self.state.lock();
        let members = streams
            .iter()
            .map(|stream| state.member(stream))
            .collect::<Result<Vec<_>, _>>()?;
        let mut after = Vec::new();
        for &member in &members {
            add_places(&mut after, &state.members[member].tips);
        }
        let node = {
            let nodes = &mut state.graph.body().nodes;
            nodes.push(Node {
                action,
                after,
                context: Arc::clone(streams[0].context()),
                by_hand: false,
            });
            nodes.len() - 1
        };
        for member in members {
            state.members[member].tips = vec![node];
        }
        Ok(())
    }

    /// Adds the nodes of a graph that is launched on a stream of the capture.
    pub(super) fn add_graph(
        &self,
        stream: &Arc<Stream>,
        nodes: &[Node],
        objects: &[Share],
    ) -> Result<(), CUresult> {
        let mut state = self.state.lock();
        let member = state.member(stream)?;
        let graph = Arc::clone(&state.graph);
        let mut body = graph.body();
        body.share(objects)?;
        let Body { nodes: all, .. } = &mut *body;
        let (base, before) = (all.len(), state.members[member].tips.clone());
        let mut is_tip = vec![true; nodes.len()];
        for node in nodes {
            let mut after: Vec<usize> = node.after.iter().map(|&at| base + at).collect();
            node.after.iter().for_each(|&at| is_tip[at] = false);
            if after.is_empty() {
                after.clone_from(&before);
            }
            all.push(Node {
                after,
                by_hand: false,
                ..node.clone()
            });
        }
        if !nodes.is_empty() {
            let tips = (0..nodes.len()).filter(|&at| is_tip[at]);
            state.members[member].tips = tips.map(|at| base + at).collect();
        }
        Ok(())
    }

    /// Returns the stream's tips, which an event recorded on the stream stands for.
    pub fn tips(&self, stream: &Arc<Stream>) -> Result<Vec<usize>, CUresult> {
        let state = self.state.lock();
        let member = state.member(stream)?;
        Ok(state.members[member].tips.clone())
    }

    /// Returns the graph, and the nodes that the stream's next node depends on.
    ///
    /// # Errors
    /// As [`Capture::add`]; `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn info(&self, stream: &Arc<Stream>) -> Result<Info, CUresult> {
        let mut state = self.state.lock();
        let member = state.member(stream)?;
        let Handle(graph) = match state.handle {
            Some(handle) => handle,
            None => {
                let handle = Handle(state.graph.publish()?);
                *state.handle.insert(handle)
            }
        };
        let all = Arc::clone(&state.graph);
        let member = &mut state.members[member];
        let tips = all.handles(&member.tips)?;
        let (handles, edges) = &mut member.shown;
        *handles = tips.into_iter().map(Handle).collect();
        edges.resize(handles.len(), 0);
        Ok(Info {
            graph,
            tips: handles.as_ptr().cast(),
            edges: edges.as_ptr(),
            count: handles.len(),
        })
    }

    /// Returns the graph of the capture.
    pub fn graph(&self) -> Arc<Graph> {
        Arc::clone(&self.state.lock().graph)
    }

    /// Sets the stream's tips: to `tips` with `replace`, else to the present tips and `tips`.
    ///
    /// # Errors
    /// As [`Capture::add`].
    pub fn set_tips(
        &self,
        stream: &Arc<Stream>,
        tips: &[usize],
        replace: bool,
    ) -> Result<(), CUresult> {
        let mut state = self.state.lock();
        let member = state.member(stream)?;
        let own = &mut state.members[member].tips;
        if replace {
            own.clear();
        }
        add_places(own, tips);
        Ok(())
    }

    /// Makes a stream wait for an event that was recorded in this capture.
    ///
    /// # Errors
    /// `CUDA_ERROR_STREAM_CAPTURE_MERGE` if the stream is in another capture; if this one is over,
    /// `CUDA_ERROR_STREAM_CAPTURE_ISOLATION` in a capture and `CUDA_ERROR_CAPTURED_EVENT` outside;
    /// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT` on the legacy stream.
    pub fn wait(self: &Arc<Self>, stream: &Arc<Stream>, tips: &[usize]) -> Result<(), CUresult> {
        let target = stream.capture();
        if let Some(target) = &target
            && !Arc::ptr_eq(target, self)
        {
            if target.standing() == Standing::Invalid {
                return Err(CUresult::ERROR_STREAM_CAPTURE_INVALIDATED);
            }
            target.invalidate();
            if self.standing() == Standing::Over {
                return Err(CUresult::ERROR_STREAM_CAPTURE_ISOLATION);
            }
            self.invalidate();
            return Err(CUresult::ERROR_STREAM_CAPTURE_MERGE);
        }
        let mut state = self.state.lock();
        match state.standing {
            Standing::Active => {}
            Standing::Invalid => return Err(CUresult::ERROR_STREAM_CAPTURE_INVALIDATED),
            Standing::Over => return Err(CUresult::ERROR_CAPTURED_EVENT),
        }
        if stream.kind() == Kind::Legacy {
            state.invalidate();
            return Err(CUresult::ERROR_STREAM_CAPTURE_IMPLICIT);
        }
        match state.member(stream) {
            Ok(member) => add_places(&mut state.members[member].tips, tips),
            Err(_) => {
                stream.set_capture(Some(Arc::clone(self)));
                state.members.push(Member::new(stream, tips.to_vec()));
            }
        }
        Ok(())
    }

    /// Removes a destroyed stream; its tips still have to be joined. Ends the capture if the stream is the one that
    /// began it, as no other stream can.
    pub fn lose(self: &Arc<Self>, stream: &Arc<Stream>) {
        let origin = {
            let mut state = self.state.lock();
            let at = state
                .members
                .iter()
                .position(|member| Arc::ptr_eq(&member.stream, stream));
            match at {
                Some(0) => true,
                Some(at) => {
                    let member = state.members.remove(at);
                    member.stream.set_capture(None);
                    add_places(&mut state.lost, &member.tips);
                    false
                }
                None => false,
            }
        };
        if origin {
            self.unlist();
            let (graph, handle) = self.state.lock().release();
            withdraw(handle);
            drop(graph);
        }
    }

    /// Whether a stream of the context takes part. With `blocking_only`, non-blocking streams do not
    /// count.
    fn touches(state: &State, context: &Arc<Context>, blocking_only: bool) -> bool {
        state.members.iter().any(|member| {
            Arc::ptr_eq(member.stream.context(), context)
                && !(blocking_only && member.stream.kind() == Kind::NonBlocking)
        })
    }
}

/// Ends the handle of the graph, if it has one: the capture yields no graph.
fn withdraw(handle: Option<Handle>) {
    if let Some(Handle(handle)) = handle {
        GRAPHS.remove(handle);
    }
}

/// Voids every capture for which `forbids` returns true. Returns whether there was one.
pub fn invalidate_if(forbids: impl Fn(&Capture) -> bool) -> bool {
    if COUNT.load(Ordering::Acquire) == 0 {
        return false;
    }
    let mut any = false;
    for capture in CAPTURES.lock().iter().filter(|capture| forbids(capture)) {
        capture.invalidate();
        any = true;
    }
    any
}

/// Voids every capture that a stream of the context takes part in, for a call that concerns all
/// streams of the context. Returns whether there was one.
pub fn invalidate_in(context: &Arc<Context>) -> bool {
    invalidate_if(|capture| Capture::touches(&capture.state.lock(), context, false))
}

/// Checks that a program may query the capture of `stream`. Fails for the legacy stream while it is ordered
/// with a stream that takes part in a capture. The query voids nothing.
///
/// # Errors
/// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`.
pub fn may_ask(stream: &Stream) -> Result<(), CUresult> {
    if stream.kind() == Kind::Legacy
        && COUNT.load(Ordering::Acquire) > 0
        && CAPTURES
            .lock()
            .iter()
            .any(|capture| Capture::touches(&capture.state.lock(), stream.context(), true))
    {
        return Err(CUresult::ERROR_STREAM_CAPTURE_IMPLICIT);
    }
    Ok(())
}

/// Checks that the legacy stream of a context may be used: it would depend on each blocking stream.
///
/// # Errors
/// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT` if one of them is being captured, and the capture is void.
pub(super) fn check_legacy(context: &Arc<Context>) -> Result<(), CUresult> {
    if invalidate_if(|capture| Capture::touches(&capture.state.lock(), context, true)) {
        Err(CUresult::ERROR_STREAM_CAPTURE_IMPLICIT)
    } else {
        Ok(())
    }
}
