"""nccl4py, NVIDIA's own Python binding, on the emulator, with streams and buffers of cuda.core."""

import nccl.core as nccl
from cuda.core import Device

import ranks

COUNT = 1000


class Floats:
    """32-bit floats at an address, as other packages of Python see them."""

    def __init__(self, address):
        self.address = address
        self.__cuda_array_interface__ = {
            "shape": (COUNT,),
            "typestr": "<f4",
            "data": (address, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }


def rank_main(rank, exchange):
    library = nccl.get_version().libnccl
    if "nccl_emulator" not in str(library.path):
        raise RuntimeError(f"this is not the emulator but {library}")
    unique_id = nccl.UniqueId.from_bytes(exchange(lambda: bytes(nccl.get_unique_id())))

    memory = ranks.Device(rank)
    device = Device(rank)
    device.set_current()
    ranks.expect("the device", device.name, "CPU emulator, not a GPU")
    stream = device.create_stream()
    comm = nccl.Communicator.init(ranks.RANKS, rank, unique_id)
    ranks.expect("size and rank", (comm.nranks, comm.rank), (ranks.RANKS, rank))

    peer = 1 - rank
    mine = Floats(memory.floats([rank + 1.0] * COUNT))
    theirs = Floats(memory.floats([0.0] * COUNT))
    with nccl.group():
        comm.send(mine, peer, stream=stream)
        comm.recv(theirs, peer, stream=stream)
    stream.sync()
    ranks.expect("the message", memory.read(theirs.address, COUNT), [peer + 1.0] * COUNT)
    comm.allreduce(mine, theirs, nccl.SUM, stream=stream)
    stream.sync()
    ranks.expect("the sum", memory.read(theirs.address, COUNT), [3.0] * COUNT)

    # Memory of cuda.core and of NCCL, which have no element type: bytes.
    ours = device.memory_resource.allocate(4 * COUNT, stream=stream)
    gathered = nccl.mem_alloc(ranks.RANKS * 4 * COUNT)
    stream.sync()
    memory.write(int(ours.handle), [rank + 1.0] * COUNT)
    comm.allgather(ours, gathered, stream=stream)
    stream.sync()
    expected = [rank + 1.0 for rank in range(ranks.RANKS) for _ in range(COUNT)]
    ranks.expect("what was gathered", memory.read(int(gathered.handle), ranks.RANKS * COUNT), expected)
    comm.destroy()


ranks.main(rank_main)
