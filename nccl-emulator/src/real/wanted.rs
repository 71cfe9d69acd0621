//! The names of types, data and functions that the reader looks up in a libnccl. Code that needs
//! another type or table adds its name here; the cache detects the change.

use nccl_sys::Version;

/// The releases whose layouts, kernels and calls were tested.
pub(crate) const RELEASES: [Version; 3] = [
    Version::new(2, 27, 7),
    Version::new(2, 30, 7),
    Version::new(2, 32, 3),
];

/// [`RELEASES`] as text for errors.
pub(crate) fn releases() -> String {
    RELEASES.map(|version| version.to_string()).join(", ")
}

/// Types whose layouts are read. A type that a release lacks is absent there.
pub(crate) const TYPES: &[&str] = &[
    // Arguments of NCCL's kernels, and the types that they point to.
    "ncclDevKernelArgs",
    "ncclKernelComm",
    "ncclKernelCommAndChannels",
    // 2.27's names of the two above.
    "ncclDevComm",
    "ncclDevCommAndChannels",
    "ncclDevChannel",
    "ncclDevChannelPeer",
    "ncclConnInfo",
    "ncclConnFifo",
    "ncclRing",
    "ncclTree",
    "ncclDirect",
    "ncclNvls",
    "ncclLLFifoLine",
    "ncclCollNetSharedRes",
    // A communicator, for faults at calls.
    "ncclComm",
    // Work of the kernels.
    "ncclDevWorkBatch",
    "ncclDevWorkP2p",
    "ncclDevWorkColl",
    "ncclDevWorkCollReg",
    "ncclDevWorkBcast",
    "ncclDevProfiler",
    "ncclDevProfilerPhases",
    "ncclProgressCountersBlock",
    // NCCL's diagnostics.
    "ncclDiagP2pSlot",
    "ncclDiagP2pRemoteOp",
    // Enumerations.
    "ncclDevWorkType",
    "ncclDevWorkStorageType",
    "ncclDevRedOp_t",
    "ncclDevRedOpFull",
    "ncclFunc_t",
    "ncclDataType_t",
    "ncclRedOp_t",
    "ncclPattern_t",
    "ncclSymkKernelId",
    "ncclSymKernelId",
    // Symmetric kernels, windows, one-sided operations.
    "ncclSymkDevWorkArgs",
    "ncclSymkDevWork",
    "ncclSymkDevComm",
    "ncclSymkChannelWorkRange",
    "ncclSymDevArgs",
    "ncclSymDevBase",
    "ncclSymDevComm",
    "ncclDevCommWindowTable",
    "ncclWindow_vidmem",
    "ncclLsaBarrierHandle",
    "ncclLLA2AHandle",
    "ncclGinBarrierHandle",
    "ncclMultimemHandle",
    "ncclTeam",
    // CUDA's structures that cross the runtime's functions.
    "cudaDeviceProp",
    "cudaPointerAttributes",
    "cudaFuncAttributes",
    "cudaMemcpyAttributes",
    "cudaMemLocation",
    "cudaMemPoolProps",
    "cudaIpcMemHandle_st",
    "cudaMemoryType",
    "cudaMemPoolAttr",
    "cudaStreamCaptureStatus",
    "cudaDriverEntryPointQueryResult",
    "cudaDeviceAttr",
    "cudaFuncAttribute",
    "cudaError",
    // The driver's structures, where NCCL calls the driver itself. Those of cudaLaunchKernelExC are
    // in no debug information: the files that call it were compiled without.
    "CUlaunchConfig_st",
    "CUlaunchAttribute_st",
    "CUmemAllocationProp_st",
    "CUmemAccessDesc_st",
    "CUmemLocation_st",
    "CUstreamBatchMemOpParams_union",
];

/// Tables of the library that the emulator reads.
pub(crate) const DATA: &[&str] = &[
    "ncclDevFuncIdCount",
    "ncclDevFuncRowToId",
    "ncclDevFuncTable",
    "ncclDevKernelForFunc",
    "ncclDevKernelForFuncIsSpecialized",
    "ncclDevKernelList",
    "ncclDevKernelRequirements",
    "ncclSymKernelList",
    "ncclSymkKernelCount",
    "ncclSymkKernelList",
    "ncclSymkKernelListProfile",
    "ncclSymkKernelMaxDynamicSmem",
    "ncclSymkKernelRequirements",
];

/// Functions of the runtime to which the library refers, but only from the host stubs of kernels and
/// similar code. If the caller does not provide them, calls are refused with the function's name.
pub(crate) const REFERENCED_ONLY: &[&str] = &[
    "__cudaGetKernel",
    "__cudaInitModule",
    "__cudaLaunchKernel",
    "__cudaPopCallConfiguration",
    "__cudaPushCallConfiguration",
];

/// Whether `name` is a function by which compiled CUDA code registers itself. The library's
/// constructors and destructors call these functions, which record, need no driver and stay in place.
pub(crate) fn registers(name: &str) -> bool {
    name.starts_with("__cudaRegister") || name.starts_with("__cudaUnregister")
}
