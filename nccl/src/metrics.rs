//! [`stats()`](crate::stats()), passed to the recorder that the program has installed in the facade crate `metrics`.
//!
//! Issuing an operation records nothing: a sampler reads the statistics at intervals and passes on their values.
//! [`Sampler::start`] samples on a thread of its own; [`sample`] samples once, for a program that has a thread or a
//! request to do it in. Names, labels and units are in `docs/observability.md`.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // With a recorder in place, for instance metrics-exporter-prometheus:
//! let sampler = nccl::metrics::Sampler::start(std::time::Duration::from_secs(1))?;
//! # Ok(())
//! # }
//! ```

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

#[cfg(feature = "world")]
use crate::kernel_metrics;
use crate::{OperationKind, stats};
use ::metrics::{
    Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};

use crate::stats::{CommunicatorStats, Durations, NAMES, Stats, WorldStats};
use nccl_base::error::{Error, Result};
use nccl_base::fault::short_key;
use nccl_base::forked;
use nccl_base::sync::{Condvar, Mutex};
use nccl_core::recorder::{Identity, tracks};

/// Passes [`stats()`](crate::stats()) on to the recorder, once.
///
/// Durations since the previous sample are recorded as the bounds of their buckets, so they are rounded up.
///
/// ```
/// nccl::metrics::sample();
/// ```
pub fn sample() {
    let mut exported = exported().lock();
    describe();
    export(&stats(), &mut exported);
}

/// Passes the statistics on at intervals, until it is dropped.
///
/// ```
/// # fn main() -> nccl::Result<()> {
/// use std::time::Duration;
/// use nccl::metrics::Sampler;
///
/// let sampler = Sampler::start(Duration::from_secs(1))?;
/// // ... the program does its work ...
/// drop(sampler); // samples a last time
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Sampler {
    stop: Arc<StopSignal>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct StopSignal {
    stopped: Mutex<bool>,
    bell: Condvar,
}

impl Sampler {
    /// Samples now, and every `interval` from then on, on a thread of its own.
    ///
    /// # Errors
    /// [`ErrorKind::Io`](crate::ErrorKind::Io) when the system has no thread for it.
    ///
    /// ```
    /// let sampler = nccl::metrics::Sampler::start(std::time::Duration::from_millis(500))?;
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn start(interval: Duration) -> Result<Self> {
        let stop = Arc::new(StopSignal::default());
        let heard = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name(String::from("nccl-metrics"))
            .spawn(move || {
                loop {
                    sample();
                    if heard.within(interval) {
                        return;
                    }
                }
            })
            .map_err(Error::io("starting the thread that samples the metrics"))?;
        let thread = Some(thread);
        Ok(Self { stop, thread })
    }
}

impl StopSignal {
    /// Waits up to `time`; returns whether the sampler was stopped.
    fn within(&self, time: Duration) -> bool {
        let until = nccl_base::time::deadline_after(time);
        let mut stopped = self.stopped.lock();
        while !*stopped {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            self.bell.wait_for(&mut stopped, left);
        }
        true
    }
}

impl Drop for Sampler {
    /// Waits for a sample in progress, and takes a last one.
    fn drop(&mut self) {
        if forked::is_child() {
            return;
        }
        *self.stop.stopped.lock() = true;
        self.stop.bell.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.join().is_ok()
        {
            sample();
        }
    }
}

type Labels = Vec<(&'static str, String)>;

/// The values that were passed on before.
#[derive(Default)]
struct ExportedValues {
    /// Counts of each bucket, by metric and labels: the statistics have totals of durations.
    durations: HashMap<(&'static str, Labels), Vec<u64>>,
    /// Ranks for which the age of a heartbeat was passed on.
    peers: BTreeSet<usize>,
    /// Labels passed on for this process's ranks, and for its communicators.
    ranks: BTreeSet<Labels>,
    communicators: BTreeSet<Labels>,
    #[cfg(feature = "world")]
    kernels: BTreeSet<kernel_metrics::Series>,
}

fn exported() -> &'static Mutex<ExportedValues> {
    static EXPORTED: std::sync::OnceLock<Mutex<ExportedValues>> = std::sync::OnceLock::new();
    EXPORTED.get_or_init(Mutex::default)
}

fn describe() {
    #[cfg(feature = "world")]
    kernel_metrics::describe();
    let count = Unit::Count;
    describe_counter!(
        "nccl_calls_total",
        count,
        "Calls that have a sequence number, by communicator and kind"
    );
    describe_counter!(
        "nccl_ops_total",
        count,
        "Operations handed to NCCL, by communicator and kind"
    );
    describe_counter!(
        "nccl_bytes_total",
        Unit::Bytes,
        "Bytes of their data, by communicator and kind"
    );
    describe_counter!("nccl_groups_total", count, "Groups, by communicator");
    describe_counter!(
        "nccl_graph_replays_total",
        count,
        "Launches of captured plans, by communicator"
    );
    describe_counter!(
        "nccl_faults_total",
        count,
        "Communicators ended by a fault, by its class"
    );
    describe_counter!("nccl_aborts_total", count, "Aborts, by how they ended");
    describe_counter!(
        "nccl_leaked_communicators_total",
        count,
        "Communicators that NCCL has not given back"
    );
    describe_counter!(
        "nccl_strangers_total",
        count,
        "Connections that were refused"
    );
    describe_gauge!(
        "nccl_world_generation",
        count,
        "The generation of the world"
    );
    describe_gauge!(
        "nccl_world_ranks",
        count,
        "Ranks of the world, by how they stand"
    );
    describe_gauge!(
        "nccl_communicators",
        count,
        "Communicators that there are, by whether they can be used"
    );
    describe_gauge!(
        "nccl_oldest_pending_seconds",
        Unit::Seconds,
        "For how long the oldest call that is not done has been; 0 for none"
    );
    describe_gauge!(
        "nccl_queue_depth",
        count,
        "Calls that were issued and are not known to be done"
    );
    describe_gauge!(
        "nccl_peer_heartbeat_age_seconds",
        Unit::Seconds,
        "For how long another process of the world has not been heard"
    );
    describe_gauge!("nccl_info", count, "Which libnccl is loaded; always 1");
    describe_gauge!(
        "nccl_rank_info",
        count,
        "Which rank of the world this process is, and as what its launcher started it; 1, or NaN of the past"
    );
    describe_gauge!(
        "nccl_communicator_info",
        count,
        "Which ranks a communicator has; 1, or NaN when it has ended"
    );
    describe_histogram!(
        "nccl_enqueue_seconds",
        Unit::Seconds,
        "From a call to its work on the stream, of one call in 64, by kind"
    );
    describe_counter!(
        "nccl_stragglers_total",
        count,
        "Ranks that had not entered an operation in which others waited"
    );
    describe_histogram!(
        "nccl_arrival_skew_seconds",
        Unit::Seconds,
        "How far apart the ranks entered a collective, sampled, by communicator"
    );
    describe_histogram!(
        "nccl_op_seconds",
        Unit::Seconds,
        "Calls on their stream, with the wait for other ranks; of some of them, by communicator and kind"
    );
    describe_histogram!(
        "nccl_detect_seconds",
        Unit::Seconds,
        "From the call of an operation that was given up to its cause"
    );
    describe_histogram!(
        "nccl_recover_seconds",
        Unit::Seconds,
        "From a fault to the next communicator"
    );
    describe_histogram!(
        "nccl_init_seconds",
        Unit::Seconds,
        "The making of communicators"
    );
    describe_histogram!(
        "nccl_abort_seconds",
        Unit::Seconds,
        "Aborts, with the wait for other ranks"
    );
}

fn export(stats: &Stats, exported: &mut ExportedValues) {
    #[cfg(feature = "world")]
    kernel_metrics::export(&mut exported.kernels);
    if let Some(library) = &stats.library {
        let labels = [
            ("version", library.version.to_string()),
            ("lib", library.path.display().to_string()),
            ("emulated", library.is_emulated.to_string()),
        ];
        gauge!("nccl_info", &labels).set(1.0);
    }
    stats.communicators.iter().for_each(communicator);
    world(&stats.worlds, &mut exported.peers);
    info(
        "nccl_rank_info",
        own_ranks(&stats.worlds),
        &mut exported.ranks,
    );
    info(
        "nccl_communicator_info",
        communicators(),
        &mut exported.communicators,
    );
    let faults = [
        ("failed", stats.faults.failed),
        ("timed_out", stats.faults.timed_out),
        ("asked", stats.faults.asked),
        ("gone", stats.faults.gone),
        ("revoked", stats.faults.revoked),
        ("cut_off", stats.faults.cut_off),
    ];
    for (class, number) in faults {
        counter!("nccl_faults_total", "class" => class).absolute(number);
    }
    counter!("nccl_aborts_total", "result" => "freed").absolute(stats.aborts_freed);
    counter!("nccl_aborts_total", "result" => "leaked").absolute(stats.aborts_leaked);
    counter!("nccl_leaked_communicators_total").absolute(stats.leaked_communicators);
    counter!("nccl_stragglers_total").absolute(stats.stragglers);
    counter!("nccl_strangers_total").absolute(stats.strangers);
    let mut durations = |metric, labels: Labels, durations: &Durations| {
        let histogram = histogram!(metric, &labels);
        let before = exported.durations.entry((metric, labels)).or_default();
        before.resize(durations.buckets().count(), 0);
        for ((at_most, count), before) in durations.buckets().zip(before) {
            let new = count.saturating_sub(*before);
            *before = count;
            if new > 0 {
                let longest = at_most.min(durations.longest);
                histogram.record_many(longest.as_secs_f64(), new as usize);
            }
        }
    };
    durations("nccl_init_seconds", Labels::new(), &stats.init);
    durations("nccl_abort_seconds", Labels::new(), &stats.abort);
    durations("nccl_detect_seconds", Labels::new(), &stats.detect);
    durations("nccl_recover_seconds", Labels::new(), &stats.recover);
    for (kind, took) in &stats.enqueue {
        let labels = vec![("op", kind.to_string())];
        durations("nccl_enqueue_seconds", labels, took);
    }
    for comm in &stats.communicators {
        let samples = &comm.arrival_skew.samples;
        if samples.count > 0 {
            let labels = vec![("comm", comm.name.clone())];
            durations("nccl_arrival_skew_seconds", labels, samples);
        }
        for (kind, took) in &comm.took {
            let labels = vec![("comm", comm.name.clone()), ("op", kind.to_string())];
            durations("nccl_op_seconds", labels, took);
        }
    }
}

fn communicator(comm: &CommunicatorStats) {
    let name = || comm.name.clone();
    for (kind, count) in &comm.calls {
        let op = kind.to_string();
        counter!("nccl_calls_total", "comm" => name(), "op" => op).absolute(*count);
    }
    for operations in &comm.operations {
        let op = operations.kind.to_string();
        let labels = [("comm", name()), ("op", op)];
        counter!("nccl_ops_total", &labels).absolute(operations.count);
        counter!("nccl_bytes_total", &labels).absolute(operations.bytes);
    }
    counter!("nccl_groups_total", "comm" => name()).absolute(comm.calls_of(OperationKind::Group));
    counter!("nccl_graph_replays_total", "comm" => name())
        .absolute(comm.calls_of(OperationKind::Replay));
    let oldest = comm.oldest_pending.unwrap_or_default().as_secs_f64();
    gauge!("nccl_oldest_pending_seconds", "comm" => name()).set(oldest);
    gauge!("nccl_queue_depth", "comm" => name()).set(comm.queue_depth as f64);
    gauge!("nccl_communicators", "comm" => name(), "state" => "ready").set(comm.ready as f64);
    gauge!("nccl_communicators", "comm" => name(), "state" => "over").set(comm.over as f64);
}

/// Returns the ranks of the newest generation in this process.
fn own_ranks(worlds: &[WorldStats]) -> BTreeSet<Labels> {
    let newest = worlds.iter().map(|world| world.generation).max();
    let newest = worlds
        .iter()
        .filter(|world| Some(world.generation) == newest);
    newest
        .map(|world| {
            vec![
                ("rank", world.rank.to_string()),
                ("launcher_rank", number(world.launcher_rank)),
            ]
        })
        .collect()
}

/// Returns the communicators that have not ended.
fn communicators() -> BTreeSet<Labels> {
    let live = tracks()
        .into_iter()
        .filter(|track| !track.lifecycle.get().is_final());
    live.map(|track| {
        let Identity {
            name,
            rank,
            key,
            scope,
            roster,
            ..
        } = &track.identity;
        // Without a world, this rank's number in the world is unknown.
        let world_rank = scope.as_ref().map(|_| roster.world_rank(*rank));
        vec![
            ("comm", name.to_string()),
            (
                "key",
                key.as_deref().map(short_key).unwrap_or_default().to_owned(),
            ),
            ("world_ranks", roster.world_ranks().unwrap_or_default()),
            ("rank", rank.to_string()),
            ("world_rank", number(world_rank)),
        ]
    })
    .collect()
}

/// Formats a number that may not be known.
fn number(number: Option<usize>) -> String {
    number.map_or_else(String::new, |number| number.to_string())
}

/// Sets the series in `now` to 1, and the `exported` series that are no longer in `now` to NaN: a series cannot be
/// removed. Passes on at most [`NAMES`] series of a metric during the life of the process.
fn info(metric: &'static str, now: BTreeSet<Labels>, exported: &mut BTreeSet<Labels>) {
    for labels in exported.difference(&now) {
        gauge!(metric, labels).set(f64::NAN);
    }
    for labels in now {
        if exported.contains(&labels) || exported.len() < NAMES {
            gauge!(metric, &labels).set(1.0);
            exported.insert(labels);
        }
    }
}

/// Passes on the newest generation, as its lowest rank in this process sees it.
fn world(worlds: &[WorldStats], exported: &mut BTreeSet<usize>) {
    let newest = worlds
        .iter()
        .max_by_key(|world| (world.generation, std::cmp::Reverse(world.rank)));
    let Some(newest) = newest else {
        return;
    };
    let WorldStats {
        generation, ranks, ..
    } = newest;
    gauge!("nccl_world_generation").set(*generation as f64);
    let states = [
        ("present", ranks.present),
        ("left", ranks.left),
        ("failed", ranks.failed),
        ("gone", ranks.gone),
    ];
    for (state, number) in states {
        gauge!("nccl_world_ranks", "state" => state).set(number as f64);
    }
    let age = |peer: usize| gauge!("nccl_peer_heartbeat_age_seconds", "peer" => peer.to_string());
    let mut silent = std::mem::take(exported);
    for &(peer, since) in &newest.heartbeat_ages {
        age(peer).set(since.as_secs_f64());
        silent.remove(&peer);
        exported.insert(peer);
    }
    // A rank that is gone has no age; without NaN, its last age would stay.
    silent.into_iter().for_each(|peer| age(peer).set(f64::NAN));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_tells_of_its_communicators_is_bounded() {
        let labels = |number: usize| vec![("comm", number.to_string())];
        let mut exported = BTreeSet::new();
        for number in 0..2 * NAMES {
            info(
                "nccl_communicator_info",
                [labels(number)].into(),
                &mut exported,
            );
        }
        assert_eq!(exported.len(), NAMES);
        assert!(exported.contains(&labels(0)) && !exported.contains(&labels(NAMES)));
    }
}
