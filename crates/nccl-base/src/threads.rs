//! What happens when the system cannot provide a thread.

use std::io;
use std::thread::{Builder, Scope};

/// The remedy for a lack of threads.
#[doc(hidden)]
pub const FIX: &str = "raise the limit of processes and threads (ulimit -u, LimitNPROC= and TasksMax= of systemd, \
     pids.max or --pids-limit of the container), or let the program have fewer";

/// Returns whether the system reports that there are no more threads.
#[doc(hidden)]
pub fn is_shortage(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::AGAIN.raw_os_error())
}

/// Logs that no thread could be started; `what` names its purpose.
#[doc(hidden)]
pub fn no_thread(what: &str, error: &io::Error) {
    tracing::error!(name: "nccl.no_thread", target: "nccl", what, %error, "no thread {what}");
}

/// Runs `work` on up to `most` threads, including this one, or on fewer if the system has no more. `work` takes tasks until
/// none is left, so one thread is enough. It must call neither CUDA nor NCCL. `purpose` follows "a thread" in the log.
#[doc(hidden)]
pub fn run_on_threads(most: usize, name: &str, purpose: &str, work: impl Fn() + Sync) {
    run_on_threads_by(most, purpose, &work, |scope| {
        let builder = Builder::new().name(name.to_owned());
        builder.spawn_scoped(scope, &work).map(drop)
    });
}

fn run_on_threads_by<'env>(
    most: usize,
    purpose: &str,
    work: &'env (impl Fn() + Sync),
    start: impl for<'scope> Fn(&'scope Scope<'scope, 'env>) -> io::Result<()>,
) {
    std::thread::scope(|scope| {
        for _ in 1..most {
            if let Err(error) = start(scope) {
                no_thread(purpose, &error);
                break;
            }
        }
        work();
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Mutex;

    #[test]
    fn what_several_threads_would_do_is_done_by_those_that_there_are() {
        for threads in [Some(0), Some(2), None] {
            let can_start = Mutex::new(threads);
            let left = Mutex::new(0..100);
            let done = Mutex::new(Vec::new());
            let work = || {
                loop {
                    let Some(number) = left.lock().next() else {
                        return;
                    };
                    done.lock().push(number);
                }
            };
            run_on_threads_by(8, "to count", &work, |scope| {
                if let Some(left) = &mut *can_start.lock() {
                    *left = usize::checked_sub(*left, 1)
                        .ok_or_else(|| io::Error::from_raw_os_error(libc::EAGAIN))?;
                }
                scope.spawn(work);
                Ok(())
            });
            let mut done = done.lock().clone();
            done.sort_unstable();
            assert_eq!(done, Vec::from_iter(0..100), "with {threads:?} threads");
        }
    }
}
