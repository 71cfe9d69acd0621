// Stands for the static CUDA runtime inside libnccl: compiled without debug information.
#ifdef __clang__
#define ONCE __attribute__((noinline, optnone))
#else
#define ONCE __attribute__((noipa))
#endif

ONCE int libcudart_static_start(void) { return 40; }
ONCE int cudaGetDevice(int *device) { *device = libcudart_static_start() + 2; return 0; }
// The runtime's call of itself, which stays.
ONCE int cudaMalloc(void **pointer, unsigned long size) {
    int device = 0;
    int code = cudaGetDevice(&device);
    *pointer = (void *)(size + device);
    return code;
}
ONCE int cudaFree(void *pointer) { return pointer != 0; }
ONCE int __cudaPushCallConfiguration(void) { return 4; }
ONCE int __cudaPopCallConfiguration(void) { return 5; }
ONCE int __cudaRegisterFunction(int *where, void *stub) { *where += stub ? 10 : 0; return 0; }
ONCE int __cudaRegisterFatBinary(int *where) { *where += 1; return 0; }
ONCE int libcudart_static_end(void) { return 6; }
