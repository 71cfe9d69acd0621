//! How many messages a rank has sent to, or received from, each other rank, as encoded in a report.
//!
//! The counts are mostly equal for many ranks in a row, so they are run-length encoded. If a communicator is so large
//! and its exchanges so irregular that there are more than [`RUNS`] runs, the remaining counts are left out: they are
//! unknown, and never read as zero.

use serde::{Deserialize, Serialize};

/// Maximum number of runs.
const RUNS: usize = 2048;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RunLengthCounts(Vec<(u64, usize)>);

impl RunLengthCounts {
    pub(super) fn of(counts: &[u64]) -> Self {
        let mut runs: Vec<(u64, usize)> = Vec::new();
        for &count in counts {
            let is_full = runs.len() == RUNS;
            match runs.last_mut() {
                Some((last, length)) if *last == count => *length += 1,
                _ if is_full => break,
                _ => runs.push((count, 1)),
            }
        }
        Self(runs)
    }

    /// Returns the count for `rank`; `None` where it was left out.
    pub(super) fn get(&self, rank: usize) -> Option<u64> {
        let mut left = rank;
        self.0.iter().find_map(|&(count, length)| {
            let here = left < length;
            left = left.wrapping_sub(length);
            here.then_some(count)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_told_in_runs_and_what_is_left_out_is_unknown() {
        let counts = [0, 0, 0, 7, 7, 0, 1 << 40];
        let run_length_counts = RunLengthCounts::of(&counts);
        for (rank, count) in counts.iter().enumerate() {
            assert_eq!(run_length_counts.get(rank), Some(*count), "{rank}");
        }
        assert_eq!(run_length_counts.get(counts.len()), None);
        assert_eq!(RunLengthCounts::default().get(0), None);
        let even = RunLengthCounts::of(&vec![3; 100_000]);
        assert_eq!(serde_json::to_string(&even).unwrap(), "[[3,100000]]");
        let odd: Vec<u64> = (0..100_000).collect();
        let odd = RunLengthCounts::of(&odd);
        assert_eq!(odd.get(RUNS - 1), Some(RUNS as u64 - 1));
        assert_eq!(odd.get(RUNS), None);
        assert!(serde_json::to_vec(&odd).unwrap().len() < 32 << 10);
    }
}
