//! The architecture of Llama, with a small random model: the logits are correct, and bitwise equal on all numbers of ranks and
//! in all circumstances; files that do not fit are refused.

mod support;
#[path = "support/llama.rs"]
mod tiny_llama;

use std::fs;

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{DType, Device};
use inference_server::generate::{Request, generate};
use inference_server::model::{
    Alone, Arrived, Collectives, Error, Llama, LlamaConfig, LlamaFile, ModelFile, Part, Result,
    Sampling, Settings,
};
use inference_server::ranks::on_threads;
use support::{bits, rows, text};
use tiny_llama::{LlamaModel, config};

/// The number of rows is not a multiple of three: a Llama's rows are not distributed over ranks.
const SETTINGS: Settings = Settings {
    rows: 25,
    slots: 4,
    positions: 48,
};

/// Computes the logits of each position in 64 bits, by the textbook: one row after another, with the weights in the order of
/// the file, and adjacent numbers rotated as pairs.
fn by_the_book(model: &LlamaModel, config: &LlamaConfig, tokens: &[u32]) -> Vec<Vec<f64>> {
    let mut file = fs::File::open(model.path()).unwrap();
    let content = Content::read(&mut file).unwrap();
    let mut read = |name: &str| -> Vec<f64> {
        let tensor = content.tensor(&mut file, name, &Device::Cpu).unwrap();
        let tensor = tensor.dequantize(&Device::Cpu).unwrap();
        let tensor = tensor.to_dtype(DType::F64).unwrap();
        tensor.flatten_all().unwrap().to_vec1().unwrap()
    };
    let product = |matrix: &[f64], x: &[f64]| -> Vec<f64> {
        let row = |row: &[f64]| row.iter().zip(x).map(|(a, b)| a * b).sum();
        matrix.chunks_exact(x.len()).map(row).collect()
    };
    let norm = |x: &[f64], weight: &[f64]| -> Vec<f64> {
        let square = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (square + config.rms_norm_eps).sqrt();
        x.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
    };
    let size = config.head_size();
    let turn = |x: &mut [f64], position: usize| {
        for head in x.chunks_exact_mut(size) {
            for (pair, numbers) in head.chunks_exact_mut(2).enumerate() {
                let angle =
                    position as f64 / config.rope_theta.powf(2.0 * pair as f64 / size as f64);
                let (a, b) = (numbers[0], numbers[1]);
                numbers[0] = a * angle.cos() - b * angle.sin();
                numbers[1] = a * angle.sin() + b * angle.cos();
            }
        }
    };
    let embedding = read("token_embd.weight");
    let width = config.hidden_size;
    let mut all: Vec<Vec<f64>> = tokens
        .iter()
        .map(|&token| embedding[token as usize * width..][..width].to_vec())
        .collect();
    for layer in 0..config.num_hidden_layers {
        let mut weight = |which: &str| read(&format!("blk.{layer}.{which}.weight"));
        let [norm1, norm2] = ["attn_norm", "ffn_norm"].map(&mut weight);
        let [q, k, v, o] = ["attn_q", "attn_k", "attn_v", "attn_output"].map(&mut weight);
        let [gate, up, down] = ["ffn_gate", "ffn_up", "ffn_down"].map(&mut weight);
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (position, x) in all.iter_mut().enumerate() {
            let normed = norm(x, &norm1);
            let (mut query, mut key) = (product(&q, &normed), product(&k, &normed));
            turn(&mut query, position);
            turn(&mut key, position);
            keys.push(key);
            values.push(product(&v, &normed));
            let mut heads = vec![0.0; width];
            let group = config.num_attention_heads / config.num_key_value_heads;
            for head in 0..config.num_attention_heads {
                let (own, shared) = (head * size, head / group * size);
                let score = |key: &Vec<f64>| {
                    let pairs = query[own..own + size].iter().zip(&key[shared..]);
                    (pairs.map(|(a, b)| a * b).sum::<f64>() / (size as f64).sqrt()).exp()
                };
                let scores: Vec<f64> = keys.iter().map(score).collect();
                let sum: f64 = scores.iter().sum();
                for (score, value) in scores.iter().zip(&values) {
                    for at in 0..size {
                        heads[own + at] += score / sum * value[shared + at];
                    }
                }
            }
            for (x, made) in x.iter_mut().zip(product(&o, &heads)) {
                *x += made;
            }
            let normed = norm(x, &norm2);
            let inner = product(&gate, &normed)
                .into_iter()
                .zip(product(&up, &normed));
            let inner: Vec<f64> = inner.map(|(g, up)| g / (1.0 + (-g).exp()) * up).collect();
            for (x, made) in x.iter_mut().zip(product(&down, &inner)) {
                *x += made;
            }
        }
    }
    let last = read("output_norm.weight");
    all.iter()
        .map(|x| product(&embedding, &norm(x, &last)))
        .collect()
}

#[test]
fn logits_are_those_of_the_textbook_but_for_rounding() {
    let model = LlamaModel::new(&config());
    let tokens = text(3, 24);
    let expected = by_the_book(&model, &config(), &tokens);
    let found = model.alone(SETTINGS).step(&rows(1, 0, &tokens)).unwrap();
    let mut spread = 0.0f64;
    for (row, expected) in expected.iter().enumerate() {
        for (found, expected) in found.row(row).unwrap().iter().zip(expected) {
            assert!(
                (f64::from(*found) - expected).abs() < 1e-4,
                "{found} {expected}"
            );
            spread = spread.max(expected.abs());
        }
    }
    assert!(spread > 1.0, "they are all nothing: {spread}");
}

/// Some steps of several mixed requests; returns the logits of each row that wants them.
fn several_steps<P: Part + ?Sized>(part: &mut P) -> Result<Vec<Vec<u32>>> {
    let texts: Vec<_> = (0..4).map(|seed| text(seed, 40)).collect();
    let part_of = |slot: usize, from: usize, to: usize| rows(slot, from, &texts[slot][from..to]);
    let mut steps = [
        part_of(0, 0, 7),
        // As many rows as a step has room for.
        [part_of(0, 7, 8), part_of(1, 0, 24)].concat(),
        part_of(1, 24, 25),
        [part_of(2, 0, 3), part_of(0, 8, 9), part_of(3, 0, 9)].concat(),
        Vec::new(),
        [part_of(0, 9, 30), part_of(2, 3, 5)].concat(),
    ];
    // As in a prompt, of which only the last token needs logits.
    for row in &mut steps[3][..2] {
        row.logits = false;
    }
    let mut all = Vec::new();
    for step in steps {
        let logits = part.step(&step)?;
        for (number, row) in step.iter().enumerate() {
            assert_eq!(logits.row(number).is_some(), row.logits);
            all.extend(logits.row(number).map(bits));
        }
    }
    Ok(all)
}

#[test]
fn all_numbers_of_ranks_give_the_logits_of_a_single_process() {
    let two = LlamaConfig {
        hidden_size: 64,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        ..config()
    };
    for (config, counts) in [(config(), [1, 3]), (two, [1, 2])] {
        assert_eq!(config.rank_counts(), counts);
        let model = LlamaModel::new(&config);
        let expected = several_steps(&mut model.alone(SETTINGS)).unwrap();
        assert_eq!(expected.len(), 7 + 25 + 1 + 11 + 23);
        for ranks in counts {
            let found = on_threads(ranks, &model.path(), SETTINGS, several_steps).unwrap();
            assert_eq!(found.len(), ranks);
            assert!(
                found.iter().all(|found| *found == expected),
                "{ranks} ranks"
            );
        }
    }
    let violations = nccl_emulator::violations();
    assert!(violations.is_empty(), "{violations:#?}");
}

#[test]
fn neighbours_slots_and_cuts_do_not_change_a_bit() {
    let model = LlamaModel::new(&config());
    let text = text(9, 40);
    let cut = |slot: usize, length: usize, beside: usize| -> Vec<Vec<u32>> {
        let mut part = model.alone(SETTINGS);
        let mut all = Vec::new();
        for (number, tokens) in text.chunks(length).enumerate() {
            let other = rows((slot + 1) % 4, 0, &text[number..number + beside]);
            let step = [&other[..], &rows(slot, number * length, tokens)].concat();
            let logits = part.step(&step).unwrap();
            all.extend((beside..step.len()).map(|row| bits(logits.row(row).unwrap())));
        }
        all
    };
    let expected = cut(0, 20, 0);
    for (slot, length, beside) in [(0, 1, 0), (3, 20, 0), (1, 7, 5), (2, 13, 12), (0, 20, 3)] {
        assert!(
            cut(slot, length, beside) == expected,
            "{slot} {length} {beside}"
        );
    }
}

#[test]
fn requests_at_once_say_what_each_says_alone_also_on_three_ranks() {
    let model = LlamaModel::new(&config());
    let requests: Vec<_> = (0..9)
        .map(|number: u64| Request {
            prompt: text(number, 1 + (number as usize * 7) % 30),
            most: 3 + (number as usize * 5) % 13,
            sampling: Sampling {
                temperature: number as f32 % 2.0,
                seed: number,
                ..Sampling::default()
            },
        })
        .collect();
    let alone: Vec<_> = requests
        .iter()
        .map(|request| {
            let one = std::slice::from_ref(request);
            let made = generate(&mut model.alone(SETTINGS), one, 5, |_, _| {});
            made.unwrap().remove(0)
        })
        .collect();
    assert!(alone.iter().any(|made| made.len() > 10));
    let found = on_threads(3, &model.path(), SETTINGS, |part| {
        generate(part, &requests, 8, |_, _| {})
    });
    assert!(found.unwrap().iter().all(|found| *found == alone));
}

/// A rank that is disconnected after a number of messages.
struct Broken {
    after: usize,
    alone: Alone,
}

impl Broken {
    fn new(after: usize) -> Self {
        let alone = Alone::new(config().shape(SETTINGS.rows));
        Self { after, alone }
    }
}

impl Collectives for Broken {
    fn rank(&self) -> usize {
        0
    }

    fn ranks(&self) -> usize {
        1
    }

    fn all_to_all(&mut self, _: &[f32], _: &mut [f32]) -> Result<()> {
        unreachable!("a Llama's ranks gather");
    }

    fn all_gather(&mut self, x: &[f32], y: &mut [f32]) -> Result<()> {
        let dead = || Error::Unusable("dead".into());
        self.after = self.after.checked_sub(1).ok_or_else(dead)?;
        self.alone.all_gather(x, y)
    }

    fn dispatch(&mut self, _: &[i32], _: &[f32], _: &mut Arrived) -> Result<()> {
        unreachable!("it has no experts");
    }

    fn combine(&mut self, _: &[f32], _: &[f32], _: &mut [f32]) -> Result<()> {
        unreachable!("it has no experts");
    }
}

#[test]
fn weights_outlive_a_connection_that_fails_anywhere_in_a_step() {
    let model = LlamaModel::new(&config());
    let (first, mut again) = (rows(2, 0, &text(1, 9)), rows(2, 0, &text(2, 12)));
    for row in &mut again[..11] {
        row.logits = false;
    }
    let expected = model.alone(SETTINGS).step(&again).unwrap();
    let file = LlamaFile::open(model.path()).unwrap();
    let mut part = Llama::load(&file, Broken::new(1000), SETTINGS).unwrap();
    part.step(&first).unwrap();
    // The embedding, four for each layer, and the logits of one row.
    let messages = 1 + 2 * 4 + 1;
    for after in 0..messages {
        part.renew(Broken::new(after)).unwrap();
        assert_eq!(part.step(&again).unwrap_err().to_string(), "dead");
        part.renew(Broken::new(messages)).unwrap();
        // The caches are empty.
        assert!(part.step(&again[1..]).is_err());
        assert_eq!(part.step(&again).unwrap(), expected);
    }
}

#[test]
fn a_file_says_what_its_model_is_and_how_it_has_texts() {
    let model = LlamaModel::new(&config());
    let file = ModelFile::open(model.path()).unwrap();
    assert_eq!((file.positions(), file.rank_counts()), (64, vec![1, 3]));
    let tokenizer = file.tokenizer().unwrap();
    assert_eq!(tokenizer.encode("the the").unwrap(), [259, 260]);
    assert!(tokenizer.ends(0) && tokenizer.ends(1) && !tokenizer.ends(2));
    let part = model.alone(SETTINGS);
    assert!(part.ends(0) && part.ends(1) && !part.ends(2));
    let error = on_threads(2, &model.path(), SETTINGS, |_| Ok(())).unwrap_err();
    assert_eq!(
        error.to_string(),
        "2 ranks cannot share 3 heads of keys and values: take 1 or 3 ranks"
    );
    let long = Settings {
        positions: 65,
        ..SETTINGS
    };
    let error = on_threads(1, &model.path(), long, |_| Ok(())).unwrap_err();
    assert_eq!(error.to_string(), "65 positions for a model of 1 to 64");
}

/// Returns the error for a file.
fn refused(model: &LlamaModel) -> String {
    let text = ModelFile::open(model.path()).err().unwrap().to_string();
    let place = format!("{}: ", model.path().display());
    text.strip_prefix(&place).unwrap_or(&text).to_owned()
}

#[test]
fn a_file_that_does_not_fit_is_refused_with_the_reason() {
    let with = |name: &str, value: Value| {
        refused(&LlamaModel::changed(&config(), |metadata, _| {
            let found = metadata.iter_mut().find(|(key, _)| key == name);
            found.unwrap().1 = value;
        }))
    };
    let text = with("general.architecture", Value::String("gemma".into()));
    assert_eq!(
        text,
        "its architecture is \"gemma\": only \"llama\" is known here"
    );
    let text = with("llama.attention.head_count_kv", Value::U32(4));
    assert_eq!(
        text,
        "6 heads of queries cannot look at 4 of keys and values"
    );
    let text = with("llama.block_count", Value::U32(3));
    assert_eq!(
        text,
        "it lacks the tensor blk.2.attn_k.weight, of shape [48, 96]"
    );
    let text = with("llama.feed_forward_length", Value::U32(193));
    assert_eq!(
        text,
        "blk.0.ffn_down.weight has the shape [96, 192], and should have [96, 193]"
    );
    let text = with("llama.rope.dimension_count", Value::U32(8));
    assert!(text.contains("all of it has to turn"), "{text}");
    let text = with("llama.context_length", Value::U32(0));
    assert!(text.starts_with("`llama.context_length` is"), "{text}");
    let more = LlamaModel::changed(&config(), |_, tensors| {
        let (_, tensor) = tensors.pop().unwrap();
        tensors.push(("blk.1.ffn_down.bias".into(), tensor));
    });
    assert!(refused(&more).starts_with("it lacks the tensor blk.1.ffn_down.weight"));
    let more = LlamaModel::changed(&config(), |_, tensors| {
        let tensor = tensors[1].1.dequantize(&Device::Cpu).unwrap();
        let kind = candle_core::quantized::GgmlDType::F32;
        let tensor = candle_core::quantized::QTensor::quantize(&tensor, kind).unwrap();
        tensors.push(("rope_freqs.weight".into(), tensor));
    });
    assert_eq!(
        refused(&more),
        "it has a tensor rope_freqs.weight, which is not known here"
    );
    let missing = LlamaModel::changed(&config(), |metadata, _| {
        metadata.retain(|(name, _)| name != "llama.rope.freq_base");
    });
    assert_eq!(
        refused(&missing),
        "its metadata has no `llama.rope.freq_base`"
    );
}

#[test]
fn a_file_that_is_cut_is_refused_wherever_it_was_cut() {
    let model = LlamaModel::new(&config());
    let bytes = fs::read(model.path()).unwrap();
    for length in [4, 30, 2000, bytes.len() / 2, bytes.len() - 1000] {
        fs::write(model.path(), &bytes[..length]).unwrap();
        let text = refused(&model);
        assert!(text.contains("cut"), "{length} bytes: {text}");
    }
}
