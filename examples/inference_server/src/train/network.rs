//! The model on whole texts, in a form that candle can differentiate.
//!
//! Each expert works only on the rows that chose it, which is a quarter of the work of running all experts on all rows.

use std::collections::BTreeMap;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::ops::{rms_norm_slow, softmax};
use candle_nn::rotary_emb::rope_slow;

use crate::model::{Config, Rotary, Tensors, WeightsFile, choose, random};

/// All parameters of a model, as f32.
pub struct Network {
    config: Config,
    variables: BTreeMap<String, Var>,
}

/// The output for some texts.
pub(super) struct Output {
    /// `[texts * length, vocabulary]`.
    pub(super) logits: Tensor,
    /// How unevenly the experts are used, 1 for an even use: the mean over the layers of Switch's loss.
    pub(super) imbalance: Tensor,
}

impl Network {
    /// Creates a network with random parameters: a function of the seed and the parameters' names.
    ///
    /// # Errors
    /// Those of candle.
    pub fn new(config: &Config, seed: u64) -> Result<Self> {
        let mut variables = BTreeMap::new();
        for (name, shape) in Tensors::of(config) {
            let seed = name
                .bytes()
                .fold(seed, |seed, byte| random::bits(seed, u64::from(byte)));
            let count: usize = shape.iter().product();
            // The more layers add to a row, the smaller each addition begins.
            let layers = (2.0 * config.num_hidden_layers as f64).sqrt();
            let deviation = match &shape[..] {
                [_] => None,
                _ if name == Tensors::EMBEDDING => Some(0.1),
                [_, width] if name.contains("o_proj") || name.contains("w2") => {
                    Some(1.0 / (*width as f64).sqrt() / layers)
                }
                shape => Some(1.0 / (shape[shape.len() - 1] as f64).sqrt()),
            };
            let numbers: Vec<f32> = match deviation {
                None => vec![1.0; count],
                Some(deviation) => (0..count as u64)
                    .map(|i| (random::normal(seed, i) * deviation) as f32)
                    .collect(),
            };
            let tensor = Tensor::from_vec(numbers, shape, &Device::Cpu)?;
            variables.insert(name, Var::from_tensor(&tensor)?);
        }
        Ok(Self {
            config: config.clone(),
            variables,
        })
    }

    /// Reads the parameters of a file.
    ///
    /// # Errors
    /// Those of the file, and of candle.
    pub fn read(file: &WeightsFile) -> crate::Result<Self> {
        let mut variables = BTreeMap::new();
        for (name, _) in Tensors::of(file.config()) {
            let tensor = file.whole(&name)?;
            variables.insert(name, Var::from_tensor(&tensor)?);
        }
        Ok(Self {
            config: file.config().clone(),
            variables,
        })
    }

    /// Returns the model's configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the number of parameters.
    #[must_use]
    pub fn parameters(&self) -> usize {
        self.variables
            .values()
            .map(|variable| variable.elem_count())
            .sum()
    }

    /// Returns all parameters, by name.
    ///
    /// # Errors
    /// Those of candle.
    pub fn numbers(&self) -> Result<BTreeMap<String, Vec<f32>>> {
        let numbers = |(name, variable): (&String, &Var)| {
            Ok((name.clone(), variable.flatten_all()?.to_vec1()?))
        };
        self.variables.iter().map(numbers).collect()
    }

    pub(super) fn variables(&self) -> Vec<Var> {
        self.variables.values().cloned().collect()
    }

    fn variable(&self, name: &str) -> &Tensor {
        self.variables[name].as_tensor()
    }

    /// Returns the logits for the token after each token of some texts, `[tokens, vocabulary]`. `tokens` has the texts one
    /// after another, each of `length` tokens.
    ///
    /// # Errors
    /// Those of candle.
    pub fn logits(&self, tokens: &[u32], length: usize) -> Result<Tensor> {
        Ok(self.forward(tokens, length)?.logits)
    }

    pub(super) fn forward(&self, tokens: &[u32], length: usize) -> Result<Output> {
        let config = &self.config;
        let rotary = Rotary::new(config.head_size(), config.rope_theta, length)?;
        let at = (rotary, mask(config, length)?);
        let tokens = Tensor::from_slice(tokens, tokens.len(), &Device::Cpu)?;
        let mut x = self.variable(Tensors::EMBEDDING).index_select(&tokens, 0)?;
        let mut imbalance = Tensor::zeros((), DType::F32, &Device::Cpu)?;
        for layer in 0..config.num_hidden_layers {
            let normed = self.norm(&x, &Tensors::norm(layer, "input_layernorm"))?;
            x = (x + self.attention(&normed, layer, &at)?)?;
            let normed = self.norm(&x, &Tensors::norm(layer, "post_attention_layernorm"))?;
            let (experts, uneven) = self.experts(&normed, layer)?;
            x = (x + experts)?;
            imbalance = (imbalance + uneven)?;
        }
        let logits = self.linear(&self.norm(&x, Tensors::NORM)?, Tensors::HEAD)?;
        let imbalance = (imbalance / config.num_hidden_layers as f64)?;
        Ok(Output { logits, imbalance })
    }

    fn linear(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        x.matmul(&self.variable(name).t()?)
    }

    fn norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        rms_norm_slow(x, self.variable(name), self.config.rms_norm_eps as f32)
    }

    fn attention(&self, x: &Tensor, layer: usize, at: &(Rotary, Tensor)) -> Result<Tensor> {
        let (heads, size) = (self.config.num_attention_heads, self.config.head_size());
        let (rotary, mask) = at;
        let length = mask.dim(0)?;
        let texts = x.dim(0)? / length;
        let project = |which| {
            self.linear(x, &Tensors::attention(layer, which))?
                .reshape((texts, length, heads, size))?
                .transpose(1, 2)?
                .contiguous()
        };
        let turn = |x: Tensor| rope_slow(&x, &rotary.cosines, &rotary.sines);
        let (queries, keys) = (turn(project("q_proj")?)?, turn(project("k_proj")?)?);
        let scores = (queries.matmul(&keys.t()?)? * (1.0 / (size as f64).sqrt()))?;
        let scores = softmax(&scores.broadcast_add(mask)?, D::Minus1)?;
        let looked = scores.matmul(&project("v_proj")?)?;
        let looked = looked.transpose(1, 2)?.reshape(x.shape())?;
        self.linear(&looked, &Tensors::attention(layer, "o_proj"))
    }

    fn experts(&self, x: &Tensor, layer: usize) -> Result<(Tensor, Tensor)> {
        let (experts, top_k) = (
            self.config.num_local_experts,
            self.config.num_experts_per_tok,
        );
        let rows = x.dim(0)?;
        let scores = self.linear(x, &Tensors::router(layer))?;
        let (chosen, weights) = choose(&scores, top_k)?;
        let chosen = chosen.flatten_all()?.to_vec1::<u32>()?;

        // Sorts the choices by expert, so that each expert has its rows together.
        let mut order: Vec<u32> = (0..chosen.len() as u32).collect();
        order.sort_by_key(|&choice| chosen[choice as usize]);
        let mut back = vec![0u32; order.len()];
        for (place, &choice) in order.iter().enumerate() {
            back[choice as usize] = place as u32;
        }
        let mut made = Vec::new();
        let mut counts = vec![0.0f32; experts];
        for (expert, count) in counts.iter_mut().enumerate() {
            let own = order
                .iter()
                .filter(|&&choice| chosen[choice as usize] == expert as u32);
            let own: Vec<u32> = own.map(|choice| choice / top_k as u32).collect();
            *count = own.len() as f32;
            if own.is_empty() {
                continue;
            }
            let own = x.index_select(&Tensor::from_slice(&own, own.len(), &Device::Cpu)?, 0)?;
            let name = |which| Tensors::expert(layer, expert, which);
            let gate = self.linear(&own, &name("w1"))?.silu()?;
            let inner = (gate * self.linear(&own, &name("w3"))?)?;
            made.push(self.linear(&inner, &name("w2"))?);
        }
        let back = Tensor::from_slice(&back, back.len(), &Device::Cpu)?;
        let made = Tensor::cat(&made, 0)?.index_select(&back, 0)?;
        let made = made.reshape((rows, top_k, ()))?;
        let out = made.broadcast_mul(&weights.unsqueeze(2)?)?.sum(1)?;

        // Switch Transformers, equation 4: the share of the choices times the mean probability.
        let share: Vec<f32> = counts
            .iter()
            .map(|count| count / chosen.len() as f32)
            .collect();
        let share = Tensor::from_slice(&share, experts, &Device::Cpu)?;
        let probability = softmax(&scores, 1)?.mean(0)?;
        let imbalance = ((probability * share)?.sum_all()? * experts as f64)?;
        Ok((out, imbalance))
    }
}

/// Returns 0 where a position may attend, and −∞ elsewhere.
fn mask(config: &Config, length: usize) -> Result<Tensor> {
    let may_look = |from: usize, to: usize| to <= from && from - to < config.sliding_window;
    let mask: Vec<f32> = (0..length * length)
        .map(|i| match may_look(i / length, i % length) {
            true => 0.0,
            false => f32::NEG_INFINITY,
        })
        .collect();
    Tensor::from_vec(mask, (length, length), &Device::Cpu)
}
