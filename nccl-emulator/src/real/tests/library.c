// Stands for NCCL's own code: what its calls of the runtime, kernels and structures look like.
#define EXPORT __attribute__((visibility("default")))
#ifdef __clang__
#define ONCE __attribute__((noinline, optnone))
#else
#define ONCE __attribute__((noipa))
#endif

int cudaGetDevice(int *), cudaMalloc(void **, unsigned long), cudaFree(void *);
int __cudaPushCallConfiguration(void), __cudaPopCallConfiguration(void), libcudart_static_end(void);
int __cudaRegisterFatBinary(int *), __cudaRegisterFunction(int *, void *);
int kernel(void), kernel_inlined(void);

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
__attribute__((used)) static const char compiled[] = "library compiled with CUDA 13.4";
__attribute__((constructor)) static void registration(void) {
    __cudaRegisterFatBinary(&registered);
    __cudaRegisterFunction(&registered, (void *)kernel);
#ifndef UNREGISTERED
    __cudaRegisterFunction(&registered, (void *)kernel_inlined);
#endif
}

#ifdef VERSION
EXPORT int ncclGetVersion(int *version) { *version = VERSION; return 0; }
#endif
EXPORT int ncclRegistered(void) { return registered; }
EXPORT int ncclCall(int *device) { return cudaGetDevice(device) + 1; }
EXPORT int ncclJump(int *device) { return cudaGetDevice(device); }
EXPORT void *ncclAddress(void) { return (void *)cudaFree; }
EXPORT void *ncclAllocate(void) { void *pointer; return cudaMalloc(&pointer, 100) ? 0 : pointer; }
// A kernel whose second function nvcc has inlined, one with both, and what launches one with <<<>>>.
ONCE int kernel_inlined(void) { return __cudaPopCallConfiguration() + 1; }
ONCE int _Z20__device_stub_kernelv(void) { return __cudaPopCallConfiguration(); }
ONCE int kernel(void) { return _Z20__device_stub_kernelv(); }
EXPORT int ncclLaunch(void) { return __cudaPushCallConfiguration() + __cudaPopCallConfiguration(); }
EXPORT void *ncclKernel(int *inlined) { return *inlined ? (void *)kernel_inlined : (void *)kernel; }
int ncclDevFuncIdCount[3] = {4, 5, 6};
#ifdef POINTER
EXPORT int (*ncclTable)(int *) = cudaGetDevice;
#endif
#ifdef PRIVATE
EXPORT int ncclPrivate(void) { return libcudart_static_end() + 1; }
#endif
