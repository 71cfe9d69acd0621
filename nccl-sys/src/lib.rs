//! Raw bindings to NVIDIA NCCL.
