//! The state of a process, as reported by its kernel: read by a rank on the same host, and sent to all ranks.

use std::fmt;
use std::time::Duration;

use nccl_base::wire::clean;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use crate::departure::cut;

/// The state of a process; see the module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[doc(hidden)]
pub struct ProcessState {
    /// The state of the main thread, as a letter from `/proc`.
    #[serde(deserialize_with = "letter")]
    pub(super) letter: char,
    pub(super) held: Option<Held>,
}

/// What the control group with this path withholds from a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Held {
    /// Everything.
    Frozen {
        #[serde(deserialize_with = "clean")]
        cgroup: String,
    },
    /// Processor time; `time` is the total.
    Throttled {
        #[serde(deserialize_with = "clean")]
        cgroup: String,
        #[serde(deserialize_with = "clean")]
        time: Duration,
    },
}

impl ProcessState {
    /// Whether the process cannot run now, until another process changes that or a kernel call returns.
    pub(super) fn cannot_run(&self) -> bool {
        matches!(self.letter, 'T' | 't' | 'D' | 'Z' | 'X')
            || matches!(self.held, Some(Held::Frozen { .. }))
    }

    /// Whether a signal or a debugger has stopped the process.
    pub fn is_stopped(&self) -> bool {
        matches!(self.letter, 'T' | 't')
    }

    /// Truncates the texts, which come from another process.
    pub(super) fn cut(&mut self, longest: usize) {
        if let Some(Held::Frozen { cgroup } | Held::Throttled { cgroup, .. }) = &mut self.held {
            cut(cgroup, longest);
        }
    }
}

fn letter<'d, D: Deserializer<'d>>(from: D) -> Result<char, D::Error> {
    let letter = Some(char::deserialize(from)?).filter(char::is_ascii_alphabetic);
    letter.ok_or_else(|| D::Error::custom("no state of a process"))
}

impl fmt::Display for ProcessState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { letter, held } = self;
        let meaning = match letter {
            'R' => "running, or waiting for a processor",
            'S' => "sleeping",
            'D' => "waiting in the kernel, and cannot be interrupted",
            'T' => "stopped",
            't' => "stopped by a debugger",
            'Z' | 'X' => "ended",
            _ => "unknown",
        };
        write!(f, "process state {letter} ({meaning})")?;
        match held {
            None => Ok(()),
            Some(Held::Frozen { cgroup }) => write!(f, ", its cgroup {cgroup} is frozen"),
            Some(Held::Throttled { cgroup, time }) => write!(
                f,
                ", its cgroup {cgroup} was throttled for {:.1} s in all",
                time.as_secs_f64()
            ),
        }
    }
}

#[cfg(test)]
impl ProcessState {
    /// Returns the state of a process that SIGSTOP has stopped.
    pub(crate) fn stopped() -> Self {
        let held = None;
        Self { letter: 'T', held }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nccl_base::wire;

    #[test]
    fn a_process_that_cannot_run_is_distinguished_from_one_that_gets_little_time() {
        let state = |letter, held| ProcessState { letter, held };
        let cgroup = || String::from("/a stopped job");
        let time = Duration::from_millis(1240);
        let frozen = || Some(Held::Frozen { cgroup: cgroup() });
        let cgroup = cgroup();
        let throttled = Some(Held::Throttled { cgroup, time });
        for (state, cannot_run, is_stopped, text) in [
            (
                ProcessState::stopped(),
                true,
                true,
                "process state T (stopped)",
            ),
            (
                state('t', None),
                true,
                true,
                "process state t (stopped by a debugger)",
            ),
            (
                state('D', None),
                true,
                false,
                "process state D (waiting in the kernel, and cannot be interrupted)",
            ),
            (
                state('S', frozen()),
                true,
                false,
                "process state S (sleeping), its cgroup /a stopped job is frozen",
            ),
            (
                state('R', throttled),
                false,
                false,
                "process state R (running, or waiting for a processor), its cgroup /a stopped job was throttled for \
                 1.2 s in all",
            ),
        ] {
            assert_eq!(state.to_string(), text);
            assert_eq!(
                (state.cannot_run(), state.is_stopped()),
                (cannot_run, is_stopped),
                "{text}"
            );
            assert_eq!(wire::decode(&wire::encode(&state)), Ok(state));
        }
    }
}
