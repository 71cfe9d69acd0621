/* Of the C library's stdbool.h, what nccl_device uses. */
#pragma once
#define bool _Bool
#define true 1
#define false 0
