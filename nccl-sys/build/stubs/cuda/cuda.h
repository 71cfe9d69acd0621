/* All that nccl_device needs of CUDA's driver on the host: an enum, as an integer of its size. */
#pragma once
typedef unsigned int CUmemLocationType;
