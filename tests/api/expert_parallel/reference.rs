//! The rows that the experts receive, and the combined results, computed on the host in the plainest way.

use std::fmt;

use half::{bf16, f16};
use nccl::NcclType;
use nccl::cudarc::driver::{DeviceRepr, ValidAsZeroBits};
use nccl::moe::{DispatchWay, ExpertLayout};

/// One arrangement of experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) ranks: usize,
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
    pub(crate) max_tokens: usize,
    pub(crate) capacity: usize,
    pub(crate) layout: ExpertLayout,
    pub(crate) way: DispatchWay,
}

/// The tokens of all ranks in one step.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    /// `[rank][token][choice]`
    pub(crate) topk: Vec<Vec<Vec<i32>>>,
    /// As `topk`.
    pub(crate) weights: Vec<Vec<Vec<f32>>>,
}

/// An element whose bits can be compared.
pub(crate) trait Element: NcclType + DeviceRepr + ValidAsZeroBits + fmt::Debug {
    const ZERO: Self;
    /// Arbitrary bits.
    fn random(random: &mut fastrand::Rng) -> Self;
    fn bits(self) -> u64;
}

/// An element that can be weighted.
pub(crate) trait Weighed: Element {
    fn wide(self) -> f32;
    fn narrow(wide: f32) -> Self;
}

macro_rules! integers {
    ($($type:ty)*) => {
        $(
            impl Element for $type {
                const ZERO: Self = 0;
                fn random(random: &mut fastrand::Rng) -> Self {
                    random.u64(..) as Self
                }
                fn bits(self) -> u64 {
                    self as u64
                }
            }
        )*
    };
}

integers!(u8 i32 u64);

macro_rules! floats {
    ($($type:ty, $zero:expr, $any:ident, $not_a_number:expr, |$value:ident| $wide:expr, |$from:ident| $narrow:expr;)*) => {
        $(
            impl Element for $type {
                const ZERO: Self = $zero;
                fn random(random: &mut fastrand::Rng) -> Self {
                    match random.u8(..) {
                        // Infinities, NaNs, subnormal numbers.
                        0..8 => Self::from_bits(random.$any(..)),
                        _ => Self::narrow((random.f32() - 0.5) * 8.0),
                    }
                }
                fn bits(self) -> u64 {
                    self.to_bits().into()
                }
            }
            impl Weighed for $type {
                fn wide(self) -> f32 {
                    let $value = self;
                    $wide
                }
                fn narrow($from: f32) -> Self {
                    match $from.is_nan() {
                        true => Self::from_bits($not_a_number),
                        false => $narrow,
                    }
                }
            }
        )*
    };
}

floats! {
    f32, 0.0, u32, 0x7fff_ffff, |value| value, |wide| wide;
    f16, f16::ZERO, u16, 0x7fff, |value| value.to_f32(), |wide| f16::from_f32(wide);
    bf16, bf16::ZERO, u16, 0x7fff, |value| value.to_f32(), |wide| bf16::from_f32(wide);
}

/// The output of an expert for an element.
pub(crate) fn expert<T: Weighed>(expert: usize, element: T) -> T {
    T::narrow(element.wide() * (expert as f32 + 0.25) - 1.0)
}

impl Case {
    pub(crate) fn own(&self) -> usize {
        self.experts / self.ranks
    }

    pub(crate) fn rows(&self) -> usize {
        self.experts * self.capacity
    }

    fn exists(&self, choice: i32) -> bool {
        usize::try_from(choice).is_ok_and(|expert| expert < self.experts)
    }

    /// The tokens of one rank that choose one expert, each as often as it chooses it.
    fn wanting(&self, topk: &[Vec<i32>], expert: usize) -> Vec<usize> {
        let mut tokens = Vec::new();
        for (token, choices) in topk.iter().enumerate() {
            for &choice in choices {
                if choice == expert as i32 {
                    tokens.push(token);
                }
            }
        }
        tokens
    }

    /// How many tokens of each rank choose each expert: `[rank][expert]`.
    pub(crate) fn counts(&self, step: &Step) -> Vec<Vec<u32>> {
        let of = |topk: &Vec<Vec<i32>>| {
            let count = |expert| self.wanting(topk, expert).len() as u32;
            (0..self.experts).map(count).collect()
        };
        step.topk.iter().map(of).collect()
    }

    /// For each row that `rank` receives: the expert, the source rank, and its index among the rows of the two.
    pub(crate) fn places(&self, rank: usize) -> Vec<(usize, usize, usize)> {
        let mut places = Vec::new();
        let mut add = |source, own| {
            let expert = rank * self.own() + own;
            places.extend((0..self.capacity).map(|place| (expert, source, place)));
        };
        match self.layout {
            ExpertLayout::RankMajor => {
                for source in 0..self.ranks {
                    (0..self.own()).for_each(|own| add(source, own));
                }
            }
            _ => {
                for own in 0..self.own() {
                    (0..self.ranks).for_each(|source| add(source, own));
                }
            }
        }
        places
    }

    /// The rows that `rank` receives from the rows `x` of all ranks, each `[token][width]`.
    pub(crate) fn received<T: Element>(
        &self,
        step: &Step,
        rank: usize,
        x: &[Vec<T>],
        width: usize,
    ) -> Vec<T> {
        let mut y = Vec::with_capacity(self.rows() * width);
        for (expert, source, place) in self.places(rank) {
            match self.wanting(&step.topk[source], expert).get(place) {
                Some(&token) => y.extend(&x[source][token * width..(token + 1) * width]),
                None => y.extend(vec![T::ZERO; width]),
            }
        }
        y
    }

    /// The result that `rank` gets back for its rows `x`, when each expert computes [`expert`].
    pub(crate) fn combined<T: Weighed>(
        &self,
        step: &Step,
        rank: usize,
        x: &[T],
        width: usize,
    ) -> Vec<T> {
        let topk = &step.topk[rank];
        let mut taken = vec![0; self.experts];
        let mut out = Vec::new();
        for (token, choices) in topk.iter().enumerate() {
            let mut sums = vec![0f32; width];
            for (choice, &wanted) in choices.iter().enumerate() {
                if wanted < 0 {
                    continue;
                }
                let room = self.exists(wanted) && taken[wanted as usize] < self.capacity;
                if self.exists(wanted) {
                    taken[wanted as usize] += 1;
                }
                let weight = step.weights[rank][token][choice];
                for (sum, &element) in sums.iter_mut().zip(&x[token * width..]) {
                    *sum = match room {
                        true => weight.mul_add(expert(wanted as usize, element).wide(), *sum),
                        false => f32::NAN,
                    };
                }
            }
            out.extend(sums.into_iter().map(T::narrow));
        }
        out
    }
}

/// Compares bits, and names the first that differ.
pub(crate) fn assert_same<T: Element>(what: &str, found: &[T], expected: &[T], width: usize) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let pairs = found.iter().zip(expected).enumerate();
    for (at, (found, expected)) in pairs {
        assert!(
            found.bits() == expected.bits(),
            "{what}: row {}, element {}: {found:?} ({:#x}), expected {expected:?} ({:#x})",
            at / width,
            at % width,
            found.bits(),
            expected.bits()
        );
    }
}
