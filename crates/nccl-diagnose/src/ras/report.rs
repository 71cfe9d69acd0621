//! The answer of a RAS thread, from its JSON.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What one RAS thread of a job has learned from the others (NCCL 2.28.7 and newer).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct RasReport {
    /// The release of the library that answered, such as `2.32.3+cuda13.0`.
    pub nccl_version: String,
    /// The communicators of the job.
    pub communicators: Vec<RasCommunicator>,
    /// How the answers were collected.
    ras: Collection,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Collection {
    collection_time_sec: f64,
    timeouts_count: u64,
}

/// A communicator, as RAS reports it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct RasCommunicator {
    /// NCCL's number of the communicator, in hexadecimal, as in its log (`commId`).
    pub hash: String,
    /// Number of its ranks.
    pub size: usize,
    /// The ranks that answered.
    pub ranks: Vec<RasRank>,
    /// The ranks that did not answer.
    pub missing_ranks: Vec<MissingRasRank>,
}

/// A rank that answered.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct RasRank {
    /// Its rank in the communicator.
    pub rank: usize,
    /// The address of its host.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// Its device, as CUDA counts in that process.
    pub cuda_dev: i32,
    /// Its device, as NVML counts on that host.
    pub nvml_dev: i32,
    /// State of the communicator on this rank.
    pub status: RasStatus,
    /// For each collective (`AllReduce`), how many it has launched.
    pub collective_counts: BTreeMap<String, u64>,
}

/// State of a communicator on a rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct RasStatus {
    /// The `ncclResult_t` of its initialization; 7 while it is in progress.
    pub init_state: i32,
    /// Its asynchronous error (`ncclResult_t`).
    pub async_error: i32,
    /// Whether `ncclCommFinalize` was called.
    pub finalize_called: bool,
    /// Whether `ncclCommDestroy` was called.
    pub destroy_flag: bool,
    /// Whether it is being aborted.
    pub abort_flag: bool,
}

/// A rank that did not answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct MissingRasRank {
    /// Its rank in the communicator.
    pub rank: usize,
    /// The address of its host.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// Its state.
    pub status: MissingStatus,
}

/// State of a rank that did not answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct MissingStatus {
    /// Its RAS thread did not answer in time.
    pub unresponsive: bool,
    /// RAS considers its process dead.
    pub considered_dead: bool,
}

/// A rank that has launched fewer collectives of a kind than others.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LaggingRank {
    /// The communicator's number (`hash`).
    pub communicator: String,
    /// Its rank there.
    pub rank: usize,
    /// Its process.
    pub pid: u32,
    /// The collective, such as `AllReduce`.
    pub function: String,
    /// How many of these it has launched.
    pub launched: u64,
    /// The most that a rank has launched.
    pub most: u64,
}

impl RasReport {
    /// Reads the JSON that a RAS thread answers.
    pub(super) fn from_json(text: &str) -> serde_json::Result<Self> {
        serde_json::from_str(text)
    }

    /// Returns how long the collection took, in seconds.
    ///
    /// ```
    /// fn show(report: &nccl::ras::RasReport) -> String {
    ///     format!("collected in {:.1} s", report.collection_seconds())
    /// }
    /// ```
    #[must_use]
    pub fn collection_seconds(&self) -> f64 {
        self.ras.collection_time_sec
    }

    /// Returns the ranks that have launched fewer collectives of a kind than other ranks of their communicator, in the
    /// order of communicators, kinds and ranks. A rank that is one behind may only be slow: the ranks were not queried
    /// at the same moment.
    ///
    /// ```
    /// fn show(report: &nccl::ras::RasReport) {
    ///     for rank in report.lagging() {
    ///         println!("process {}: {} of {} {}", rank.pid, rank.launched, rank.most, rank.function);
    ///     }
    /// }
    /// ```
    #[must_use]
    pub fn lagging(&self) -> Vec<LaggingRank> {
        let mut found = Vec::new();
        for communicator in &self.communicators {
            let mut most: BTreeMap<&str, u64> = BTreeMap::new();
            for (function, &count) in communicator
                .ranks
                .iter()
                .flat_map(|one| &one.collective_counts)
            {
                let so_far = most.entry(function).or_default();
                *so_far = count.max(*so_far);
            }
            for (function, most) in most {
                for rank in &communicator.ranks {
                    let launched = rank.collective_counts.get(function);
                    let launched = launched.copied().unwrap_or_default();
                    if launched < most {
                        found.push(LaggingRank {
                            communicator: communicator.hash.clone(),
                            rank: rank.rank,
                            pid: rank.pid,
                            function: function.to_owned(),
                            launched,
                            most,
                        });
                    }
                }
            }
        }
        found
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// The answer of a library of three ranks, of which rank 1 has launched one all-reduce less and rank 2 is stopped.
    pub(in crate::ras) const ANSWER: &str = r#"{
  "nccl_version": "2.32.3+cuda13.0",
  "cuda_runtime_version": 13000,
  "cuda_driver_version": 13000,
  "timestamp": "2026-11-27 08:49:28",
  "communicators_count": 1,
  "communicators": [
    {
      "hash": "0x8f1ba1b2c3d4",
      "secondary_hash": "0x1:0x2",
      "size": 3,
      "ranks_count": 2,
      "missing_ranks_count": 1,
      "ranks": [
        {
          "rank": 0, "host": "10.0.0.5", "pid": 4711, "cuda_dev": 0, "nvml_dev": 3,
          "status": { "init_state": 0, "async_error": 0, "finalize_called": false, "destroy_flag": false, "abort_flag": false },
          "collective_counts": { "Broadcast": 0, "AllReduce": 2 }
        },
        {
          "rank": 1, "host": "10.0.0.5", "pid": 4712, "cuda_dev": 1, "nvml_dev": 4,
          "status": { "init_state": 0, "async_error": 0, "finalize_called": false, "destroy_flag": false, "abort_flag": true },
          "collective_counts": { "Broadcast": 0, "AllReduce": 1 }
        }
      ],
      "missing_ranks": [
        { "rank": 2, "host": "10.0.0.6", "pid": 99, "cuda_dev": 0, "nvml_dev": 0,
          "status": { "unresponsive": true, "considered_dead": false } }
      ]
    }
  ],
  "ras": { "collection_time_sec": 1.502, "timeouts_count": 1 }
}
"#;

    #[test]
    fn the_rank_that_launched_fewer_collectives_is_found() {
        let report = RasReport::from_json(ANSWER).unwrap();
        assert_eq!(report.nccl_version, "2.32.3+cuda13.0");
        assert!((report.collection_seconds() - 1.502).abs() < 1e-9);
        let communicator = &report.communicators[0];
        assert_eq!((communicator.size, communicator.ranks.len()), (3, 2));
        assert!(communicator.ranks[1].status.abort_flag);
        let missing = &communicator.missing_ranks[0];
        assert_eq!((missing.rank, missing.pid), (2, 99));
        assert!(missing.status.unresponsive && !missing.status.considered_dead);
        let lagging = report.lagging();
        assert_eq!(lagging.len(), 1);
        assert_eq!((lagging[0].rank, lagging[0].pid), (1, 4712));
        assert_eq!(lagging[0].function, "AllReduce");
        assert_eq!((lagging[0].launched, lagging[0].most), (1, 2));
    }

    #[test]
    fn what_a_later_release_adds_or_leaves_out_is_no_error() {
        let report = RasReport::from_json(r#"{"nccl_version": "3.0", "new": [1]}"#).unwrap();
        assert_eq!(report.nccl_version, "3.0");
        assert_eq!(report.lagging(), []);
    }
}
