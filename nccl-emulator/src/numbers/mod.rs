//! The numbers that operations work on: NCCL's data types, and how they are reduced.

pub(crate) mod datatype;
pub(crate) mod float8;
pub(crate) mod reduction;
