//! A small random Llama, as a GGUF file.

use std::path::PathBuf;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use inference_server::model::{Alone, Llama, LlamaConfig, LlamaFile, Settings};
use tempfile::TempDir;

/// A width below 32 could not be quantised.
pub(crate) fn config() -> LlamaConfig {
    LlamaConfig {
        vocab_size: 264,
        hidden_size: 96,
        intermediate_size: 192,
        num_hidden_layers: 2,
        num_attention_heads: 6,
        num_key_value_heads: 3,
        max_position_embeddings: 64,
        rope_theta: 1000.0,
        rms_norm_eps: 1e-5,
    }
}

/// A file in a separate directory.
pub(crate) struct LlamaModel {
    directory: TempDir,
}

type Metadata = Vec<(String, Value)>;
type Tensors = Vec<(String, QTensor)>;

impl LlamaModel {
    pub(crate) fn new(config: &LlamaConfig) -> Self {
        Self::changed(config, |_, _| {})
    }

    /// Creates a model with changed contents.
    pub(crate) fn changed(
        config: &LlamaConfig,
        change: impl FnOnce(&mut Metadata, &mut Tensors),
    ) -> Self {
        let model = Self {
            directory: tempfile::tempdir().unwrap(),
        };
        let (mut metadata, mut tensors) = (metadata(config), tensors(config));
        change(&mut metadata, &mut tensors);
        let metadata: Vec<_> = metadata
            .iter()
            .map(|(name, value)| (&name[..], value))
            .collect();
        let tensors: Vec<_> = tensors
            .iter()
            .map(|(name, tensor)| (&name[..], tensor))
            .collect();
        let mut file = std::fs::File::create(model.path()).unwrap();
        gguf_file::write(&mut file, &metadata, &tensors).unwrap();
        model
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().join("model.gguf")
    }

    /// Returns the reference: one rank without NCCL.
    pub(crate) fn alone(&self, settings: Settings) -> Llama<Alone> {
        let file = LlamaFile::open(self.path()).unwrap();
        let alone = Alone::new(file.config().shape(settings.rows));
        Llama::load(&file, alone, settings).unwrap()
    }
}

fn metadata(config: &LlamaConfig) -> Metadata {
    let number = |number: usize| Value::U32(number as u32);
    let text = |text: &str| Value::String(text.into());
    let of = |name: &str| format!("llama.{name}");
    let tokens = tokens(config.vocab_size);
    let kinds = (0..tokens.len()).map(|at| Value::I32(if at < 2 { 3 } else { 1 }));
    let merges = ["t h", "th e", "Ġ the", "i n", "Ġ a", "e r"]
        .map(text)
        .to_vec();
    let size = config.hidden_size / config.num_attention_heads;
    [
        ("general.architecture".into(), text("llama")),
        (of("embedding_length"), number(config.hidden_size)),
        (of("feed_forward_length"), number(config.intermediate_size)),
        (of("block_count"), number(config.num_hidden_layers)),
        (
            of("attention.head_count"),
            number(config.num_attention_heads),
        ),
        (
            of("attention.head_count_kv"),
            number(config.num_key_value_heads),
        ),
        (of("context_length"), number(config.max_position_embeddings)),
        (of("rope.dimension_count"), number(size)),
        (of("rope.freq_base"), Value::F32(config.rope_theta as f32)),
        (
            of("attention.layer_norm_rms_epsilon"),
            Value::F32(config.rms_norm_eps as f32),
        ),
        ("tokenizer.ggml.model".into(), text("gpt2")),
        ("tokenizer.ggml.pre".into(), text("smollm")),
        (
            "tokenizer.ggml.token_type".into(),
            Value::Array(kinds.collect()),
        ),
        (
            "tokenizer.ggml.tokens".into(),
            Value::Array(tokens.into_iter().map(Value::String).collect()),
        ),
        ("tokenizer.ggml.merges".into(), Value::Array(merges)),
        ("tokenizer.ggml.eos_token_id".into(), Value::U32(1)),
    ]
    .to_vec()
}

/// Returns two tokens that end a text, all bytes as GPT-2 writes them, some words, and filler tokens.
fn tokens(most: usize) -> Vec<String> {
    let mut tokens: Vec<String> = vec!["<|endoftext|>".into(), "<|im_end|>".into()];
    let mut others = '\u{100}'..;
    tokens.extend((0..=u8::MAX).map(|byte| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte).to_string(),
        _ => others.next().unwrap().to_string(),
    }));
    tokens.extend(["th", "the", "Ġthe", "in", "Ġa", "er"].map(String::from));
    let more = tokens.len()..most;
    tokens.extend(more.map(|number| format!("word{number}")));
    tokens
}

fn tensors(config: &LlamaConfig) -> Tensors {
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let shared = hidden / config.num_attention_heads * config.num_key_value_heads;
    let mut random = fastrand::Rng::with_seed(5);
    let mut tensor = |name: String, shape: &[usize], kind| {
        let numbers = shape.iter().product::<usize>();
        // Norms are around 1, other weights are small.
        let (middle, width) = match shape {
            [_] => (1.0, 0.4),
            _ => (0.0, 0.5),
        };
        let numbers: Vec<f32> = (0..numbers)
            .map(|_| middle + width * (random.f32() - 0.5))
            .collect();
        let tensor = Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap();
        (name, QTensor::quantize(&tensor, kind).unwrap())
    };
    let (f32, q4, q8) = (GgmlDType::F32, GgmlDType::Q4_1, GgmlDType::Q8_0);
    let mut all = vec![
        tensor("token_embd.weight".into(), &[config.vocab_size, hidden], q8),
        tensor("output_norm.weight".into(), &[hidden], f32),
    ];
    for layer in 0..config.num_hidden_layers {
        let name = |which: &str| format!("blk.{layer}.{which}.weight");
        all.push(tensor(name("attn_norm"), &[hidden], f32));
        all.push(tensor(name("ffn_norm"), &[hidden], f32));
        all.push(tensor(name("attn_q"), &[hidden, hidden], q4));
        all.push(tensor(name("attn_k"), &[shared, hidden], q4));
        all.push(tensor(name("attn_v"), &[shared, hidden], q4));
        all.push(tensor(name("attn_output"), &[hidden, hidden], q4));
        all.push(tensor(name("ffn_gate"), &[inner, hidden], q4));
        all.push(tensor(name("ffn_up"), &[inner, hidden], q4));
        all.push(tensor(name("ffn_down"), &[hidden, inner], q4));
    }
    all
}
