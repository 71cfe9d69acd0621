//! NCCL and the CUDA driver on the CPU.
