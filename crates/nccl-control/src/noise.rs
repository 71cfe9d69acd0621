//! The Noise protocol between the two ends of a connection: a handshake that proves knowledge of the job's secret, and
//! the seal of all later messages.
//!
//! The pattern is NNpsk0 with X25519, ChaCha20-Poly1305 and SHA-256 (revision 34 of the Noise protocol framework); the
//! pre-shared key is derived from the job's secret. [`handshake`](super::handshake) defines the messages of the two
//! sides; [`Connection`] seals later messages, and [`Decoder`] opens them.
//!
//! - [`Initiator`] is the side that connects. Its first message was made with the secret, but may be a replay: only a
//!   message under the keys of this handshake proves that the sender knows the secret.
//! - [`Responder`] is the side that listens. Before the first message has been opened, it performs no elliptic-curve
//!   operation, and sends no answer that depends on the secret.
//! - [`Seal`] holds the two keys of the connection, one for each direction. Each message has a number, counted from 0
//!   and not sent: a message that was changed, repeated, dropped or moved cannot be opened.
//!
//! Each connection has fresh handshake keys, so that a secret that is disclosed later opens no earlier recording,
//! except for the first message.
//!
//! [`Connection`]: super::connection::Connection
//! [`Decoder`]: super::frame::Decoder

use std::io;
use std::sync::Arc;

use snow::params::{HashChoice, NoiseParams};
use snow::resolvers::{CryptoResolver as _, DefaultResolver};
use snow::{Builder, HandshakeState, StatelessTransportState};

use super::secret::Secret;
use nccl_base::wire::Broken;

const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_SHA256";

/// The maximum number of bytes of one Noise message, and so of one sealed message.
pub(super) const LARGEST_SEALED: usize = 65535;

/// The number of bytes that a seal adds to a message.
pub(super) const TAG: usize = 16;

/// The maximum number of bytes under one seal.
pub(super) const LARGEST_PLAIN: usize = LARGEST_SEALED - TAG;

/// The number of bytes that a handshake adds to a payload: an ephemeral key and a tag.
const OVERHEAD: usize = 32 + TAG;

/// The length prefix of a sealed message (2 bytes, little-endian).
pub(super) const LENGTH: usize = 2;

type Key = [u8; 32];

/// Derives the pre-shared key from the secret; without a secret, the key is public.
fn key(secret: Option<&Secret>) -> Key {
    let mut key = Key::default();
    let Some(mut hash) = DefaultResolver.resolve_hash(&HashChoice::SHA256) else {
        unreachable!("{PATTERN} is compiled in");
    };
    match secret {
        Some(secret) => {
            hash.input(b"the secret of an nccl job: ");
            hash.input(secret.bytes());
        }
        None => hash.input(b"an nccl job without a secret"),
    }
    hash.result(&mut key);
    key
}

fn failed(error: snow::Error) -> io::Error {
    io::Error::other(format!("the handshake failed: {error}"))
}

fn builder<'b>(key: &'b Key, prologue: &'b [u8]) -> Result<Builder<'b>, snow::Error> {
    let params: NoiseParams = PATTERN.parse()?;
    Builder::new(params).psk(0, key)?.prologue(prologue)
}

/// The connecting side, after it has made its first message.
pub(super) struct Initiator(HandshakeState);

impl Initiator {
    /// Makes the first message, which contains `payload`; both sides need the same `prologue`.
    pub(super) fn begin(
        secret: Option<&Secret>,
        prologue: &[u8],
        payload: &[u8],
    ) -> io::Result<(Self, Vec<u8>)> {
        let key = key(secret);
        let state = builder(&key, prologue).and_then(Builder::build_initiator);
        let mut state = state.map_err(failed)?;
        let mut first = vec![0; payload.len() + OVERHEAD];
        let length = state.write_message(payload, &mut first).map_err(failed)?;
        first.truncate(length);
        Ok((Self(state), first))
    }

    /// Processes the answer; `None` when its sender does not know the secret or has not opened the first message.
    pub(super) fn finish(mut self, answer: &[u8]) -> Option<Arc<Seal>> {
        self.0.read_message(answer, &mut []).ok()?;
        Seal::new(self.0).ok()
    }
}

/// The listening side, after it has opened the first message.
pub(super) struct Responder(HandshakeState);

impl Responder {
    /// Opens a first message; `None` when it was not made with this secret and this prologue.
    pub(super) fn open(
        secret: Option<&Secret>,
        prologue: &[u8],
        first: &[u8],
    ) -> Option<(Self, Vec<u8>)> {
        let key = key(secret);
        let state = builder(&key, prologue).and_then(Builder::build_responder);
        let mut state = state.ok()?;
        let mut payload = vec![0; first.len()];
        let length = state.read_message(first, &mut payload).ok()?;
        payload.truncate(length);
        Some((Self(state), payload))
    }

    /// Makes the answer, and the seal that both sides use from then on.
    pub(super) fn answer(mut self) -> io::Result<(Vec<u8>, Arc<Seal>)> {
        let mut answer = vec![0; OVERHEAD];
        let length = self.0.write_message(&[], &mut answer).map_err(failed)?;
        answer.truncate(length);
        Ok((answer, Seal::new(self.0).map_err(failed)?))
    }
}

/// The keys of one connection.
pub(super) struct Seal(StatelessTransportState);

/// The error for a sealed message that does not open.
pub(super) const UNSEALED: Broken = Broken(
    "a message whose seal does not hold: its bytes were changed, repeated, left out or put in on the way",
);

impl Seal {
    fn new(state: HandshakeState) -> Result<Arc<Self>, snow::Error> {
        Ok(Arc::new(Self(state.into_stateless_transport_mode()?)))
    }

    /// Appends the length and the sealed message with this number to `to`. `plain` has at most [`LARGEST_PLAIN`] bytes.
    pub(super) fn seal(&self, number: u64, plain: &[u8], to: &mut Vec<u8>) -> io::Result<()> {
        let length = plain.len() + TAG;
        let head = u16::try_from(length).map_err(io::Error::other)?;
        to.extend_from_slice(&head.to_le_bytes());
        let begin = to.len();
        to.resize(begin + length, 0);
        let sealed = self.0.write_message(number, plain, &mut to[begin..]);
        sealed.map(drop).map_err(failed)
    }

    /// Appends the content of the sealed message with this number to `to`.
    pub(super) fn open(&self, number: u64, sealed: &[u8], to: &mut Vec<u8>) -> Result<(), Broken> {
        let begin = to.len();
        let length = sealed.len().checked_sub(TAG).ok_or(UNSEALED)?;
        to.resize(begin + length, 0);
        // The transport's own parameter names are swapped: the sealed message comes first.
        match self.0.read_message(number, sealed, &mut to[begin..]) {
            Ok(_) => Ok(()),
            Err(_) => {
                to.truncate(begin);
                Err(UNSEALED)
            }
        }
    }

    /// The two ends of a connection without a secret.
    #[cfg(test)]
    pub(super) fn pair() -> (Arc<Self>, Arc<Self>) {
        let (initiator, first) = Initiator::begin(None, b"", b"").unwrap();
        let (responder, _) = Responder::open(None, b"", &first).unwrap();
        let (answer, theirs) = responder.answer().unwrap();
        (initiator.finish(&answer).unwrap(), theirs)
    }
}

impl std::fmt::Debug for Seal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Seal(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_first_message_opens_with_one_secret_and_one_prologue() {
        let secret = Secret::new("a");
        let (_, first) = Initiator::begin(Some(&secret), b"here", b"hello").unwrap();
        let opens = |secret: Option<&Secret>, prologue: &[u8]| {
            Responder::open(secret, prologue, &first).map(|(_, payload)| payload)
        };
        assert_eq!(opens(Some(&secret), b"here"), Some(b"hello".to_vec()));
        assert_eq!(opens(Some(&Secret::new("b")), b"here"), None);
        assert_eq!(opens(None, b"here"), None);
        assert_eq!(opens(Some(&secret), b"there"), None);
        for at in 0..first.len() {
            let mut other = first.clone();
            other[at] ^= 1;
            assert!(Responder::open(Some(&secret), b"here", &other).is_none());
            assert!(Responder::open(Some(&secret), b"here", &first[..at]).is_none());
        }
    }

    #[test]
    fn an_answer_belongs_to_one_first_message() {
        let secret = Secret::new("a");
        let begin = || Initiator::begin(Some(&secret), b"", b"").unwrap();
        let answer = |first: &[u8]| {
            let (responder, _) = Responder::open(Some(&secret), b"", first).unwrap();
            responder.answer().unwrap()
        };
        let ((one, first), (other, _)) = (begin(), begin());
        let (to_first, theirs) = answer(&first);
        assert!(other.finish(&to_first).is_none());
        // The same message once more makes another connection.
        let (_, repeated) = answer(&first);
        let mut changed = to_first.clone();
        changed[3] ^= 1;
        assert!(begin().0.finish(&changed).is_none());
        let ours = one.finish(&to_first).unwrap();
        let mut sealed = Vec::new();
        ours.seal(0, b"x", &mut sealed).unwrap();
        let mut plain = Vec::new();
        assert_eq!(
            repeated.open(0, &sealed[LENGTH..], &mut plain),
            Err(UNSEALED)
        );
        assert_eq!(theirs.open(0, &sealed[LENGTH..], &mut plain), Ok(()));
        assert_eq!(plain, b"x");
    }

    #[test]
    fn a_sealed_message_opens_once_in_its_place_and_direction() {
        let (ours, theirs) = Seal::pair();
        let mut sealed = Vec::new();
        ours.seal(7, b"marker", &mut sealed).unwrap();
        let sealed = &sealed[LENGTH..];
        assert!(!sealed.windows(6).any(|bytes| bytes == b"marker"));
        let mut plain = b"before ".to_vec();
        for number in [0, 6, 8] {
            assert_eq!(theirs.open(number, sealed, &mut plain), Err(UNSEALED));
        }
        assert_eq!(ours.open(7, sealed, &mut plain), Err(UNSEALED));
        for length in 0..sealed.len() {
            assert_eq!(theirs.open(7, &sealed[..length], &mut plain), Err(UNSEALED));
        }
        assert_eq!(plain, b"before ");
        theirs.open(7, sealed, &mut plain).unwrap();
        assert_eq!(plain, b"before marker");
    }
}
