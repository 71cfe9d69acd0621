//! What a process holds, for tests that nothing grows.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI64, Ordering};

/// An allocator that knows how much is in use. A test that looks at [`heap`] has it as its own:
///
/// ```ignore
/// #[global_allocator]
/// static ALLOCATOR: support::held::Counted = support::held::Counted;
/// ```
pub struct Counted;

static IN_USE: AtomicI64 = AtomicI64::new(0);

/// Bytes on the heap of this process that Rust code has in use: exact, where the size of a process is not.
pub fn heap() -> i64 {
    IN_USE.load(Ordering::Relaxed)
}

fn count(more: usize, less: usize) {
    IN_USE.fetch_add(more as i64 - less as i64, Ordering::Relaxed);
}

// SAFETY: the system's allocator does everything.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: the caller's promise is the one that is asked for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size, layout.size());
        // SAFETY: as above.
        unsafe { System.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(0, layout.size());
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// By how much something grows from sample to sample: the median of the slopes between all pairs, which a
/// few that are far off do not move. `None` for fewer than two.
pub fn growth(samples: &[(f64, f64)]) -> Option<f64> {
    let mut slopes = Vec::new();
    for (at, (x, y)) in samples.iter().enumerate() {
        for (later, higher) in &samples[at + 1..] {
            slopes.push((higher - y) / (later - x));
        }
    }
    slopes.sort_by(f64::total_cmp);
    slopes.get(slopes.len() / 2).copied()
}

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
    /// Communicators of whose memory it has a mapping, on the emulator; it maps one once.
    pub segments: usize,
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
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let segment = |line: &&str| line.contains("/memfd:nccl-emulator:communicator");
    Ok(Held {
        descriptors: entries("/proc/self/fd")?.saturating_sub(roots),
        threads: entries("/proc/self/task")?.saturating_sub(roots),
        anonymous: kibibytes("RssAnon:")?,
        shared: kibibytes("RssShmem:")?,
        segments: maps.lines().filter(segment).count(),
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
