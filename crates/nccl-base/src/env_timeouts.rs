//! Timeouts from the environment, for an operator who cannot rebuild the program: to attach a debugger, or to wait longer.
//!
//! The variables are read once per process. They override the program, wherever it sets a timeout: in a builder, for a
//! world, for single calls.

use std::sync::OnceLock;
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};

/// The timeout for operations. `off` turns off every timeout of a wait for other ranks.
const OPERATION: &str = "NCCL_RUN_TIMEOUT";
const QUEUE: &str = "NCCL_RUN_QUEUE_TIMEOUT";
const INIT: &str = "NCCL_RUN_INIT_TIMEOUT";
const FINALIZE: &str = "NCCL_RUN_FINALIZE_TIMEOUT";
const ABORT: &str = "NCCL_RUN_ABORT_TIMEOUT";
const CONFIRM: &str = "NCCL_RUN_CONFIRM_TIMEOUT";
const STRAGGLER: &str = "NCCL_RUN_STRAGGLER_TIMEOUT";
const WORLD: &str = "NCCL_RUN_WORLD_TIMEOUT";

/// The timeouts that the environment sets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[doc(hidden)]
pub struct EnvTimeouts {
    pub operation: Option<Duration>,
    pub queue: Option<Duration>,
    pub init: Option<Duration>,
    pub finalize: Option<Duration>,
    pub abort: Option<Duration>,
    pub confirm: Option<Duration>,
    pub straggler: Option<Duration>,
    pub world: Option<Duration>,
}

/// A variable whose value is not a valid timeout.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Unreadable {
    variable: &'static str,
    value: String,
}

impl EnvTimeouts {
    /// Returns the timeouts of this process's environment; the first call logs them.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidConfig`] with the variable, its value and the accepted forms.
    #[doc(hidden)]
    pub fn of_process() -> Result<Self> {
        static READ: OnceLock<Result<EnvTimeouts, Unreadable>> = OnceLock::new();
        let read = READ.get_or_init(|| {
            let mut set = Vec::new();
            let read = Self::read(|variable| {
                let value = std::env::var_os(variable)?.to_string_lossy().into_owned();
                set.push(format!("{variable}={value}"));
                Some(value)
            });
            if read.is_ok() && !set.is_empty() {
                tracing::info!(name: "nccl.timeouts", target: "nccl", variables = set.join(" "), "the environment sets timeouts, whatever the program sets");
            }
            read
        });
        read.clone().map_err(Error::from)
    }

    fn read(mut get: impl FnMut(&'static str) -> Option<String>) -> Result<Self, Unreadable> {
        let mut timeout = |variable| {
            get(variable)
                .map(|value| parse(variable, value))
                .transpose()
        };
        let operation = timeout(OPERATION)?;
        // `off` for operations turns off every timeout of a wait for other ranks, because a debugger may hold any of
        // them.
        let unless_off = operation.filter(|timeout| *timeout == Duration::MAX);
        Ok(Self {
            operation,
            queue: timeout(QUEUE)?.or(unless_off),
            init: timeout(INIT)?.or(unless_off),
            finalize: timeout(FINALIZE)?.or(unless_off),
            abort: timeout(ABORT)?,
            confirm: timeout(CONFIRM)?,
            straggler: timeout(STRAGGLER)?,
            world: timeout(WORLD)?.or(unless_off),
        })
    }
}

/// Returns the timeout for operations, where the program set `program`. An unreadable variable has been reported before.
#[doc(hidden)]
pub fn operation(program: Duration) -> Duration {
    let outside = EnvTimeouts::of_process().unwrap_or_default();
    outside.operation.unwrap_or(program)
}

/// Returns the timeout for exchanges of a world, where the program set `program`.
#[doc(hidden)]
pub fn world_timeout(program: Duration) -> Duration {
    let outside = EnvTimeouts::of_process().unwrap_or_default();
    outside.world.unwrap_or(program)
}

/// Parses a timeout: `30`, `1.5s`, `500ms`, `5m`, `2h` or `off`.
fn parse(variable: &'static str, value: String) -> Result<Duration, Unreadable> {
    let text = value.trim();
    if text.eq_ignore_ascii_case("off") {
        return Ok(Duration::MAX);
    }
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let in_seconds = match &text[digits.len()..] {
        "ms" => Some(0.001),
        "" | "s" => Some(1.0),
        "m" => Some(60.0),
        "h" => Some(3600.0),
        _ => None,
    };
    let number = digits.trim_end().parse::<f64>().ok();
    let timeout = in_seconds
        .zip(number)
        .and_then(|(unit, number)| Duration::try_from_secs_f64(unit * number).ok());
    // With a timeout of zero everything would fail; `off` means no timeout.
    timeout
        .filter(|timeout| !timeout.is_zero())
        .ok_or(Unreadable { variable, value })
}

impl From<Unreadable> for Error {
    fn from(unreadable: Unreadable) -> Self {
        let Unreadable { variable, value } = unreadable;
        Self::new(ErrorKind::InvalidConfig {
            field: variable,
            reason: format!(
                "the environment has {value:?}: a timeout is a number of seconds (30), a number with ms, s, m or h (500ms, 5m), or \
                 off for none"
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<EnvTimeouts, Unreadable> {
        EnvTimeouts::read(|name| {
            let found = variables.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, value)| String::from(*value))
        })
    }

    #[test]
    fn every_form_of_a_timeout_is_read() {
        for (text, timeout) in [
            ("30", Duration::from_secs(30)),
            ("1.5", Duration::from_millis(1500)),
            ("500ms", Duration::from_millis(500)),
            (" 30 s ", Duration::from_secs(30)),
            ("5m", Duration::from_secs(300)),
            ("2h", Duration::from_secs(7200)),
            ("off", Duration::MAX),
            ("OFF", Duration::MAX),
        ] {
            let read = read(&[(OPERATION, text)]).map(|read| read.operation);
            assert_eq!(read, Ok(Some(timeout)), "{text:?}");
        }
    }

    #[test]
    fn what_is_no_timeout_is_an_error_with_variable_value_and_forms() {
        for text in [
            "", "0", "0ms", "-1", "5x", "ms", "nan", "inf", "1e300", "5 5", "ofF!", "é",
        ] {
            let error = Error::from(read(&[(INIT, text)]).expect_err(text)).to_string();
            for part in [INIT, &format!("{text:?}"), "500ms", "off"] {
                assert!(error.contains(part), "{text:?}: {error}");
            }
        }
    }

    #[test]
    fn each_variable_sets_its_own_timeout() {
        let seven = Some(Duration::from_secs(7));
        let none = EnvTimeouts::default();
        for (variable, set) in [
            (
                QUEUE,
                EnvTimeouts {
                    queue: seven,
                    ..none
                },
            ),
            (
                INIT,
                EnvTimeouts {
                    init: seven,
                    ..none
                },
            ),
            (
                FINALIZE,
                EnvTimeouts {
                    finalize: seven,
                    ..none
                },
            ),
            (
                ABORT,
                EnvTimeouts {
                    abort: seven,
                    ..none
                },
            ),
            (
                CONFIRM,
                EnvTimeouts {
                    confirm: seven,
                    ..none
                },
            ),
            (
                STRAGGLER,
                EnvTimeouts {
                    straggler: seven,
                    ..none
                },
            ),
            (
                WORLD,
                EnvTimeouts {
                    world: seven,
                    ..none
                },
            ),
            (
                OPERATION,
                EnvTimeouts {
                    operation: seven,
                    ..none
                },
            ),
        ] {
            assert_eq!(read(&[(variable, "7")]), Ok(set), "{variable}");
        }
    }

    #[test]
    fn off_is_off_wherever_ranks_wait_for_each_other_unless_a_variable_of_its_own_says_otherwise() {
        let off = read(&[(OPERATION, "off"), (FINALIZE, "7")]).expect("timeouts");
        let none = Some(Duration::MAX);
        assert_eq!(
            (off.operation, off.queue, off.init, off.world),
            (none, none, none, none)
        );
        assert_eq!(off.finalize, Some(Duration::from_secs(7)));
        // The end of a communicator keeps its timeouts.
        assert_eq!((off.abort, off.confirm), (None, None));
    }
}
