"""The emulator through ctypes: a grouped exchange of messages and an all-reduce between two processes."""

import ctypes

import ranks

COUNT = 1000
FLOAT32, SUM = 7, 0


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


def rank_main(rank, exchange):
    nccl = ctypes.CDLL("libnccl.so.2")
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    nccl.ncclGetLastError.restype = ctypes.c_char_p
    nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]

    def call(function, *arguments):
        code = getattr(nccl, function)(*arguments)
        if code:
            text, last = nccl.ncclGetErrorString(code), nccl.ncclGetLastError(None)
            raise RuntimeError(f"{function}: {text.decode()} ({last.decode()})")

    def make():
        unique_id = UniqueId()
        call("ncclGetUniqueId", ctypes.byref(unique_id))
        return bytes(unique_id)

    # The rank that creates the id needs no device for it, and the others have none yet.
    unique_id = UniqueId.from_buffer_copy(exchange(make))
    device = ranks.Device(rank)
    ranks.expect("the device", device.name, "CPU emulator, not a GPU")
    stream = ctypes.c_void_p(device.stream)
    comm = ctypes.c_void_p()
    call("ncclCommInitRank", ctypes.byref(comm), ranks.RANKS, unique_id, rank)

    peer = 1 - rank
    mine, theirs = device.floats([rank + 1.0] * COUNT), device.floats([0.0] * COUNT)
    count = ctypes.c_size_t(COUNT)
    call("ncclGroupStart")
    call("ncclSend", ctypes.c_void_p(mine), count, FLOAT32, peer, comm, stream)
    call("ncclRecv", ctypes.c_void_p(theirs), count, FLOAT32, peer, comm, stream)
    call("ncclGroupEnd")
    ranks.expect("the message", device.read(theirs, COUNT), [peer + 1.0] * COUNT)
    call("ncclAllReduce", ctypes.c_void_p(mine), ctypes.c_void_p(theirs), count, FLOAT32, SUM, comm, stream)
    ranks.expect("the sum", device.read(theirs, COUNT), [3.0] * COUNT)
    call("ncclCommDestroy", comm)


ranks.main(rank_main)
