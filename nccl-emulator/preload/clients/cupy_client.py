"""CuPy's binding of NCCL on the emulator.

Only the module `cupy.cuda.nccl`, which takes addresses: CuPy's arrays need the CUDA runtime and kernels.
"""

from cupy.cuda import nccl

import ranks

COUNT = 1000


def rank_main(rank, exchange):
    def make():
        return bytes(byte & 0xFF for byte in nccl.get_unique_id())

    unique_id = exchange(make)
    device = ranks.Device(rank)
    ranks.expect("the device", device.name, "CPU emulator, not a GPU")
    comm = nccl.NcclCommunicator(ranks.RANKS, unique_id, rank)
    ranks.expect("size and rank", (comm.size(), comm.rank_id()), (ranks.RANKS, rank))

    peer = 1 - rank
    mine, theirs = device.floats([rank + 1.0] * COUNT), device.floats([0.0] * COUNT)
    nccl.groupStart()
    comm.send(mine, COUNT, nccl.NCCL_FLOAT32, peer, device.stream)
    comm.recv(theirs, COUNT, nccl.NCCL_FLOAT32, peer, device.stream)
    nccl.groupEnd()
    ranks.expect("the message", device.read(theirs, COUNT), [peer + 1.0] * COUNT)
    comm.allReduce(mine, theirs, COUNT, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, device.stream)
    ranks.expect("the sum", device.read(theirs, COUNT), [3.0] * COUNT)
    try:
        comm.allReduce(mine, theirs, COUNT, 77, nccl.NCCL_SUM, device.stream)
    except nccl.NcclError as error:
        ranks.expect("the error", error.status, 4)
    else:
        raise RuntimeError("a data type that is none was accepted")
    comm.destroy()


ranks.main(rank_main)
