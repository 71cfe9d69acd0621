//! From logits to a token.

use super::random::uniform;

/// How a request's tokens are drawn.
///
/// A drawn token is a function of the logits, the seed and the position of the token alone: a request that is restarted from
/// its tokens so far continues in the same way.
///
/// ```
/// use inference_server::model::Sampling;
/// let logits = [0.0, 3.0, 1.0];
/// assert_eq!(Sampling::greedy().pick(&logits, 17), 1);
/// let drawn = Sampling { temperature: 0.8, seed: 5, ..Sampling::default() };
/// assert_eq!(drawn.pick(&logits, 17), drawn.pick(&logits, 17));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0, a negative value or NaN always takes the likeliest token.
    pub temperature: f32,
    /// Draws only from this many of the likeliest tokens; 0 draws from all.
    pub top_k: usize,
    /// Draws only from the likeliest tokens that together have this probability; 1 draws from all.
    pub top_p: f32,
    /// The seed of the random numbers.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            seed: 0,
        }
    }
}

impl Sampling {
    /// Always takes the likeliest token.
    #[must_use]
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            ..Self::default()
        }
    }

    /// Returns the token for `position`, given its logits.
    ///
    /// Of equal logits the first is the likeliest.
    ///
    /// # Panics
    /// If there are no logits.
    #[must_use]
    pub fn pick(&self, logits: &[f32], position: usize) -> u32 {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        // The sort is stable: equal logits stay in the order of their tokens.
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        let likeliest = order[0];
        // NaN counts as 0.
        if self.temperature.is_nan() || self.temperature <= 0.0 {
            return likeliest as u32;
        }
        if self.top_k > 0 {
            order.truncate(self.top_k);
        }
        let temperature = f64::from(self.temperature);
        let power =
            |&token: &usize| (f64::from(logits[token] - logits[likeliest]) / temperature).exp();
        let mut powers: Vec<f64> = order.iter().map(power).collect();
        let whole: f64 = powers.iter().sum();
        let mut sum = 0.0;
        let enough = powers.iter().position(|power| {
            sum += power;
            sum >= whole * f64::from(self.top_p)
        });
        powers.truncate(enough.map_or(powers.len(), |last| last + 1));
        let mut left = uniform(self.seed, position as u64) * powers.iter().sum::<f64>();
        for (power, &token) in powers.iter().zip(&order) {
            left -= power;
            if left < 0.0 {
                return token as u32;
            }
        }
        // Only rounding leads here: the last token takes the remainder.
        order[powers.len() - 1] as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [0.0, 1.0, -1.0, 2.0, 1.0];

    /// Counts how often each token is drawn, in `draws` draws.
    fn histogram(sampling: &Sampling, draws: usize) -> [usize; 5] {
        let mut counts = [0; 5];
        for position in 0..draws {
            counts[sampling.pick(&LOGITS, position) as usize] += 1;
        }
        counts
    }

    /// Checks that tokens are drawn with these probabilities: chi squared with at most 4 degrees of freedom, exceeded by chance
    /// once in 10⁶. The seed is fixed.
    fn fits(sampling: &Sampling, probabilities: [f64; 5]) {
        let draws = 50_000;
        let counts = histogram(sampling, draws);
        let mut square = 0.0;
        for (count, probability) in counts.iter().zip(probabilities) {
            let expected = probability * draws as f64;
            if probability == 0.0 {
                assert_eq!(*count, 0, "{sampling:?}: {counts:?}");
            } else {
                square += (*count as f64 - expected).powi(2) / expected;
            }
        }
        assert!(square < 33.4, "{sampling:?}: {counts:?}, {probabilities:?}");
    }

    fn softmax(temperature: f64, kept: &[usize]) -> [f64; 5] {
        let mut powers = [0.0; 5];
        for &token in kept {
            powers[token] = (f64::from(LOGITS[token]) / temperature).exp();
        }
        let sum: f64 = powers.iter().sum();
        powers.map(|power| power / sum)
    }

    #[test]
    fn tokens_are_drawn_as_often_as_the_softmax_of_their_logits_says() {
        let all = [0, 1, 2, 3, 4];
        for seed in 0..4 {
            for temperature in [0.5f32, 1.0, 3.0] {
                let sampling = Sampling {
                    temperature,
                    seed,
                    ..Sampling::default()
                };
                fits(&sampling, softmax(f64::from(temperature), &all));
            }
        }
    }

    #[test]
    fn only_the_likeliest_tokens_are_drawn_where_that_is_wished() {
        let three = Sampling {
            top_k: 3,
            ..Sampling::default()
        };
        fits(&three, softmax(1.0, &[1, 3, 4]));
        // 3 has 0.52 of all, 1 and 4 have 0.19 each: 0.6 takes 3 and the first of the two.
        let nucleus = Sampling {
            top_p: 0.6,
            ..Sampling::default()
        };
        fits(&nucleus, softmax(1.0, &[1, 3]));
        let none = Sampling {
            top_p: 0.0,
            ..Sampling::default()
        };
        fits(&none, softmax(1.0, &[3]));
    }

    #[test]
    fn without_temperature_the_likeliest_token_is_taken_and_of_equal_ones_the_first() {
        assert_eq!(histogram(&Sampling::greedy(), 100), [0, 0, 0, 100, 0]);
        assert_eq!(Sampling::greedy().pick(&[1.0, 4.0, 4.0], 3), 1);
        let nonsense = Sampling {
            temperature: f32::NAN,
            ..Sampling::default()
        };
        assert_eq!(nonsense.pick(&LOGITS, 3), 3);
    }

    #[test]
    fn what_is_drawn_depends_on_the_seed_and_the_position() {
        let draw = |seed| {
            let sampling = Sampling {
                seed,
                ..Sampling::default()
            };
            (0..64)
                .map(|position| sampling.pick(&LOGITS, position))
                .collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        assert!(draw(1).iter().any(|&token| token != draw(1)[0]));
    }
}
