//! The machine of a measurement: its description in pages of results, and which rank runs on which core.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::bench::HostCopy;

/// The cores that the calling thread may use, ascending.
///
/// # Errors
/// When the kernel refuses.
pub fn cores() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|&core| set.is_set(core))
        .collect())
}

/// The core of a rank: ranks take the cores in turns.
///
/// ```
/// let cores = [0, 2, 3];
/// assert_eq!((0..4).map(|rank| nccl_tools::machine::core_of(rank, &cores)).collect::<Vec<_>>(), [0, 2, 3, 0]);
/// ```
///
/// # Panics
/// Without cores.
#[must_use]
pub fn core_of(rank: usize, cores: &[usize]) -> usize {
    cores[rank % cores.len()]
}

/// Binds the calling thread, and threads that it starts from now on, to the core of a rank.
///
/// # Errors
/// The kernel's.
pub fn bind(rank: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(core_of(rank, &cores()?));
    Ok(sched_setaffinity(None, &set)?)
}

/// The load averages of one, five and fifteen minutes: how many threads wanted a core at a time.
#[must_use]
pub fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).collect::<Vec<_>>().join(", ")
}

/// The processor, how many cores of it this process may use, and the system, in one line.
#[must_use]
pub fn line() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let processors = read("/proc/cpuinfo");
    let model = processors
        .lines()
        .find_map(|line| line.strip_prefix("model name"));
    let model = model.map_or("unknown processor", |model| {
        model.trim_start_matches([' ', '\t', ':'])
    });
    let kind = if processors.contains("hypervisor") {
        ", a virtual machine"
    } else {
        ""
    };
    format!(
        "{} cores ({model}){kind}, Linux {}, huge pages of shared memory: {}",
        cores().map_or(0, |cores| cores.len()),
        read("/proc/sys/kernel/osrelease").trim(),
        HostCopy::huge_pages()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_bound_to_the_core_of_its_rank_and_others_are_not() {
        let before = cores().unwrap();
        std::thread::scope(|scope| {
            let bound = scope.spawn(|| {
                bind(1).unwrap();
                cores().unwrap()
            });
            assert_eq!(bound.join().unwrap(), [core_of(1, &before)]);
        });
        assert_eq!(cores().unwrap(), before);
    }

    #[test]
    fn the_load_is_three_numbers() {
        let load = load();
        let numbers: Vec<f64> = load
            .split(", ")
            .map(|number| number.parse().unwrap())
            .collect();
        assert_eq!(numbers.len(), 3);
    }
}
