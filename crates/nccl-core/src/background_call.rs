//! Blocking calls that run on a thread of their own and can be awaited, for programs whose threads belong to an
//! executor.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::error::Result;
use crate::forked;
use crate::sync::Mutex;
use crate::threads;

/// A blocking call on a thread of its own, as a future of its result. Works with any executor.
///
/// Making a communicator, connecting its ranks or changing its members takes milliseconds to seconds and waits for other
/// ranks; if the call ran on a thread of the executor, no other task could use that thread meanwhile. Methods whose names end
/// in `_async` return this type; [`start`](Self::start) makes one from any other call.
///
/// The call begins at once, even if the future is not polled. **Dropping the future cancels nothing**: the call continues, and
/// its result is dropped when it returns. Every call of this crate ends at its own timeout. If the call panics, the panic is
/// resumed in the task that awaits it.
///
/// ```
/// # use std::pin::pin;
/// # use std::task::{Context, Poll, Waker};
/// # fn block_on<F: Future>(future: F) -> F::Output {
/// #     let mut future = pin!(future);
/// #     loop {
/// #         if let Poll::Ready(done) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) { return done; }
/// #         std::thread::yield_now();
/// #     }
/// # }
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
/// use nccl::BackgroundCall;
///
/// # block_on(async {
/// // Any executor: nothing of it is used.
/// let theirs = comm.clone();
/// let half = BackgroundCall::start(move || theirs.split("half", Some(0), 0)).await?;
/// assert_eq!(half.map(|half| half.world_size()), Some(1));
/// # Ok::<(), nccl::Error>(())
/// # })?;
/// # Ok(())
/// # }
/// ```
#[must_use = "it is not known whether the call succeeds"]
pub struct BackgroundCall<T> {
    state: Arc<Mutex<State<T>>>,
}

enum State<T> {
    Running(Option<Waker>),
    Returned(Result<T>),
    Panicked(Box<dyn Any + Send>),
    Taken,
}

impl<T: Send + 'static> BackgroundCall<T> {
    /// Starts the call. If the system has no thread for it, the result is that error ([`ErrorKind::Io`]).
    ///
    /// [`ErrorKind::Io`]: crate::error::ErrorKind::Io
    ///
    /// ```
    /// let call = nccl::BackgroundCall::start(|| nccl::World::single().barrier("ready"));
    /// # drop(call);
    /// ```
    pub fn start(call: impl FnOnce() -> Result<T> + Send + 'static) -> Self {
        if let Err(error) = forked::check() {
            return Self::ready(Err(error));
        }
        let state = Arc::new(Mutex::new(State::Running(None)));
        let theirs = Arc::clone(&state);
        let run = move || {
            let end = match catch_unwind(AssertUnwindSafe(call)) {
                Ok(result) => State::Returned(result),
                Err(panic) => State::Panicked(panic),
            };
            set(&theirs, end);
        };
        if let Err(error) = threads::spawn("nccl-background", run) {
            let error = threads::not_started("for a call in the background")(error);
            set(&state, State::Returned(Err(error)));
        }
        Self { state }
    }

    /// Returns a call that has already returned.
    pub(crate) fn ready(result: Result<T>) -> Self {
        let state = Arc::new(Mutex::new(State::Returned(result)));
        Self { state }
    }
}

/// Stores the end state, and wakes the task after the lock is released, because a waker is the executor's code.
fn set<T>(state: &Mutex<State<T>>, end: State<T>) {
    let before = std::mem::replace(&mut *state.lock(), end);
    if let State::Running(Some(waker)) = before {
        waker.wake();
    }
}

impl<T> Future for BackgroundCall<T> {
    type Output = Result<T>;

    /// # Panics
    /// When the call has panicked, and when the future is polled again after it was ready.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // A forked child does not have the thread of the call, which may have held the lock.
        if let Err(error) = forked::check() {
            return Poll::Ready(Err(error));
        }
        // Cloned, and an earlier one dropped, without the lock, because a waker is the executor's code.
        let waker = context.waker().clone();
        let mut state = self.state.lock();
        if let State::Running(stored) = &mut *state {
            let earlier = stored.replace(waker);
            drop(state);
            drop(earlier);
            return Poll::Pending;
        }
        let end = std::mem::replace(&mut *state, State::Taken);
        drop(state);
        match end {
            State::Returned(result) => Poll::Ready(result),
            State::Panicked(panic) => resume_unwind(panic),
            State::Running(_) | State::Taken => panic!("it was polled after it was ready"),
        }
    }
}

impl<T> fmt::Debug for BackgroundCall<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.try_lock();
        let is_running = state.map(|state| matches!(*state, State::Running(_)));
        f.debug_struct("BackgroundCall")
            .field("is_running", &is_running)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::task::Wake;

    use super::*;
    use crate::error::{Error, ErrorKind};

    struct Woken(mpsc::Sender<()>);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            let _ = self.0.send(());
        }
    }

    /// Polls it once with a waker, and again when that was called.
    fn awaited<T>(mut call: BackgroundCall<T>) -> Result<T> {
        let (sender, woken) = mpsc::channel();
        let waker = Waker::from(Arc::new(Woken(sender)));
        let mut context = Context::from_waker(&waker);
        loop {
            match Pin::new(&mut call).poll(&mut context) {
                Poll::Ready(result) => return result,
                Poll::Pending => woken.recv().expect("it wakes"),
            }
        }
    }

    #[test]
    fn the_result_comes_to_the_task_that_waits_and_the_call_runs_on_another_thread() {
        let (go, gate) = mpsc::channel::<()>();
        let here = std::thread::current().id();
        let call = BackgroundCall::start(move || {
            gate.recv().expect("a word");
            Ok(std::thread::current().id() != here)
        });
        assert!(format!("{call:?}").contains("is_running: Some(true)"));
        go.send(()).expect("it waits");
        assert!(awaited(call).unwrap());
    }

    #[test]
    fn errors_and_panics_come_where_it_is_awaited() {
        let invalid = || {
            Error::new(ErrorKind::InvalidConfig {
                field: "none",
                reason: String::from("of a test"),
            })
        };
        let error = awaited(BackgroundCall::start(move || Err::<(), _>(invalid()))).unwrap_err();
        assert!(error.to_string().contains("of a test"));
        let call = BackgroundCall::start(|| -> Result<()> { panic!("on purpose") });
        let panic = catch_unwind(AssertUnwindSafe(|| awaited(call))).unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"on purpose"));
    }

    /// Tells whether the lock of a call was free when the last clone of the waker was dropped.
    struct WatchesLock {
        state: Arc<Mutex<State<()>>>,
        was_free: mpsc::Sender<bool>,
    }

    impl Wake for WatchesLock {
        fn wake(self: Arc<Self>) {}
    }

    impl Drop for WatchesLock {
        fn drop(&mut self) {
            let is_free = self.state.try_lock().is_some();
            let _ = self.was_free.send(is_free);
        }
    }

    #[test]
    fn the_waker_of_an_earlier_poll_is_dropped_while_the_call_is_not_locked() {
        let (go, gate) = mpsc::channel::<()>();
        let mut call = BackgroundCall::start(move || {
            gate.recv().expect("a word");
            Ok(())
        });
        let (was_free, dropped) = mpsc::channel();
        let waker = Waker::from(Arc::new(WatchesLock {
            state: Arc::clone(&call.state),
            was_free,
        }));
        let mut poll = |waker: &Waker| {
            let mut context = Context::from_waker(waker);
            Pin::new(&mut call).poll(&mut context).is_pending()
        };
        assert!(poll(&waker));
        // The call has the last clone, which the next poll replaces.
        drop(waker);
        assert!(dropped.try_recv().is_err());
        assert!(poll(Waker::noop()));
        assert_eq!(dropped.try_recv(), Ok(true));
        go.send(()).expect("it waits");
    }

    #[test]
    fn a_dropped_future_cancels_nothing_and_the_result_is_dropped() {
        let (go, gate) = mpsc::channel::<()>();
        let (dropped, seen) = mpsc::channel();
        struct Tell(mpsc::Sender<()>);
        impl Drop for Tell {
            fn drop(&mut self) {
                let _ = self.0.send(());
            }
        }
        let call = BackgroundCall::start(move || {
            gate.recv().expect("a word");
            Ok(Tell(dropped))
        });
        drop(call);
        go.send(()).expect("it waits");
        seen.recv().expect("the result is dropped");
    }
}
