//! The mixture of experts of one layer: who chooses whom, and what the experts of this rank do.

use candle_core::{Device, Tensor};

use super::batch_invariant::linear;
use super::collectives::{Arrived, Collectives};
use super::config::{Config, Shard};
use super::error::Result;
use super::weights::{Tensors, WeightsFile};

/// One layer's: the router, which every rank has, and the rank's own experts.
pub(super) struct Experts {
    router: Tensor,
    own: Vec<Expert>,
    top_k: usize,
}

struct Expert {
    gate: Tensor,
    up: Tensor,
    down: Tensor,
}

/// Memory of a step, used again in each layer and step.
#[derive(Default)]
pub(super) struct Scratch {
    choices: Vec<i32>,
    weights: Vec<f32>,
    arrived: Arrived,
    made: Vec<f32>,
}

impl Experts {
    pub(super) fn load(
        file: &WeightsFile,
        layer: usize,
        config: &Config,
        shard: &Shard,
    ) -> Result<Self> {
        let load = |expert| -> Result<Expert> {
            let matrix = |which| file.whole(&Tensors::expert(layer, expert, which));
            Ok(Expert {
                gate: matrix("w1")?,
                up: matrix("w3")?,
                down: matrix("w2")?,
            })
        };
        Ok(Self {
            router: file.whole(&Tensors::router(layer))?,
            own: shard.experts.clone().map(load).collect::<Result<_>>()?,
            top_k: config.num_experts_per_tok,
        })
    }

    /// What the experts make of this rank's rows: `x` has those that are there, `x_all` the same in a buffer of all that
    /// could be there, as has `out`.
    pub(super) fn forward(
        &self,
        x: Option<&Tensor>,
        x_all: &[f32],
        ranks: &mut impl Collectives,
        scratch: &mut Scratch,
        out: &mut [f32],
        rows: usize,
    ) -> Result<()> {
        let Scratch {
            choices,
            weights,
            arrived,
            made,
        } = scratch;
        choices.clear();
        weights.clear();
        if let Some(x) = x {
            let scores = linear(x, &self.router)?.to_vec2::<f32>()?;
            scores
                .iter()
                .for_each(|row| choose(row, self.top_k, choices, weights));
        }
        // Rows that are not there choose nobody.
        choices.resize(rows * self.top_k, -1);
        weights.resize(rows * self.top_k, 0.0);
        ranks.dispatch(choices, x_all, arrived)?;

        let hidden = x_all.len() / rows;
        made.clear();
        made.resize(arrived.rows.len(), 0.0);
        for (own, expert) in self.own.iter().enumerate() {
            let blocks: Vec<_> = (0..ranks.ranks())
                .map(|source| {
                    let count = arrived.counts[source * self.own.len() + own] as usize;
                    let first = (own * ranks.ranks() + source) * rows;
                    first * hidden..(first + count) * hidden
                })
                .collect();
            let rows: Vec<&[f32]> = blocks.iter().map(|at| &arrived.rows[at.clone()]).collect();
            let rows = rows.concat();
            if rows.is_empty() {
                continue;
            }
            let count = rows.len() / hidden;
            let done = expert.forward(&Tensor::from_vec(rows, (count, hidden), &Device::Cpu)?)?;
            let mut done = &done.flatten_all()?.to_vec1::<f32>()?[..];
            for at in blocks {
                let (these, others) = done.split_at(at.len());
                made[at].copy_from_slice(these);
                done = others;
            }
        }
        ranks.combine(made, weights, out)
    }
}

impl Expert {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let inner = (linear(x, &self.gate)?.silu()? * linear(x, &self.up)?)?;
        Ok(linear(&inner, &self.down)?)
    }
}

/// The experts with the highest scores, the best first, of equal ones that with the lower number; and their weights, which
/// are 1 together.
fn choose(scores: &[f32], top_k: usize, choices: &mut Vec<i32>, weights: &mut Vec<f32>) {
    let first = choices.len();
    for _ in 0..top_k {
        let taken = &choices[first..];
        let free = (0..scores.len()).filter(|&expert| !taken.contains(&(expert as i32)));
        // The first of the largest: a later one has to be larger.
        let best = free.reduce(|a, b| if scores[b] > scores[a] { b } else { a });
        choices.push(best.map_or(-1, |expert| expert as i32));
    }
    let chosen = |&choice: &i32| scores[choice as usize];
    let best = chosen(&choices[first]);
    let powers: Vec<f32> = choices[first..]
        .iter()
        .map(|one| (chosen(one) - best).exp())
        .collect();
    let sum: f32 = powers.iter().sum();
    weights.extend(powers.iter().map(|power| power / sum));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_experts_are_chosen_and_of_equal_ones_the_first() {
        let (mut choices, mut weights) = (vec![7], vec![0.5]);
        choose(&[1.0, 3.0, 3.0, 2.0], 2, &mut choices, &mut weights);
        assert_eq!(choices, [7, 1, 2]);
        assert_eq!(weights, [0.5, 0.5, 0.5]);
        choose(&[0.0, 1.0, 0.0, 0.0], 3, &mut choices, &mut weights);
        assert_eq!(choices[3..], [1, 0, 2]);
        let e = std::f32::consts::E;
        assert!((weights[3] - e / (e + 2.0)).abs() < 1e-6);
    }
}
