//! The arithmetic of reductions.
//!
//! A block is reduced over all ranks in the order of the ranks, so every rank gets the same bits.
//! NCCL's own order depends on its algorithm: compare with tolerances, or use data whose sums are
//! exact. Rounding and wrapping are NCCL's: integers wrap; 16-bit floats round after every step;
//! `Avg` on floats scales every input by 1/n, rounded to the type, and then adds; on integers it
//! adds and then divides towards zero; `Max` and `Min` ignore NaN.

use half::{bf16, f16};

use super::datatype::{DataType, Operator};

/// Bytes reduced at a time: inputs, accumulator and outputs of a piece stay in the first-level
/// cache.
const PIECE: usize = 4 << 10;

/// Reduces `count` elements: `inputs` and `outputs` are where the block begins for each rank.
///
/// # Safety
/// Every pointer is valid for `count` elements. An input may be the same as its rank's output;
/// other overlaps, and writers in other processes, make the result anybody's guess but do no other
/// harm.
pub(crate) unsafe fn reduce(
    data_type: DataType,
    operator: Operator,
    inputs: &[*const u8],
    outputs: &[*mut u8],
    count: usize,
) {
    macro_rules! dispatch {
        ($($variant:ident => $element:ty),*) => {
            match data_type {
                // SAFETY: the caller's promise.
                $(DataType::$variant => unsafe { typed::<$element>(operator, inputs, outputs, count) },)*
                DataType::F8E4M3 | DataType::F8E5M2 => unreachable!("refused when the call was made"),
            }
        };
    }
    dispatch!(
        I8 => i8, U8 => u8, I32 => i32, U32 => u32, I64 => i64, U64 => u64,
        F16 => f16, F32 => f32, F64 => f64, Bf16 => bf16
    );
}

/// An element type that can be reduced.
trait Element: Copy + Default {
    fn sum(self, other: Self) -> Self;
    fn prod(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    /// What an input is turned into before it is added up for an average over `n` ranks.
    fn before_average(self, n: usize) -> Self;
    /// What the sum is turned into.
    fn after_average(self, n: usize) -> Self;
}

macro_rules! integer {
    ($($element:ty),*) => {$(
        impl Element for $element {
            #[inline] fn sum(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline] fn prod(self, other: Self) -> Self { self.wrapping_mul(other) }
            #[inline] fn max(self, other: Self) -> Self { Ord::max(self, other) }
            #[inline] fn min(self, other: Self) -> Self { Ord::min(self, other) }
            #[inline] fn before_average(self, _: usize) -> Self { self }
            #[inline] fn after_average(self, n: usize) -> Self {
                // More ranks than an 8-bit type can hold: every quotient is 0, but for the bits
                // that are lost anyway.
                <$element>::try_from(n).map_or(0, |n| self.wrapping_div(n))
            }
        }
    )*};
}
integer!(i8, u8, i32, u32, i64, u64);

macro_rules! float {
    ($($element:ty),*) => {$(
        impl Element for $element {
            #[inline] fn sum(self, other: Self) -> Self { self + other }
            #[inline] fn prod(self, other: Self) -> Self { self * other }
            #[inline] fn max(self, other: Self) -> Self { <$element>::max(self, other) }
            #[inline] fn min(self, other: Self) -> Self { <$element>::min(self, other) }
            #[inline] fn before_average(self, n: usize) -> Self { self * (1.0 / n as $element) }
            #[inline] fn after_average(self, _: usize) -> Self { self }
        }
    )*};
}
float!(f32, f64);

macro_rules! half_float {
    ($($element:ty),*) => {$(
        // One operation on two 16-bit values in f32 and one rounding is the correctly rounded
        // result.
        impl Element for $element {
            #[inline] fn sum(self, other: Self) -> Self { Self::from_f32(self.to_f32() + other.to_f32()) }
            #[inline] fn prod(self, other: Self) -> Self { Self::from_f32(self.to_f32() * other.to_f32()) }
            #[inline] fn max(self, other: Self) -> Self { Self::from_f32(self.to_f32().max(other.to_f32())) }
            #[inline] fn min(self, other: Self) -> Self { Self::from_f32(self.to_f32().min(other.to_f32())) }
            #[inline] fn before_average(self, n: usize) -> Self {
                Self::from_f32(self.to_f32() * Self::from_f32(1.0 / n as f32).to_f32())
            }
            #[inline] fn after_average(self, _: usize) -> Self { self }
        }
    )*};
}
half_float!(f16, bf16);

/// # Safety
/// As [`reduce`].
unsafe fn typed<T: Element>(
    operator: Operator,
    inputs: &[*const u8],
    outputs: &[*mut u8],
    count: usize,
) {
    // SAFETY: the caller's promise, for each of them.
    unsafe {
        match operator {
            Operator::Sum => pieces::<T>(inputs, outputs, count, T::sum, |x| x, |x| x),
            Operator::Prod => pieces::<T>(inputs, outputs, count, T::prod, |x| x, |x| x),
            Operator::Max => pieces::<T>(inputs, outputs, count, T::max, |x| x, |x| x),
            Operator::Min => pieces::<T>(inputs, outputs, count, T::min, |x| x, |x| x),
            Operator::Avg => {
                let n = inputs.len();
                pieces::<T>(
                    inputs,
                    outputs,
                    count,
                    T::sum,
                    |x| x.before_average(n),
                    |x| x.after_average(n),
                );
            }
        }
    }
}

/// # Safety
/// As [`reduce`].
#[inline]
unsafe fn pieces<T: Element>(
    inputs: &[*const u8],
    outputs: &[*mut u8],
    count: usize,
    combine: impl Fn(T, T) -> T,
    before: impl Fn(T) -> T,
    after: impl Fn(T) -> T,
) {
    // `PIECE` elements of one byte; a larger type uses a part of it.
    let mut buffer = [T::default(); PIECE];
    let per_piece = PIECE / size_of::<T>();
    let mut at = 0;
    while at < count {
        let n = per_piece.min(count - at);
        let sums = &mut buffer[..n];
        let (first, others) = inputs
            .split_first()
            .expect("a communicator has at least one rank");
        // SAFETY: `at + n <= count`, for which the pointers are valid; unaligned, as the buffers of
        // a caller may be.
        unsafe {
            let from = first.cast::<T>().add(at);
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = before(from.add(i).read_unaligned());
            }
            for input in others {
                let from = input.cast::<T>().add(at);
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = combine(*sum, before(from.add(i).read_unaligned()));
                }
            }
        }
        for sum in sums.iter_mut() {
            *sum = after(*sum);
        }
        for output in outputs {
            // SAFETY: as above; the sums are ours.
            unsafe {
                let to = output.cast::<T>().add(at);
                std::ptr::copy_nonoverlapping(
                    sums.as_ptr().cast::<u8>(),
                    to.cast(),
                    n * size_of::<T>(),
                );
            }
        }
        at += n;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<T: Copy + Default>(
        data_type: DataType,
        operator: Operator,
        inputs: &[Vec<T>],
    ) -> Vec<Vec<T>> {
        let mut outputs: Vec<Vec<T>> = inputs
            .iter()
            .map(|input| vec![T::default(); input.len()])
            .collect();
        let from: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr().cast()).collect();
        let to: Vec<*mut u8> = outputs
            .iter_mut()
            .map(|output| output.as_mut_ptr().cast())
            .collect();
        // SAFETY: all vectors have the same length.
        unsafe { reduce(data_type, operator, &from, &to, inputs[0].len()) };
        outputs
    }

    #[test]
    fn every_operator_on_every_type_over_an_odd_count() {
        macro_rules! check {
            ($($variant:ident $element:ty),*) => {$({
                // Longer than a piece, and no multiple of anything.
                let value = |rank: usize, i: usize| ((i * 7 + rank * 3) % 5 + 1) as f64;
                let inputs: Vec<Vec<$element>> = (0..3)
                    .map(|rank| (0..5003).map(|i| make::<$element>(value(rank, i))).collect())
                    .collect();
                for operator in [Operator::Sum, Operator::Prod, Operator::Max, Operator::Min] {
                    let outputs = run(DataType::$variant, operator, &inputs);
                    for output in &outputs {
                        for (i, got) in output.iter().enumerate() {
                            let values = (0..3).map(|rank| value(rank, i));
                            let want = match operator {
                                Operator::Sum => values.sum::<f64>(),
                                Operator::Prod => values.product::<f64>(),
                                Operator::Max => values.fold(f64::MIN, f64::max),
                                _ => values.fold(f64::MAX, f64::min),
                            };
                            assert_eq!(*got, make::<$element>(want), "{operator:?} at {i}");
                        }
                    }
                }
            })*};
        }
        trait Make {
            fn make(value: f64) -> Self;
        }
        macro_rules! makes { ($($t:ty),*) => {$(impl Make for $t { fn make(v: f64) -> Self { v as $t } })*} }
        makes!(i8, u8, i32, u32, i64, u64, f32, f64);
        impl Make for f16 {
            fn make(v: f64) -> Self {
                Self::from_f64(v)
            }
        }
        impl Make for bf16 {
            fn make(v: f64) -> Self {
                Self::from_f64(v)
            }
        }
        fn make<T: Make>(value: f64) -> T {
            T::make(value)
        }
        check!(I8 i8, U8 u8, I32 i32, U32 u32, I64 i64, U64 u64, F16 f16, F32 f32, F64 f64, Bf16 bf16);
    }

    #[test]
    fn averages_wrap_divide_and_round_as_on_a_gpu() {
        assert_eq!(
            run(
                DataType::I8,
                Operator::Avg,
                &[vec![100i8, -5], vec![100, -2]]
            )[0],
            [-28, -3]
        );
        assert_eq!(
            run(DataType::U8, Operator::Avg, &[vec![200u8], vec![100]])[0],
            [22]
        );
        let third = bf16::from_f32(1.0 / 3.0);
        let one = vec![bf16::ONE];
        let got = run(
            DataType::Bf16,
            Operator::Avg,
            &[one.clone(), one.clone(), one],
        )[0][0];
        let two = bf16::from_f32(third.to_f32() + third.to_f32());
        assert_eq!(got, bf16::from_f32(two.to_f32() + third.to_f32()));
    }

    #[test]
    fn extremes_ignore_nan() {
        assert_eq!(
            run(DataType::F32, Operator::Max, &[vec![f32::NAN], vec![1.0]])[0],
            [1.0]
        );
        assert_eq!(
            run(
                DataType::F16,
                Operator::Min,
                &[vec![f16::ONE], vec![f16::NAN]]
            )[0],
            [f16::ONE]
        );
    }

    #[test]
    fn an_input_may_be_its_own_output() {
        let mut a = vec![1u32; 3000];
        let mut b = vec![2u32; 3000];
        let to = [a.as_mut_ptr().cast::<u8>(), b.as_mut_ptr().cast()];
        let from = [to[0].cast_const(), to[1].cast_const()];
        // SAFETY: both have 3000 elements.
        unsafe { reduce(DataType::U32, Operator::Sum, &from, &to, 3000) };
        assert!(a.iter().chain(&b).all(|&x| x == 3));
    }
}
