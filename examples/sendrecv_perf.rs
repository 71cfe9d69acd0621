//! Measures the speed of messages between neighbours: nccl-tests' `sendrecv_perf`, on the safe crate. All ranks form a
//! ring; each sends to the next one and receives from the previous one.
//!
//! ```text
//! cargo run --release --example sendrecv_perf
//! cargo run --release --example sendrecv_perf -- -b 8 -e 128M -f 2 --plot sendrecv.svg
//! ```
//!
//! Options and output are those of `all_to_all_perf`.

use std::process::ExitCode;

use nccl::{Config, Group, Library, Version};
use nccl_tools::failure::Failure;
use nccl_tools::options::Options;
use nccl_tools::perf::{self, Call, Operands, Operation};
use nccl_tools::program::{self, Program};
use nccl_tools::shape::{Case, Shape};
use nccl_tools::verify::{Block, Contents};

fn main() -> ExitCode {
    perf::main::<Ring>()
}

struct Ring;

impl Operation for Ring {
    const PROGRAM: &'static Program = &program::SEND_RECV;

    fn new(_: &Options) -> Result<Self, Failure> {
        Ok(Self)
    }

    /// As in nccl-tests: no rank has more than two neighbours.
    fn configure(&self, mut config: Config, library: &Library) -> Config {
        if library.version() >= Version::new(2, 30, 3) {
            config.max_p2p_peers = Some(2);
        }
        config
    }

    fn shape(&self, bytes: u64, case: Case, ranks: usize) -> Shape {
        Shape::whole(bytes, case, ranks, 1.0)
    }

    fn contents(&self, shape: Shape, rank: usize) -> Contents {
        let before = (rank + shape.ranks - 1) % shape.ranks;
        Contents::Copied(vec![Block {
            from: Some((before, 0)),
            bytes: shape.bytes,
        }])
    }

    fn record<'a>(
        &self,
        group: &mut Group<'a>,
        call: Call,
        operands: Operands<'a>,
    ) -> nccl::Result<()> {
        let ranks = call.shape.ranks;
        let (x, y) = operands.elements(call.data_type())?;
        group.isend(x, (call.rank + 1) % ranks)?;
        group.irecv(y, (call.rank + ranks - 1) % ranks)
    }
}
