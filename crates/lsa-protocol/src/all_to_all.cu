// The all-to-all of the crate lsa-protocol; lib.rs says why the protocol is right, layout.rs what lies where in a window.
// The emulator runs exchange.rs in its place: change both. NVRTC compiles it without any header
// (`cargo xtask check-nvrtc`).

#define BLOCK_THREADS 256
#define FLAG_BYTES 64ull
#define DATA_ALIGNMENT 4096ull
#define ABORTED 0xFFFFFFFFu
#define DIFFERS 0x80000000u
// Looks at the flag between two looks at the host's memory and the clock: a load over PCIe takes longer than one of the
// device's own memory.
#define LOOKS 64

static_assert(sizeof(unsigned long long) == 8 && sizeof(unsigned int) == 4, "the sizes of the arguments");

typedef unsigned char byte;
typedef unsigned long long u64;
typedef unsigned int u32;

// Makes what the block has written before a barrier visible to the rank that sees the flag: the release covers what is
// ordered before it, by the barrier also the writes of the other threads, so those need no fence of their own.
static __device__ __forceinline__ void release(u64 flag, u32 value)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(flag), "r"(value) : "memory");
}

static __device__ __forceinline__ u32 acquire(u64 flag)
{
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}

// The size of the block whose flag this is. It is written before the flag is released, and read after it is acquired; volatile,
// so that it is not read through the cache of constants.
static __device__ __forceinline__ volatile u64* size_beside(u64 flag)
{
    return reinterpret_cast<volatile u64*>(flag + sizeof(u64));
}

static __device__ __forceinline__ u64 nanoseconds()
{
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) : : "memory");
    return now;
}

// By all threads of the block. Neither pointer is __restrict__: slots must not be read through the cache of constants,
// which no acquire empties.
static __device__ __forceinline__ void copy(byte* to, const byte* from, u64 bytes)
{
    u64 done = 0;
    if (((reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from)) & 15) == 0) {
        const u64 words = bytes / 16;
        for (u64 word = threadIdx.x; word < words; word += BLOCK_THREADS) {
            reinterpret_cast<uint4*>(to)[word] = reinterpret_cast<const uint4*>(from)[word];
        }
        done = words * 16;
    }
    for (u64 at = done + threadIdx.x; at < bytes; at += BLOCK_THREADS) {
        to[at] = from[at];
    }
}

// Exchanges one block of bytes between each two ranks; send and recv do not overlap.
//
// send, recv   ranks * bytes
// bytes        of one block, at most capacity, the same on all ranks, which is checked; may be 0
// windows      for each rank, the address at which this device reaches that rank's window
// epoch        the same on all ranks, never 0, one more with each launch (lsa_protocol::next_epoch)
// capacity     bytes of a slot, a multiple of 16
// abort_flag   memory of the host that this device reads; not 0: leave
// timeout_ns   0: no limit
// status       two words of memory of host and device, 0 before. The first stays 0, or becomes 1 + the rank of a block that
//              did not come in time, DIFFERS + the rank of a block of another size, or ABORTED, and stays so; the second is
//              the epoch that was begun last
//
// Grid: ranks blocks of BLOCK_THREADS threads. Block c pushes to rank + c and takes from rank - c, so that block c of one
// rank waits for block c of another, and the ranks do not all write to the same one at once.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) nccl_lsa_all_to_all(
    const unsigned char* send,
    unsigned char* recv,
    unsigned long long bytes,
    const unsigned long long* windows,
    unsigned int rank,
    unsigned int ranks,
    unsigned int epoch,
    unsigned long long capacity,
    const volatile unsigned int* abort_flag,
    unsigned long long timeout_ns,
    unsigned int* status)
{
    __shared__ u32 verdict;

    const u32 block = blockIdx.x;
    const u64 own = windows[rank];
    const u64 slots = 2ull * ranks;
    u32* const failed = reinterpret_cast<u32*>(own + slots * FLAG_BYTES);
    if (threadIdx.x == 0) {
        verdict = *static_cast<volatile u32*>(failed);
        if (block == 0) {
            static_cast<volatile u32*>(status)[1] = epoch;
        }
    }
    __syncthreads();
    // After a failure a push would overwrite what a peer may still take.
    if (verdict != 0) {
        return;
    }
    if (block == 0) {
        copy(recv + rank * bytes, send + rank * bytes, bytes);
        return;
    }
    const u64 begin = nanoseconds();
    const u32 peer = static_cast<u32>((static_cast<u64>(rank) + block) % ranks);
    const u32 source = static_cast<u32>((static_cast<u64>(rank) + ranks - block) % ranks);
    const u64 data = ((slots + 1) * FLAG_BYTES + DATA_ALIGNMENT - 1) / DATA_ALIGNMENT * DATA_ALIGNMENT;
    const u64 buffer = static_cast<u64>(epoch & 1) * ranks;

    const u64 theirs = windows[peer];
    copy(reinterpret_cast<byte*>(theirs + data + (buffer + rank) * capacity), send + peer * bytes, bytes);
    __syncthreads();

    if (threadIdx.x == 0) {
        const u64 set = theirs + (buffer + rank) * FLAG_BYTES;
        *size_beside(set) = bytes;
        release(set, epoch);
        const u64 flag = own + (buffer + source) * FLAG_BYTES;
        u32 ended = 0;
        for (u32 looks = 1; acquire(flag) != epoch; ++looks) {
            if (looks % LOOKS != 0) {
                continue;
            }
            if (*abort_flag != 0) {
                ended = ABORTED;
                break;
            }
            if (timeout_ns != 0 && nanoseconds() - begin >= timeout_ns) {
                ended = 1 + source;
                break;
            }
        }
        if (ended == 0 && *size_beside(flag) != bytes) {
            ended = DIFFERS | source;
        }
        // The first block that fails says why.
        if (ended != 0 && atomicCAS(failed, 0u, ended) == 0) {
            *static_cast<volatile u32*>(status) = ended;
        }
        verdict = ended;
    }
    // What thread 0 has acquired, all threads see after the barrier.
    __syncthreads();
    if (verdict == 0) {
        copy(recv + source * bytes, reinterpret_cast<const byte*>(own + data + (buffer + source) * capacity), bytes);
    }
}
