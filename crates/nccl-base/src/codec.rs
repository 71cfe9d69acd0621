//! Numbers, texts and byte strings of messages between processes of one release.

use crate::visible;

/// What cannot be a frame or a message of this protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct Broken(pub &'static str);

/// Reads numbers and byte strings from a payload.
#[doc(hidden)]
pub struct Fields<'f>(pub &'f [u8]);

impl<'f> Fields<'f> {
    #[doc(hidden)]
    pub fn number(&mut self) -> Result<u64, Broken> {
        let (bytes, rest) = self
            .0
            .split_first_chunk::<8>()
            .ok_or(Broken("a number that is cut off"))?;
        self.0 = rest;
        Ok(u64::from_le_bytes(*bytes))
    }

    #[doc(hidden)]
    pub fn index(&mut self) -> Result<usize, Broken> {
        usize::try_from(self.number()?).map_err(|_| Broken("a number that is too large"))
    }

    /// A number of things of at least `size` bytes each, which cannot be more than there are bytes.
    #[doc(hidden)]
    pub fn count(&mut self, size: usize) -> Result<usize, Broken> {
        let count = self.index()?;
        if count > self.0.len() / size.max(1) {
            return Err(Broken("more things than there are bytes"));
        }
        Ok(count)
    }

    #[doc(hidden)]
    pub fn bytes(&mut self) -> Result<&'f [u8], Broken> {
        let length = self.index()?;
        let (bytes, rest) = self
            .0
            .split_at_checked(length)
            .ok_or(Broken("a byte string that is cut off"))?;
        self.0 = rest;
        Ok(bytes)
    }

    #[doc(hidden)]
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Broken> {
        let (bytes, rest) = self
            .0
            .split_first_chunk::<N>()
            .ok_or(Broken("bytes that are cut off"))?;
        self.0 = rest;
        Ok(*bytes)
    }

    #[doc(hidden)]
    pub fn text(&mut self) -> Result<String, Broken> {
        let bytes = self.bytes()?;
        str::from_utf8(bytes)
            .map(String::from)
            .map_err(|_| Broken("a text that is not UTF-8"))
    }

    /// A text that another process made up, and that is only shown: no key, topic or address, which have to stay what they
    /// are.
    #[doc(hidden)]
    pub fn said(&mut self) -> Result<String, Broken> {
        self.text().map(|text| visible::text(&text))
    }

    #[doc(hidden)]
    pub fn end(&self) -> Result<(), Broken> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(Broken("bytes behind the end of a message"))
        }
    }
}

#[doc(hidden)]
pub fn put_number(to: &mut Vec<u8>, number: u64) {
    to.extend_from_slice(&number.to_le_bytes());
}

#[doc(hidden)]
pub fn put_index(to: &mut Vec<u8>, number: usize) {
    put_number(to, number as u64);
}

#[doc(hidden)]
pub fn put_bytes(to: &mut Vec<u8>, bytes: &[u8]) {
    put_index(to, bytes.len());
    to.extend_from_slice(bytes);
}

/// FNV-1a: finds damage, and is no protection against a forger.
#[doc(hidden)]
pub fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
