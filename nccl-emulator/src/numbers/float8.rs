//! The two 8-bit float formats, with the arithmetic of NCCL's kernels.
//!
//! A kernel widens both operands to 16-bit floats, computes there, and narrows the result, rounding to nearest, ties to even.
//! Narrowing saturates: a value that is too large, or infinite, becomes the largest finite value of its sign. A NaN stays a NaN
//! and loses its sign. The intermediate rounding to 16 bits never changes the result (a test tries all pairs), so it is omitted
//! here.

/// Sign, exponent, `M` bits of mantissa.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Float8<const M: u32>(pub(crate) u8);

/// Up to 448, no infinity.
pub(crate) type E4M3 = Float8<3>;
/// Up to 57344, with infinities.
pub(crate) type E5M2 = Float8<2>;

impl<const M: u32> Float8<M> {
    const BIAS: i32 = (1 << (6 - M)) - 1;
    /// The largest finite value. E4M3 has no infinity and only one NaN in the exponent of ones.
    const LARGEST: u8 = if M == 3 { 0x7e } else { 0x7b };
    const NAN: u8 = 0x7f;
    const VALUES: [f32; 256] = {
        let mut values = [0.0; 256];
        let mut code = 0;
        while code < 256 {
            values[code] = Self::decode(code as u8);
            code += 1;
        }
        values
    };

    /// Two to the power of `exponent`, which is that of a normal `f32`.
    const fn power(exponent: i32) -> f32 {
        f32::from_bits(((exponent + 127) as u32) << 23)
    }

    const fn decode(code: u8) -> f32 {
        let (magnitude, exponent) = (code & 0x7f, (code & 0x7f) >> M);
        let mantissa = (magnitude & ((1 << M) - 1)) as f32;
        let one = Self::power(M as i32);
        let value = if exponent == 0 {
            mantissa * Self::power(1 - Self::BIAS - M as i32)
        } else if magnitude <= Self::LARGEST {
            (one + mantissa) * Self::power(exponent as i32 - Self::BIAS - M as i32)
        } else if M == 2 && mantissa == 0.0 {
            f32::INFINITY
        } else {
            f32::NAN
        };
        if code & 0x80 == 0 { value } else { -value }
    }

    /// Returns the exact value.
    pub(crate) fn to_f32(self) -> f32 {
        Self::VALUES[usize::from(self.0)]
    }

    /// Returns the nearest value, saturated.
    pub(crate) fn from_f32(value: f32) -> Self {
        if value.is_nan() {
            return Self(Self::NAN);
        }
        let sign = (value.to_bits() >> 24) as u8 & 0x80;
        let magnitude = value.abs().min(Self::VALUES[usize::from(Self::LARGEST)]);
        // The exponent of the smallest normal value is also that of the steps below it.
        let lowest = 1 - Self::BIAS;
        let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(lowest);
        // Exact: a power of two.
        let steps = (magnitude * Self::power(M as i32 - exponent)).round_ties_even() as u32;
        // A mantissa that was rounded up to two carries into the exponent.
        let code = ((exponent - lowest) as u32) << M;
        Self((code + steps) as u8 | sign)
    }

    pub(crate) fn add(self, other: Self) -> Self {
        Self::from_f32(self.to_f32() + other.to_f32())
    }

    pub(crate) fn multiply(self, other: Self) -> Self {
        Self::from_f32(self.to_f32() * other.to_f32())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    /// All values of a format, by its definition.
    fn reference<const M: u32>(code: u8) -> f64 {
        let exponent = i32::from((code & 0x7f) >> M);
        let fraction = f64::from(code & ((1 << M) - 1)) / f64::from(1 << M);
        let bias = if M == 3 { 7 } else { 15 };
        let value = match exponent {
            0 => fraction * 2f64.powi(1 - bias),
            _ => (1.0 + fraction) * 2f64.powi(exponent - bias),
        };
        let value = match (M, code & 0x7f) {
            (3, 0x7f) | (2, 0x7d..) => f64::NAN,
            (2, 0x7c) => f64::INFINITY,
            _ => value,
        };
        if code & 0x80 == 0 { value } else { -value }
    }

    fn every_code_means_what_the_format_says<const M: u32>() {
        for code in 0..=255 {
            let (got, want) = (f64::from(Float8::<M>(code).to_f32()), reference::<M>(code));
            assert!(got == want || got.is_nan() && want.is_nan(), "{code:#x}");
            assert_eq!(got.is_sign_negative(), want.is_sign_negative(), "{code:#x}");
            if got.is_finite() {
                assert_eq!(Float8::<M>::from_f32(got as f32).0, code);
            }
        }
    }

    #[test]
    fn every_code_of_both_formats_means_what_its_format_says() {
        every_code_means_what_the_format_says::<3>();
        every_code_means_what_the_format_says::<2>();
        assert_eq!(
            (Float8::<3>(0x7e).to_f32(), Float8::<3>(0x01).to_f32()),
            (448.0, 0.001953125)
        );
        assert_eq!(
            (Float8::<2>(0x7b).to_f32(), Float8::<2>(0x04).to_f32()),
            (57344.0, 2f32.powi(-14))
        );
    }

    /// Returns the nearest finite code of a non-negative `value`, by trying all codes; of two equally near ones, the even one.
    fn nearest<const M: u32>(value: f64) -> u8 {
        (0..=Float8::<M>::LARGEST)
            .min_by(|&a, &b| {
                let distance = |code| (reference::<M>(code) - value).abs();
                distance(a)
                    .total_cmp(&distance(b))
                    .then((a & 1).cmp(&(b & 1)))
            })
            .unwrap()
    }

    fn narrowing_is_to_the_nearest<const M: u32>() {
        // Every finite 16-bit float: among them all ties and all overflows.
        for bits in 0..0x7c00u16 {
            let value = f16::from_bits(bits).to_f32();
            let want = nearest::<M>(f64::from(value));
            assert_eq!(Float8::<M>::from_f32(value).0, want, "{value}");
            assert_eq!(Float8::<M>::from_f32(-value).0, want | 0x80, "-{value}");
        }
    }

    #[test]
    fn narrowing_is_to_the_nearest_ties_to_even_and_saturates() {
        narrowing_is_to_the_nearest::<3>();
        narrowing_is_to_the_nearest::<2>();
        assert_eq!(E4M3::from_f32(f32::INFINITY), Float8::<3>(0x7e));
        assert_eq!(E5M2::from_f32(f32::NEG_INFINITY), Float8::<2>(0xfb));
        assert!(E4M3::from_f32(f32::NAN).to_f32().is_nan());
        assert!(E5M2::from_f32(-f32::NAN).to_f32().is_nan());
    }

    fn sixteen_bits_in_between_change_nothing<const M: u32>() {
        let narrow = |result: f32| Float8::<M>::from_f32(f16::from_f32(result).to_f32());
        for (a, b) in (0..=255).flat_map(|a| (0..=255).map(move |b| (Float8::<M>(a), Float8(b)))) {
            let (x, y) = (a.to_f32(), b.to_f32());
            assert_eq!(a.add(b), narrow(x + y), "{x} + {y}");
            assert_eq!(a.multiply(b), narrow(x * y), "{x} * {y}");
        }
    }

    #[test]
    fn computing_in_sixteen_bits_as_the_kernels_do_gives_the_same_for_all_pairs() {
        sixteen_bits_in_between_change_nothing::<3>();
        sixteen_bits_in_between_change_nothing::<2>();
        assert_eq!(Float8::<2>(0x7c).add(Float8::<2>(0)).to_f32(), 57344.0);
        assert!(Float8::<2>(0x7c).add(Float8::<2>(0xfc)).to_f32().is_nan());
    }
}
