//! Functions that the emulator does not support. Each returns `CUDA_ERROR_NOT_SUPPORTED`, and prints the reason once.

use std::collections::HashSet;
use std::ffi::c_void;

use super::call::caught;
use crate::result::CUresult;
use crate::sync::Mutex;
use stand_in_object::Symbol;

const NO_KERNELS: &str = "of kernels the emulator has modules of PTX, their functions, cuLaunchKernel and cuLaunchKernelEx";
const NO_NODES: &str = "the emulator's graphs come from captures: host functions, events and dependencies can be added, nothing changed";
const NO_MULTICAST: &str = "the emulator has no multicast objects";
const NO_ENDPOINTS: &str = "the emulator has no logical endpoints";
const NO_RANGE_HANDLES: &str =
    "the emulator gives no DMA buffers: export memory of cuMemCreate as a descriptor";
pub(super) const NO_IPC: &str = "of CUDA IPC the emulator shares memory, and not events";
const NO_MANAGED: &str = "the emulator has no managed memory";
const NO_2D: &str = "the emulator has no fills in two dimensions and no copies in three, and copies in two only from device \
    to device (cuMemcpy2DAsync)";
pub(super) const NO_ARRAYS: &str =
    "the emulator copies rows from device to device alone, and has no arrays";
const NO_POOLS: &str =
    "memory of the emulator's pools is not exported: share memory of cuMemAlloc or cuMemCreate";
const NO_EXTERNAL: &str = "the emulator imports no memory or semaphores of other APIs";
const NO_CALLBACKS: &str = "the emulator has no stream callbacks: use cuLaunchHostFunc";

/// Prints the reason why a function is not supported, once.
pub(super) fn say(function: &'static str, reason: &str) {
    say_of(function, function, reason);
}

/// Prints the reason why a function is not supported for `what`, once for each `what`.
pub(super) fn say_of(what: &str, function: &'static str, reason: &str) {
    static SAID: Mutex<Option<HashSet<String>>> = Mutex::new(None);
    let mut said = SAID.lock();
    if said.get_or_insert_default().insert(what.to_owned()) {
        eprintln!("nccl-emulator: {function} returns CUDA_ERROR_NOT_SUPPORTED: {reason}");
    }
}

macro_rules! refused {
    ($($reason:ident: $($name:ident)*;)*) => {
        pub(super) fn symbols() -> Vec<Symbol> {
            vec![$($({
                /// Declared without arguments: in the C calling conventions of Linux only the caller handles them.
                unsafe extern "C" fn refuse() -> CUresult {
                    caught(|| {
                        say(stringify!($name), $reason);
                        Err(CUresult::ERROR_NOT_SUPPORTED)
                    })
                }
                const NAME: &str = concat!(stringify!($name), "\0");
                let name = std::ffi::CStr::from_bytes_with_nul(NAME.as_bytes()).unwrap_or_default();
                (name, refuse as *const c_void)
            },)*)*]
        }
    };
}

refused! {
    NO_KERNELS:
        cuLaunchCooperativeKernel cuModuleLoadFatBinary cuModuleGetGlobal_v2
        cuLibraryLoadData cuLibraryLoadFromFile cuLibraryUnload cuLibraryGetKernel cuLibraryGetModule
        cuLibraryGetGlobal cuKernelGetFunction cuKernelGetAttribute cuKernelSetAttribute
        cuFuncGetModule cuFuncGetName
        cuLinkCreate_v2 cuLinkAddData_v2 cuLinkAddFile_v2 cuLinkComplete cuLinkDestroy
        cuOccupancyMaxActiveBlocksPerMultiprocessor cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags
        cuOccupancyMaxPotentialBlockSize cuOccupancyMaxPotentialBlockSizeWithFlags
        cuOccupancyAvailableDynamicSMemPerBlock cuOccupancyMaxActiveClusters
        cuOccupancyMaxPotentialClusterSize;
    NO_NODES:
        cuGraphCreate cuGraphInstantiateWithParams cuGraphExecUpdate_v2 cuGraphAddKernelNode_v2
        cuGraphAddMemcpyNode cuGraphAddMemsetNode cuGraphGetEdges cuGraphClone cuGraphDebugDotPrint
        cuStreamBeginCaptureToGraph;
    NO_MULTICAST:
        cuMulticastCreate cuMulticastAddDevice cuMulticastBindMem cuMulticastBindAddr cuMulticastUnbind
        cuMulticastGetGranularity;
    NO_ENDPOINTS:
        cuLogicalEndpointIdReserve cuLogicalEndpointIdRelease cuLogicalEndpointCreate cuLogicalEndpointDestroy
        cuLogicalEndpointAddDevice cuLogicalEndpointBindAddr cuLogicalEndpointBindMem cuLogicalEndpointUnbind
        cuLogicalEndpointExport cuLogicalEndpointImport cuLogicalEndpointGetLimits cuLogicalEndpointQuery;
    NO_RANGE_HANDLES:
        cuMemGetHandleForAddressRange;
    NO_IPC:
        cuIpcGetEventHandle cuIpcOpenEventHandle;
    NO_MANAGED:
        cuMemAllocManaged cuMemAdvise cuMemAdvise_v2 cuMemPrefetchAsync cuMemPrefetchAsync_v2
        cuMemRangeGetAttribute cuMemRangeGetAttributes cuStreamAttachMemAsync;
    NO_2D:
        cuMemAllocPitch_v2 cuMemcpy2D_v2 cuMemcpy2DUnaligned_v2 cuMemcpy3D_v2
        cuMemcpy3DAsync_v2 cuMemcpy3DPeer cuMemcpy3DPeerAsync cuMemsetD2D8_v2 cuMemsetD2D16_v2
        cuMemsetD2D32_v2 cuMemsetD2D8Async cuMemsetD2D16Async cuMemsetD2D32Async;
    NO_POOLS:
        cuMemPoolExportToShareableHandle cuMemPoolImportFromShareableHandle cuMemPoolExportPointer
        cuMemPoolImportPointer;
    NO_EXTERNAL:
        cuImportExternalMemory cuExternalMemoryGetMappedBuffer cuDestroyExternalMemory
        cuImportExternalSemaphore cuSignalExternalSemaphoresAsync cuWaitExternalSemaphoresAsync
        cuDestroyExternalSemaphore;
    NO_CALLBACKS:
        cuStreamAddCallback;
}

/// Does nothing. Without a profiler, these functions do nothing on a GPU either.
unsafe extern "C" fn profiler() -> CUresult {
    CUresult::SUCCESS
}

/// Functions that succeed by doing nothing.
pub(super) fn ignored() -> Vec<Symbol> {
    vec![
        (c"cuProfilerStart", profiler as *const c_void),
        (c"cuProfilerStop", profiler as *const c_void),
    ]
}
