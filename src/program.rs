//! The properties of each benchmark program that options and output depend on.

use nccl::ReduceOp;

use crate::algorithm::{self, Algorithm};

/// A benchmark program.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// The measured operation, as in sentences: "all-to-all".
    pub what: &'static str,
    /// The measured operation, as in the first line of `--help`.
    pub title: &'static str,
    /// Whether its rows have an operator (`-o`).
    pub has_operator: bool,
    /// Whether NCCL supports the operation in place; else the result is copied back from another buffer.
    pub in_place: bool,
    /// The algorithms of `--algo`; empty where there is only one.
    pub algorithms: &'static [Algorithm],
    /// Its own environment variables, for `--help`: lines that begin with a variable each.
    pub variables: &'static str,
}

/// `all_to_all_perf`, nccl-tests' `alltoall_perf`.
pub const ALL_TO_ALL: Program = Program {
    what: "all-to-all",
    title: "NCCL's all-to-all",
    has_operator: false,
    in_place: false,
    algorithms: algorithm::TABLE,
    variables: "",
};

/// `all_to_all_v_perf`, nccl-tests' `alltoallv_perf`.
pub const ALL_TO_ALL_V: Program = Program {
    what: "all-to-all-v",
    title: "an all-to-all with a length for each pair of ranks",
    has_operator: false,
    in_place: false,
    algorithms: &[],
    variables: "\
NCCL_TESTS_ALLTOALLV_SPREAD: 0, all pairs alike, to 1, in proportion to the distance (1).
NCCL_TESTS_ALLTOALLV_MATRIX_FILE: bytes from rank (row) to rank (column); -b and -e are the same
then, and at least what the busiest rank has.
NCCL_TESTS_ALLTOALLV_MATRIX_SCALE: multiplies what the file says (1).
NCCL_TESTS_ALLTOALLV_PRINT_SUMMARY: 1 prints what each rank has above each row.
",
};

/// `sendrecv_perf`.
pub const SEND_RECV: Program = Program {
    what: "ring of messages",
    title: "a ring of messages: each rank sends to the next and receives from the one before",
    has_operator: true,
    in_place: false,
    algorithms: &[],
    variables: "",
};

/// `all_reduce_perf`.
pub const ALL_REDUCE: Program = Program {
    what: "all-reduce",
    title: "NCCL's all-reduce",
    has_operator: true,
    in_place: true,
    algorithms: &[],
    variables: "",
};

/// The operators of `-o`, in nccl-tests' order.
pub const OPERATORS: [ReduceOp; 5] = [
    ReduceOp::Sum,
    ReduceOp::Prod,
    ReduceOp::Max,
    ReduceOp::Min,
    ReduceOp::Avg,
];
