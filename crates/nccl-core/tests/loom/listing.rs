//! A call on a stream that the watchdog is taking off its list and releasing.
//!
//! The list and the ring are the crate's own code. The steps of `supervision/watchdog` around them are modelled
//! here: the hot path records a call and reads the list; a call that is not covered registers the stream under the
//! lock; the watchdog checks twice, and releases the stream if both times nothing was pending and no call registered
//! it in between. loom has no time: a lock stands in for `LINGER`.

use loom::sync::atomic::{AtomicU64, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;

use crate::fast_path::FastPathFilter;
use crate::seqlock_ring::{RingSlot, SeqlockRing};

/// The address of the stream.
const STREAM: usize = 8;

#[derive(Default)]
struct Call(AtomicU64);

impl RingSlot for Call {
    type Record = u64;

    fn copy(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The state behind the watchdog's lock.
struct Registry {
    /// The watchdog keeps the stream.
    is_watched: bool,
    /// The stream was taken off the list, and no call has registered it since.
    is_idle: bool,
}

struct Communicator {
    calls: SeqlockRing<Call>,
    fast_path: FastPathFilter,
    registry: Mutex<Registry>,
    /// Held by a call from when it is recorded until it has read the list.
    half_way: Mutex<()>,
}

impl Communicator {
    fn watched() -> Arc<Self> {
        let fast_path = FastPathFilter::default();
        fast_path.reset_timeout(0);
        fast_path.list(STREAM, u64::MAX, 0);
        Arc::new(Self {
            calls: SeqlockRing::new(4),
            fast_path,
            registry: Mutex::new(Registry {
                is_watched: true,
                is_idle: false,
            }),
            half_way: Mutex::new(()),
        })
    }

    /// `Writer::begin`, and `watchdog::report_before` for a call that is not covered.
    fn call(&self, number: u64) {
        let _half_way = self.half_way.lock().unwrap();
        self.calls.begin(number, 1);
        self.calls
            .slot(number)
            .0
            .store(number + 1, Ordering::Relaxed);
        self.calls.publish(number + 1);
        if !self.fast_path.covers(STREAM, 1, 1) {
            let mut registry = self.registry.lock().unwrap();
            (registry.is_watched, registry.is_idle) = (true, false);
            self.fast_path.list(STREAM, u64::MAX, 1);
        }
    }

    /// `CommunicatorPoller::poll`: returns how many calls there are, all of which are pending.
    fn poll(&self) -> u64 {
        let read = self.calls.read();
        read.first + read.records.len() as u64
    }

    /// `WatchdogState::store_report`.
    fn store_report(&self, seen: u64) {
        let mut registry = self.registry.lock().unwrap();
        match (seen, registry.is_idle) {
            (0, false) => {
                self.fast_path.unlist(STREAM);
                registry.is_idle = true;
            }
            (0, true) => {
                registry.is_watched = false;
                self.fast_path.clear();
            }
            _ => registry.is_idle = false,
        }
    }

    /// While the watchdog waits `LINGER`, every processor makes its stores visible: a call that had begun is seen from
    /// then on, and one that begins later sees the list as it is.
    fn linger(&self) {
        drop(self.half_way.lock().unwrap());
    }
}

#[test]
fn no_call_is_missed_by_a_watchdog_that_releases_its_stream() {
    loom::model(|| {
        let comm = Communicator::watched();
        let calling = Arc::clone(&comm);
        let caller = thread::spawn(move || {
            calling.call(0);
            calling.call(1);
        });
        for _ in 0..2 {
            let seen = comm.poll();
            comm.store_report(seen);
            comm.linger();
        }
        caller.join().unwrap();
        // The stream is watched, because both calls are pending.
        let is_watched = comm.registry.lock().unwrap().is_watched;
        assert!(
            is_watched,
            "2 calls are pending, and the stream is not watched"
        );
    });
}
