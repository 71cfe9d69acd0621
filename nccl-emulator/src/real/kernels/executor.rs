//! A minimal executor: a kernel is a set of futures that is polled when its stream is polled, and never blocks.
//!
//! A future that cannot continue calls [`Meter::pause`] and checks again at the next poll; there are no wake-ups. The [`Meter`]
//! limits the bytes that one step of a kernel copies, and records whether anything moved.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};

/// A part of a kernel.
pub(super) type Part<'a, E> = Pin<Box<dyn Future<Output = Result<(), E>> + Send + 'a>>;

/// The remaining budget of a step, and whether the step moved anything.
#[derive(Debug, Default)]
pub(super) struct Meter {
    left: AtomicUsize,
    moved: AtomicBool,
}

impl Meter {
    /// Begins a step with a budget of about `budget` bytes.
    pub(super) fn begin(&self, budget: usize) {
        self.left.store(budget.max(1), Ordering::Relaxed);
        self.moved.store(false, Ordering::Relaxed);
    }

    /// Returns whether anything moved in this step.
    pub(super) fn moved(&self) -> bool {
        self.moved.load(Ordering::Relaxed)
    }

    /// Returns whether the budget of this step is used up.
    pub(super) fn exhausted(&self) -> bool {
        self.left.load(Ordering::Relaxed) == 0
    }

    /// Records progress without copying.
    pub(super) fn progress(&self) {
        self.moved.store(true, Ordering::Relaxed);
    }

    /// Waits for a step with budget left, and takes `bytes` from it. The last grant of a step may exceed it.
    pub(super) async fn grant(&self, bytes: usize) {
        while self.exhausted() {
            self.pause().await;
        }
        let left = self.left.load(Ordering::Relaxed);
        self.left
            .store(left.saturating_sub(bytes), Ordering::Relaxed);
        self.progress();
    }

    /// Yields until the next poll.
    pub(super) fn pause(&self) -> Pause {
        Pause { polled: false }
    }
}

/// Ready at its second poll.
pub(super) struct Pause {
    polled: bool,
}

impl Future for Pause {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<()> {
        if self.polled {
            return Poll::Ready(());
        }
        self.polled = true;
        Poll::Pending
    }
}

/// Runs parts concurrently. Ready when all are ready, or with the first error.
pub(super) struct Together<'a, E> {
    parts: Vec<Part<'a, E>>,
}

impl<'a, E> Together<'a, E> {
    pub(super) fn new(parts: Vec<Part<'a, E>>) -> Self {
        Self { parts }
    }
}

impl<E> Future for Together<'_, E> {
    type Output = Result<(), E>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut error = None;
        self.parts.retain_mut(|part| {
            if error.is_some() {
                return true;
            }
            match part.as_mut().poll(context) {
                Poll::Pending => true,
                Poll::Ready(Ok(())) => false,
                Poll::Ready(Err(end)) => {
                    error = Some(end);
                    false
                }
            }
        });
        match error {
            Some(error) => Poll::Ready(Err(error)),
            None if self.parts.is_empty() => Poll::Ready(Ok(())),
            None => Poll::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::Waker;

    fn poll<F: Future>(future: &mut Pin<Box<F>>) -> Poll<F::Output> {
        future
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn a_step_grants_its_budget_and_then_waits_for_the_next() {
        let meter = Meter::default();
        meter.begin(10);
        let mut copied = Box::pin(async {
            for _ in 0..4 {
                meter.grant(6).await;
            }
        });
        assert!(poll(&mut copied).is_pending());
        assert!(meter.moved() && meter.exhausted());
        meter.begin(1);
        assert!(poll(&mut copied).is_pending());
        meter.begin(100);
        assert!(poll(&mut copied).is_ready());
        assert!(!meter.exhausted());
    }

    #[test]
    fn parts_run_side_by_side_and_the_first_error_ends_all() {
        let meter = Meter::default();
        let waits = |polls: usize, result: Result<(), u8>| -> Part<'_, u8> {
            let meter = &meter;
            Box::pin(async move {
                for _ in 0..polls {
                    meter.pause().await;
                }
                result
            })
        };
        let mut good = Box::pin(Together::new(vec![waits(2, Ok(())), waits(0, Ok(()))]));
        assert!(poll(&mut good).is_pending());
        assert!(poll(&mut good).is_pending());
        assert_eq!(poll(&mut good), Poll::Ready(Ok(())));

        let mut bad = Box::pin(Together::new(vec![waits(1000, Ok(())), waits(1, Err(7))]));
        assert!(poll(&mut bad).is_pending());
        assert_eq!(poll(&mut bad), Poll::Ready(Err(7)));
    }
}
