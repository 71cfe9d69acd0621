// Generated from nccl_ep.h by `cargo xtask bindings`. Do not edit.

nccl_ep_api! {
unsafe extern "C-unwind" {
    pub fn ncclEpGetVersion(version: *mut ::core::ffi::c_int) -> ncclResult_t;
    pub fn ncclEpTensorAlloc(
        tensor: *mut *mut ncclEpTensor_t,
        ndim: ::core::ffi::c_uint,
        datatype: ncclDataType_t,
        sizes: *const usize,
        config: *const ncclEpTensorAllocConfig_t,
    ) -> ncclResult_t;
    pub fn ncclEpTensorDestroy(tensor: *mut ncclEpTensor_t) -> ncclResult_t;
    pub fn ncclEpCreateGroup(
        ep_group: *mut ncclEpGroup_t,
        comm: ncclComm_t,
        config: *const ncclEpGroupConfig_t,
    ) -> ncclResult_t;
    pub fn ncclEpGroupDestroy(ep_group: ncclEpGroup_t) -> ncclResult_t;
    pub fn ncclEpHandleMemSize(
        ep_group: ncclEpGroup_t,
        layout: ncclEpLayout_t,
        config: *const ncclEpHandleConfig_t,
        size_out: *mut usize,
        num_topk: ::core::ffi::c_int,
    ) -> ncclResult_t;
    pub fn ncclEpInitHandle(
        handle: *mut ncclEpHandle_t,
        ep_group: ncclEpGroup_t,
        layout: ncclEpLayout_t,
        config: *const ncclEpHandleConfig_t,
        num_topk: ::core::ffi::c_int,
        handle_mem: *const ncclEpTensor_t,
    ) -> ncclResult_t;
    pub fn ncclEpUpdateHandle(
        handle: ncclEpHandle_t,
        topk_idx: *const ncclEpTensor_t,
        layout_info: *const ncclEpLayoutInfo_t,
        stream: cudaStream_t,
    ) -> ncclResult_t;
    pub fn ncclEpCreateHandle(
        handle: *mut ncclEpHandle_t,
        ep_group: ncclEpGroup_t,
        layout: ncclEpLayout_t,
        topk_idx: *const ncclEpTensor_t,
        layout_info: *const ncclEpLayoutInfo_t,
        config: *const ncclEpHandleConfig_t,
        stream: cudaStream_t,
    ) -> ncclResult_t;
    pub fn ncclEpHandleDestroy(handle: ncclEpHandle_t) -> ncclResult_t;
    pub fn ncclEpDispatch(
        handle: ncclEpHandle_t,
        inputs: *const ncclEpDispatchInputs_t,
        outputs: *const ncclEpDispatchOutputs_t,
        layout_info: *const ncclEpLayoutInfo_t,
        config: *const ncclEpDispatchConfig_t,
        stream: cudaStream_t,
    ) -> ncclResult_t;
    pub fn ncclEpCombine(
        handle: ncclEpHandle_t,
        inputs: *const ncclEpCombineInputs_t,
        outputs: *const ncclEpCombineOutputs_t,
        config: *const ncclEpCombineConfig_t,
        stream: cudaStream_t,
    ) -> ncclResult_t;
    pub fn ncclEpComplete(
        handle: ncclEpHandle_t,
        config: *const ncclEpCompleteConfig_t,
        stream: cudaStream_t,
    ) -> ncclResult_t;
    pub fn ncclEpMaskQuery(
        ep_group: ncclEpGroup_t,
        mask_status: *mut ::core::ffi::c_int,
        stream: cudaStream_t,
    ) -> ncclResult_t;
    pub fn ncclEpMaskUpdate(
        ep_group: ncclEpGroup_t,
        mask: *const ::core::ffi::c_int,
        stream: cudaStream_t,
    ) -> ncclResult_t;
    pub fn ncclEpMaskClean(
        ep_group: ncclEpGroup_t,
        stream: cudaStream_t,
    ) -> ncclResult_t;
    pub fn ncclEpGetAsyncError(
        ep_group: ncclEpGroup_t,
        error_out: *mut ::core::ffi::c_int,
    ) -> ncclResult_t;
    pub fn ncclEpErrorClear(ep_group: ncclEpGroup_t) -> ncclResult_t;
}
}
