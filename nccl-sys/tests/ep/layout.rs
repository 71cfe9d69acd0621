//! The sizes of the structs in each version of their ABI, which the header states beside the structs.

use std::collections::BTreeSet;

use nccl_sys::ep::*;

/// A boundary of a struct: its name, the constant of the header, that constant's value, and the end of the last field.
type Boundary = (&'static str, &'static str, usize, usize);

/// Returns the end of a field.
macro_rules! end {
    ($type:ident, $field:ident) => {{
        const fn size_of_pointee<T>(_: *const T) -> usize {
            size_of::<T>()
        }
        let value = $type::init();
        std::mem::offset_of!($type, $field) + size_of_pointee(&raw const value.$field)
    }};
}

macro_rules! boundaries {
    ($($type:ident { $($field:ident: $size:ident),* })*) => {
        vec![$($((stringify!($type), stringify!($size), $size as usize, end!($type, $field))),*),*]
    };
}

/// The last field of each version, which is not a constant in C, and the constant with its end.
fn boundaries() -> Vec<Boundary> {
    boundaries! {
        ncclEpTensor_t { sizes: NCCL_EP_TENSOR_V1_SIZE }
        ncclEpTensorAllocConfig_t { magic: NCCL_EP_TENSOR_ALLOC_CONFIG_V1_SIZE }
        ncclEpGroupConfig_t {
            timeout_ns: NCCL_EP_GROUP_CONFIG_V1_SIZE, padding_v2: NCCL_EP_GROUP_CONFIG_V2_SIZE
        }
        ncclEpLayoutInfo_t {
            recv_total_counter: NCCL_EP_LAYOUT_INFO_V1_SIZE, padding_v2: NCCL_EP_LAYOUT_INFO_V2_SIZE
        }
        ncclEpDispatchInputs_t { scales: NCCL_EP_DISPATCH_INPUTS_V1_SIZE }
        ncclEpDispatchOutputs_t { topk_idx: NCCL_EP_DISPATCH_OUTPUTS_V1_SIZE }
        ncclEpCombineInputs_t {
            topk_weights: NCCL_EP_COMBINE_INPUTS_V1_SIZE, scales: NCCL_EP_COMBINE_INPUTS_V2_SIZE
        }
        ncclEpCombineOutputs_t { topk_weights: NCCL_EP_COMBINE_OUTPUTS_V1_SIZE }
        ncclEpHandleConfig_t {
            dispatch_output_per_expert_alignment: NCCL_EP_HANDLE_CONFIG_V1_SIZE
        }
        ncclEpDispatchConfig_t {
            pass_direction: NCCL_EP_DISPATCH_CONFIG_V1_SIZE, quant_recipe: NCCL_EP_DISPATCH_CONFIG_V2_SIZE
        }
        ncclEpCombineConfig_t {
            pass_direction: NCCL_EP_COMBINE_CONFIG_V1_SIZE, quant_recipe: NCCL_EP_COMBINE_CONFIG_V2_SIZE
        }
        ncclEpCompleteConfig_t { magic: NCCL_EP_COMPLETE_CONFIG_V1_SIZE }
    }
}

#[test]
fn each_version_of_a_struct_ends_where_the_header_says() {
    for (of, constant, size, end) in boundaries() {
        assert_eq!(end, size, "{of}: {constant}");
    }
}

#[test]
fn a_struct_is_as_large_as_its_newest_version() {
    macro_rules! sizes {
        ($($type:ident: $size:ident, $version:ident = $number:literal;)*) => {$(
            assert_eq!(size_of::<$type>(), $size as usize, stringify!($type));
            assert_eq!($version, $number, stringify!($type));
            assert!(stringify!($size).ends_with(concat!("_V", $number, "_SIZE")));
        )*};
    }
    sizes! {
        ncclEpTensor_t: NCCL_EP_TENSOR_V1_SIZE, NCCL_EP_TENSOR_CURRENT_VERSION = 1;
        ncclEpTensorAllocConfig_t: NCCL_EP_TENSOR_ALLOC_CONFIG_V1_SIZE, NCCL_EP_TENSOR_ALLOC_CONFIG_CURRENT_VERSION = 1;
        ncclEpGroupConfig_t: NCCL_EP_GROUP_CONFIG_V2_SIZE, NCCL_EP_GROUP_CONFIG_CURRENT_VERSION = 2;
        ncclEpLayoutInfo_t: NCCL_EP_LAYOUT_INFO_V2_SIZE, NCCL_EP_LAYOUT_INFO_CURRENT_VERSION = 2;
        ncclEpDispatchInputs_t: NCCL_EP_DISPATCH_INPUTS_V1_SIZE, NCCL_EP_DISPATCH_INPUTS_CURRENT_VERSION = 1;
        ncclEpDispatchOutputs_t: NCCL_EP_DISPATCH_OUTPUTS_V1_SIZE, NCCL_EP_DISPATCH_OUTPUTS_CURRENT_VERSION = 1;
        ncclEpCombineInputs_t: NCCL_EP_COMBINE_INPUTS_V2_SIZE, NCCL_EP_COMBINE_INPUTS_CURRENT_VERSION = 2;
        ncclEpCombineOutputs_t: NCCL_EP_COMBINE_OUTPUTS_V1_SIZE, NCCL_EP_COMBINE_OUTPUTS_CURRENT_VERSION = 1;
        ncclEpHandleConfig_t: NCCL_EP_HANDLE_CONFIG_V1_SIZE, NCCL_EP_HANDLE_CONFIG_CURRENT_VERSION = 1;
        ncclEpDispatchConfig_t: NCCL_EP_DISPATCH_CONFIG_V2_SIZE, NCCL_EP_DISPATCH_CONFIG_CURRENT_VERSION = 2;
        ncclEpCombineConfig_t: NCCL_EP_COMBINE_CONFIG_V2_SIZE, NCCL_EP_COMBINE_CONFIG_CURRENT_VERSION = 2;
        ncclEpCompleteConfig_t: NCCL_EP_COMPLETE_CONFIG_V1_SIZE, NCCL_EP_COMPLETE_CONFIG_CURRENT_VERSION = 1;
    }
}

#[test]
fn every_size_of_the_header_is_compared() {
    let types = include_str!("../../src/ep/bindings/types.rs");
    let named: BTreeSet<_> = types
        .lines()
        .filter_map(|line| line.strip_prefix("pub const ")?.split(':').next())
        .filter(|name| name.ends_with("_SIZE"))
        .collect();
    let compared: BTreeSet<_> = boundaries().iter().map(|boundary| boundary.1).collect();
    assert_eq!(named, compared);
}

#[test]
fn every_struct_with_a_size_has_an_initialiser_and_begins_with_size_and_magic_number() {
    let initializers = include_str!("../../src/ep/bindings/initializers.rs");
    let initialised: BTreeSet<_> = initializers
        .lines()
        .filter_map(|line| line.trim().split_once(": ")?.1.split(' ').next())
        .collect();
    let structs: BTreeSet<_> = boundaries().iter().map(|boundary| boundary.0).collect();
    assert_eq!(initialised, structs);
    assert_eq!(ncclEpTensor_t::default().magic, NCCL_EP_TENSOR_MAGIC);
    let config = ncclEpGroupConfig_t::default();
    assert_eq!(config.size, NCCL_EP_GROUP_CONFIG_V2_SIZE);
    assert_eq!((config.magic, config.version), (NCCL_EP_MAGIC, 2));
    assert!(config.alloc.alloc_fn.is_none() && config.num_experts == NCCL_EP_AUTO);
}
