//! The resources of a process: descriptors, threads, mappings, memory.

use std::time::{Duration, Instant};

/// The resources of a process that may leak.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Belongings {
    descriptors: usize,
    threads: usize,
    mappings: usize,
    /// Its private memory, and that of its device, which other ranks can see.
    own_kib: usize,
    device_kib: usize,
}

impl Belongings {
    /// Returns the present resources of a process.
    pub(crate) fn of(pid: u32) -> Self {
        let read = |what: &str| std::fs::read_to_string(format!("/proc/{pid}/{what}")).unwrap();
        let count = |what: &str| {
            let entries = std::fs::read_dir(format!("/proc/{pid}/{what}"));
            entries.unwrap().count()
        };
        let status = read("status");
        // Without mapped files: pages of the program's own code are loaded on demand.
        let kib = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|line| line.split_whitespace().next());
            number.and_then(|number| number.parse().ok()).unwrap_or(0)
        };
        Self {
            descriptors: count("fd"),
            threads: count("task"),
            mappings: read("maps").lines().count(),
            own_kib: kib("RssAnon:"),
            device_kib: kib("RssShmem:"),
        }
    }

    fn least(self, other: Self) -> Self {
        Self {
            descriptors: self.descriptors.min(other.descriptors),
            threads: self.threads.min(other.threads),
            mappings: self.mappings.min(other.mappings),
            own_kib: self.own_kib.min(other.own_kib),
            device_kib: self.device_kib.min(other.device_kib),
        }
    }
}

/// The time for connections, and for threads that wait for more work, to end by themselves.
const A_WHILE: Duration = Duration::from_secs(15);

/// Returns the resources of a process once they have not changed for a moment.
pub(crate) fn settled(pid: u32) -> Belongings {
    let mut least = Belongings::of(pid);
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(50));
        least = least.least(Belongings::of(pid));
    }
    least
}

/// Waits until a process has at most slightly more resources than before: a leak in each recovery would occur at least five
/// times. `quarantine_kib` is freed memory of its device that the emulator may keep in quarantine to detect late uses.
pub(crate) fn nothing_is_left(what: &str, pid: u32, before: Belongings, quarantine_kib: usize) {
    let most = Belongings {
        descriptors: before.descriptors + 4,
        threads: before.threads + 4,
        mappings: before.mappings + 40,
        own_kib: before.own_kib + 5 * 1024,
        device_kib: before.device_kib + 5 * 1024 + quarantine_kib,
    };
    let begun = Instant::now();
    let mut least = Belongings::of(pid);
    loop {
        least = least.least(Belongings::of(pid));
        if least.least(most) == least {
            println!("{what}: {before:?}, later {least:?}");
            return;
        }
        assert!(
            begun.elapsed() < A_WHILE,
            "{what} (pid {pid}) keeps something each time: {before:?} at first, {least:?} later",
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}
