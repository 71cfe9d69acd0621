/*
 * The ranks of `cargo bench -p nccl-benches --bench against_mpi` that use MPI; nothing else starts this program.
 *
 *     mpirun -np RANKS all_to_all SOCKET BYTES
 *
 * Each rank makes two buffers of BYTES, connects to the Unix socket SOCKET, says "rank RANK CORES", and then
 * does what it is told, line by line, until the connection ends:
 *
 *     run OPERATION BYTES COUNT   ->  the nanoseconds of CLOCK_MONOTONIC before and after COUNT operations
 *     check OPERATION BYTES       ->  "right", or "wrong" if an element is not what it must be
 *
 * A rank that has nothing to do sleeps in read(): ranks that wait inside MPI would take the core from whoever is
 * measured at the time.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <mpi.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static int rank, ranks;
static size_t room;
static float *from, *to;

static void fail(const char *what) {
    fprintf(stderr, "MPI rank %d: %s: %s\n", rank, what, strerror(errno));
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* One operation on `bytes` per rank. Buffers shift from one to the next as in nccl-tests. */
static void operate(const char *operation, size_t bytes, size_t turn) {
    size_t places = room / bytes, count = bytes / sizeof(float);
    size_t at = (places ? turn % places : 0) * count;
    if (!strcmp(operation, "all-to-all")) {
        int part = (int)(count / ranks);
        MPI_Alltoall(from + at, part, MPI_FLOAT, to + at, part, MPI_FLOAT, MPI_COMM_WORLD);
    } else if (!strcmp(operation, "all-reduce")) {
        MPI_Allreduce(from + at, to + at, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    } else if (!strcmp(operation, "send+recv")) {
        MPI_Sendrecv(from + at, (int)bytes, MPI_BYTE, rank ^ 1, 0, to + at, (int)bytes, MPI_BYTE, rank ^ 1, 0,
                     MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else if (!strcmp(operation, "memcpy")) {
        memcpy(to + at, from + at, bytes);
        /* Nobody reads the copy; the compiler must not know. */
        __asm__ volatile("" ::: "memory");
    } else {
        errno = EINVAL;
        fail(operation);
    }
}

/* What rank `of` sends at `index`: sums of it are exact. */
static float element(int of, size_t index) { return (float)(of + 1) + (float)(index % 251); }

static int is_right(const char *operation, size_t bytes) {
    size_t count = bytes / sizeof(float), part = count / ranks;
    for (size_t i = 0; i < count; i++) {
        from[i] = element(rank, i);
        to[i] = -1;
    }
    operate(operation, bytes, 0);
    for (size_t i = 0; i < count; i++) {
        float expected = 0;
        if (!strcmp(operation, "all-to-all"))
            expected = element((int)(i / part), rank * part + i % part);
        else if (!strcmp(operation, "all-reduce"))
            for (int of = 0; of < ranks; of++) expected += element(of, i);
        else
            expected = element(strcmp(operation, "memcpy") ? rank ^ 1 : rank, i);
        if (to[i] != expected) return 0;
    }
    return 1;
}

static long long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static int connect_to(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        fail(path);
    }
    strcpy(address.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address)) fail(path);
    return fd;
}

static void introduce(FILE *answers) {
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores)) fail("sched_getaffinity");
    fprintf(answers, "rank %d ", rank);
    for (int core = 0, written = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &cores)) fprintf(answers, written++ ? ",%d" : "%d", core);
    fprintf(answers, "\n");
    fflush(answers);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc != 3) {
        errno = EINVAL;
        fail("usage: all_to_all SOCKET BYTES");
    }
    room = strtoull(argv[2], NULL, 10);
    if (posix_memalign((void **)&from, 4096, room) || posix_memalign((void **)&to, 4096, room)) fail("memory");
    memset(from, 0, room);
    memset(to, 0, room);
    int driver = connect_to(argv[1]);
    FILE *orders = fdopen(driver, "r"), *answers = fdopen(dup(driver), "w");
    if (!orders || !answers) fail("the connection");
    introduce(answers);
    char line[128], operation[32];
    size_t bytes, count;
    while (fgets(line, sizeof line, orders)) {
        if (sscanf(line, "run %31s %zu %zu", operation, &bytes, &count) == 3) {
            MPI_Barrier(MPI_COMM_WORLD);
            long long begun = now();
            for (size_t turn = 0; turn < count; turn++) operate(operation, bytes, turn);
            fprintf(answers, "%lld %lld\n", begun, now());
        } else if (sscanf(line, "check %31s %zu", operation, &bytes) == 2) {
            fprintf(answers, is_right(operation, bytes) ? "right\n" : "wrong\n");
        } else {
            errno = EINVAL;
            fail(line);
        }
        fflush(answers);
    }
    MPI_Finalize();
    return 0;
}
