//! The file of a Llama: GGUF, quantised, of which a rank reads and expands the rows that it has.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{BufReader, Cursor};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use candle_core::quantized::gguf_file::{Content, TensorInfo};
use candle_core::{Device, Shape, Tensor};

use super::config::LlamaConfig;
use crate::model::error::{Error, Result};
use crate::model::tokenizer::{Tokenizer, gguf};

/// A file that has been looked at, and of whose weights nothing is in memory yet.
pub struct LlamaFile {
    path: PathBuf,
    file: File,
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
    /// Opens a file, and compares all its tensors with what its numbers ask for.
    ///
    /// # Errors
    /// [`Error::Weights`], which names the file and what is wrong with it.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let refuse = |reason: String| Error::Weights {
            path: path.clone(),
            reason,
        };
        let file = File::open(&path).map_err(|error| refuse(format!("cannot open it: {error}")))?;
        let whole = file
            .metadata()
            .map_err(|error| refuse(error.to_string()))?
            .len();
        let content = Content::read(&mut BufReader::new(&file)).map_err(|error| {
            refuse(format!("it is no GGUF file, or is cut or damaged: {error}"))
        })?;
        let config = LlamaConfig::read(&content.metadata).map_err(refuse)?;
        let file = Self {
            path: path.clone(),
            file,
            content,
            config,
        };
        file.check(whole).map_err(refuse)?;
        Ok(file)
    }

    /// The model's numbers.
    #[must_use]
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// From text to this model's tokens and back.
    ///
    /// # Errors
    /// [`Error::Weights`] for a vocabulary that cannot be used.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        gguf::read(&self.content).map_err(|reason| self.refuse(reason))
    }

    /// The tokens that end a text.
    pub(super) fn ends(&self) -> Result<Vec<u32>> {
        gguf::ends(&self.content.metadata).map_err(|reason| self.refuse(reason))
    }

    fn refuse(&self, reason: String) -> Error {
        Error::Weights {
            path: self.path.clone(),
            reason,
        }
    }

    /// All tensors, with their shapes.
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

    fn check(&self, whole: u64) -> Result<(), String> {
        let expected = self.expected();
        for (name, shape) in &expected {
            let Some(info) = self.content.tensor_infos.get(name) else {
                return Err(format!("it lacks the tensor {name}, of shape {shape:?}"));
            };
            if info.shape.dims() != shape {
                let found = info.shape.dims();
                return Err(format!(
                    "{name} has the shape {found:?}, and should have {shape:?}"
                ));
            }
            let (block, size) = (info.ggml_dtype.block_size(), info.ggml_dtype.type_size());
            let width = shape.last().copied().unwrap_or_default();
            if !width.is_multiple_of(block) {
                return Err(format!(
                    "{name} has rows of {width} numbers, in blocks of {block}"
                ));
            }
            let bytes = (shape.iter().product::<usize>() / block * size) as u64;
            let end = self.content.tensor_data_offset.checked_add(info.offset);
            if end
                .and_then(|start| start.checked_add(bytes))
                .is_none_or(|end| end > whole)
            {
                return Err(format!("{name} would end beyond the file: it is cut"));
            }
        }
        // A model with more to it (biases, scaled positions, a head of its own) would say nonsense without.
        let known: HashSet<&String> = expected.keys().collect();
        let mut others: Vec<_> = self.content.tensor_infos.keys().collect();
        others.retain(|name| !known.contains(name));
        others.sort();
        match others.first() {
            Some(name) => Err(format!("it has a tensor {name}, which is not known here")),
            None => Ok(()),
        }
    }

    /// Some rows of a matrix, as f32: only those are read.
    pub(super) fn rows(&self, name: &str, range: Range<usize>) -> Result<Tensor> {
        let Some(info) = self.content.tensor_infos.get(name) else {
            return Err(self.refuse(format!("it lacks the tensor {name}")));
        };
        let (_, width) = info.shape.dims2()?;
        let row = width / info.ggml_dtype.block_size() * info.ggml_dtype.type_size();
        let shape = Shape::from((range.len(), width));
        self.read(name, info, range.start * row, range.len() * row, shape)
    }

    /// Rows that make heads, in the order in which [`Rotary`](crate::model::rotary::Rotary) has them: halves. llama.cpp has
    /// the two numbers of a pair beside each other.
    pub(super) fn heads(&self, name: &str, heads: Range<usize>) -> Result<Tensor> {
        let size = self.config.head_size();
        let rows = self.rows(name, heads.start * size..heads.end * size)?;
        let places = (0..heads.len() * size).map(|row| {
            let (head, at) = (row / size, row % size);
            let (half, pair) = (at / (size / 2), at % (size / 2));
            (head * size + 2 * pair + half) as u32
        });
        let places = Tensor::from_iter(places, &Device::Cpu)?;
        Ok(rows.index_select(&places, 0)?)
    }

    /// A whole tensor of one dimension.
    pub(super) fn vector(&self, name: &str) -> Result<Tensor> {
        let Some(info) = self.content.tensor_infos.get(name) else {
            return Err(self.refuse(format!("it lacks the tensor {name}")));
        };
        let length = info.shape.dims1()?;
        let bytes = length / info.ggml_dtype.block_size() * info.ggml_dtype.type_size();
        self.read(name, info, 0, bytes, Shape::from(length))
    }

    fn read(
        &self,
        name: &str,
        info: &TensorInfo,
        from: usize,
        length: usize,
        shape: Shape,
    ) -> Result<Tensor> {
        let mut bytes = vec![0; length];
        let at = self.content.tensor_data_offset + info.offset + from as u64;
        self.file
            .read_exact_at(&mut bytes, at)
            .map_err(|error| self.refuse(format!("{name} cannot be read: {error}")))?;
        let part = TensorInfo {
            ggml_dtype: info.ggml_dtype,
            shape,
            offset: 0,
        };
        let part = part.read(&mut Cursor::new(bytes), 0, &Device::Cpu)?;
        let numbers = part.dequantize(&Device::Cpu)?;
        let flat = numbers.flatten_all()?.to_vec1::<f32>()?;
        if let Some(bad) = flat.iter().find(|number| !number.is_finite()) {
            return Err(self.refuse(format!("{name} has a {bad} in it: the file is damaged")));
        }
        Ok(numbers)
    }
}
