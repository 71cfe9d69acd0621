//! Element types, known at run time.

use std::fmt;

use nccl_sys as sys;

/// The type of a buffer's elements, as NCCL names it (`ncclDataType_t`).
///
/// ```
/// use nccl::DataType;
/// assert_eq!(DataType::BFLOAT16.size_in_bytes(), Some(2));
/// assert_eq!(DataType::FLOAT32.to_string(), "f32");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DataType(sys::ncclDataType_t);

macro_rules! data_types {
    ($($(#[$doc:meta])* $name:ident = $raw:ident, $size:literal, $text:literal;)*) => {
        impl DataType {
            $($(#[$doc])* pub const $name: DataType = DataType(sys::ncclDataType_t::$raw);)*

            /// Every type of NCCL 2.32, in NCCL's order.
            ///
            /// ```
            /// assert!(nccl::DataType::ALL.contains(&nccl::DataType::BFLOAT16));
            /// ```
            pub const ALL: &'static [DataType] = &[$(DataType::$name),*];

            /// The size of one element in bytes; `None` for a type this crate does not know.
            ///
            /// ```
            /// assert_eq!(nccl::DataType::FLOAT8_E4M3.size_in_bytes(), Some(1));
            /// ```
            #[must_use]
            pub const fn size_in_bytes(self) -> Option<usize> {
                match self.0 {
                    $(sys::ncclDataType_t::$raw => Some($size),)*
                    _ => None,
                }
            }

            fn text(self) -> Option<&'static str> {
                match self.0 {
                    $(sys::ncclDataType_t::$raw => Some($text),)*
                    _ => None,
                }
            }
        }
    };
}

data_types! {
    /// Signed 8-bit integer.
    INT8 = ncclInt8, 1, "i8";
    /// Unsigned 8-bit integer.
    UINT8 = ncclUint8, 1, "u8";
    /// Signed 32-bit integer.
    INT32 = ncclInt32, 4, "i32";
    /// Unsigned 32-bit integer.
    UINT32 = ncclUint32, 4, "u32";
    /// Signed 64-bit integer.
    INT64 = ncclInt64, 8, "i64";
    /// Unsigned 64-bit integer.
    UINT64 = ncclUint64, 8, "u64";
    /// IEEE 754 half precision.
    FLOAT16 = ncclFloat16, 2, "f16";
    /// IEEE 754 single precision.
    FLOAT32 = ncclFloat32, 4, "f32";
    /// IEEE 754 double precision.
    FLOAT64 = ncclFloat64, 8, "f64";
    /// Brain floating point: the upper half of an `f32`.
    BFLOAT16 = ncclBfloat16, 2, "bf16";
    /// 8-bit float with 4 exponent bits (NCCL ≥ 2.24.3; reductions need compute capability 9.0).
    FLOAT8_E4M3 = ncclFloat8e4m3, 1, "f8e4m3";
    /// 8-bit float with 5 exponent bits (NCCL ≥ 2.24.3; reductions need compute capability 9.0).
    FLOAT8_E5M2 = ncclFloat8e5m2, 1, "f8e5m2";
}

impl DataType {
    /// Wraps a code of `ncclDataType_t`, known to this crate or not.
    ///
    /// ```
    /// use nccl::DataType;
    /// assert_eq!(DataType::from_raw(7), DataType::FLOAT32);
    /// assert_eq!(DataType::from_raw(99).size_in_bytes(), None);
    /// ```
    #[must_use]
    pub const fn from_raw(code: u32) -> Self {
        Self(sys::ncclDataType_t(code))
    }

    /// Returns the code of `ncclDataType_t`.
    ///
    /// ```
    /// assert_eq!(nccl::DataType::FLOAT32.as_raw(), 7);
    /// ```
    #[must_use]
    pub const fn as_raw(self) -> u32 {
        self.0.0
    }

    #[doc(hidden)]
    pub const fn raw(self) -> sys::ncclDataType_t {
        self.0
    }

    /// Returns the release that added the type, where that is later than the oldest supported library.
    #[doc(hidden)]
    pub const fn since(self) -> Option<sys::Version> {
        match self {
            Self::FLOAT8_E4M3 | Self::FLOAT8_E5M2 => Some(sys::Version::new(2, 24, 3)),
            _ => None,
        }
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.text() {
            Some(text) => f.write_str(text),
            None => write!(f, "ncclDataType_t({})", self.0.0),
        }
    }
}

impl fmt::Debug for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
