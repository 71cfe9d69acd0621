//! The destinations of puts and signals, and the signals of a wait.

/// The destination of a put or a signal. A put also sends a signal.
///
/// ```
/// use nccl::one_sided::Target;
///
/// let second_half = Target::rank(3).at(512);
/// let with_another_signal = Target::rank(3).signal(1); // needs `Config::rma_signals = Some(2)`
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Target {
    pub(super) peer: usize,
    pub(super) offset: usize,
    pub(super) signal: usize,
    pub(super) context: usize,
}

impl Target {
    /// Targets the beginning of `peer`'s window, with signal 0 in context 0.
    ///
    /// ```
    /// let target = nccl::one_sided::Target::rank(1);
    /// ```
    pub fn rank(peer: usize) -> Self {
        Self {
            peer,
            offset: 0,
            signal: 0,
            context: 0,
        }
    }

    /// Targets the window from element `offset` on.
    ///
    /// ```
    /// let target = nccl::one_sided::Target::rank(1).at(100);
    /// ```
    pub fn at(self, offset: usize) -> Self {
        Self { offset, ..self }
    }

    /// Selects another signal, below [`Config::rma_signals`](crate::Config::rma_signals) (1 unless set).
    ///
    /// ```
    /// let target = nccl::one_sided::Target::rank(1).signal(2);
    /// ```
    pub fn signal(self, signal: usize) -> Self {
        Self { signal, ..self }
    }

    /// Selects another context, below [`Config::rma_contexts`](crate::Config::rma_contexts) (1 unless set). Each context has
    /// its own signals, and the operations of different contexts may overtake each other.
    ///
    /// ```
    /// let target = nccl::one_sided::Target::rank(1).context(1);
    /// ```
    pub fn context(self, context: usize) -> Self {
        Self { context, ..self }
    }
}

/// The signals of one rank for which a wait waits.
///
/// ```
/// use nccl::one_sided::Signals;
///
/// let one = Signals::from(2);
/// let five = Signals::from(2).times(5);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Signals {
    pub(super) peer: usize,
    pub(super) count: usize,
    pub(super) signal: usize,
    pub(super) context: usize,
}

impl Signals {
    /// Waits for the next signal 0 of `peer` in context 0.
    ///
    /// ```
    /// let signals = nccl::one_sided::Signals::from(1);
    /// ```
    pub fn from(peer: usize) -> Self {
        Self {
            peer,
            count: 1,
            signal: 0,
            context: 0,
        }
    }

    /// Waits for this number of signals, at least 1.
    ///
    /// ```
    /// let signals = nccl::one_sided::Signals::from(1).times(3);
    /// ```
    pub fn times(self, count: usize) -> Self {
        Self { count, ..self }
    }

    /// Selects another signal; see [`Target::signal`].
    ///
    /// ```
    /// let signals = nccl::one_sided::Signals::from(1).signal(2);
    /// ```
    pub fn signal(self, signal: usize) -> Self {
        Self { signal, ..self }
    }

    /// Selects another context; see [`Target::context`].
    ///
    /// ```
    /// let signals = nccl::one_sided::Signals::from(1).context(1);
    /// ```
    pub fn context(self, context: usize) -> Self {
        Self { context, ..self }
    }
}
