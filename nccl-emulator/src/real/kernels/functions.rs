//! The functions of NCCL's device code, and which of them the interpreter runs.
//!
//! A batch identifies its function by an id. The library has a table from rows to ids (`ncclDevFuncRowToId`). The order of the
//! rows follows a formula over collective, operator, type, algorithm and protocol, which is the same in 2.29 to 2.32; earlier
//! releases lack the rows of AllGatherV.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use nccl_sys::Version;

use super::asked::Mismatch;
use crate::numbers::datatype::DataType;

/// The collective of a device function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Collective {
    SendRecv,
    AllGather,
    Broadcast,
    /// Batches of broadcasts (2.29 and later).
    AllGatherV,
    AllReduce,
    Reduce,
    ReduceScatter,
}

/// The algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Algorithm {
    Tree,
    Ring,
    CollNetDirect,
    CollNetChain,
    Nvls,
    NvlsTree,
    Pat,
}

/// The protocol of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    Ll,
    Ll128,
    Simple,
}

impl Protocol {
    const ALL: [Self; 3] = [Self::Ll, Self::Ll128, Self::Simple];

    /// Returns the index of the protocol's buffers in NCCL's arrays.
    pub(super) fn index(self) -> usize {
        match self {
            Self::Ll => 0,
            Self::Ll128 => 1,
            Self::Simple => 2,
        }
    }

    /// Returns the unit of a chunk in bytes.
    pub(super) fn grain(self) -> usize {
        match self {
            Self::Ll => 16,
            Self::Ll128 => 1920,
            Self::Simple => 512,
        }
    }
}

/// The operators of the device code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceOperator {
    Sum,
    Prod,
    /// Minimum or maximum, selected by the operator's argument.
    MinMax,
    PreMulSum,
    SumPostDiv,
}

/// One row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Function {
    pub(crate) collective: Collective,
    /// The reduction of collectives that reduce. Signed and unsigned integers share a function; the argument distinguishes
    /// them.
    pub(crate) reduction: Option<(DeviceOperator, DataType)>,
    pub(crate) algorithm: Algorithm,
    pub(crate) protocol: Protocol,
}

impl fmt::Display for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            collective,
            reduction,
            algorithm,
            protocol,
        } = self;
        write!(f, "{collective:?}")?;
        if let Some((operator, ty)) = reduction {
            write!(f, " {operator:?} {ty:?}")?;
        }
        if *collective != Collective::SendRecv {
            write!(f, " {algorithm:?} {protocol:?}")?;
        }
        Ok(())
    }
}

/// Why the interpreter does not run something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// It needs multicast memory, which the emulated devices lack.
    Multicast,
    /// It needs reductions in the network.
    CollNet,
    /// It needs network operations of the device (GIN).
    DeviceNetwork,
    /// A kernel over symmetric memory for a team in which not all ranks map each other's memory.
    Team { team_ranks: u64, ranks: u64 },
    /// A rank outside of its communicator.
    Rank { rank: u64, ranks: u64 },
    /// The name is not that of a kernel that NCCL 2.27 to 2.32 launches.
    UnknownKernel,
    /// The table has no function with this id.
    UnknownFunction { id: u64 },
    /// The algorithm does not exist for this protocol or collective.
    NoSuchFunction,
    /// A batch of works of an unknown kind.
    UnknownWork { work_type: u64 },
    /// A batch whose works do not fit its function.
    WrongWork { work_type: u64 },
    /// The parameters are shorter than the data that they describe.
    Parameters { needed: usize, found: usize },
    /// The numbers of blocks and channels differ.
    Grid { channels: u32, blocks: u32 },
    /// A chain of batches that does not end.
    Endless,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Multicast => write!(
                f,
                "it needs NVLink multicast (NVLS), which emulated devices do not have: unset NCCL_ALGO or NCCL_NVLS_ENABLE"
            ),
            Self::CollNet => write!(
                f,
                "it needs reductions in the network (CollNet), which is not there: unset NCCL_ALGO or NCCL_COLLNET_ENABLE"
            ),
            Self::DeviceNetwork => write!(
                f,
                "it needs network operations of the device (GIN), which emulated devices do not have: set NCCL_SYM_GIN_KERNELS_ENABLE=0"
            ),
            Self::Team { team_ranks, ranks } => write!(
                f,
                "only {team_ranks} of its {ranks} ranks map each other's memory"
            ),
            Self::Rank { rank, ranks } => {
                write!(f, "it is for rank {rank} of a communicator of {ranks}")
            }
            Self::UnknownKernel => write!(f, "it is not a kernel of NCCL 2.27 to 2.32"),
            Self::UnknownFunction { id } => {
                write!(f, "the library's table has no device function {id}")
            }
            Self::NoSuchFunction => {
                write!(f, "NCCL has no such combination of algorithm and protocol")
            }
            Self::UnknownWork { work_type } => {
                write!(f, "works of type {work_type} are not known")
            }
            Self::WrongWork { work_type } => write!(
                f,
                "works of type {work_type} do not belong to this function"
            ),
            Self::Parameters { needed, found } => {
                write!(f, "its parameters have {found} bytes, not {needed}")
            }
            Self::Grid { channels, blocks } => write!(
                f,
                "it is launched with {blocks} blocks for {channels} channels"
            ),
            Self::Endless => write!(f, "its batches do not end"),
        }
    }
}

/// Whether the interpreter runs a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Coverage {
    Interpreted,
    Refused(Reason),
    /// The library does not have it.
    Absent,
}

/// A row of the table, for documentation and tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) function: Function,
    pub(crate) coverage: Coverage,
    /// The number of completed batches in this process.
    pub(crate) carried_out: u64,
}

impl Function {
    /// Returns `Ok` if the interpreter runs the function.
    pub(super) fn interpreted(self) -> Result<(), Reason> {
        use {Algorithm as A, Collective as C};
        match self.algorithm {
            A::Nvls | A::NvlsTree => return Err(Reason::Multicast),
            A::CollNetDirect | A::CollNetChain => return Err(Reason::CollNet),
            _ => {}
        }
        match (self.collective, self.algorithm, self.protocol) {
            (_, A::Ring, _)
            | (C::AllReduce, A::Tree, _)
            | (C::AllGather | C::ReduceScatter, A::Pat, Protocol::Simple) => Ok(()),
            _ => Err(Reason::NoSuchFunction),
        }
    }
}

const OPERATORS: [DeviceOperator; 5] = [
    DeviceOperator::Sum,
    DeviceOperator::Prod,
    DeviceOperator::MinMax,
    DeviceOperator::PreMulSum,
    DeviceOperator::SumPostDiv,
];

const TYPES: [DataType; 12] = [
    DataType::I8,
    DataType::U8,
    DataType::I32,
    DataType::U32,
    DataType::I64,
    DataType::U64,
    DataType::F16,
    DataType::F32,
    DataType::F64,
    DataType::Bf16,
    DataType::F8E4M3,
    DataType::F8E5M2,
];

/// Returns all rows, in the order of the library's table.
fn rows(release: Version) -> Vec<Function> {
    use {Algorithm as A, Collective as C};
    const GATHER: &[Algorithm] = &[A::Ring, A::CollNetDirect, A::Nvls, A::Pat];
    const REDUCE: &[Algorithm] = &[
        A::Tree,
        A::Ring,
        A::CollNetDirect,
        A::CollNetChain,
        A::Nvls,
        A::NvlsTree,
    ];
    let mut rows = vec![Function {
        collective: C::SendRecv,
        reduction: None,
        algorithm: A::Ring,
        protocol: Protocol::Simple,
    }];
    let mut add = |collective, reduction, algorithms: &[Algorithm]| {
        for &algorithm in algorithms {
            rows.extend(Protocol::ALL.map(|protocol| Function {
                collective,
                reduction,
                algorithm,
                protocol,
            }));
        }
    };
    add(C::AllGather, None, GATHER);
    add(C::Broadcast, None, &[A::Ring]);
    if release >= Version::new(2, 29, 2) {
        add(C::AllGatherV, None, &[A::Ring]);
    }
    for (collective, algorithms) in [
        (C::AllReduce, REDUCE),
        (C::Reduce, &[A::Ring][..]),
        (C::ReduceScatter, GATHER),
    ] {
        for operator in OPERATORS {
            for ty in TYPES {
                add(collective, Some((operator, ty)), algorithms);
            }
        }
    }
    rows
}

/// The inverse of the library's table.
#[derive(Debug)]
pub(super) struct Functions {
    rows: Vec<(Function, Option<u32>)>,
    /// The functions by id.
    functions: Vec<Option<Function>>,
    /// The number of completed batches, by id.
    carried_out: Vec<AtomicU64>,
}

impl Functions {
    pub(super) fn new(row_to_id: &[i32], release: Version) -> Result<Self, Mismatch> {
        let rows = rows(release);
        // The table ends with an additional -1, which belongs to no row.
        if row_to_id.len() != rows.len() && row_to_id.len() != rows.len() + 1 {
            return Err(Mismatch::Rows {
                expected: rows.len(),
                found: row_to_id.len(),
            });
        }
        let rows: Vec<_> = rows
            .into_iter()
            .zip(row_to_id)
            .map(|(function, &id)| (function, u32::try_from(id).ok()))
            .collect();
        let ids = rows.iter().filter_map(|(_, id)| *id).max();
        let mut functions = vec![None; ids.map_or(0, |id| id as usize + 1)];
        for &(function, id) in &rows {
            if let Some(id) = id {
                functions[id as usize] = Some(function);
            }
        }
        let carried_out = functions.iter().map(|_| AtomicU64::new(0)).collect();
        Ok(Self {
            rows,
            functions,
            carried_out,
        })
    }

    /// Returns the function with this id.
    pub(super) fn get(&self, id: u64) -> Result<Function, Reason> {
        usize::try_from(id)
            .ok()
            .and_then(|id| *self.functions.get(id)?)
            .ok_or(Reason::UnknownFunction { id })
    }

    /// Counts a completed batch.
    pub(super) fn count(&self, id: u64) {
        let counter = usize::try_from(id)
            .ok()
            .and_then(|id| self.carried_out.get(id));
        if let Some(counter) = counter {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn coverage(&self) -> Vec<Row> {
        self.rows
            .iter()
            .map(|&(function, id)| Row {
                function,
                coverage: match (id, function.interpreted()) {
                    (None, _) => Coverage::Absent,
                    (_, Ok(())) => Coverage::Interpreted,
                    (_, Err(reason)) => Coverage::Refused(reason),
                },
                carried_out: id
                    .and_then(|id| self.carried_out.get(id as usize))
                    .map_or(0, |count| count.load(Ordering::Relaxed)),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rows_are_in_the_order_of_the_librarys_table() {
        let new = rows(Version::new(2, 32, 3));
        let old = rows(Version::new(2, 27, 7));
        assert_eq!((new.len(), old.len()), (1999, 1996));
        // From the comments of a table generated by NCCL's own script.
        let at = |row: usize| new[row].to_string();
        assert_eq!(at(0), "SendRecv");
        assert_eq!(at(1), "AllGather Ring Ll");
        assert_eq!(at(12), "AllGather Pat Simple");
        assert_eq!(at(13), "Broadcast Ring Ll");
        assert_eq!(at(18), "AllGatherV Ring Simple");
        assert_eq!(at(19), "AllReduce Sum I8 Tree Ll");
        assert_eq!(at(22), "AllReduce Sum I8 Ring Ll");
        assert_eq!(at(19 + 18), "AllReduce Sum U8 Tree Ll");
        assert_eq!(at(19 + 1080), "Reduce Sum I8 Ring Ll");
        assert_eq!(at(19 + 1260), "ReduceScatter Sum I8 Ring Ll");
        assert_eq!(at(1998), "ReduceScatter SumPostDiv F8E5M2 Pat Simple");
        assert_eq!(old[16], new[19]);
    }

    #[test]
    fn every_built_function_without_multicast_or_collnet_is_interpreted() {
        let count = rows(Version::new(2, 32, 3)).len();
        // A library that had every row.
        let table: Vec<i32> = (0..count as i32).collect();
        let functions = Functions::new(&table, Version::new(2, 32, 3)).unwrap();
        for row in functions.coverage() {
            let function = row.function;
            let expected = match function.algorithm {
                Algorithm::Nvls | Algorithm::NvlsTree => Coverage::Refused(Reason::Multicast),
                Algorithm::CollNetDirect | Algorithm::CollNetChain => {
                    Coverage::Refused(Reason::CollNet)
                }
                Algorithm::Pat if function.protocol != Protocol::Simple => {
                    Coverage::Refused(Reason::NoSuchFunction)
                }
                _ => Coverage::Interpreted,
            };
            assert_eq!(row.coverage, expected, "{function}");
        }
    }

    #[test]
    fn a_table_of_another_length_is_a_mismatch_and_an_unknown_id_a_refusal() {
        let release = Version::new(2, 30, 7);
        let error = Functions::new(&[0; 1996], release).unwrap_err();
        let (expected, found) = (1999, 1996);
        assert_eq!(error, Mismatch::Rows { expected, found });
        let functions = Functions::new(&[-1; 2000], release).unwrap();
        assert_eq!(functions.get(3), Err(Reason::UnknownFunction { id: 3 }));
    }
}
