//! Signals, by name and number.

use std::fmt;

/// A signal, by its number on this machine.
///
/// ```
/// use nccl::launch::Signal;
///
/// assert_eq!(Signal::KILL.to_string(), "SIGKILL");
/// assert_eq!(Signal::named("usr1"), Some(Signal::USR1));
/// assert_eq!(Signal::new(64).to_string(), "signal 64");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Signal(i32);

macro_rules! signals {
    ($($(#[$doc:meta])* $name:ident = $number:ident;)*) => {
        impl Signal {
            $($(#[$doc])* pub const $name: Self = Self(libc::$number);)*

            const NAMES: &[(i32, &'static str)] = &[$((libc::$number, stringify!($number))),*];
        }
    };
}

signals! {
    /// The terminal is gone.
    HUP = SIGHUP;
    /// Ctrl-C.
    INT = SIGINT;
    /// Ctrl-\: end with a core dump.
    QUIT = SIGQUIT;
    /// An illegal instruction.
    ILL = SIGILL;
    /// A breakpoint.
    TRAP = SIGTRAP;
    /// `abort()`: a failed assertion, a C++ exception that nobody caught.
    ABRT = SIGABRT;
    /// An access beyond the end of a mapped file, or of `/dev/shm`.
    BUS = SIGBUS;
    /// A division by zero.
    FPE = SIGFPE;
    /// Ends a process without asking it; also what the kernel's OOM killer sends.
    KILL = SIGKILL;
    /// The program's own.
    USR1 = SIGUSR1;
    /// An access to memory that is not there.
    SEGV = SIGSEGV;
    /// The program's own.
    USR2 = SIGUSR2;
    /// A write to a pipe or socket that nobody reads.
    PIPE = SIGPIPE;
    /// A timer.
    ALRM = SIGALRM;
    /// Asks a process to end.
    TERM = SIGTERM;
    /// Goes on after a stop.
    CONT = SIGCONT;
    /// Stops a process without asking it.
    STOP = SIGSTOP;
    /// Ctrl-Z.
    TSTP = SIGTSTP;
    /// A read from the terminal in the background.
    TTIN = SIGTTIN;
    /// A write to the terminal in the background.
    TTOU = SIGTTOU;
    /// Too much CPU time (`ulimit -t`).
    XCPU = SIGXCPU;
    /// Too large a file (`ulimit -f`).
    XFSZ = SIGXFSZ;
    /// The terminal has another size.
    WINCH = SIGWINCH;
    /// A forbidden system call (seccomp).
    SYS = SIGSYS;
}

impl Signal {
    /// The signal of this number.
    ///
    /// ```
    /// # use nccl::launch::Signal;
    /// assert_eq!(Signal::new(9), Signal::KILL);
    /// ```
    #[must_use]
    pub const fn new(number: i32) -> Self {
        Self(number)
    }

    /// The signal of this name, with or without `SIG`, in either case.
    ///
    /// ```
    /// # use nccl::launch::Signal;
    /// assert_eq!(Signal::named("SIGHUP"), Some(Signal::HUP));
    /// assert_eq!(Signal::named("SIGNAL"), None);
    /// ```
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let name = name.to_ascii_uppercase();
        let short = name.strip_prefix("SIG").unwrap_or(&name);
        let found = Self::NAMES.iter().find(|(_, known)| &known[3..] == short);
        found.map(|&(number, _)| Self(number))
    }

    /// Its number.
    ///
    /// ```
    /// assert_eq!(nccl::launch::Signal::TERM.number(), 15);
    /// ```
    #[must_use]
    pub const fn number(self) -> i32 {
        self.0
    }

    /// What a shell returns for a process that this signal ended.
    ///
    /// ```
    /// assert_eq!(nccl::launch::Signal::KILL.exit_code(), 137);
    /// ```
    #[must_use]
    pub fn exit_code(self) -> u8 {
        u8::try_from(128 + self.0).unwrap_or(1)
    }

    #[doc(hidden)]
    pub fn raw(self) -> Option<rustix::process::Signal> {
        rustix::process::Signal::from_named_raw(self.0)
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Self::NAMES.iter().find(|(number, _)| *number == self.0) {
            Some((_, name)) => f.write_str(name),
            None => write!(f, "signal {}", self.0),
        }
    }
}
