// Generated from nccl.h by `cargo xtask bindings`. Do not edit.

pub const NCCL_MAJOR: i32 = 2;
pub const NCCL_MINOR: i32 = 32;
pub const NCCL_PATCH: i32 = 3;
pub const NCCL_SUFFIX: &::core::ffi::CStr = c"";
pub const NCCL_VERSION_CODE: i32 = 23203;
pub const NCCL_UNIQUE_ID_BYTES: usize = 128;
pub const NCCL_SPLIT_NOCOLOR: i32 = -1;
pub const NCCL_API_MAGIC: u32 = 3405692655;
pub const NCCL_WIN_DEFAULT: i32 = 0;
pub const NCCL_WIN_COLL_SYMMETRIC: i32 = 1;
pub const NCCL_WIN_STRICT_ORDERING: i32 = 2;
pub const NCCL_WIN_GIN_ONLY: i32 = 4;
pub const NCCL_WIN_CFT_COUNTED: i32 = 8;
pub const NCCL_WIN_REQUIRED_ALIGNMENT: usize = 4096;
pub const NCCL_CTA_POLICY_DEFAULT: i32 = 0;
pub const NCCL_CTA_POLICY_EFFICIENCY: i32 = 1;
pub const NCCL_CTA_POLICY_ZERO: i32 = 2;
pub const NCCL_SHRINK_DEFAULT: i32 = 0;
pub const NCCL_SHRINK_ABORT: i32 = 1;
pub const NCCL_REVOKE_DEFAULT: i32 = 0;
pub const NCCL_SUSPEND_MEM: i32 = 1;
pub const NCCL_GIN_MAX_ACTIVE_BACKENDS: i32 = 4;
pub const NCCL_NET_DEVICE_INVALID_VERSION: i32 = 0;
pub const NCCL_NET_MTU_SIZE: i32 = 4096;
pub const NCCL_NET_DEVICE_UNPACK_VERSION: i32 = 7;
pub const NCCL_GIN_MAX_CONNECTIONS: i32 = 4;
pub const NCCL_GIN_PROXY_ENABLE: i32 = 1;
pub const NCCL_GIN_GPI_ENABLE: i32 = 0;
pub const NCCL_GIN_GDAKI_ENABLE: i32 = 0;
pub const NCCL_GIN_EFA_GDA_ENABLE: i32 = 0;
pub const NCCL_CFT_BARRIER_ALIGN: i32 = 16;
pub const NCCL_CFT_BARRIER_GRAN: i32 = 16;
#[repr(C)]
#[derive(Debug)]
pub struct CUstream_st {
    _unused: [u8; 0],
}
pub type cudaStream_t = *mut CUstream_st;
#[repr(C)]
#[derive(Debug)]
pub struct CUevent_st {
    _unused: [u8; 0],
}
pub type cudaEvent_t = *mut CUevent_st;
#[repr(C)]
#[derive(Debug)]
pub struct ncclComm {
    _unused: [u8; 0],
}
pub type ncclComm_t = *mut ncclComm;
pub type ncclWindow_t = *mut ncclWindow_vidmem;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclUniqueId {
    pub internal: [::core::ffi::c_char; 128usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ncclUniqueId"][::core::mem::size_of::<ncclUniqueId>() - 128usize];
    ["Alignment of ncclUniqueId"][::core::mem::align_of::<ncclUniqueId>() - 1usize];
    [
        "Offset of field: ncclUniqueId::internal",
    ][::core::mem::offset_of!(ncclUniqueId, internal) - 0usize];
};
impl ncclResult_t {
    pub const ncclSuccess: ncclResult_t = ncclResult_t(0);
    pub const ncclUnhandledCudaError: ncclResult_t = ncclResult_t(1);
    pub const ncclSystemError: ncclResult_t = ncclResult_t(2);
    pub const ncclInternalError: ncclResult_t = ncclResult_t(3);
    pub const ncclInvalidArgument: ncclResult_t = ncclResult_t(4);
    pub const ncclInvalidUsage: ncclResult_t = ncclResult_t(5);
    pub const ncclRemoteError: ncclResult_t = ncclResult_t(6);
    pub const ncclInProgress: ncclResult_t = ncclResult_t(7);
    pub const ncclTimeout: ncclResult_t = ncclResult_t(8);
    pub const ncclNumResults: ncclResult_t = ncclResult_t(9);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclResult_t(pub ::core::ffi::c_uint);
impl ncclHostCftMode_t {
    pub const ncclHostCftDefault: ncclHostCftMode_t = ncclHostCftMode_t(-2147483648);
    pub const ncclHostCftEnable: ncclHostCftMode_t = ncclHostCftMode_t(1);
    pub const ncclHostCftDisable: ncclHostCftMode_t = ncclHostCftMode_t(2);
    pub const ncclHostCftFallback: ncclHostCftMode_t = ncclHostCftMode_t(3);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclHostCftMode_t(pub ::core::ffi::c_int);
impl ncclNvlsHostMode_t {
    pub const ncclNvlsHostModeDefault: ncclNvlsHostMode_t = ncclNvlsHostMode_t(
        -2147483648,
    );
    pub const ncclNvlsHostModeEnable: ncclNvlsHostMode_t = ncclNvlsHostMode_t(0);
    pub const ncclNvlsHostModeDisableTransport: ncclNvlsHostMode_t = ncclNvlsHostMode_t(
        1,
    );
    pub const ncclNvlsHostModeDisableSymmetricMultimem: ncclNvlsHostMode_t = ncclNvlsHostMode_t(
        2,
    );
    pub const ncclNvlsHostModeDisable: ncclNvlsHostMode_t = ncclNvlsHostMode_t(
        2147483647,
    );
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclNvlsHostMode_t(pub ::core::ffi::c_int);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclConfig_v23100 {
    pub size: usize,
    pub magic: ::core::ffi::c_uint,
    pub version: ::core::ffi::c_uint,
    pub blocking: ::core::ffi::c_int,
    pub cgaClusterSize: ::core::ffi::c_int,
    pub minCTAs: ::core::ffi::c_int,
    pub maxCTAs: ::core::ffi::c_int,
    pub netName: *const ::core::ffi::c_char,
    pub splitShare: ::core::ffi::c_int,
    pub trafficClass: ::core::ffi::c_int,
    pub commName: *const ::core::ffi::c_char,
    pub collnetEnable: ::core::ffi::c_int,
    pub CTAPolicy: ::core::ffi::c_int,
    pub shrinkShare: ::core::ffi::c_int,
    pub nvlsCTAs: ::core::ffi::c_int,
    pub nChannelsPerNetPeer: ::core::ffi::c_int,
    pub nvlinkCentricSched: ::core::ffi::c_int,
    pub graphUsageMode: ::core::ffi::c_int,
    pub numRmaCtx: ::core::ffi::c_int,
    pub maxP2pPeers: ::core::ffi::c_int,
    pub graphStreamOrdering: ::core::ffi::c_int,
    pub launchOrderImplicit: ::core::ffi::c_int,
    pub numRmaSig: ::core::ffi::c_int,
    pub rmaEagerInit: ::core::ffi::c_int,
    pub hostCftMode: ::core::ffi::c_int,
    pub nvlsHostMode: ::core::ffi::c_int,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclConfig_v23100",
    ][::core::mem::size_of::<ncclConfig_v23100>() - 120usize];
    [
        "Alignment of ncclConfig_v23100",
    ][::core::mem::align_of::<ncclConfig_v23100>() - 8usize];
    [
        "Offset of field: ncclConfig_v23100::size",
    ][::core::mem::offset_of!(ncclConfig_v23100, size) - 0usize];
    [
        "Offset of field: ncclConfig_v23100::magic",
    ][::core::mem::offset_of!(ncclConfig_v23100, magic) - 8usize];
    [
        "Offset of field: ncclConfig_v23100::version",
    ][::core::mem::offset_of!(ncclConfig_v23100, version) - 12usize];
    [
        "Offset of field: ncclConfig_v23100::blocking",
    ][::core::mem::offset_of!(ncclConfig_v23100, blocking) - 16usize];
    [
        "Offset of field: ncclConfig_v23100::cgaClusterSize",
    ][::core::mem::offset_of!(ncclConfig_v23100, cgaClusterSize) - 20usize];
    [
        "Offset of field: ncclConfig_v23100::minCTAs",
    ][::core::mem::offset_of!(ncclConfig_v23100, minCTAs) - 24usize];
    [
        "Offset of field: ncclConfig_v23100::maxCTAs",
    ][::core::mem::offset_of!(ncclConfig_v23100, maxCTAs) - 28usize];
    [
        "Offset of field: ncclConfig_v23100::netName",
    ][::core::mem::offset_of!(ncclConfig_v23100, netName) - 32usize];
    [
        "Offset of field: ncclConfig_v23100::splitShare",
    ][::core::mem::offset_of!(ncclConfig_v23100, splitShare) - 40usize];
    [
        "Offset of field: ncclConfig_v23100::trafficClass",
    ][::core::mem::offset_of!(ncclConfig_v23100, trafficClass) - 44usize];
    [
        "Offset of field: ncclConfig_v23100::commName",
    ][::core::mem::offset_of!(ncclConfig_v23100, commName) - 48usize];
    [
        "Offset of field: ncclConfig_v23100::collnetEnable",
    ][::core::mem::offset_of!(ncclConfig_v23100, collnetEnable) - 56usize];
    [
        "Offset of field: ncclConfig_v23100::CTAPolicy",
    ][::core::mem::offset_of!(ncclConfig_v23100, CTAPolicy) - 60usize];
    [
        "Offset of field: ncclConfig_v23100::shrinkShare",
    ][::core::mem::offset_of!(ncclConfig_v23100, shrinkShare) - 64usize];
    [
        "Offset of field: ncclConfig_v23100::nvlsCTAs",
    ][::core::mem::offset_of!(ncclConfig_v23100, nvlsCTAs) - 68usize];
    [
        "Offset of field: ncclConfig_v23100::nChannelsPerNetPeer",
    ][::core::mem::offset_of!(ncclConfig_v23100, nChannelsPerNetPeer) - 72usize];
    [
        "Offset of field: ncclConfig_v23100::nvlinkCentricSched",
    ][::core::mem::offset_of!(ncclConfig_v23100, nvlinkCentricSched) - 76usize];
    [
        "Offset of field: ncclConfig_v23100::graphUsageMode",
    ][::core::mem::offset_of!(ncclConfig_v23100, graphUsageMode) - 80usize];
    [
        "Offset of field: ncclConfig_v23100::numRmaCtx",
    ][::core::mem::offset_of!(ncclConfig_v23100, numRmaCtx) - 84usize];
    [
        "Offset of field: ncclConfig_v23100::maxP2pPeers",
    ][::core::mem::offset_of!(ncclConfig_v23100, maxP2pPeers) - 88usize];
    [
        "Offset of field: ncclConfig_v23100::graphStreamOrdering",
    ][::core::mem::offset_of!(ncclConfig_v23100, graphStreamOrdering) - 92usize];
    [
        "Offset of field: ncclConfig_v23100::launchOrderImplicit",
    ][::core::mem::offset_of!(ncclConfig_v23100, launchOrderImplicit) - 96usize];
    [
        "Offset of field: ncclConfig_v23100::numRmaSig",
    ][::core::mem::offset_of!(ncclConfig_v23100, numRmaSig) - 100usize];
    [
        "Offset of field: ncclConfig_v23100::rmaEagerInit",
    ][::core::mem::offset_of!(ncclConfig_v23100, rmaEagerInit) - 104usize];
    [
        "Offset of field: ncclConfig_v23100::hostCftMode",
    ][::core::mem::offset_of!(ncclConfig_v23100, hostCftMode) - 108usize];
    [
        "Offset of field: ncclConfig_v23100::nvlsHostMode",
    ][::core::mem::offset_of!(ncclConfig_v23100, nvlsHostMode) - 112usize];
};
pub type ncclConfig_t = ncclConfig_v23100;
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ncclConfigExt {
    pub next: *mut ncclConfigExt,
    pub key: ncclConfigExt__bindgen_ty_1,
    pub val: ncclConfigExt__bindgen_ty_2,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclConfigExt__bindgen_ty_1 {
    pub vendorId: ::core::ffi::c_int,
    pub optionId: ::core::ffi::c_int,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclConfigExt__bindgen_ty_1",
    ][::core::mem::size_of::<ncclConfigExt__bindgen_ty_1>() - 8usize];
    [
        "Alignment of ncclConfigExt__bindgen_ty_1",
    ][::core::mem::align_of::<ncclConfigExt__bindgen_ty_1>() - 4usize];
    [
        "Offset of field: ncclConfigExt__bindgen_ty_1::vendorId",
    ][::core::mem::offset_of!(ncclConfigExt__bindgen_ty_1, vendorId) - 0usize];
    [
        "Offset of field: ncclConfigExt__bindgen_ty_1::optionId",
    ][::core::mem::offset_of!(ncclConfigExt__bindgen_ty_1, optionId) - 4usize];
};
#[repr(C)]
#[derive(Copy, Clone)]
pub union ncclConfigExt__bindgen_ty_2 {
    pub i: ::core::ffi::c_int,
    pub s: *const ::core::ffi::c_char,
    pub raw: *mut ::core::ffi::c_void,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclConfigExt__bindgen_ty_2",
    ][::core::mem::size_of::<ncclConfigExt__bindgen_ty_2>() - 8usize];
    [
        "Alignment of ncclConfigExt__bindgen_ty_2",
    ][::core::mem::align_of::<ncclConfigExt__bindgen_ty_2>() - 8usize];
    [
        "Offset of field: ncclConfigExt__bindgen_ty_2::i",
    ][::core::mem::offset_of!(ncclConfigExt__bindgen_ty_2, i) - 0usize];
    [
        "Offset of field: ncclConfigExt__bindgen_ty_2::s",
    ][::core::mem::offset_of!(ncclConfigExt__bindgen_ty_2, s) - 0usize];
    [
        "Offset of field: ncclConfigExt__bindgen_ty_2::raw",
    ][::core::mem::offset_of!(ncclConfigExt__bindgen_ty_2, raw) - 0usize];
};
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ncclConfigExt"][::core::mem::size_of::<ncclConfigExt>() - 24usize];
    ["Alignment of ncclConfigExt"][::core::mem::align_of::<ncclConfigExt>() - 8usize];
    [
        "Offset of field: ncclConfigExt::next",
    ][::core::mem::offset_of!(ncclConfigExt, next) - 0usize];
    [
        "Offset of field: ncclConfigExt::key",
    ][::core::mem::offset_of!(ncclConfigExt, key) - 8usize];
    [
        "Offset of field: ncclConfigExt::val",
    ][::core::mem::offset_of!(ncclConfigExt, val) - 16usize];
};
pub type ncclConfigExt_t = ncclConfigExt;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclCollConfig_v23200 {
    pub size: usize,
    pub magic: ::core::ffi::c_uint,
    pub version: ::core::ffi::c_uint,
    pub ext: *mut ncclConfigExt_t,
    pub minCTAs: ::core::ffi::c_int,
    pub maxCTAs: ::core::ffi::c_int,
    pub nvlsCTAs: ::core::ffi::c_int,
    pub cgaClusterSize: ::core::ffi::c_int,
    pub algSelection: *const ::core::ffi::c_char,
    pub forceAlgSelection: ::core::ffi::c_int,
    pub CTAPolicy: ::core::ffi::c_int,
    pub userProfilerTag: u64,
    pub launchCompletionEvent: cudaEvent_t,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclCollConfig_v23200",
    ][::core::mem::size_of::<ncclCollConfig_v23200>() - 72usize];
    [
        "Alignment of ncclCollConfig_v23200",
    ][::core::mem::align_of::<ncclCollConfig_v23200>() - 8usize];
    [
        "Offset of field: ncclCollConfig_v23200::size",
    ][::core::mem::offset_of!(ncclCollConfig_v23200, size) - 0usize];
    [
        "Offset of field: ncclCollConfig_v23200::magic",
    ][::core::mem::offset_of!(ncclCollConfig_v23200, magic) - 8usize];
    [
        "Offset of field: ncclCollConfig_v23200::version",
    ][::core::mem::offset_of!(ncclCollConfig_v23200, version) - 12usize];
    [
        "Offset of field: ncclCollConfig_v23200::ext",
    ][::core::mem::offset_of!(ncclCollConfig_v23200, ext) - 16usize];
    [
        "Offset of field: ncclCollConfig_v23200::minCTAs",
    ][::core::mem::offset_of!(ncclCollConfig_v23200, minCTAs) - 24usize];
    [
        "Offset of field: ncclCollConfig_v23200::maxCTAs",
    ][::core::mem::offset_of!(ncclCollConfig_v23200, maxCTAs) - 28usize];
    [
        "Offset of field: ncclCollConfig_v23200::nvlsCTAs",
    ][::core::mem::offset_of!(ncclCollConfig_v23200, nvlsCTAs) - 32usize];
    [
        "Offset of field: ncclCollConfig_v23200::cgaClusterSize",
    ][::core::mem::offset_of!(ncclCollConfig_v23200, cgaClusterSize) - 36usize];
    [
        "Offset of field: ncclCollConfig_v23200::algSelection",
    ][::core::mem::offset_of!(ncclCollConfig_v23200, algSelection) - 40usize];
    [
        "Offset of field: ncclCollConfig_v23200::forceAlgSelection",
    ][::core::mem::offset_of!(ncclCollConfig_v23200, forceAlgSelection) - 48usize];
    [
        "Offset of field: ncclCollConfig_v23200::CTAPolicy",
    ][::core::mem::offset_of!(ncclCollConfig_v23200, CTAPolicy) - 52usize];
    [
        "Offset of field: ncclCollConfig_v23200::userProfilerTag",
    ][::core::mem::offset_of!(ncclCollConfig_v23200, userProfilerTag) - 56usize];
    [
        "Offset of field: ncclCollConfig_v23200::launchCompletionEvent",
    ][::core::mem::offset_of!(ncclCollConfig_v23200, launchCompletionEvent) - 64usize];
};
pub type ncclCollConfig_t = ncclCollConfig_v23200;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclSimInfo_v22200 {
    pub size: usize,
    pub magic: ::core::ffi::c_uint,
    pub version: ::core::ffi::c_uint,
    pub estimatedTime: f32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclSimInfo_v22200",
    ][::core::mem::size_of::<ncclSimInfo_v22200>() - 24usize];
    [
        "Alignment of ncclSimInfo_v22200",
    ][::core::mem::align_of::<ncclSimInfo_v22200>() - 8usize];
    [
        "Offset of field: ncclSimInfo_v22200::size",
    ][::core::mem::offset_of!(ncclSimInfo_v22200, size) - 0usize];
    [
        "Offset of field: ncclSimInfo_v22200::magic",
    ][::core::mem::offset_of!(ncclSimInfo_v22200, magic) - 8usize];
    [
        "Offset of field: ncclSimInfo_v22200::version",
    ][::core::mem::offset_of!(ncclSimInfo_v22200, version) - 12usize];
    [
        "Offset of field: ncclSimInfo_v22200::estimatedTime",
    ][::core::mem::offset_of!(ncclSimInfo_v22200, estimatedTime) - 16usize];
};
pub type ncclSimInfo_t = ncclSimInfo_v22200;
impl ncclCommMemStat_t {
    pub const ncclStatGpuMemSuspend: ncclCommMemStat_t = ncclCommMemStat_t(0);
    pub const ncclStatGpuMemSuspended: ncclCommMemStat_t = ncclCommMemStat_t(1);
    pub const ncclStatGpuMemPersist: ncclCommMemStat_t = ncclCommMemStat_t(2);
    pub const ncclStatGpuMemTotal: ncclCommMemStat_t = ncclCommMemStat_t(3);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclCommMemStat_t(pub ::core::ffi::c_uint);
impl ncclRedOp_t {
    pub const ncclSum: ncclRedOp_t = ncclRedOp_t(0);
    pub const ncclProd: ncclRedOp_t = ncclRedOp_t(1);
    pub const ncclMax: ncclRedOp_t = ncclRedOp_t(2);
    pub const ncclMin: ncclRedOp_t = ncclRedOp_t(3);
    pub const ncclAvg: ncclRedOp_t = ncclRedOp_t(4);
    pub const ncclNumOps: ncclRedOp_t = ncclRedOp_t(5);
    pub const ncclMaxRedOp: ncclRedOp_t = ncclRedOp_t(2147483647);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclRedOp_t(pub ::core::ffi::c_uint);
impl ncclDataType_t {
    pub const ncclInt8: ncclDataType_t = ncclDataType_t(0);
    pub const ncclChar: ncclDataType_t = ncclDataType_t(0);
    pub const ncclUint8: ncclDataType_t = ncclDataType_t(1);
    pub const ncclInt32: ncclDataType_t = ncclDataType_t(2);
    pub const ncclInt: ncclDataType_t = ncclDataType_t(2);
    pub const ncclUint32: ncclDataType_t = ncclDataType_t(3);
    pub const ncclInt64: ncclDataType_t = ncclDataType_t(4);
    pub const ncclUint64: ncclDataType_t = ncclDataType_t(5);
    pub const ncclFloat16: ncclDataType_t = ncclDataType_t(6);
    pub const ncclHalf: ncclDataType_t = ncclDataType_t(6);
    pub const ncclFloat32: ncclDataType_t = ncclDataType_t(7);
    pub const ncclFloat: ncclDataType_t = ncclDataType_t(7);
    pub const ncclFloat64: ncclDataType_t = ncclDataType_t(8);
    pub const ncclDouble: ncclDataType_t = ncclDataType_t(8);
    pub const ncclBfloat16: ncclDataType_t = ncclDataType_t(9);
    pub const ncclFloat8e4m3: ncclDataType_t = ncclDataType_t(10);
    pub const ncclFloat8e5m2: ncclDataType_t = ncclDataType_t(11);
    pub const ncclNumTypes: ncclDataType_t = ncclDataType_t(12);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclDataType_t(pub ::core::ffi::c_uint);
impl ncclScalarResidence_t {
    pub const ncclScalarDevice: ncclScalarResidence_t = ncclScalarResidence_t(0);
    pub const ncclScalarHostImmediate: ncclScalarResidence_t = ncclScalarResidence_t(1);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclScalarResidence_t(pub ::core::ffi::c_uint);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclWaitSignalDesc_t {
    pub opCnt: ::core::ffi::c_int,
    pub peer: ::core::ffi::c_int,
    pub sigIdx: ::core::ffi::c_int,
    pub ctx: ::core::ffi::c_int,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclWaitSignalDesc_t",
    ][::core::mem::size_of::<ncclWaitSignalDesc_t>() - 16usize];
    [
        "Alignment of ncclWaitSignalDesc_t",
    ][::core::mem::align_of::<ncclWaitSignalDesc_t>() - 4usize];
    [
        "Offset of field: ncclWaitSignalDesc_t::opCnt",
    ][::core::mem::offset_of!(ncclWaitSignalDesc_t, opCnt) - 0usize];
    [
        "Offset of field: ncclWaitSignalDesc_t::peer",
    ][::core::mem::offset_of!(ncclWaitSignalDesc_t, peer) - 4usize];
    [
        "Offset of field: ncclWaitSignalDesc_t::sigIdx",
    ][::core::mem::offset_of!(ncclWaitSignalDesc_t, sigIdx) - 8usize];
    [
        "Offset of field: ncclWaitSignalDesc_t::ctx",
    ][::core::mem::offset_of!(ncclWaitSignalDesc_t, ctx) - 12usize];
};
impl ncclEncryptionMode_t {
    pub const NCCL_ENCRYPTION_MODE_NONE: ncclEncryptionMode_t = ncclEncryptionMode_t(0);
    pub const NCCL_ENCRYPTION_MODE_PSK: ncclEncryptionMode_t = ncclEncryptionMode_t(1);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclEncryptionMode_t(pub ::core::ffi::c_uint);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclEncryptionConfig_v23200 {
    pub size: usize,
    pub magic: ::core::ffi::c_uint,
    pub version: ::core::ffi::c_uint,
    pub mode: ::core::ffi::c_int,
    pub psk: *const ::core::ffi::c_char,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclEncryptionConfig_v23200",
    ][::core::mem::size_of::<ncclEncryptionConfig_v23200>() - 32usize];
    [
        "Alignment of ncclEncryptionConfig_v23200",
    ][::core::mem::align_of::<ncclEncryptionConfig_v23200>() - 8usize];
    [
        "Offset of field: ncclEncryptionConfig_v23200::size",
    ][::core::mem::offset_of!(ncclEncryptionConfig_v23200, size) - 0usize];
    [
        "Offset of field: ncclEncryptionConfig_v23200::magic",
    ][::core::mem::offset_of!(ncclEncryptionConfig_v23200, magic) - 8usize];
    [
        "Offset of field: ncclEncryptionConfig_v23200::version",
    ][::core::mem::offset_of!(ncclEncryptionConfig_v23200, version) - 12usize];
    [
        "Offset of field: ncclEncryptionConfig_v23200::mode",
    ][::core::mem::offset_of!(ncclEncryptionConfig_v23200, mode) - 16usize];
    [
        "Offset of field: ncclEncryptionConfig_v23200::psk",
    ][::core::mem::offset_of!(ncclEncryptionConfig_v23200, psk) - 24usize];
};
pub type ncclEncryptionConfig_t = ncclEncryptionConfig_v23200;
#[repr(C)]
#[derive(Debug)]
pub struct ncclParamHandle {
    _unused: [u8; 0],
}
pub type ncclParamHandle_t = *mut ncclParamHandle;
pub type ncclDevComm_t = ncclDevComm;
pub type ncclTeam_t = ncclTeam;
pub type ncclWindow_vidmem_t = ncclWindow_vidmem;
pub type ncclMultimemHandle_t = ncclMultimemHandle;
pub type ncclDevResourceHandle = u32;
pub type ncclDevResourceHandle_t = ncclDevResourceHandle;
pub type ncclGinSignal_t = u32;
pub type ncclGinCounter_t = u32;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclGinRequest_t {
    pub opaque: [u64; 2usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ncclGinRequest_t"][::core::mem::size_of::<ncclGinRequest_t>() - 16usize];
    [
        "Alignment of ncclGinRequest_t",
    ][::core::mem::align_of::<ncclGinRequest_t>() - 8usize];
    [
        "Offset of field: ncclGinRequest_t::opaque",
    ][::core::mem::offset_of!(ncclGinRequest_t, opaque) - 0usize];
};
pub type ncclLsaBarrierHandle_t = ncclLsaBarrierHandle;
pub type ncclGinBarrierHandle_t = ncclGinBarrierHandle;
pub type ncclCftBarrierHandle_t = ncclCftBarrierHandle;
pub type ncclLLA2AHandle_t = ncclLLA2AHandle;
pub type ncclCftLeId = u32;
pub type ncclCftLeId_t = ncclCftLeId;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclTeam {
    pub nRanks: ::core::ffi::c_int,
    pub rank: ::core::ffi::c_int,
    pub stride: ::core::ffi::c_int,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ncclTeam"][::core::mem::size_of::<ncclTeam>() - 12usize];
    ["Alignment of ncclTeam"][::core::mem::align_of::<ncclTeam>() - 4usize];
    [
        "Offset of field: ncclTeam::nRanks",
    ][::core::mem::offset_of!(ncclTeam, nRanks) - 0usize];
    [
        "Offset of field: ncclTeam::rank",
    ][::core::mem::offset_of!(ncclTeam, rank) - 4usize];
    [
        "Offset of field: ncclTeam::stride",
    ][::core::mem::offset_of!(ncclTeam, stride) - 8usize];
};
impl ncclGinConnectionType_t {
    pub const NCCL_GIN_CONNECTION_NONE: ncclGinConnectionType_t = ncclGinConnectionType_t(
        0,
    );
    pub const NCCL_GIN_CONNECTION_FULL: ncclGinConnectionType_t = ncclGinConnectionType_t(
        1,
    );
    pub const NCCL_GIN_CONNECTION_RAIL: ncclGinConnectionType_t = ncclGinConnectionType_t(
        2,
    );
    pub const NCCL_GIN_CONNECTION_CUSTOM_STRIDE: ncclGinConnectionType_t = ncclGinConnectionType_t(
        3,
    );
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclGinConnectionType_t(pub ::core::ffi::c_uint);
impl ncclGinType_t {
    pub const NCCL_GIN_TYPE_NONE: ncclGinType_t = ncclGinType_t(0);
    pub const NCCL_GIN_TYPE_PROXY: ncclGinType_t = ncclGinType_t(2);
    pub const NCCL_GIN_TYPE_GDAKI: ncclGinType_t = ncclGinType_t(3);
    pub const NCCL_GIN_TYPE_GPI: ncclGinType_t = ncclGinType_t(4);
    pub const NCCL_GIN_TYPE_EFA_GDA: ncclGinType_t = ncclGinType_t(5);
    pub const NCCL_GIN_MAX_TYPES: ncclGinType_t = ncclGinType_t(6);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclGinType_t(pub ::core::ffi::c_uint);
impl ncclCftTeamMode_t {
    pub const NCCL_CFT_TEAM_FLAT: ncclCftTeamMode_t = ncclCftTeamMode_t(0);
    pub const NCCL_CFT_TEAM_HIER_MULTIMEM: ncclCftTeamMode_t = ncclCftTeamMode_t(1);
    pub const NCCL_CFT_TEAM_HIER_LSA: ncclCftTeamMode_t = ncclCftTeamMode_t(2);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclCftTeamMode_t(pub ::core::ffi::c_uint);
impl ncclCftCap_t {
    pub const NCCL_CFT_NONE: ncclCftCap_t = ncclCftCap_t(0);
    pub const NCCL_CFT: ncclCftCap_t = ncclCftCap_t(1);
    pub const NCCL_CFT_MULTIMEM: ncclCftCap_t = ncclCftCap_t(2);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclCftCap_t(pub ::core::ffi::c_uint);
pub type CUmemLocationType = ::core::ffi::c_uint;
impl ncclNetDeviceType {
    pub const NCCL_NET_DEVICE_HOST: ncclNetDeviceType = ncclNetDeviceType(0);
    pub const NCCL_NET_DEVICE_UNPACK: ncclNetDeviceType = ncclNetDeviceType(1);
    pub const NCCL_NET_DEVICE_GIN_PROXY: ncclNetDeviceType = ncclNetDeviceType(2);
    pub const NCCL_NET_DEVICE_GIN_GDAKI: ncclNetDeviceType = ncclNetDeviceType(3);
    pub const NCCL_NET_DEVICE_GIN_GPI: ncclNetDeviceType = ncclNetDeviceType(4);
    pub const NCCL_NET_DEVICE_GIN_EFA_GDA: ncclNetDeviceType = ncclNetDeviceType(5);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclNetDeviceType(pub ::core::ffi::c_uint);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclNetDeviceHandle_v7_t {
    pub netDeviceType: ncclNetDeviceType,
    pub netDeviceVersion: ::core::ffi::c_int,
    pub handle: *mut ::core::ffi::c_void,
    pub size: usize,
    pub needsProxyProgress: ::core::ffi::c_int,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclNetDeviceHandle_v7_t",
    ][::core::mem::size_of::<ncclNetDeviceHandle_v7_t>() - 32usize];
    [
        "Alignment of ncclNetDeviceHandle_v7_t",
    ][::core::mem::align_of::<ncclNetDeviceHandle_v7_t>() - 8usize];
    [
        "Offset of field: ncclNetDeviceHandle_v7_t::netDeviceType",
    ][::core::mem::offset_of!(ncclNetDeviceHandle_v7_t, netDeviceType) - 0usize];
    [
        "Offset of field: ncclNetDeviceHandle_v7_t::netDeviceVersion",
    ][::core::mem::offset_of!(ncclNetDeviceHandle_v7_t, netDeviceVersion) - 4usize];
    [
        "Offset of field: ncclNetDeviceHandle_v7_t::handle",
    ][::core::mem::offset_of!(ncclNetDeviceHandle_v7_t, handle) - 8usize];
    [
        "Offset of field: ncclNetDeviceHandle_v7_t::size",
    ][::core::mem::offset_of!(ncclNetDeviceHandle_v7_t, size) - 16usize];
    [
        "Offset of field: ncclNetDeviceHandle_v7_t::needsProxyProgress",
    ][::core::mem::offset_of!(ncclNetDeviceHandle_v7_t, needsProxyProgress) - 24usize];
};
pub type ncclNetDeviceHandle_v8_t = ncclNetDeviceHandle_v7_t;
pub type ncclNetDeviceHandle_v9_t = ncclNetDeviceHandle_v8_t;
pub type ncclNetDeviceHandle_v10_t = ncclNetDeviceHandle_v9_t;
pub type ncclNetDeviceHandle_v11_t = ncclNetDeviceHandle_v10_t;
pub type ncclNetDeviceHandle_v12_t = ncclNetDeviceHandle_v11_t;
pub type ncclNetDeviceHandle_t = ncclNetDeviceHandle_v12_t;
#[repr(C)]
#[derive(Debug)]
pub struct ncclGinGpuCtx {
    _unused: [u8; 0],
}
pub type ncclGinGpuCtx_t = *mut ncclGinGpuCtx;
pub type ncclGinWindow_t = *mut ::core::ffi::c_void;
impl ncclGinSignalOp_t {
    pub const ncclGinSignalInc: ncclGinSignalOp_t = ncclGinSignalOp_t(0);
    pub const ncclGinSignalAdd: ncclGinSignalOp_t = ncclGinSignalOp_t(1);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclGinSignalOp_t(pub ::core::ffi::c_uint);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclSegmentWindow {
    pub ginWins: [ncclGinWindow_t; 4usize],
    pub segmentSize: usize,
    pub memType: CUmemLocationType,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ncclSegmentWindow"][::core::mem::size_of::<ncclSegmentWindow>() - 48usize];
    [
        "Alignment of ncclSegmentWindow",
    ][::core::mem::align_of::<ncclSegmentWindow>() - 8usize];
    [
        "Offset of field: ncclSegmentWindow::ginWins",
    ][::core::mem::offset_of!(ncclSegmentWindow, ginWins) - 0usize];
    [
        "Offset of field: ncclSegmentWindow::segmentSize",
    ][::core::mem::offset_of!(ncclSegmentWindow, segmentSize) - 32usize];
    [
        "Offset of field: ncclSegmentWindow::memType",
    ][::core::mem::offset_of!(ncclSegmentWindow, memType) - 40usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclWindow_vidmem {
    pub winHost: *mut ::core::ffi::c_void,
    pub lsaFlatBase: *mut ::core::ffi::c_char,
    pub lsaRank: ::core::ffi::c_int,
    pub worldRank: ::core::ffi::c_int,
    pub stride4G: u32,
    pub mcOffset4K: u32,
    pub ginOffset4K: u32,
    pub winFlags: u32,
    pub ginWinsDefaultBackend: [ncclGinWindow_t; 4usize],
    pub ginMultiSegmentWins: *mut ncclSegmentWindow,
    pub numSegments: ::core::ffi::c_int,
    pub cftFlatRank: ::core::ffi::c_int,
    pub ucLeIdBase: ncclCftLeId_t,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ncclWindow_vidmem"][::core::mem::size_of::<ncclWindow_vidmem>() - 96usize];
    [
        "Alignment of ncclWindow_vidmem",
    ][::core::mem::align_of::<ncclWindow_vidmem>() - 8usize];
    [
        "Offset of field: ncclWindow_vidmem::winHost",
    ][::core::mem::offset_of!(ncclWindow_vidmem, winHost) - 0usize];
    [
        "Offset of field: ncclWindow_vidmem::lsaFlatBase",
    ][::core::mem::offset_of!(ncclWindow_vidmem, lsaFlatBase) - 8usize];
    [
        "Offset of field: ncclWindow_vidmem::lsaRank",
    ][::core::mem::offset_of!(ncclWindow_vidmem, lsaRank) - 16usize];
    [
        "Offset of field: ncclWindow_vidmem::worldRank",
    ][::core::mem::offset_of!(ncclWindow_vidmem, worldRank) - 20usize];
    [
        "Offset of field: ncclWindow_vidmem::stride4G",
    ][::core::mem::offset_of!(ncclWindow_vidmem, stride4G) - 24usize];
    [
        "Offset of field: ncclWindow_vidmem::mcOffset4K",
    ][::core::mem::offset_of!(ncclWindow_vidmem, mcOffset4K) - 28usize];
    [
        "Offset of field: ncclWindow_vidmem::ginOffset4K",
    ][::core::mem::offset_of!(ncclWindow_vidmem, ginOffset4K) - 32usize];
    [
        "Offset of field: ncclWindow_vidmem::winFlags",
    ][::core::mem::offset_of!(ncclWindow_vidmem, winFlags) - 36usize];
    [
        "Offset of field: ncclWindow_vidmem::ginWinsDefaultBackend",
    ][::core::mem::offset_of!(ncclWindow_vidmem, ginWinsDefaultBackend) - 40usize];
    [
        "Offset of field: ncclWindow_vidmem::ginMultiSegmentWins",
    ][::core::mem::offset_of!(ncclWindow_vidmem, ginMultiSegmentWins) - 72usize];
    [
        "Offset of field: ncclWindow_vidmem::numSegments",
    ][::core::mem::offset_of!(ncclWindow_vidmem, numSegments) - 80usize];
    [
        "Offset of field: ncclWindow_vidmem::cftFlatRank",
    ][::core::mem::offset_of!(ncclWindow_vidmem, cftFlatRank) - 84usize];
    [
        "Offset of field: ncclWindow_vidmem::ucLeIdBase",
    ][::core::mem::offset_of!(ncclWindow_vidmem, ucLeIdBase) - 88usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclResourceWindow_vidmem {
    pub lsaFlatBase: *mut ::core::ffi::c_char,
    pub stride4G: u32,
    pub mcOffset4K: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclResourceWindow_vidmem",
    ][::core::mem::size_of::<ncclResourceWindow_vidmem>() - 16usize];
    [
        "Alignment of ncclResourceWindow_vidmem",
    ][::core::mem::align_of::<ncclResourceWindow_vidmem>() - 8usize];
    [
        "Offset of field: ncclResourceWindow_vidmem::lsaFlatBase",
    ][::core::mem::offset_of!(ncclResourceWindow_vidmem, lsaFlatBase) - 0usize];
    [
        "Offset of field: ncclResourceWindow_vidmem::stride4G",
    ][::core::mem::offset_of!(ncclResourceWindow_vidmem, stride4G) - 8usize];
    [
        "Offset of field: ncclResourceWindow_vidmem::mcOffset4K",
    ][::core::mem::offset_of!(ncclResourceWindow_vidmem, mcOffset4K) - 12usize];
};
pub type ncclResourceWindow_vidmem_t = ncclResourceWindow_vidmem;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclMultimemHandle {
    pub mcBasePtr: *mut ::core::ffi::c_void,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclMultimemHandle",
    ][::core::mem::size_of::<ncclMultimemHandle>() - 8usize];
    [
        "Alignment of ncclMultimemHandle",
    ][::core::mem::align_of::<ncclMultimemHandle>() - 8usize];
    [
        "Offset of field: ncclMultimemHandle::mcBasePtr",
    ][::core::mem::offset_of!(ncclMultimemHandle, mcBasePtr) - 0usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclLLA2AHandle {
    pub bufHandle: ncclDevResourceHandle_t,
    pub nSlots: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ncclLLA2AHandle"][::core::mem::size_of::<ncclLLA2AHandle>() - 8usize];
    [
        "Alignment of ncclLLA2AHandle",
    ][::core::mem::align_of::<ncclLLA2AHandle>() - 4usize];
    [
        "Offset of field: ncclLLA2AHandle::bufHandle",
    ][::core::mem::offset_of!(ncclLLA2AHandle, bufHandle) - 0usize];
    [
        "Offset of field: ncclLLA2AHandle::nSlots",
    ][::core::mem::offset_of!(ncclLLA2AHandle, nSlots) - 4usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclLsaBarrierHandle {
    pub bufHandle: ncclDevResourceHandle_t,
    pub nBarriers: ::core::ffi::c_int,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclLsaBarrierHandle",
    ][::core::mem::size_of::<ncclLsaBarrierHandle>() - 8usize];
    [
        "Alignment of ncclLsaBarrierHandle",
    ][::core::mem::align_of::<ncclLsaBarrierHandle>() - 4usize];
    [
        "Offset of field: ncclLsaBarrierHandle::bufHandle",
    ][::core::mem::offset_of!(ncclLsaBarrierHandle, bufHandle) - 0usize];
    [
        "Offset of field: ncclLsaBarrierHandle::nBarriers",
    ][::core::mem::offset_of!(ncclLsaBarrierHandle, nBarriers) - 4usize];
};
impl ncclGinOptFlags {
    pub const ncclGinOptFlagsDefault: ncclGinOptFlags = ncclGinOptFlags(0);
    pub const ncclGinOptFlagsMaySkipCreditCheck: ncclGinOptFlags = ncclGinOptFlags(1);
    pub const ncclGinOptFlagsAggregateRequests: ncclGinOptFlags = ncclGinOptFlags(2);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclGinOptFlags(pub ::core::ffi::c_uint);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclGinBarrierHandle {
    pub signal0: ncclGinSignal_t,
    pub unused: ncclDevResourceHandle_t,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclGinBarrierHandle",
    ][::core::mem::size_of::<ncclGinBarrierHandle>() - 8usize];
    [
        "Alignment of ncclGinBarrierHandle",
    ][::core::mem::align_of::<ncclGinBarrierHandle>() - 4usize];
    [
        "Offset of field: ncclGinBarrierHandle::signal0",
    ][::core::mem::offset_of!(ncclGinBarrierHandle, signal0) - 0usize];
    [
        "Offset of field: ncclGinBarrierHandle::unused",
    ][::core::mem::offset_of!(ncclGinBarrierHandle, unused) - 4usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclCftBarrierHandle {
    pub bufHandle: ncclDevResourceHandle_t,
    pub nBarriers: ::core::ffi::c_int,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclCftBarrierHandle",
    ][::core::mem::size_of::<ncclCftBarrierHandle>() - 8usize];
    [
        "Alignment of ncclCftBarrierHandle",
    ][::core::mem::align_of::<ncclCftBarrierHandle>() - 4usize];
    [
        "Offset of field: ncclCftBarrierHandle::bufHandle",
    ][::core::mem::offset_of!(ncclCftBarrierHandle, bufHandle) - 0usize];
    [
        "Offset of field: ncclCftBarrierHandle::nBarriers",
    ][::core::mem::offset_of!(ncclCftBarrierHandle, nBarriers) - 4usize];
};
#[repr(C)]
#[derive(Debug)]
pub struct ncclDevCommWindowTable {
    _unused: [u8; 0],
}
pub type ncclDevCommWindowTable_t = *mut ncclDevCommWindowTable;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclDevComm {
    pub magic: ::core::ffi::c_uint,
    pub version: ::core::ffi::c_uint,
    pub rank: ::core::ffi::c_int,
    pub nRanks: ::core::ffi::c_int,
    pub nRanks_rcp32: u32,
    pub lsaRank: ::core::ffi::c_int,
    pub lsaSize: ::core::ffi::c_int,
    pub lsaSize_rcp32: u32,
    pub windowTable: ncclDevCommWindowTable_t,
    pub resourceWindow: ncclWindow_t,
    pub resourceWindow_inlined: ncclResourceWindow_vidmem_t,
    pub hybridDenseGinBarrier: ncclGinBarrierHandle_t,
    pub lsaMultimem: ncclMultimemHandle_t,
    pub lsaBarrier: ncclLsaBarrierHandle_t,
    pub railGinBarrier: ncclGinBarrierHandle_t,
    pub ginConnectionCount: u8,
    pub backendIndex: u8,
    pub ginNetDeviceTypes: [u8; 4usize],
    pub ginHandles: [*mut ::core::ffi::c_void; 4usize],
    pub ginSignalCount: ::core::ffi::c_int,
    pub ginCounterCount: ::core::ffi::c_int,
    pub ginSignalShadows: *mut u64,
    pub ginContextCount: u32,
    pub ginConnectionStride: ::core::ffi::c_int,
    pub ginContextStride: ::core::ffi::c_int,
    pub ginStrongLegacySignals: bool,
    pub abortFlag: *mut u32,
    pub hybridLsaBarrier: ncclLsaBarrierHandle_t,
    pub hybridRailGinBarrier: ncclGinBarrierHandle_t,
    pub worldGinBarrier: ncclGinBarrierHandle_t,
    pub ginConnectionStride_rcp32: u32,
    pub cftRank: ::core::ffi::c_int,
    pub cftSize: ::core::ffi::c_int,
    pub cftMultimemRank: ::core::ffi::c_int,
    pub cftMultimemSize: ::core::ffi::c_int,
    pub cftMultimemSize_rcp32: u32,
    pub ucLeId: ncclCftLeId,
    pub mcLeId: ncclCftLeId,
    pub cftBarrier: ncclCftBarrierHandle_t,
    pub cftMultimemBarrier: ncclCftBarrierHandle_t,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ncclDevComm"][::core::mem::size_of::<ncclDevComm>() - 248usize];
    ["Alignment of ncclDevComm"][::core::mem::align_of::<ncclDevComm>() - 8usize];
    [
        "Offset of field: ncclDevComm::magic",
    ][::core::mem::offset_of!(ncclDevComm, magic) - 0usize];
    [
        "Offset of field: ncclDevComm::version",
    ][::core::mem::offset_of!(ncclDevComm, version) - 4usize];
    [
        "Offset of field: ncclDevComm::rank",
    ][::core::mem::offset_of!(ncclDevComm, rank) - 8usize];
    [
        "Offset of field: ncclDevComm::nRanks",
    ][::core::mem::offset_of!(ncclDevComm, nRanks) - 12usize];
    [
        "Offset of field: ncclDevComm::nRanks_rcp32",
    ][::core::mem::offset_of!(ncclDevComm, nRanks_rcp32) - 16usize];
    [
        "Offset of field: ncclDevComm::lsaRank",
    ][::core::mem::offset_of!(ncclDevComm, lsaRank) - 20usize];
    [
        "Offset of field: ncclDevComm::lsaSize",
    ][::core::mem::offset_of!(ncclDevComm, lsaSize) - 24usize];
    [
        "Offset of field: ncclDevComm::lsaSize_rcp32",
    ][::core::mem::offset_of!(ncclDevComm, lsaSize_rcp32) - 28usize];
    [
        "Offset of field: ncclDevComm::windowTable",
    ][::core::mem::offset_of!(ncclDevComm, windowTable) - 32usize];
    [
        "Offset of field: ncclDevComm::resourceWindow",
    ][::core::mem::offset_of!(ncclDevComm, resourceWindow) - 40usize];
    [
        "Offset of field: ncclDevComm::resourceWindow_inlined",
    ][::core::mem::offset_of!(ncclDevComm, resourceWindow_inlined) - 48usize];
    [
        "Offset of field: ncclDevComm::hybridDenseGinBarrier",
    ][::core::mem::offset_of!(ncclDevComm, hybridDenseGinBarrier) - 64usize];
    [
        "Offset of field: ncclDevComm::lsaMultimem",
    ][::core::mem::offset_of!(ncclDevComm, lsaMultimem) - 72usize];
    [
        "Offset of field: ncclDevComm::lsaBarrier",
    ][::core::mem::offset_of!(ncclDevComm, lsaBarrier) - 80usize];
    [
        "Offset of field: ncclDevComm::railGinBarrier",
    ][::core::mem::offset_of!(ncclDevComm, railGinBarrier) - 88usize];
    [
        "Offset of field: ncclDevComm::ginConnectionCount",
    ][::core::mem::offset_of!(ncclDevComm, ginConnectionCount) - 96usize];
    [
        "Offset of field: ncclDevComm::backendIndex",
    ][::core::mem::offset_of!(ncclDevComm, backendIndex) - 97usize];
    [
        "Offset of field: ncclDevComm::ginNetDeviceTypes",
    ][::core::mem::offset_of!(ncclDevComm, ginNetDeviceTypes) - 98usize];
    [
        "Offset of field: ncclDevComm::ginHandles",
    ][::core::mem::offset_of!(ncclDevComm, ginHandles) - 104usize];
    [
        "Offset of field: ncclDevComm::ginSignalCount",
    ][::core::mem::offset_of!(ncclDevComm, ginSignalCount) - 136usize];
    [
        "Offset of field: ncclDevComm::ginCounterCount",
    ][::core::mem::offset_of!(ncclDevComm, ginCounterCount) - 140usize];
    [
        "Offset of field: ncclDevComm::ginSignalShadows",
    ][::core::mem::offset_of!(ncclDevComm, ginSignalShadows) - 144usize];
    [
        "Offset of field: ncclDevComm::ginContextCount",
    ][::core::mem::offset_of!(ncclDevComm, ginContextCount) - 152usize];
    [
        "Offset of field: ncclDevComm::ginConnectionStride",
    ][::core::mem::offset_of!(ncclDevComm, ginConnectionStride) - 156usize];
    [
        "Offset of field: ncclDevComm::ginContextStride",
    ][::core::mem::offset_of!(ncclDevComm, ginContextStride) - 160usize];
    [
        "Offset of field: ncclDevComm::ginStrongLegacySignals",
    ][::core::mem::offset_of!(ncclDevComm, ginStrongLegacySignals) - 164usize];
    [
        "Offset of field: ncclDevComm::abortFlag",
    ][::core::mem::offset_of!(ncclDevComm, abortFlag) - 168usize];
    [
        "Offset of field: ncclDevComm::hybridLsaBarrier",
    ][::core::mem::offset_of!(ncclDevComm, hybridLsaBarrier) - 176usize];
    [
        "Offset of field: ncclDevComm::hybridRailGinBarrier",
    ][::core::mem::offset_of!(ncclDevComm, hybridRailGinBarrier) - 184usize];
    [
        "Offset of field: ncclDevComm::worldGinBarrier",
    ][::core::mem::offset_of!(ncclDevComm, worldGinBarrier) - 192usize];
    [
        "Offset of field: ncclDevComm::ginConnectionStride_rcp32",
    ][::core::mem::offset_of!(ncclDevComm, ginConnectionStride_rcp32) - 200usize];
    [
        "Offset of field: ncclDevComm::cftRank",
    ][::core::mem::offset_of!(ncclDevComm, cftRank) - 204usize];
    [
        "Offset of field: ncclDevComm::cftSize",
    ][::core::mem::offset_of!(ncclDevComm, cftSize) - 208usize];
    [
        "Offset of field: ncclDevComm::cftMultimemRank",
    ][::core::mem::offset_of!(ncclDevComm, cftMultimemRank) - 212usize];
    [
        "Offset of field: ncclDevComm::cftMultimemSize",
    ][::core::mem::offset_of!(ncclDevComm, cftMultimemSize) - 216usize];
    [
        "Offset of field: ncclDevComm::cftMultimemSize_rcp32",
    ][::core::mem::offset_of!(ncclDevComm, cftMultimemSize_rcp32) - 220usize];
    [
        "Offset of field: ncclDevComm::ucLeId",
    ][::core::mem::offset_of!(ncclDevComm, ucLeId) - 224usize];
    [
        "Offset of field: ncclDevComm::mcLeId",
    ][::core::mem::offset_of!(ncclDevComm, mcLeId) - 228usize];
    [
        "Offset of field: ncclDevComm::cftBarrier",
    ][::core::mem::offset_of!(ncclDevComm, cftBarrier) - 232usize];
    [
        "Offset of field: ncclDevComm::cftMultimemBarrier",
    ][::core::mem::offset_of!(ncclDevComm, cftMultimemBarrier) - 240usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclDevResourceRequirements {
    pub next: *mut ncclDevResourceRequirements,
    pub bufferSize: usize,
    pub bufferAlign: usize,
    pub outBufferHandle: *mut ncclDevResourceHandle_t,
    pub ginSignalCount: ::core::ffi::c_int,
    pub ginCounterCount: ::core::ffi::c_int,
    pub outGinSignalStart: *mut ncclGinSignal_t,
    pub outGinCounterStart: *mut ncclGinCounter_t,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclDevResourceRequirements",
    ][::core::mem::size_of::<ncclDevResourceRequirements>() - 56usize];
    [
        "Alignment of ncclDevResourceRequirements",
    ][::core::mem::align_of::<ncclDevResourceRequirements>() - 8usize];
    [
        "Offset of field: ncclDevResourceRequirements::next",
    ][::core::mem::offset_of!(ncclDevResourceRequirements, next) - 0usize];
    [
        "Offset of field: ncclDevResourceRequirements::bufferSize",
    ][::core::mem::offset_of!(ncclDevResourceRequirements, bufferSize) - 8usize];
    [
        "Offset of field: ncclDevResourceRequirements::bufferAlign",
    ][::core::mem::offset_of!(ncclDevResourceRequirements, bufferAlign) - 16usize];
    [
        "Offset of field: ncclDevResourceRequirements::outBufferHandle",
    ][::core::mem::offset_of!(ncclDevResourceRequirements, outBufferHandle) - 24usize];
    [
        "Offset of field: ncclDevResourceRequirements::ginSignalCount",
    ][::core::mem::offset_of!(ncclDevResourceRequirements, ginSignalCount) - 32usize];
    [
        "Offset of field: ncclDevResourceRequirements::ginCounterCount",
    ][::core::mem::offset_of!(ncclDevResourceRequirements, ginCounterCount) - 36usize];
    [
        "Offset of field: ncclDevResourceRequirements::outGinSignalStart",
    ][::core::mem::offset_of!(ncclDevResourceRequirements, outGinSignalStart) - 40usize];
    [
        "Offset of field: ncclDevResourceRequirements::outGinCounterStart",
    ][::core::mem::offset_of!(ncclDevResourceRequirements, outGinCounterStart)
        - 48usize];
};
pub type ncclDevResourceRequirements_t = ncclDevResourceRequirements;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclTeamRequirements {
    pub next: *mut ncclTeamRequirements,
    pub team: ncclTeam_t,
    pub multimem: bool,
    pub outMultimemHandle: *mut ncclMultimemHandle_t,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclTeamRequirements",
    ][::core::mem::size_of::<ncclTeamRequirements>() - 32usize];
    [
        "Alignment of ncclTeamRequirements",
    ][::core::mem::align_of::<ncclTeamRequirements>() - 8usize];
    [
        "Offset of field: ncclTeamRequirements::next",
    ][::core::mem::offset_of!(ncclTeamRequirements, next) - 0usize];
    [
        "Offset of field: ncclTeamRequirements::team",
    ][::core::mem::offset_of!(ncclTeamRequirements, team) - 8usize];
    [
        "Offset of field: ncclTeamRequirements::multimem",
    ][::core::mem::offset_of!(ncclTeamRequirements, multimem) - 20usize];
    [
        "Offset of field: ncclTeamRequirements::outMultimemHandle",
    ][::core::mem::offset_of!(ncclTeamRequirements, outMultimemHandle) - 24usize];
};
pub type ncclTeamRequirements_t = ncclTeamRequirements;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclDevCommRequirements {
    pub size: usize,
    pub magic: ::core::ffi::c_uint,
    pub version: ::core::ffi::c_uint,
    pub resourceRequirementsList: *mut ncclDevResourceRequirements_t,
    pub teamRequirementsList: *mut ncclTeamRequirements_t,
    pub lsaMultimem: bool,
    pub barrierCount: ::core::ffi::c_int,
    pub lsaBarrierCount: ::core::ffi::c_int,
    pub railGinBarrierCount: ::core::ffi::c_int,
    pub lsaLLA2ABlockCount: ::core::ffi::c_int,
    pub lsaLLA2ASlotCount: ::core::ffi::c_int,
    pub ginForceEnable: bool,
    pub ginContextCount: ::core::ffi::c_int,
    pub ginSignalCount: ::core::ffi::c_int,
    pub ginCounterCount: ::core::ffi::c_int,
    pub ginConnectionType: ncclGinConnectionType_t,
    pub ginExclusiveContexts: bool,
    pub ginQueueDepth: ::core::ffi::c_int,
    pub ginTrafficClass: ::core::ffi::c_int,
    pub worldGinBarrierCount: ::core::ffi::c_int,
    pub ginStrongSignalsRequired: bool,
    pub ginVaSignalsRequired: bool,
    pub ginCustomStride: ::core::ffi::c_int,
    pub ginType: ncclGinType_t,
    pub useRuntimeVersion: bool,
    pub cftCaps: ::core::ffi::c_int,
    pub cftBarrierCount: ::core::ffi::c_int,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclDevCommRequirements",
    ][::core::mem::size_of::<ncclDevCommRequirements>() - 120usize];
    [
        "Alignment of ncclDevCommRequirements",
    ][::core::mem::align_of::<ncclDevCommRequirements>() - 8usize];
    [
        "Offset of field: ncclDevCommRequirements::size",
    ][::core::mem::offset_of!(ncclDevCommRequirements, size) - 0usize];
    [
        "Offset of field: ncclDevCommRequirements::magic",
    ][::core::mem::offset_of!(ncclDevCommRequirements, magic) - 8usize];
    [
        "Offset of field: ncclDevCommRequirements::version",
    ][::core::mem::offset_of!(ncclDevCommRequirements, version) - 12usize];
    [
        "Offset of field: ncclDevCommRequirements::resourceRequirementsList",
    ][::core::mem::offset_of!(ncclDevCommRequirements, resourceRequirementsList)
        - 16usize];
    [
        "Offset of field: ncclDevCommRequirements::teamRequirementsList",
    ][::core::mem::offset_of!(ncclDevCommRequirements, teamRequirementsList) - 24usize];
    [
        "Offset of field: ncclDevCommRequirements::lsaMultimem",
    ][::core::mem::offset_of!(ncclDevCommRequirements, lsaMultimem) - 32usize];
    [
        "Offset of field: ncclDevCommRequirements::barrierCount",
    ][::core::mem::offset_of!(ncclDevCommRequirements, barrierCount) - 36usize];
    [
        "Offset of field: ncclDevCommRequirements::lsaBarrierCount",
    ][::core::mem::offset_of!(ncclDevCommRequirements, lsaBarrierCount) - 40usize];
    [
        "Offset of field: ncclDevCommRequirements::railGinBarrierCount",
    ][::core::mem::offset_of!(ncclDevCommRequirements, railGinBarrierCount) - 44usize];
    [
        "Offset of field: ncclDevCommRequirements::lsaLLA2ABlockCount",
    ][::core::mem::offset_of!(ncclDevCommRequirements, lsaLLA2ABlockCount) - 48usize];
    [
        "Offset of field: ncclDevCommRequirements::lsaLLA2ASlotCount",
    ][::core::mem::offset_of!(ncclDevCommRequirements, lsaLLA2ASlotCount) - 52usize];
    [
        "Offset of field: ncclDevCommRequirements::ginForceEnable",
    ][::core::mem::offset_of!(ncclDevCommRequirements, ginForceEnable) - 56usize];
    [
        "Offset of field: ncclDevCommRequirements::ginContextCount",
    ][::core::mem::offset_of!(ncclDevCommRequirements, ginContextCount) - 60usize];
    [
        "Offset of field: ncclDevCommRequirements::ginSignalCount",
    ][::core::mem::offset_of!(ncclDevCommRequirements, ginSignalCount) - 64usize];
    [
        "Offset of field: ncclDevCommRequirements::ginCounterCount",
    ][::core::mem::offset_of!(ncclDevCommRequirements, ginCounterCount) - 68usize];
    [
        "Offset of field: ncclDevCommRequirements::ginConnectionType",
    ][::core::mem::offset_of!(ncclDevCommRequirements, ginConnectionType) - 72usize];
    [
        "Offset of field: ncclDevCommRequirements::ginExclusiveContexts",
    ][::core::mem::offset_of!(ncclDevCommRequirements, ginExclusiveContexts) - 76usize];
    [
        "Offset of field: ncclDevCommRequirements::ginQueueDepth",
    ][::core::mem::offset_of!(ncclDevCommRequirements, ginQueueDepth) - 80usize];
    [
        "Offset of field: ncclDevCommRequirements::ginTrafficClass",
    ][::core::mem::offset_of!(ncclDevCommRequirements, ginTrafficClass) - 84usize];
    [
        "Offset of field: ncclDevCommRequirements::worldGinBarrierCount",
    ][::core::mem::offset_of!(ncclDevCommRequirements, worldGinBarrierCount) - 88usize];
    [
        "Offset of field: ncclDevCommRequirements::ginStrongSignalsRequired",
    ][::core::mem::offset_of!(ncclDevCommRequirements, ginStrongSignalsRequired)
        - 92usize];
    [
        "Offset of field: ncclDevCommRequirements::ginVaSignalsRequired",
    ][::core::mem::offset_of!(ncclDevCommRequirements, ginVaSignalsRequired) - 93usize];
    [
        "Offset of field: ncclDevCommRequirements::ginCustomStride",
    ][::core::mem::offset_of!(ncclDevCommRequirements, ginCustomStride) - 96usize];
    [
        "Offset of field: ncclDevCommRequirements::ginType",
    ][::core::mem::offset_of!(ncclDevCommRequirements, ginType) - 100usize];
    [
        "Offset of field: ncclDevCommRequirements::useRuntimeVersion",
    ][::core::mem::offset_of!(ncclDevCommRequirements, useRuntimeVersion) - 104usize];
    [
        "Offset of field: ncclDevCommRequirements::cftCaps",
    ][::core::mem::offset_of!(ncclDevCommRequirements, cftCaps) - 108usize];
    [
        "Offset of field: ncclDevCommRequirements::cftBarrierCount",
    ][::core::mem::offset_of!(ncclDevCommRequirements, cftBarrierCount) - 112usize];
};
pub type ncclDevCommRequirements_t = ncclDevCommRequirements;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclCommProperties {
    pub size: usize,
    pub magic: ::core::ffi::c_uint,
    pub version: ::core::ffi::c_uint,
    pub rank: ::core::ffi::c_int,
    pub nRanks: ::core::ffi::c_int,
    pub cudaDev: ::core::ffi::c_int,
    pub nvmlDev: ::core::ffi::c_int,
    pub deviceApiSupport: bool,
    pub multimemSupport: bool,
    pub ginType: ncclGinType_t,
    pub nLsaTeams: ::core::ffi::c_int,
    pub hostRmaSupport: bool,
    pub railedGinType: ncclGinType_t,
    pub commHash: u64,
    pub ginMinStride: ::core::ffi::c_int,
    pub ginConnectionType: ncclGinConnectionType_t,
    pub ginSupport: [bool; 64usize],
    pub devCommRuntimeVersionSize: usize,
    pub cftSupport: bool,
    pub cftMulticastSupport: bool,
    pub cftCountedSupport: bool,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclCommProperties",
    ][::core::mem::size_of::<ncclCommProperties>() - 152usize];
    [
        "Alignment of ncclCommProperties",
    ][::core::mem::align_of::<ncclCommProperties>() - 8usize];
    [
        "Offset of field: ncclCommProperties::size",
    ][::core::mem::offset_of!(ncclCommProperties, size) - 0usize];
    [
        "Offset of field: ncclCommProperties::magic",
    ][::core::mem::offset_of!(ncclCommProperties, magic) - 8usize];
    [
        "Offset of field: ncclCommProperties::version",
    ][::core::mem::offset_of!(ncclCommProperties, version) - 12usize];
    [
        "Offset of field: ncclCommProperties::rank",
    ][::core::mem::offset_of!(ncclCommProperties, rank) - 16usize];
    [
        "Offset of field: ncclCommProperties::nRanks",
    ][::core::mem::offset_of!(ncclCommProperties, nRanks) - 20usize];
    [
        "Offset of field: ncclCommProperties::cudaDev",
    ][::core::mem::offset_of!(ncclCommProperties, cudaDev) - 24usize];
    [
        "Offset of field: ncclCommProperties::nvmlDev",
    ][::core::mem::offset_of!(ncclCommProperties, nvmlDev) - 28usize];
    [
        "Offset of field: ncclCommProperties::deviceApiSupport",
    ][::core::mem::offset_of!(ncclCommProperties, deviceApiSupport) - 32usize];
    [
        "Offset of field: ncclCommProperties::multimemSupport",
    ][::core::mem::offset_of!(ncclCommProperties, multimemSupport) - 33usize];
    [
        "Offset of field: ncclCommProperties::ginType",
    ][::core::mem::offset_of!(ncclCommProperties, ginType) - 36usize];
    [
        "Offset of field: ncclCommProperties::nLsaTeams",
    ][::core::mem::offset_of!(ncclCommProperties, nLsaTeams) - 40usize];
    [
        "Offset of field: ncclCommProperties::hostRmaSupport",
    ][::core::mem::offset_of!(ncclCommProperties, hostRmaSupport) - 44usize];
    [
        "Offset of field: ncclCommProperties::railedGinType",
    ][::core::mem::offset_of!(ncclCommProperties, railedGinType) - 48usize];
    [
        "Offset of field: ncclCommProperties::commHash",
    ][::core::mem::offset_of!(ncclCommProperties, commHash) - 56usize];
    [
        "Offset of field: ncclCommProperties::ginMinStride",
    ][::core::mem::offset_of!(ncclCommProperties, ginMinStride) - 64usize];
    [
        "Offset of field: ncclCommProperties::ginConnectionType",
    ][::core::mem::offset_of!(ncclCommProperties, ginConnectionType) - 68usize];
    [
        "Offset of field: ncclCommProperties::ginSupport",
    ][::core::mem::offset_of!(ncclCommProperties, ginSupport) - 72usize];
    [
        "Offset of field: ncclCommProperties::devCommRuntimeVersionSize",
    ][::core::mem::offset_of!(ncclCommProperties, devCommRuntimeVersionSize) - 136usize];
    [
        "Offset of field: ncclCommProperties::cftSupport",
    ][::core::mem::offset_of!(ncclCommProperties, cftSupport) - 144usize];
    [
        "Offset of field: ncclCommProperties::cftMulticastSupport",
    ][::core::mem::offset_of!(ncclCommProperties, cftMulticastSupport) - 145usize];
    [
        "Offset of field: ncclCommProperties::cftCountedSupport",
    ][::core::mem::offset_of!(ncclCommProperties, cftCountedSupport) - 146usize];
};
pub type ncclCommProperties_t = ncclCommProperties;
