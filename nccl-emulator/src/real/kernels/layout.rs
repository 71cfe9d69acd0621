//! The positions of the fields of NCCL's device structures in the loaded library.
//!
//! The structures are private to NCCL and change between releases. So their layout is read once from the library's debug
//! information ([`super::asked`]), and stored as offsets ([`Layout`]). Fields that only some releases have are optional here.

use super::asked::{Asked, Field, Mismatch, Types, fields};
use super::diagnostics_layout;
use super::symmetric::layout as symmetric;

fields! {
    /// `ncclDevKernelArgs`: the first bytes of a launch's parameters.
    Arguments {
        comm = "comm" word,
        channel_mask = "channelMask" word,
        storage = "workStorageType" number,
        work_mask = "workMask" half,
        work_buffer = "workBuf" word,
    }
}

fields! {
    /// The device's copy of a communicator: `ncclKernelComm`, `ncclDevComm` before 2.28.
    Comm {
        rank = "rank" half,
        ranks = "nRanks" half,
        buffer_sizes = "buffSizes" number,
        p2p_chunk = "p2pChunkSize" half,
        /// Since 2.30.
        cross_clique = "p2pCrossClique" optional,
        all_nvlink = "isAllNvlink" optional,
        abort_flag = "abortFlag" word,
        rank_to_local = "rankToLocalRank" word,
        work_started = "workStarted" optional,
        work_completed = "workCompleted" optional,
        /// Since 2.32.
        progress = "progressCounters" optional,
    }
}

fields! {
    /// `ncclDevChannel`.
    Channel {
        peers = "peers" word,
        ring_prev = "ring.prev" half,
        ring_next = "ring.next" half,
        ring_ranks = "ring.userRanks" word,
        ring_index = "ring.index" half,
        tree_up = "tree.up" half,
        tree_down = "tree.down" number,
        work_counter = "workCounter" optional,
    }
}

fields! {
    /// `ncclDevChannelPeer`: the connections of a channel with one peer.
    Peer {
        send = "send" number,
        recv = "recv" number,
    }
}

fields! {
    /// `ncclConnInfo`: one end of a connection.
    Connection {
        buffers = "buffs" number,
        tail = "tail" word,
        head = "head" word,
        flags = "flags" half,
        step_size = "stepSize" half,
        pointer_exchange = "ptrExchange" word,
        fifo = "connFifo" word,
        step = "step" word,
        net_device_type = "netDeviceHandle.netDeviceType" optional,
    }
}

fields! {
    /// `ncclConnFifo`: one step, shared with the proxy.
    Fifo {
        mode = "mode" half,
        /// 8 bytes since 2.32, 4 before.
        offset = "offset" number,
        bytes = "size" word,
    }
}

fields! {
    /// `ncclDevWorkBatch`.
    Batch {
        next_jump = "nextJump" number,
        next_extends = "nextExtends" number,
        work_type = "workType" number,
        function = "funcId" number,
        /// Since 2.32: the collective, for progress counters.
        collective = "func" optional,
        offset_base = "offsetBase" half,
        offset_bits = "offsetBitset" word,
    }
}

fields! {
    /// `ncclDevWorkP2p`: a send and a receive.
    WorkP2p {
        send_address = "sendAddr" word,
        recv_address = "recvAddr" word,
        send_bytes = "sendBytes" word,
        recv_bytes = "recvBytes" word,
        send_rank = "sendRank" half,
        recv_rank = "recvRank" half,
        channels = "nP2pChannels" number,
        channel_base = "channelBase" number,
        send_channels = "nSendChannels" number,
        recv_channels = "nRecvChannels" number,
        send_chunk = "sendChunkSize_u32fp8" number,
        recv_chunk = "recvChunkSize_u32fp8" number,
        send_ll = "sendProtoLL" number,
        recv_ll = "recvProtoLL" number,
        send_net_registered = "sendNetReg" number,
        recv_net_registered = "recvNetReg" number,
        send_ipc_registered = "sendIpcReg" number,
        recv_ipc_registered = "recvIpcReg" number,
        profiled = "profilerEnabled" optional,
    }
}

fields! {
    /// `ncclDevWorkColl`: a collective, or this launch's part of it.
    WorkColl {
        channel_low = "channelLo" number,
        channel_high = "channelHi" number,
        argument_is_pointer = "redOpArgIsPtr" number,
        registered = "regUsed" number,
        net_registered = "netRegUsed" number,
        direct = "direct" number,
        one_rank_per_node = "isOneRPN" number,
        profiled = "profilerEnabled" optional,
        root = "root" half,
        recv_buffer = "recvbuff" word,
        send_buffer = "sendbuff" word,
        send_offset = "sendbuffOffset" word,
        recv_offset = "recvbuffOffset" word,
        send_remote = "sendbuffRmtAddrs" word,
        recv_remote = "recvbuffRmtAddrs" word,
        count_low = "cbd.countLo" word,
        count_mid = "cbd.countMid" word,
        count_high = "cbd.countHi" word,
        grains_low = "cbd.chunkGrainsLo" number,
        grains_mid = "cbd.chunkGrainsMid" number,
        grains_high = "cbd.chunkGrainsHi" number,
        argument = "redOpArg" word,
    }
}

fields! {
    /// `ncclDevWorkBcast` (2.29 and later): one broadcast of a batch.
    WorkBcast {
        ring_depth = "ringDepth" half,
        chunk = "chunkSize" half,
        send_buffer = "sendbuff" word,
        recv_buffer = "recvbuff" word,
        bytes = "bytes" word,
        done = "bytes_done" word,
    }
}

/// The values of `ncclDevWorkType`.
#[derive(Debug, Clone)]
pub(crate) struct WorkTypes {
    pub(crate) p2p: i64,
    pub(crate) coll: i64,
    pub(crate) coll_registered: i64,
    pub(crate) bcast: Option<i64>,
}

fields! {
    /// `ncclProgressCountersBlock` (2.32 and later).
    Progress {
        /// By collective.
        completed = "completedWorkCount" number,
        completed_time = "completedTimeNs" number,
        /// By channel.
        active = "collOpActive" number,
    }
}

/// All layouts of the library's structures that the interpreter needs.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    pub(crate) arguments: Arguments,
    pub(crate) comm: Comm,
    /// The offset of the channels from the communicator's first byte.
    pub(crate) channels: Field,
    pub(crate) channel: Channel,
    pub(crate) peer: Peer,
    pub(crate) connection: Connection,
    pub(crate) fifo: Fifo,
    pub(crate) batch: Batch,
    pub(crate) p2p: WorkP2p,
    pub(crate) coll: WorkColl,
    /// The size of `ncclDevWorkCollReg`, which begins with an `ncclDevWorkColl`.
    pub(crate) coll_registered: usize,
    pub(crate) bcast: Option<WorkBcast>,
    pub(crate) work_types: WorkTypes,
    /// The value of `ncclDevWorkStorageTypeArgs`.
    pub(crate) storage_arguments: i64,
    /// The size of `ncclDevProfiler`.
    pub(crate) profiler: Option<usize>,
    pub(crate) progress: Option<Progress>,
    /// Layouts for the kernels of NCCL's diagnostics.
    pub(super) diagnostics: Option<diagnostics_layout::Layout>,
    /// Layouts for the kernels over symmetric memory.
    pub(super) symmetric: Option<symmetric::Layout>,
}

impl Layout {
    pub(crate) fn new(types: &dyn Types) -> Result<Self, Mismatch> {
        let (comm, whole) = if types.size_of("ncclKernelCommAndChannels").is_ok() {
            ("ncclKernelComm", "ncclKernelCommAndChannels")
        } else {
            ("ncclDevComm", "ncclDevCommAndChannels")
        };
        let layout = Self {
            arguments: Arguments::ask(types, "ncclDevKernelArgs")?,
            comm: Comm::ask(types, comm)?,
            channels: Asked { types, ty: whole }.field("channels")?,
            channel: Channel::ask(types, "ncclDevChannel")?,
            peer: Peer::ask(types, "ncclDevChannelPeer")?,
            connection: Connection::ask(types, "ncclConnInfo")?,
            fifo: Fifo::ask(types, "ncclConnFifo")?,
            batch: Batch::ask(types, "ncclDevWorkBatch")?,
            p2p: WorkP2p::ask(types, "ncclDevWorkP2p")?,
            coll: WorkColl::ask(types, "ncclDevWorkColl")?,
            coll_registered: types.size_of("ncclDevWorkCollReg")?,
            bcast: match types.size_of("ncclDevWorkBcast") {
                Ok(_) => Some(WorkBcast::ask(types, "ncclDevWorkBcast")?),
                Err(_) => None,
            },
            work_types: WorkTypes {
                p2p: types.enumerator("ncclDevWorkTypeP2p")?,
                coll: types.enumerator("ncclDevWorkTypeColl")?,
                coll_registered: types.enumerator("ncclDevWorkTypeCollReg")?,
                bcast: types.enumerator("ncclDevWorkTypeBcast").ok(),
            },
            storage_arguments: types.enumerator("ncclDevWorkStorageTypeArgs")?,
            profiler: types.size_of("ncclDevProfiler").ok(),
            progress: match types.size_of("ncclProgressCountersBlock") {
                Ok(_) => Some(Progress::ask(types, "ncclProgressCountersBlock")?),
                Err(_) => None,
            },
            diagnostics: diagnostics_layout::Layout::new(types)?,
            symmetric: symmetric::Layout::new(types)?,
        };
        layout.check(types, comm)?;
        Ok(layout)
    }

    /// Checks that arrays have the lengths that the protocols assume.
    fn check(&self, types: &dyn Types, comm: &str) -> Result<(), Mismatch> {
        Asked { types, ty: comm }.offset("buffSizes", 3 * 4)?;
        let ty = "ncclConnInfo";
        Asked { types, ty }.offset("buffs", 3 * 8)?;
        let ty = "ncclDevChannel";
        Asked { types, ty }.offset("tree.down", 3 * 4)?;
        let ty = "ncclDevChannelPeer";
        Asked { types, ty }.offset("send", 2 * self.connection.size)?;
        Asked { types, ty }.offset("recv", 2 * self.connection.size)?;
        Ok(())
    }
}
