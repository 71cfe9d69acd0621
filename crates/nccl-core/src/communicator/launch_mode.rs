//! The two launch modes, in which NCCL is called to put work on a stream: their requirements, and the environment
//! variables that contradict them.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use nccl_sys::Version;

use crate::error::{Error, ErrorKind, Result};
use crate::library::{Capability, Library};
use nccl_base::fault::Roster;

pub use nccl_base::launch_mode::LaunchMode;
pub(crate) use nccl_base::launch_mode::LaunchPreference;
use nccl_base::system::variables;

/// # Errors
/// [`ErrorKind::Unsupported`] when the library does not support this mode.
pub(crate) fn check_supported(mode: LaunchMode, library: &Library) -> Result<()> {
    match mode {
        LaunchMode::BlockingChild if !library.has(Capability::BlockingChild) => Err(library
            .unsupported(
                String::from("launch mode BlockingChild"),
                Capability::BlockingChild.since(),
            )),
        _ => Ok(()),
    }
}

/// Refuses environment variables and settings files that contradict how this mode uses NCCL; in NCCL they take
/// precedence over the configuration.
pub(crate) fn refuse_contradictions(mode: LaunchMode) -> Result<()> {
    for (variable, field) in CONTRADICTING {
        if let Some((value, origin)) = variables::variable(variable)
            && let Some(does) = mode.contradiction_of(variable, &value)
        {
            return Err(Error::new(ErrorKind::InvalidConfig {
                field,
                reason: format!("{variable}={value} in {origin} {does}; unset {variable}"),
            }));
        }
    }
    Ok(())
}

/// Variables that can contradict a mode, each with the configuration field that it overrides.
const CONTRADICTING: [(&str, &str); 2] = [
    ("NCCL_COMM_BLOCKING", "blocking"),
    ("NCCL_COMM_SPLIT_SHARE_RESOURCES", "splitShare"),
];

/// The variable that sets the mode where the program sets none.
const VARIABLE: &str = "NCCL_RUN_LAUNCH_MODE";

/// Why a rank without a requested mode does not use `BlockingChild`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Obstacle {
    Release { found: Version },
    Variable { text: String, does: &'static str },
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Release { found } => write!(
                f,
                "NCCL {found} is older than {}",
                Capability::BlockingChild.since()
            ),
            Self::Variable { text, does } => write!(f, "{text} {does}"),
        }
    }
}

/// Returns this rank's launch preference, and the obstacle to `BlockingChild` on this rank, if there is one.
///
/// # Errors
/// [`ErrorKind::InvalidConfig`] when the variable `NCCL_RUN_LAUNCH_MODE` is not the name of a mode.
pub(crate) fn preference(
    asked: Option<LaunchMode>,
    library: &Library,
) -> Result<(LaunchPreference, Option<Obstacle>)> {
    if let Some(mode) = asked.map_or_else(from_environment, |mode| Ok(Some(mode)))? {
        return Ok((LaunchPreference::Asked(mode), None));
    }
    Ok(match obstacle(library) {
        None => (LaunchPreference::Either, None),
        Some(obstacle) => (LaunchPreference::OnlyNonBlocking, Some(obstacle)),
    })
}

fn from_environment() -> Result<Option<LaunchMode>> {
    let Some(value) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) else {
        return Ok(None);
    };
    match value.to_str() {
        Some("blocking-child") => Ok(Some(LaunchMode::BlockingChild)),
        Some("non-blocking") => Ok(Some(LaunchMode::NonBlocking)),
        _ => Err(Error::new(ErrorKind::InvalidConfig {
            field: "launch_mode",
            reason: format!(
                "{VARIABLE}={} in the environment is no launch mode: set it to blocking-child or non-blocking",
                value.to_string_lossy()
            ),
        })),
    }
}

fn obstacle(library: &Library) -> Option<Obstacle> {
    if !library.has(Capability::BlockingChild) {
        let found = library.version();
        return Some(Obstacle::Release { found });
    }
    CONTRADICTING.iter().find_map(|(variable, _)| {
        let (value, origin) = variables::variable(variable)?;
        let does = LaunchMode::BlockingChild.contradiction_of(variable, &value)?;
        // A variable that contradicts both modes is an error in either.
        LaunchMode::NonBlocking
            .contradiction_of(variable, &value)
            .is_none()
            .then(|| Obstacle::Variable {
                text: format!("{variable}={value} in {origin}"),
                does,
            })
    })
}

/// Logs once per process why ranks without a requested mode use `NonBlocking`.
pub(crate) fn log_fallback((comm, roster): (&str, &Roster), rank: usize, why: &str) {
    static LOGGED: AtomicBool = AtomicBool::new(false);
    if !LOGGED.swap(true, Ordering::Relaxed) {
        let (world_rank, launcher_rank) = (roster.world_rank(rank), roster.launcher_rank(rank));
        tracing::info!(name: "nccl.comm.launch_mode", target: "nccl", comm, world_ranks = roster.world_ranks(), rank, world_rank, launcher_rank, why, "launch mode NonBlocking instead of BlockingChild");
    }
}

/// Returns the mode in which ranks with these preferences make a communicator; `who` names a rank.
///
/// # Errors
/// [`ErrorKind::InvalidConfig`] when a rank cannot use the mode that another rank requested.
pub(crate) fn common_mode(
    preferences: &[Option<LaunchPreference>],
    who: impl Fn(usize) -> String,
) -> Result<LaunchMode> {
    LaunchPreference::agree(preferences).map_err(|(mode, odd)| {
        let asking = preferences.iter().position(|preference| *preference == Some(LaunchPreference::Asked(mode)));
        let asking = asking.map_or_else(|| String::from("another rank"), &who);
        let odd_one = who(odd);
        let reason = match preferences[odd] {
            Some(LaunchPreference::Asked(other)) => format!(
                "{odd_one} makes it in launch mode {other}, and {asking} in {mode}: choose the same on all ranks"
            ),
            Some(_) => format!(
                "{odd_one} cannot make it in launch mode {mode}, for which {asking} asks: its NCCL is older than \
                 {}, or a variable of NCCL's contradicts it; choose no mode, or NonBlocking",
                Capability::BlockingChild.since()
            ),
            None => format!("{odd_one} makes it in a launch mode that is unknown here"),
        };
        Error::new(ErrorKind::InvalidConfig {
            field: "launch_mode",
            reason,
        })
    })
}
