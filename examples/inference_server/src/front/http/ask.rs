//! What may be asked of the model, and what is said about what may not.

use axum::http::StatusCode;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::refusal::Refusal;
use crate::model::Settings;
use crate::model::tokenizer::Tokenizer;
use crate::wire::Draw;

/// Texts that end a request, at most.
const STOPS: usize = 4;

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

/// As it comes. What is not known is not looked at, unless [`Body::refused`] has it.
#[derive(Deserialize)]
struct Body {
    model: String,
    prompt: String,
    max_tokens: Option<usize>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    seed: Option<i64>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    stop: Option<Stop>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Stop {
    One(String),
    Several(Vec<String>),
}

impl Body {
    /// What would change the answer and is not done here, with the value that means that it is not wished.
    fn refused(&self) -> Option<&'static str> {
        let options = [
            ("n", Value::from(1)),
            ("best_of", Value::from(1)),
            ("echo", Value::from(false)),
            ("logprobs", Value::Null),
            ("suffix", Value::Null),
            ("frequency_penalty", Value::from(0)),
            ("presence_penalty", Value::from(0)),
            ("logit_bias", Value::Object(Map::new())),
        ];
        let wished = |(name, none): &(&str, Value)| {
            self.others.get(*name).is_some_and(|value| {
                let same_number = value.as_f64().is_some() && value.as_f64() == none.as_f64();
                !value.is_null() && value != none && !same_number
            })
        };
        let found = options.into_iter().find(wished)?;
        Some(found.0)
    }
}

impl Ask {
    /// Reads the body of a request. `chance` is for those who give no seed.
    pub(super) fn read(
        body: &[u8],
        model: &str,
        tokenizer: &Tokenizer,
        settings: &Settings,
        chance: u64,
    ) -> Result<Self, Refusal> {
        let body: Body = serde_json::from_slice(body).map_err(|error| {
            let text = format!("the body is no request for a completion: {error}");
            Refusal::new(StatusCode::BAD_REQUEST, text)
        })?;
        if body.model != model {
            let text = format!("there is no model {:?} here: there is {model}", body.model);
            let refusal = Refusal::of("model", text).status(StatusCode::NOT_FOUND);
            return Err(refusal.code("model_not_found"));
        }
        if let Some(name) = body.refused() {
            return Err(Refusal::of(name, format!("{name} is not supported here")));
        }
        let prompt = tokenizer
            .encode(&body.prompt)
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
        let limit = body.max_tokens.unwrap_or(16);
        if limit == 0 {
            return Err(Refusal::of("max_tokens", "max_tokens has to be at least 1"));
        }
        let temperature = body.temperature.unwrap_or(1.0);
        if !(0.0..=2.0).contains(&temperature) {
            let text = format!("temperature is {temperature}: 0 to 2 are possible");
            return Err(Refusal::of("temperature", text));
        }
        let top_p = body.top_p.unwrap_or(1.0);
        if !(top_p > 0.0 && top_p <= 1.0) {
            let text = format!("top_p is {top_p}: it has to be above 0, and at most 1");
            return Err(Refusal::of("top_p", text));
        }
        let stops = match body.stop {
            None => Vec::new(),
            Some(Stop::One(one)) => vec![one],
            Some(Stop::Several(several)) => several,
        };
        if stops.len() > STOPS || stops.iter().any(String::is_empty) {
            let text = format!("stop is one text or up to {STOPS}, none of them empty");
            return Err(Refusal::of("stop", text));
        }
        let options = body.stream_options;
        Ok(Self {
            prompt,
            most: limit,
            draw: Draw {
                temperature,
                top_p,
                seed: body.seed.map_or(chance, i64::cast_unsigned),
            },
            stops,
            stream: body.stream.unwrap_or(false),
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
            (r#", "stop": """#, "stop"),
            (r#", "stop": ["a","b","c","d","e"]"#, "stop"),
            (r#", "n": 2"#, "n"),
            (r#", "logprobs": 3"#, "logprobs"),
            (r#", "echo": true"#, "echo"),
        ] {
            let error = with(more).unwrap_err();
            assert_eq!(error["error"]["param"], param, "{more}");
            assert_eq!(error["error"]["type"], "invalid_request_error");
        }
        let error = read(r#"{"model": "tiny", "prompt": "12345678"}"#).unwrap_err();
        assert_eq!(error["error"]["code"], "context_length_exceeded");
        let error = read(r#"{"model": "big", "prompt": "1"}"#).unwrap_err();
        assert_eq!(error["error"]["code"], "model_not_found");
        for nonsense in [
            "",
            "{",
            "[]",
            r#"{"model": "tiny"}"#,
            r#"{"model": "tiny", "prompt": 1}"#,
        ] {
            assert!(read(nonsense).is_err(), "{nonsense}");
        }
    }
}
