// Generated from nccl_ep.h by `cargo xtask bindings`. Do not edit.

nccl_ep_initializers! {
    NCCL_EP_TENSOR_INIT: ncclEpTensor_t { magic: NCCL_EP_TENSOR_MAGIC }
    NCCL_EP_TENSOR_ALLOC_CONFIG_INIT: ncclEpTensorAllocConfig_t { magic: NCCL_EP_MAGIC }
    NCCL_EP_GROUP_CONFIG_INIT: ncclEpGroupConfig_t { magic: NCCL_EP_MAGIC, version: NCCL_EP_API_VERSION }
    NCCL_EP_LAYOUT_INFO_INIT: ncclEpLayoutInfo_t { magic: NCCL_EP_MAGIC }
    NCCL_EP_DISPATCH_INPUTS_INIT: ncclEpDispatchInputs_t { magic: NCCL_EP_MAGIC }
    NCCL_EP_DISPATCH_OUTPUTS_INIT: ncclEpDispatchOutputs_t { magic: NCCL_EP_MAGIC }
    NCCL_EP_COMBINE_INPUTS_INIT: ncclEpCombineInputs_t { magic: NCCL_EP_MAGIC }
    NCCL_EP_COMBINE_OUTPUTS_INIT: ncclEpCombineOutputs_t { magic: NCCL_EP_MAGIC }
    NCCL_EP_HANDLE_CONFIG_INIT: ncclEpHandleConfig_t { magic: NCCL_EP_MAGIC }
    NCCL_EP_DISPATCH_CONFIG_INIT: ncclEpDispatchConfig_t { magic: NCCL_EP_MAGIC }
    NCCL_EP_COMBINE_CONFIG_INIT: ncclEpCombineConfig_t { magic: NCCL_EP_MAGIC }
    NCCL_EP_COMPLETE_CONFIG_INIT: ncclEpCompleteConfig_t { magic: NCCL_EP_MAGIC }
}
