//! The arithmetic of reductions.
//!
//! A block is reduced over all ranks in the order of the ranks, so every rank gets the same bits. NCCL's own order depends on
//! its algorithm: compare with tolerances, or use data whose sums are exact. Rounding and wrapping are NCCL's: integers wrap;
//! 16-bit and 8-bit floats round after every step, and 8-bit floats saturate; `PreMulSum` scales every input and then adds;
//! `SumPostDiv` adds and then divides towards zero; `Max` and `Min` ignore NaN and treat +0 as greater than -0.

use half::{bf16, f16};

use super::datatype::{DataType, Operator};
use super::float8::Float8;

/// The bytes reduced at a time: inputs, accumulator and outputs of a piece stay in the first-level cache.
const PIECE: usize = 4 << 10;

/// Reduces `count` elements. `inputs` and `outputs` point to the beginning of the block for each rank that has one; `scalars`
/// has the bits of each input's factor.
///
/// # Safety
/// Every pointer is valid for `count` elements. An input may be the same as its rank's output;
/// other overlaps, and writers in other processes, make the result undefined but do no other harm.
pub(crate) unsafe fn reduce(
    data_type: DataType,
    operator: Operator,
    inputs: &[*const u8],
    scalars: &[u64],
    outputs: &[*mut u8],
    count: usize,
) {
    macro_rules! dispatch {
        ($($variant:ident => $element:ty),*) => {
            match data_type {
                // SAFETY: the caller's promise.
                $(DataType::$variant => unsafe {
                    typed::<$element>(operator, inputs, scalars, outputs, count);
                },)*
            }
        };
    }
    dispatch!(
        I8 => i8, U8 => u8, I32 => i32, U32 => u32, I64 => i64, U64 => u64,
        F16 => f16, F32 => f32, F64 => f64, Bf16 => bf16, F8E4M3 => Float8<3>, F8E5M2 => Float8<2>
    );
}

/// One step of a reduction, as in a kernel of NCCL: multiplies the first input by `scale`, then combines all inputs, then
/// divides the result by `divisor` (integers only).
///
/// # Safety
/// As [`reduce`]; an output may be the same as any input.
#[cfg(feature = "real-nccl")]
pub(crate) unsafe fn reduce_step(
    data_type: DataType,
    operator: Operator,
    scale: Option<u64>,
    divisor: Option<u64>,
    inputs: &[*const u8],
    outputs: &[*mut u8],
    count: usize,
) {
    macro_rules! dispatch {
        ($($variant:ident => $element:ty),*) => {
            match data_type {
                // SAFETY: the caller's promise.
                $(DataType::$variant => unsafe {
                    typed_step::<$element>(operator, scale, divisor, inputs, outputs, count);
                },)*
            }
        };
    }
    dispatch!(
        I8 => i8, U8 => u8, I32 => i32, U32 => u32, I64 => i64, U64 => u64,
        F16 => f16, F32 => f32, F64 => f64, Bf16 => bf16, F8E4M3 => Float8<3>, F8E5M2 => Float8<2>
    );
}

/// # Safety
/// As [`reduce_step`].
#[cfg(feature = "real-nccl")]
unsafe fn typed_step<T: Element>(
    operator: Operator,
    scale: Option<u64>,
    divisor: Option<u64>,
    inputs: &[*const u8],
    outputs: &[*mut u8],
    count: usize,
) {
    macro_rules! with {
        ($combine:expr) => {{
            let factor = T::from_low_bits(scale.unwrap_or(0));
            let scaled = |index: usize, x: T| if index == 0 { x.prod(factor) } else { x };
            let same = |_: usize, x: T| x;
            // SAFETY: the caller's promise.
            unsafe {
                match (scale, divisor) {
                    (Some(_), _) => pieces(inputs, outputs, count, $combine, scaled, |x| x),
                    (None, Some(n)) => {
                        pieces(inputs, outputs, count, $combine, same, |x| {
                            x.divided(n as usize)
                        });
                    }
                    (None, None) => pieces(inputs, outputs, count, $combine, same, |x| x),
                }
            }
        }};
    }
    match operator {
        Operator::Sum | Operator::PreMulSum | Operator::SumPostDiv => with!(T::sum),
        Operator::Prod => with!(T::prod),
        Operator::Max => with!(T::max),
        Operator::Min => with!(T::min),
    }
}

/// An element type that can be reduced.
trait Element: Copy + Default {
    /// Returns the value with these bits.
    fn from_low_bits(bits: u64) -> Self;
    fn sum(self, other: Self) -> Self;
    fn prod(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    /// Returns the result of `SumPostDiv` for this sum over `n` ranks.
    fn divided(self, n: usize) -> Self;
}

macro_rules! integer {
    ($($element:ty as $wide:ty),*) => {$(
        impl Element for $element {
            #[inline] fn from_low_bits(bits: u64) -> Self { bits as $element }
            #[inline] fn sum(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline] fn prod(self, other: Self) -> Self { self.wrapping_mul(other) }
            #[inline] fn max(self, other: Self) -> Self { Ord::max(self, other) }
            #[inline] fn min(self, other: Self) -> Self { Ord::min(self, other) }
            #[inline] fn divided(self, n: usize) -> Self { (self as $wide / n as $wide) as $element }
        }
    )*};
}
integer!(
    i8 as i32, u8 as u32, i32 as i64, u32 as u64, i64 as i64, u64 as u64
);

/// The larger of two floats of which none, one or both may be NaN.
macro_rules! larger {
    ($a:expr, $b:expr, $type:ty) => {{
        let (a, b): ($type, $type) = ($a, $b);
        // Zeros are equal, and the positive one is the larger.
        if a == b {
            <$type>::from_bits(a.to_bits() & b.to_bits())
        } else {
            a.max(b)
        }
    }};
}

macro_rules! smaller {
    ($a:expr, $b:expr, $type:ty) => {{
        let (a, b): ($type, $type) = ($a, $b);
        if a == b {
            <$type>::from_bits(a.to_bits() | b.to_bits())
        } else {
            a.min(b)
        }
    }};
}

macro_rules! float {
    ($($element:ty as $bits:ty),*) => {$(
        impl Element for $element {
            #[inline] fn from_low_bits(bits: u64) -> Self { Self::from_bits(bits as $bits) }
            #[inline] fn sum(self, other: Self) -> Self { self + other }
            #[inline] fn prod(self, other: Self) -> Self { self * other }
            #[inline] fn max(self, other: Self) -> Self { larger!(self, other, $element) }
            #[inline] fn min(self, other: Self) -> Self { smaller!(self, other, $element) }
            #[inline] fn divided(self, _: usize) -> Self { unreachable!("only integers are divided") }
        }
    )*};
}
float!(f32 as u32, f64 as u64);

macro_rules! half_float {
    ($($element:ty),*) => {$(
        // One operation on two 16-bit values in f32 and one rounding is the correctly rounded
        // result.
        impl Element for $element {
            #[inline] fn from_low_bits(bits: u64) -> Self { Self::from_bits(bits as u16) }
            #[inline] fn sum(self, other: Self) -> Self { Self::from_f32(self.to_f32() + other.to_f32()) }
            #[inline] fn prod(self, other: Self) -> Self { Self::from_f32(self.to_f32() * other.to_f32()) }
            #[inline] fn max(self, other: Self) -> Self {
                Self::from_f32(larger!(self.to_f32(), other.to_f32(), f32))
            }
            #[inline] fn min(self, other: Self) -> Self {
                Self::from_f32(smaller!(self.to_f32(), other.to_f32(), f32))
            }
            #[inline] fn divided(self, _: usize) -> Self { unreachable!("only integers are divided") }
        }
    )*};
}
half_float!(f16, bf16);

impl<const M: u32> Element for Float8<M> {
    #[inline]
    fn from_low_bits(bits: u64) -> Self {
        Self(bits as u8)
    }
    #[inline]
    fn sum(self, other: Self) -> Self {
        self.add(other)
    }
    #[inline]
    fn prod(self, other: Self) -> Self {
        self.multiply(other)
    }
    // Narrowed like every result: the larger of an infinity and something else is finite.
    #[inline]
    fn max(self, other: Self) -> Self {
        Self::from_f32(larger!(self.to_f32(), other.to_f32(), f32))
    }
    #[inline]
    fn min(self, other: Self) -> Self {
        Self::from_f32(smaller!(self.to_f32(), other.to_f32(), f32))
    }
    #[inline]
    fn divided(self, _: usize) -> Self {
        unreachable!("only integers are divided")
    }
}

/// # Safety
/// As [`reduce`].
unsafe fn typed<T: Element>(
    operator: Operator,
    inputs: &[*const u8],
    scalars: &[u64],
    outputs: &[*mut u8],
    count: usize,
) {
    let same = |_: usize, x: T| x;
    // SAFETY: the caller's promise, for each of them.
    unsafe {
        match operator {
            Operator::Sum => pieces(inputs, outputs, count, T::sum, same, |x| x),
            Operator::Prod => pieces(inputs, outputs, count, T::prod, same, |x| x),
            Operator::Max => pieces(inputs, outputs, count, T::max, same, |x| x),
            Operator::Min => pieces(inputs, outputs, count, T::min, same, |x| x),
            Operator::PreMulSum => {
                let scale = |rank: usize, x: T| x.prod(T::from_low_bits(scalars[rank]));
                pieces(inputs, outputs, count, T::sum, scale, |x| x);
            }
            Operator::SumPostDiv => {
                let n = inputs.len();
                pieces(inputs, outputs, count, T::sum, same, |x| x.divided(n));
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
    before: impl Fn(usize, T) -> T,
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
                *sum = before(0, from.add(i).read_unaligned());
            }
            for (rank, input) in others.iter().enumerate() {
                let from = input.cast::<T>().add(at);
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = combine(*sum, before(rank + 1, from.add(i).read_unaligned()));
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
mod tests;
