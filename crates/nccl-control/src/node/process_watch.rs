//! The ends of processes under this kernel, each watched through a pidfd.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use crate::process::{self, ProcessLookup};
use crate::proto::ProcessInfo;
use crate::reactor::{EventFlags, Reactor, Source};
use crate::sync::Mutex;

/// Watches one process until this value is dropped.
pub(super) struct ProcessWatch {
    descriptor: Arc<OwnedFd>,
    token: Option<u64>,
}

/// The result of watching a process.
pub(super) enum WatchOutcome {
    Watched(Arc<ProcessWatch>),
    /// The process has already ended.
    Ended,
    /// The process cannot be watched: it is not visible here, or its descriptor cannot be polled.
    NotWatched,
}

/// Returns the members that are other processes under this kernel.
pub(super) fn of_this_kernel(members: &[ProcessInfo]) -> impl Iterator<Item = &ProcessInfo> {
    let (kernel, own) = (process::kernel_sum(), std::process::id());
    members
        .iter()
        .filter(move |process| kernel != 0 && process.kernel == kernel && process.pid != own)
}

/// Watches `process`, another process under this kernel, and calls `ended` once when it ends.
pub(super) fn watch_process(
    process: &ProcessInfo,
    ended: impl FnOnce() + Send + 'static,
) -> WatchOutcome {
    let descriptor = match process::find(process.pid, process.start_time) {
        ProcessLookup::Process(descriptor) => descriptor,
        ProcessLookup::Ended => return WatchOutcome::Ended,
        ProcessLookup::Unknown => return WatchOutcome::NotWatched,
    };
    match watch(descriptor, ended) {
        Some(watch) => WatchOutcome::Watched(watch),
        None => WatchOutcome::NotWatched,
    }
}

/// Watches the initial coordinator, which is the process at the other end of this Unix socket, and whose identity is
/// not known yet. Calls `ended` with its process id.
pub(super) fn watch_socket_peer(
    socket: impl AsFd,
    ended: impl FnOnce(u64) + Send + 'static,
) -> Option<Arc<ProcessWatch>> {
    let (descriptor, pid) = process::at_the_other_end(socket)?;
    watch(descriptor, move || ended(pid))
}

fn watch(descriptor: OwnedFd, ended: impl FnOnce() + Send + 'static) -> Option<Arc<ProcessWatch>> {
    let descriptor = Arc::new(descriptor);
    let on_exit = Arc::new(OnExit(Mutex::new(Some(Box::new(ended)))));
    let reactor = Reactor::get().ok()?;
    let token = reactor.add(&*descriptor, EventFlags::IN, on_exit as Arc<dyn Source>);
    let token = Some(token.ok()?);
    Some(Arc::new(ProcessWatch { descriptor, token }))
}

impl Drop for ProcessWatch {
    fn drop(&mut self) {
        if let (Some(token), Ok(reactor)) = (self.token.take(), Reactor::get()) {
            reactor.remove(&*self.descriptor, token);
        }
    }
}

/// The function to call once.
struct OnExit(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Source for OnExit {
    fn ready(self: Arc<Self>, _: EventFlags) {
        let ended = self.0.lock().take();
        if let Some(ended) = ended {
            ended();
        }
    }
}
