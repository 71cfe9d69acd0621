//! Bandwidth and time of NCCL's kernels as metrics, under the names that NCCL's Inspector gives them.
//!
//! A sample covers the operations that have ended since the previous sample: the mean of their times and the geometric
//! mean of their bus bandwidths, by communicator, function, size, and algorithm or peer. Without kernel reports from
//! NCCL (`NCCL_RUN_PROFILER`) there are no samples.

use std::collections::{BTreeMap, BTreeSet};

use ::metrics::{Unit, describe_gauge, gauge};

use nccl_plugin::profiler::{FinishedOperation, take_finished};

/// Maximum number of series of a metric during the life of a process.
const SERIES: usize = 1024;

pub(crate) fn describe() {
    let seconds = "of one operation on the GPU, the mean since the last sample";
    let bandwidth = "of operations on the GPU, the geometric mean since the last sample, in GB/s";
    for name in [
        "nccl_collective_exec_time_microseconds",
        "nccl_p2p_exec_time_microseconds",
    ] {
        describe_gauge!(name, Unit::Microseconds, seconds);
    }
    for name in ["nccl_bus_bandwidth_gbs", "nccl_p2p_bus_bandwidth_gbs"] {
        describe_gauge!(name, Unit::Count, bandwidth);
    }
}

/// Labels of a series.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Series {
    communicator: String,
    ranks: usize,
    function: &'static str,
    size: String,
    /// Name and value of the last label: algorithm and protocol of a collective, or the peer of a message.
    detail: (&'static str, String),
}

impl Series {
    fn of(operation: &FinishedOperation) -> Self {
        let FinishedOperation {
            algorithm,
            protocol,
            peer,
            ..
        } = operation;
        let detail = match (is_message(operation.function), peer, algorithm.is_empty()) {
            (true, Some(peer), _) => ("p2p_peer", peer.to_string()),
            (true, None, _) => ("p2p_peer", String::new()),
            (false, _, true) => ("algo_proto", String::new()),
            (false, _, false) => ("algo_proto", format!("{algorithm}_{protocol}")),
        };
        Self {
            communicator: operation.communicator.clone(),
            ranks: operation.world_size,
            function: operation.function,
            size: size_range(traffic(operation)),
            detail,
        }
    }
}

fn is_message(function: &str) -> bool {
    matches!(function, "Send" | "Recv" | "SendRecv")
}

/// Returns the bytes of an operation as Inspector counts them: of all blocks together where each rank has a block.
fn traffic(operation: &FinishedOperation) -> u64 {
    match operation.function {
        "AllGather" | "ReduceScatter" | "AlltoAll" | "Gather" | "Scatter" => {
            operation.bytes.saturating_mul(operation.world_size as u64)
        }
        _ => operation.bytes,
    }
}

/// Returns the bus bandwidth in GB/s: the rate at which a link carries data, comparable for any number of ranks.
fn bus_bandwidth(operation: &FinishedOperation) -> f64 {
    let ranks = operation.world_size.max(1) as f64;
    let factor = match operation.function {
        "AllReduce" => 2.0 * (ranks - 1.0) / ranks,
        "AllGather" | "ReduceScatter" | "AlltoAll" | "Gather" | "Scatter" => (ranks - 1.0) / ranks,
        _ => 1.0,
    };
    traffic(operation) as f64 / operation.kernel_ns.max(1) as f64 * factor
}

/// Returns the range between two powers of two that contains a size: `64-128KB`.
fn size_range(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KB", "MB", "GB", "TB"];
    let Some(power) = bytes.checked_ilog2() else {
        return String::from("0B");
    };
    let unit = (power / 10).min(4);
    let lower = 1u64 << (power - 10 * unit);
    format!("{lower}-{}{}", 2 * lower, UNITS[unit as usize])
}

#[derive(Default)]
struct Sums {
    operations: f64,
    microseconds: f64,
    logarithms: f64,
}

/// Exports the operations that have ended since the previous call; `exported` holds the series that were exported
/// before.
pub(crate) fn export(exported: &mut BTreeSet<Series>) {
    let mut all: BTreeMap<Series, Sums> = BTreeMap::new();
    for operation in take_finished() {
        let sums = all.entry(Series::of(&operation)).or_default();
        sums.operations += 1.0;
        sums.microseconds += operation.kernel_ns as f64 / 1e3;
        sums.logarithms += bus_bandwidth(&operation).max(f64::MIN_POSITIVE).ln();
    }
    for (series, sums) in all {
        if !exported.contains(&series) && exported.len() >= SERIES {
            continue;
        }
        let (time, bandwidth, function) = match is_message(series.function) {
            true => (
                "nccl_p2p_exec_time_microseconds",
                "nccl_p2p_bus_bandwidth_gbs",
                "p2p_operation",
            ),
            false => (
                "nccl_collective_exec_time_microseconds",
                "nccl_bus_bandwidth_gbs",
                "collective",
            ),
        };
        let (name, value) = series.detail.clone();
        let labels = [
            ("comm_name", series.communicator.clone()),
            ("nranks", series.ranks.to_string()),
            (function, series.function.to_owned()),
            ("message_size", series.size.clone()),
            (name, value),
        ];
        gauge!(time, &labels).set(sums.microseconds / sums.operations);
        gauge!(bandwidth, &labels).set((sums.logarithms / sums.operations).exp());
        exported.insert(series);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operation(function: &'static str, bytes: u64) -> FinishedOperation {
        FinishedOperation {
            communicator: String::from("tp"),
            world_size: 4,
            function,
            peer: Some(3),
            algorithm: "RING",
            protocol: "LL",
            bytes,
            kernel_ns: 1000,
        }
    }

    #[test]
    fn bandwidths_are_those_of_links() {
        let bandwidth = |function, bytes| bus_bandwidth(&operation(function, bytes));
        // 4000 bytes in a microsecond are 4 GB/s.
        assert_eq!(bandwidth("AllReduce", 4000), 6.0);
        assert_eq!(bandwidth("AllGather", 1000), 3.0);
        assert_eq!(bandwidth("Broadcast", 4000), 4.0);
        assert_eq!(bandwidth("Send", 4000), 4.0);
        let series = Series::of(&operation("AllGather", 1 << 14));
        let named = |value: &str| value.to_owned();
        assert_eq!(series.size, "64-128KB");
        assert_eq!(series.detail, ("algo_proto", named("RING_LL")));
        let series = Series::of(&operation("Recv", 1 << 14));
        assert_eq!(series.detail, ("p2p_peer", named("3")));
    }

    #[test]
    fn sizes_are_ranges_between_powers_of_two() {
        for (bytes, expected) in [
            (0, "0B"),
            (1, "1-2B"),
            (1023, "512-1024B"),
            (1024, "1-2KB"),
            ((1 << 20) + 5, "1-2MB"),
            (u64::MAX, "8388608-16777216TB"),
        ] {
            assert_eq!(size_range(bytes), expected);
        }
    }
}
