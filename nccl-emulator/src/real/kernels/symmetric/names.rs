//! The meaning of a kernel's name.

use super::super::functions::{Collective, Reason};
use crate::numbers::datatype::DataType;

/// How a kernel over symmetric memory moves data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Algorithm {
    /// Lines with flags in the communicator's buffer (LL).
    LowLatency,
    /// Loads from and stores to the peers' windows (LD, ST).
    Direct,
    /// The same by the bulk copies of compute capability 10 (Tma).
    Bulk,
    /// Any of these with multicast (MC).
    Multicast,
    /// Between hosts, with the network operations of the device (Rail).
    Rail,
}

/// A kernel over symmetric memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kernel {
    pub(crate) collective: Collective,
    pub(crate) algorithm: Algorithm,
    /// The type of a reduction.
    pub(crate) ty: Option<DataType>,
    /// Whether the sum is scaled to the average.
    pub(crate) average: bool,
    /// Whether the kernel reports the beginning and the end of its parts to the host (2.32 and later).
    pub(crate) profiled: bool,
}

const ALGORITHMS: [(&str, Collective, Algorithm); 18] = {
    use {Algorithm as A, Collective as C};
    [
        ("AllGather_LL", C::AllGather, A::LowLatency),
        ("AllGather_LLMC", C::AllGather, A::Multicast),
        ("AllGather_ST", C::AllGather, A::Direct),
        ("AllGather_STMC", C::AllGather, A::Multicast),
        ("AllGather_TmaST", C::AllGather, A::Bulk),
        ("AllGather_TmaSTMC", C::AllGather, A::Multicast),
        ("AllGather_RailRing_LsaSTMC", C::AllGather, A::Rail),
        ("AllReduce_AGxLL_R", C::AllReduce, A::LowLatency),
        ("AllReduce_AGxLLMC_R", C::AllReduce, A::Multicast),
        ("AllReduce_RSxLD_AGxST", C::AllReduce, A::Direct),
        ("AllReduce_RSxLDMC_AGxSTMC", C::AllReduce, A::Multicast),
        ("AllReduce_RSxTmaLD_AGxTmaST", C::AllReduce, A::Bulk),
        ("ReduceScatter_LL", C::ReduceScatter, A::LowLatency),
        ("ReduceScatter_LD", C::ReduceScatter, A::Direct),
        ("ReduceScatter_LDMC", C::ReduceScatter, A::Multicast),
        ("ReduceScatter_TmaLD", C::ReduceScatter, A::Bulk),
        ("ReduceScatter_RailA2A_LsaLD", C::ReduceScatter, A::Rail),
        ("ReduceScatter_RailA2A_LsaLDMC", C::ReduceScatter, A::Rail),
    ]
};

const TYPES: [(&str, DataType); 5] = [
    ("f32", DataType::F32),
    ("f16", DataType::F16),
    ("bf16", DataType::Bf16),
    ("f8e4m3", DataType::F8E4M3),
    ("f8e5m2", DataType::F8E5M2),
];

fn rest(name: &str) -> Option<&str> {
    name.strip_prefix("ncclSymkDevKernel_")
        .or_else(|| name.strip_prefix("ncclSymDevKernel_"))
}

impl Kernel {
    /// Parses the unmangled name of a kernel.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let rest = rest(name)?;
        let (rest, profiled) = match rest.strip_suffix("_profile") {
            Some(rest) => (rest, true),
            None => (rest, false),
        };
        ALGORITHMS
            .iter()
            .find_map(|&(known, collective, algorithm)| {
                let operation = rest.strip_prefix(known)?;
                let (ty, average) = match collective {
                    Collective::AllGather => operation.is_empty().then_some((None, false))?,
                    _ => reduction(operation).map(|(ty, average)| (Some(ty), average))?,
                };
                Some(Self {
                    collective,
                    algorithm,
                    ty,
                    average,
                    profiled,
                })
            })
    }

    /// Returns `Ok` if the interpreter runs the kernel.
    pub(crate) fn interpreted(self) -> Result<(), Reason> {
        match self.algorithm {
            Algorithm::LowLatency | Algorithm::Direct | Algorithm::Bulk => Ok(()),
            Algorithm::Multicast => Err(Reason::Multicast),
            Algorithm::Rail => Err(Reason::DeviceNetwork),
        }
    }
}

/// Returns the reduction at the end of a name.
fn reduction(operation: &str) -> Option<(DataType, bool)> {
    let (operator, ty) = operation.strip_prefix('_')?.split_once('_')?;
    let average = match operator {
        "sum" => false,
        "avg" => true,
        _ => return None,
    };
    let &(_, ty) = TYPES.iter().find(|(known, _)| *known == ty)?;
    Some((ty, average))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_collective_algorithm_operator_and_type() {
        let kernel = Kernel::parse("ncclSymkDevKernel_ReduceScatter_LD_avg_bf16_profile").unwrap();
        assert_eq!(
            kernel,
            Kernel {
                collective: Collective::ReduceScatter,
                algorithm: Algorithm::Direct,
                ty: Some(DataType::Bf16),
                average: true,
                profiled: true,
            }
        );
        let old = Kernel::parse("ncclSymDevKernel_AllReduce_AGxLL_R_sum_f8e5m2").unwrap();
        assert_eq!(old.algorithm, Algorithm::LowLatency);
        assert_eq!((old.ty, old.average), (Some(DataType::F8E5M2), false));
        assert_eq!(
            Kernel::parse("ncclSymkDevKernel_AllReduce_AGxLL_R_max_f32"),
            None
        );
        assert_eq!(Kernel::parse("ncclSymkDevKernel_AllGather_LLx"), None);
        assert_eq!(Kernel::parse("ncclDevKernel_AllGather_RING_LL"), None);
    }

    /// The names of 2.32.3, from NCCL's own generator; earlier releases have some of them.
    fn names() -> Vec<String> {
        let mut names = Vec::new();
        for (algorithm, collective, _) in ALGORITHMS {
            let operators: &[&str] = match collective {
                Collective::AllGather => {
                    names.push(format!("ncclSymkDevKernel_{algorithm}"));
                    continue;
                }
                Collective::AllReduce => &["sum"],
                _ => &["sum", "avg"],
            };
            for operator in operators {
                for (ty, _) in TYPES {
                    names.push(format!("ncclSymkDevKernel_{algorithm}_{operator}_{ty}"));
                }
            }
        }
        names
    }

    #[test]
    fn every_kernel_without_multicast_or_network_operations_is_interpreted() {
        let names = names();
        assert_eq!(names.len(), 92);
        let mut interpreted = 0;
        for name in names {
            let kernel = Kernel::parse(&name).unwrap();
            let expected = if name.contains("Rail") {
                Err(Reason::DeviceNetwork)
            } else if name.contains("MC") {
                Err(Reason::Multicast)
            } else {
                interpreted += 1;
                Ok(())
            };
            assert_eq!(kernel.interpreted(), expected, "{name}");
        }
        assert_eq!(interpreted, 48);
    }
}
