//! How a recording is written and read. `docs/flight-recorder.md` has the format.
//!
//! The input comes from a file or from another process: it may be cut off, be from another release, or be something
//! else entirely. No number in it is trusted, and no number determines how much memory is allocated.

use serde::{Deserialize, Serialize};

use super::snapshot::Snapshot;
use crate::error::{Error, Result};

/// The version of the format. New fields do not change it; a change of meaning does.
const SCHEMA: u64 = 2;

/// The kind that a text declares.
#[doc(hidden)]
#[must_use]
pub fn kind(text: &str) -> Option<String> {
    serde_json::from_str::<Seal>(text).ok()?.kind
}

/// The start of every file. Read first, because it decides the meaning of the rest.
#[derive(Deserialize)]
struct Seal {
    kind: Option<String>,
    schema: Option<u64>,
}

const SNAPSHOT: &str = "nccl-recording";
#[doc(hidden)]
pub const TIMELINE: &str = "nccl-timeline";

/// Writes `content` with its kind and the version of the format.
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
    // Serializing cannot fail: no map has keys that are not strings.
    serde_json::to_string(&sealed).unwrap_or_default()
}

/// Reads what [`write`] wrote of the `wanted` kind, unless it is `implausible`.
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

/// More ranks than NCCL was ever started with; this number and larger ones are not valid ranks.
#[doc(hidden)]
pub const MOST_RANKS: usize = 1 << 20;

/// Returns why a snapshot that could be parsed is not plausible.
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
    /// Returns the snapshot as JSON, in the format of `docs/flight-recorder.md`.
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

    /// Reads what [`to_json`](Self::to_json) wrote, in this process or another.
    ///
    /// # Errors
    /// [`ErrorKind::Io`](crate::ErrorKind::Io) when `text` is not JSON, not a recording, or of another version of the
    /// format; the error says which.
    ///
    /// ```
    /// let error = nccl::recorder::Snapshot::from_json("{\"kind\": \"nccl-rec").unwrap_err();
    /// assert!(error.to_string().contains("cut off"));
    /// ```
    pub fn from_json(text: &str) -> Result<Self> {
        read(SNAPSHOT, text, implausible)
    }
}
