/* Of the C library's stddef.h, what nccl.h uses. */
#pragma once
typedef __SIZE_TYPE__ size_t;
#define NULL ((void *)0)
