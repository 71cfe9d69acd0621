/* All that nccl_ep.h needs of the CUDA runtime beside what nccl.h needs: an enum, as an integer of its size. */
#pragma once
typedef unsigned int cudaError_t;
