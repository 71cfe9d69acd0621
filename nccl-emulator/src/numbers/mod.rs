//! The numbers that operations process: NCCL's data types, and their reductions.

pub(crate) mod datatype;
pub(crate) mod float8;
pub(crate) mod reduction;
