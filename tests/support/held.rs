//! Resources of a process, for tests that nothing grows.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI64, Ordering};

/// An allocator that counts bytes in use. A test that reads [`heap`] installs it:
///
/// ```ignore
/// #[global_allocator]
/// static ALLOCATOR: support::held::Counted = support::held::Counted;
/// ```
pub struct Counted;

static IN_USE: AtomicI64 = AtomicI64::new(0);

/// Bytes on the heap of this process that Rust code has in use: exact, unlike the size of a process.
pub fn heap() -> i64 {
    IN_USE.load(Ordering::Relaxed)
}

fn count(more: usize, less: usize) {
    IN_USE.fetch_add(more as i64 - less as i64, Ordering::Relaxed);
}

// SAFETY: the system's allocator does all the work.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: passes on the caller's promise.
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

/// The growth from sample to sample: the median of the slopes between all pairs, which is robust against outliers.
/// `None` for fewer than two.
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

/// The resources of a process.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// Without those of the roots of inits that not all ranks joined.
    pub descriptors: usize,
    /// Without the threads of those roots.
    pub threads: usize,
    /// Private memory, in KiB.
    pub anonymous: u64,
    /// Shared memory, such as that of devices, in KiB.
    pub shared: u64,
    /// Communicators whose memory is mapped, on the emulator; each is mapped once.
    pub segments: usize,
}

/// The current resources of this process.
///
/// # Errors
/// When `/proc` cannot be read.
pub fn held() -> Result<Held, Box<dyn std::error::Error>> {
    let entries = |path: &str| Ok::<_, std::io::Error>(std::fs::read_dir(path)?.count());
    let status = std::fs::read_to_string("/proc/self/status")?;
    let kibibytes = |field: &str| -> Result<u64, Box<dyn std::error::Error>> {
        let line = status.lines().find_map(|line| line.strip_prefix(field));
        let number = line.and_then(|line| line.split_whitespace().next());
        Ok(number.ok_or("a field is missing")?.parse()?)
    };
    // An init that some rank does not join leaves NCCL's root behind, a thread with a socket, which no call can end;
    // the emulator does the same.
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
    /// Whether this is more than `before`, beyond fluctuations.
    pub fn is_more_than(&self, before: &Self) -> bool {
        // Device memory is allocated at other places each time, so that more and more of it has been touched once.
        let grown = |before: u64, after: u64| after > before + before / 10 + (64 << 10);
        self.descriptors > before.descriptors + 4
            || self.threads > before.threads + 8
            || grown(before.anonymous, self.anonymous)
            || grown(before.shared, self.shared)
    }
}
