//! How a recording is written, and read again. `docs/flight-recorder.md` has the format.
//!
//! What is read comes from a file or from another process: it may be cut off, of another release, or
//! something else altogether. Nothing here trusts a number in it, and no number decides how much memory is
//! taken.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::snapshot::Snapshot;
use crate::dtype::DataType;
use crate::error::{Error, Result};
use crate::operation::OperationKind;

/// The version of the format. Fields may be added to it; what changes meaning makes a new one.
const SCHEMA: u64 = 1;

/// Of what kind a text says that it is.
#[doc(hidden)]
#[must_use]
pub fn kind(text: &str) -> Option<String> {
    serde_json::from_str::<Seal>(text).ok()?.kind
}

/// What every file begins with. Read first, because it decides what the rest means.
#[derive(Deserialize)]
struct Seal {
    kind: Option<String>,
    schema: Option<u64>,
}

const SNAPSHOT: &str = "nccl-recording";
#[doc(hidden)]
pub const TIMELINE: &str = "nccl-timeline";

/// With what it is, and of which version of the format.
#[doc(hidden)]
pub fn write<T: Serialize>(kind: &str, content: &T) -> String {
    #[derive(Serialize)]
    struct Borrowed<'a, T> {
        kind: &'a str,
        schema: u64,
        #[serde(flatten)]
        content: &'a T,
    }
    let sealed = Borrowed {
        kind,
        schema: SCHEMA,
        content,
    };
    // Nothing in it can be refused: no map has keys that are not strings.
    serde_json::to_string(&sealed).unwrap_or_default()
}

/// What [`write`] wrote of the `wanted` kind, unless it is `implausible`.
#[doc(hidden)]
pub fn read<'a, T: Deserialize<'a>>(
    wanted: &str,
    text: &'a str,
    implausible: impl FnOnce(&T) -> Option<String>,
) -> Result<T> {
    let refused = |why: String| {
        let error = std::io::Error::new(std::io::ErrorKind::InvalidData, why);
        Error::io("reading a recording of the flight recorder")(error)
    };
    if text.trim().is_empty() {
        return Err(refused(String::from(
            "it is empty: its process ended while it was written, or the disk was full",
        )));
    }
    let broken = |error: serde_json::Error| {
        let cut = match error.is_eof() {
            true => "; it was cut off",
            false => "",
        };
        refused(format!("{error}{cut}"))
    };
    let seal: Seal = serde_json::from_str(text).map_err(broken)?;
    match (seal.kind.as_deref(), seal.schema) {
        (Some(kind), Some(SCHEMA)) if kind == wanted => {}
        (Some(kind @ (SNAPSHOT | TIMELINE)), Some(SCHEMA)) => {
            return Err(refused(format!("it is a {kind}, not a {wanted}")));
        }
        (Some(SNAPSHOT | TIMELINE), Some(schema)) => {
            return Err(refused(format!(
                "it is of version {schema} of the format, and this release reads {SCHEMA}"
            )));
        }
        _ => {
            return Err(refused(format!(
                "it is no {wanted}: \"kind\" does not say so"
            )));
        }
    }
    let content = serde_json::from_str(text).map_err(broken)?;
    match implausible(&content) {
        Some(why) => Err(refused(why)),
        None => Ok(content),
    }
}

/// More ranks than NCCL was ever started with: what is not below that is no rank.
#[doc(hidden)]
pub const MOST_RANKS: usize = 1 << 20;

/// Why something that could be read cannot be meant.
#[doc(hidden)]
pub fn implausible(snapshot: &Snapshot) -> Option<String> {
    let place = snapshot.place.iter();
    let places = place.flat_map(|place| [place.rank, place.world_size]);
    let communicators = snapshot.communicators.iter().flat_map(|one| {
        let members = one.members.iter().flatten().copied();
        let operations = one.calls.iter().flat_map(|call| &call.operations);
        let ranks = operations.flat_map(|operation| [operation.peer, operation.root]);
        [one.rank, one.world_size]
            .into_iter()
            .chain(members)
            .chain(ranks.flatten())
    });
    let wrong = places.chain(communicators).find(|&rank| rank >= MOST_RANKS);
    wrong.map(|rank| format!("{rank} is no rank and no number of ranks"))
}

impl Snapshot {
    /// As JSON, in the format of `docs/flight-recorder.md`.
    ///
    /// ```
    /// let snapshot = nccl::recorder::snapshot();
    /// let again = nccl::recorder::Snapshot::from_json(&snapshot.to_json())?;
    /// assert_eq!(again, snapshot);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn to_json(&self) -> String {
        write(SNAPSHOT, self)
    }

    /// What [`to_json`](Self::to_json) wrote, in this process or another.
    ///
    /// # Errors
    /// [`ErrorKind::Io`](crate::ErrorKind::Io) says where it is no JSON or no recording, or which version of
    /// the format it is.
    ///
    /// ```
    /// let error = nccl::recorder::Snapshot::from_json("{\"kind\": \"nccl-rec").unwrap_err();
    /// assert!(error.to_string().contains("cut off"));
    /// ```
    pub fn from_json(text: &str) -> Result<Self> {
        read(SNAPSHOT, text, implausible)
    }
}

/// Bytes of something in JSON.
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

/// Whether a count need not be written.
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

/// A time span that need not be there.
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

/// A moment as nanoseconds since 1970.
pub(super) mod unix_time {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(at: &SystemTime, to: S) -> Result<S::Ok, S::Error> {
        nanoseconds::serialize(&since_1970(*at), to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<SystemTime, D::Error> {
        // 584 years at most.
        nanoseconds::deserialize(from).map(|span| SystemTime::UNIX_EPOCH + span)
    }
}

#[doc(hidden)]
pub fn since_1970(at: SystemTime) -> Duration {
    at.duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
}

/// A handle of CUDA or of another as tools print it: JavaScript's numbers do not hold it.
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

/// By the name that it is printed with.
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
