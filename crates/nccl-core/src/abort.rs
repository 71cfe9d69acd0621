//! A signal that ends a communicator from another thread, while the communicator is being made or used.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use crate::forked;
use crate::sync::Mutex;

/// Ends the communicator it was passed to, from any thread, even while the communicator is being made.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// use nccl::{AbortSignal, ErrorKind, UniqueId, Communicator, Library};
///
/// let library = Library::load()?;
/// let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// let stop = AbortSignal::new();
/// let other = stop.clone();
/// std::thread::spawn(move || other.abort());
/// // Rank 1 never comes, and nobody waits for it.
/// let error = Communicator::builder("demo", UniqueId::new(&library)?, 0, 2)
///     .stream(&stream)
///     .with(|comm| comm.abort_signals.push(stop.clone()))
///     .build()
///     .unwrap_err();
/// assert!(matches!(error.kind(), ErrorKind::Aborted { .. }));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct AbortSignal(Arc<Signal>);

#[derive(Debug, Default)]
struct Signal {
    given: AtomicBool,
    /// Signals that are given together with this one, so that a waiter on several signals checks one flag.
    linked_signals: Mutex<Vec<Weak<Signal>>>,
}

impl AbortSignal {
    /// Returns a signal that has not been given.
    ///
    /// ```
    /// assert!(!nccl::AbortSignal::new().is_aborted());
    /// ```
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns a signal that is given as soon as any of `signals` is.
    pub(crate) fn any(signals: &[Self]) -> Self {
        if let [only] = signals {
            return only.clone();
        }
        let any = Self::new();
        for signal in signals {
            let mut linked_signals = signal.0.linked_signals.lock();
            linked_signals.retain(|follower| follower.strong_count() > 0);
            linked_signals.push(Arc::downgrade(&any.0));
            drop(linked_signals);
            // `signal` may have been given before `any` was added to its list.
            if signal.is_aborted() {
                any.abort();
            }
        }
        any
    }

    /// Gives the signal; it cannot be taken back.
    ///
    /// A communicator that is being made stops at once. A communicator in use ends the call that is
    /// being issued or waited for, and that call aborts the communicator.
    ///
    /// ```
    /// let stop = nccl::AbortSignal::new();
    /// stop.abort();
    /// assert!(stop.is_aborted());
    /// ```
    pub fn abort(&self) {
        self.0.trigger();
    }

    /// Returns whether the signal was given. The abort of a communicator that uses it may not have begun.
    ///
    /// ```
    /// assert!(!nccl::AbortSignal::new().is_aborted());
    /// ```
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        self.0.given.load(Ordering::Acquire)
    }
}

impl Signal {
    fn trigger(&self) {
        // Set before the linked signals are read: a signal that is linked later checks this flag itself.
        if self.given.swap(true, Ordering::AcqRel) {
            return;
        }
        // A forked child has no thread that waits for a linked signal, and the lock may have been held at the fork.
        if forked::is_child() {
            return;
        }
        let linked_signals = std::mem::take(&mut *self.linked_signals.lock());
        for follower in linked_signals.iter().filter_map(Weak::upgrade) {
            follower.trigger();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_of_several_is_given_with_any_of_them_and_gives_none() {
        let (one, two) = (AbortSignal::new(), AbortSignal::new());
        let any = AbortSignal::any(&[one.clone(), two.clone()]);
        let nested = AbortSignal::any(&[any.clone(), AbortSignal::new()]);
        assert!(!nested.is_aborted());
        two.abort();
        assert!(any.is_aborted() && nested.is_aborted());
        assert!(!one.is_aborted());
        assert!(AbortSignal::any(&[one.clone(), two]).is_aborted());
        let alone = AbortSignal::any(std::slice::from_ref(&one));
        alone.abort();
        assert!(one.is_aborted(), "one signal is itself");
        assert!(!AbortSignal::any(&[]).is_aborted());
    }

    #[test]
    fn signals_of_several_that_are_gone_are_not_kept() {
        let long = AbortSignal::new();
        for _ in 0..100 {
            drop(AbortSignal::any(&[long.clone(), AbortSignal::new()]));
        }
        assert!(long.0.linked_signals.lock().len() <= 1);
    }
}
