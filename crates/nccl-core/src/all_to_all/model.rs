//! A cost model of the algorithms.
//!
//! With `n` ranks, `g` on each of `N` nodes, and `m` bytes from each rank to each other; times are µs, bandwidths bytes/µs:
//!
//! | algorithm | time |
//! |---|---|
//! | native, grouped | `launch + max(inside(1, m), between(n-g, m))` |
//! | chunked, `k` pieces | `k · launch + max(inside(k, m/k), between((n-g)·k, m/k))` |
//! | pairwise, `w` peers | one `launch`, and `wire` if a peer is on another node, for each group of `w`, plus the time of its messages |
//! | two levels | `2 · launch + inside(1, N·m) + between(N-1, g·m)` + the copies: `2·g·copy + 2·n·m / copied` |
//!
//! `inside(s, m) = s·(g-1)·(message + m/bandwidth)` with the constants of a node, and
//! `between(s, m) = wire + s·max(message, m/bandwidth)` with those of the network: inside a node the ranks copy messages
//! themselves, one after another. Over the network, an adapter carries one message while the next is prepared, so that many
//! short messages are limited by their number, and long messages by the link. Without packing, two levels send `N` messages to
//! each neighbour instead of one, and copy nothing, unless unequal parts have to be moved to their places.
//!
//! This is a model for ranking algorithms; its results are not measurements.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::algorithm::Algorithm;
use crate::error::{Error, ErrorKind, Result};

/// The constants of [`CostModel`] for messages of one kind.
///
/// ```
/// let inside = nccl::all_to_all::LinkCost { message_us: 0.5, bandwidth_gbps: 300.0 };
/// let model = nccl::all_to_all::CostModel { inside, ..nccl::all_to_all::CostModel::published() };
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkCost {
    /// The cost per message, whatever its length, µs.
    pub message_us: f64,
    /// The rate at which a rank sends, and receives at the same time, 10⁹ bytes/s.
    pub bandwidth_gbps: f64,
}

impl LinkCost {
    /// Returns the time of a message that the ranks copy themselves: its overhead plus its bytes.
    fn in_turn(&self, bytes: u64) -> f64 {
        self.message_us + self.link(bytes)
    }

    /// Returns the time of a message that an adapter carries while the next is prepared: the greater of overhead and bytes.
    fn overlapped(&self, bytes: u64) -> f64 {
        self.message_us.max(self.link(bytes))
    }

    fn link(&self, bytes: u64) -> f64 {
        bytes as f64 / (self.bandwidth_gbps * 1e3)
    }
}

/// The placement of the ranks of a communicator: nodes with equal numbers of consecutive ranks.
///
/// ```
/// let nodes = nccl::all_to_all::Nodes::new(64, 8)?;
/// assert_eq!(nodes.count(), 8);
/// assert!(nccl::all_to_all::Nodes::new(64, 7).is_err());
/// # Ok::<(), nccl::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Nodes {
    ranks: usize,
    ranks_per_node: usize,
}

impl Nodes {
    /// Divides `ranks` into nodes of `ranks_per_node`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidConfig`] when the ranks cannot be divided in this way.
    ///
    /// ```
    /// let one = nccl::all_to_all::Nodes::new(8, 8)?;
    /// assert_eq!(one.count(), 1);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn new(ranks: usize, ranks_per_node: usize) -> Result<Self> {
        if ranks_per_node == 0 || !ranks.is_multiple_of(ranks_per_node) {
            return Err(Error::new(ErrorKind::InvalidConfig {
                field: "ranks_per_node",
                reason: format!("{ranks} ranks cannot be divided into nodes of {ranks_per_node}"),
            }));
        }
        Ok(Self {
            ranks,
            ranks_per_node,
        })
    }

    /// Returns the number of ranks.
    ///
    /// ```
    /// assert_eq!(nccl::all_to_all::Nodes::new(16, 8)?.ranks(), 16);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Returns the number of ranks on each node.
    ///
    /// ```
    /// assert_eq!(nccl::all_to_all::Nodes::new(16, 8)?.ranks_per_node(), 8);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn ranks_per_node(&self) -> usize {
        self.ranks_per_node
    }

    /// Returns the number of nodes.
    ///
    /// ```
    /// assert_eq!(nccl::all_to_all::Nodes::new(16, 8)?.count(), 2);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn count(&self) -> usize {
        self.ranks / self.ranks_per_node
    }
}

/// The costs of a group, a message and a byte, from which [`Algorithm::Auto`] chooses.
///
/// The JSON form, for [`read`](Self::read) and serde:
///
/// ```
/// let text = r#"{
///     "launch_us": 6.3,
///     "inside": { "message_us": 0.69, "bandwidth_gbps": 370.0 },
///     "wire_us": 12.0,
///     "between": { "message_us": 0.3, "bandwidth_gbps": 45.0 },
///     "copy_us": 2.0,
///     "copied_gbps": 1500.0
/// }"#;
/// let model: nccl::all_to_all::CostModel = serde_json::from_str(text)?;
/// assert_eq!(model, nccl::all_to_all::CostModel::published());
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostModel {
    /// The time of a group from the call until its first bytes move, µs.
    pub launch_us: f64,
    /// Messages between ranks of a node.
    pub inside: LinkCost,
    /// The latency from one node to another, µs.
    pub wire_us: f64,
    /// Messages between ranks of different nodes.
    pub between: LinkCost,
    /// The cost of a copy of rows on the device, whatever their number, µs.
    pub copy_us: f64,
    /// The rate of such a copy, 10⁹ bytes/s.
    pub copied_gbps: f64,
}

impl Default for CostModel {
    /// [`published`](Self::published).
    fn default() -> Self {
        Self::published()
    }
}

impl CostModel {
    /// Returns constants fitted to published results of NCCL on GPUs with NVLink and a network adapter each: `launch` and `inside`
    /// to the times of NCCL's all-to-all on 8 and 32 GB200 (`contrib/custom_algos/alltoall` in NVIDIA/nccl), `between` to the
    /// shape of one-token exchanges of `torch` over InfiniBand in perplexity's pplx-kernels; the rest are estimates.
    ///
    /// ```
    /// assert!(nccl::all_to_all::CostModel::published().launch_us > 0.0);
    /// ```
    #[must_use]
    pub const fn published() -> Self {
        Self {
            launch_us: 6.3,
            inside: LinkCost {
                message_us: 0.69,
                bandwidth_gbps: 370.0,
            },
            wire_us: 12.0,
            between: LinkCost {
                message_us: 0.3,
                bandwidth_gbps: 45.0,
            },
            copy_us: 2.0,
            copied_gbps: 1500.0,
        }
    }

    /// Reads the constants from a JSON file.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidConfig`] when the file cannot be read, is not JSON in this form, or has a constant that is
    /// not a positive number.
    ///
    /// ```
    /// let error = nccl::all_to_all::CostModel::read("no/such/file.json").unwrap_err();
    /// assert!(error.to_string().contains("no/such/file.json"));
    /// ```
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let invalid = |why: String| {
            Error::new(ErrorKind::InvalidConfig {
                field: "cost model",
                reason: format!("{}: {why}", path.display()),
            })
        };
        let text = std::fs::read_to_string(path).map_err(|error| invalid(error.to_string()))?;
        let model: Self =
            serde_json::from_str(&text).map_err(|error| invalid(error.to_string()))?;
        model.check().map_err(invalid)?;
        Ok(model)
    }

    pub(super) fn check(&self) -> std::result::Result<(), String> {
        for (name, value) in self.constants() {
            if !(value.is_finite() && value > 0.0) {
                return Err(format!("{name} is {value}, and has to be more than 0"));
            }
        }
        Ok(())
    }

    /// Returns the constants with their names.
    fn constants(&self) -> [(&'static str, f64); 8] {
        [
            ("launch_us", self.launch_us),
            ("inside.message_us", self.inside.message_us),
            ("inside.bandwidth_gbps", self.inside.bandwidth_gbps),
            ("wire_us", self.wire_us),
            ("between.message_us", self.between.message_us),
            ("between.bandwidth_gbps", self.between.bandwidth_gbps),
            ("copy_us", self.copy_us),
            ("copied_gbps", self.copied_gbps),
        ]
    }

    /// Returns how long an all-to-all of `bytes` from each rank to each other takes, µs; `None` if the algorithm cannot be
    /// used, and for [`Algorithm::Auto`].
    ///
    /// ```
    /// use nccl::all_to_all::{AllToAllAlgorithm as By, CostModel, Nodes};
    ///
    /// let (model, nodes) = (CostModel::published(), Nodes::new(1024, 8)?);
    /// let time = |by| model.microseconds(by, nodes, 64).unwrap();
    /// assert!(time(By::TwoLevel) < time(By::Grouped)); // many small messages
    /// assert!(model.microseconds(By::Auto, nodes, 64).is_none());
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn microseconds(&self, algorithm: Algorithm, nodes: Nodes, bytes: u64) -> Option<f64> {
        let outside = nodes.ranks - nodes.ranks_per_node;
        Some(match algorithm {
            Algorithm::Native | Algorithm::Grouped | Algorithm::CopyEngine => {
                self.direct(nodes, outside, 1, bytes)
            }
            Algorithm::Chunked { pieces } => self.direct(nodes, outside, pieces.get(), bytes),
            Algorithm::Pairwise { width } => self.pairwise(nodes, width.get(), bytes),
            Algorithm::TwoLevel => {
                if nodes.count() == 1 || nodes.ranks_per_node == 1 {
                    return None;
                }
                let [apart, packed] =
                    [false, true].map(|packed| self.two_level(nodes, packed, bytes));
                apart.min(packed)
            }
            Algorithm::Auto => return None,
        })
    }

    /// Like [`microseconds`](Self::microseconds), for unequal parts of `bytes` on average, which are not packed inside
    /// a node. `scattered`: the parts are not contiguous in the receive buffer, and have to be moved there.
    pub(super) fn microseconds_of_parts(
        &self,
        algorithm: Algorithm,
        nodes: Nodes,
        bytes: u64,
        scattered: bool,
    ) -> Option<f64> {
        let time = self.microseconds(algorithm, nodes, bytes)?;
        if algorithm != Algorithm::TwoLevel {
            return Some(time);
        }
        let outside = (nodes.ranks - nodes.ranks_per_node) as f64;
        let moved = match scattered {
            true => outside * (self.copy_us + bytes as f64 / (self.copied_gbps * 1e3)),
            false => 0.0,
        };
        Some(self.two_level(nodes, false, bytes) + moved)
    }

    fn inside(&self, nodes: Nodes, each: usize, bytes: u64) -> f64 {
        (each * (nodes.ranks_per_node - 1)) as f64 * self.inside.in_turn(bytes)
    }

    fn between(&self, messages: usize, bytes: u64) -> f64 {
        match messages {
            0 => 0.0,
            _ => self.wire_us + messages as f64 * self.between.overlapped(bytes),
        }
    }

    fn direct(&self, nodes: Nodes, outside: usize, pieces: usize, bytes: u64) -> f64 {
        let piece = bytes.div_ceil(pieces as u64);
        let inside = self.inside(nodes, pieces, piece);
        let between = self.between(outside * pieces, piece);
        pieces as f64 * self.launch_us + inside.max(between)
    }

    fn pairwise(&self, nodes: Nodes, width: usize, bytes: u64) -> f64 {
        let groups = nodes.ranks.div_ceil(width);
        let outside = nodes.ranks - nodes.ranks_per_node;
        // The maximum number of groups with a peer on another node.
        let waits = groups.min(outside) as f64;
        let inside = self.inside(nodes, 1, bytes);
        let between = outside as f64 * self.between.overlapped(bytes);
        groups as f64 * self.launch_us + waits * self.wire_us + inside.max(between)
    }

    /// Whether packing the blocks for one neighbour is faster than sending them one by one.
    pub(super) fn packs(&self, nodes: Nodes, bytes: u64) -> bool {
        self.two_level(nodes, true, bytes) < self.two_level(nodes, false, bytes)
    }

    fn two_level(&self, nodes: Nodes, packed: bool, bytes: u64) -> f64 {
        let (count, local) = (nodes.count(), nodes.ranks_per_node);
        let between = self.between(count - 1, local as u64 * bytes);
        let inside = match packed {
            false => self.inside(nodes, count, bytes),
            true => {
                let moved = 2 * nodes.ranks as u64 * bytes;
                let copies = 2.0 * local as f64 * self.copy_us;
                let copied = moved as f64 / (self.copied_gbps * 1e3);
                self.inside(nodes, 1, count as u64 * bytes) + copies + copied
            }
        };
        2.0 * self.launch_us + inside + between
    }

    /// Returns the number of bytes per pair from which two levels are no longer faster; `None` if they never are.
    ///
    /// ```
    /// use nccl::all_to_all::{CostModel, Nodes};
    ///
    /// let model = CostModel::published();
    /// assert_eq!(model.crossover(Nodes::new(8, 8)?), None);
    /// assert!(model.crossover(Nodes::new(512, 8)?).unwrap() > 1 << 10);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn crossover(&self, nodes: Nodes) -> Option<u64> {
        let wins = |bytes| {
            let two = self.microseconds(Algorithm::TwoLevel, nodes, bytes)?;
            Some(two < self.microseconds(Algorithm::Grouped, nodes, bytes)?)
        };
        wins(1)?.then(|| {
            let (mut wins_at, mut loses_at) = (1u64, 1u64 << 40);
            while loses_at - wins_at > 1 {
                let middle = wins_at + (loses_at - wins_at) / 2;
                match wins(middle) {
                    Some(true) => wins_at = middle,
                    _ => loses_at = middle,
                }
            }
            loses_at
        })
    }
}

impl fmt::Display for CostModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "launch {} µs; inside a node {} µs a message, {} GB/s; between nodes {} µs, {} µs a message, {} GB/s; copies \
             {} µs, {} GB/s",
            self.launch_us,
            self.inside.message_us,
            self.inside.bandwidth_gbps,
            self.wire_us,
            self.between.message_us,
            self.between.bandwidth_gbps,
            self.copy_us,
            self.copied_gbps
        )
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;
    use Algorithm::{Grouped, TwoLevel};

    const MODEL: CostModel = CostModel::published();

    fn time(algorithm: Algorithm, ranks: usize, bytes: u64) -> f64 {
        let nodes = Nodes::new(ranks, ranks.min(8)).unwrap();
        MODEL.microseconds(algorithm, nodes, bytes).unwrap()
    }

    #[test]
    fn small_messages_of_one_node_take_what_was_published() {
        // 16 bytes for each pair on 8 GPUs: 11.75 us; 4 KiB: 13.1.
        assert!((time(Grouped, 8, 16) - 11.75).abs() < 1.0);
        assert!((time(Grouped, 8, 4096) - 13.1).abs() < 2.0);
    }

    #[test]
    fn more_ranks_and_more_bytes_never_take_less() {
        let sizes = [1, 64, 1 << 10, 16 << 10, 256 << 10, 4 << 20];
        let one = NonZeroUsize::MIN;
        let four = NonZeroUsize::new(4).unwrap();
        for algorithm in [
            Grouped,
            TwoLevel,
            Algorithm::Chunked { pieces: four },
            Algorithm::Pairwise { width: one },
        ] {
            for ranks in [16, 32, 64, 256, 1024, 4096] {
                for pair in sizes.windows(2) {
                    let (less, more) = (
                        time(algorithm, ranks, pair[0]),
                        time(algorithm, ranks, pair[1]),
                    );
                    assert!(less <= more, "{algorithm} of {ranks} ranks: {pair:?}");
                }
                for bytes in sizes {
                    let (less, more) = (
                        time(algorithm, ranks, bytes),
                        time(algorithm, 2 * ranks, bytes),
                    );
                    assert!(less <= more, "{algorithm} of {bytes} bytes: {ranks} ranks");
                }
            }
        }
    }

    #[test]
    fn two_levels_win_with_many_nodes_and_little_data_and_up_to_one_crossover() {
        for ranks in [256, 512, 1024, 4096] {
            let nodes = Nodes::new(ranks, 8).unwrap();
            let at = MODEL.crossover(nodes).unwrap();
            assert!(time(TwoLevel, ranks, at / 2) < time(Grouped, ranks, at / 2));
            assert!(time(TwoLevel, ranks, at * 2) > time(Grouped, ranks, at * 2));
        }
        let few = Nodes::new(16, 8).unwrap();
        assert_eq!(MODEL.crossover(few), None);
        let alone = Nodes::new(8, 8).unwrap();
        assert!(MODEL.microseconds(TwoLevel, alone, 1).is_none());
    }

    /// Without packing there is a message for each block inside the node, which costs more than it saves outside.
    #[test]
    fn unequal_parts_are_not_counted_as_packed() {
        for ranks in [256, 1024] {
            let nodes = Nodes::new(ranks, 8).unwrap();
            let of_parts = |algorithm, scattered| {
                let time = MODEL.microseconds_of_parts(algorithm, nodes, 64, scattered);
                time.unwrap()
            };
            assert!(time(TwoLevel, ranks, 64) < time(Grouped, ranks, 64));
            assert!(of_parts(TwoLevel, false) > of_parts(Grouped, false));
            assert!(of_parts(TwoLevel, true) > of_parts(TwoLevel, false));
            assert_eq!(of_parts(Grouped, true), time(Grouped, ranks, 64));
        }
    }

    #[test]
    fn constants_that_are_no_positive_numbers_are_refused_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model.json");
        let with = |field: &str, value: &str| {
            let text = serde_json::to_string(&MODEL).unwrap();
            let text = text.replace(field, value);
            std::fs::write(&path, text).unwrap();
            CostModel::read(&path).unwrap_err().to_string()
        };
        assert!(with("12.0", "0.0").contains("wire_us is 0, and has to be more than 0"));
        assert!(with("45.0", "-1").contains("between.bandwidth_gbps is -1"));
        assert!(with("wire_us", "wire").contains("unknown field `wire`"));
        assert!(with("{", "").contains("model.json"));
    }
}
