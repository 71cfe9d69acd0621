//! The arithmetic of one operation: the operator of a device function, and the operator's argument in the work.

use super::functions::DeviceOperator;
use crate::numbers::datatype::{DataType, Operator};
use crate::numbers::reduction;

/// How elements of several ranks are combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Arithmetic {
    pub(super) ty: DataType,
    operator: Operator,
    /// A factor for the own input.
    scale: Option<u64>,
    /// Divides the final sum.
    divisor: Option<u64>,
}

/// An argument that NCCL's operators do not use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BadArgument {
    pub(super) operator: DeviceOperator,
    pub(super) argument: u64,
}

impl Arithmetic {
    /// Moves bytes without combining them.
    pub(super) const BYTES: Self = Self {
        ty: DataType::U8,
        operator: Operator::Sum,
        scale: None,
        divisor: None,
    };

    /// Creates an operator from its argument: the bits of a factor, a divisor with a sign bit, or the choice of minimum or
    /// maximum.
    pub(super) fn new(
        operator: DeviceOperator,
        ty: DataType,
        argument: u64,
    ) -> Result<Self, BadArgument> {
        let plain = |operator| Self {
            ty,
            operator,
            scale: None,
            divisor: None,
        };
        Ok(match operator {
            DeviceOperator::Sum => plain(Operator::Sum),
            DeviceOperator::Prod => plain(Operator::Prod),
            DeviceOperator::PreMulSum => Self {
                scale: Some(argument),
                ..plain(Operator::Sum)
            },
            DeviceOperator::SumPostDiv => {
                // The device function is that of unsigned integers; the lowest bit of the argument marks signed ones.
                let divisor = argument >> 1;
                if divisor == 0 {
                    return Err(BadArgument { operator, argument });
                }
                Self {
                    ty: signedness(ty, argument & 1 == 1),
                    divisor: Some(divisor),
                    ..plain(Operator::Sum)
                }
            }
            DeviceOperator::MinMax => {
                let bits = ty.size() * 8;
                let top = 1u64 << (bits - 1);
                let all = u64::MAX >> (64 - bits);
                match integer(ty) {
                    // The kernel compares the elements after an exclusive or with the argument, and takes the smaller one.
                    true => match argument & all {
                        0 => Self {
                            ty: signedness(ty, false),
                            ..plain(Operator::Min)
                        },
                        mask if mask == all => Self {
                            ty: signedness(ty, false),
                            ..plain(Operator::Max)
                        },
                        mask if mask == top => Self {
                            ty: signedness(ty, true),
                            ..plain(Operator::Min)
                        },
                        mask if mask == all ^ top => Self {
                            ty: signedness(ty, true),
                            ..plain(Operator::Max)
                        },
                        _ => return Err(BadArgument { operator, argument }),
                    },
                    false if argument & 1 == 0 => plain(Operator::Min),
                    false => plain(Operator::Max),
                }
            }
        })
    }

    /// Returns the size of the argument if the work points to it.
    pub(super) fn argument_size(operator: DeviceOperator, ty: DataType) -> usize {
        match operator {
            DeviceOperator::SumPostDiv => 8,
            _ => ty.size() as usize,
        }
    }

    /// Returns the size of an element in bytes.
    pub(super) fn element(self) -> usize {
        self.ty.size() as usize
    }

    /// Returns whether the final result is divided.
    pub(super) fn divides(self) -> bool {
        self.divisor.is_some()
    }

    /// Combines `count` elements of each input, of which the first is the own input if `own` is set, and stores the result in
    /// each output. `last` means that the result includes all ranks.
    ///
    /// # Safety
    /// Every pointer is valid for `count` elements. An output may be an input; other overlaps make the result unspecified.
    pub(super) unsafe fn apply(
        self,
        inputs: &[*const u8],
        outputs: &[*mut u8],
        count: usize,
        own: bool,
        last: bool,
    ) {
        let scale = self.scale.filter(|_| own);
        let divisor = self.divisor.filter(|_| last);
        if let ([input], None, None) = (inputs, scale, divisor) {
            for output in outputs {
                if !std::ptr::eq(*output, *input) {
                    // SAFETY: the caller's promise.
                    unsafe { std::ptr::copy(*input, *output, count * self.element()) };
                }
            }
            return;
        }
        // SAFETY: the caller's promise.
        unsafe {
            reduction::reduce_step(
                self.ty,
                self.operator,
                scale,
                divisor,
                inputs,
                outputs,
                count,
            );
        }
    }
}

fn integer(ty: DataType) -> bool {
    use DataType as T;
    matches!(ty, T::I8 | T::U8 | T::I32 | T::U32 | T::I64 | T::U64)
}

/// Returns the signed or unsigned integer type of the same size.
fn signedness(ty: DataType, signed: bool) -> DataType {
    use DataType as T;
    match (ty, signed) {
        (T::I8 | T::U8, true) => T::I8,
        (T::I8 | T::U8, false) => T::U8,
        (T::I32 | T::U32, true) => T::I32,
        (T::I32 | T::U32, false) => T::U32,
        (T::I64 | T::U64, true) => T::I64,
        (T::I64 | T::U64, false) => T::U64,
        (other, _) => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apply(operator: DeviceOperator, ty: DataType, argument: u64, inputs: &[&[u8]]) -> Vec<u8> {
        let arithmetic = Arithmetic::new(operator, ty, argument).unwrap();
        let mut result = vec![0; inputs[0].len()];
        let pointers: Vec<_> = inputs.iter().map(|input| input.as_ptr()).collect();
        let count = result.len() / arithmetic.element();
        // SAFETY: inputs and result have `count` elements.
        unsafe { arithmetic.apply(&pointers, &[result.as_mut_ptr()], count, true, true) };
        result
    }

    #[test]
    fn minimum_and_maximum_of_signed_and_unsigned_are_told_apart_by_the_argument() {
        let (a, b): (&[u8], &[u8]) = (&[0x80, 1], &[0x7f, 2]);
        let of = |argument| apply(DeviceOperator::MinMax, DataType::U8, argument, &[a, b]);
        assert_eq!(of(0), [0x7f, 1]);
        assert_eq!(of(0xff), [0x80, 2]);
        assert_eq!(of(0x80), [0x80, 1]);
        assert_eq!(of(0x7f), [0x7f, 2]);
        let wrong = Arithmetic::new(DeviceOperator::MinMax, DataType::U8, 0x55);
        assert_eq!(wrong.unwrap_err().argument, 0x55);
    }

    #[test]
    fn only_the_own_input_is_scaled() {
        let (a, b) = (2f32.to_le_bytes(), 5f32.to_le_bytes());
        let factor = u64::from(10f32.to_bits());
        let sum = apply(DeviceOperator::PreMulSum, DataType::F32, factor, &[&a, &b]);
        assert_eq!(sum, 25f32.to_le_bytes());
    }

    #[test]
    fn sums_are_divided_towards_zero_and_keep_their_sign() {
        let (a, b) = ((-3i32).to_le_bytes(), (-4i32).to_le_bytes());
        let of = |argument| {
            apply(
                DeviceOperator::SumPostDiv,
                DataType::U32,
                argument,
                &[&a, &b],
            )
        };
        assert_eq!(of(2 << 1 | 1), (-3i32).to_le_bytes());
        assert_eq!(of(2 << 1), ((-7i32 as u32) / 2).to_le_bytes());
        let zero = Arithmetic::new(DeviceOperator::SumPostDiv, DataType::U32, 1);
        assert!(zero.is_err());
    }
}
