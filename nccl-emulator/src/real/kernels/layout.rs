//! Where the fields of NCCL's device structures are in the loaded library.
//!
//! The structures are private to NCCL and change between releases, so that their layout is asked of the library's debug
//! information ([`Types`]), once, and kept as offsets ([`Layout`]). What only some releases have is optional here.

use std::fmt;

use super::{diagnostics, symmetric};

/// The types of the loaded library.
pub(crate) trait Types {
    /// The size of a structure in bytes.
    fn size_of(&self, ty: &str) -> Result<usize, Mismatch>;
    /// A field of a structure: `ring.prev` is a field of a field; names of anonymous structures and unions are left out.
    fn field(&self, ty: &str, path: &str) -> Result<Field, Mismatch>;
    /// The value of an enumerator.
    fn enumerator(&self, name: &str) -> Result<i64, Mismatch>;
}

/// A field: `size` bytes at `offset`, or of these `bits.1` bits from bit `bits.0` on, counted from the lowest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Field {
    pub(crate) offset: usize,
    pub(crate) size: usize,
    pub(crate) bits: Option<(u32, u32)>,
}

/// The library does not have what the interpreter needs to know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Mismatch {
    /// There is no such type.
    NoType { ty: String },
    /// The type has no such field.
    NoField { ty: String, path: String },
    /// There is no such enumerator.
    NoEnumerator { name: String },
    /// A field has another size, or its bits do not fit.
    Shape {
        ty: String,
        path: String,
        field: Field,
    },
    /// The table of functions has another number of rows.
    Rows { expected: usize, found: usize },
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoType { ty } => write!(f, "libnccl has no type {ty}"),
            Self::NoField { ty, path } => write!(f, "libnccl's {ty} has no field {path}"),
            Self::NoEnumerator { name } => write!(f, "libnccl has no enumerator {name}"),
            Self::Shape { ty, path, field } => write!(
                f,
                "libnccl's {ty}.{path} has a shape that is not known: {} bytes at {}, bits {:?}",
                field.size, field.offset, field.bits
            ),
            Self::Rows { expected, found } => write!(
                f,
                "libnccl's table of device functions has {found} rows, not {expected}"
            ),
        }?;
        write!(
            f,
            "; this release's kernels cannot be interpreted: use NCCL 2.27 to 2.32"
        )
    }
}

impl std::error::Error for Mismatch {}

impl Field {
    /// The field's value in the bytes of its structure, unsigned.
    pub(crate) fn get(self, bytes: &[u8]) -> u64 {
        let mut word = [0; 8];
        let size = self.size.min(8);
        if let Some(from) = bytes.get(self.offset..self.offset + size) {
            word[..size].copy_from_slice(from);
        }
        let value = u64::from_le_bytes(word);
        match self.bits {
            Some((first, count)) => (value >> first) & (u64::MAX >> (64 - count.clamp(1, 64))),
            None => value,
        }
    }

    /// The field's value, a signed number of 4 or 8 bytes.
    pub(crate) fn signed(self, bytes: &[u8]) -> i64 {
        let value = self.get(bytes);
        if self.size == 4 {
            i64::from(value as u32 as i32)
        } else {
            value as i64
        }
    }

    /// The element at `index` of a field that is an array of elements of `size` bytes.
    pub(crate) fn element(self, index: usize, size: usize) -> Self {
        Self {
            offset: self.offset + index * size,
            size,
            bits: None,
        }
    }
}

/// Asks for fields of one structure.
pub(super) struct Asked<'a> {
    pub(super) types: &'a dyn Types,
    pub(super) ty: &'a str,
}

impl Asked<'_> {
    pub(super) fn size(&self) -> Result<usize, Mismatch> {
        self.types.size_of(self.ty)
    }

    pub(super) fn field(&self, path: &str) -> Result<Field, Mismatch> {
        let field = self.types.field(self.ty, path)?;
        let end = field
            .bits
            .map_or(0, |(first, count)| first as usize + count as usize);
        let inside = field.offset + field.size <= self.size()?;
        if !inside || field.size == 0 || end > field.size.min(8) * 8 {
            return Err(self.shape(path, field));
        }
        Ok(field)
    }

    fn shape(&self, path: &str, field: Field) -> Mismatch {
        Mismatch::Shape {
            ty: self.ty.to_owned(),
            path: path.to_owned(),
            field,
        }
    }

    /// A field of whole bytes of a known size.
    pub(super) fn sized(&self, path: &str, size: usize) -> Result<Field, Mismatch> {
        let field = self.field(path)?;
        if field.size != size || field.bits.is_some() {
            return Err(self.shape(path, field));
        }
        Ok(field)
    }

    fn offset(&self, path: &str, size: usize) -> Result<usize, Mismatch> {
        Ok(self.sized(path, size)?.offset)
    }

    /// A field that only some releases have.
    pub(super) fn optional(&self, path: &str) -> Option<Field> {
        self.field(path).ok()
    }
}

macro_rules! fields {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident = $path:literal $kind:tt),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone)]
        pub(crate) struct $name {
            #[allow(dead_code, reason = "some structures are only pointed to")]
            pub(crate) size: usize,
            $($(#[$field_meta])* pub(crate) $field: fields!(@type $kind),)*
        }

        impl $name {
            pub(super) fn ask(types: &dyn Types, ty: &str) -> Result<Self, Mismatch> {
                let asked = Asked { types, ty };
                Ok(Self {
                    size: asked.size()?,
                    $($field: fields!(@ask asked $path $kind),)*
                })
            }
        }
    };
    (@type word) => { Field };
    (@type half) => { Field };
    (@type number) => { Field };
    (@type optional) => { Option<Field> };
    (@ask $asked:ident $path:literal word) => { $asked.sized($path, 8)? };
    (@ask $asked:ident $path:literal half) => { $asked.sized($path, 4)? };
    (@ask $asked:ident $path:literal number) => { $asked.field($path)? };
    (@ask $asked:ident $path:literal optional) => { $asked.optional($path) };
}

pub(super) use fields;

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
    /// `ncclConnFifo`: one step as the proxy sees it.
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
    /// `ncclDevWorkColl`: a collective, or this launch's part of one.
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

/// All that the interpreter knows of the library's structures.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    pub(crate) arguments: Arguments,
    pub(crate) comm: Comm,
    /// Where the channels begin, from the communicator's first byte.
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
    /// Of kernels of NCCL's diagnostics.
    pub(super) diagnostics: Option<diagnostics::Layout>,
    /// Of kernels over symmetric memory.
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
            diagnostics: diagnostics::Layout::new(types)?,
            symmetric: symmetric::Layout::new(types)?,
        };
        layout.check(types, comm)?;
        Ok(layout)
    }

    /// Arrays have the lengths that the protocols assume.
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
