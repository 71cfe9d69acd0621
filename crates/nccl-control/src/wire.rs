//! Values as bytes and back, between processes of one release of this crate: the greeting refuses another.
//!
//! The types derive how they are written. What has to hold of a value beyond that is said at its fields
//! ([`clean`](nccl_base::wire::clean) and the like). Reading allocates for what has come, never for what a length promises.

use nccl_base::codec::Broken;
use postcard::Error;
use serde::{Deserialize, Serialize};

#[doc(hidden)]
pub fn encode<T: Serialize + ?Sized>(value: &T) -> Vec<u8> {
    // What is not meant for another process becomes nothing, which cannot be read.
    postcard::to_allocvec(value).unwrap_or_default()
}

/// Everything of a message, and nothing behind it.
#[doc(hidden)]
pub fn decode<'b, T: Deserialize<'b>>(bytes: &'b [u8]) -> Result<T, Broken> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok(_) => Err(Broken("bytes behind the end of a message")),
        Err(Error::DeserializeUnexpectedEnd) => Err(Broken("a message that is cut off")),
        Err(Error::DeserializeBadUtf8) => Err(Broken("a text that is not UTF-8")),
        Err(_) => Err(Broken("a message of an unknown kind")),
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;
    use std::time::Instant;

    use nccl_base::wire::bytes;

    use super::*;
    use crate::mailbox::Notice;

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
    fn bytes_are_written_and_read_in_one_piece() {
        let part = Part(vec![7; 8 << 20]);
        let begun = Instant::now();
        let bytes = encode(&part);
        assert_eq!(bytes.len(), part.0.len() + 4);
        assert_eq!(decode(&bytes), Ok(part));
        // One by one they would take most of a second in a build without optimisation.
        assert!(begun.elapsed().as_millis() < 300, "{:?}", begun.elapsed());
    }

    #[test]
    fn a_notice_that_no_rank_tells_another_is_not_read() {
        let bytes = [].into();
        let topic = String::new();
        let told = Notice::Told {
            from: 1,
            topic,
            bytes,
        };
        assert!(encode(&told).is_empty());
        assert_eq!(why::<Notice>(&[2, 0, 0, 0]), "a message of an unknown kind");
    }
}
