//! The file of a model: safetensors, of which a rank reads only its own rows.
//!
//! The names of the tensors are those of Hugging Face's Mixtral. Numbers are bf16 or f32 in the file and f32 in memory. The
//! file's metadata has the model's [`Config`] and the report of its training, as JSON.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_core::safetensors::Load;
use candle_core::{DType, Device, Tensor};
use half::bf16;
use safetensors::tensor::{Dtype, Metadata, TensorInfo, TensorView};
use serde::Serialize;

use super::config::Config;
use super::error::{Error, Result};
use super::opened::Opened;

/// The longest header that is read. That of a large model has some 100 kB.
const LONGEST_HEADER: u64 = 16 << 20;

/// The names and shapes of a model's tensors.
#[derive(Debug)]
pub struct Tensors;

impl Tensors {
    /// The embedding of each token: `[vocab_size, hidden_size]`.
    pub const EMBEDDING: &str = "model.embed_tokens.weight";
    /// The final norm, before the logits.
    pub const NORM: &str = "model.norm.weight";
    /// The projection to logits: `[vocab_size, hidden_size]`.
    pub const HEAD: &str = "lm_head.weight";

    /// Returns the name of a projection of the attention: `q_proj`, `k_proj`, `v_proj` or `o_proj`.
    #[must_use]
    pub fn attention(layer: usize, which: &str) -> String {
        format!("model.layers.{layer}.self_attn.{which}.weight")
    }

    /// Returns the name of a norm of a layer: `input_layernorm` or `post_attention_layernorm`.
    #[must_use]
    pub fn norm(layer: usize, which: &str) -> String {
        format!("model.layers.{layer}.{which}.weight")
    }

    /// Returns the name of the router, which scores the experts for a row: `[num_local_experts, hidden_size]`.
    #[must_use]
    pub fn router(layer: usize) -> String {
        format!("model.layers.{layer}.block_sparse_moe.gate.weight")
    }

    /// Returns the name of a matrix of an expert: `w1` and `w3` map to the inner width, `w2` maps back.
    #[must_use]
    pub fn expert(layer: usize, expert: usize, which: &str) -> String {
        format!("model.layers.{layer}.block_sparse_moe.experts.{expert}.{which}.weight")
    }

    /// Returns all tensors of a model, with their shapes.
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

/// The header as it is written. Its order is fixed, which the crate `safetensors` does not guarantee.
#[derive(Serialize)]
struct Header {
    #[serde(rename = "__metadata__")]
    metadata: BTreeMap<&'static str, String>,
    #[serde(flatten)]
    tensors: BTreeMap<String, TensorInfo>,
}

/// A checked file of weights. The weights are not in memory.
///
/// ```
/// use inference_server::model::{self, WeightsFile};
/// let file = WeightsFile::open(model::tiny())?;
/// assert_eq!(file.config().num_local_experts, 8);
/// # Ok::<(), model::Error>(())
/// ```
#[derive(Debug)]
pub struct WeightsFile {
    file: Opened,
    config: Config,
    header: Metadata,
    /// The offset of the tensor data.
    start: u64,
}

impl WeightsFile {
    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Opens a file, and compares all its tensors with its configuration.
    ///
    /// # Errors
    /// [`Error::Weights`], which names the file and the tensor; [`Error::Config`].
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let file = Opened::new(path)?;
        let whole = file.length;
        let mut length = [0; 8];
        if whole < 8 {
            let reason =
                format!("it ends too early to be a safetensors file: it has {whole} bytes");
            return Err(file.refuse(reason));
        }
        length.copy_from_slice(&file.bytes("its header", 0, 8)?);
        let length = u64::from_le_bytes(length);
        if length > LONGEST_HEADER || 8 + length > whole {
            let reason = format!(
                "its header would have {length} of {whole} bytes: this is no safetensors file, or it is cut"
            );
            return Err(file.refuse(reason));
        }
        let header = file.bytes("its header", 8, length as usize)?;
        let header: Metadata = serde_json::from_slice(&header).map_err(|error| {
            file.refuse(format!(
                "its header is not that of a model that `cargo xtask train-tiny` writes: {error}"
            ))
        })?;
        let start = 8 + length;
        let (needed, there) = (header.data_len() as u64, whole - start);
        if needed > there {
            let reason = format!(
                "its tensors are said to have {needed} bytes, and {there} are there: the file is cut or damaged"
            );
            return Err(file.refuse(reason));
        }
        let config = header.metadata().as_ref().and_then(|all| all.get("config"));
        let config = config.ok_or_else(|| {
            file.refuse(String::from(
                "its metadata has no `config`: `cargo xtask train-tiny` writes files that do",
            ))
        })?;
        let config: Config = serde_json::from_str(config)
            .map_err(|error| file.refuse(format!("its `config` cannot be read: {error}")))?;
        config.check()?;
        for (name, shape) in Tensors::of(&config) {
            let info = header.info(&name);
            file.check(&name, info.map(|info| &info.shape[..]), &shape)?;
            let kind = info.map(|info| info.dtype);
            if let Some(kind) = kind.filter(|kind| !matches!(kind, Dtype::BF16 | Dtype::F32)) {
                let reason = format!("{name} is of type {kind}: convert it to BF16 or F32");
                return Err(file.refuse(reason));
            }
        }
        Ok(Self {
            file,
            config,
            header,
            start,
        })
    }

    /// Returns the model's configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the report of the training as JSON, if the file has one.
    #[must_use]
    pub fn training(&self) -> Option<&str> {
        let metadata = self.header.metadata().as_ref()?;
        metadata.get("training").map(String::as_str)
    }

    fn info(&self, name: &str) -> Result<&TensorInfo> {
        let info = self.header.info(name);
        info.ok_or_else(|| self.file.refuse(format!("it lacks the tensor {name}")))
    }

    /// Reads a whole tensor.
    pub(crate) fn whole(&self, name: &str) -> Result<Tensor> {
        self.rows(name, 0..self.info(name)?.shape[0])
    }

    /// Reads some rows of a tensor, and no others.
    pub(super) fn rows(&self, name: &str, range: Range<usize>) -> Result<Tensor> {
        let info = self.info(name)?;
        let mut shape = info.shape.clone();
        let row = shape[1..].iter().product::<usize>() * info.dtype.bitsize() / 8;
        shape[0] = range.len();
        let at = self.start + (info.data_offsets.0 + range.start * row) as u64;
        let bytes = self.file.bytes(name, at, range.len() * row)?;
        let view = TensorView::new(info.dtype, shape, &bytes).map_err(candle_core::Error::from)?;
        let numbers = view.load(&Device::Cpu)?.to_dtype(DType::F32)?;
        self.file.finite(name, numbers)
    }

    /// Writes a model: the numbers of all its tensors, in the order of their names, as bf16. The same arguments give the same
    /// bytes.
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
        let metadata = [("config", config_text), ("training", training.into())];
        let mut header = Header {
            metadata: metadata.into(),
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
            let from = data.len();
            data.extend(
                numbers
                    .iter()
                    .flat_map(|&number| bf16::from_f32(number).to_le_bytes()),
            );
            let info = TensorInfo {
                dtype: Dtype::BF16,
                shape,
                data_offsets: (from, data.len()),
            };
            header.tensors.insert(name, info);
        }
        let mut text = serde_json::to_vec(&header).map_err(|error| refuse(error.to_string()))?;
        // The tensor data begins at a multiple of 8 bytes, as is usual for safetensors.
        text.resize(text.len().next_multiple_of(8), b' ');
        let whole = [&(text.len() as u64).to_le_bytes()[..], &text, &data].concat();
        std::fs::write(path, whole).map_err(|error| refuse(format!("cannot write it: {error}")))
    }
}
