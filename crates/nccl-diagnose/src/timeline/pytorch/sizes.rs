//! The sizes and types of a collective, as PyTorch writes them: those of the tensors, which here have one dimension.

use nccl_base::data_type::DataType;
use nccl_core::recorder::Call;

use crate::operation::OperationKind;

/// The number and type of the elements that NCCL's function counts: those of one block where every rank has one.
#[derive(Clone, Copy)]
pub(super) struct BlockSize {
    count: u64,
    data_type: DataType,
}

/// The sizes of the tensors that a rank passes in and receives, and the type of their elements.
pub(super) struct Sizes {
    pub(super) input: Vec<Vec<u64>>,
    pub(super) output: Vec<Vec<u64>>,
    pub(super) data_type: &'static str,
}

/// Whether the sizes differ from rank to rank. The analyser compares the sum of the input sizes of all ranks with the
/// sum of their output sizes.
pub(super) fn is_uneven(kind: OperationKind) -> bool {
    use OperationKind::{AllToAllV, Combine, Dispatch, Route};
    matches!(kind, AllToAllV | Combine | Dispatch | Route)
}

/// The size of a block of this call, if one of its operations is recorded.
pub(super) fn own_block(call: &Call) -> Option<BlockSize> {
    let first = call.operations.first()?;
    Some(BlockSize {
        count: first.count,
        data_type: first.data_type,
    })
}

impl Sizes {
    /// The sizes of `call` on rank `own` of `ranks`. `block` is the size on another rank, for a call without operations.
    pub(super) fn of(call: &Call, own: usize, ranks: usize, block: Option<BlockSize>) -> Self {
        use OperationKind::{AllGather, AllToAll, Gather, ReduceScatter, Scatter};
        let block = own_block(call).or(block);
        let count = block.map_or(0, |block| block.count);
        let all = count.saturating_mul(ranks as u64);
        let (input, output) = match call.kind {
            kind if is_uneven(kind) => {
                let [sent, received] = totals(call);
                (vec![vec![sent]], vec![vec![received]])
            }
            AllGather => (vec![vec![count]], vec![vec![all]]),
            ReduceScatter => (vec![vec![all]], vec![vec![count]]),
            AllToAll => (vec![vec![all]], vec![vec![all]]),
            Gather if is_root(call, own) => (vec![vec![count]], vec![vec![all]]),
            Gather => (vec![vec![count]], Vec::new()),
            Scatter if is_root(call, own) => (vec![vec![all]], vec![vec![count]]),
            Scatter => (Vec::new(), vec![vec![count]]),
            _ => (vec![vec![count]], vec![vec![count]]),
        };
        Self {
            input,
            output,
            data_type: block.map_or("Undefined", |block| name(block.data_type)),
        }
    }

    /// The sizes of a call in which each rank has its own, if those of one rank are unknown.
    pub(super) fn unknown(block: Option<BlockSize>) -> Self {
        Self {
            input: vec![vec![0]],
            output: vec![vec![0]],
            data_type: block.map_or("Undefined", |block| name(block.data_type)),
        }
    }

    /// The sizes of a message, which PyTorch writes as both.
    pub(super) fn of_message(count: u64, data_type: DataType) -> Self {
        Self {
            input: vec![vec![count]],
            output: vec![vec![count]],
            data_type: name(data_type),
        }
    }
}

/// How many elements a rank gives and gets.
fn totals(call: &Call) -> [u64; 2] {
    let mut totals = [0_u64; 2];
    for one in &call.operations {
        let [gives, gets] = match one.kind {
            OperationKind::Send => [true, false],
            OperationKind::Recv => [false, true],
            _ => [true, true],
        };
        for (total, counts) in totals.iter_mut().zip([gives, gets]) {
            *total = total.saturating_add(if counts { one.count } else { 0 });
        }
    }
    totals
}

/// Whether rank `own` is the root of a gather or a scatter, which may be made of messages: the root sends, or receives, nothing but
/// to itself.
fn is_root(call: &Call, own: usize) -> bool {
    if let Some(root) = call.operations.first().and_then(|one| one.root) {
        return root == own;
    }
    let other_ranks = match call.kind {
        OperationKind::Gather => OperationKind::Send,
        _ => OperationKind::Recv,
    };
    let mut operations = call.operations.iter();
    let to_root = operations.find(|one| one.kind == other_ranks);
    !call.operations.is_empty() && to_root.and_then(|one| one.peer).unwrap_or(own) == own
}

/// PyTorch's name of a type.
fn name(data_type: DataType) -> &'static str {
    match data_type {
        DataType::Int8 => "Char",
        DataType::UInt8 => "Byte",
        DataType::Int32 => "Int",
        DataType::UInt32 => "UInt32",
        DataType::Int64 => "Long",
        DataType::UInt64 => "UInt64",
        DataType::Float16 => "Half",
        DataType::Float32 => "Float",
        DataType::Float64 => "Double",
        DataType::BFloat16 => "BFloat16",
        DataType::Float8E4M3 => "Float8_e4m3fn",
        DataType::Float8E5M2 => "Float8_e5m2",
        _ => "Undefined",
    }
}
