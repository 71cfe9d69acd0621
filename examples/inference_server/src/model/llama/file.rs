//! The file of a Llama: GGUF, quantised, of which a rank reads and dequantises only its own rows.

use std::collections::BTreeMap;
use std::io::{BufReader, Cursor};
use std::ops::Range;
use std::path::PathBuf;

use candle_core::quantized::gguf_file::{Content, TensorInfo};
use candle_core::{Device, Tensor};

use super::config::LlamaConfig;
use crate::model::error::Result;
use crate::model::opened::Opened;
use crate::model::tokenizer::{Tokenizer, gguf};

/// A checked file. The weights are not in memory.
pub struct LlamaFile {
    file: Opened,
    content: Content,
    config: LlamaConfig,
}

/// The names in the file.
pub(super) const EMBEDDING: &str = "token_embd.weight";
pub(super) const NORM: &str = "output_norm.weight";

pub(super) fn of_layer(layer: usize, which: &str) -> String {
    format!("blk.{layer}.{which}.weight")
}

impl LlamaFile {
    /// Opens a file, and compares all its tensors with its configuration.
    ///
    /// # Errors
    /// [`Error::Weights`](crate::Error::Weights), which names the file and what is wrong with it.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let file = Opened::new(path)?;
        let content = Content::read(&mut BufReader::new(&file.file)).map_err(|error| {
            file.refuse(format!("it is no GGUF file, or is cut or damaged: {error}"))
        })?;
        let config = LlamaConfig::read(&content.metadata).map_err(|reason| file.refuse(reason))?;
        let file = Self {
            file,
            content,
            config,
        };
        file.check()?;
        Ok(file)
    }

    /// Returns the model's configuration.
    #[must_use]
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// Returns the tokenizer of this model.
    ///
    /// # Errors
    /// [`Error::Weights`](crate::Error::Weights) for a vocabulary that cannot be used.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        gguf::read(&self.content).map_err(|reason| self.file.refuse(reason))
    }

    /// Returns the tokens that end a text.
    pub(super) fn ends(&self) -> Result<Vec<u32>> {
        gguf::ends(&self.content.metadata).map_err(|reason| self.file.refuse(reason))
    }

    /// Returns all expected tensors, with their shapes.
    fn expected(&self) -> BTreeMap<String, Vec<usize>> {
        let config = &self.config;
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let mut all = BTreeMap::from([
            (String::from(EMBEDDING), vec![config.vocab_size, hidden]),
            (String::from(NORM), vec![hidden]),
        ]);
        for layer in 0..config.num_hidden_layers {
            for (which, shape) in [
                ("attn_norm", vec![hidden]),
                ("attn_q", vec![hidden, hidden]),
                ("attn_k", vec![config.shared_size(), hidden]),
                ("attn_v", vec![config.shared_size(), hidden]),
                ("attn_output", vec![hidden, hidden]),
                ("ffn_norm", vec![hidden]),
                ("ffn_gate", vec![inner, hidden]),
                ("ffn_up", vec![inner, hidden]),
                ("ffn_down", vec![hidden, inner]),
            ] {
                all.insert(of_layer(layer, which), shape);
            }
        }
        all
    }

    fn check(&self) -> Result<()> {
        let refuse = |reason| Err(self.file.refuse(reason));
        let expected = self.expected();
        for (name, shape) in &expected {
            let info = self.content.tensor_infos.get(name);
            self.file
                .check(name, info.map(|info| info.shape.dims()), shape)?;
            let Some(info) = info else { continue };
            let (block, size) = (info.ggml_dtype.block_size(), info.ggml_dtype.type_size());
            let width = shape.last().copied().unwrap_or_default();
            if !width.is_multiple_of(block) {
                return refuse(format!(
                    "{name} has rows of {width} numbers, in blocks of {block}"
                ));
            }
            let bytes = (shape.iter().product::<usize>() / block * size) as u64;
            let end = self.content.tensor_data_offset.checked_add(info.offset);
            let end = end.and_then(|start| start.checked_add(bytes));
            if end.is_none_or(|end| end > self.file.length) {
                return refuse(format!("{name} would end beyond the file: it is cut"));
            }
        }
        // A model with more tensors (biases, scaled positions, a separate head) would produce nonsense without them.
        let all = self.content.tensor_infos.keys();
        match all.filter(|name| !expected.contains_key(*name)).min() {
            Some(name) => refuse(format!("it has a tensor {name}, which is not known here")),
            None => Ok(()),
        }
    }

    fn info(&self, name: &str) -> Result<&TensorInfo> {
        let info = self.content.tensor_infos.get(name);
        info.ok_or_else(|| self.file.refuse(format!("it lacks the tensor {name}")))
    }

    /// Reads a whole tensor, as f32.
    pub(super) fn whole(&self, name: &str) -> Result<Tensor> {
        self.rows(name, 0..self.info(name)?.shape.dims()[0])
    }

    /// Reads some rows of a tensor, and no others, as f32.
    pub(super) fn rows(&self, name: &str, range: Range<usize>) -> Result<Tensor> {
        let info = self.info(name)?;
        let ggml_dtype = info.ggml_dtype;
        let mut shape = info.shape.dims().to_vec();
        let width: usize = shape[1..].iter().product();
        shape[0] = range.len();
        let length = |rows| rows * width / ggml_dtype.block_size() * ggml_dtype.type_size();
        let at = self.content.tensor_data_offset + info.offset + length(range.start) as u64;
        let bytes = self.file.bytes(name, at, length(range.len()))?;
        let part = TensorInfo {
            ggml_dtype,
            shape: shape.into(),
            offset: 0,
        };
        let part = part.read(&mut Cursor::new(bytes), 0, &Device::Cpu)?;
        self.file.finite(name, part.dequantize(&Device::Cpu)?)
    }

    /// Reads the rows of heads, in the order of [`Rotary`](crate::model::rotary::Rotary), with the two numbers of a pair in
    /// different halves. In llama.cpp's files, the two numbers of a pair are adjacent.
    pub(super) fn heads(&self, name: &str, heads: Range<usize>) -> Result<Tensor> {
        let (count, size) = (heads.len(), self.config.head_size());
        let rows = self.rows(name, heads.start * size..heads.end * size)?;
        let pairs = rows.reshape((count, size / 2, 2, ()))?;
        Ok(pairs.transpose(1, 2)?.reshape(rows.shape())?)
    }
}
