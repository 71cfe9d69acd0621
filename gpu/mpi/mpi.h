/* As much of MPI as nccl-tests needs, between processes of one host: a header alone.
 *
 * The machine that runs the check has no MPI, and without one nccl-tests can only put ranks on threads,
 * each with a device of its own. The processes here share the file that NCCL_TOOLS_MPI names (1 MiB of
 * zeros, fresh for every run); rank and number of ranks are in NCCL_RUN_RANK and NCCL_RUN_WORLD_SIZE.
 * Every operation is: everybody writes its slot, barrier, everybody reads, barrier. There is one
 * communicator; MPI_Comm_split returns it, which is right as long as NCCL_TESTS_SPLIT is not set.
 */
#ifndef NCCL_TOOLS_MPI_H
#define NCCL_TOOLS_MPI_H

#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int MPI_Comm;
typedef int MPI_Datatype;
typedef int MPI_Op;
typedef struct { int unused; } MPI_Status;

#define MPI_SUCCESS 0
#define MPI_COMM_WORLD 0
#define MPI_IN_PLACE ((void*)-1)
#define MPI_STATUS_IGNORE ((MPI_Status*)0)
enum { MPI_DATATYPE_NULL, MPI_BYTE, MPI_CHAR, MPI_INT, MPI_INT64_T, MPI_LONG_LONG, MPI_DOUBLE };
enum { MPI_OP_NULL, MPI_SUM, MPI_MIN, MPI_MAX };

/* Bytes that a rank can give in one step; a page holds the counters. */
enum { NCCL_TOOLS_MPI_HEAD = 4096, NCCL_TOOLS_MPI_SLOT = 64 << 10, NCCL_TOOLS_MPI_MOST = 15 };

struct nccl_tools_mpi {
  int rank, size;
  char* memory;
};

static inline struct nccl_tools_mpi* nccl_tools_mpi(void) {
  static struct nccl_tools_mpi state = {0, 0, 0};
  return &state;
}

static inline void nccl_tools_mpi_die(const char* why) {
  fprintf(stderr, "mpi.h: %s\n", why);
  exit(1);
}

static inline int MPI_Init(int* argc, char*** argv) {
  struct nccl_tools_mpi* mpi = nccl_tools_mpi();
  const char* rank = getenv("NCCL_RUN_RANK");
  const char* size = getenv("NCCL_RUN_WORLD_SIZE");
  const char* path = getenv("NCCL_TOOLS_MPI");
  int file;
  (void)argc;
  (void)argv;
  if (!rank || !size || !path) nccl_tools_mpi_die("not started as a rank");
  mpi->rank = atoi(rank);
  mpi->size = atoi(size);
  if (mpi->size < 1 || mpi->size > NCCL_TOOLS_MPI_MOST) nccl_tools_mpi_die("too many ranks");
  file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) nccl_tools_mpi_die("the shared file cannot be opened");
  mpi->memory = (char*)mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (mpi->memory == (char*)MAP_FAILED) nccl_tools_mpi_die("the shared file cannot be mapped");
  close(file);
  return MPI_SUCCESS;
}

static inline int MPI_Finalize(void) { return MPI_SUCCESS; }
static inline int MPI_Comm_rank(MPI_Comm comm, int* rank) { (void)comm; *rank = nccl_tools_mpi()->rank; return 0; }
static inline int MPI_Comm_size(MPI_Comm comm, int* size) { (void)comm; *size = nccl_tools_mpi()->size; return 0; }
static inline int MPI_Comm_split(MPI_Comm comm, int color, int key, MPI_Comm* out) { (void)color; (void)key; *out = comm; return 0; }
static inline int MPI_Comm_free(MPI_Comm* comm) { (void)comm; return 0; }

/* A counter that only grows: the n-th barrier is over when it has reached n times the number of ranks. */
static inline int MPI_Barrier(MPI_Comm comm) {
  static uint64_t entered = 0;
  struct nccl_tools_mpi* mpi = nccl_tools_mpi();
  uint64_t* counter = (uint64_t*)mpi->memory;
  uint64_t until = ++entered * (uint64_t)mpi->size;
  (void)comm;
  __atomic_add_fetch(counter, 1, __ATOMIC_ACQ_REL);
  while (__atomic_load_n(counter, __ATOMIC_ACQUIRE) < until) sched_yield();
  return MPI_SUCCESS;
}

static inline char* nccl_tools_mpi_slot(int rank) {
  return nccl_tools_mpi()->memory + NCCL_TOOLS_MPI_HEAD + (size_t)rank * NCCL_TOOLS_MPI_SLOT;
}

static inline size_t nccl_tools_mpi_bytes(int count, MPI_Datatype type) {
  size_t one = type == MPI_BYTE || type == MPI_CHAR ? 1 : type == MPI_INT ? 4 : 8;
  size_t bytes = (size_t)count * one;
  if (bytes > NCCL_TOOLS_MPI_SLOT) nccl_tools_mpi_die("a message is too long");
  return bytes;
}

static inline int MPI_Bcast(void* buffer, int count, MPI_Datatype type, int root, MPI_Comm comm) {
  size_t bytes = nccl_tools_mpi_bytes(count, type);
  if (nccl_tools_mpi()->rank == root) memcpy(nccl_tools_mpi_slot(root), buffer, bytes);
  MPI_Barrier(comm);
  memcpy(buffer, nccl_tools_mpi_slot(root), bytes);
  return MPI_Barrier(comm);
}

/* With MPI_IN_PLACE, the own part lies where it belongs already. */
static inline int MPI_Gather(const void* send, int count, MPI_Datatype type, void* recv, int recvcount,
                             MPI_Datatype recvtype, int root, MPI_Comm comm) {
  struct nccl_tools_mpi* mpi = nccl_tools_mpi();
  size_t bytes = nccl_tools_mpi_bytes(send == MPI_IN_PLACE ? recvcount : count, send == MPI_IN_PLACE ? recvtype : type);
  const char* own = send == MPI_IN_PLACE ? (const char*)recv + (size_t)mpi->rank * bytes : (const char*)send;
  int rank;
  memcpy(nccl_tools_mpi_slot(mpi->rank), own, bytes);
  MPI_Barrier(comm);
  if (root < 0 || root == mpi->rank)
    for (rank = 0; rank < mpi->size; rank++)
      memcpy((char*)recv + (size_t)rank * bytes, nccl_tools_mpi_slot(rank), bytes);
  return MPI_Barrier(comm);
}

static inline int MPI_Allgather(const void* send, int count, MPI_Datatype type, void* recv, int recvcount,
                                MPI_Datatype recvtype, MPI_Comm comm) {
  return MPI_Gather(send, count, type, recv, recvcount, recvtype, -1, comm);
}

#define NCCL_TOOLS_MPI_REDUCE(kind)                                                   \
  for (rank = 0; rank < mpi->size; rank++)                                            \
    for (i = 0; i < count; i++) {                                                     \
      kind one, *to = (kind*)recv + i;                                                \
      memcpy(&one, nccl_tools_mpi_slot(rank) + (size_t)i * sizeof(kind), sizeof one); \
      if (rank == 0) *to = one;                                                       \
      else if (op == MPI_SUM) *to += one;                                             \
      else if (op == MPI_MIN ? one < *to : one > *to) *to = one;                      \
    }

static inline int MPI_Allreduce(const void* send, void* recv, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  struct nccl_tools_mpi* mpi = nccl_tools_mpi();
  int rank, i;
  memcpy(nccl_tools_mpi_slot(mpi->rank), send == MPI_IN_PLACE ? recv : send, nccl_tools_mpi_bytes(count, type));
  MPI_Barrier(comm);
  if (type == MPI_INT) { NCCL_TOOLS_MPI_REDUCE(int32_t) }
  else if (type == MPI_DOUBLE) { NCCL_TOOLS_MPI_REDUCE(double) }
  else { NCCL_TOOLS_MPI_REDUCE(int64_t) }
  return MPI_Barrier(comm);
}

#endif
