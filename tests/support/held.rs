//! What a process holds, for tests that nothing grows.

/// What a process holds.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// Without those of roots of inits that not all ranks joined.
    pub descriptors: usize,
    /// Without the roots themselves.
    pub threads: usize,
    /// Memory of its own, in KiB.
    pub anonymous: u64,
    /// Memory that it shares, as devices' memory is, in KiB.
    pub shared: u64,
}

/// What this process holds now.
///
/// # Errors
/// When `/proc` does not say.
pub fn held() -> Result<Held, Box<dyn std::error::Error>> {
    let entries = |path: &str| Ok::<_, std::io::Error>(std::fs::read_dir(path)?.count());
    let status = std::fs::read_to_string("/proc/self/status")?;
    let kibibytes = |field: &str| -> Result<u64, Box<dyn std::error::Error>> {
        let line = status.lines().find_map(|line| line.strip_prefix(field));
        let number = line.and_then(|line| line.split_whitespace().next());
        Ok(number.ok_or("a field is missing")?.parse()?)
    };
    // An init that some rank does not join leaves NCCL's root behind, a thread with a socket, which no call
    // can end; the emulator has that from NCCL.
    let names = std::fs::read_dir("/proc/self/task")?.flatten();
    let roots = names
        .filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok())
        .filter(|name| name.trim() == "nccl-root")
        .count();
    Ok(Held {
        descriptors: entries("/proc/self/fd")?.saturating_sub(roots),
        threads: entries("/proc/self/task")?.saturating_sub(roots),
        anonymous: kibibytes("RssAnon:")?,
        shared: kibibytes("RssShmem:")?,
    })
}

impl Held {
    /// Whether this is more than `before`, and not by what comes and goes.
    pub fn is_more_than(&self, before: &Self) -> bool {
        // Devices' memory is given out elsewhere each time, so ever more of it has been touched once.
        let grown = |before: u64, after: u64| after > before + before / 10 + (64 << 10);
        self.descriptors > before.descriptors + 4
            || self.threads > before.threads + 8
            || grown(before.anonymous, self.anonymous)
            || grown(before.shared, self.shared)
    }
}
