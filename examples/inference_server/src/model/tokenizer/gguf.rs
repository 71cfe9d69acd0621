//! The tokenizer of a GGUF file. candle creates it; this module adds the pre-tokenizer of SmolLM2, and refuses vocabularies
//! that cannot be used.

use std::collections::HashMap;

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;

use super::Tokenizer;

/// The token type of ordinary text, in llama.cpp's numbering.
const NORMAL: i64 = 1;
/// The token type of control tokens, such as `<|im_end|>`.
const CONTROL: i64 = 3;

/// Ends a text in every model that has this token, in addition to the end token that the file names.
const END_OF_TEXT: &str = "<|endoftext|>";

const TOKENS: &str = "tokenizer.ggml.tokens";
const KINDS: &str = "tokenizer.ggml.token_type";

fn list<'a>(metadata: &'a HashMap<String, Value>, name: &str) -> Result<&'a [Value], String> {
    match metadata.get(name) {
        Some(Value::Array(values)) => Ok(values),
        Some(_) => Err(format!("`{name}` is no list")),
        None => Err(format!("its metadata has no `{name}`")),
    }
}

/// Creates the tokenizer of a file. The error names the missing or invalid entry.
pub(in crate::model) fn read(content: &Content) -> Result<Tokenizer, String> {
    let metadata = &content.metadata;
    // Another pre-tokenizer would produce tokens that the model was not trained on.
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
    check_kinds(list(metadata, TOKENS)?, list(metadata, KINDS)?)?;
    list(metadata, "tokenizer.ggml.merges")?;
    let mut tokenizer = tokenizers::Tokenizer::from_gguf(content)
        .map_err(|error| format!("its vocabulary cannot be used: {error}"))?;
    // Only printable ASCII is required. SmolLM2 lacks some control characters, and bytes that occur in no text.
    let lacks = |byte: &u8| {
        // Vocabularies of the GPT-2 kind write a space in this way.
        let written = if *byte == b' ' {
            'Ġ'
        } else {
            char::from(*byte)
        };
        tokenizer.token_to_id(&written.to_string()).is_none()
    };
    if let Some(byte) = (b' '..=b'~').find(lacks) {
        let character = char::from(byte);
        return Err(format!("there is no token for the character {character:?}"));
    }
    // `smollm`: each digit is a token; the rest is split as in GPT-2.
    tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![
        Digits::new(true).into(),
        ByteLevel::new(false, true, true).into(),
    ])));
    Ok(Tokenizer::new(
        tokenizer,
        ends(metadata)?,
        "pieces of words",
    ))
}

/// Checks that each token is either a control token, or text of the byte-level alphabet.
fn check_kinds(tokens: &[Value], kinds: &[Value]) -> Result<(), String> {
    let (count, kinds_count) = (tokens.len(), kinds.len());
    if count != kinds_count {
        return Err(format!("{count} tokens, and `{KINDS}` for {kinds_count}"));
    }
    let bytes = ByteLevel::alphabet();
    for (token, kind) in tokens.iter().zip(kinds) {
        let Value::String(token) = token else {
            return Err(format!("`{TOKENS}` has {token:?} in it, which is no text"));
        };
        let kind = match kind {
            Value::I32(kind) => i64::from(*kind),
            Value::U32(kind) => i64::from(*kind),
            other => return Err(format!("`{KINDS}` has {other:?} in it")),
        };
        if kind == NORMAL && !token.chars().all(|character| bytes.contains(&character)) {
            return Err(format!("the token {token:?} is not made of bytes"));
        }
        if kind != NORMAL && kind != CONTROL {
            return Err(format!("the token {token:?} is of the unknown kind {kind}"));
        }
    }
    Ok(())
}

/// Returns the tokens that end a text.
pub(in crate::model) fn ends(metadata: &HashMap<String, Value>) -> Result<Vec<u32>, String> {
    let mut ends = Vec::new();
    if let Some(value) = metadata.get("tokenizer.ggml.eos_token_id") {
        let end = value.to_u32();
        ends.push(end.map_err(|_| format!("`tokenizer.ggml.eos_token_id` is {value:?}"))?);
    }
    let named = |token: &Value| matches!(token, Value::String(text) if text == END_OF_TEXT);
    let named = list(metadata, TOKENS)?.iter().position(named);
    ends.extend(named.map(|at| at as u32));
    Ok(ends)
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::gguf_file::VersionedMagic;

    use super::*;

    /// Metadata with all bytes, some merges, and a token that ends a text.
    fn metadata() -> HashMap<String, Value> {
        let bytes = Tokenizer::default();
        let mut tokens = vec![String::from(END_OF_TEXT), String::from("<|im_end|>")];
        tokens.extend((0..256).filter_map(|byte| bytes.0.inner.id_to_token(byte)));
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

    fn of(metadata: HashMap<String, Value>) -> Result<Tokenizer, String> {
        read(&Content {
            magic: VersionedMagic::GgufV3,
            metadata,
            tensor_infos: HashMap::new(),
            tensor_data_offset: 0,
        })
    }

    fn tokenizer() -> Tokenizer {
        of(metadata()).unwrap()
    }

    #[test]
    fn words_are_merged_and_digits_are_not() {
        let byte = |byte: u8| u32::from(byte) + 2;
        let tokenizer = tokenizer();
        let encode = |text| tokenizer.encode(text).unwrap();
        assert_eq!(encode("the the"), [259, 260]);
        assert_eq!(encode("12"), [byte(b'1'), byte(b'2')]);
        assert_eq!(encode("é"), [262]);
        // The name of a control token becomes that token, and is not part of the text.
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
            let mut stream = tokenizer.stream();
            let said: String = tokens.iter().map(|&token| stream.push(token)).collect();
            assert_eq!(said + &stream.finish(), text);
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
            of(metadata).err().unwrap_or_default()
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
