//! Measures the speed of all-reduce, and verifies every result: nccl-tests' `all_reduce_perf`, on the safe crate.
//!
//! ```text
//! cargo run --release --example all_reduce_perf
//! cargo run --release --example all_reduce_perf -- -b 8 -e 128M -f 2 -d bfloat16 -o all
//! ```
//!
//! Options and output are those of `all_to_all_perf`.

use std::process::ExitCode;

use nccl::{Communicator, ErasedMut, Group, ReduceOp, Request};
use nccl_tools::failure::Failure;
use nccl_tools::options::Options;
use nccl_tools::perf::{self, Call, Operands, Operation};
use nccl_tools::program::{self, Program};
use nccl_tools::shape::{Case, Shape};
use nccl_tools::verify::Contents;

fn main() -> ExitCode {
    perf::main::<AllReduce>()
}

struct AllReduce;

fn op(shape: Shape) -> ReduceOp {
    shape.case.op.unwrap_or(ReduceOp::Sum)
}

impl Operation for AllReduce {
    const PROGRAM: &'static Program = &program::ALL_REDUCE;

    fn new(_: &Options) -> Result<Self, Failure> {
        Ok(Self)
    }

    fn shape(&self, bytes: u64, case: Case, ranks: usize) -> Shape {
        let n = ranks as f64;
        Shape::whole(bytes, case, ranks, 2.0 * (n - 1.0) / n)
    }

    fn lacks(&self, case: Case, ranks: usize) -> Option<&'static str> {
        let lacks = ranks == 1 && case.element.is_float8() && case.op == Some(ReduceOp::Avg);
        lacks.then_some("NCCL has no mean of 8-bit floats of one rank")
    }

    fn contents(&self, shape: Shape, _: usize) -> Contents {
        Contents::Reduced(op(shape))
    }

    fn issue<'a>(
        &mut self,
        communicator: &'a Communicator,
        call: Call,
        operands: Operands<'a>,
    ) -> nccl::Result<Request> {
        match operands {
            Operands::InPlace(both) => {
                let y = ErasedMut::from_bytes(both, call.data_type())?;
                communicator.all_reduce_in_place(y, op(call.shape))
            }
            apart => {
                let (x, y) = apart.elements(call.data_type())?;
                communicator.all_reduce(x, y, op(call.shape))
            }
        }
    }

    fn record<'a>(
        &self,
        group: &mut Group<'a>,
        call: Call,
        operands: Operands<'a>,
    ) -> nccl::Result<()> {
        match operands {
            Operands::InPlace(both) => {
                let y = ErasedMut::from_bytes(both, call.data_type())?;
                group.all_reduce_in_place(y, op(call.shape))
            }
            apart => {
                let (x, y) = apart.elements(call.data_type())?;
                group.all_reduce(x, y, op(call.shape))
            }
        }
    }
}
