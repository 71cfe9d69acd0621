//! The mixture of experts of one layer: the router's choices, and the work of this rank's experts.

use candle_core::{Device, Tensor};
use candle_nn::ops::softmax;

use super::batch_invariant::linear;
use super::collectives::{Arrived, Collectives};
use super::config::Config;
use super::error::Result;
use super::weights::{Tensors, WeightsFile};

/// The experts of one layer: the router, which every rank has, and the rank's own experts.
pub(super) struct Experts {
    router: Tensor,
    /// The expert at each place.
    own: Vec<Option<Expert>>,
    top_k: usize,
}

#[derive(Clone, Debug)]
pub(super) struct Expert {
    gate: Tensor,
    up: Tensor,
    down: Tensor,
}

/// The buffers of a step, reused in each layer and step.
#[derive(Default)]
pub(super) struct Scratch {
    /// `top_k` experts for each row; −1 for a missing row.
    pub(super) choices: Vec<i32>,
    weights: Vec<f32>,
    arrived: Arrived,
    made: Vec<f32>,
}

impl Experts {
    /// Reads the experts of a rank's places.
    pub(super) fn load(
        file: &WeightsFile,
        layer: usize,
        config: &Config,
        places: impl Iterator<Item = Option<usize>>,
    ) -> Result<Self> {
        let load = |expert: Option<usize>| -> Result<Option<Expert>> {
            expert
                .map(|expert| Self::read(file, layer, expert))
                .transpose()
        };
        Ok(Self {
            router: file.whole(&Tensors::router(layer))?,
            own: places.map(load).collect::<Result<_>>()?,
            top_k: config.num_experts_per_tok,
        })
    }

    pub(super) fn read(file: &WeightsFile, layer: usize, expert: usize) -> Result<Expert> {
        let matrix = |which| file.whole(&Tensors::expert(layer, expert, which));
        Ok(Expert {
            gate: matrix("w1")?,
            up: matrix("w3")?,
            down: matrix("w2")?,
        })
    }

    /// Returns the experts for the places `now`. Experts in `before` are kept; `find` supplies the others.
    pub(super) fn at(
        &self,
        before: &[Option<usize>],
        now: &[Option<usize>],
        mut find: impl FnMut(usize) -> Result<Expert>,
    ) -> Result<Vec<Option<Expert>>> {
        let mut own = Vec::with_capacity(now.len());
        for expert in now {
            own.push(match expert {
                None => None,
                Some(number) => match before.iter().position(|other| other == expert) {
                    Some(at) => self.own[at].clone(),
                    None => Some(find(*number)?),
                },
            });
        }
        Ok(own)
    }

    /// Appends the numbers of the expert at a place, if there is one.
    pub(super) fn flatten(&self, place: usize, numbers: &mut Vec<f32>) -> Result<()> {
        match &self.own[place] {
            Some(expert) => expert.flatten(numbers),
            None => Ok(()),
        }
    }

    /// Puts these experts at the places.
    pub(super) fn put(&mut self, own: Vec<Option<Expert>>) {
        self.own = own;
    }

    /// Computes the experts' results for this rank's rows. `x` has the rows of this step; `x_all` has them in a buffer for the
    /// most rows of a step, as does `out`.
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
            let (chosen, shares) = choose(&linear(x, &self.router)?, self.top_k)?;
            let chosen = chosen.flatten_all()?.to_vec1::<u32>()?;
            choices.extend(chosen.into_iter().map(|expert| expert as i32));
            weights.extend(shares.flatten_all()?.to_vec1::<f32>()?);
        }
        // Missing rows choose no expert.
        choices.resize(rows * self.top_k, -1);
        weights.resize(rows * self.top_k, 0.0);
        ranks.dispatch(choices, x_all, arrived)?;

        let hidden = x_all.len() / rows;
        made.clear();
        made.resize(arrived.rows.len(), 0.0);
        for (own, expert) in self.own.iter().enumerate() {
            let Some(expert) = expert else { continue };
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
    /// Appends the numbers of the expert.
    fn flatten(&self, numbers: &mut Vec<f32>) -> Result<()> {
        for matrix in [&self.gate, &self.up, &self.down] {
            numbers.extend(matrix.flatten_all()?.to_vec1::<f32>()?);
        }
        Ok(())
    }

    /// Returns the expert with these numbers, in the order of [`flatten`](Self::flatten).
    pub(super) fn of_numbers(config: &Config, numbers: &[f32]) -> Result<Self> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let matrix = |number: usize, shape: (usize, usize)| {
            let length = hidden * inner;
            let numbers = &numbers[number * length..(number + 1) * length];
            Tensor::from_slice(numbers, shape, &Device::Cpu)
        };
        Ok(Self {
            gate: matrix(0, (inner, hidden))?,
            up: matrix(1, (inner, hidden))?,
            down: matrix(2, (hidden, inner))?,
        })
    }

    /// Returns how many numbers an expert has.
    pub(super) fn length(config: &Config) -> usize {
        3 * config.hidden_size * config.intermediate_size
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let inner = (linear(x, &self.gate)?.silu()? * linear(x, &self.up)?)?;
        Ok(linear(&inner, &self.down)?)
    }
}

/// Returns the `top_k` experts with the highest scores for each row of `scores` (`[rows, experts]`), the best first; of equal
/// scores the lower expert is first. Also returns their weights, whose sum is 1.
pub(crate) fn choose(scores: &Tensor, top_k: usize) -> candle_core::Result<(Tensor, Tensor)> {
    let order = scores.arg_sort_last_dim(false)?;
    let choices = order.narrow(1, 0, top_k)?.contiguous()?;
    let weights = softmax(&scores.gather(&choices, 1)?, 1)?;
    Ok((choices, weights))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_experts_are_chosen_and_of_equal_ones_the_first() {
        let scores = [[1.0f32, 3.0, 3.0, 2.0], [0.0, 1.0, 0.0, 0.0]];
        let scores = Tensor::new(&scores, &Device::Cpu).unwrap();
        let (choices, weights) = choose(&scores, 3).unwrap();
        let choices: Vec<Vec<u32>> = choices.to_vec2().unwrap();
        assert_eq!(choices, [[1, 2, 3], [1, 0, 2]]);
        let weights: Vec<Vec<f32>> = weights.to_vec2().unwrap();
        assert_eq!(weights[0][0], weights[0][1]);
        let e = std::f32::consts::E;
        assert!((weights[1][0] - e / (e + 2.0)).abs() < 1e-6);
        assert!((weights[0].iter().sum::<f32>() - 1.0).abs() < 1e-6);
    }
}
