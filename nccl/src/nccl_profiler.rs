//! What NCCL reports of itself in this process, and how much of it is asked for.

use std::sync::{Once, OnceLock};

use nccl_plugin::Offer;
use nccl_plugin::profiler::{self, Events};

/// Says what NCCL is to report: `auto`, `off`, or a list of `operations`, `kernels`, `transfers` and `steps`.
const VARIABLE: &str = "NCCL_RUN_PROFILER";

const OPERATIONS: Events = Events {
    operations: true,
    transfers: false,
    steps: false,
    kernels: false,
};

/// What is asked for once a rank was late: costs more than a run without trouble should pay.
const CLOSER: Events = Events {
    transfers: true,
    steps: true,
    ..OPERATIONS
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Setting {
    Auto,
    Off,
    Only(Events),
}

/// Returns the setting that the text means; the words that mean nothing are in the error.
fn parse(text: &str) -> Result<Setting, String> {
    match text.trim() {
        "" | "auto" => return Ok(Setting::Auto),
        "off" => return Ok(Setting::Off),
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
        true => Ok(Setting::Only(events)),
        false => Err(unknown.join(", ")),
    }
}

fn setting() -> Setting {
    static SETTING: OnceLock<Setting> = OnceLock::new();
    *SETTING.get_or_init(|| {
        let text = std::env::var(VARIABLE).unwrap_or_default();
        parse(&text).unwrap_or_else(|unknown| {
            tracing::warn!(
                name: "nccl.profiler.unknown",
                target: "nccl",
                unknown,
                "{VARIABLE} is `auto`, `off`, or a list of `operations`, `kernels`, `transfers` and `steps`: it is taken as `auto`"
            );
            Setting::Auto
        })
    })
}

/// Offers NCCL the profiler of this process. Before the first communicator.
pub(crate) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let events = match setting() {
            Setting::Off => return,
            Setting::Auto => OPERATIONS,
            Setting::Only(events) => events,
        };
        profiler::set_events(events);
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

/// Asks for the transfers and steps of later operations, because a rank was late. What the user asked for stays.
pub(crate) fn look_closer() {
    if setting() == Setting::Auto {
        profiler::add_events(CLOSER);
    }
}

/// Logs once if NCCL has not taken the profiler, although it has made a communicator.
pub(crate) fn check_taken() {
    static ONCE: Once = Once::new();
    let is_offered = setting() != Setting::Off && *profiler::install() == Offer::Made;
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
        assert_eq!(parse(""), Ok(Setting::Auto));
        assert_eq!(parse(" auto "), Ok(Setting::Auto));
        assert_eq!(parse("off"), Ok(Setting::Off));
        let both = Events {
            operations: true,
            kernels: true,
            ..Events::default()
        };
        assert_eq!(parse("operations, kernels"), Ok(Setting::Only(both)));
        assert_eq!(parse("operations,on"), Err(String::from("on")));
    }
}
