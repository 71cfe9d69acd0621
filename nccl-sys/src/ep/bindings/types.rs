// Generated from nccl_ep.h by `cargo xtask bindings`. Do not edit.

pub const NCCL_EP_AUTO: u32 = 0;
pub const NCCL_EP_MAJOR: i32 = 0;
pub const NCCL_EP_MINOR: i32 = 2;
pub const NCCL_EP_PATCH: i32 = 0;
pub const NCCL_EP_VERSION_CODE: i32 = 200;
pub const NCCL_EP_API_VERSION: u32 = 2;
pub const NCCL_EP_MAGIC: u32 = 3222274030;
pub const NCCL_EP_TENSOR_MAGIC: u32 = 3405695742;
pub const NCCL_EP_TENSOR_V1_SIZE: u32 = 48;
pub const NCCL_EP_TENSOR_CURRENT_VERSION: i32 = 1;
pub const NCCL_EP_TENSOR_ALLOC_CONFIG_V1_SIZE: u32 = 8;
pub const NCCL_EP_TENSOR_ALLOC_CONFIG_CURRENT_VERSION: i32 = 1;
pub const NCCL_EP_GROUP_CONFIG_V1_SIZE: u32 = 96;
pub const NCCL_EP_GROUP_CONFIG_V2_SIZE: u32 = 112;
pub const NCCL_EP_GROUP_CONFIG_CURRENT_VERSION: i32 = 2;
pub const NCCL_EP_LAYOUT_INFO_V1_SIZE: u32 = 40;
pub const NCCL_EP_LAYOUT_INFO_V2_SIZE: u32 = 48;
pub const NCCL_EP_LAYOUT_INFO_CURRENT_VERSION: i32 = 2;
pub const NCCL_EP_DISPATCH_INPUTS_V1_SIZE: u32 = 32;
pub const NCCL_EP_DISPATCH_INPUTS_CURRENT_VERSION: i32 = 1;
pub const NCCL_EP_DISPATCH_OUTPUTS_V1_SIZE: u32 = 40;
pub const NCCL_EP_DISPATCH_OUTPUTS_CURRENT_VERSION: i32 = 1;
pub const NCCL_EP_COMBINE_INPUTS_V1_SIZE: u32 = 24;
pub const NCCL_EP_COMBINE_INPUTS_V2_SIZE: u32 = 32;
pub const NCCL_EP_COMBINE_INPUTS_CURRENT_VERSION: i32 = 2;
pub const NCCL_EP_COMBINE_OUTPUTS_V1_SIZE: u32 = 24;
pub const NCCL_EP_COMBINE_OUTPUTS_CURRENT_VERSION: i32 = 1;
pub const NCCL_EP_HANDLE_CONFIG_V1_SIZE: u32 = 16;
pub const NCCL_EP_HANDLE_CONFIG_CURRENT_VERSION: i32 = 1;
pub const NCCL_EP_DISPATCH_CONFIG_V1_SIZE: u32 = 20;
pub const NCCL_EP_DISPATCH_CONFIG_V2_SIZE: u32 = 24;
pub const NCCL_EP_DISPATCH_CONFIG_CURRENT_VERSION: i32 = 2;
pub const NCCL_EP_COMBINE_CONFIG_V1_SIZE: u32 = 16;
pub const NCCL_EP_COMBINE_CONFIG_V2_SIZE: u32 = 20;
pub const NCCL_EP_COMBINE_CONFIG_CURRENT_VERSION: i32 = 2;
pub const NCCL_EP_COMPLETE_CONFIG_V1_SIZE: u32 = 8;
pub const NCCL_EP_COMPLETE_CONFIG_CURRENT_VERSION: i32 = 1;
pub type cudaError_t = ::core::ffi::c_uint;
impl ncclEpAlgorithm_t {
    pub const NCCL_EP_ALGO_LOW_LATENCY: ncclEpAlgorithm_t = ncclEpAlgorithm_t(0);
    pub const NCCL_EP_ALGO_HIGH_THROUGHPUT: ncclEpAlgorithm_t = ncclEpAlgorithm_t(1);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclEpAlgorithm_t(pub ::core::ffi::c_uint);
impl ncclEpOverflowPolicy_t {
    pub const NCCL_EP_OVERFLOW_AUTO: ncclEpOverflowPolicy_t = ncclEpOverflowPolicy_t(0);
    pub const NCCL_EP_OVERFLOW_TRAP: ncclEpOverflowPolicy_t = ncclEpOverflowPolicy_t(1);
    pub const NCCL_EP_OVERFLOW_DROP: ncclEpOverflowPolicy_t = ncclEpOverflowPolicy_t(2);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclEpOverflowPolicy_t(pub ::core::ffi::c_uint);
impl ncclEpLayout_t {
    pub const NCCL_EP_LAYOUT_UNSET: ncclEpLayout_t = ncclEpLayout_t(0);
    pub const NCCL_EP_LAYOUT_EXPERT_MAJOR: ncclEpLayout_t = ncclEpLayout_t(1);
    pub const NCCL_EP_LAYOUT_RANK_MAJOR: ncclEpLayout_t = ncclEpLayout_t(2);
    pub const NCCL_EP_LAYOUT_FLAT: ncclEpLayout_t = ncclEpLayout_t(3);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclEpLayout_t(pub ::core::ffi::c_uint);
impl ncclEpPassDir_t {
    pub const NCCL_EP_FWD_PASS: ncclEpPassDir_t = ncclEpPassDir_t(0);
    pub const NCCL_EP_BWD_PASS: ncclEpPassDir_t = ncclEpPassDir_t(1);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclEpPassDir_t(pub ::core::ffi::c_uint);
impl ncclEpZeroCopyMode_t {
    pub const NCCL_EP_ZERO_COPY_AUTO: ncclEpZeroCopyMode_t = ncclEpZeroCopyMode_t(0);
    pub const NCCL_EP_ZERO_COPY_OFF: ncclEpZeroCopyMode_t = ncclEpZeroCopyMode_t(1);
    pub const NCCL_EP_ZERO_COPY_ON: ncclEpZeroCopyMode_t = ncclEpZeroCopyMode_t(2);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclEpZeroCopyMode_t(pub ::core::ffi::c_uint);
impl ncclEpExpertIdKind_t {
    pub const NCCL_EP_EXPERT_ID_AUTO: ncclEpExpertIdKind_t = ncclEpExpertIdKind_t(0);
    pub const NCCL_EP_EXPERT_ID_LOCAL: ncclEpExpertIdKind_t = ncclEpExpertIdKind_t(1);
    pub const NCCL_EP_EXPERT_ID_GLOBAL: ncclEpExpertIdKind_t = ncclEpExpertIdKind_t(2);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclEpExpertIdKind_t(pub ::core::ffi::c_uint);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclEpTensor {
    pub size: ::core::ffi::c_uint,
    pub magic: ::core::ffi::c_uint,
    pub ndim: ::core::ffi::c_uint,
    pub datatype: ncclDataType_t,
    pub data: *mut ::core::ffi::c_void,
    pub win_hdl: ncclWindow_t,
    pub win_offset: u64,
    pub sizes: *mut usize,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ncclEpTensor"][::core::mem::size_of::<ncclEpTensor>() - 48usize];
    ["Alignment of ncclEpTensor"][::core::mem::align_of::<ncclEpTensor>() - 8usize];
    [
        "Offset of field: ncclEpTensor::size",
    ][::core::mem::offset_of!(ncclEpTensor, size) - 0usize];
    [
        "Offset of field: ncclEpTensor::magic",
    ][::core::mem::offset_of!(ncclEpTensor, magic) - 4usize];
    [
        "Offset of field: ncclEpTensor::ndim",
    ][::core::mem::offset_of!(ncclEpTensor, ndim) - 8usize];
    [
        "Offset of field: ncclEpTensor::datatype",
    ][::core::mem::offset_of!(ncclEpTensor, datatype) - 12usize];
    [
        "Offset of field: ncclEpTensor::data",
    ][::core::mem::offset_of!(ncclEpTensor, data) - 16usize];
    [
        "Offset of field: ncclEpTensor::win_hdl",
    ][::core::mem::offset_of!(ncclEpTensor, win_hdl) - 24usize];
    [
        "Offset of field: ncclEpTensor::win_offset",
    ][::core::mem::offset_of!(ncclEpTensor, win_offset) - 32usize];
    [
        "Offset of field: ncclEpTensor::sizes",
    ][::core::mem::offset_of!(ncclEpTensor, sizes) - 40usize];
};
pub type ncclEpTensor_t = ncclEpTensor;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclEpTensorAllocConfig_t {
    pub size: ::core::ffi::c_uint,
    pub magic: ::core::ffi::c_uint,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclEpTensorAllocConfig_t",
    ][::core::mem::size_of::<ncclEpTensorAllocConfig_t>() - 8usize];
    [
        "Alignment of ncclEpTensorAllocConfig_t",
    ][::core::mem::align_of::<ncclEpTensorAllocConfig_t>() - 4usize];
    [
        "Offset of field: ncclEpTensorAllocConfig_t::size",
    ][::core::mem::offset_of!(ncclEpTensorAllocConfig_t, size) - 0usize];
    [
        "Offset of field: ncclEpTensorAllocConfig_t::magic",
    ][::core::mem::offset_of!(ncclEpTensorAllocConfig_t, magic) - 4usize];
};
pub type ncclEpAllocFn_t = ::core::option::Option<
    unsafe extern "C" fn(
        ptr: *mut *mut ::core::ffi::c_void,
        size: usize,
        context: *mut ::core::ffi::c_void,
    ) -> cudaError_t,
>;
pub type ncclEpFreeFn_t = ::core::option::Option<
    unsafe extern "C" fn(
        ptr: *mut ::core::ffi::c_void,
        context: *mut ::core::ffi::c_void,
    ) -> cudaError_t,
>;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclEpAllocConfig_t {
    pub alloc_fn: ncclEpAllocFn_t,
    pub free_fn: ncclEpFreeFn_t,
    pub context: *mut ::core::ffi::c_void,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclEpAllocConfig_t",
    ][::core::mem::size_of::<ncclEpAllocConfig_t>() - 24usize];
    [
        "Alignment of ncclEpAllocConfig_t",
    ][::core::mem::align_of::<ncclEpAllocConfig_t>() - 8usize];
    [
        "Offset of field: ncclEpAllocConfig_t::alloc_fn",
    ][::core::mem::offset_of!(ncclEpAllocConfig_t, alloc_fn) - 0usize];
    [
        "Offset of field: ncclEpAllocConfig_t::free_fn",
    ][::core::mem::offset_of!(ncclEpAllocConfig_t, free_fn) - 8usize];
    [
        "Offset of field: ncclEpAllocConfig_t::context",
    ][::core::mem::offset_of!(ncclEpAllocConfig_t, context) - 16usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclEpGroupConfig_t {
    pub size: ::core::ffi::c_uint,
    pub magic: ::core::ffi::c_uint,
    pub version: ::core::ffi::c_uint,
    pub algorithm: ncclEpAlgorithm_t,
    pub num_experts: ::core::ffi::c_uint,
    pub max_dispatch_tokens_per_rank: ::core::ffi::c_uint,
    pub max_recv_tokens_per_rank: ::core::ffi::c_uint,
    pub max_token_bytes: ::core::ffi::c_uint,
    pub rdma_buffer_size: ::core::ffi::c_ulong,
    pub num_qp_per_rank: ::core::ffi::c_uint,
    pub num_channels: ::core::ffi::c_uint,
    pub max_num_sms: ::core::ffi::c_uint,
    pub alloc: ncclEpAllocConfig_t,
    pub enable_mask: ::core::ffi::c_uint,
    pub timeout_ns: u64,
    pub zero_copy: ncclEpZeroCopyMode_t,
    pub overflow_policy: ncclEpOverflowPolicy_t,
    pub num_topk: ::core::ffi::c_uint,
    pub padding_v2: [::core::ffi::c_uchar; 4usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclEpGroupConfig_t",
    ][::core::mem::size_of::<ncclEpGroupConfig_t>() - 112usize];
    [
        "Alignment of ncclEpGroupConfig_t",
    ][::core::mem::align_of::<ncclEpGroupConfig_t>() - 8usize];
    [
        "Offset of field: ncclEpGroupConfig_t::size",
    ][::core::mem::offset_of!(ncclEpGroupConfig_t, size) - 0usize];
    [
        "Offset of field: ncclEpGroupConfig_t::magic",
    ][::core::mem::offset_of!(ncclEpGroupConfig_t, magic) - 4usize];
    [
        "Offset of field: ncclEpGroupConfig_t::version",
    ][::core::mem::offset_of!(ncclEpGroupConfig_t, version) - 8usize];
    [
        "Offset of field: ncclEpGroupConfig_t::algorithm",
    ][::core::mem::offset_of!(ncclEpGroupConfig_t, algorithm) - 12usize];
    [
        "Offset of field: ncclEpGroupConfig_t::num_experts",
    ][::core::mem::offset_of!(ncclEpGroupConfig_t, num_experts) - 16usize];
    [
        "Offset of field: ncclEpGroupConfig_t::max_dispatch_tokens_per_rank",
    ][::core::mem::offset_of!(ncclEpGroupConfig_t, max_dispatch_tokens_per_rank)
        - 20usize];
    [
        "Offset of field: ncclEpGroupConfig_t::max_recv_tokens_per_rank",
    ][::core::mem::offset_of!(ncclEpGroupConfig_t, max_recv_tokens_per_rank) - 24usize];
    [
        "Offset of field: ncclEpGroupConfig_t::max_token_bytes",
    ][::core::mem::offset_of!(ncclEpGroupConfig_t, max_token_bytes) - 28usize];
    [
        "Offset of field: ncclEpGroupConfig_t::rdma_buffer_size",
    ][::core::mem::offset_of!(ncclEpGroupConfig_t, rdma_buffer_size) - 32usize];
    [
        "Offset of field: ncclEpGroupConfig_t::num_qp_per_rank",
    ][::core::mem::offset_of!(ncclEpGroupConfig_t, num_qp_per_rank) - 40usize];
    [
        "Offset of field: ncclEpGroupConfig_t::num_channels",
    ][::core::mem::offset_of!(ncclEpGroupConfig_t, num_channels) - 44usize];
    [
        "Offset of field: ncclEpGroupConfig_t::max_num_sms",
    ][::core::mem::offset_of!(ncclEpGroupConfig_t, max_num_sms) - 48usize];
    [
        "Offset of field: ncclEpGroupConfig_t::alloc",
    ][::core::mem::offset_of!(ncclEpGroupConfig_t, alloc) - 56usize];
    [
        "Offset of field: ncclEpGroupConfig_t::enable_mask",
    ][::core::mem::offset_of!(ncclEpGroupConfig_t, enable_mask) - 80usize];
    [
        "Offset of field: ncclEpGroupConfig_t::timeout_ns",
    ][::core::mem::offset_of!(ncclEpGroupConfig_t, timeout_ns) - 88usize];
    [
        "Offset of field: ncclEpGroupConfig_t::zero_copy",
    ][::core::mem::offset_of!(ncclEpGroupConfig_t, zero_copy) - 96usize];
    [
        "Offset of field: ncclEpGroupConfig_t::overflow_policy",
    ][::core::mem::offset_of!(ncclEpGroupConfig_t, overflow_policy) - 100usize];
    [
        "Offset of field: ncclEpGroupConfig_t::num_topk",
    ][::core::mem::offset_of!(ncclEpGroupConfig_t, num_topk) - 104usize];
    [
        "Offset of field: ncclEpGroupConfig_t::padding_v2",
    ][::core::mem::offset_of!(ncclEpGroupConfig_t, padding_v2) - 108usize];
};
#[repr(C)]
#[derive(Debug)]
pub struct ncclEpGroup {
    _unused: [u8; 0],
}
pub type ncclEpGroup_t = *mut ncclEpGroup;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclEpLayoutInfo_t {
    pub size: ::core::ffi::c_uint,
    pub magic: ::core::ffi::c_uint,
    pub expert_counters: *mut ncclEpTensor_t,
    pub src_rank_counters: *mut ncclEpTensor_t,
    pub expert_offsets: *mut ncclEpTensor_t,
    pub recv_total_counter: *mut ncclEpTensor_t,
    pub recv_topk_idx_kind: ncclEpExpertIdKind_t,
    pub padding_v2: [::core::ffi::c_uchar; 4usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclEpLayoutInfo_t",
    ][::core::mem::size_of::<ncclEpLayoutInfo_t>() - 48usize];
    [
        "Alignment of ncclEpLayoutInfo_t",
    ][::core::mem::align_of::<ncclEpLayoutInfo_t>() - 8usize];
    [
        "Offset of field: ncclEpLayoutInfo_t::size",
    ][::core::mem::offset_of!(ncclEpLayoutInfo_t, size) - 0usize];
    [
        "Offset of field: ncclEpLayoutInfo_t::magic",
    ][::core::mem::offset_of!(ncclEpLayoutInfo_t, magic) - 4usize];
    [
        "Offset of field: ncclEpLayoutInfo_t::expert_counters",
    ][::core::mem::offset_of!(ncclEpLayoutInfo_t, expert_counters) - 8usize];
    [
        "Offset of field: ncclEpLayoutInfo_t::src_rank_counters",
    ][::core::mem::offset_of!(ncclEpLayoutInfo_t, src_rank_counters) - 16usize];
    [
        "Offset of field: ncclEpLayoutInfo_t::expert_offsets",
    ][::core::mem::offset_of!(ncclEpLayoutInfo_t, expert_offsets) - 24usize];
    [
        "Offset of field: ncclEpLayoutInfo_t::recv_total_counter",
    ][::core::mem::offset_of!(ncclEpLayoutInfo_t, recv_total_counter) - 32usize];
    [
        "Offset of field: ncclEpLayoutInfo_t::recv_topk_idx_kind",
    ][::core::mem::offset_of!(ncclEpLayoutInfo_t, recv_topk_idx_kind) - 40usize];
    [
        "Offset of field: ncclEpLayoutInfo_t::padding_v2",
    ][::core::mem::offset_of!(ncclEpLayoutInfo_t, padding_v2) - 44usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclEpDispatchInputs_t {
    pub size: ::core::ffi::c_uint,
    pub magic: ::core::ffi::c_uint,
    pub tokens: *mut ncclEpTensor_t,
    pub topk_weights: *mut ncclEpTensor_t,
    pub scales: *mut ncclEpTensor_t,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclEpDispatchInputs_t",
    ][::core::mem::size_of::<ncclEpDispatchInputs_t>() - 32usize];
    [
        "Alignment of ncclEpDispatchInputs_t",
    ][::core::mem::align_of::<ncclEpDispatchInputs_t>() - 8usize];
    [
        "Offset of field: ncclEpDispatchInputs_t::size",
    ][::core::mem::offset_of!(ncclEpDispatchInputs_t, size) - 0usize];
    [
        "Offset of field: ncclEpDispatchInputs_t::magic",
    ][::core::mem::offset_of!(ncclEpDispatchInputs_t, magic) - 4usize];
    [
        "Offset of field: ncclEpDispatchInputs_t::tokens",
    ][::core::mem::offset_of!(ncclEpDispatchInputs_t, tokens) - 8usize];
    [
        "Offset of field: ncclEpDispatchInputs_t::topk_weights",
    ][::core::mem::offset_of!(ncclEpDispatchInputs_t, topk_weights) - 16usize];
    [
        "Offset of field: ncclEpDispatchInputs_t::scales",
    ][::core::mem::offset_of!(ncclEpDispatchInputs_t, scales) - 24usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclEpDispatchOutputs_t {
    pub size: ::core::ffi::c_uint,
    pub magic: ::core::ffi::c_uint,
    pub tokens: *mut ncclEpTensor_t,
    pub topk_weights: *mut ncclEpTensor_t,
    pub scales: *mut ncclEpTensor_t,
    pub topk_idx: *mut ncclEpTensor_t,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclEpDispatchOutputs_t",
    ][::core::mem::size_of::<ncclEpDispatchOutputs_t>() - 40usize];
    [
        "Alignment of ncclEpDispatchOutputs_t",
    ][::core::mem::align_of::<ncclEpDispatchOutputs_t>() - 8usize];
    [
        "Offset of field: ncclEpDispatchOutputs_t::size",
    ][::core::mem::offset_of!(ncclEpDispatchOutputs_t, size) - 0usize];
    [
        "Offset of field: ncclEpDispatchOutputs_t::magic",
    ][::core::mem::offset_of!(ncclEpDispatchOutputs_t, magic) - 4usize];
    [
        "Offset of field: ncclEpDispatchOutputs_t::tokens",
    ][::core::mem::offset_of!(ncclEpDispatchOutputs_t, tokens) - 8usize];
    [
        "Offset of field: ncclEpDispatchOutputs_t::topk_weights",
    ][::core::mem::offset_of!(ncclEpDispatchOutputs_t, topk_weights) - 16usize];
    [
        "Offset of field: ncclEpDispatchOutputs_t::scales",
    ][::core::mem::offset_of!(ncclEpDispatchOutputs_t, scales) - 24usize];
    [
        "Offset of field: ncclEpDispatchOutputs_t::topk_idx",
    ][::core::mem::offset_of!(ncclEpDispatchOutputs_t, topk_idx) - 32usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclEpCombineInputs_t {
    pub size: ::core::ffi::c_uint,
    pub magic: ::core::ffi::c_uint,
    pub tokens: *mut ncclEpTensor_t,
    pub topk_weights: *mut ncclEpTensor_t,
    pub scales: *mut ncclEpTensor_t,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclEpCombineInputs_t",
    ][::core::mem::size_of::<ncclEpCombineInputs_t>() - 32usize];
    [
        "Alignment of ncclEpCombineInputs_t",
    ][::core::mem::align_of::<ncclEpCombineInputs_t>() - 8usize];
    [
        "Offset of field: ncclEpCombineInputs_t::size",
    ][::core::mem::offset_of!(ncclEpCombineInputs_t, size) - 0usize];
    [
        "Offset of field: ncclEpCombineInputs_t::magic",
    ][::core::mem::offset_of!(ncclEpCombineInputs_t, magic) - 4usize];
    [
        "Offset of field: ncclEpCombineInputs_t::tokens",
    ][::core::mem::offset_of!(ncclEpCombineInputs_t, tokens) - 8usize];
    [
        "Offset of field: ncclEpCombineInputs_t::topk_weights",
    ][::core::mem::offset_of!(ncclEpCombineInputs_t, topk_weights) - 16usize];
    [
        "Offset of field: ncclEpCombineInputs_t::scales",
    ][::core::mem::offset_of!(ncclEpCombineInputs_t, scales) - 24usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclEpCombineOutputs_t {
    pub size: ::core::ffi::c_uint,
    pub magic: ::core::ffi::c_uint,
    pub tokens: *mut ncclEpTensor_t,
    pub topk_weights: *mut ncclEpTensor_t,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclEpCombineOutputs_t",
    ][::core::mem::size_of::<ncclEpCombineOutputs_t>() - 24usize];
    [
        "Alignment of ncclEpCombineOutputs_t",
    ][::core::mem::align_of::<ncclEpCombineOutputs_t>() - 8usize];
    [
        "Offset of field: ncclEpCombineOutputs_t::size",
    ][::core::mem::offset_of!(ncclEpCombineOutputs_t, size) - 0usize];
    [
        "Offset of field: ncclEpCombineOutputs_t::magic",
    ][::core::mem::offset_of!(ncclEpCombineOutputs_t, magic) - 4usize];
    [
        "Offset of field: ncclEpCombineOutputs_t::tokens",
    ][::core::mem::offset_of!(ncclEpCombineOutputs_t, tokens) - 8usize];
    [
        "Offset of field: ncclEpCombineOutputs_t::topk_weights",
    ][::core::mem::offset_of!(ncclEpCombineOutputs_t, topk_weights) - 16usize];
};
#[repr(C)]
#[derive(Debug)]
pub struct ncclEpHandle {
    _unused: [u8; 0],
}
pub type ncclEpHandle_t = *mut ncclEpHandle;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclEpHandleConfig_t {
    pub size: ::core::ffi::c_uint,
    pub magic: ::core::ffi::c_uint,
    pub dispatch_output_per_expert_alignment: usize,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclEpHandleConfig_t",
    ][::core::mem::size_of::<ncclEpHandleConfig_t>() - 16usize];
    [
        "Alignment of ncclEpHandleConfig_t",
    ][::core::mem::align_of::<ncclEpHandleConfig_t>() - 8usize];
    [
        "Offset of field: ncclEpHandleConfig_t::size",
    ][::core::mem::offset_of!(ncclEpHandleConfig_t, size) - 0usize];
    [
        "Offset of field: ncclEpHandleConfig_t::magic",
    ][::core::mem::offset_of!(ncclEpHandleConfig_t, magic) - 4usize];
    [
        "Offset of field: ncclEpHandleConfig_t::dispatch_output_per_expert_alignment",
    ][::core::mem::offset_of!(ncclEpHandleConfig_t, dispatch_output_per_expert_alignment)
        - 8usize];
};
impl ncclEpDispQuant_t {
    pub const NCCL_EP_DISP_QUANT_NONE: ncclEpDispQuant_t = ncclEpDispQuant_t(0);
    pub const NCCL_EP_DISP_QUANT_FWD: ncclEpDispQuant_t = ncclEpDispQuant_t(1);
    pub const NCCL_EP_DISP_QUANT_DS_FP8E3M4: ncclEpDispQuant_t = ncclEpDispQuant_t(2);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclEpDispQuant_t(pub ::core::ffi::c_uint);
impl ncclEpCombQuant_t {
    pub const NCCL_EP_COMB_QUANT_NONE: ncclEpCombQuant_t = ncclEpCombQuant_t(0);
    pub const NCCL_EP_COMB_QUANT_NVFP4: ncclEpCombQuant_t = ncclEpCombQuant_t(1);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclEpCombQuant_t(pub ::core::ffi::c_uint);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclEpDispatchConfig_t {
    pub size: ::core::ffi::c_uint,
    pub magic: ::core::ffi::c_uint,
    pub send_only: ::core::ffi::c_uint,
    pub round_scales: ::core::ffi::c_uint,
    pub pass_direction: ncclEpPassDir_t,
    pub quant_recipe: ncclEpDispQuant_t,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclEpDispatchConfig_t",
    ][::core::mem::size_of::<ncclEpDispatchConfig_t>() - 24usize];
    [
        "Alignment of ncclEpDispatchConfig_t",
    ][::core::mem::align_of::<ncclEpDispatchConfig_t>() - 4usize];
    [
        "Offset of field: ncclEpDispatchConfig_t::size",
    ][::core::mem::offset_of!(ncclEpDispatchConfig_t, size) - 0usize];
    [
        "Offset of field: ncclEpDispatchConfig_t::magic",
    ][::core::mem::offset_of!(ncclEpDispatchConfig_t, magic) - 4usize];
    [
        "Offset of field: ncclEpDispatchConfig_t::send_only",
    ][::core::mem::offset_of!(ncclEpDispatchConfig_t, send_only) - 8usize];
    [
        "Offset of field: ncclEpDispatchConfig_t::round_scales",
    ][::core::mem::offset_of!(ncclEpDispatchConfig_t, round_scales) - 12usize];
    [
        "Offset of field: ncclEpDispatchConfig_t::pass_direction",
    ][::core::mem::offset_of!(ncclEpDispatchConfig_t, pass_direction) - 16usize];
    [
        "Offset of field: ncclEpDispatchConfig_t::quant_recipe",
    ][::core::mem::offset_of!(ncclEpDispatchConfig_t, quant_recipe) - 20usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclEpCombineConfig_t {
    pub size: ::core::ffi::c_uint,
    pub magic: ::core::ffi::c_uint,
    pub send_only: ::core::ffi::c_uint,
    pub pass_direction: ncclEpPassDir_t,
    pub quant_recipe: ncclEpCombQuant_t,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclEpCombineConfig_t",
    ][::core::mem::size_of::<ncclEpCombineConfig_t>() - 20usize];
    [
        "Alignment of ncclEpCombineConfig_t",
    ][::core::mem::align_of::<ncclEpCombineConfig_t>() - 4usize];
    [
        "Offset of field: ncclEpCombineConfig_t::size",
    ][::core::mem::offset_of!(ncclEpCombineConfig_t, size) - 0usize];
    [
        "Offset of field: ncclEpCombineConfig_t::magic",
    ][::core::mem::offset_of!(ncclEpCombineConfig_t, magic) - 4usize];
    [
        "Offset of field: ncclEpCombineConfig_t::send_only",
    ][::core::mem::offset_of!(ncclEpCombineConfig_t, send_only) - 8usize];
    [
        "Offset of field: ncclEpCombineConfig_t::pass_direction",
    ][::core::mem::offset_of!(ncclEpCombineConfig_t, pass_direction) - 12usize];
    [
        "Offset of field: ncclEpCombineConfig_t::quant_recipe",
    ][::core::mem::offset_of!(ncclEpCombineConfig_t, quant_recipe) - 16usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclEpCompleteConfig {
    pub size: ::core::ffi::c_uint,
    pub magic: ::core::ffi::c_uint,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclEpCompleteConfig",
    ][::core::mem::size_of::<ncclEpCompleteConfig>() - 8usize];
    [
        "Alignment of ncclEpCompleteConfig",
    ][::core::mem::align_of::<ncclEpCompleteConfig>() - 4usize];
    [
        "Offset of field: ncclEpCompleteConfig::size",
    ][::core::mem::offset_of!(ncclEpCompleteConfig, size) - 0usize];
    [
        "Offset of field: ncclEpCompleteConfig::magic",
    ][::core::mem::offset_of!(ncclEpCompleteConfig, magic) - 4usize];
};
pub type ncclEpCompleteConfig_t = ncclEpCompleteConfig;
