//! Runs a launch, block by block.

use std::sync::Arc;

use super::super::block::{Context, Stop};
use super::super::memory;
use super::arguments::Launch;
use super::block::Block;
use super::names::Algorithm;
use super::{direct, low_latency};

impl Launch {
    /// Runs one block.
    pub(in super::super) async fn run(
        self: Arc<Self>,
        context: Arc<Context>,
        index: usize,
    ) -> Result<(), Stop> {
        let abort = match self.abort_flag {
            0 => None,
            address => Some(memory::view(context.memory.as_ref(), address, 4)?),
        };
        let block = Block {
            context,
            launch: self,
            index,
            abort,
        };
        if let Some(profile) = block.profile() {
            profile.started(block.memory(), block.index)?;
        }
        match block.launch.kernel.algorithm {
            Algorithm::LowLatency => low_latency::run(&block).await?,
            _ => direct::run(&block).await?,
        }
        if let Some(profile) = block.profile() {
            profile.completed(block.memory(), block.index)?;
        }
        Ok(())
    }
}
