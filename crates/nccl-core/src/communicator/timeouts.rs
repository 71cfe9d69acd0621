//! The timeouts of a communicator.

use std::time::Duration;

use nccl_base::system::variables;

use nccl_base::from_outside::FromOutside;

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
/// let timeouts = nccl::Timeouts::new()
///     .operation(Duration::from_secs(5))
///     .init(Duration::from_secs(120));
/// let world = nccl::World::single().with_timeouts(timeouts);
/// let comm = world.communicator("demo").stream(&stream).build()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    pub(crate) init: Duration,
    pub(crate) operation: Duration,
    /// Ten times the timeout for operations unless set.
    pub(crate) queue: Option<Duration>,
    pub(crate) finalize: Duration,
    pub(crate) abort: Duration,
    /// For the other ranks to report that they aborted as well.
    pub(crate) confirm: Duration,
    /// A tenth of the timeout for operations unless set.
    pub(crate) straggler: Option<Duration>,
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
    /// Returns the defaults.
    ///
    /// ```
    /// assert_eq!(nccl::Timeouts::new(), nccl::Timeouts::default());
    /// ```
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the timeout for making the communicator; 60 s unless set.
    ///
    /// ```
    /// use std::time::Duration;
    /// let timeouts = nccl::Timeouts::new().init(Duration::from_secs(120));
    /// ```
    #[must_use]
    pub fn init(mut self, timeout: Duration) -> Self {
        self.init = timeout;
        self
    }

    /// Sets the timeout for an operation, counted from the moment when no work is ahead of it; 30 s unless set. See
    /// [`CommunicatorBuilder::timeout`](crate::CommunicatorBuilder::timeout).
    ///
    /// ```
    /// use std::time::Duration;
    /// let timeouts = nccl::Timeouts::new().operation(Duration::from_secs(5));
    /// ```
    #[must_use]
    pub fn operation(mut self, timeout: Duration) -> Self {
        self.operation = timeout;
        self
    }

    /// Sets how long an operation may wait on its stream behind work that is not the communicator's; ten times
    /// the timeout for operations unless set, which is 300 s by default. See
    /// [`CommunicatorBuilder::queue_timeout`](crate::CommunicatorBuilder::queue_timeout).
    ///
    /// ```
    /// use std::time::Duration;
    /// let timeouts = nccl::Timeouts::new().queue(Duration::from_secs(600));
    /// ```
    #[must_use]
    pub fn queue(mut self, timeout: Duration) -> Self {
        self.queue = Some(timeout);
        self
    }

    /// Sets the timeout for the ranks to finalize together; 30 s unless set.
    ///
    /// ```
    /// use std::time::Duration;
    /// let timeouts = nccl::Timeouts::new().finalize(Duration::from_secs(5));
    /// ```
    #[must_use]
    pub fn finalize(mut self, timeout: Duration) -> Self {
        self.finalize = timeout;
        self
    }

    /// Sets the timeout for NCCL to free an aborted communicator; 10 s unless set.
    ///
    /// ```
    /// use std::time::Duration;
    /// let timeouts = nccl::Timeouts::new().abort(Duration::from_secs(5));
    /// ```
    #[must_use]
    pub fn abort(mut self, timeout: Duration) -> Self {
        self.abort = timeout;
        self
    }

    /// Sets the timeout for the other ranks of an aborted communicator to report that they aborted it as well; 3 s unless set.
    ///
    /// ```
    /// use std::time::Duration;
    /// let timeouts = nccl::Timeouts::new().confirm(Duration::from_secs(1));
    /// ```
    #[must_use]
    pub fn confirm(mut self, timeout: Duration) -> Self {
        self.confirm = timeout;
        self
    }

    /// Sets how long a collective may run before the ranks are asked which of them have not entered it; a tenth of the
    /// timeout for operations unless set, at least 100 ms and at most 10 s, and never for an operation without a timeout.
    /// [`Duration::MAX`] means never.
    ///
    /// This timeout ends nothing: all ranks are told which ranks are late, by how much, and in which phase (the event
    /// `nccl.straggler`), and are told again when a late rank has entered.
    ///
    /// ```
    /// use std::time::Duration;
    /// let timeouts = nccl::Timeouts::new().straggler(Duration::from_millis(500));
    /// ```
    #[must_use]
    pub fn straggler(mut self, patience: Duration) -> Self {
        self.straggler = Some(patience);
        self
    }

    /// Returns how long a collective with this timeout may run before the ranks are asked which of them have not entered it; `None`
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
    pub(crate) fn queue_limit(&self) -> Option<Duration> {
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

/// Returns the timeouts of a communicator for which the program set `program`: timeouts in the environment win.
pub(crate) fn over(outside: FromOutside, program: Timeouts) -> Timeouts {
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

/// Returns how long NCCL may take to notice an abort: it checks the flag wherever it waits, except in the sleep between two
/// attempts to connect, which grows with each attempt. At most a minute: a communicator whose sleep lasts longer is leaked.
pub(crate) fn notice() -> Duration {
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
        let program = Timeouts::new()
            .operation(Duration::from_secs(1))
            .init(Duration::from_secs(2))
            .straggler(Duration::from_secs(3));
        let (seven, none) = (Duration::from_secs(7), FromOutside::default());
        let set = Some(seven);
        for (outside, timeouts) in [
            (none, program),
            (
                FromOutside {
                    operation: set,
                    ..none
                },
                program.operation(seven),
            ),
            (FromOutside { queue: set, ..none }, program.queue(seven)),
            (FromOutside { init: set, ..none }, program.init(seven)),
            (
                FromOutside {
                    finalize: set,
                    ..none
                },
                program.finalize(seven),
            ),
            (FromOutside { abort: set, ..none }, program.abort(seven)),
            (
                FromOutside {
                    confirm: set,
                    ..none
                },
                program.confirm(seven),
            ),
            (
                FromOutside {
                    straggler: set,
                    ..none
                },
                program.straggler(seven),
            ),
            (FromOutside { world: set, ..none }, program),
        ] {
            assert_eq!(over(outside, program), timeouts, "{outside:?}");
        }
    }

    #[test]
    fn an_abort_is_noticed_behind_the_longest_sleep_between_two_attempts_to_connect() {
        assert_eq!(notice(), Duration::from_secs(4));
    }
}
