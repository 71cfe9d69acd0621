//! NCCL's C ABI.
