//! Encodes values as bytes and decodes them, between processes of one release; the ranks' greeting refuses other
//! releases.
//!
//! The types derive their encoding. Further conditions on a value are declared at its fields, like [`clean`] for
//! displayed texts and for times. Decoding allocates memory only for bytes that have arrived, never for an announced
//! length.
//!
//! ```
//! # use std::time::Duration;
//! # use serde::{Deserialize, Serialize};
//! # use nccl_base::wire::{bytes, clean, decode, encode};
//! #[derive(Serialize, Deserialize)]
//! struct Said {
//!     topic: String,
//!     #[serde(deserialize_with = "clean")]
//!     words: String,
//!     #[serde(deserialize_with = "clean")]
//!     age: Option<Duration>,
//!     #[serde(with = "bytes")]
//!     part: Vec<u8>,
//! }
//! # let (topic, words, age) = (String::from("t"), String::from("\x1b[2J"), None);
//! let sent = encode(&Said { topic, words, age, part: vec![7; 9] });
//! let said: Said = decode(&sent).unwrap();
//! assert_eq!(said.words, "\u{fffd}[2J");
//! ```

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize};

use crate::sanitize;

/// Why bytes are not a frame or message of this protocol; completes a sentence that begins with "it sent".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct Broken(pub &'static str);

#[cfg(feature = "wire")]
#[doc(hidden)]
pub fn encode<T: Serialize + ?Sized>(value: &T) -> Vec<u8> {
    // A value that cannot be encoded becomes an empty message, which the receiver cannot decode.
    postcard::to_allocvec(value).unwrap_or_default()
}

/// Decodes a message; fails if bytes are left over.
#[cfg(feature = "wire")]
#[doc(hidden)]
pub fn decode<'b, T: Deserialize<'b>>(bytes: &'b [u8]) -> Result<T, Broken> {
    use postcard::Error;

    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok(_) => Err(Broken("bytes behind the end of a message")),
        Err(Error::DeserializeUnexpectedEnd) => Err(Broken("a message that is cut off")),
        Err(Error::DeserializeBadUtf8) => Err(Broken("a text that is not UTF-8")),
        Err(_) => Err(Broken("a message of an unknown kind")),
    }
}

/// Without the feature `wire`, nothing is sent.
#[cfg(not(feature = "wire"))]
#[doc(hidden)]
pub fn encode<T: Serialize + ?Sized>(_: &T) -> Vec<u8> {
    Vec::new()
}

#[cfg(not(feature = "wire"))]
#[doc(hidden)]
pub fn decode<'b, T: Deserialize<'b>>(_: &'b [u8]) -> Result<T, Broken> {
    Err(Broken("a message to a process without others"))
}

/// Returns the FNV-1a checksum: detects damage, and does not protect against forgery.
#[doc(hidden)]
pub fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Maximum duration accepted from another process: about 30 years, so that adding it to a time cannot overflow.
const LONGEST: Duration = Duration::from_secs(1_000_000_000);

/// A value that is brought within bounds when it is received from another process.
#[doc(hidden)]
pub trait Clean {
    fn clean(&mut self);
}

/// For displayed text only, not for keys, topics or addresses, which must stay unchanged.
impl Clean for String {
    fn clean(&mut self) {
        if !sanitize::is_plain(self) {
            *self = sanitize::text(self);
        }
    }
}

impl Clean for Duration {
    fn clean(&mut self) {
        *self = (*self).min(LONGEST);
    }
}

impl<T: Clean> Clean for Option<T> {
    fn clean(&mut self) {
        self.iter_mut().for_each(T::clean);
    }
}

impl<T: Clean> Clean for Vec<T> {
    fn clean(&mut self) {
        self.iter_mut().for_each(T::clean);
    }
}

impl<T: Clean, U: Clean> Clean for (T, U) {
    fn clean(&mut self) {
        self.0.clean();
        self.1.clean();
    }
}

/// For `#[serde(deserialize_with = "clean")]`.
#[doc(hidden)]
pub fn clean<'d, D: Deserializer<'d>, T: Deserialize<'d> + Clean>(from: D) -> Result<T, D::Error> {
    let mut value = T::deserialize(from)?;
    value.clean();
    Ok(value)
}

/// For `#[serde(with = "bytes")]`: encodes bytes in one piece instead of one by one. A format that cannot lend bytes, like
/// JSON, cannot decode them.
#[doc(hidden)]
pub mod bytes {
    use serde::{Deserialize, Deserializer, Serializer};

    #[doc(hidden)]
    pub fn serialize<S: Serializer>(bytes: &impl AsRef<[u8]>, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(bytes.as_ref())
    }

    #[doc(hidden)]
    pub fn deserialize<'d, D: Deserializer<'d>, T: From<&'d [u8]>>(from: D) -> Result<T, D::Error> {
        <&[u8]>::deserialize(from).map(T::from)
    }
}

#[cfg(all(test, feature = "wire"))]
mod tests {
    use std::fmt::Debug;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Part(#[serde(with = "bytes")] Vec<u8>);

    fn why<T: for<'b> Deserialize<'b> + Debug>(bytes: &[u8]) -> &'static str {
        decode::<T>(bytes).unwrap_err().0
    }

    #[test]
    fn what_is_wrong_with_a_message_is_said_in_a_few_words() {
        let bytes = encode(&(7u64, "text"));
        assert_eq!(decode(&bytes), Ok((7u64, "text")));
        let more = [&bytes[..], &[0]].concat();
        assert_eq!(
            why::<(u64, String)>(&more),
            "bytes behind the end of a message"
        );
        let cut = &bytes[..bytes.len() - 1];
        assert_eq!(why::<(u64, String)>(cut), "a message that is cut off");
        assert_eq!(why::<String>(&[1, 0xff]), "a text that is not UTF-8");
        assert_eq!(why::<Option<u8>>(&[2]), "a message of an unknown kind");
    }

    #[test]
    fn a_length_that_promises_more_than_has_come_takes_no_memory() {
        // 2⁶⁴ − 1, and a byte.
        let promise = [&[0xff; 9][..], &[1, 7]].concat();
        for why in [
            why::<Vec<[u64; 32]>>(&promise),
            why::<Vec<String>>(&promise),
            why::<String>(&promise),
            why::<Part>(&promise),
        ] {
            assert_eq!(why, "a message that is cut off");
        }
    }

    #[test]
    fn bytes_come_back_as_they_were_behind_their_length() {
        let part = Part((0..=255).cycle().take(64 << 10).collect());
        let bytes = encode(&part);
        assert_eq!(bytes.len(), part.0.len() + 3);
        assert_eq!(decode(&bytes), Ok(part));
    }
}
