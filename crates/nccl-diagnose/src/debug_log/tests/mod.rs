//! Logs of several releases and several ranks, their facts, and their findings.

mod facts;
mod findings;
mod garbage;

use super::DebugLog;

/// A log of `logs/`.
fn text(name: &str) -> Vec<u8> {
    let path = format!(
        "{}/src/debug_log/tests/logs/{name}",
        env!("CARGO_MANIFEST_DIR")
    );
    std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Reads these logs.
fn read(names: &[&str]) -> DebugLog {
    let mut log = DebugLog::new();
    for name in names {
        log.read(name, &text(name)[..]).unwrap();
    }
    log
}

/// Reads this text as a log.
fn read_text(text: &str) -> DebugLog {
    let mut log = DebugLog::new();
    log.read("log", text.as_bytes()).unwrap();
    log
}
