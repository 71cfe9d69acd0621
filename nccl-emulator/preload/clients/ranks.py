"""Two ranks as processes of one script, and device memory for them, with the standard library alone.

The emulator is an implementation of the CUDA driver's functions, not of the CUDA runtime: what a client
of NCCL cannot bring along (CuPy's own memory needs the runtime) is made here with the driver.
"""

import ctypes
import os
import struct
import subprocess
import sys
import tempfile
import time

RANKS = 2
DEADLINE = 60.0


def main(rank_main):
    """Runs `rank_main(rank, exchange)` in a process for each rank; `exchange` hands what rank 0 has to all."""
    if "CLIENT_RANK" in os.environ:
        rank = int(os.environ["CLIENT_RANK"])
        rank_main(rank, lambda value: _exchange(rank, value))
        print(f"rank {rank}: passed", flush=True)
        # The device needs no cleanup any more, and a client's own cleanup may come too late for it.
        os._exit(0)
    end = time.monotonic() + DEADLINE
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "CLIENT_DIRECTORY": directory}
        processes = [
            subprocess.Popen([sys.executable, *sys.argv], env={**environment, "CLIENT_RANK": str(rank)})
            for rank in range(RANKS)
        ]
        try:
            codes = [process.wait(max(0.1, end - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            sys.exit(f"the ranks have not ended after {DEADLINE:.0f} s")
        finally:
            for process in processes:
                process.kill()
    if any(codes):
        sys.exit(f"the ranks ended with {codes}")


def _exchange(rank, value):
    path = os.path.join(os.environ["CLIENT_DIRECTORY"], "value")
    if rank == 0:
        with open(path + ".new", "wb") as file:
            file.write(value())
        os.rename(path + ".new", path)
    end = time.monotonic() + DEADLINE
    while not os.path.exists(path):
        if time.monotonic() > end:
            sys.exit("rank 0 has nothing to say")
        time.sleep(0.01)
    with open(path, "rb") as file:
        return file.read()


class Device:
    """A device's primary context, a stream and memory."""

    def __init__(self, ordinal):
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", ctypes.c_uint(0))
        device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        name = ctypes.create_string_buffer(100)
        self._call("cuDeviceGetName", name, ctypes.c_int(100), device)
        self.name = name.value.decode()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(1))
        self.stream = stream.value

    def _call(self, function, *arguments):
        code = getattr(self._cuda, function)(*arguments)
        if code:
            raise RuntimeError(f"{function} returned {code}")

    def floats(self, values):
        """The address of device memory with these values, as 32-bit floats."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(4 * len(values)))
        self.write(address.value, values)
        return address.value

    def write(self, address, values):
        """Puts these floats at this address."""
        data = struct.pack(f"{len(values)}f", *values)
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))

    def read(self, address, count):
        """`count` floats at this address, after all work on the stream."""
        self._call("cuStreamSynchronize", ctypes.c_void_p(self.stream))
        data = ctypes.create_string_buffer(4 * count)
        self._call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(4 * count))
        return list(struct.unpack(f"{count}f", data.raw))


def expect(what, found, expected):
    """Fails if they differ."""
    if found != expected:
        sys.exit(f"{what}: found {found}, expected {expected}")
