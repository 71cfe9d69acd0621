//! The thread that calls NVML, and the waits for its answers.
//!
//! One thread makes all NVML calls; the first question starts it. It may hang in a call, as NVML does when a device is
//! in trouble: then no further question is answered, and each caller waits until its own deadline. The thread is never
//! joined.
//!
//! ```text
//! Starting ──NVML is there, or is not──▶ Ready        a late answer is said only of a thread that is ready, or should be
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;
#[cfg(feature = "nvml")]
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TrySendError};
use std::time::{Duration, Instant};

use super::reading::{Reading, Source};
use super::state::{Devices, MOST_DEVICES, NvmlAccess, Which};

/// The variable that names another library than libnvidia-ml.so.1; `0` disables NVML.
#[cfg(feature = "nvml")]
const VARIABLE: &str = "NCCL_RUN_NVML";

/// Maximum number of questions that wait for the thread.
const MOST_WAITING: usize = 64;

/// The time in which NVML starts: some seconds where no other process keeps the driver awake.
const START: Duration = Duration::from_secs(10);

enum Request {
    Watch(String),
    Ask {
        which: Which,
        reply: SyncSender<Devices>,
    },
}

/// The handle of the thread, by which callers ask it.
pub(in crate::host_evidence) struct Worker {
    requests: SyncSender<Request>,
    begun: Instant,
    is_ready: Arc<AtomicBool>,
}

impl Worker {
    /// Starts the thread; `open` is called on it.
    pub(super) fn start<S: Source>(
        open: impl FnOnce() -> Result<S, String> + Send + 'static,
    ) -> Option<Self> {
        let (requests, waiting) = mpsc::sync_channel(MOST_WAITING);
        let is_ready = Arc::new(AtomicBool::new(false));
        let ready = Arc::clone(&is_ready);
        std::thread::Builder::new()
            .name(String::from("nccl-nvml"))
            .spawn(move || {
                let opened = open();
                ready.store(true, Ordering::Release);
                match opened {
                    Ok(source) => serve(source, &waiting),
                    Err(why) => refuse(&why, &waiting),
                }
            })
            .ok()?;
        Some(Self {
            requests,
            begun: Instant::now(),
            is_ready,
        })
    }

    /// Makes the thread record a device and its counters. Has no effect while the thread hangs.
    pub(super) fn watch(&self, bus_id: String) {
        let _ = self.requests.try_send(Request::Watch(bus_id));
    }

    pub(super) fn ask(&self, which: Which) -> Question<'_> {
        let (reply, answer) = mpsc::sync_channel(1);
        let asked = match self.requests.try_send(Request::Ask { which, reply }) {
            Ok(()) => Asked::Waiting(answer),
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => Asked::Hanging,
        };
        Question {
            to: Some((self, asked)),
        }
    }

    /// Returns the answer to a question that was not answered in time.
    fn late(&self) -> Devices {
        let should_be_ready = self.is_ready.load(Ordering::Acquire) || self.begun.elapsed() > START;
        Devices {
            access: match should_be_ready {
                true => NvmlAccess::NoAnswer,
                false => NvmlAccess::Starting,
            },
            list: Vec::new(),
        }
    }
}

enum Asked {
    Waiting(Receiver<Devices>),
    /// Too many questions are waiting.
    Hanging,
}

/// A question that NVML has not answered yet.
pub(in crate::host_evidence) struct Question<'w> {
    to: Option<(&'w Worker, Asked)>,
}

impl Question<'_> {
    /// Waits for the answer until `deadline`.
    pub(in crate::host_evidence) fn wait(self, deadline: Instant) -> Devices {
        let Some((worker, asked)) = self.to else {
            return Devices::default();
        };
        let Asked::Waiting(answer) = asked else {
            return worker.late();
        };
        let left = deadline.saturating_duration_since(Instant::now());
        match answer.recv_timeout(left) {
            Ok(devices) => devices,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => worker.late(),
        }
    }
}

fn serve(mut source: impl Source, requests: &Receiver<Request>) {
    let mut watched: BTreeMap<String, Reading> = BTreeMap::new();
    for request in requests {
        match request {
            Request::Watch(bus_id) => {
                if watched.len() < MOST_DEVICES && !watched.contains_key(&bus_id) {
                    let reading = source.read(&bus_id);
                    watched.insert(bus_id, reading);
                }
            }
            Request::Ask { which, reply } => {
                let list = match which {
                    Which::Watched => watched
                        .iter()
                        .map(|(bus_id, before)| source.read(bus_id).state(bus_id, Some(before)))
                        .collect(),
                    Which::One(bus_id) => vec![source.read(&bus_id).state(&bus_id, None)],
                    Which::All => {
                        let all = source.all().into_iter().take(MOST_DEVICES);
                        all.map(|(bus_id, reading)| reading.state(&bus_id, None))
                            .collect()
                    }
                };
                // The caller may have stopped waiting.
                let _ = reply.send(Devices {
                    access: NvmlAccess::Answered,
                    list,
                });
            }
        }
    }
}

/// Answers that there is no NVML.
fn refuse(why: &str, requests: &Receiver<Request>) {
    for request in requests {
        if let Request::Ask { reply, .. } = request {
            let _ = reply.send(Devices {
                access: NvmlAccess::Absent(why.to_owned()),
                list: Vec::new(),
            });
        }
    }
}

/// The worker of this process; `None` where it cannot be started, or is switched off.
#[cfg(feature = "nvml")]
static WORKER: OnceLock<Option<Worker>> = OnceLock::new();

#[cfg(feature = "nvml")]
fn started() -> Option<&'static Worker> {
    let worker = WORKER.get_or_init(|| {
        let library = std::env::var_os(VARIABLE).filter(|name| !name.is_empty());
        if library.as_deref().is_some_and(|name| name == "0") {
            return None;
        }
        Worker::start(move || super::nvml::Nvml::open(library.as_deref()))
    });
    worker.as_ref()
}

/// Watches a device from now on.
#[cfg(feature = "nvml")]
pub(super) fn watch(bus_id: String) {
    if let Some(worker) = started() {
        worker.watch(bus_id);
    }
}

#[cfg(feature = "nvml")]
impl Question<'static> {
    /// Asks the worker of this process. A question about the watched devices does not start it: without a worker, none
    /// is watched.
    pub(in crate::host_evidence) fn ask(which: Which) -> Self {
        let worker = match which {
            Which::Watched => WORKER.get().and_then(Option::as_ref),
            Which::One(_) | Which::All => started(),
        };
        match worker {
            Some(worker) => worker.ask(which),
            None => Self { to: None },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::DeviceTrouble;
    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    /// Devices with one more error at each reading; that of bus `hangs` never answers.
    struct Counting(u64);

    impl Source for Counting {
        fn all(&mut self) -> Vec<(String, Reading)> {
            ["a", "b"]
                .map(|bus_id| (bus_id.to_owned(), self.read(bus_id)))
                .into()
        }

        fn read(&mut self, bus_id: &str) -> Reading {
            if bus_id == "hangs" {
                loop {
                    std::thread::park();
                }
            }
            self.0 += 1;
            Reading {
                uncorrected: Some(self.0),
                ..Reading::default()
            }
        }
    }

    #[test]
    fn errors_count_from_the_moment_at_which_a_device_is_watched() {
        let worker = Worker::start(|| Ok(Counting(10))).unwrap();
        let none = worker.ask(Which::Watched).wait(Instant::now() + SOON);
        assert_eq!((none.access, none.list.len()), (NvmlAccess::Answered, 0));
        worker.watch(String::from("a"));
        worker.watch(String::from("a"));
        let said = worker.ask(Which::Watched).wait(Instant::now() + SOON);
        let expected = DeviceTrouble::UncorrectedEcc {
            errors: 1,
            since_driver_start: false,
        };
        assert_eq!(said.list[0].troubles, [expected]);
        let all = worker.ask(Which::All).wait(Instant::now() + SOON);
        assert_eq!(all.list.len(), 2);
    }

    #[test]
    fn a_call_that_hangs_costs_no_more_than_the_limit_however_often_it_is_asked() {
        let worker = Worker::start(|| Ok(Counting(0))).unwrap();
        worker.watch(String::from("hangs"));
        let begun = Instant::now();
        for _ in 0..2 * MOST_WAITING {
            let limit = Duration::from_millis(1);
            let said = worker.ask(Which::Watched).wait(Instant::now() + limit);
            // The thread may not have begun.
            assert!(
                matches!(said.access, NvmlAccess::NoAnswer | NvmlAccess::Starting),
                "{said:?}"
            );
        }
        assert!(begun.elapsed() < SOON);
        let last = worker.ask(Which::Watched).wait(Instant::now());
        assert_eq!(last.access, NvmlAccess::NoAnswer);
    }

    #[test]
    fn one_that_still_starts_is_not_said_to_hang() {
        let worker = Worker::start(|| -> Result<Counting, String> {
            loop {
                std::thread::park();
            }
        })
        .unwrap();
        let said = worker.ask(Which::All).wait(Instant::now());
        assert_eq!(said.access, NvmlAccess::Starting);
    }

    #[test]
    fn what_is_not_there_says_why() {
        let worker = Worker::start(|| Err::<Counting, _>(String::from("no driver"))).unwrap();
        let said = worker.ask(Which::All).wait(Instant::now() + SOON);
        assert_eq!(said.access, NvmlAccess::Absent(String::from("no driver")));
    }
}
