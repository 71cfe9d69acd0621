//! How a process ended, as its parent sees it: the exit status, and whether the kernel's OOM killer was at work.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::process::ExitStatus;

use std::os::unix::process::ExitStatusExt;

use serde::{Deserialize, Serialize};

use crate::wire::clean;

/// A signal.
///
/// Two values are equal if their numbers on this machine are: `Other(9)` is [`Kill`](Self::Kill). Other functions of this crate return
/// `Other` only for a number without a variant of its own. The form for serde is the number.
///
/// ```
/// use nccl::launch::Signal;
///
/// assert_eq!(Signal::Kill.to_string(), "SIGKILL");
/// assert_eq!(Signal::named("usr1"), Some(Signal::Usr1));
/// assert_eq!(Signal::new(64).to_string(), "signal 64");
/// ```
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(from = "i32", into = "i32")]
#[non_exhaustive]
pub enum Signal {
    /// The terminal was closed.
    Hup,
    /// Ctrl-C.
    Int,
    /// Ctrl-\: end with a core dump.
    Quit,
    /// `abort()`: a failed assertion, an uncaught C++ exception.
    Abrt,
    /// An access beyond the end of a mapped file, or of `/dev/shm`.
    Bus,
    /// Ends a process, which cannot catch it; also sent by the kernel's OOM killer.
    Kill,
    /// For the program's own use.
    Usr1,
    /// An access to memory that is not mapped.
    Segv,
    /// For the program's own use.
    Usr2,
    /// A write to a pipe or socket without a reader.
    Pipe,
    /// Asks a process to end.
    Term,
    /// Continues a stopped process.
    Cont,
    /// Stops a process, which cannot catch it.
    Stop,
    /// Ctrl-Z.
    Tstp,
    /// The size of the terminal changed.
    Winch,
    /// Another signal, by its number.
    Other(i32),
}

macro_rules! signals {
    ($($name:ident = $number:ident;)* ; $($other:ident),*;) => {
        impl Signal {
            const NAMES: &[(i32, &'static str)] = &[
                $((libc::$number, stringify!($number)),)*
                $((libc::$other, stringify!($other)),)*
            ];

            /// Returns the signal with this number.
            ///
            /// ```
            /// # use nccl::launch::Signal;
            /// assert_eq!(Signal::new(9), Signal::Kill);
            /// ```
            #[must_use]
            pub const fn new(number: i32) -> Self {
                match number {
                    $(libc::$number => Self::$name,)*
                    _ => Self::Other(number),
                }
            }

            /// Returns its number.
            ///
            /// ```
            /// assert_eq!(nccl::launch::Signal::Term.number(), 15);
            /// ```
            #[must_use]
            pub const fn number(self) -> i32 {
                match self {
                    $(Self::$name => libc::$number,)*
                    Self::Other(number) => number,
                }
            }
        }
    };
}

signals! {
    Hup = SIGHUP;
    Int = SIGINT;
    Quit = SIGQUIT;
    Abrt = SIGABRT;
    Bus = SIGBUS;
    Kill = SIGKILL;
    Usr1 = SIGUSR1;
    Segv = SIGSEGV;
    Usr2 = SIGUSR2;
    Pipe = SIGPIPE;
    Term = SIGTERM;
    Cont = SIGCONT;
    Stop = SIGSTOP;
    Tstp = SIGTSTP;
    Winch = SIGWINCH;
    ; SIGILL, SIGTRAP, SIGFPE, SIGALRM, SIGTTIN, SIGTTOU, SIGXCPU, SIGXFSZ, SIGSYS;
}

impl Signal {
    /// Returns the signal with this name, with or without `SIG`, in either case.
    ///
    /// ```
    /// # use nccl::launch::Signal;
    /// assert_eq!(Signal::named("SIGHUP"), Some(Signal::Hup));
    /// assert_eq!(Signal::named("SIGNAL"), None);
    /// ```
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let name = name.to_ascii_uppercase();
        let short = name.strip_prefix("SIG").unwrap_or(&name);
        let found = Self::NAMES.iter().find(|(_, known)| &known[3..] == short);
        found.map(|&(number, _)| Self::new(number))
    }

    /// Returns the exit code that a shell returns for a process that this signal ended.
    ///
    /// ```
    /// assert_eq!(nccl::launch::Signal::Kill.exit_code(), 137);
    /// ```
    #[must_use]
    pub fn exit_code(self) -> u8 {
        u8::try_from(128 + self.number()).unwrap_or(1)
    }

    #[doc(hidden)]
    pub fn raw(self) -> Option<rustix::process::Signal> {
        rustix::process::Signal::from_named_raw(self.number())
    }
}

impl From<i32> for Signal {
    fn from(number: i32) -> Self {
        Self::new(number)
    }
}

impl From<Signal> for i32 {
    fn from(signal: Signal) -> Self {
        signal.number()
    }
}

impl PartialEq for Signal {
    fn eq(&self, other: &Self) -> bool {
        self.number() == other.number()
    }
}

impl Eq for Signal {}

impl PartialOrd for Signal {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Signal {
    fn cmp(&self, other: &Self) -> Ordering {
        self.number().cmp(&other.number())
    }
}

impl Hash for Signal {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.number().hash(state);
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let own = self.number();
        match Self::NAMES.iter().find(|(number, _)| *number == own) {
            Some((_, name)) => f.write_str(name),
            None => write!(f, "signal {own}"),
        }
    }
}

/// How a process ended.
///
/// ```
/// use nccl::launch::{Exit, Signal};
///
/// let exit = Exit::Signal { signal: Signal::Segv, core_dumped: true };
/// assert_eq!(exit.to_string(), "killed by SIGSEGV (core dumped)");
/// assert_eq!((exit.code(), exit.is_success()), (139, false));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Exit {
    /// The process returned this exit code.
    Code(i32),
    /// A signal ended the process.
    Signal {
        /// The signal.
        signal: Signal,
        /// Whether the kernel wrote a core dump, or passed one to a core-dump handler.
        core_dumped: bool,
    },
    /// Not known: other code of this process took the exit status, or told the kernel to discard it (`SIGCHLD`
    /// ignored).
    Unknown,
}

impl Exit {
    /// Returns whether the process returned 0.
    ///
    /// ```
    /// # use nccl::launch::Exit;
    /// assert!(Exit::Code(0).is_success() && !Exit::Unknown.is_success());
    /// ```
    #[must_use]
    pub fn is_success(&self) -> bool {
        *self == Self::Code(0)
    }

    /// Returns the exit code that a shell returns for this end: the exit code, or 128 plus the signal.
    ///
    /// ```
    /// assert_eq!(nccl::launch::Exit::Code(3).code(), 3);
    /// ```
    #[must_use]
    pub fn code(&self) -> u8 {
        match *self {
            Self::Code(code) => u8::try_from(code).unwrap_or(1),
            Self::Signal { signal, .. } => signal.exit_code(),
            Self::Unknown => 1,
        }
    }

    /// Returns the signal that ended the process.
    ///
    /// ```
    /// assert_eq!(nccl::launch::Exit::Code(3).signal(), None);
    /// ```
    #[must_use]
    pub fn signal(&self) -> Option<Signal> {
        match *self {
            Self::Signal { signal, .. } => Some(signal),
            _ => None,
        }
    }
}

impl Exit {
    /// Parses the text of a foreign launcher, if it resembles the texts of this type or `exit status 3`. This is the
    /// only place where such text is parsed.
    #[doc(hidden)]
    pub fn read(words: &str) -> Option<Self> {
        let code = ["exit code ", "exit status "];
        if let Some(rest) = code.iter().find_map(|code| words.split(code).nth(1)) {
            let digits = rest.split(|c: char| !c.is_ascii_digit() && c != '-').next();
            return digits?.parse().ok().map(Self::Code);
        }
        let name = words.split("killed by ").nth(1)?;
        let signal = match name.strip_prefix("signal ") {
            Some(number) => Signal::new(number.split(' ').next()?.parse().ok()?),
            None => Signal::named(name.split(|c: char| !c.is_ascii_alphanumeric()).next()?)?,
        };
        Some(Self::Signal {
            signal,
            core_dumped: words.contains("(core dumped)"),
        })
    }
}

impl From<ExitStatus> for Exit {
    fn from(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, Some(signal)) => Self::Signal {
                signal: Signal::new(signal),
                core_dumped: status.core_dumped(),
            },
            (None, None) => Self::Unknown,
        }
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal {
                signal,
                core_dumped,
            } => {
                write!(f, "killed by {signal}")?;
                if *core_dumped {
                    f.write_str(" (core dumped)")?;
                }
                Ok(())
            }
            Self::Unknown => f.write_str(
                "exit status unknown (other code of the process that started it took it away)",
            ),
        }
    }
}

/// Processes that the kernel's OOM killer ended while a rank ran.
///
/// ```
/// # fn show(end: &nccl::launch::RankEnd) {
/// if let Some(oom) = &end.oom {
///     eprintln!("rank {}: {oom}", end.rank);
/// }
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct OomKill {
    /// The control group whose counter rose.
    #[serde(deserialize_with = "clean")]
    pub group: String,
    /// How many of the group's processes the OOM killer ended while the rank ran.
    pub killed: u64,
    /// The group's memory limit in bytes, if it has one.
    pub limit: Option<u64>,
}

impl fmt::Display for OomKill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            group,
            killed,
            limit,
        } = self;
        write!(
            f,
            "out of memory: the kernel's OOM killer ended {killed} process{} of control group {group}",
            if *killed == 1 { "" } else { "es" }
        )?;
        if let Some(limit) = limit {
            write!(f, " (limit {:.0} MiB)", *limit as f64 / 1048576.0)?;
        }
        f.write_str(" while it ran")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_status_is_read_as_a_shell_reads_it() {
        for (raw, text, code) in [
            (0, "exit code 0", 0),
            (3 << 8, "exit code 3", 3),
            (9, "killed by SIGKILL", 137),
            (11 | 0x80, "killed by SIGSEGV (core dumped)", 139),
            (40, "killed by signal 40", 168),
        ] {
            let exit = Exit::from(ExitStatus::from_raw(raw));
            assert_eq!((exit.to_string().as_str(), exit.code()), (text, code));
            assert_eq!(exit.is_success(), raw == 0);
        }
        assert_eq!(Exit::Unknown.code(), 1);
    }

    #[test]
    fn signals_have_names_both_ways() {
        assert_eq!(Signal::named("SIGTERM"), Some(Signal::Term));
        assert_eq!(Signal::named("Quit"), Some(Signal::Quit));
        assert_eq!(Signal::named("SIG"), None);
        assert_eq!(Signal::named("nope"), None);
        assert_eq!(Signal::Usr2.to_string(), "SIGUSR2");
        assert!(Signal::new(999).raw().is_none());
    }

    #[test]
    fn a_signal_is_its_number_also_for_serde() {
        for number in 1..=64 {
            let signal = Signal::new(number);
            assert_eq!((signal, signal.number()), (Signal::Other(number), number));
        }
        assert!(matches!(Signal::new(libc::SIGKILL), Signal::Kill));
        let text = serde_json::to_string(&Signal::Term).unwrap();
        assert_eq!(text, "15");
        let read: Signal = serde_json::from_str(&text).unwrap();
        assert!(matches!(read, Signal::Term));
    }
}
