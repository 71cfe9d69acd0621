//! The kernels of a communicator with a single rank that scale the rank's input (`oneRankReduce`).

use super::arithmetic::Arithmetic;
use super::block::{Context, Stop};
use super::functions::{DeviceOperator, Reason};
use super::memory;
use crate::numbers::datatype::DataType;

/// The bytes scaled between two checks of the budget.
const PIECE: usize = 128 << 10;

/// A launch of such a kernel.
#[derive(Debug, Clone, Copy)]
pub(super) struct OneRank {
    ty: DataType,
    destination: u64,
    source: u64,
    count: u64,
    argument: u64,
    argument_is_pointer: bool,
}

impl OneRank {
    /// Returns the element type in a kernel's mangled name, if it is one of these kernels.
    pub(super) fn element(kernel: &str) -> Option<DataType> {
        let (_, ty) = kernel.split_once("oneRankReduceI13FuncPreMulSumI")?;
        let names = [
            ("6__half", DataType::F16),
            ("13__nv_bfloat16", DataType::Bf16),
            ("13__nv_fp8_e4m3", DataType::F8E4M3),
            ("13__nv_fp8_e5m2", DataType::F8E5M2),
            ("a", DataType::I8),
            ("h", DataType::U8),
            ("i", DataType::I32),
            ("j", DataType::U32),
            ("l", DataType::I64),
            ("m", DataType::U64),
            ("f", DataType::F32),
            ("d", DataType::F64),
        ];
        let found = names.iter().find(|(name, _)| ty.starts_with(name))?;
        Some(found.1)
    }

    /// Decodes the parameters: destination, source, number of elements, argument, and whether the argument is a pointer.
    pub(super) fn decode(ty: DataType, parameters: &[u8]) -> Result<Self, Reason> {
        let word = |index: usize| {
            let bytes = parameters.get(8 * index..8 * index + 8)?;
            Some(u64::from_le_bytes(bytes.try_into().ok()?))
        };
        let decode = || {
            Some(Self {
                ty,
                destination: word(0)?,
                source: word(1)?,
                count: word(2)?,
                argument: word(3)?,
                argument_is_pointer: *parameters.get(32)? != 0,
            })
        };
        decode().ok_or(Reason::Parameters {
            needed: 33,
            found: parameters.len(),
        })
    }

    pub(super) async fn run(self, context: &Context) -> Result<(), Stop> {
        let device = context.memory.as_ref();
        let size = self.ty.size() as usize;
        let mut argument = self.argument.to_le_bytes();
        if self.argument_is_pointer {
            argument = [0; 8];
            memory::view(device, self.argument, size)?.read(0, &mut argument[..size])?;
        }
        let arithmetic = Arithmetic::new(
            DeviceOperator::PreMulSum,
            self.ty,
            u64::from_le_bytes(argument),
        )?;
        let (mut at, bytes) = (0, self.count as usize * size);
        while at < bytes {
            let n = (bytes - at).min(PIECE);
            context.meter.grant(n).await;
            let from = memory::view(device, self.source + at as u64, n)?;
            let to = memory::view(device, self.destination + at as u64, n)?;
            let (input, output): (*const u8, _) = (from.at(0, n)?, to.at(0, n)?);
            // SAFETY: both are those of views of `n` bytes, a whole number of elements.
            unsafe { arithmetic.apply(&[input], &[output], n / size, true, true) };
            from.still_valid()?;
            to.still_valid()?;
            at += n;
        }
        Ok(())
    }
}
