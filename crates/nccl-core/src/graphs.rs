//! The graphs of a communicator.
//!
//! NCCL ends a communicator, by a finalize or an abort, only after every graph that captured one of its operations is
//! destroyed. So each communicator keeps a list of its graphs, and the thread that ends the communicator destroys them.
//! The plans remain, but cannot be launched any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use cudarc::driver::{CudaContext, CudaGraph, CudaStream, result};

use crate::cuda_driver;
use crate::error::{Error, Result};
use crate::sync::Mutex;

/// One plan's graph, until it is destroyed.
pub(crate) struct GraphSlot {
    /// The number of the plan on its communicator, from 1.
    pub(super) number: u64,
    /// Locked during a launch, so that a graph that is being launched is not destroyed.
    pub(super) graph: Mutex<Option<Graph>>,
}

/// A graph. CUDA allows one call on it at a time, from any thread: the lock of its slot ensures
/// that.
pub(super) struct Graph {
    graph: CudaGraph,
    context: Arc<CudaContext>,
}

// SAFETY: see the type; nothing of it is tied to a thread.
unsafe impl Send for Graph {}

impl Graph {
    /// Puts a replay on `stream`, which belongs to the graph's context.
    pub(super) fn launch(&self, stream: &CudaStream) -> Result<()> {
        cuda_driver::bind(&self.context).map_err(Error::cuda(
            "binding the context to this thread (cuCtxSetCurrent)",
        ))?;
        // SAFETY: graph and stream live; the plan keeps the memory that the graph uses.
        unsafe { result::graph::launch(self.graph.cu_graph_exec(), stream.cu_stream()) }
            .map_err(Error::cuda("launching a graph (cuGraphLaunch)"))
    }
}

/// The graphs of a communicator.
#[derive(Default)]
pub(crate) struct Plans {
    slots: Mutex<Vec<Arc<GraphSlot>>>,
    begun: AtomicU64,
    /// Which of the latest operations are replays, and of which plan.
    replays: Mutex<Replays>,
}

/// A ring of pairs of a sequence number and a plan number. A plan number of 0 marks an empty entry.
struct Replays([(u64, u64); 256]);

impl Default for Replays {
    fn default() -> Self {
        Self([(0, 0); 256])
    }
}

impl Plans {
    /// Returns the number for the next plan, the same on all ranks. The number is used up even if making the plan
    /// fails.
    pub(crate) fn next(&self) -> u64 {
        self.begun.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Records that operation `sequence` is a replay of plan `number`.
    pub(crate) fn replays(&self, sequence: u64, number: u64) {
        let mut replays = self.replays.lock();
        let at = sequence as usize % replays.0.len();
        replays.0[at] = (sequence, number);
    }

    /// Returns the plan that operation `sequence` replayed, if the ring still has an entry for that operation.
    pub(crate) fn replayed_by(&self, sequence: u64) -> Option<u64> {
        let replays = self.replays.lock();
        let (known, number) = replays.0[sequence as usize % replays.0.len()];
        (known == sequence && number > 0).then_some(number)
    }

    /// Adds a new graph.
    pub(super) fn add(
        &self,
        number: u64,
        graph: CudaGraph,
        context: &Arc<CudaContext>,
    ) -> Arc<GraphSlot> {
        let slot = Arc::new(GraphSlot {
            number,
            graph: Mutex::new(Some(Graph {
                graph,
                context: Arc::clone(context),
            })),
        });
        self.slots.lock().push(Arc::clone(&slot));
        slot
    }

    /// Destroys one graph; first waits for a launch that is under way. A replay in flight continues to its end.
    pub(crate) fn destroy(&self, slot: &Arc<GraphSlot>) {
        let graph = slot.graph.lock().take();
        if let Some(graph) = graph {
            let _ = cuda_driver::bind(&graph.context);
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

    /// Waits until the launches that have begun are over; later launches see what was written before this call. Returns
    /// false if a launch is not over at `deadline`.
    pub(crate) fn wait_for_launches(&self, deadline: Instant) -> bool {
        let slots = self.slots.lock().clone();
        let is_over = |slot: &Arc<GraphSlot>| slot.graph.try_lock_until(deadline).is_some();
        slots.iter().all(is_over)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.slots.lock().is_empty()
    }

    /// Returns the numbers of the plans whose graphs still exist.
    pub(crate) fn alive(&self) -> Vec<u64> {
        let mut numbers: Vec<_> = self.slots.lock().iter().map(|slot| slot.number).collect();
        // A plan has a graph for each of its parts.
        numbers.dedup();
        numbers
    }
}
