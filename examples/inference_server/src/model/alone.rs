//! A single rank without NCCL: the reference for tests of other implementations.

use super::collectives::{Arrived, Collectives, Shape};
use super::error::Result;

/// A single rank; nothing is exchanged.
///
/// ```
/// use inference_server::model::{Alone, Collectives, Config, Shape};
/// let alone = Alone::new(Shape::new(&Config::tiny(), 40));
/// assert_eq!(alone.ranks(), 1);
/// ```
#[derive(Clone, Debug)]
pub struct Alone {
    shape: Shape,
    /// The row of `Arrived::rows` of each choice.
    places: Vec<Option<usize>>,
}

impl Alone {
    /// Creates the rank for steps of this shape.
    #[must_use]
    pub fn new(shape: Shape) -> Self {
        Self {
            shape,
            places: Vec::new(),
        }
    }
}

impl Collectives for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn ranks(&self) -> usize {
        1
    }

    fn all_to_all(&mut self, x: &[f32], y: &mut [f32]) -> Result<()> {
        y.copy_from_slice(x);
        Ok(())
    }

    fn all_gather(&mut self, x: &[f32], y: &mut [f32]) -> Result<()> {
        y.copy_from_slice(x);
        Ok(())
    }

    fn dispatch(&mut self, choices: &[i32], x: &[f32], arrived: &mut Arrived) -> Result<()> {
        let Shape {
            rows,
            hidden,
            experts,
            top_k,
            ..
        } = self.shape;
        arrived.counts.clear();
        arrived.counts.resize(experts, 0);
        arrived.rows.clear();
        arrived.rows.resize(experts * rows * hidden, 0.0);
        self.places.clear();
        for (&expert, i) in choices.iter().zip(0..) {
            let Ok(expert) = usize::try_from(expert) else {
                self.places.push(None);
                continue;
            };
            let (row, place) = (i / top_k, expert * rows + arrived.counts[expert] as usize);
            arrived.counts[expert] += 1;
            self.places.push(Some(place));
            let row = &x[row * hidden..(row + 1) * hidden];
            arrived.rows[place * hidden..(place + 1) * hidden].copy_from_slice(row);
        }
        Ok(())
    }

    fn combine(&mut self, made: &[f32], weights: &[f32], out: &mut [f32]) -> Result<()> {
        let Shape { hidden, top_k, .. } = self.shape;
        out.fill(0.0);
        for (choice, (place, weight)) in self.places.iter().zip(weights).enumerate() {
            let Some(place) = place else { continue };
            let made = &made[place * hidden..(place + 1) * hidden];
            let out = &mut out[choice / top_k * hidden..][..hidden];
            for (out, made) in out.iter_mut().zip(made) {
                // As in `nccl::moe::ExpertParallel`: product and sum are rounded together.
                *out = weight.mul_add(*made, *out);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_rows_may_choose_one_expert_and_rows_without_a_choice_become_zero() {
        let shape = Shape {
            rows: 3,
            hidden: 2,
            experts: 2,
            top_k: 1,
            gathers: 0,
        };
        let mut alone = Alone::new(shape);
        let mut arrived = Arrived::default();
        let x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        alone.dispatch(&[1, 1, 1], &x, &mut arrived).unwrap();
        assert_eq!(arrived.counts, [0, 3]);
        assert_eq!(arrived.rows, [&[0.0; 6][..], &x].concat());

        alone.dispatch(&[1, -1, 0], &x, &mut arrived).unwrap();
        let mut out = [9.0; 6];
        let made = arrived.rows.clone();
        alone.combine(&made, &[0.5, 7.0, 2.0], &mut out).unwrap();
        assert_eq!(out, [0.5, 1.0, 0.0, 0.0, 10.0, 12.0]);
    }
}
