//! `sanitize`: tests of the crates under the address or the thread sanitizer.
//!
//! The sanitizers of rustc are not stable, but come with a stable toolchain, which takes unstable flags
//! when `RUSTC_BOOTSTRAP` is set. The thread sanitizer has to see the standard library's own atomics and
//! locks, or it takes what they order for races: that library is built, too, from the component
//! `rust-src`.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::arguments::{Arguments, Usage};
use crate::{Result, workspace};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sanitizer {
    Address,
    Thread,
}

impl Sanitizer {
    /// By rustc's name for it.
    fn named(name: &str) -> Option<Self> {
        match name {
            "address" => Some(Self::Address),
            "thread" => Some(Self::Thread),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Address => "address",
            Self::Thread => "thread",
        }
    }
}

/// What is tested: what the crates test by themselves, and the capabilities in which threads and memory
/// meet. The emulator runs in the same process, and is looked at as well.
const TESTS: &[&[&str]] = &[
    &["--package", "nccl", "--package", "nccl-emulator", "--lib"],
    &[
        "--package",
        "nccl-tools",
        "--test",
        "memory",
        "--test",
        "deadlines",
        "--test",
        "operations",
        "--test",
        "awaiting",
        "--test",
        "buffers",
        "--test",
        "plans",
        "--test",
        "recorder",
        "--test",
        "aborts",
        "--test",
        "abort_together",
        "--test",
        "killed",
        "--test",
        "hangs",
        "--test",
        "watchdog",
        "--test",
        "launch_modes",
        "--test",
        "succession",
    ],
];

/// Leaks on purpose, by the tests that show what is leaked: a request that nothing depends on, and memory
/// that NCCL may still use; what belongs to communicators that are leaked, and to threads that are inside a call
/// when the process ends.
const LEAKS: &str = "\
leak:operations_after_a_group_are_not_part_of_it
leak:what_is_over_is_released_once_and_what_never_is_stays
leak:an_abort_that_hangs_is_reported_as_a_leak_and_not_waited_for
leak:an_abort_that_does_not_come_back_names_the_plan_that_holds_it
leak:hangs::
leak:nccl::communicator::init::stream_and_event
leak:nccl::supervision::watchdog::threads::watch
";

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    let name = arguments.word("the name of a sanitizer: address or thread")?;
    arguments.finish()?;
    let sanitizer = Sanitizer::named(&name)
        .ok_or_else(|| Usage(format!("there is no sanitizer `{name}`: address or thread")))?;
    let target = workspace::target_directory().join("sanitize");
    fs::create_dir_all(&target)?;
    let leaks = target.join("leaks.txt");
    fs::write(&leaks, LEAKS)?;
    if sanitizer == Sanitizer::Thread {
        need_library_sources()?;
    }
    let host = host()?;
    for tests in TESTS {
        workspace::run(&mut command(sanitizer, &host, &target, &leaks, tests))?;
    }
    Ok(())
}

fn command(
    sanitizer: Sanitizer,
    host: &str,
    target: &Path,
    leaks: &Path,
    tests: &[&str],
) -> Command {
    let flags = env::var("RUSTFLAGS").unwrap_or_default();
    let mut cargo = workspace::cargo();
    cargo
        .current_dir(workspace::root())
        // A target of its own: build scripts and macros are built without the sanitizer.
        .args(["test", "--target", host])
        .args(tests)
        .env("RUSTC_BOOTSTRAP", "1")
        .env(
            "RUSTFLAGS",
            format!("{flags} -Zsanitizer={}", sanitizer.name()),
        )
        .env("CARGO_TARGET_DIR", target.join(sanitizer.name()))
        .env("LSAN_OPTIONS", format!("suppressions={}", leaks.display()));
    if sanitizer == Sanitizer::Thread {
        cargo.arg("-Zbuild-std");
    }
    cargo
}

/// The platform that rustc builds for unless told otherwise.
fn host() -> Result<String> {
    let version = workspace::output(Command::new("rustc").arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.ok_or("rustc -vV does not name its host")?.to_owned())
}

/// The sources of the standard library, installed if they are not there and rustup can.
fn need_library_sources() -> Result {
    let root = workspace::output(Command::new("rustc").args(["--print", "sysroot"]))?;
    let sources = PathBuf::from(root.trim()).join("lib/rustlib/src/rust/library/Cargo.lock");
    if sources.exists() {
        return Ok(());
    }
    workspace::run(Command::new("rustup").args(["component", "add", "rust-src"])).map_err(|error| {
        format!(
            "the thread sanitizer needs the sources of the standard library, and {} is not there: \
             {error}",
            sources.display()
        )
        .into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sanitizers_are_known_by_the_names_of_rustc() {
        for sanitizer in [Sanitizer::Address, Sanitizer::Thread] {
            assert_eq!(Sanitizer::named(sanitizer.name()), Some(sanitizer));
        }
        assert_eq!(Sanitizer::named("memory"), None);
    }
}
