//! Element types that NCCL can move and reduce.
//!
//! [`DataType`] is a run-time value that can hold any code, so that a type of a newer library is a number and never
//! undefined behaviour; [`NcclType`] ties a Rust type to it at compile time.

pub use nccl_base::data_type::DataType;

mod sealed {
    pub trait Sealed {}
}

/// A Rust type whose values NCCL can move and reduce.
///
/// Sealed: `bool` and `char` are left out on purpose, because received bytes need
/// not be valid values of them. The 8-bit floats have Rust types with the feature `float8`; without it
/// they are passed as [`Erased`](crate::Erased) bytes.
///
/// ```
/// use nccl::{DataType, NcclType};
/// assert_eq!(<f32 as NcclType>::DATA_TYPE, DataType::Float32);
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an element type of NCCL",
    label = "not an element type of NCCL",
    note = "the element types are `i8`, `u8`, `i32`, `u32`, `i64`, `u64`, `f32` and `f64`, with the feature `half` also `f16` and `bf16`, with `float8` also `F8E4M3` and `F8E5M2`",
    note = "other values can be sent as bytes (`u8`)"
)]
pub trait NcclType: sealed::Sealed + Copy + Send + Sync + 'static {
    /// NCCL's name for the type.
    const DATA_TYPE: DataType;
}

macro_rules! nccl_type {
    ($($rust:ty => $name:ident),* $(,)?) => {
        $(
            impl sealed::Sealed for $rust {}
            impl NcclType for $rust {
                const DATA_TYPE: DataType = DataType::$name;
            }
        )*
    };
}

nccl_type! {
    i8 => Int8,
    u8 => UInt8,
    i32 => Int32,
    u32 => UInt32,
    i64 => Int64,
    u64 => UInt64,
    f32 => Float32,
    f64 => Float64,
}

#[cfg(feature = "half")]
nccl_type! {
    half::f16 => Float16,
    half::bf16 => BFloat16,
}

#[cfg(feature = "float8")]
nccl_type! {
    float8::F8E4M3 => Float8E4M3,
    float8::F8E5M2 => Float8E5M2,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rust_types_have_the_size_that_nccl_expects() {
        fn check<T: NcclType>() {
            assert_eq!(
                T::DATA_TYPE.size_in_bytes(),
                Some(size_of::<T>()),
                "{}",
                T::DATA_TYPE
            );
        }
        check::<i8>();
        check::<u8>();
        check::<i32>();
        check::<u32>();
        check::<i64>();
        check::<u64>();
        #[cfg(feature = "half")]
        check::<half::f16>();
        check::<f32>();
        check::<f64>();
        #[cfg(feature = "half")]
        check::<half::bf16>();
        #[cfg(feature = "float8")]
        check::<float8::F8E4M3>();
        #[cfg(feature = "float8")]
        check::<float8::F8E5M2>();
    }

    #[test]
    fn an_unknown_type_is_kept_and_printed_as_a_number() {
        let later = DataType::from_raw(42);
        assert_eq!(later.as_raw(), 42);
        assert_eq!(later.to_string(), "ncclDataType_t(42)");
    }
}
