//! Measures the speed of all-to-all, and verifies every element: nccl-tests' `alltoall_perf`, on the safe crate.
//!
//! ```text
//! cargo run --release --example all_to_all_perf
//! cargo run --release --example all_to_all_perf -- -b 8 -e 128M -f 2 -d half -n 50
//! cargo run --release --example all_to_all_perf -- --algo all --plot all_to_all.svg
//! torchrun --no-python --nproc-per-node 8 target/release/examples/all_to_all_perf
//! ```
//!
//! Without arguments it starts one process per GPU, each a rank; without a GPU, four ranks on the emulator. Options, header,
//! rows, footer and JSON are those of nccl-tests; `--help` lists the options. All of that is implemented in `nccl_tools`; this
//! file contains the measured operation.

use std::process::ExitCode;

use nccl::all_to_all::AllToAllAlgorithm;
use nccl::{Communicator, Erased, ErasedMut, Group, Request};
use nccl_tools::algorithm::Algorithm;
use nccl_tools::failure::Failure;
use nccl_tools::options::Options;
use nccl_tools::perf::{self, Call, Operands, Operation};
use nccl_tools::program::{self, Program};
use nccl_tools::shape::{Case, Shape};
use nccl_tools::verify::{Block, Contents};

fn main() -> ExitCode {
    perf::main::<AllToAll>()
}

struct AllToAll {
    ranks_per_node: Option<usize>,
    /// Present only for algorithms that need a plan.
    plan: Option<nccl::all_to_all::AllToAll>,
}

fn way(call: Call) -> AllToAllAlgorithm {
    let algorithm = call.shape.case.algorithm;
    algorithm.map_or(AllToAllAlgorithm::Auto, |algorithm| algorithm.way)
}

impl Operation for AllToAll {
    const PROGRAM: &'static Program = &program::ALL_TO_ALL;

    fn new(options: &Options) -> Result<Self, Failure> {
        Ok(Self {
            ranks_per_node: options.ranks_per_node,
            plan: None,
        })
    }

    fn shape(&self, bytes: u64, case: Case, ranks: usize) -> Shape {
        Shape::split(bytes, case, ranks)
    }

    fn contents(&self, shape: Shape, rank: usize) -> Contents {
        let bytes = shape.part_bytes();
        let block = |peer| Block {
            from: Some((peer, rank as u64 * bytes)),
            bytes,
        };
        Contents::Copied((0..shape.ranks).map(block).collect())
    }

    fn prepare(&mut self, communicator: &Communicator, call: Call) -> Result<(), Failure> {
        let planned = |algorithm: &&Algorithm| algorithm.planned && call.shape.count > 0;
        self.plan = match call.shape.case.algorithm.filter(planned) {
            None => None,
            Some(algorithm) => {
                let plan = nccl::all_to_all::AllToAll::plan(communicator);
                let mut plan = plan.per_peer(call.data_type(), call.shape.count as usize);
                if let Some(ranks) = self.ranks_per_node {
                    plan = plan.with(|plan| plan.ranks_per_node = Some(ranks));
                }
                Some(plan.with(|plan| plan.algorithm = algorithm.way).build()?)
            }
        };
        Ok(())
    }

    fn issue<'a>(
        &mut self,
        communicator: &'a Communicator,
        call: Call,
        operands: Operands<'a>,
    ) -> nccl::Result<Request> {
        let (x, y) = operands.elements(call.data_type())?;
        match &mut self.plan {
            Some(plan) => plan.enqueue(x, y),
            // An empty exchange needs no plan.
            None if call.shape.count == 0 => communicator.all_to_all(x, y),
            None => communicator.all_to_all_with(x, y, way(call)),
        }
    }

    fn record<'a>(
        &self,
        group: &mut Group<'a>,
        call: Call,
        operands: Operands<'a>,
    ) -> nccl::Result<()> {
        let data_type = call.data_type();
        if way(call) != AllToAllAlgorithm::Grouped {
            let (x, y) = operands.elements(data_type)?;
            return group.all_to_all(x, y);
        }
        let (send, recv) = operands.bytes();
        let part = call.shape.part_bytes() as usize;
        for (peer, to) in recv.chunks_exact_mut(part).enumerate() {
            let from = send.slice(peer * part..(peer + 1) * part);
            group.isend(Erased::from_bytes(from, data_type)?, peer)?;
            group.irecv(ErasedMut::from_bytes(to, data_type)?, peer)?;
        }
        Ok(())
    }
}
