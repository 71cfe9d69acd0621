//! The file of a model: safetensors, of which a rank reads the rows that it has.
//!
//! The names of the tensors are those of Hugging Face's Mixtral. Numbers are bf16 or f32 in the file and f32 in
//! memory. The model's [`Config`] is in the file's metadata, as JSON, and so is how it was trained.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use half::bf16;
use serde::{Deserialize, Serialize};

use super::config::Config;
use super::error::{Error, Result};

/// The longest description of tensors that is read. One of a large model has some 100 kB.
const LONGEST_HEADER: u64 = 16 << 20;

/// The names and shapes of a model's tensors.
#[derive(Debug)]
pub struct Tensors;

impl Tensors {
    /// What a token is at first: `[vocab_size, hidden_size]`.
    pub const EMBEDDING: &str = "model.embed_tokens.weight";
    /// The norm before the logits.
    pub const NORM: &str = "model.norm.weight";
    /// The logits: `[vocab_size, hidden_size]`.
    pub const HEAD: &str = "lm_head.weight";

    /// A projection of the attention: `q_proj`, `k_proj`, `v_proj` or `o_proj`.
    #[must_use]
    pub fn attention(layer: usize, which: &str) -> String {
        format!("model.layers.{layer}.self_attn.{which}.weight")
    }

    /// A norm of a layer: `input_layernorm` or `post_attention_layernorm`.
    #[must_use]
    pub fn norm(layer: usize, which: &str) -> String {
        format!("model.layers.{layer}.{which}.weight")
    }

    /// What tells the experts for a row: `[num_local_experts, hidden_size]`.
    #[must_use]
    pub fn router(layer: usize) -> String {
        format!("model.layers.{layer}.block_sparse_moe.gate.weight")
    }

    /// A matrix of an expert: `w1` and `w3` go in, `w2` comes out.
    #[must_use]
    pub fn expert(layer: usize, expert: usize, which: &str) -> String {
        format!("model.layers.{layer}.block_sparse_moe.experts.{expert}.{which}.weight")
    }

    /// All of a model, with their shapes.
    #[must_use]
    pub fn of(config: &Config) -> Vec<(String, Vec<usize>)> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let vocabulary = vec![config.vocab_size, hidden];
        let mut all = vec![
            (String::from(Self::EMBEDDING), vocabulary.clone()),
            (String::from(Self::NORM), vec![hidden]),
            (String::from(Self::HEAD), vocabulary),
        ];
        for layer in 0..config.num_hidden_layers {
            for which in ["q_proj", "k_proj", "v_proj", "o_proj"] {
                all.push((Self::attention(layer, which), vec![hidden, hidden]));
            }
            for which in ["input_layernorm", "post_attention_layernorm"] {
                all.push((Self::norm(layer, which), vec![hidden]));
            }
            all.push((Self::router(layer), vec![config.num_local_experts, hidden]));
            for expert in 0..config.num_local_experts {
                all.push((Self::expert(layer, expert, "w1"), vec![inner, hidden]));
                all.push((Self::expert(layer, expert, "w2"), vec![hidden, inner]));
                all.push((Self::expert(layer, expert, "w3"), vec![inner, hidden]));
            }
        }
        all
    }
}

/// A tensor in the file.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

impl Entry {
    fn size(&self) -> Option<usize> {
        match self.dtype.as_str() {
            "BF16" => Some(2),
            "F32" => Some(4),
            _ => None,
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Header {
    #[serde(rename = "__metadata__")]
    metadata: BTreeMap<String, String>,
    #[serde(flatten)]
    tensors: BTreeMap<String, Entry>,
}

/// A file of weights that has been looked at, and of which nothing is in memory yet.
///
/// ```
/// use inference_server::model::{self, WeightsFile};
/// let file = WeightsFile::open(model::tiny())?;
/// assert_eq!(file.config().num_local_experts, 8);
/// # Ok::<(), model::Error>(())
/// ```
#[derive(Debug)]
pub struct WeightsFile {
    path: PathBuf,
    file: File,
    config: Config,
    header: BTreeMap<String, Entry>,
    metadata: BTreeMap<String, String>,
    /// Where the numbers begin.
    start: u64,
}

impl WeightsFile {
    /// Opens a file, and compares all its tensors with what its configuration asks for.
    ///
    /// # Errors
    /// [`Error::Weights`], which names the file and the tensor; [`Error::Config`].
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let refuse = |reason: String| Error::Weights {
            path: path.clone(),
            reason,
        };
        let file = File::open(&path).map_err(|error| refuse(format!("cannot open it: {error}")))?;
        let cut = |error| {
            refuse(format!(
                "it ends too early to be a safetensors file: {error}"
            ))
        };
        let whole = file.metadata().map_err(cut)?.len();
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0).map_err(cut)?;
        let length = u64::from_le_bytes(length);
        if length > LONGEST_HEADER || 8 + length > whole {
            let reason = format!(
                "its header would have {length} of {whole} bytes: this is no safetensors file, or it is cut"
            );
            return Err(refuse(reason));
        }
        let mut header = vec![0; length as usize];
        file.read_exact_at(&mut header, 8).map_err(cut)?;
        let header: Header = serde_json::from_slice(&header).map_err(|error| {
            refuse(format!(
                "its header is not that of a model that `cargo xtask train-tiny` writes: {error}"
            ))
        })?;
        let config = header.metadata.get("config");
        let config = config.ok_or_else(|| {
            refuse(String::from(
                "its metadata has no `config`: `cargo xtask train-tiny` writes files that do",
            ))
        })?;
        let config: Config = serde_json::from_str(config)
            .map_err(|error| refuse(format!("its `config` cannot be read: {error}")))?;
        config.check()?;
        let file = Self {
            file,
            config,
            start: 8 + length,
            header: header.tensors,
            metadata: header.metadata,
            path: path.clone(),
        };
        for (name, shape) in Tensors::of(&file.config) {
            file.entry(&name, &shape, whole)?;
        }
        Ok(file)
    }

    /// The model's numbers.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// How it was trained, as JSON, if the file says so.
    #[must_use]
    pub fn training(&self) -> Option<&str> {
        self.metadata.get("training").map(String::as_str)
    }

    fn refuse(&self, reason: String) -> Error {
        Error::Weights {
            path: self.path.clone(),
            reason,
        }
    }

    fn entry(&self, name: &str, shape: &[usize], whole: u64) -> Result<&Entry> {
        let Some(entry) = self.header.get(name) else {
            return Err(self.refuse(format!("it lacks the tensor {name}, of shape {shape:?}")));
        };
        if entry.shape != shape {
            let found = &entry.shape;
            let reason = format!("{name} has the shape {found:?}, and should have {shape:?}");
            return Err(self.refuse(reason));
        }
        let Some(size) = entry.size() else {
            let found = &entry.dtype;
            return Err(self.refuse(format!(
                "{name} is of type {found}: convert it to BF16 or F32"
            )));
        };
        let bytes = (shape.iter().product::<usize>() * size) as u64;
        let [from, to] = entry.data_offsets;
        if to.checked_sub(from) != Some(bytes) || to > whole - self.start {
            let reason = format!(
                "{name} should be {bytes} bytes, and is said to be at {from} to {to} of {}: the file is cut or damaged",
                whole - self.start
            );
            return Err(self.refuse(reason));
        }
        Ok(entry)
    }

    /// A matrix, or some of its rows: only those are read.
    pub(super) fn rows(
        &self,
        name: &str,
        [rows, width]: [usize; 2],
        range: Range<usize>,
    ) -> Result<Tensor> {
        debug_assert!(range.end <= rows, "{name} has {rows} rows");
        let numbers = self.numbers(name, range.start * width..range.end * width)?;
        Ok(Tensor::from_vec(
            numbers,
            (range.len(), width),
            &Device::Cpu,
        )?)
    }

    pub(super) fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Tensor> {
        self.rows(name, shape, 0..shape[0])
    }

    pub(super) fn vector(&self, name: &str, length: usize) -> Result<Tensor> {
        let numbers = self.numbers(name, 0..length)?;
        Ok(Tensor::from_vec(numbers, length, &Device::Cpu)?)
    }

    /// Some of a tensor's numbers.
    pub(crate) fn numbers(&self, name: &str, range: Range<usize>) -> Result<Vec<f32>> {
        let known = self
            .header
            .get(name)
            .and_then(|entry| Some((entry, entry.size()?)));
        let Some((entry, size)) = known else {
            return Err(self.refuse(format!("it lacks the tensor {name}")));
        };
        let mut bytes = vec![0; range.len() * size];
        let at = self.start + entry.data_offsets[0] + (range.start * size) as u64;
        self.file
            .read_exact_at(&mut bytes, at)
            .map_err(|error| self.refuse(format!("{name} cannot be read: {error}")))?;
        let numbers: Vec<f32> = match size {
            2 => {
                let (pairs, _) = bytes.as_chunks::<2>();
                pairs
                    .iter()
                    .map(|&pair| bf16::from_le_bytes(pair).to_f32())
                    .collect()
            }
            _ => {
                let (fours, _) = bytes.as_chunks::<4>();
                fours.iter().map(|&four| f32::from_le_bytes(four)).collect()
            }
        };
        if let Some(bad) = numbers.iter().find(|number| !number.is_finite()) {
            return Err(self.refuse(format!("{name} has a {bad} in it: the file is damaged")));
        }
        Ok(numbers)
    }

    /// Writes a model: the numbers of all its tensors, in the order of their names, as bf16. The same arguments give the
    /// same bytes.
    ///
    /// # Errors
    /// [`Error::Weights`] when the file cannot be written, or a tensor is missing or has another length.
    pub fn write(
        path: &Path,
        config: &Config,
        training: &str,
        tensors: &BTreeMap<String, Vec<f32>>,
    ) -> Result<()> {
        let refuse = |reason| Error::Weights {
            path: path.to_owned(),
            reason,
        };
        let config_text = serde_json::to_string(config).map_err(|e| refuse(e.to_string()))?;
        let mut header = Header {
            metadata: BTreeMap::from([
                (String::from("config"), config_text),
                (String::from("training"), String::from(training)),
            ]),
            tensors: BTreeMap::new(),
        };
        let shapes: BTreeMap<_, _> = Tensors::of(config).into_iter().collect();
        let mut data = Vec::new();
        for (name, shape) in shapes {
            let numbers = tensors.get(&name).map(Vec::as_slice).unwrap_or_default();
            if numbers.len() != shape.iter().product::<usize>() {
                let reason = format!("{} numbers for {name}, of shape {shape:?}", numbers.len());
                return Err(refuse(reason));
            }
            let from = data.len() as u64;
            data.extend(
                numbers
                    .iter()
                    .flat_map(|&number| bf16::from_f32(number).to_le_bytes()),
            );
            let entry = Entry {
                dtype: String::from("BF16"),
                shape,
                data_offsets: [from, data.len() as u64],
            };
            header.tensors.insert(name, entry);
        }
        let mut text = serde_json::to_vec(&header).map_err(|error| refuse(error.to_string()))?;
        // The numbers begin at a multiple of 8 bytes, as everywhere.
        text.resize(text.len().next_multiple_of(8), b' ');
        let whole = [&(text.len() as u64).to_le_bytes()[..], &text, &data].concat();
        std::fs::write(path, whole).map_err(|error| refuse(format!("cannot write it: {error}")))
    }
}
