//! The layouts of NCCL 2.32.3, 2.30.7 and 2.27.7, as their debug information has them.

use super::super::asked::{Field, Mismatch, Types};

/// A release whose layouts tests use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Release {
    V2_32_3,
    V2_30_7,
    V2_27_7,
}

type Row = (&'static str, usize, usize);
type Bits = (&'static str, usize, usize, u32, u32);

/// A structure: its size, its fields of whole bytes, its fields of bits.
struct Structure(&'static str, usize, &'static [Row], &'static [Bits]);

const COMMON: &[Structure] = &[
    Structure(
        "ncclDevKernelArgs",
        32,
        &[
            ("comm", 0, 8),
            ("channelMask", 8, 8),
            ("workStorageType", 16, 1),
            ("workMask", 20, 4),
            ("workBuf", 24, 8),
        ],
        &[],
    ),
    Structure(
        "ncclDevChannelPeer",
        608,
        &[("send", 0, 304), ("recv", 304, 304)],
        &[],
    ),
    Structure(
        "ncclConnInfo",
        152,
        &[
            ("buffs", 0, 24),
            ("tail", 48, 8),
            ("head", 56, 8),
            ("flags", 64, 4),
            ("stepSize", 72, 4),
            ("ptrExchange", 80, 8),
            ("connFifo", 96, 8),
            ("step", 104, 8),
        ],
        &[],
    ),
    Structure(
        "ncclDevWorkP2p",
        48,
        &[
            ("sendAddr", 0, 8),
            ("recvAddr", 8, 8),
            ("sendBytes", 16, 8),
            ("recvBytes", 24, 8),
            ("sendRank", 32, 4),
            ("recvRank", 36, 4),
            ("nP2pChannels", 40, 1),
            ("channelBase", 41, 1),
            ("nSendChannels", 42, 1),
            ("nRecvChannels", 43, 1),
            ("sendChunkSize_u32fp8", 44, 1),
            ("recvChunkSize_u32fp8", 45, 1),
        ],
        &[
            ("sendProtoLL", 46, 1, 0, 1),
            ("recvProtoLL", 46, 1, 1, 1),
            ("sendNetReg", 46, 1, 2, 1),
            ("recvNetReg", 46, 1, 3, 1),
            ("sendIpcReg", 46, 1, 4, 1),
            ("recvIpcReg", 46, 1, 5, 1),
            ("profilerEnabled", 46, 1, 6, 1),
        ],
    ),
    Structure("ncclDevProfiler", 1024, &[], &[]),
];

const CHANNEL: Structure = Structure(
    "ncclDevChannel",
    368,
    &[
        ("peers", 0, 8),
        ("ring.prev", 8, 4),
        ("ring.next", 12, 4),
        ("ring.userRanks", 16, 8),
        ("ring.index", 32, 4),
        ("tree.up", 44, 4),
        ("tree.down", 48, 12),
        ("workCounter", 360, 8),
    ],
    &[],
);

/// Until 2.27 without a table from ranks to positions.
const OLD_CHANNEL: Structure = Structure(
    "ncclDevChannel",
    368,
    &[
        ("peers", 0, 8),
        ("ring.prev", 8, 4),
        ("ring.next", 12, 4),
        ("ring.userRanks", 16, 8),
        ("ring.index", 24, 4),
        ("tree.up", 36, 4),
        ("tree.down", 40, 12),
        ("workCounter", 352, 8),
    ],
    &[],
);

/// Of kernels over symmetric memory, in 2.30 and 2.32.
const SYMMETRIC: &[Structure] = &[
    Structure(
        "ncclSymkDevWork",
        64,
        &[
            ("redOpArg", 0, 8),
            ("nElts", 8, 8),
            ("inputWin", 16, 8),
            ("outputWin", 24, 8),
            ("inputOff", 32, 8),
            ("outputOff", 40, 8),
        ],
        &[("sChannelId", 48, 8, 32, 16), ("nChannels", 48, 8, 48, 16)],
    ),
    Structure(
        "ncclSymkChannelWorkRange",
        4,
        &[("workHi", 0, 2), ("fracHi", 2, 2)],
        &[],
    ),
    Structure(
        "ncclWindow_vidmem",
        96,
        &[
            ("lsaFlatBase", 8, 8),
            ("lsaRank", 16, 4),
            ("stride4G", 24, 4),
        ],
        &[],
    ),
];

const COLL_BITS: &[Bits] = &[
    ("channelLo", 0, 4, 0, 8),
    ("channelHi", 0, 4, 8, 8),
    ("redOpArgIsPtr", 0, 4, 24, 1),
    ("regUsed", 0, 4, 25, 1),
    ("netRegUsed", 0, 4, 26, 1),
    ("direct", 0, 4, 28, 2),
    ("isOneRPN", 0, 4, 30, 1),
    ("profilerEnabled", 0, 4, 31, 1),
    ("cbd.chunkGrainsLo", 80, 8, 0, 21),
    ("cbd.chunkGrainsMid", 80, 8, 21, 21),
    ("cbd.chunkGrainsHi", 80, 8, 42, 21),
];

const COLL: Structure = Structure(
    "ncclDevWorkColl",
    96,
    &[
        ("root", 4, 4),
        ("recvbuff", 8, 8),
        ("sendbuff", 16, 8),
        ("sendbuffOffset", 24, 8),
        ("recvbuffOffset", 32, 8),
        ("sendbuffRmtAddrs", 40, 8),
        ("recvbuffRmtAddrs", 48, 8),
        ("cbd.countLo", 56, 8),
        ("cbd.countMid", 64, 8),
        ("cbd.countHi", 72, 8),
        ("redOpArg", 88, 8),
    ],
    COLL_BITS,
);

/// 2.30 pads the buffers to 16 bytes.
const PADDED_COLL: Structure = Structure(
    "ncclDevWorkColl",
    128,
    &[
        ("root", 4, 4),
        ("recvbuff", 24, 8),
        ("sendbuff", 32, 8),
        ("sendbuffOffset", 48, 8),
        ("recvbuffOffset", 56, 8),
        ("sendbuffRmtAddrs", 64, 8),
        ("recvbuffRmtAddrs", 72, 8),
        ("cbd.countLo", 80, 8),
        ("cbd.countMid", 88, 8),
        ("cbd.countHi", 96, 8),
        ("redOpArg", 112, 8),
    ],
    &[
        ("channelLo", 0, 4, 0, 8),
        ("channelHi", 0, 4, 8, 8),
        ("redOpArgIsPtr", 0, 4, 24, 1),
        ("regUsed", 0, 4, 25, 1),
        ("netRegUsed", 0, 4, 26, 1),
        ("direct", 0, 4, 28, 2),
        ("isOneRPN", 0, 4, 30, 1),
        ("profilerEnabled", 0, 4, 31, 1),
        ("cbd.chunkGrainsLo", 104, 8, 0, 21),
        ("cbd.chunkGrainsMid", 104, 8, 21, 21),
        ("cbd.chunkGrainsHi", 104, 8, 42, 21),
    ],
);

const BCAST: Structure = Structure(
    "ncclDevWorkBcast",
    48,
    &[
        ("ringDepth", 0, 4),
        ("chunkSize", 4, 4),
        ("sendbuff", 8, 8),
        ("recvbuff", 16, 8),
        ("bytes", 24, 8),
        ("bytes_done", 32, 8),
    ],
    &[],
);

const BATCH: &[Row] = &[("offsetBase", 4, 4), ("offsetBitset", 8, 8)];

const V2_32_3: &[Structure] = &[
    Structure(
        "ncclSymkDevWorkArgs",
        336,
        &[
            ("kcomm.devComm.rank", 8, 4),
            ("kcomm.devComm.nRanks", 12, 4),
            ("kcomm.devComm.lsaRank", 20, 4),
            ("kcomm.devComm.lsaSize", 24, 4),
            ("kcomm.devComm.resourceWindow_inlined.lsaFlatBase", 48, 8),
            ("kcomm.devComm.resourceWindow_inlined.stride4G", 56, 4),
            ("kcomm.devComm.lsaBarrier.bufHandle", 80, 4),
            ("kcomm.devComm.lsaBarrier.nBarriers", 84, 4),
            ("kcomm.devComm.abortFlag", 168, 8),
            ("kcomm.lsaLLA2A.bufHandle", 248, 4),
            ("kcomm.lsaLLA2A.nSlots", 252, 4),
            ("kcomm.workStarted", 296, 8),
            ("kcomm.workCompleted", 304, 8),
            ("kcomm.workPhases", 312, 8),
            ("nMaxChannels", 320, 4),
            ("profilerMode", 328, 1),
        ],
        &[],
    ),
    Structure(
        "ncclDevProfilerPhases",
        2560,
        &[("data.counter", 0, 8), ("data.timestamps", 8, 32)],
        &[],
    ),
    Structure(
        "ncclKernelComm",
        96,
        &[
            ("rank", 0, 4),
            ("nRanks", 4, 4),
            ("buffSizes", 16, 12),
            ("p2pChunkSize", 28, 4),
            ("p2pCrossClique", 32, 1),
            ("isAllNvlink", 36, 4),
            ("abortFlag", 48, 8),
            ("rankToLocalRank", 64, 8),
            ("workStarted", 72, 8),
            ("workCompleted", 80, 8),
            ("progressCounters", 88, 8),
        ],
        &[],
    ),
    Structure(
        "ncclKernelCommAndChannels",
        23648,
        &[("channels", 96, 23552)],
        &[],
    ),
    Structure(
        "ncclConnFifo",
        32,
        &[("mode", 0, 4), ("offset", 8, 8), ("size", 16, 8)],
        &[],
    ),
    Structure(
        "ncclDevWorkBatch",
        16,
        BATCH,
        &[
            ("nextJump", 0, 4, 0, 14),
            ("nextExtends", 0, 4, 14, 1),
            ("workType", 0, 4, 15, 2),
            ("funcId", 0, 4, 17, 11),
            ("func", 0, 4, 28, 4),
        ],
    ),
    CHANNEL,
    COLL,
    Structure("ncclDevWorkCollReg", 288, &[], &[]),
    BCAST,
    Structure(
        "ncclProgressCountersBlock",
        768,
        &[
            ("completedWorkCount", 0, 128),
            ("completedTimeNs", 128, 128),
            ("collOpActive", 256, 512),
        ],
        &[],
    ),
];

const OLD_FIFO: Structure = Structure(
    "ncclConnFifo",
    24,
    &[("mode", 0, 4), ("offset", 4, 4), ("size", 8, 8)],
    &[],
);

const OLD_BATCH: Structure = Structure(
    "ncclDevWorkBatch",
    16,
    BATCH,
    &[
        ("nextJump", 0, 4, 0, 14),
        ("nextExtends", 0, 4, 14, 1),
        ("workType", 0, 4, 15, 2),
        ("funcId", 0, 4, 17, 15),
    ],
);

const V2_30_7: &[Structure] = &[
    Structure(
        "ncclSymkDevWorkArgs",
        304,
        &[
            ("kcomm.devComm.rank", 8, 4),
            ("kcomm.devComm.nRanks", 12, 4),
            ("kcomm.devComm.lsaRank", 20, 4),
            ("kcomm.devComm.lsaSize", 24, 4),
            ("kcomm.devComm.resourceWindow_inlined.lsaFlatBase", 56, 8),
            ("kcomm.devComm.resourceWindow_inlined.stride4G", 72, 4),
            ("kcomm.devComm.lsaBarrier.bufHandle", 128, 4),
            ("kcomm.devComm.lsaBarrier.nBarriers", 132, 4),
            ("kcomm.devComm.abortFlag", 208, 8),
            ("kcomm.lsaLLA2A.bufHandle", 240, 4),
            ("kcomm.lsaLLA2A.nSlots", 244, 4),
            ("nMaxChannels", 288, 4),
        ],
        &[],
    ),
    Structure(
        "ncclKernelComm",
        88,
        &[
            ("rank", 0, 4),
            ("nRanks", 4, 4),
            ("buffSizes", 16, 12),
            ("p2pChunkSize", 28, 4),
            ("p2pCrossClique", 32, 1),
            ("isAllNvlink", 36, 4),
            ("abortFlag", 48, 8),
            ("rankToLocalRank", 64, 8),
            ("workStarted", 72, 8),
            ("workCompleted", 80, 8),
        ],
        &[],
    ),
    Structure(
        "ncclKernelCommAndChannels",
        23648,
        &[("channels", 96, 23552)],
        &[],
    ),
    OLD_FIFO,
    OLD_BATCH,
    CHANNEL,
    PADDED_COLL,
    Structure("ncclDevWorkCollReg", 320, &[], &[]),
    BCAST,
];

const V2_27_7: &[Structure] = &[
    Structure(
        "ncclSymDevArgs",
        80,
        &[
            ("comm.base", 0, 8),
            ("comm.stride4G", 16, 4),
            ("comm.nRanks", 20, 4),
            ("comm.rank", 24, 4),
            ("redOpArg", 40, 8),
            ("nElts", 48, 8),
            ("input", 56, 8),
            ("output", 64, 8),
        ],
        &[],
    ),
    Structure(
        "ncclSymDevBase",
        1024,
        &[("llEpoch", 0, 256), ("barEpochUc", 512, 256)],
        &[],
    ),
    Structure(
        "ncclDevComm",
        88,
        &[
            ("rank", 0, 4),
            ("nRanks", 4, 4),
            ("buffSizes", 16, 12),
            ("p2pChunkSize", 28, 4),
            ("isAllNvlink", 32, 4),
            ("abortFlag", 48, 8),
            ("rankToLocalRank", 64, 8),
            ("workStarted", 72, 8),
            ("workCompleted", 80, 8),
        ],
        &[],
    ),
    Structure(
        "ncclDevCommAndChannels",
        23648,
        &[("channels", 96, 23552)],
        &[],
    ),
    OLD_FIFO,
    OLD_BATCH,
    OLD_CHANNEL,
    COLL,
    Structure("ncclDevWorkCollReg", 288, &[], &[]),
];

impl Release {
    fn find(self, ty: &str) -> Result<&'static Structure, Mismatch> {
        let own = match self {
            Self::V2_32_3 => V2_32_3,
            Self::V2_30_7 => V2_30_7,
            Self::V2_27_7 => V2_27_7,
        };
        let symmetric = match self {
            Self::V2_27_7 => &[],
            _ => SYMMETRIC,
        };
        own.iter()
            .chain(COMMON)
            .chain(symmetric)
            .find(|structure| structure.0 == ty)
            .ok_or(Mismatch::NoType { ty: ty.to_owned() })
    }
}

impl Types for Release {
    fn size_of(&self, ty: &str) -> Result<usize, Mismatch> {
        Ok(self.find(ty)?.1)
    }

    fn field(&self, ty: &str, path: &str) -> Result<Field, Mismatch> {
        let structure = self.find(ty)?;
        let bytes = structure.2.iter().find(|row| row.0 == path);
        let bits = structure.3.iter().find(|row| row.0 == path);
        match (bytes, bits) {
            (Some(&(_, offset, size)), _) => Ok(Field {
                offset,
                size,
                bits: None,
            }),
            (_, Some(&(_, offset, size, first, count))) => Ok(Field {
                offset,
                size,
                bits: Some((first, count)),
            }),
            _ => Err(Mismatch::NoField {
                ty: ty.to_owned(),
                path: path.to_owned(),
            }),
        }
    }

    fn enumerator(&self, name: &str) -> Result<i64, Mismatch> {
        Ok(match name {
            "ncclDevWorkTypeP2p" | "ncclDevWorkStorageTypeArgs" => 0,
            "ncclDevWorkTypeColl" => 1,
            "ncclDevWorkTypeCollReg" => 2,
            "ncclDevWorkTypeBcast" if *self != Self::V2_27_7 => 3,
            _ => {
                return Err(Mismatch::NoEnumerator {
                    name: name.to_owned(),
                });
            }
        })
    }
}
