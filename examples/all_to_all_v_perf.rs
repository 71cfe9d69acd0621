//! How fast an all-to-all is in which each pair of ranks has a length of its own, and whether every element
//! arrives: nccl-tests' `alltoallv_perf`, on the safe crate.
//!
//! ```text
//! cargo run --release --example all_to_all_v_perf
//! NCCL_TESTS_ALLTOALLV_SPREAD=0.5 cargo run --release --example all_to_all_v_perf -- -a 3
//! NCCL_TESTS_ALLTOALLV_MATRIX_FILE=traffic.txt cargo run --release --example all_to_all_v_perf -- -b 32M -e 32M
//! ```
//!
//! Options and output are those of `all_to_all_perf`; bandwidths are those of the rank with the most to send or
//! to receive. `-a 3`, the time of the slowest rank, is what goes with that.

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

struct AllToAllV(Traffic);

impl AllToAllV {
    /// How many elements this rank sends to each, and receives from each.
    fn counts(&self, call: Call) -> [Vec<usize>; 2] {
        let (shape, own) = (call.shape, call.rank);
        let elements = |bytes: u64| bytes as usize / shape.element().size;
        let sent = (0..shape.ranks).map(|peer| elements(self.0.bytes(shape, own, peer)));
        let received = (0..shape.ranks).map(|peer| elements(self.0.bytes(shape, peer, own)));
        [sent.collect(), received.collect()]
    }
}

impl Operation for AllToAllV {
    const PROGRAM: &'static Program = &program::ALL_TO_ALL_V;

    fn new(_: &Options) -> Result<Self, Failure> {
        Traffic::from_environment().map(Self)
    }

    fn check(&self, options: &Options, ranks: usize) -> Result<(), Failure> {
        self.0.check(options.sweep, ranks)
    }

    fn agreement(&self) -> Vec<u8> {
        self.0.fingerprint()
    }

    fn shape(&self, bytes: u64, case: Case, ranks: usize) -> Shape {
        self.0.shape(bytes, case, ranks)
    }

    fn contents(&self, shape: Shape, rank: usize) -> Contents {
        Contents::Copied(self.0.blocks(shape, rank))
    }

    fn issue<'a>(
        &self,
        communicator: &'a Communicator,
        call: Call,
        operands: Operands<'a>,
    ) -> nccl::Result<Request> {
        let (x, y) = operands.elements(call.data_type())?;
        let [sent, received] = self.counts(call);
        communicator.all_to_all_v(x, &sent, y, &received)
    }

    fn record<'a>(
        &self,
        group: &mut Group<'a>,
        call: Call,
        operands: Operands<'a>,
    ) -> nccl::Result<()> {
        let (x, y) = operands.elements(call.data_type())?;
        let [sent, received] = self.counts(call);
        group.all_to_all_v(x, &sent, y, &received)
    }

    fn notes(&self, shape: Shape, seconds: f64) -> Vec<String> {
        self.0.summary(shape, seconds)
    }
}
