//! From text to tokens and back.
//!
//! [`Tokenizer`] is that of a model: the small one's tokens are bytes ([`encode`], [`decode`]), 256 of them and no table; those of
//! SmolLM2 are pieces of words that its file lists (`bpe`).

mod bpe;

use std::sync::Arc;

use super::error::Result;

pub(super) use bpe::Vocabulary;

/// How many tokens there are, where those are bytes.
pub const VOCABULARY: usize = 256;

/// The token that ends a text, where tokens are bytes. The byte 0 is not in any text.
pub const END: u32 = 0;

/// The bytes of a text, as UTF-8. A NUL, which would end it, becomes a space.
///
/// ```
/// use inference_server::model::tokenizer::encode;
/// assert_eq!(encode("é!"), [0xc3, 0xa9, 0x21]);
/// ```
#[must_use]
pub fn encode(text: &str) -> Vec<u32> {
    let token = |byte| match byte {
        0 => u32::from(b' '),
        byte => u32::from(byte),
    };
    text.bytes().map(token).collect()
}

/// How a model has its texts. Cheap to clone.
///
/// ```
/// use inference_server::model::tokenizer::Tokenizer;
/// let bytes = Tokenizer::default();
/// let tokens = bytes.encode("ten µs")?;
/// assert_eq!(tokens.len(), 7);
/// assert_eq!(bytes.decode(&tokens), "ten µs");
/// # Ok::<(), inference_server::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Tokenizer(Kind);

#[derive(Clone, Debug, Default)]
enum Kind {
    #[default]
    Bytes,
    Merging(Arc<bpe::Merging>),
}

impl Tokenizer {
    /// That of a vocabulary of pieces of words.
    pub(super) fn merging(vocabulary: Vocabulary) -> Result<Self, String> {
        let merging = bpe::Merging::new(vocabulary)?;
        Ok(Self(Kind::Merging(Arc::new(merging))))
    }

    /// The tokens of a text.
    ///
    /// # Errors
    /// For a vocabulary that lacks tokens for some bytes.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match &self.0 {
            Kind::Bytes => Ok(encode(text)),
            Kind::Merging(merging) => merging.encode(text),
        }
    }

    /// Whether a text is over with this token.
    #[must_use]
    pub fn ends(&self, token: u32) -> bool {
        match &self.0 {
            Kind::Bytes => token == END,
            Kind::Merging(merging) => merging.ends(token),
        }
    }

    /// What tokens are, in a word.
    #[must_use]
    pub fn unit(&self) -> &'static str {
        match &self.0 {
            Kind::Bytes => "bytes",
            Kind::Merging(_) => "pieces of words",
        }
    }

    /// For tokens that come one by one.
    #[must_use]
    pub fn stream(&self) -> TextStream {
        TextStream {
            tokenizer: self.clone(),
            held: Vec::new(),
        }
    }

    /// The text of tokens.
    #[must_use]
    pub fn decode(&self, tokens: &[u32]) -> String {
        let mut stream = self.stream();
        let text: String = tokens.iter().map(|&token| stream.push(token)).collect();
        text + &stream.finish()
    }

    /// Adds a token's bytes.
    fn spell(&self, token: u32, to: &mut Vec<u8>) {
        match &self.0 {
            // A larger one is not in the vocabulary, and no text.
            Kind::Bytes => to.push(u8::try_from(token).unwrap_or(0xff)),
            Kind::Merging(merging) => to.extend_from_slice(merging.bytes(token)),
        }
    }
}

/// Text from tokens that come one by one: characters of several bytes are held back until they are whole.
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
    held: Vec<u8>,
}

impl TextStream {
    /// What can be said after this token; bytes that are no text become U+FFFD.
    pub fn push(&mut self, token: u32) -> String {
        self.tokenizer.spell(token, &mut self.held);
        let mut said = String::new();
        loop {
            let (valid, bad) = match std::str::from_utf8(&self.held) {
                Ok(_) => (self.held.len(), Some(0)),
                Err(error) => (error.valid_up_to(), error.error_len()),
            };
            said += &String::from_utf8_lossy(&self.held[..valid]);
            match bad {
                None => {
                    self.held.drain(..valid);
                    return said;
                }
                Some(0) => {
                    self.held.clear();
                    return said;
                }
                Some(length) => {
                    said.push(char::REPLACEMENT_CHARACTER);
                    self.held.drain(..valid + length);
                }
            }
        }
    }

    /// What was held back, at the end of the text.
    #[must_use]
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.held).into_owned()
    }
}

/// The text of tokens that are bytes.
///
/// ```
/// use inference_server::model::tokenizer::{decode, encode};
/// assert_eq!(decode(&encode("ten µs")), "ten µs");
/// ```
#[must_use]
pub fn decode(tokens: &[u32]) -> String {
    Tokenizer::default().decode(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_comes_byte_by_byte_is_that_which_comes_at_once() {
        let bytes: Vec<u32> = (0..2000u32).map(|i| (i * i * 31 + i / 7) % 256).collect();
        let whole: Vec<u8> = bytes.iter().map(|&byte| byte as u8).collect();
        assert_eq!(decode(&bytes), String::from_utf8_lossy(&whole));
    }

    #[test]
    fn a_character_is_said_when_it_is_whole_and_what_is_left_at_the_end() {
        let mut stream = TextStream::default();
        let said: Vec<_> = encode("a€")
            .into_iter()
            .map(|token| stream.push(token))
            .collect();
        assert_eq!(said, ["a", "", "", "€"]);
        assert_eq!(stream.push(0xe2), "");
        assert_eq!(stream.finish(), "\u{fffd}");
    }

    #[test]
    fn no_text_has_the_token_that_ends_it() {
        assert!(!encode("a\0b").contains(&END));
    }
}
