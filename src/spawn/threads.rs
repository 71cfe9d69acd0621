//! The ranks of a world as threads of this process.
//!
//! A thread cannot be ended from outside. So the first failure is returned while other ranks may still run, and the
//! caller is expected to end the process.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How long the other ranks may go on after one failed.
const GRACE: Duration = Duration::from_millis(500);

/// The rank that failed first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadFailure<E> {
    /// Why the rank failed.
    pub cause: Cause<E>,
    /// Ranks that are still running.
    pub running: Vec<usize>,
}

/// Why ranks as threads ended early.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause<E> {
    /// A rank returned an error.
    Error(usize, E),
    /// A rank panicked, with this message.
    Panic(usize, String),
    /// The deadline passed.
    TimedOut(Duration),
    /// A thread could not be started.
    Start(usize, String),
}

impl<E: fmt::Display> fmt::Display for ThreadFailure<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cause {
            Cause::Error(rank, error) => write!(f, "rank {rank}: {error}")?,
            Cause::Panic(rank, message) => write!(f, "rank {rank} panicked: {message}")?,
            Cause::TimedOut(timeout) => write!(f, "not all ranks ended within {timeout:?}")?,
            Cause::Start(rank, error) => write!(f, "cannot start rank {rank}: {error}")?,
        }
        if !self.running.is_empty() {
            write!(f, "; still running: ranks {:?}", self.running)?;
        }
        Ok(())
    }
}

/// Runs `body` once for each of `worlds`, each on a thread named after its rank, and waits for all of
/// them, at most until `deadline`.
///
/// ```
/// let sum = nccl_tools::spawn::threads::run(vec![10, 20], None, |rank, world| {
///     if rank == 1 && world == 20 { Err("rank 1 has had enough") } else { Ok(()) }
/// });
/// assert_eq!(sum.unwrap_err().to_string(), "rank 1: rank 1 has had enough");
/// ```
///
/// # Errors
/// The first rank that failed, once all have ended or half a second has passed.
pub fn run<W, E, F>(
    worlds: Vec<W>,
    deadline: Option<Duration>,
    body: F,
) -> Result<(), ThreadFailure<E>>
where
    W: Send + 'static,
    E: Send + 'static,
    F: Fn(usize, W) -> Result<(), E> + Send + Sync + 'static,
{
    let mut running: Vec<usize> = (0..worlds.len()).collect();
    let mut until = deadline.map(|deadline| Instant::now() + deadline);
    let body = Arc::new(body);
    let (sender, results) = mpsc::channel();
    let mut cause = None;
    for (rank, world) in worlds.into_iter().enumerate() {
        let (body, sender) = (Arc::clone(&body), sender.clone());
        let thread = std::thread::Builder::new()
            .name(format!("rank {rank}"))
            .spawn(move || {
                let result = catch_unwind(AssertUnwindSafe(|| body(rank, world)));
                // The receiver is gone once another rank failed.
                let _ = sender.send((rank, result));
            });
        if let Err(error) = thread {
            running.retain(|&other| other < rank);
            cause = Some(Cause::Start(rank, error.to_string()));
            until = Some(Instant::now() + GRACE);
            break;
        }
    }
    drop(sender);
    while !running.is_empty() {
        let timeout = until.map_or(Duration::MAX, |u| {
            u.saturating_duration_since(Instant::now())
        });
        let (rank, result) = match results.recv_timeout(timeout) {
            Ok(ended) => ended,
            Err(RecvTimeoutError::Timeout) if until.is_none() => continue,
            Err(_) => {
                let timeout = deadline.unwrap_or_default();
                return Err(ThreadFailure {
                    cause: cause.unwrap_or(Cause::TimedOut(timeout)),
                    running,
                });
            }
        };
        running.retain(|&other| other != rank);
        let failure = match result {
            Ok(Ok(())) => continue,
            Ok(Err(error)) => Cause::Error(rank, error),
            Err(panic) => Cause::Panic(rank, panic_message(&*panic)),
        };
        if cause.is_none() {
            cause = Some(failure);
            until = Some(Instant::now() + GRACE);
        }
    }
    cause.map_or(Ok(()), |cause| Err(ThreadFailure { cause, running }))
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (_, Some(text)) => text.clone(),
        _ => "no message".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_comes_back_although_another_rank_hangs() {
        let begun = Instant::now();
        let failure = run(vec![(), (), ()], None, |rank, ()| match rank {
            0 => Ok(()),
            1 => Err("broken"),
            _ => loop {
                std::thread::park();
            },
        })
        .unwrap_err();
        assert_eq!(failure.cause, Cause::Error(1, "broken"));
        assert_eq!(failure.running, [2]);
        assert!(begun.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn a_panic_is_a_failure_of_its_rank() {
        let failure = run(vec![()], None, |_, ()| -> Result<(), String> {
            panic!("no {}", 7)
        });
        let failure = failure.unwrap_err();
        assert_eq!(failure.to_string(), "rank 0 panicked: no 7");
    }

    #[test]
    fn a_deadline_names_the_ranks_that_did_not_end() {
        let failure = run(vec![0, 1], Some(Duration::from_millis(50)), |_, world| {
            if world == 0 {
                return Ok::<(), String>(());
            }
            loop {
                std::thread::park();
            }
        })
        .unwrap_err();
        assert_eq!(failure.running, [1]);
        assert_eq!(failure.cause, Cause::TimedOut(Duration::from_millis(50)));
    }

    #[test]
    fn all_ranks_see_their_world_and_end() {
        assert_eq!(
            run(vec![5, 6, 7], None, |rank, world| {
                if world == rank + 5 { Ok(()) } else { Err(rank) }
            }),
            Ok(())
        );
    }
}
