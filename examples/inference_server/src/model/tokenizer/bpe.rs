//! Tokens that are pieces of words: byte pair encoding with the vocabulary and the merges of a GGUF file.
//!
//! The crate `tokenizers` cuts and merges; what a token is as bytes is kept here, so that text can be made token by token, and
//! a character that is two tokens is said when it is whole.

use std::collections::{HashMap, HashSet};
use std::fmt;

use candle_core::quantized::gguf_file::Value;
use tokenizers::AddedToken;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;

use crate::model::error::{Error, Result};

/// What a token is, as llama.cpp counts: of these, text has the normal ones.
const NORMAL: i64 = 1;
/// Such as `<|im_end|>`.
const CONTROL: i64 = 3;

/// Ends a text of every model that has it, beside the token that the file names.
const END_OF_TEXT: &str = "<|endoftext|>";

/// What a file says of its tokens.
pub(in crate::model) struct Vocabulary {
    tokens: Vec<String>,
    kinds: Vec<i64>,
    merges: Vec<(String, String)>,
    ends: Vec<u32>,
}

fn list<'a>(metadata: &'a HashMap<String, Value>, name: &str) -> Result<&'a [Value], String> {
    match metadata.get(name) {
        Some(Value::Array(values)) => Ok(values),
        Some(_) => Err(format!("`{name}` is no list")),
        None => Err(format!("its metadata has no `{name}`")),
    }
}

fn text<'a>(value: &'a Value, name: &str) -> Result<&'a str, String> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(format!("`{name}` has {other:?} in it, which is no text")),
    }
}

impl Vocabulary {
    /// Reads it from a file's metadata. Says what is missing, or cannot be.
    pub(in crate::model) fn read(metadata: &HashMap<String, Value>) -> Result<Self, String> {
        // Other ways of cutting a text give other tokens, and a model that has never seen them.
        for (name, expected) in [
            ("tokenizer.ggml.model", "gpt2"),
            ("tokenizer.ggml.pre", "smollm"),
        ] {
            match metadata.get(name) {
                Some(Value::String(found)) if found == expected => {}
                found => {
                    return Err(format!(
                        "`{name}` is {found:?}: only {expected:?} is known here"
                    ));
                }
            }
        }
        let name = "tokenizer.ggml.tokens";
        let tokens: Vec<String> = list(metadata, name)?
            .iter()
            .map(|token| Ok(text(token, name)?.to_owned()))
            .collect::<Result<_, String>>()?;
        let name = "tokenizer.ggml.token_type";
        let kind = |value: &Value| match value {
            Value::I32(kind) => Ok(i64::from(*kind)),
            Value::U32(kind) => Ok(i64::from(*kind)),
            other => Err(format!("`{name}` has {other:?} in it")),
        };
        let kinds = list(metadata, name)?.iter().map(kind);
        let kinds = kinds.collect::<Result<Vec<_>, String>>()?;
        if kinds.len() != tokens.len() {
            return Err(format!(
                "{} tokens, and `{name}` for {}",
                tokens.len(),
                kinds.len()
            ));
        }
        let name = "tokenizer.ggml.merges";
        let pair = |value| -> Result<_, String> {
            let text = text(value, name)?;
            let (first, second) = text
                .split_once(' ')
                .ok_or_else(|| format!("`{name}` has {text:?} in it, which is no pair"))?;
            Ok((first.to_owned(), second.to_owned()))
        };
        let merges = list(metadata, name)?.iter().map(pair);
        Ok(Self {
            merges: merges.collect::<Result<_, String>>()?,
            ends: Self::ends(metadata)?,
            tokens,
            kinds,
        })
    }

    /// The tokens that end a text.
    pub(in crate::model) fn ends(metadata: &HashMap<String, Value>) -> Result<Vec<u32>, String> {
        let mut ends = Vec::new();
        if let Some(value) = metadata.get("tokenizer.ggml.eos_token_id") {
            let end = value.to_u32();
            ends.push(end.map_err(|_| format!("`tokenizer.ggml.eos_token_id` is {value:?}"))?);
        }
        let tokens = list(metadata, "tokenizer.ggml.tokens")?;
        let named = |token: &Value| matches!(token, Value::String(text) if text == END_OF_TEXT);
        ends.extend(tokens.iter().position(named).map(|at| at as u32));
        Ok(ends)
    }
}

/// A tokenizer that has been made.
pub(super) struct Merging {
    tokenizer: tokenizers::Tokenizer,
    /// Of each token; nothing for one that is no text.
    pieces: Vec<Vec<u8>>,
    ends: Vec<u32>,
}

impl fmt::Debug for Merging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Merging({} tokens)", self.pieces.len())
    }
}

impl Merging {
    pub(super) fn new(vocabulary: Vocabulary) -> Result<Self, String> {
        let Vocabulary {
            tokens,
            kinds,
            merges,
            ends,
        } = vocabulary;
        let bytes = bytes_of_characters();
        let (mut pieces, mut special) = (Vec::with_capacity(tokens.len()), Vec::new());
        for (token, &kind) in tokens.iter().zip(&kinds) {
            pieces.push(match kind {
                NORMAL => token
                    .chars()
                    .map(|character| bytes.get(&character).copied())
                    .collect::<Option<Vec<u8>>>()
                    .ok_or_else(|| format!("the token {token:?} is not made of bytes"))?,
                CONTROL => {
                    special.push(AddedToken::from(token.clone(), true));
                    Vec::new()
                }
                other => {
                    return Err(format!(
                        "the token {token:?} is of the unknown kind {other}"
                    ));
                }
            });
        }
        // Those that are in every text. SmolLM2 lacks some control characters, and bytes that are in no text.
        let all: HashSet<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
        if let Some(byte) = (b' '..=b'~').find(|&byte| !all.contains(&[byte][..])) {
            let character = char::from(byte);
            return Err(format!("there is no token for the character {character:?}"));
        }
        drop(all);
        let numbers: Vocab = tokens.into_iter().zip(0..).collect();
        let model = BPE::builder().vocab_and_merges(numbers, merges).build();
        let mut tokenizer = tokenizers::Tokenizer::new(model.map_err(|error| error.to_string())?);
        // `smollm`: each digit is a token, and the rest is cut as GPT-2 does it.
        tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![
            Digits::new(true).into(),
            ByteLevel::new(false, true, true).into(),
        ])));
        tokenizer
            .add_special_tokens(special)
            .map_err(|error| error.to_string())?;
        Ok(Self {
            tokenizer,
            pieces,
            ends,
        })
    }

    /// Words such as `<|im_start|>` become the tokens that they name: whoever asks may write a conversation. A byte without a
    /// token is left out, as it is wherever this vocabulary is used.
    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self
            .tokenizer
            .encode_fast(text, false)
            .map_err(|error| Error::Unusable(format!("the text cannot be cut: {error}")))?;
        Ok(encoding.get_ids().to_vec())
    }

    pub(super) fn ends(&self, token: u32) -> bool {
        self.ends.contains(&token)
    }

    /// Nothing for a token that is no text, or is not there.
    pub(super) fn bytes(&self, token: u32) -> &[u8] {
        self.pieces.get(token as usize).map_or(&[], Vec::as_slice)
    }
}

/// How vocabularies in the way of GPT-2 write bytes: those that can be seen as themselves, the others as the characters from
/// U+0100 on, in their order.
fn bytes_of_characters() -> HashMap<char, u8> {
    let seen = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let others = (0..=u8::MAX).filter(|byte| !seen(byte));
    let others = ('\u{100}'..).zip(others);
    let same = (0..=u8::MAX).filter(seen);
    others
        .chain(same.map(|byte| (char::from(byte), byte)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tokenizer::Tokenizer;

    /// All bytes, some merges, and a token that ends a text.
    fn metadata() -> HashMap<String, Value> {
        let mut characters: Vec<_> = bytes_of_characters().into_iter().collect();
        characters.sort_by_key(|&(_, byte)| byte);
        let mut tokens = vec![String::from(END_OF_TEXT), String::from("<|im_end|>")];
        tokens.extend(
            characters
                .iter()
                .map(|(character, _)| character.to_string()),
        );
        let merges = ["t h", "th e", "Ġ the", "1 2", "Ã ©"];
        tokens.extend(merges.iter().map(|merge| merge.replace(' ', "")));
        let kinds = (0..tokens.len()).map(|at| Value::I32(if at < 2 { 3 } else { 1 }));
        let kinds = Value::Array(kinds.collect());
        let texts =
            |texts: Vec<String>| Value::Array(texts.into_iter().map(Value::String).collect());
        let name = |name: &str| format!("tokenizer.ggml.{name}");
        HashMap::from([
            (name("model"), Value::String("gpt2".into())),
            (name("pre"), Value::String("smollm".into())),
            (name("tokens"), texts(tokens)),
            (name("token_type"), kinds),
            (name("merges"), texts(merges.map(String::from).to_vec())),
            (name("eos_token_id"), Value::U32(1)),
        ])
    }

    fn tokenizer() -> Tokenizer {
        Tokenizer::merging(Vocabulary::read(&metadata()).unwrap()).unwrap()
    }

    #[test]
    fn words_are_merged_and_digits_are_not() {
        let byte = |byte: u8| u32::from(byte) + 2;
        let tokenizer = tokenizer();
        let encode = |text| tokenizer.encode(text).unwrap();
        assert_eq!(encode("the the"), [259, 260]);
        assert_eq!(encode("12"), [byte(b'1'), byte(b'2')]);
        assert_eq!(encode("é"), [262]);
        // A word that names a token is that token, and is not said.
        assert_eq!(encode("t<|im_end|>"), [byte(b't'), 1]);
        assert_eq!(tokenizer.decode(&[byte(b't'), 1, 70_000]), "t");
        assert!(tokenizer.ends(0) && tokenizer.ends(1) && !tokenizer.ends(2));
    }

    #[test]
    fn every_text_comes_back_byte_by_byte_and_at_once() {
        let tokenizer = tokenizer();
        for text in [
            "",
            "  the\t\r\n  12 é € 👍🏽 'll \u{0}\u{7f}\u{ad}",
            "日本語 the\u{a0}the",
        ] {
            let tokens = tokenizer.encode(text).unwrap();
            assert_eq!(tokenizer.decode(&tokens), text);
        }
        let mut stream = tokenizer.stream();
        let said: Vec<_> = tokenizer
            .encode("a€")
            .unwrap()
            .into_iter()
            .map(|token| stream.push(token))
            .collect();
        assert_eq!(said, ["a", "", "", "€"]);
    }

    #[test]
    fn a_vocabulary_that_cannot_be_used_is_refused_with_the_reason() {
        let refused = |change: &dyn Fn(&mut HashMap<String, Value>)| {
            let mut metadata = metadata();
            change(&mut metadata);
            let made = Vocabulary::read(&metadata).and_then(Tokenizer::merging);
            made.err().unwrap_or_default()
        };
        let text = refused(&|metadata| {
            metadata.insert("tokenizer.ggml.pre".into(), Value::String("qwen2".into()));
        });
        assert!(text.contains("only \"smollm\" is known here"), "{text}");
        let text = refused(&|metadata| {
            metadata.remove("tokenizer.ggml.merges");
        });
        assert_eq!(text, "its metadata has no `tokenizer.ggml.merges`");
        let text = refused(&|metadata| {
            if let Some(Value::Array(tokens)) = metadata.get_mut("tokenizer.ggml.tokens") {
                tokens[2 + usize::from(b'q')] = Value::String("qq".into());
            }
        });
        assert_eq!(text, "there is no token for the character 'q'");
        let text = refused(&|metadata| {
            if let Some(Value::Array(kinds)) = metadata.get_mut("tokenizer.ggml.token_type") {
                kinds.pop();
            }
        });
        assert!(text.starts_with("263 tokens, and"), "{text}");
    }
}
