//! What NCCL reports about itself in this process, and which reports are requested.

use std::sync::{Once, OnceLock};

use nccl_core::library::Library;
use nccl_plugin::Offer;
use nccl_plugin::profiler::{self, Events};

/// Selects what NCCL reports: `auto`, `off`, or a list of `operations`, `kernels`, `transfers` and `steps`.
const VARIABLE: &str = "NCCL_RUN_PROFILER";

/// All reports whose cost is negligible with NVIDIA's library (`docs/results/profiler.md`).
const AUTO: Events = Events {
    operations: true,
    transfers: true,
    steps: true,
    kernels: false,
};

/// Returns the events that the text requests, `None` for `off`. The error lists the unknown words.
fn parse(text: &str) -> Result<Option<Events>, String> {
    match text.trim() {
        "" | "auto" => return Ok(Some(AUTO)),
        "off" => return Ok(None),
        _ => {}
    }
    let mut events = Events::default();
    let mut unknown = Vec::new();
    for word in text.split(',').map(str::trim) {
        match word {
            "operations" => events.operations = true,
            "transfers" => events.transfers = true,
            "steps" => events.steps = true,
            "kernels" => events.kernels = true,
            other => unknown.push(other),
        }
    }
    match unknown.is_empty() {
        true => Ok(Some(events)),
        false => Err(unknown.join(", ")),
    }
}

/// Returns the requested events; `None` if the profiler is off.
fn setting() -> Option<Events> {
    static SETTING: OnceLock<Option<Events>> = OnceLock::new();
    *SETTING.get_or_init(|| {
        let text = std::env::var(VARIABLE).unwrap_or_default();
        parse(&text).unwrap_or_else(|unknown| {
            tracing::warn!(
                name: "nccl.profiler.unknown",
                target: "nccl",
                unknown,
                "{VARIABLE} is `auto`, `off`, or a list of `operations`, `kernels`, `transfers` and `steps`: it is taken as `auto`"
            );
            Some(AUTO)
        })
    })
}

/// Offers NCCL the profiler of this process. To be called before the first communicator.
pub(crate) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let Some(events) = setting() else {
            return;
        };
        profiler::set_events(events);
        if is_auto() {
            Library::on_load(less_on_the_emulator);
        }
        match profiler::install() {
            Offer::Made => {}
            Offer::UserHasOne(other) => {
                tracing::info!(name: "nccl.profiler.other", target: "nccl", %other, "NCCL reports to a profiler of the user's");
            }
            Offer::Failed(why) => {
                tracing::info!(name: "nccl.profiler.unavailable", target: "nccl", why, "NCCL reports to no profiler");
            }
        }
    });
}

/// Requests events on the emulator only for communicators of several hosts. On the emulator's own NCCL a report takes
/// as long as a small operation, and within a host it shows nothing: there is no transfer, and the algorithm is always
/// the same.
fn less_on_the_emulator(library: &Library) {
    if library.is_emulated() {
        profiler::add_events_between_hosts(AUTO);
        profiler::set_events(Events::default());
    }
}

/// Returns whether the variable is unset or `auto`.
fn is_auto() -> bool {
    std::env::var(VARIABLE).map_or(true, |text| {
        parse(&text) == Ok(Some(AUTO)) && !text.contains(',')
    })
}

/// Logs once if NCCL has not taken the profiler, although it has made a communicator.
pub(crate) fn check_taken() {
    static ONCE: Once = Once::new();
    let is_offered = setting().is_some() && *profiler::install() == Offer::Made;
    if is_offered && profiler::taken_by().is_none() {
        ONCE.call_once(|| {
            tracing::info!(
                name: "nccl.profiler.unused",
                target: "nccl",
                "NCCL has not taken the profiler of this process: it is older than 2.23, was used before the world was joined, or finds no \
                 plugin here (musl, another namespace of the dynamic linker)"
            );
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_has_two_words_and_a_list() {
        assert_eq!(parse(""), Ok(Some(AUTO)));
        assert_eq!(parse(" auto "), Ok(Some(AUTO)));
        assert_eq!(parse("off"), Ok(None));
        let both = Events {
            operations: true,
            kernels: true,
            ..Events::default()
        };
        assert_eq!(parse("operations, kernels"), Ok(Some(both)));
        assert_eq!(parse("operations,on"), Err(String::from("on")));
    }
}
