//! SmolLM2 itself, which must be downloaded first: these tests are ignored by default.
//!
//! ```text
//! scripts/get-smollm2 && cargo test --release -p inference-server smollm2 -- --ignored
//! ```

use inference_server::generate::{Request, generate};
use inference_server::model::{Known, ModelFile, Sampling, Settings, fetched};
use inference_server::ranks::on_threads;

fn file() -> ModelFile {
    Known::SmolLm2.open(&fetched()).unwrap()
}

/// Returns the continuations of texts, always with the likeliest token, on each rank.
fn said(ranks: usize, texts: &[&str], most: usize) -> Vec<Vec<String>> {
    let tokenizer = file().tokenizer().unwrap();
    let requests: Vec<_> = texts
        .iter()
        .map(|text| Request {
            prompt: tokenizer.encode(text).unwrap(),
            most,
            sampling: Sampling::greedy(),
        })
        .collect();
    let settings = Settings {
        positions: 64,
        ..Known::SmolLm2.settings()
    };
    let path = Known::SmolLm2.path(&fetched());
    let made = on_threads(ranks, &path, settings, |part| {
        generate(part, &requests, 32, |_, _| {})
    });
    let words = |made: Vec<Vec<u32>>| made.iter().map(|made| tokenizer.decode(made)).collect();
    made.unwrap().into_iter().map(words).collect()
}

/// The continuations of the first run, which every number of ranks must reproduce.
const SAID: [(&str, &str); 2] = [
    (
        "Once upon a time, there was a little",
        " girl named Emma who loved to play in the sun. She would often go to",
    ),
    (
        "Water boils when",
        " the water is too hot, it will boil over and create steam. This can",
    ),
];

#[test]
#[ignore = "needs the file that scripts/get-smollm2 fetches"]
fn smollm2_says_the_same_believable_english_on_one_rank_and_on_three() {
    let prompts = SAID.map(|(prompt, _)| prompt);
    for ranks in [1, 3] {
        let found = said(ranks, &prompts, 16);
        assert_eq!(found.len(), ranks);
        for found in found {
            assert_eq!(found, SAID.map(|(_, said)| said), "{ranks} ranks");
        }
    }
}

#[test]
#[ignore = "needs the file that scripts/get-smollm2 fetches"]
fn smollm2_answers_a_conversation_and_ends_it() {
    let asked =
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(
        said(1, &[asked], 24)[0],
        ["The capital of France is Paris."]
    );
}

#[test]
#[ignore = "needs the file that scripts/get-smollm2 fetches"]
fn smollm2_has_texts_as_a_plain_merging_of_its_pairs_does() {
    let tokenizer = file().tokenizer().unwrap();
    // Computed once by thirty lines of Python that are independent of this code: merge the best pair until none is left.
    let known: [(&str, &[u32]); 6] = [
        ("The capital of France is", &[504, 3575, 282, 4649, 314]),
        (
            "Hello, world! It's 2024.",
            &[19556, 28, 905, 17, 657, 506, 216, 34, 32, 34, 36, 30],
        ),
        (
            "naïve café — 東京 👍🏽",
            &[
                3546, 46494, 37366, 1841, 17097, 247, 126, 16736, 122, 15107, 235, 231, 10813, 233,
                138,
            ],
        ),
        (
            "fn main() {\n    println!(\"hi\");\n}\n",
            &[
                7853, 1085, 1000, 1662, 472, 1628, 34115, 17, 1470, 6004, 21646, 198, 109, 198,
            ],
        ),
        (
            " leading and  double  spaces ",
            &[2899, 284, 216, 5561, 216, 5600, 216],
        ),
        ("don't we'll I'VE", &[12420, 982, 392, 3060, 339, 23, 18525]),
    ];
    for (text, tokens) in known {
        assert_eq!(tokenizer.encode(text).unwrap(), tokens, "{text:?}");
        assert_eq!(tokenizer.decode(tokens), text);
    }
    assert!(tokenizer.ends(0) && tokenizer.ends(2) && !tokenizer.ends(1));
    // Some control characters have no token.
    assert_eq!(tokenizer.encode("a\u{4}b").unwrap().len(), 2);
}
