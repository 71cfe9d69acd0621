//! The framing of a byte stream: a length, a number, and a payload.
//!
//! Handshake frames are sent in plaintext. Later frames are under the seal of the connection
//! ([`Seal`](super::noise::Seal)): a sealed message contains several small frames, or a part of a large one.
//!
//! Lengths are checked against a limit before anything is stored, so that a peer can occupy no more memory than the
//! limit for its state: [`LARGEST_HANDSHAKE_MESSAGE`] before it has proved its identity, [`LARGEST_FRAME`] afterwards.
//! The limit applies to frames, and to sealed messages before they are opened. Memory grows as bytes arrive, never by
//! the length that a header claims.

use std::sync::Arc;

use super::noise::{LARGEST_SEALED, LENGTH, Seal, TAG};

pub(crate) use nccl_base::wire::Broken;

/// The maximum number of bytes of all parts of a round together, and of all values of the store.
pub(super) const LARGEST: usize = 64 << 20;

/// The largest payload of a member: the parts of a round, with their lengths and the other fields.
pub(super) const LARGEST_FRAME: usize = LARGEST + (1 << 20);

/// The largest payload of a peer that has not proved its identity.
pub(super) const LARGEST_HANDSHAKE_MESSAGE: usize = 4096;

/// A length (4 bytes) and a number (8 bytes), little-endian.
pub(super) const HEADER: usize = 12;

/// A received frame.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Frame {
    /// The number of the request that the frame belongs to.
    pub(super) id: u64,
    pub(super) payload: Vec<u8>,
}

/// A frame to send; frames to many ranks share their payload.
#[derive(Clone, Debug)]
pub(super) struct Outgoing {
    pub(super) head: [u8; HEADER],
    pub(super) payload: Arc<[u8]>,
}

impl Outgoing {
    pub(super) fn new(id: u64, payload: Arc<[u8]>) -> Self {
        let mut head = [0; HEADER];
        // The sender refuses an oversized payload; with a truncated length, the reader would refuse it.
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        head[..4].copy_from_slice(&length.to_le_bytes());
        head[4..].copy_from_slice(&id.to_le_bytes());
        Self { head, payload }
    }

    pub(super) fn len(&self) -> usize {
        HEADER + self.payload.len()
    }
}

/// Collects received bytes and returns whole frames.
#[derive(Debug)]
pub(super) struct Decoder {
    /// The received bytes: frames, or sealed messages.
    came: Bytes,
    limit: usize,
    opener: Option<Box<Opener>>,
}

/// Opens the sealed messages of one direction, in their order.
#[derive(Debug)]
struct Opener {
    seal: Arc<Seal>,
    /// The number of the next sealed message.
    number: u64,
    /// The bytes of opened frames.
    plain: Bytes,
    /// A frame that spans several sealed messages, which are opened into its payload, and its full length.
    partial: Option<(Frame, usize)>,
}

/// Bytes with a consumed prefix.
#[derive(Debug, Default)]
struct Bytes {
    all: Vec<u8>,
    taken: usize,
}

impl Bytes {
    fn rest(&self) -> &[u8] {
        &self.all[self.taken..]
    }

    /// Returns the unconsumed bytes, for more to be appended.
    fn compacted(&mut self) -> &mut Vec<u8> {
        self.all.drain(..self.taken);
        self.taken = 0;
        &mut self.all
    }

    fn take(&mut self, count: usize) {
        self.taken += count;
        if self.taken == self.all.len() {
            self.taken = 0;
            // The memory of a large frame is not kept for later small frames.
            if self.all.capacity() > 1 << 20 {
                self.all = Vec::new();
            } else {
                self.all.clear();
            }
        }
    }
}

/// The header of a frame.
struct Head {
    length: usize,
    id: u64,
}

impl Head {
    /// Reads the header; also returns the bytes after it.
    fn read(bytes: &[u8], limit: usize) -> Result<Option<(Self, &[u8])>, Broken> {
        let Some((head, rest)) = bytes.split_first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let [a, b, c, d, id @ ..] = *head;
        let length = u32::from_le_bytes([a, b, c, d]) as usize;
        if length > limit {
            return Err(TOO_LONG);
        }
        let id = u64::from_le_bytes(id);
        Ok(Some((Self { length, id }, rest)))
    }

    fn frame(&self, payload: &[u8]) -> Frame {
        Frame {
            id: self.id,
            payload: payload.to_vec(),
        }
    }
}

const TOO_LONG: Broken = Broken("a frame that is too long");

impl Decoder {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            came: Bytes::default(),
            limit,
            opener: None,
        }
    }

    pub(super) fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Expects all bytes after the frames taken so far to be sealed.
    pub(super) fn seal(&mut self, seal: Arc<Seal>) {
        self.opener = Some(Box::new(Opener {
            seal,
            number: 0,
            plain: Bytes::default(),
            partial: None,
        }));
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.came.compacted().extend_from_slice(bytes);
    }

    /// Returns the next complete frame. An error is final, because the start of the next frame is not known any more.
    pub(super) fn next(&mut self) -> Result<Option<Frame>, Broken> {
        let Some(opener) = &mut self.opener else {
            let Some((head, rest)) = Head::read(self.came.rest(), self.limit)? else {
                return Ok(None);
            };
            let frame = rest.get(..head.length).map(|payload| head.frame(payload));
            if frame.is_some() {
                self.came.take(HEADER + head.length);
            }
            return Ok(frame);
        };
        loop {
            if let Some(frame) = opener.next(self.limit)? {
                return Ok(Some(frame));
            }
            let Some((length, rest)) = self.came.rest().split_first_chunk::<LENGTH>() else {
                return Ok(None);
            };
            let length = usize::from(u16::from_le_bytes(*length));
            if length > LARGEST_SEALED.min(self.limit + HEADER + TAG) {
                return Err(TOO_LONG);
            }
            let Some(sealed) = rest.get(..length) else {
                return Ok(None);
            };
            opener.open(sealed)?;
            self.came.take(LENGTH + length);
        }
    }
}

impl Opener {
    /// Opens the next sealed message, into the payload that it belongs to or after the opened bytes.
    fn open(&mut self, sealed: &[u8]) -> Result<(), Broken> {
        let to = match &mut self.partial {
            Some((frame, _)) => &mut frame.payload,
            None => self.plain.compacted(),
        };
        self.seal.open(self.number, sealed, to)?;
        self.number += 1;
        Ok(())
    }

    /// Returns the next frame of the opened bytes.
    fn next(&mut self, limit: usize) -> Result<Option<Frame>, Broken> {
        if let Some((frame, length)) = &mut self.partial {
            if frame.payload.len() < *length {
                return Ok(None);
            }
            self.plain = Bytes {
                all: frame.payload.split_off(*length),
                taken: 0,
            };
            return Ok(self.partial.take().map(|(frame, _)| frame));
        }
        let Some((head, rest)) = Head::read(self.plain.rest(), limit)? else {
            return Ok(None);
        };
        if let Some(payload) = rest.get(..head.length) {
            let frame = head.frame(payload);
            self.plain.take(HEADER + head.length);
            return Ok(Some(frame));
        }
        self.partial = Some((head.frame(rest), head.length));
        self.plain = Bytes::default();
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_out_as_they_went_in_however_they_are_cut() {
        let frames: Vec<_> = (0..20u8)
            .map(|n| Outgoing::new(u64::from(n) << 40, vec![n; usize::from(n) * 7].into()))
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
                assert_eq!(frame.id, (n as u64) << 40);
                assert_eq!(frame.payload, vec![n as u8; n * 7]);
            }
        }
    }

    #[test]
    fn sealed_frames_come_out_as_they_went_in_however_they_are_cut() {
        let (ours, theirs) = Seal::pair();
        let frames: Vec<_> = (0..20usize)
            .map(|n| Outgoing::new(n as u64, vec![n as u8; n * n * 7].into()))
            .collect();
        let mut plain = Vec::new();
        for frame in &frames {
            plain.extend_from_slice(&frame.head);
            plain.extend_from_slice(&frame.payload);
        }
        for under_one_seal in [1, 13, 14, 100, 3000, plain.len()] {
            let mut bytes = Vec::new();
            for (number, piece) in plain.chunks(under_one_seal).enumerate() {
                ours.seal(number as u64, piece, &mut bytes).unwrap();
            }
            for step in [1, 19, 2000, bytes.len()] {
                let mut decoder = Decoder::new(3000);
                decoder.seal(Arc::clone(&theirs));
                decoder.set_limit(LARGEST_FRAME);
                let mut got = 0;
                for piece in bytes.chunks(step) {
                    decoder.push(piece);
                    while let Some(frame) = decoder.next().unwrap() {
                        assert_eq!(frame.id, got as u64);
                        assert_eq!(frame.payload, vec![got as u8; got * got * 7]);
                        got += 1;
                    }
                }
                assert_eq!(got, frames.len());
            }
        }
    }

    #[test]
    fn a_sealed_message_of_a_guest_is_refused_by_its_length_alone() {
        let (_, theirs) = Seal::pair();
        let mut decoder = Decoder::new(LARGEST_HANDSHAKE_MESSAGE);
        decoder.seal(theirs);
        let most = LARGEST_HANDSHAKE_MESSAGE + HEADER + TAG;
        decoder.push(&(most as u16).to_le_bytes());
        assert_eq!(decoder.next(), Ok(None));
        let (_, theirs) = Seal::pair();
        let mut decoder = Decoder::new(LARGEST_HANDSHAKE_MESSAGE);
        decoder.seal(theirs);
        decoder.push(&(most as u16 + 1).to_le_bytes());
        assert_eq!(decoder.next(), Err(TOO_LONG));
    }

    #[test]
    fn a_frame_that_promises_too_much_is_refused_at_its_first_bytes() {
        let mut decoder = Decoder::new(LARGEST_HANDSHAKE_MESSAGE);
        decoder.push(&[0xff; HEADER]);
        assert!(decoder.next().is_err());
        let mut decoder = Decoder::new(LARGEST_HANDSHAKE_MESSAGE);
        decoder.push(&[0xff; HEADER - 1]);
        assert_eq!(decoder.next(), Ok(None));
    }
}
