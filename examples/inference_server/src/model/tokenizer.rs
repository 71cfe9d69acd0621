//! Tokens are bytes: 256 of them, and no table. The byte 0 is not in any text, and ends one.

/// How many tokens there are.
pub const VOCABULARY: usize = 256;

/// The token that ends a text.
pub const END: u32 = 0;

/// The tokens of a text: its bytes as UTF-8. A NUL, which would end it, becomes a space.
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
    held: Vec<u8>,
}

impl TextStream {
    /// What can be said after this token; bytes that are no text become U+FFFD.
    pub fn push(&mut self, token: u32) -> String {
        // A larger one is not in the vocabulary, and no text.
        self.held.push(u8::try_from(token).unwrap_or(0xff));
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

/// The text of tokens.
///
/// ```
/// use inference_server::model::tokenizer::{decode, encode};
/// assert_eq!(decode(&encode("ten µs")), "ten µs");
/// ```
#[must_use]
pub fn decode(tokens: &[u32]) -> String {
    let mut stream = TextStream::default();
    let text: String = tokens.iter().map(|&token| stream.push(token)).collect();
    text + &stream.finish()
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
