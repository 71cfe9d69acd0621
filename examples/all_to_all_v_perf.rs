//! Measures the speed of an all-to-all with a separate length for each pair of ranks, and verifies every element: nccl-tests'
//! `alltoallv_perf`, on the safe crate.
//!
//! ```text
//! cargo run --release --example all_to_all_v_perf
//! NCCL_TESTS_ALLTOALLV_SPREAD=0.5 cargo run --release --example all_to_all_v_perf -- -a 3
//! NCCL_TESTS_ALLTOALLV_MATRIX_FILE=traffic.txt cargo run --release --example all_to_all_v_perf -- -b 32M -e 32M
//! ```
//!
//! Options and output are those of `all_to_all_perf`; bandwidths are those of the rank with the most to send or to
//! receive. Use it with `-a 3`, the time of the slowest rank.

use std::process::ExitCode;

use nccl::{Communicator, Group, Request};
use nccl_tools::failure::Failure;
use nccl_tools::options::Options;
use nccl_tools::perf::{self, Call, Operands, Operation};
use nccl_tools::program::{self, Program};
use nccl_tools::shape::{Case, Shape};
use nccl_tools::traffic::Traffic;
use nccl_tools::verify::Contents;

fn main() -> ExitCode {
    perf::main::<AllToAllV>()
}

struct AllToAllV {
    traffic: Traffic,
    /// The number of elements that this rank sends to each rank, and receives from each.
    counts: [Vec<usize>; 2],
}

impl Operation for AllToAllV {
    const PROGRAM: &'static Program = &program::ALL_TO_ALL_V;

    fn new(_: &Options) -> Result<Self, Failure> {
        Ok(Self {
            traffic: Traffic::from_environment()?,
            counts: [Vec::new(), Vec::new()],
        })
    }

    fn check(&self, options: &Options, ranks: usize) -> Result<(), Failure> {
        self.traffic.check(options.sweep, ranks)
    }

    fn agreement(&self) -> Vec<u8> {
        self.traffic.fingerprint()
    }

    fn shape(&self, bytes: u64, case: Case, ranks: usize) -> Shape {
        self.traffic.shape(bytes, case, ranks)
    }

    fn contents(&self, shape: Shape, rank: usize) -> Contents {
        Contents::Copied(self.traffic.blocks(shape, rank))
    }

    fn prepare(&mut self, _: &Communicator, call: Call) -> Result<(), Failure> {
        let (shape, own) = (call.shape, call.rank);
        let bytes = |from, to| self.traffic.bytes(shape, from, to) as usize;
        let size = shape.element().size;
        let sent = (0..shape.ranks).map(|peer| bytes(own, peer) / size);
        let received = (0..shape.ranks).map(|peer| bytes(peer, own) / size);
        self.counts = [sent.collect(), received.collect()];
        Ok(())
    }

    fn issue<'a>(
        &mut self,
        communicator: &'a Communicator,
        call: Call,
        operands: Operands<'a>,
    ) -> nccl::Result<Request> {
        let (x, y) = operands.elements(call.data_type())?;
        let [sent, received] = &self.counts;
        communicator.all_to_all_v(x, sent, y, received)
    }

    fn record<'a>(
        &self,
        group: &mut Group<'a>,
        call: Call,
        operands: Operands<'a>,
    ) -> nccl::Result<()> {
        let (x, y) = operands.elements(call.data_type())?;
        let [sent, received] = &self.counts;
        group.all_to_all_v(x, sent, y, received)
    }

    fn notes(&self, shape: Shape, seconds: f64) -> Vec<String> {
        self.traffic.summary(shape, seconds)
    }
}
