/* nccl.h includes this file and uses nothing of it. */
#pragma once
