//! What is generated from `nccl_ep.h`: types and constants, and the initialisers as functions.

// The names are C's.
#![allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals
)]

use crate::Version;
use crate::bindings::types::*;

include!("bindings/types.rs");

/// The version of the library whose header was bound.
///
/// ```
/// assert_eq!(nccl_sys::ep::VERSION.to_string(), "0.2.0");
/// ```
pub const VERSION: Version = Version::new(
    NCCL_EP_MAJOR as u32,
    NCCL_EP_MINOR as u32,
    NCCL_EP_PATCH as u32,
);

/// Makes the initialisers of the structs, of a list of the header's macros with the fields that they set beside `size`.
macro_rules! nccl_ep_initializers {
    ($($macro_name:ident: $type:ident { $($field:ident: $value:ident),* })*) => {
        $(
            impl $type {
                #[doc = concat!("Returns `", stringify!($macro_name), "`: size and magic number, and all other fields zero.")]
                ///
                /// ```
                #[doc = concat!("use nccl_sys::ep::", stringify!($type), ";")]
                ///
                #[doc = concat!("let value = ", stringify!($type), "::init();")]
                #[doc = concat!("assert_eq!(value.size as usize, size_of::<", stringify!($type), ">());")]
                /// ```
                pub const fn init() -> Self {
                    // SAFETY: integers, enums that are integers, raw pointers and optional functions, for which zero
                    // is a value.
                    let mut value: Self = unsafe { core::mem::zeroed() };
                    value.size = size_of::<Self>() as core::ffi::c_uint;
                    $(value.$field = $value;)*
                    value
                }
            }

            impl Default for $type {
                fn default() -> Self {
                    Self::init()
                }
            }
        )*
    };
}

include!("bindings/initializers.rs");
