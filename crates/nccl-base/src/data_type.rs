//! Element types, known at run time.

use std::fmt;
use std::hash::{Hash, Hasher};

use nccl_sys as sys;

/// The type of a buffer's elements, as NCCL names it (`ncclDataType_t`).
///
/// Two values are equal if their codes are: `Other(7)` is [`Float32`](Self::Float32). [`from_raw`](Self::from_raw) returns `Other` only
/// for a code without a variant of its own.
///
/// ```
/// use nccl::DataType;
/// assert_eq!(DataType::BFloat16.size_in_bytes(), Some(2));
/// assert_eq!(DataType::Float32.to_string(), "f32");
/// ```
#[derive(Clone, Copy)]
#[non_exhaustive]
pub enum DataType {
    /// Signed 8-bit integer.
    Int8,
    /// Unsigned 8-bit integer.
    UInt8,
    /// Signed 32-bit integer.
    Int32,
    /// Unsigned 32-bit integer.
    UInt32,
    /// Signed 64-bit integer.
    Int64,
    /// Unsigned 64-bit integer.
    UInt64,
    /// IEEE 754 half precision.
    Float16,
    /// IEEE 754 single precision.
    Float32,
    /// IEEE 754 double precision.
    Float64,
    /// Brain floating point: the upper half of an `f32`.
    BFloat16,
    /// 8-bit float with 4 exponent bits (NCCL ≥ 2.24.3; reductions need compute capability 9.0).
    Float8E4M3,
    /// 8-bit float with 5 exponent bits (NCCL ≥ 2.24.3; reductions need compute capability 9.0).
    Float8E5M2,
    /// A type that this crate does not know, by its code.
    Other(u32),
}

macro_rules! data_types {
    ($($name:ident = $raw:ident, $size:literal, $text:literal;)*) => {
        impl DataType {
            /// Every type of NCCL 2.32, in NCCL's order.
            ///
            /// ```
            /// assert!(nccl::DataType::ALL.contains(&nccl::DataType::BFloat16));
            /// ```
            pub const ALL: &'static [DataType] = &[$(DataType::$name),*];

            /// Returns the type with a code of `ncclDataType_t`, known to this crate or not.
            ///
            /// ```
            /// use nccl::DataType;
            /// assert_eq!(DataType::from_raw(7), DataType::Float32);
            /// assert_eq!(DataType::from_raw(99).size_in_bytes(), None);
            /// ```
            #[must_use]
            pub const fn from_raw(code: u32) -> Self {
                match sys::ncclDataType_t(code) {
                    $(sys::ncclDataType_t::$raw => Self::$name,)*
                    _ => Self::Other(code),
                }
            }

            /// Returns the code of `ncclDataType_t`.
            ///
            /// ```
            /// assert_eq!(nccl::DataType::Float32.as_raw(), 7);
            /// ```
            #[must_use]
            pub const fn as_raw(self) -> u32 {
                match self {
                    $(Self::$name => sys::ncclDataType_t::$raw.0,)*
                    Self::Other(code) => code,
                }
            }

            /// The size of one element in bytes; `None` for a type this crate does not know.
            ///
            /// ```
            /// assert_eq!(nccl::DataType::Float8E4M3.size_in_bytes(), Some(1));
            /// ```
            #[must_use]
            pub const fn size_in_bytes(self) -> Option<usize> {
                match self.raw() {
                    $(sys::ncclDataType_t::$raw => Some($size),)*
                    _ => None,
                }
            }

            fn text(self) -> Option<&'static str> {
                match self.raw() {
                    $(sys::ncclDataType_t::$raw => Some($text),)*
                    _ => None,
                }
            }
        }
    };
}

data_types! {
    Int8 = ncclInt8, 1, "i8";
    UInt8 = ncclUint8, 1, "u8";
    Int32 = ncclInt32, 4, "i32";
    UInt32 = ncclUint32, 4, "u32";
    Int64 = ncclInt64, 8, "i64";
    UInt64 = ncclUint64, 8, "u64";
    Float16 = ncclFloat16, 2, "f16";
    Float32 = ncclFloat32, 4, "f32";
    Float64 = ncclFloat64, 8, "f64";
    BFloat16 = ncclBfloat16, 2, "bf16";
    Float8E4M3 = ncclFloat8e4m3, 1, "f8e4m3";
    Float8E5M2 = ncclFloat8e5m2, 1, "f8e5m2";
}

impl DataType {
    #[doc(hidden)]
    pub const fn raw(self) -> sys::ncclDataType_t {
        sys::ncclDataType_t(self.as_raw())
    }

    /// Returns the release that added the type, where that is later than the oldest supported library.
    #[doc(hidden)]
    pub const fn since(self) -> Option<sys::Version> {
        match Self::from_raw(self.as_raw()) {
            Self::Float8E4M3 | Self::Float8E5M2 => Some(sys::Version::new(2, 24, 3)),
            _ => None,
        }
    }
}

impl PartialEq for DataType {
    fn eq(&self, other: &Self) -> bool {
        self.as_raw() == other.as_raw()
    }
}

impl Eq for DataType {}

impl Hash for DataType {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_raw().hash(state);
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.text() {
            Some(text) => f.write_str(text),
            None => write!(f, "ncclDataType_t({})", self.as_raw()),
        }
    }
}

impl fmt::Debug for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_is_the_one_with_its_code() {
        for &one in DataType::ALL {
            assert!(!matches!(
                DataType::from_raw(one.as_raw()),
                DataType::Other(_)
            ));
            assert_eq!(DataType::Other(one.as_raw()), one);
            assert_eq!(
                DataType::Other(one.as_raw()).size_in_bytes(),
                one.size_in_bytes()
            );
        }
        assert_ne!(DataType::Other(99), DataType::Float32);
        assert_eq!(DataType::from_raw(99).to_string(), "ncclDataType_t(99)");
    }
}
