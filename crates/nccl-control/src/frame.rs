//! How bytes become frames: a length, a kind, a number, and a payload.
//!
//! The length is checked against a limit before anything is kept, so that a stranger can make us keep
//! no more than the limit of its state: [`GREETING`] before it has proved who it is, [`LARGEST_FRAME`]
//! afterwards. Memory grows as bytes arrive, never by what a length promises.

use std::sync::Arc;

pub(crate) use nccl_base::codec::{Broken, Fields, put_bytes, put_index, put_number};

/// The most bytes of all parts of a round together, and of all values of the store.
pub(super) const LARGEST: usize = 64 << 20;

/// The largest payload of a member: the parts of a round, with their lengths and what is said about
/// them.
pub(super) const LARGEST_FRAME: usize = LARGEST + (1 << 20);

/// The largest payload of somebody who has not proved who it is.
pub(super) const GREETING: usize = 4096;

/// Length (4 bytes), kind (1) and number (8), little-endian.
pub(super) const HEADER: usize = 13;

/// One frame as it came.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) kind: u8,
    /// Which request it belongs to.
    pub(super) id: u64,
    pub(super) payload: Vec<u8>,
}

/// A frame on its way out; frames to many ranks share their payload.
#[derive(Clone, Debug)]
pub(super) struct Outgoing {
    pub(super) head: [u8; HEADER],
    pub(super) payload: Arc<[u8]>,
}

impl Outgoing {
    pub(super) fn new(kind: u8, id: u64, payload: Arc<[u8]>) -> Self {
        let mut head = [0; HEADER];
        // What is too large is refused where it is made; cut off, it would be refused by the reader.
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        head[..4].copy_from_slice(&length.to_le_bytes());
        head[4] = kind;
        head[5..].copy_from_slice(&id.to_le_bytes());
        Self { head, payload }
    }

    pub(super) fn len(&self) -> usize {
        HEADER + self.payload.len()
    }
}

/// Takes bytes as they come and gives out whole frames.
#[derive(Debug)]
pub(super) struct Decoder {
    buffer: Vec<u8>,
    /// Where the next frame begins.
    start: usize,
    limit: usize,
}

impl Decoder {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            buffer: Vec::new(),
            start: 0,
            limit,
        }
    }

    pub(super) fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        if self.start > 0 {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole frame. An error is final: where the next frame begins is not known any more.
    pub(super) fn next(&mut self) -> Result<Option<Frame>, Broken> {
        let rest = &self.buffer[self.start..];
        let Some((head, rest)) = rest.split_first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let [a, b, c, d, kind, id @ ..] = *head;
        let length = u32::from_le_bytes([a, b, c, d]) as usize;
        if length > self.limit {
            return Err(Broken("a frame that is too long"));
        }
        let Some(payload) = rest.get(..length) else {
            return Ok(None);
        };
        let frame = Frame {
            kind,
            id: u64::from_le_bytes(id),
            payload: payload.to_vec(),
        };
        self.start += HEADER + length;
        if self.start == self.buffer.len() {
            self.start = 0;
            // A large frame's memory is not kept for the small ones after it.
            if self.buffer.capacity() > 1 << 20 {
                self.buffer = Vec::new();
            } else {
                self.buffer.clear();
            }
        }
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_out_as_they_went_in_however_they_are_cut() {
        let frames: Vec<_> = (0..20u8)
            .map(|n| Outgoing::new(n, u64::from(n) << 40, vec![n; usize::from(n) * 7].into()))
            .collect();
        let mut bytes = Vec::new();
        for frame in &frames {
            bytes.extend_from_slice(&frame.head);
            bytes.extend_from_slice(&frame.payload);
        }
        for step in [1, 2, 5, 13, 64, bytes.len()] {
            let mut decoder = Decoder::new(1000);
            let mut got = Vec::new();
            for piece in bytes.chunks(step) {
                decoder.push(piece);
                while let Some(frame) = decoder.next().unwrap() {
                    got.push(frame);
                }
            }
            assert_eq!(got.len(), frames.len());
            for (n, frame) in got.iter().enumerate() {
                assert_eq!(usize::from(frame.kind), n);
                assert_eq!(frame.id, (n as u64) << 40);
                assert_eq!(frame.payload, vec![n as u8; n * 7]);
            }
        }
    }

    #[test]
    fn a_frame_that_promises_too_much_is_refused_at_its_first_bytes() {
        let mut decoder = Decoder::new(GREETING);
        decoder.push(&[0xff; HEADER]);
        assert!(decoder.next().is_err());
        let mut decoder = Decoder::new(GREETING);
        decoder.push(&[0xff; HEADER - 1]);
        assert_eq!(decoder.next(), Ok(None));
    }
}
