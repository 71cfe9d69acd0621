/* All that nccl.h needs of the CUDA runtime: two opaque handles and a version. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#define CUDART_VERSION 13000
typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
