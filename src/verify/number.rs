//! The encodings of numbers: integers, and floats of any width by their bits.

use crate::element::Element;

/// A kind of number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Number {
    /// This many bits, without a sign.
    Unsigned(u32),
    /// This many bits, in two's complement.
    Signed(u32),
    /// A sign, an exponent and a significand without its first bit.
    Float(Float),
}

/// The layout of a float.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Float {
    pub(super) exponent_bits: u32,
    pub(super) fraction_bits: u32,
    /// The exponent of the greatest numbers.
    pub(super) greatest: i32,
}

impl Number {
    pub(super) fn of(element: Element) -> Self {
        let float = |exponent_bits, fraction_bits, greatest| {
            Self::Float(Float {
                exponent_bits,
                fraction_bits,
                greatest,
            })
        };
        match element.name {
            "half" => float(5, 10, 15),
            "bfloat16" => float(8, 7, 127),
            "float" => float(8, 23, 127),
            "double" => float(11, 52, 1023),
            // Has no infinities, and numbers in their place.
            "f8e4m3" => float(4, 3, 8),
            "f8e5m2" => float(5, 2, 15),
            name if name.starts_with('u') => Self::Unsigned(8 * element.size as u32),
            _ => Self::Signed(8 * element.size as u32),
        }
    }
}

impl Float {
    /// All whole numbers up to 2 to the power of this are representable.
    pub(super) fn digits(self) -> u32 {
        self.fraction_bits + 1
    }

    /// The exponent of the least normal numbers.
    pub(super) fn least(self) -> i32 {
        2 - (1 << (self.exponent_bits - 1))
    }

    /// The nearest representable number, ties to even.
    pub(super) fn rounded(self, value: f64) -> f64 {
        if value == 0.0 || self.fraction_bits == 52 {
            return value;
        }
        let exponent = exponent(value).max(self.least());
        let unit = 2f64.powi(exponent - self.fraction_bits as i32);
        (value / unit).round_ties_even() * unit
    }

    /// The bits of a representable number.
    pub(super) fn bits(self, value: f64) -> u64 {
        if self.fraction_bits == 52 {
            return value.to_bits();
        }
        let sign = u64::from(value.is_sign_negative()) << (self.exponent_bits + self.fraction_bits);
        let value = value.abs();
        if value == 0.0 {
            return sign;
        }
        let exponent = exponent(value).max(self.least());
        let unit = 2f64.powi(exponent - self.fraction_bits as i32);
        // Includes the first digit, which adds one to the exponent; subnormal numbers lack it.
        let digits = (value / unit) as u64;
        let biased = (exponent - self.least()) as u64;
        sign | ((biased << self.fraction_bits) + digits)
    }
}

/// The exponent of a number that is normal as a double.
fn exponent(value: f64) -> i32 {
    ((value.to_bits() >> 52) & 0x7FF) as i32 - 1023
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::element;

    fn float(name: &str) -> Float {
        match Number::of(Element::named(name).unwrap()) {
            Number::Float(float) => float,
            other => panic!("{name}: {other:?}"),
        }
    }

    #[test]
    fn every_type_is_known() {
        for element in element::ALL {
            match Number::of(element) {
                Number::Unsigned(bits) | Number::Signed(bits) => {
                    assert_eq!(bits as usize, 8 * element.size, "{element:?}");
                    assert!(element.name.contains("int"), "{element:?}");
                }
                Number::Float(float) => {
                    let bits = 1 + float.exponent_bits + float.fraction_bits;
                    assert_eq!(bits as usize, 8 * element.size, "{element:?}");
                }
            }
        }
    }

    #[test]
    fn bits_are_those_of_the_types_themselves() {
        // The bits according to the OCP specification of 8-bit floats.
        let values = [
            (0.0, 0x00, 0x00),
            (1.0, 0x38, 0x3C),
            (-1.5, 0xBC, 0xBE),
            (0.125, 0x20, 0x30),
            (96.0, 0x6C, 0x56),
            (-0.0, 0x80, 0x80),
            (2f64.powi(-14), 0x00, 0x04),
            (1.0 / 3.0, 0x2B, 0x35),
        ];
        for (value, e4m3, e5m2) in values {
            let with = |name: &str| float(name).bits(float(name).rounded(value));
            assert_eq!(with("half"), u64::from(f16::from_f64(value).to_bits()));
            assert_eq!(with("bfloat16"), u64::from(bf16::from_f64(value).to_bits()));
            assert_eq!(with("float"), u64::from((value as f32).to_bits()));
            assert_eq!(with("double"), value.to_bits());
            assert_eq!(with("f8e4m3"), e4m3, "{value}");
            assert_eq!(with("f8e5m2"), e5m2, "{value}");
        }
    }

    #[test]
    fn rounding_is_to_the_nearest_and_to_even() {
        let half = float("half");
        for bits in 0..0x7C00u16 {
            let value = f64::from(f16::from_bits(bits));
            assert_eq!(half.bits(value), u64::from(bits));
            let between = value + 2f64.powi(-26);
            let expected = f16::from_f64(between).to_f64();
            assert_eq!(half.rounded(between), expected, "{between}");
        }
    }
}
