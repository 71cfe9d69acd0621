//! The steps of the training.

use std::path::Path;

use candle_core::{Device, Tensor};
use candle_nn::loss::cross_entropy;
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use serde::{Deserialize, Serialize};

use super::corpus::Corpus;
use super::network::Network;
use crate::model::random;
use crate::model::{Config, Error, Result, WeightsFile};

/// The parameters of a training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The seed of the random numbers.
    pub seed: u64,
    /// The number of steps.
    pub steps: usize,
    /// Texts per step.
    pub texts: usize,
    /// Tokens per text.
    pub length: usize,
    /// The highest learning rate; it rises to this value first, and then falls to a tenth of it at the end, as a cosine.
    pub rate: f64,
    /// The weight of an even use of the experts, relative to the loss.
    pub balance: f64,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            seed: 1,
            steps: 2000,
            texts: 8,
            length: 128,
            rate: 3e-3,
            balance: 0.01,
        }
    }
}

/// The result of a training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The parameters of the training.
    pub plan: Plan,
    /// The number of tokens of the corpus.
    pub corpus_tokens: usize,
    /// See [`Corpus::sha256`].
    pub corpus_sha256: String,
    /// The mean loss of the last twentieth of the steps, in nats per byte.
    pub loss: f64,
    /// The mean loss of the held-out tokens.
    pub held_out_loss: f64,
    /// 1 if all experts are used alike, at most the number of experts.
    pub imbalance: f64,
}

/// The progress of a training.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// The number of finished steps.
    pub step: usize,
    /// The mean loss since the last report.
    pub loss: f64,
    /// See [`Report::imbalance`].
    pub imbalance: f64,
}

/// Steps between two progress reports.
const EACH: usize = 50;

/// Trains a model from random parameters. `said` gets a progress report every 50 steps and at the end.
///
/// # Errors
/// [`Error::Unusable`] for an invalid plan, for a corpus that is too short, and for a loss that is not finite; those of candle.
pub fn train(
    config: &Config,
    corpus: &Corpus,
    plan: &Plan,
    mut said: impl FnMut(Progress),
) -> Result<(Network, Report)> {
    config.check()?;
    let (seen, unseen) = corpus.parts();
    let needed = plan.length + 1;
    if plan.steps == 0 || plan.texts == 0 || plan.length == 0 || unseen.len() < needed {
        let text = format!(
            "{} steps of {} texts of {} tokens, and a corpus of {}: none may be 0, and the corpus has to be longer",
            plan.steps,
            plan.texts,
            plan.length,
            corpus.tokens().len()
        );
        return Err(Error::Unusable(text));
    }
    let network = Network::new(config, plan.seed)?;
    let parameters = ParamsAdamW {
        lr: plan.rate,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
    };
    let mut optimizer = AdamW::new(network.variables(), parameters)?;
    let mut history = Vec::with_capacity(plan.steps);
    for step in 0..plan.steps {
        optimizer.set_learning_rate(rate(plan, step));
        let texts = (0..plan.texts).map(|text| {
            let number = (step * plan.texts + text) as u64;
            let starts = (seen.len() - needed) as u64 + 1;
            let start = (random::bits(!plan.seed, number) % starts) as usize;
            &seen[start..start + needed]
        });
        let (loss, imbalance) = losses(&network, texts)?;
        let goal = (&loss + (&imbalance * plan.balance)?)?;
        optimizer.backward_step(&goal)?;
        let numbers = (loss.to_scalar::<f32>()?, imbalance.to_scalar::<f32>()?);
        if !numbers.0.is_finite() {
            let text = format!(
                "the loss is {} after {step} steps: try a lower rate",
                numbers.0
            );
            return Err(Error::Unusable(text));
        }
        history.push(numbers);
        if (step + 1).is_multiple_of(EACH) || step + 1 == plan.steps {
            let (loss, imbalance) = mean(&history[step / EACH * EACH..]);
            said(Progress {
                step: step + 1,
                loss,
                imbalance,
            });
        }
    }
    let (loss, imbalance) = mean(&history[plan.steps - plan.steps.div_ceil(20)..]);
    let report = Report {
        plan: plan.clone(),
        corpus_tokens: corpus.tokens().len(),
        corpus_sha256: corpus.sha256(),
        loss,
        held_out_loss: held_out(&network, unseen, needed)?,
        imbalance,
    };
    Ok((network, report))
}

impl Network {
    /// Writes the parameters, as bf16, with the report of their training.
    ///
    /// # Errors
    /// [`Error::Weights`] when the file cannot be written.
    pub fn save(&self, path: &Path, report: &Report) -> Result<()> {
        let report = serde_json::to_string(report).map_err(|e| Error::Unusable(e.to_string()))?;
        WeightsFile::write(path, self.config(), &report, &self.numbers()?)
    }
}

/// Returns the learning rate of a step: it rises for the first twentieth of the steps, at most 100, and then falls.
fn rate(plan: &Plan, step: usize) -> f64 {
    let rise = plan.steps.div_ceil(20).min(100);
    if step < rise {
        return plan.rate * (step + 1) as f64 / rise as f64;
    }
    let done = (step - rise) as f64 / (plan.steps - rise).max(1) as f64;
    let cosine = (done * std::f64::consts::PI).cos() / 2.0 + 0.5;
    plan.rate * (0.1 + 0.9 * cosine)
}

/// Returns loss and imbalance of texts, each with one token more than the model reads.
fn losses<'a>(
    network: &Network,
    texts: impl Iterator<Item = &'a [u32]>,
) -> Result<(Tensor, Tensor)> {
    let (mut tokens, mut next, mut length) = (Vec::new(), Vec::new(), 0);
    for text in texts {
        length = text.len() - 1;
        tokens.extend_from_slice(&text[..length]);
        next.extend_from_slice(&text[1..]);
    }
    let output = network.forward(&tokens, length)?;
    let next = Tensor::from_slice(&next, next.len(), &Device::Cpu)?;
    Ok((cross_entropy(&output.logits, &next)?, output.imbalance))
}

/// Returns the mean loss of the held-out tokens, text by text.
fn held_out(network: &Network, unseen: &[u32], needed: usize) -> Result<f64> {
    let mut all = Vec::new();
    for text in unseen.chunks_exact(needed) {
        let (loss, _) = losses(network, std::iter::once(text))?;
        all.push(f64::from(loss.to_scalar::<f32>()?));
    }
    Ok(all.iter().sum::<f64>() / all.len() as f64)
}

fn mean(history: &[(f32, f32)]) -> (f64, f64) {
    let of = |one: fn(&(f32, f32)) -> f32| {
        history.iter().map(|both| f64::from(one(both))).sum::<f64>() / history.len() as f64
    };
    (of(|both| both.0), of(|both| both.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_rises_to_what_was_asked_for_and_falls_to_a_tenth() {
        let plan = Plan {
            steps: 1000,
            ..Plan::default()
        };
        let rates: Vec<f64> = (0..1000).map(|step| rate(&plan, step)).collect();
        assert!(rates[..50].is_sorted() && rates[50..].iter().rev().is_sorted());
        assert!((rates[50] - plan.rate).abs() < 1e-12);
        assert!((rates[999] / plan.rate - 0.1).abs() < 1e-4);
    }
}
