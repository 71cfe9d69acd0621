//! Safe bindings to NVIDIA NCCL.
