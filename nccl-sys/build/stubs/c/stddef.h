/* Of the C library's stddef.h, what nccl.h and nccl_ep.h use. */
#pragma once
typedef __SIZE_TYPE__ size_t;
#define NULL ((void *)0)
#define offsetof(type, field) __builtin_offsetof(type, field)
