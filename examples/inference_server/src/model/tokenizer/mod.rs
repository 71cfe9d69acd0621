//! From text to tokens and back. A model's [`Tokenizer`] wraps one of the crate `tokenizers`.
//!
//! The tokens of the small model (`models/tokenizer.json`) are the 256 bytes ([`encode`], [`decode`]). The tokens of SmolLM2
//! are pieces of words, listed in its file (`gguf`).

pub(super) mod gguf;

use std::fmt;
use std::sync::{Arc, LazyLock};

use tokenizers::step_decode_stream;

use super::error::{Error, Result};

/// The number of tokens, if tokens are bytes.
pub const VOCABULARY: usize = 256;

/// The token that ends a text, if tokens are bytes. No text contains the byte 0.
pub const END: u32 = 0;

/// Each token is a byte. A NUL, which would end the text, becomes a space.
static BYTES: LazyLock<Tokenizer> = LazyLock::new(|| {
    let bytes = include_str!("../../../models/tokenizer.json").parse();
    let bytes = bytes.expect("a file that is part of this program, and tested with it");
    Tokenizer::new(bytes, vec![END], "bytes")
});

/// Returns the bytes of a text, as UTF-8. A NUL, which would end the text, becomes a space.
///
/// ```
/// use inference_server::model::tokenizer::encode;
/// assert_eq!(encode("é!"), [0xc3, 0xa9, 0x21]);
/// ```
#[must_use]
pub fn encode(text: &str) -> Vec<u32> {
    let tokens = BYTES.encode(text);
    tokens.expect("there is a token for each byte")
}

/// Returns the text of tokens that are bytes.
///
/// ```
/// use inference_server::model::tokenizer::{decode, encode};
/// assert_eq!(decode(&encode("ten µs")), "ten µs");
/// ```
#[must_use]
pub fn decode(tokens: &[u32]) -> String {
    BYTES.decode(tokens)
}

/// The tokenizer of a model. Cheap to clone.
///
/// ```
/// use inference_server::model::tokenizer::Tokenizer;
/// let bytes = Tokenizer::default();
/// let tokens = bytes.encode("ten µs")?;
/// assert_eq!(tokens.len(), 7);
/// assert_eq!(bytes.decode(&tokens), "ten µs");
/// # Ok::<(), inference_server::Error>(())
/// ```
#[derive(Clone)]
pub struct Tokenizer(Arc<Made>);

struct Made {
    inner: tokenizers::Tokenizer,
    ends: Vec<u32>,
    unit: &'static str,
}

impl Default for Tokenizer {
    fn default() -> Self {
        BYTES.clone()
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.0.inner.get_vocab_size(true);
        write!(f, "Tokenizer({count} {})", self.unit())
    }
}

impl Tokenizer {
    fn new(inner: tokenizers::Tokenizer, ends: Vec<u32>, unit: &'static str) -> Self {
        Self(Arc::new(Made { inner, ends, unit }))
    }

    /// Returns the tokens of a text. Words such as `<|im_start|>` become the tokens that they name, so a client may write a
    /// conversation. A byte without a token is left out, as usual with such a vocabulary.
    ///
    /// # Errors
    /// [`Error::Unusable`] for a text that cannot be cut.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self
            .0
            .inner
            .encode_fast(text, false)
            .map_err(|error| Error::Unusable(format!("the text cannot be cut: {error}")))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Returns whether this token ends a text.
    #[must_use]
    pub fn ends(&self, token: u32) -> bool {
        self.0.ends.contains(&token)
    }

    /// Returns the name of the units of text that tokens stand for.
    #[must_use]
    pub fn unit(&self) -> &'static str {
        self.0.unit
    }

    /// Returns a decoder for tokens that arrive one by one.
    #[must_use]
    pub fn stream(&self) -> TextStream {
        TextStream {
            tokenizer: self.clone(),
            ..TextStream::default()
        }
    }

    /// Returns the text of tokens; invalid bytes become U+FFFD.
    #[must_use]
    pub fn decode(&self, tokens: &[u32]) -> String {
        self.0.inner.decode(tokens, true).unwrap_or_default()
    }
}

/// Decodes tokens that arrive one by one. Incomplete characters of several bytes are held back until they are complete, and
/// invalid bytes until valid text follows.
///
/// ```
/// use inference_server::model::tokenizer::TextStream;
/// let mut text = TextStream::default();
/// assert_eq!(text.push(0xc3), "");
/// assert_eq!(text.push(0xa9), "é");
/// ```
#[derive(Clone, Debug, Default)]
pub struct TextStream {
    tokenizer: Tokenizer,
    /// The state of [`step_decode_stream`]: the last tokens, and the text of the first of them.
    tokens: Vec<u32>,
    said: String,
    said_tokens: usize,
}

impl TextStream {
    /// Returns the text that is complete after this token; invalid bytes become U+FFFD.
    pub fn push(&mut self, token: u32) -> String {
        let Self {
            tokenizer,
            tokens,
            said,
            said_tokens,
        } = self;
        let inner = &tokenizer.0.inner;
        let more = step_decode_stream(inner, vec![token], true, tokens, said, said_tokens);
        more.ok().flatten().unwrap_or_default()
    }

    /// Returns the text that was held back, at the end.
    #[must_use]
    pub fn finish(self) -> String {
        let text = self.tokenizer.decode(&self.tokens);
        text.get(self.said.len()..).unwrap_or_default().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_comes_byte_by_byte_is_that_which_comes_at_once() {
        let bytes: Vec<u32> = (0..2000u32).map(|i| (i * i * 31 + i / 7) % 256).collect();
        let whole: Vec<u8> = bytes.iter().map(|&byte| byte as u8).collect();
        let whole = String::from_utf8_lossy(&whole);
        assert_eq!(decode(&bytes), whole);
        let mut stream = TextStream::default();
        let said: String = bytes.iter().map(|&byte| stream.push(byte)).collect();
        assert!(said.len() > 2000);
        assert_eq!(said + &stream.finish(), whole);
    }

    #[test]
    fn a_character_is_said_when_it_is_whole_and_what_is_left_at_the_end() {
        let mut stream = TextStream::default();
        let said: Vec<_> = encode("a€")
            .into_iter()
            .map(|token| stream.push(token))
            .collect();
        assert_eq!(said, ["a", "", "", "€"]);
        // Bytes that are no text wait for text.
        assert_eq!([0xff, 0xe2].map(|byte| stream.push(byte)), ["", ""]);
        assert_eq!(stream.push(b'b'.into()), "\u{fffd}\u{fffd}b");
        assert_eq!(stream.push(0xe2), "");
        assert_eq!(stream.finish(), "\u{fffd}");
    }

    #[test]
    fn no_text_has_the_token_that_ends_it() {
        assert!(!encode("a\0b").contains(&END));
    }
}
