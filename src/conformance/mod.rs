//! The places where the emulator and NCCL could differ: one small program for each.
//!
//! A program ([`Program`]) calls NCCL's functions and records what it observes ([`Facts`]): codes, texts, received
//! data, whether a call returned. It runs in a process of its own under a deadline, once on NCCL and once on the
//! emulator ([`runner`]); [`compare`](mod@compare) compares both. An intended difference is listed with its reason
//! ([`intended`]); any other is a defect of the emulator.
//!
//! `cargo xtask conformance` does that with NVIDIA's libraries on any machine: all programs on releases that the
//! emulator's driver supports, and those that need no device ([`Needs::Library`]) on others.

pub mod compare;
pub mod intended;
mod programs;
pub mod runner;

use std::fmt::Display;
use std::time::Duration;

pub use programs::PROGRAMS;

use crate::raw::{Rank, Result};

/// A program.
#[derive(Clone, Copy)]
pub struct Program {
    /// Its name.
    pub name: &'static str,
    /// The question that it answers.
    pub about: &'static str,
    /// Its requirements, and its code.
    pub needs: Needs,
    /// Variables of its processes.
    pub environment: &'static [(&'static str, &'static str)],
}

/// The requirements of a program, with its code.
#[derive(Clone, Copy)]
pub enum Needs {
    /// The library alone; a driver may be missing.
    Library(fn(&Facts) -> Result),
    /// This many ranks, each with a device, which they may share.
    Ranks(usize, fn(&Rank, &Facts) -> Result),
}

impl Program {
    const fn library(name: &'static str, about: &'static str, body: fn(&Facts) -> Result) -> Self {
        Self {
            name,
            about,
            needs: Needs::Library(body),
            environment: &[],
        }
    }

    const fn ranks(
        ranks: usize,
        name: &'static str,
        about: &'static str,
        body: fn(&Rank, &Facts) -> Result,
    ) -> Self {
        Self {
            name,
            about,
            needs: Needs::Ranks(ranks, body),
            environment: &[],
        }
    }

    const fn with(mut self, environment: &'static [(&'static str, &'static str)]) -> Self {
        self.environment = environment;
        self
    }
}

/// The observations of a program; each is written at once, because the next call may not return.
#[derive(Debug)]
pub struct Facts {
    /// The observing rank, if there are several.
    pub rank: Option<usize>,
}

/// The beginning of a fact's line.
const FACT: &str = "fact\t";

impl Facts {
    /// Adds an observation. It must not depend on time, addresses or the machine.
    pub fn add(&self, what: impl Display, value: impl Display) {
        use std::io::Write;
        let rank = self
            .rank
            .map_or(String::new(), |rank| format!("rank {rank}: "));
        let value = without_addresses(&value.to_string().replace(['\n', '\t'], " "));
        let mut out = std::io::stdout().lock();
        // If the reader is gone, the failure cannot be reported.
        let _ = writeln!(out, "{FACT}{rank}{what}\t{value}");
        let _ = out.flush();
    }

    /// Adds a code, with the text of the last error if it is an error.
    pub fn code(&self, what: impl Display, code: u32) {
        let text = match code {
            0 | crate::raw::IN_PROGRESS | crate::raw::MISSING => String::new(),
            _ => format!(": {}", crate::raw::last_error()),
        };
        self.add(what, format!("{}{text}", name_of(code)));
    }
}

/// Replaces every address in the text by an ellipsis.
fn without_addresses(text: &str) -> String {
    let mut parts = text.split("0x");
    let mut clean = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let rest = part.trim_start_matches(|c: char| c.is_ascii_hexdigit());
        let digits = &part[..part.len() - rest.len()];
        // A magic number that was passed as zero is no address.
        clean.push_str("0x");
        clean.push_str(if digits.len() > 8 { "…" } else { digits });
        clean.push_str(rest);
    }
    clean
}

/// The name of a result in `nccl.h`.
#[must_use]
pub fn name_of(code: u32) -> String {
    let names = [
        "ncclSuccess",
        "ncclUnhandledCudaError",
        "ncclSystemError",
        "ncclInternalError",
        "ncclInvalidArgument",
        "ncclInvalidUsage",
        "ncclRemoteError",
        "ncclInProgress",
        "ncclTimeout",
    ];
    match names.get(code as usize) {
        Some(name) => (*name).to_owned(),
        None if code == crate::raw::MISSING => "no such function".into(),
        None => format!("code {code}"),
    }
}

/// How long an operation may take before it is reported as hanging.
pub(crate) const HANGS: Duration = Duration::from_secs(2);

/// How long an operation may take that is expected to end.
pub(crate) const ENDS: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_no_facts_but_magic_numbers_are() {
        let text = "buffer 0x7f1eafe00000 or magic 0xcafebeef, got 0x0";
        let expected = "buffer 0x… or magic 0xcafebeef, got 0x0";
        assert_eq!(without_addresses(text), expected);
        assert_eq!(without_addresses("none"), "none");
    }
}
