// Generated from nccl.h by `cargo xtask bindings`. Do not edit.

use super::types::*;
use crate::constants::*;
pub const NCCL_CONFIG_INITIALIZER: ncclConfig_t = ncclConfig_t {
    size: size_of::<ncclConfig_t>(),
    magic: NCCL_API_MAGIC,
    version: NCCL_VERSION_CODE as ::core::ffi::c_uint,
    blocking: NCCL_CONFIG_UNDEF_INT,
    cgaClusterSize: NCCL_CONFIG_UNDEF_INT,
    minCTAs: NCCL_CONFIG_UNDEF_INT,
    maxCTAs: NCCL_CONFIG_UNDEF_INT,
    netName: core::ptr::null(),
    splitShare: NCCL_CONFIG_UNDEF_INT,
    trafficClass: NCCL_CONFIG_UNDEF_INT,
    commName: core::ptr::null(),
    collnetEnable: NCCL_CONFIG_UNDEF_INT,
    CTAPolicy: NCCL_CONFIG_UNDEF_INT,
    shrinkShare: NCCL_CONFIG_UNDEF_INT,
    nvlsCTAs: NCCL_CONFIG_UNDEF_INT,
    nChannelsPerNetPeer: NCCL_CONFIG_UNDEF_INT,
    nvlinkCentricSched: NCCL_CONFIG_UNDEF_INT,
    graphUsageMode: NCCL_CONFIG_UNDEF_INT,
    numRmaCtx: NCCL_CONFIG_UNDEF_INT,
    maxP2pPeers: NCCL_CONFIG_UNDEF_INT,
    graphStreamOrdering: NCCL_CONFIG_UNDEF_INT,
    launchOrderImplicit: NCCL_CONFIG_UNDEF_INT,
    numRmaSig: NCCL_CONFIG_UNDEF_INT,
    rmaEagerInit: NCCL_CONFIG_UNDEF_INT,
    hostCftMode: NCCL_CONFIG_UNDEF_INT,
    nvlsHostMode: NCCL_CONFIG_UNDEF_INT,
};
impl Default for ncclConfig_t {
    fn default() -> Self {
        NCCL_CONFIG_INITIALIZER
    }
}
pub const NCCL_COLLCONFIG_INITIALIZER: ncclCollConfig_t = ncclCollConfig_t {
    size: size_of::<ncclCollConfig_t>(),
    magic: NCCL_API_MAGIC,
    version: NCCL_VERSION_CODE as ::core::ffi::c_uint,
    ext: core::ptr::null_mut(),
    minCTAs: NCCL_CONFIG_UNDEF_INT,
    maxCTAs: NCCL_CONFIG_UNDEF_INT,
    nvlsCTAs: NCCL_CONFIG_UNDEF_INT,
    cgaClusterSize: NCCL_CONFIG_UNDEF_INT,
    algSelection: core::ptr::null(),
    forceAlgSelection: 1,
    CTAPolicy: NCCL_CONFIG_UNDEF_INT,
    userProfilerTag: 0,
    launchCompletionEvent: core::ptr::null_mut(),
};
impl Default for ncclCollConfig_t {
    fn default() -> Self {
        NCCL_COLLCONFIG_INITIALIZER
    }
}
pub const NCCL_SIM_INFO_INITIALIZER: ncclSimInfo_t = ncclSimInfo_t {
    size: size_of::<ncclSimInfo_t>(),
    magic: 0x74685283,
    version: NCCL_VERSION_CODE as ::core::ffi::c_uint,
    estimatedTime: NCCL_UNDEF_FLOAT,
};
impl Default for ncclSimInfo_t {
    fn default() -> Self {
        NCCL_SIM_INFO_INITIALIZER
    }
}
pub const NCCL_ENCRYPTION_CONFIG_INITIALIZER: ncclEncryptionConfig_t = ncclEncryptionConfig_t {
    size: size_of::<ncclEncryptionConfig_t>(),
    magic: NCCL_API_MAGIC,
    version: NCCL_VERSION_CODE as ::core::ffi::c_uint,
    mode: ncclEncryptionMode_t::NCCL_ENCRYPTION_MODE_NONE.0 as ::core::ffi::c_int,
    psk: core::ptr::null(),
};
impl Default for ncclEncryptionConfig_t {
    fn default() -> Self {
        NCCL_ENCRYPTION_CONFIG_INITIALIZER
    }
}
pub const NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER: ncclDevCommRequirements_t = ncclDevCommRequirements_t {
    size: size_of::<ncclDevCommRequirements_t>(),
    magic: NCCL_API_MAGIC,
    version: NCCL_VERSION_CODE as ::core::ffi::c_uint,
    resourceRequirementsList: core::ptr::null_mut(),
    teamRequirementsList: core::ptr::null_mut(),
    lsaMultimem: false,
    barrierCount: 0,
    lsaBarrierCount: 0,
    railGinBarrierCount: 0,
    lsaLLA2ABlockCount: 0,
    lsaLLA2ASlotCount: 0,
    ginForceEnable: false,
    ginContextCount: 4,
    ginSignalCount: 0,
    ginCounterCount: 0,
    ginConnectionType: ncclGinConnectionType_t::NCCL_GIN_CONNECTION_NONE,
    ginExclusiveContexts: false,
    ginQueueDepth: 0,
    ginTrafficClass: NCCL_CONFIG_UNDEF_INT,
    worldGinBarrierCount: 0,
    ginStrongSignalsRequired: true,
    ginVaSignalsRequired: true,
    ginCustomStride: 1,
    ginType: ncclGinType_t::NCCL_GIN_TYPE_NONE,
    useRuntimeVersion: false,
    cftCaps: ncclCftCap_t::NCCL_CFT_NONE.0 as ::core::ffi::c_int,
    cftBarrierCount: 0,
};
impl Default for ncclDevCommRequirements_t {
    fn default() -> Self {
        NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER
    }
}
pub const NCCL_COMM_PROPERTIES_INITIALIZER: ncclCommProperties_t = ncclCommProperties_t {
    size: size_of::<ncclCommProperties_t>(),
    magic: NCCL_API_MAGIC,
    version: NCCL_VERSION_CODE as ::core::ffi::c_uint,
    rank: 0,
    nRanks: 0,
    cudaDev: 0,
    nvmlDev: 0,
    deviceApiSupport: false,
    multimemSupport: false,
    ginType: ncclGinType_t(0),
    nLsaTeams: 0,
    hostRmaSupport: false,
    railedGinType: ncclGinType_t(0),
    commHash: 0,
    ginMinStride: 0,
    ginConnectionType: ncclGinConnectionType_t(0),
    ginSupport: [false; 64usize],
    devCommRuntimeVersionSize: 0,
    cftSupport: false,
    cftMulticastSupport: false,
    cftCountedSupport: false,
};
impl Default for ncclCommProperties_t {
    fn default() -> Self {
        NCCL_COMM_PROPERTIES_INITIALIZER
    }
}
