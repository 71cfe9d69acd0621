//! Tests of the whole server: the program itself, real processes for its ranks, HTTP over TCP, real signals.
//!
//! - `serving`: answers equal those of a single process without NCCL; `refusals`: invalid requests;
//! - `crowded`: many clients, slow ones, and monitoring meanwhile;
//! - `killed`, `frozen`: ranks that die or hang; `shrinking`: failover to fewer ranks; `elastic`: failover to all remaining
//!   ranks; `soak`: many deaths of one server; `elastic_soak`: random deaths, stops and changes of the number of ranks;
//! - `strangers`: other users of the host;
//! - `ending`: the end of the server itself; `smollm2`: another model;
//! - `program`, `belongings`, `client`, `clients`, `patience`: the program, the resources of its processes, its clients, and
//!   the time limits.

mod belongings;
mod client;
mod clients;
mod crowded;
mod elastic;
mod elastic_soak;
mod ending;
mod frozen;
mod killed;
mod patience;
mod program;
mod refusals;
mod serving;
mod shrinking;
mod smollm2;
mod soak;
mod strangers;
#[path = "../support/llama.rs"]
#[allow(dead_code, reason = "tests of the model need more of it")]
mod tiny_llama;

use inference_server::generate::{Request, generate};
use inference_server::model::tokenizer::{END, decode, encode};
use inference_server::model::{self, Alone, Decoder, Sampling, Settings, Shape, WeightsFile};
use patience::{DEADLINE, until};
use serde_json::{Value, json};

/// A request of a test.
#[derive(Clone)]
struct Question {
    prompt: String,
    most: usize,
    temperature: f32,
    seed: u64,
}

impl Question {
    /// Returns one of several different requests, of unequal length.
    fn number(number: usize) -> Self {
        let text =
            "When a rank dies, every communicator that it was part of ends on every rank at once.";
        Self {
            prompt: text.repeat(3)[..1 + (number * 37) % 200].to_owned(),
            most: 3 + (number * 11) % 40,
            temperature: [0.0, 0.8, 1.3][number % 3],
            seed: number as u64,
        }
    }

    /// Returns a request that takes a while.
    fn long(seed: u64) -> Self {
        Self {
            prompt: String::from("The communicator"),
            most: 150,
            temperature: 1.3,
            seed,
        }
    }

    fn body(&self) -> Value {
        json!({
            "model": "tiny",
            "prompt": self.prompt,
            "max_tokens": self.most,
            "temperature": self.temperature,
            "seed": self.seed,
        })
    }

    fn streaming(&self) -> Value {
        let mut body = self.body();
        body["stream"] = Value::from(true);
        body
    }

    fn request(&self) -> Request {
        Request {
            prompt: encode(&self.prompt),
            most: self.most,
            sampling: Sampling {
                temperature: self.temperature,
                seed: self.seed,
                ..Sampling::default()
            },
        }
    }
}

/// Returns the answers of a single process without NCCL.
fn reference(questions: &[Question]) -> Vec<String> {
    let file = WeightsFile::open(model::tiny()).unwrap();
    let settings = Settings::default();
    let alone = Alone::new(Shape::new(file.config(), settings.rows));
    let mut decoder = Decoder::load(&file, alone, settings).unwrap();
    let requests: Vec<_> = questions.iter().map(Question::request).collect();
    let made = generate(&mut decoder, &requests, 32, |_, _| {}).unwrap();
    made.into_iter()
        .map(|mut tokens| {
            tokens.pop_if(|last| *last == END);
            decode(&tokens)
        })
        .collect()
}
