//! Reading of completion requests, and the refusal of invalid ones.

use axum::http::StatusCode;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::refusal::Refusal;
use crate::model::tokenizer::Tokenizer;
use crate::model::{Known, Settings};
use crate::wire::Draw;

/// The most stop texts of a request.
const STOPS: usize = 4;
const ONE_PROMPT: &str =
    "prompt is one text, or a list with one text: ask several times for several";

/// A request for a completion.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Ask {
    pub(super) prompt: Vec<u32>,
    pub(super) most: usize,
    pub(super) draw: Draw,
    pub(super) stops: Vec<String>,
    pub(super) stream: bool,
    pub(super) usage: bool,
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// The raw fields of a request. Unknown fields are ignored, except those in [`refused`](Self::refused).
struct Fields(Map<String, Value>);

impl Fields {
    fn read(body: &[u8]) -> Result<Self, Refusal> {
        let wrong = |why: String| {
            let text = format!("the body is no request for a completion: {why}");
            Refusal::new(StatusCode::BAD_REQUEST, text)
        };
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Self(fields)),
            Ok(_) => Err(wrong(String::from("it is JSON, but no object"))),
            Err(error) => Err(wrong(format!("it is no JSON: {error}"))),
        }
    }

    /// Takes a field; `null` counts as absent.
    fn take<T: DeserializeOwned>(&mut self, name: &'static str) -> Result<Option<T>, Refusal> {
        let value = self.0.remove(name).filter(|value| !value.is_null());
        let value = value.map(serde_json::from_value).transpose();
        value.map_err(|error| Refusal::of(name, format!("{name}: {error}")))
    }

    fn take_required<T: DeserializeOwned>(&mut self, name: &'static str) -> Result<T, Refusal> {
        let value = self.take(name)?;
        value.ok_or_else(|| Refusal::of(name, format!("{name} is missing")))
    }

    /// Takes the prompt. Many clients send a list even for one text.
    fn take_prompt(&mut self) -> Result<String, Refusal> {
        match self.take_required("prompt")? {
            Value::String(text) => Ok(text),
            Value::Array(list) => match <[Value; 1]>::try_from(list) {
                Ok([Value::String(text)]) => Ok(text),
                _ => Err(Refusal::of("prompt", ONE_PROMPT)),
            },
            _ => Err(Refusal::of("prompt", ONE_PROMPT)),
        }
    }

    fn take_stops(&mut self) -> Result<Vec<String>, Refusal> {
        let text = |value| match value {
            Value::String(text) if !text.is_empty() => Some(text),
            _ => None,
        };
        let stops: Option<Vec<String>> = match self.take("stop")? {
            None => Some(Vec::new()),
            Some(Value::Array(several)) => several.into_iter().map(text).collect(),
            Some(one) => text(one).map(|one| vec![one]),
        };
        stops.filter(|stops| stops.len() <= STOPS).ok_or_else(|| {
            let text = format!("stop is one text or up to {STOPS}, none of them empty");
            Refusal::of("stop", text)
        })
    }

    /// Returns the name of an unsupported option that would change the answer, unless its value is the neutral one.
    fn refused(&self) -> Option<&'static str> {
        let options = [
            ("n", Value::from(1)),
            ("best_of", Value::from(1)),
            ("echo", Value::from(false)),
            ("logprobs", Value::Null),
            ("suffix", Value::from("")),
            ("frequency_penalty", Value::from(0)),
            ("presence_penalty", Value::from(0)),
            ("logit_bias", Value::Object(Map::new())),
            // Options of other servers.
            ("repetition_penalty", Value::from(1)),
            ("min_p", Value::from(0)),
            ("min_tokens", Value::from(0)),
            ("ignore_eos", Value::from(false)),
        ];
        let wished = |(name, none): &(&str, Value)| {
            self.0.get(*name).is_some_and(|value| {
                let same_number = value.as_f64().is_some() && value.as_f64() == none.as_f64();
                !value.is_null() && value != none && !same_number
            })
        };
        let found = options.into_iter().find(wished)?;
        Some(found.0)
    }
}

impl Ask {
    /// Reads the body of a request. `chance` replaces a missing seed.
    pub(super) fn read(
        body: &[u8],
        model: &str,
        tokenizer: &Tokenizer,
        settings: &Settings,
        chance: u64,
    ) -> Result<Self, Refusal> {
        let mut fields = Fields::read(body)?;
        let asked: String = fields.take_required("model")?;
        if asked != model {
            let text = format!(
                "there is no model {asked:?} here: this server serves {model}, and the option --model starts it with \
                 one of {}",
                Known::names()
            );
            let refusal = Refusal::of("model", text).status(StatusCode::NOT_FOUND);
            return Err(refusal.code("model_not_found"));
        }
        if let Some(name) = fields.refused() {
            return Err(Refusal::of(name, format!("{name} is not supported here")));
        }
        let prompt = tokenizer
            .encode(&fields.take_prompt()?)
            .map_err(|error| Refusal::of("prompt", error.to_string()))?;
        let most = settings.positions - 1;
        if prompt.is_empty() {
            return Err(Refusal::of("prompt", "the prompt is empty"));
        }
        if prompt.len() > most {
            let text = format!(
                "the prompt has {} tokens ({}): {most} are possible at most",
                prompt.len(),
                tokenizer.unit()
            );
            return Err(Refusal::of("prompt", text).code("context_length_exceeded"));
        }
        let limit = fields.take("max_tokens")?.unwrap_or(16);
        if limit == 0 {
            return Err(Refusal::of("max_tokens", "max_tokens has to be at least 1"));
        }
        let temperature = fields.take("temperature")?.unwrap_or(1.0);
        if !(0.0..=2.0).contains(&temperature) {
            let text = format!("temperature is {temperature}: 0 to 2 are possible");
            return Err(Refusal::of("temperature", text));
        }
        let top_p = fields.take("top_p")?.unwrap_or(1.0);
        if !(top_p > 0.0 && top_p <= 1.0) {
            let text = format!("top_p is {top_p}: it has to be above 0, and at most 1");
            return Err(Refusal::of("top_p", text));
        }
        let stops = fields.take_stops()?;
        let seed: Option<i64> = fields.take("seed")?;
        let options: Option<StreamOptions> = fields.take("stream_options")?;
        Ok(Self {
            prompt,
            most: limit,
            draw: Draw {
                temperature,
                top_p,
                seed: seed.map_or(chance, i64::cast_unsigned),
            },
            stops,
            stream: fields.take("stream")?.unwrap_or(false),
            usage: options.and_then(|options| options.include_usage) == Some(true),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str) -> Result<Ask, Value> {
        let settings = Settings {
            positions: 8,
            ..Settings::default()
        };
        let bytes = Tokenizer::default();
        Ask::read(body.as_bytes(), "tiny", &bytes, &settings, 5).map_err(|refusal| refusal.json())
    }

    #[test]
    fn what_is_not_said_is_as_openai_has_it() {
        let ask = read(r#"{"model": "tiny", "prompt": "ab", "n": 1.0, "user": "x"}"#).unwrap();
        assert_eq!((ask.prompt, ask.most), (vec![97, 98], 16));
        assert_eq!((ask.draw.temperature, ask.draw.top_p), (1.0, 1.0));
        assert_eq!(ask.draw.seed, 5);
        assert!(!ask.stream && !ask.usage && ask.stops.is_empty());
        let ask = read(
            r#"{"model": "tiny", "prompt": "ab", "seed": -1, "stop": "x", "temperature": 0,
                "stream": true, "stream_options": {"include_usage": true}, "max_tokens": 3}"#,
        );
        let ask = ask.unwrap();
        assert_eq!((ask.draw.seed, ask.stops), (u64::MAX, vec!["x".into()]));
        assert!(ask.stream && ask.usage && ask.most == 3);
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        let with = |more: &str| read(&format!(r#"{{"model": "tiny", "prompt": "ab"{more}}}"#));
        for (more, param) in [
            (r#", "max_tokens": 0"#, "max_tokens"),
            (r#", "temperature": 2.5"#, "temperature"),
            (r#", "top_p": 0"#, "top_p"),
            (r#", "max_tokens": "5""#, "max_tokens"),
            (r#", "max_tokens": -1"#, "max_tokens"),
            (r#", "temperature": "hot""#, "temperature"),
            (r#", "seed": 0.5"#, "seed"),
            (r#", "stream": 1"#, "stream"),
            (r#", "stream_options": true"#, "stream_options"),
            (r#", "stop": 7"#, "stop"),
            (r#", "stop": """#, "stop"),
            (r#", "stop": ["a","b","c","d","e"]"#, "stop"),
            (r#", "n": 2"#, "n"),
            (r#", "logprobs": 3"#, "logprobs"),
            (r#", "logprobs": 0"#, "logprobs"),
            (r#", "echo": true"#, "echo"),
            (r#", "min_p": 0.1"#, "min_p"),
        ] {
            let error = with(more).unwrap_err();
            assert_eq!(error["error"]["param"], param, "{more}");
            let message = error["error"]["message"].as_str().unwrap();
            assert!(message.starts_with(param), "{message}");
            assert_eq!(error["error"]["type"], "invalid_request_error");
        }
        let error = read(r#"{"model": "tiny", "prompt": "12345678"}"#).unwrap_err();
        assert_eq!(error["error"]["code"], "context_length_exceeded");
        let error = read(r#"{"model": "big", "prompt": "1"}"#).unwrap_err();
        assert_eq!(error["error"]["code"], "model_not_found");
        let message = error["error"]["message"].as_str().unwrap();
        assert!(
            message.contains("\"big\"") && message.contains("one of tiny, smollm2"),
            "{message}"
        );
        for nonsense in ["", "{", "[]", "\"x\"", r#"{"model": "\ud800"}"#] {
            let error = read(nonsense).unwrap_err();
            assert_eq!(
                error["error"]["type"], "invalid_request_error",
                "{nonsense}"
            );
        }
        let settings = Settings::default();
        let bytes = Tokenizer::default();
        assert!(Ask::read(b"{\"model\": \"\xff\"}", "tiny", &bytes, &settings, 5).is_err());
    }

    #[test]
    fn a_prompt_is_one_text_also_in_a_list() {
        let with = |prompt: &str| read(&format!(r#"{{"model": "tiny", "prompt": {prompt}}}"#));
        assert_eq!(with(r#"["ab"]"#).unwrap().prompt, [97, 98]);
        for prompt in [
            "null",
            "1",
            "[]",
            "[97]",
            r#"["a", "b"]"#,
            r#""""#,
            r#"[""]"#,
        ] {
            let error = with(prompt).unwrap_err();
            assert_eq!(error["error"]["param"], "prompt", "{prompt}");
        }
        assert_eq!(
            read(r#"{"model": "tiny"}"#).unwrap_err()["error"]["param"],
            "prompt"
        );
        assert_eq!(
            read(r#"{"prompt": "x"}"#).unwrap_err()["error"]["param"],
            "model"
        );
    }
}
