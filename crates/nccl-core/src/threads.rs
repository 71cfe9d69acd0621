//! Starts the threads of this crate, and builds the error if the system refuses.
//!
//! The error names the limit that was reached. Work that needs the thread is not started: an operation that no thread
//! could watch is not issued.

use std::io;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

use nccl_base::threads::is_shortage;

use crate::cuda_driver;
use crate::error::{Error, ErrorProperty};

/// Returns the error for a thread that could not be started; `purpose` continues the text "a thread".
pub(crate) fn not_started(purpose: &str) -> impl FnOnce(io::Error) -> Error {
    move |error| {
        // Formatted only on failure, because calls ensure that their threads run, which is usually the case already.
        let what = format!("starting a thread {purpose}");
        match is_shortage(&error) {
            true => {
                let limits = nccl_base::system::limits::thread_limits();
                Error::io(format!("{what} ({limits})"))(error)
                    .with_property(ErrorProperty::NoThread)
            }
            false => Error::io(what)(error),
        }
    }
}

/// Starts a thread that may call CUDA and NCCL without breaking a capture of the program.
#[doc(hidden)]
pub fn spawn<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    Builder::new().name(name.to_owned()).spawn(relaxed(work))
}

fn relaxed<T>(work: impl FnOnce() -> T) -> impl FnOnce() -> T {
    || {
        cuda_driver::relax_this_thread();
        work()
    }
}

/// Parks a thread for ever when the process is exiting; no other thread may join it. If the thread ended instead, the
/// destructors of its thread-locals, including CUDA's and the program's, would run concurrently with the exit handlers.
pub(crate) fn park_forever() -> ! {
    loop {
        std::thread::park();
    }
}

/// Like [`spawn`], in a scope. The scope's own function would panic when no thread can be started.
pub(crate) fn scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    work: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    #[cfg(test)]
    scarcity::take()?;
    let builder = Builder::new().name(name.to_owned());
    builder.spawn_scoped(scope, relaxed(work))
}

/// For tests: limits how many more threads a thread can start.
#[cfg(test)]
pub(crate) mod scarcity {
    use std::cell::Cell;
    use std::io;

    thread_local! {
        static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
    }

    pub(crate) fn set(left: Option<usize>) {
        LEFT.set(left);
    }

    pub(super) fn take() -> io::Result<()> {
        match LEFT.get() {
            None => Ok(()),
            Some(0) => Err(io::Error::from(rustix::io::Errno::AGAIN)),
            Some(left) => {
                LEFT.set(Some(left - 1));
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_call_cuda_break_no_capture_of_the_program() {
        nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
        use cudarc::driver::sys::CUstreamCaptureMode as Mode;
        let _context = crate::device(0).expect("a device");
        fn mode() -> Mode {
            let mut mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
            let exchange = cudarc::driver::sys::cuThreadExchangeStreamCaptureMode;
            // SAFETY: a valid location.
            unsafe { exchange(&mut mode) }.result().expect("the mode");
            mode
        }
        let relaxed = Mode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let spawned = spawn("nccl-test", mode).expect("a thread");
        assert_eq!(spawned.join().expect("no panic"), relaxed);
        std::thread::scope(|scope| {
            let spawned = scoped(scope, "nccl-test", mode).expect("a thread");
            assert_eq!(spawned.join().expect("no panic"), relaxed);
        });
        let deadline = crate::time::deadline_after(std::time::Duration::from_secs(20));
        let called = crate::detached_call::run(deadline, || false, mode, drop);
        assert_eq!(called.expect("it returns"), relaxed);
        // The mode of the program's own thread is restored.
        drop(cuda_driver::Relaxed::begin());
        assert_eq!(mode(), Mode::CU_STREAM_CAPTURE_MODE_GLOBAL);
    }

    #[test]
    fn an_error_for_want_of_a_thread_says_how_many_there_are_and_what_to_do() {
        let error = not_started("that watches")(io::Error::from_raw_os_error(11));
        assert!(error.is(ErrorProperty::NoThread));
        let text = error.to_string();
        assert!(
            text.starts_with("starting a thread that watches (this process has "),
            "{text}"
        );
        assert!(text.contains("pids.max or --pids-limit"), "{text}");
        let other = not_started("that watches")(io::Error::from_raw_os_error(12));
        assert!(!other.is(ErrorProperty::NoThread), "{other}");
    }
}
