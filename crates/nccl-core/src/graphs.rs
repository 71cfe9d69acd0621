//! The graphs of a communicator.
//!
//! NCCL does not end a communicator, in order or by an abort, before every graph that captured one of
//! its operations is destroyed. So the communicator keeps a list of them, and whoever ends it destroys
//! them: the plans stay where they are, and can be launched no more.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::{CudaContext, CudaGraph, CudaStream, result};

use crate::driver;
use crate::error::{Error, Result};
use crate::sync::Mutex;

/// One plan's graph, until it is destroyed.
pub(crate) struct Slot {
    /// Which plan of its communicator, from 1.
    pub(super) number: u64,
    /// Locked during a launch, so that a graph that is being launched is not destroyed.
    pub(super) graph: Mutex<Option<Graph>>,
}

/// A graph. CUDA wants the calls on it one after another, from any thread: the lock of its slot sees to
/// that.
pub(super) struct Graph {
    graph: CudaGraph,
    context: Arc<CudaContext>,
}

// SAFETY: see the type; nothing of it is tied to a thread.
unsafe impl Send for Graph {}

impl Graph {
    /// Puts a replay on `stream`, which is of the graph's context.
    pub(super) fn launch(&self, stream: &CudaStream) -> Result<()> {
        driver::bind(&self.context).map_err(Error::cuda(
            "binding the context to this thread (cuCtxSetCurrent)",
        ))?;
        // SAFETY: graph and stream live; what the graph uses is kept by its plan.
        unsafe { result::graph::launch(self.graph.cu_graph_exec(), stream.cu_stream()) }
            .map_err(Error::cuda("launching a graph (cuGraphLaunch)"))
    }
}

/// See the module.
#[derive(Default)]
pub(crate) struct Plans {
    slots: Mutex<Vec<Arc<Slot>>>,
    begun: AtomicU64,
    /// Which plan the last replays were of.
    replays: Mutex<Replays>,
}

/// By their numbers, in turn; 0 for none.
struct Replays([(u64, u64); 256]);

impl Default for Replays {
    fn default() -> Self {
        Self([(0, 0); 256])
    }
}

impl Plans {
    /// The number of the next plan, whether or not it comes to be: the same on all ranks.
    pub(crate) fn next(&self) -> u64 {
        self.begun.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Operation `sequence` is a replay of plan `number`.
    pub(crate) fn replays(&self, sequence: u64, number: u64) {
        let mut replays = self.replays.lock();
        let at = sequence as usize % replays.0.len();
        replays.0[at] = (sequence, number);
    }

    /// Of which plan operation `sequence` is a replay, if it is one of the last.
    pub(crate) fn replayed_by(&self, sequence: u64) -> Option<u64> {
        let replays = self.replays.lock();
        let (known, number) = replays.0[sequence as usize % replays.0.len()];
        (known == sequence && number > 0).then_some(number)
    }

    /// Takes a new graph in.
    pub(super) fn add(
        &self,
        number: u64,
        graph: CudaGraph,
        context: &Arc<CudaContext>,
    ) -> Arc<Slot> {
        let slot = Arc::new(Slot {
            number,
            graph: Mutex::new(Some(Graph {
                graph,
                context: Arc::clone(context),
            })),
        });
        self.slots.lock().push(Arc::clone(&slot));
        slot
    }

    /// Destroys one graph. A replay of it that is on its way goes on to its end. Waits for a launch.
    pub(crate) fn destroy(&self, slot: &Arc<Slot>) {
        let graph = slot.graph.lock().take();
        if let Some(graph) = graph {
            let _ = driver::bind(&graph.context);
            drop(graph);
        }
        self.slots.lock().retain(|other| !Arc::ptr_eq(other, slot));
    }

    /// Destroys all graphs.
    pub(crate) fn destroy_all(&self) {
        let slots = self.slots.lock().clone();
        for slot in &slots {
            self.destroy(slot);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.slots.lock().is_empty()
    }

    /// The numbers of the plans whose graphs are still there.
    pub(crate) fn alive(&self) -> Vec<u64> {
        self.slots.lock().iter().map(|slot| slot.number).collect()
    }
}
