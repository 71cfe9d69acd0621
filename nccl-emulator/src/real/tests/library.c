// Stands for NCCL's own code: what its calls of the runtime, kernels and structures look like.
#define EXPORT __attribute__((visibility("default")))

int cudaGetDevice(int *), cudaMalloc(void **, unsigned long), cudaFree(void *);
int __cudaPopCallConfiguration(void), __cudaRegisterFatBinary(int *), libcudart_static_end(void);

struct inner { int step; short list[3][2]; };
enum mode { MODE_LOW = -3, MODE_HIGH = 200 };
typedef struct {
    char first;
    union {
        long whole;
        struct { unsigned low : 14, middle : 2; unsigned : 11; unsigned high : 5; };
    };
    struct inner inners[4];
    enum mode mode;
    void *pointer;
} shape_t;
struct declared;
shape_t the_shape;
struct declared *the_declared;

static int registered;
__attribute__((constructor)) static void registration(void) { __cudaRegisterFatBinary(&registered); }

#ifdef VERSION
EXPORT int ncclGetVersion(int *version) { *version = VERSION; return 0; }
#endif
EXPORT int ncclRegistered(void) { return registered; }
EXPORT int ncclCall(int *device) { return cudaGetDevice(device) + 1; }
EXPORT int ncclJump(int *device) { return cudaGetDevice(device); }
EXPORT void *ncclAddress(void) { return (void *)cudaFree; }
EXPORT void *ncclAllocate(void) { void *pointer; return cudaMalloc(&pointer, 100) ? 0 : pointer; }
__attribute__((noipa)) int kernel_stub(void) { return __cudaPopCallConfiguration() + 1; }
EXPORT void *ncclKernel(void) { return (void *)kernel_stub; }
int ncclDevFuncIdCount[3] = {4, 5, 6};
#ifdef POINTER
EXPORT int (*ncclTable)(int *) = cudaGetDevice;
#endif
#ifdef PRIVATE
EXPORT int ncclPrivate(void) { return libcudart_static_end() + 1; }
#endif
