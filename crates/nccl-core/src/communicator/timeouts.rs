//! The timeouts of a communicator.

use std::time::Duration;

use nccl_base::system::variables;

use nccl_base::env_timeouts::EnvTimeouts;

/// The timeouts of a communicator. `World::with_timeouts` sets them
/// for all communicators of a world, [`CommunicatorBuilder::timeouts`](crate::CommunicatorBuilder::timeouts)
/// for one, and [`Communicator::within`](crate::Communicator::within) the timeout of single operations.
///
/// Work that exceeds its timeout ends with an error on all ranks. [`Duration::MAX`] means no timeout.
///
/// ```
/// use std::time::Duration;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// let world = nccl::World::single().with_timeouts(|timeouts| timeouts.operation = Duration::from_secs(5));
/// let comm = world
///     .communicator("demo")
///     .stream(&stream)
///     .with(|comm| comm.timeouts.init = Duration::from_secs(120))
///     .build()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Timeouts {
    /// For making the communicator: `build`, from the first exchange between the ranks until NCCL has connected them. 60 s.
    pub init: Duration,
    /// For an operation, from its call, or from the end of the work ahead of it if that is later. 30 s.
    ///
    /// The timeout also applies if the program does not wait: an operation whose [`Request`](crate::Request) was
    /// dropped ends its communicator, on all ranks, at most an eighth of the timeout (and at most a quarter of a
    /// second) after the timeout. Other work that is ahead of it on its stream does not count, see
    /// [`queue`](Self::queue). Operations that are issued within less than 10 ms of each other cannot always be told
    /// apart, nor from other work that is put on the stream meanwhile: all the work that a program puts on the stream in
    /// one go should not take longer than the timeout.
    pub operation: Duration,
    /// For the time that an operation waits on its stream behind work that does not belong to the communicator. `None`:
    /// ten times [`operation`](Self::operation).
    pub queue: Option<Duration>,
    /// For the ranks to finalize together. 30 s.
    pub finalize: Duration,
    /// For NCCL to free an aborted communicator. 10 s.
    ///
    /// While NCCL is inside a call or a launch, this timeout is at least 4 s, because NCCL may sleep that long between two
    /// attempts to connect, and does not check the abort flag meanwhile.
    pub abort: Duration,
    /// For the other ranks of an aborted communicator to report that they aborted it as well. 3 s.
    ///
    /// Until then, an error that follows from the abort is withheld, because the other ranks may still write into memory of
    /// this rank. The error names the ranks that did not confirm.
    pub confirm: Duration,
    /// How long a collective may run before a query finds the ranks that have not entered it. `None`: a tenth of the timeout
    /// of the operation, at least 100 ms and at most 10 s, and never for an operation without a timeout. [`Duration::MAX`] is never.
    ///
    /// This timeout ends nothing: all ranks receive the event `nccl.straggler` with the late ranks, how late they are,
    /// and in which phase; they receive another event when a late rank has entered.
    pub straggler: Option<Duration>,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            init: Duration::from_secs(60),
            operation: Duration::from_secs(30),
            queue: None,
            finalize: Duration::from_secs(30),
            abort: Duration::from_secs(10),
            confirm: Duration::from_secs(3),
            straggler: None,
        }
    }
}

impl Timeouts {
    /// Returns how long a collective with this timeout may run before a query finds the ranks that have not entered it; `None`
    /// means never.
    pub(crate) fn straggler_after(&self, timeout: Option<Duration>) -> Option<Duration> {
        let usual = timeout.map(|timeout| {
            let (least, most) = (Duration::from_millis(100), Duration::from_secs(10));
            (timeout / 10).clamp(least, most)
        });
        let patience = self.straggler.or(usual);
        patience.filter(|patience| *patience < Duration::MAX)
    }

    /// Returns how long an operation may wait for its turn on its stream; `None` for ever.
    pub(crate) fn queue_timeout(&self) -> Option<Duration> {
        let timeout = self.queue.or_else(|| self.operation.checked_mul(10));
        timeout.filter(|timeout| *timeout < Duration::MAX)
    }

    /// Returns how long an orderly end may take: the finalize, which includes the operation that is being issued,
    /// and the abort if that fails.
    pub(crate) fn orderly_end(&self) -> Duration {
        self.finalize.saturating_add(self.disorderly_end())
    }

    /// Returns how long an abort may take: here, and on the other ranks.
    pub(crate) fn disorderly_end(&self) -> Duration {
        const SLACK: Duration = Duration::from_secs(2);
        self.abort
            .saturating_add(self.confirm)
            .saturating_add(SLACK)
    }
}

/// Returns the timeouts of a communicator for which the program set `program`: timeouts from the environment take
/// precedence.
pub(crate) fn over(outside: EnvTimeouts, program: Timeouts) -> Timeouts {
    Timeouts {
        init: outside.init.unwrap_or(program.init),
        operation: outside.operation.unwrap_or(program.operation),
        queue: outside.queue.or(program.queue),
        finalize: outside.finalize.unwrap_or(program.finalize),
        abort: outside.abort.unwrap_or(program.abort),
        confirm: outside.confirm.unwrap_or(program.confirm),
        straggler: outside.straggler.or(program.straggler),
    }
}

/// Returns how long NCCL may take to notice an abort. NCCL checks the flag wherever it waits, except in the sleep between
/// two attempts to connect, which grows with each attempt. The result is at most a minute: a communicator whose sleep lasts
/// longer is leaked.
pub(crate) fn abort_notice_timeout() -> Duration {
    const MOST: Duration = Duration::from_secs(60);
    const COUNT: u64 = 34;
    const SLEEP: u64 = 100;
    const MORE: Duration = Duration::from_millis(600);
    let set = |variable, otherwise| {
        let value = variables::variable(variable).and_then(|(value, _)| variables::number(&value));
        value.map_or(otherwise, |value| u64::try_from(value).unwrap_or(0))
    };
    let longest = set("NCCL_SOCKET_RETRY_SLEEP_MSEC", SLEEP)
        .saturating_mul(set("NCCL_SOCKET_RETRY_CNT", COUNT));
    Duration::from_millis(longest)
        .saturating_add(MORE)
        .min(MOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_environment_sets_wins_over_the_program_and_the_rest_stays() {
        let program = Timeouts {
            operation: Duration::from_secs(1),
            init: Duration::from_secs(2),
            straggler: Some(Duration::from_secs(3)),
            ..Timeouts::default()
        };
        let (seven, none) = (Duration::from_secs(7), EnvTimeouts::default());
        let set = Some(seven);
        for (outside, timeouts) in [
            (none, program),
            (
                EnvTimeouts {
                    operation: set,
                    ..none
                },
                Timeouts {
                    operation: seven,
                    ..program
                },
            ),
            (
                EnvTimeouts { queue: set, ..none },
                Timeouts {
                    queue: set,
                    ..program
                },
            ),
            (
                EnvTimeouts { init: set, ..none },
                Timeouts {
                    init: seven,
                    ..program
                },
            ),
            (
                EnvTimeouts {
                    finalize: set,
                    ..none
                },
                Timeouts {
                    finalize: seven,
                    ..program
                },
            ),
            (
                EnvTimeouts { abort: set, ..none },
                Timeouts {
                    abort: seven,
                    ..program
                },
            ),
            (
                EnvTimeouts {
                    confirm: set,
                    ..none
                },
                Timeouts {
                    confirm: seven,
                    ..program
                },
            ),
            (
                EnvTimeouts {
                    straggler: set,
                    ..none
                },
                Timeouts {
                    straggler: set,
                    ..program
                },
            ),
            (EnvTimeouts { world: set, ..none }, program),
        ] {
            assert_eq!(over(outside, program), timeouts, "{outside:?}");
        }
    }

    #[test]
    fn an_abort_is_noticed_behind_the_longest_sleep_between_two_attempts_to_connect() {
        assert_eq!(abort_notice_timeout(), Duration::from_secs(4));
    }
}
