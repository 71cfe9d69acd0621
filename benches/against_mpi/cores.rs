//! Which rank runs on which core.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::Outcome;

/// The cores that this thread may use, ascending.
pub(crate) fn allowed() -> Outcome<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|&core| set.is_set(core))
        .collect())
}

/// The core of a rank, of those that there are: ranks take them in turns.
pub(crate) fn of_rank(rank: usize, cores: &[usize]) -> usize {
    cores[rank % cores.len()]
}

/// Binds this thread, and those that it starts from now on, to the core of a rank.
pub(crate) fn bind(rank: usize) -> Outcome {
    let cores = allowed()?;
    let mut set = CpuSet::new();
    set.set(of_rank(rank, &cores));
    Ok(sched_setaffinity(None, &set)?)
}
