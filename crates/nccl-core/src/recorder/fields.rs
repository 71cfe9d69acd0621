//! How single values are serialized, for serde's `with`.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use nccl_base::data_type::DataType;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::operation::OperationKind;

/// The length of a value's JSON, in bytes.
pub(super) fn length(value: &impl Serialize) -> usize {
    struct Count(usize);
    impl std::io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    // Counting does not fail.
    let _ = serde_json::to_writer(&mut count, value);
    count.0
}

/// Whether a count is 0, and is not written.
pub(super) fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// A time span as nanoseconds.
pub(super) mod nanoseconds {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(span: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        u64::deserialize(from).map(Duration::from_nanos)
    }
}

/// An optional time span.
pub(super) mod nanoseconds_if_any {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(
        span: &Option<Duration>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        match span {
            Some(span) => nanoseconds::serialize(span, to),
            None => to.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Duration>, D::Error> {
        Ok(Option::<u64>::deserialize(from)?.map(Duration::from_nanos))
    }
}

/// A point in time as nanoseconds since 1970.
pub(super) mod unix_time {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(at: &SystemTime, to: S) -> Result<S::Ok, S::Error> {
        nanoseconds::serialize(&since_1970(*at), to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<SystemTime, D::Error> {
        // At most 584 years after 1970.
        nanoseconds::deserialize(from).map(|span| SystemTime::UNIX_EPOCH + span)
    }
}

#[doc(hidden)]
pub fn since_1970(at: SystemTime) -> Duration {
    at.duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
}

/// A handle, of CUDA or another library, in hexadecimal: JavaScript's numbers do not hold 64 bits.
pub(super) mod handle {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(handle: &u64, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&format_args!("{handle:#x}"))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
        let text = String::deserialize(from)?;
        let digits = text.strip_prefix("0x").unwrap_or("");
        u64::from_str_radix(digits, 16)
            .map_err(|_| serde::de::Error::custom(format_args!("{text:?} is no handle: write 0x…")))
    }
}

/// Parses a value from its printed name.
fn named<'de, T: FromStr<Err = ()>, D: Deserializer<'de>>(
    from: D,
    what: &str,
) -> Result<T, D::Error> {
    let text = String::deserialize(from)?;
    let unknown = |()| serde::de::Error::custom(format_args!("{text:?} is no {what}"));
    text.parse().map_err(unknown)
}

macro_rules! by_name {
    ($module:ident, $type:ty, $what:literal) => {
        pub(super) mod $module {
            use super::*;

            pub(crate) fn serialize<S: Serializer>(
                value: &$type,
                to: S,
            ) -> Result<S::Ok, S::Error> {
                to.collect_str(&Named(*value))
            }

            pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
                from: D,
            ) -> Result<$type, D::Error> {
                named::<Named<$type>, D>(from, $what).map(|named| named.0)
            }
        }
    };
}

by_name!(operation_kind, OperationKind, "operation");
by_name!(data_type, DataType, "element type");

struct Named<T>(T);

impl<T: fmt::Display> fmt::Display for Named<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Named<OperationKind> {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut all = OperationKind::ALL.into_iter();
        all.find(|kind| kind.to_string() == text)
            .map(Self)
            .ok_or(())
    }
}

impl FromStr for Named<DataType> {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let known = DataType::ALL.iter().copied();
        if let Some(known) = known.into_iter().find(|known| known.to_string() == text) {
            return Ok(Self(known));
        }
        let code = text
            .strip_prefix("ncclDataType_t(")
            .and_then(|rest| rest.strip_suffix(')'));
        let code = code.and_then(|code| code.parse().ok());
        code.map(|code| Self(DataType::from_raw(code))).ok_or(())
    }
}
