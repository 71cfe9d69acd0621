//! `sanitize`: runs tests of the crates under the address or the thread sanitizer.
//!
//! The sanitizers of rustc are not stable, but come with a stable toolchain, which accepts unstable flags when
//! `RUSTC_BOOTSTRAP` is set. The thread sanitizer must see the standard library's own atomics and locks, or it reports
//! false races: that library is built, too, from the component `rust-src`.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::arguments::{Arguments, Usage};
use crate::test_files::of_packages;
use crate::{Result, workspace};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sanitizer {
    Address,
    Thread,
}

impl Sanitizer {
    /// Parses rustc's name for it.
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

/// The crates whose unit tests run: the emulator runs in the same process as `nccl`, and is checked as well.
const CRATES: &[&str] = &[
    "--package=nccl-sys",
    "--package=lsa-protocol",
    "--package=nccl",
    "--package=nccl-base",
    "--package=nccl-control",
    "--package=nccl-core",
    "--package=nccl-lsa",
    "--package=nccl-moe",
    "--package=nccl-diagnose",
    "--package=nccl-launch",
    "--package=nccl-plugin",
    "--package=stand-in-object",
    "--package=nccl-emulator",
    "--package=cuda-emulator",
];

/// The packages of the tools and of `tests/`: they have more dependencies than all the crates.
const TOOLS: &[&str] = &["--package=nccl-tools", "--package=nccl-tests"];

/// Files of `tests/` that lend and free memory, and those with threads and shared memory.
const CAPABILITIES: &[&str] = &[
    "abort_together",
    "aborts",
    "all_to_all",
    "awaiting",
    "buffers",
    "deadlines",
    "hangs",
    "killed",
    "launch_modes",
    "memory_release",
    "memory",
    "operations",
    "plans",
    "profiler_storm",
    "recorder",
    "succession",
    "stuck_calls",
    "watchdog",
];

/// Tests of the resources that remain after the end of a communicator or a process: only for the address sanitizer.
const ENDS: &[&str] = &[
    "abort_all",
    "captures_differ",
    "exits",
    "held_by_graphs",
    "revoke",
];

/// Unit tests with one thread and without `unsafe` that try very many inputs: a sanitizer cannot find anything in them, and
/// they took longer than all others together.
const ONE_THREAD: &[&str] = &[
    "debug_log::tests::garbage::",
    "tests::codec::",
    "preflight::tests::random::",
    "system::variables::tests::no_file_makes_the_parser_panic_or_give_more_than_nccl_takes",
    "launcher::nodelist::tests::",
    "timeline::tests::json::",
    "timeline::tests::large::",
];

/// Kernels of NCCL that are stepped in one thread, rank by rank: the thread sanitizer cannot find anything in them.
const STEPPED: &str = "real::kernels::";
/// Thousands of launches of these kernels; under the address sanitizer they took longer than all other tests together.
const MANY_LAUNCHES: &str = "real::kernels::symmetric::tests::kernels::";

/// 64 ranks in one process take minutes under the thread sanitizer, and exceed the limit of an init; sealing 200 MiB and more
/// with an unoptimised cipher takes longer than a round may.
const TOO_SLOW: &[&str] = &[
    "the_model_counts_the_messages_and_bytes_that_the_emulator_carries",
    "tests::what_is_too_large_is_refused_on_every_rank_and_the_world_goes_on",
    "tests::several_large_values_for_one_rank_at_one_moment_keep_its_connection",
];

/// Deliberate leaks, with the tests that show them: a request that nothing depends on, and memory that NCCL may still use; data
/// of leaked communicators, and of threads that are inside a call when the process ends: the place for the communicator that a
/// call creates, which NCCL may still write to (`hangs`), and the watchdog's data while it is inside a call. The root of an
/// init that not all ranks joined waits for them as long as its process lives, as NCCL's root does; the sanitizer does not
/// always find the stack of such a thread, nor its list of destructors (`__cxa_thread_atexit_impl`). The frame that calls into
/// the standard library may be missing on a stack, so its caller's frame is named as well.
const LEAKS: &str = "\
leak:operations_after_a_group_are_not_part_of_it
leak:what_is_over_is_released_once_and_what_never_is_stays
leak:ranks_that_have_begun_do_not_wait_for_one_that_has_no_thread
leak:an_abort_that_hangs_is_reported_as_a_leak_and_not_waited_for
leak:an_abort_that_does_not_come_back_names_the_plan_that_holds_it
leak:hangs::build
leak:hangs::grow
leak:nccl_emulator::nccl::bootstrap::root::start
leak:start_root
leak:__cxa_thread_atexit_impl
leak:nccl_core::creation::init::stream_and_event
leak:nccl_core::supervision::watchdog::poll::CommunicatorPoller
leak:nccl_core::supervision::watchdog::registry::Mark
";

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    let all = arguments.flag("--all");
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
    for tests in selected(sanitizer, all)? {
        workspace::run(&mut command(sanitizer, all, &tests, &host, &target, &leaks))?;
    }
    Ok(())
}

/// The tests of one command: the options that choose targets, and the prefixes of the names of their tests; without prefixes,
/// all tests.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tests {
    targets: Vec<String>,
    names: Vec<String>,
}

/// Returns the unit tests, the files that are binaries, and the chosen modules of each binary with many files. The latter have
/// one command each, because Cargo passes the names to all binaries of a command.
fn selected(sanitizer: Sanitizer, all: bool) -> Result<Vec<Tests>> {
    let mut files: Vec<&str> = Vec::new();
    if all {
        files.extend(CAPABILITIES);
    }
    if all && sanitizer == Sanitizer::Address {
        files.extend(ENDS);
    }
    let known = of_packages(&["nccl-tests"])?;
    let mut alone = Tests::default();
    let mut merged = BTreeMap::<String, Tests>::new();
    for name in files {
        let file = known.iter().find(|file| file.name() == name);
        let file = file.ok_or_else(|| format!("there is no file {name} in tests"))?;
        let target = format!("--test={}", file.target);
        if file.module.is_none() {
            alone.targets.push(target);
            continue;
        }
        let tests = merged.entry(file.target.clone()).or_default();
        tests.targets = vec![target];
        tests.names.push(file.prefix());
    }
    let unit = Tests {
        targets: vec!["--lib".to_owned()],
        names: Vec::new(),
    };
    let groups = [unit, alone].into_iter().chain(merged.into_values());
    Ok(groups.filter(|tests| !tests.targets.is_empty()).collect())
}

/// Creates a command. All commands have the same packages, so that shared code is built once, with the same features.
fn command(
    sanitizer: Sanitizer,
    all: bool,
    tests: &Tests,
    host: &str,
    target: &Path,
    leaks: &Path,
) -> Command {
    let flags = env::var("RUSTFLAGS").unwrap_or_default();
    let mut cargo = workspace::cargo();
    cargo
        .current_dir(workspace::root())
        // A target of its own: build scripts and macros are built without the sanitizer.
        .args(["test", "--target", host])
        // Reports, and the suppressions of leaks that tests make on purpose, name functions: none is to be inlined.
        .args(["--config", "profile.dev.package.nccl-core.opt-level=0"])
        .args(CRATES)
        .env("RUSTC_BOOTSTRAP", "1")
        .env(
            "RUSTFLAGS",
            format!("{flags} -Zsanitizer={}", sanitizer.name()),
        )
        .env("CARGO_TARGET_DIR", target.join(sanitizer.name()))
        // Reports show lines. Debug information about variables is not needed, and takes time to generate.
        .env("CARGO_PROFILE_DEV_DEBUG", "line-tables-only")
        .env("NCCL_TEST_PATIENCE", "4")
        // Freed memory is quarantined for a while, but not so much that tests which measure the memory of a process
        // notice it.
        .env("ASAN_OPTIONS", "quarantine_size_mb=32")
        .env("LSAN_OPTIONS", format!("suppressions={}", leaks.display()));
    if all {
        cargo.args(TOOLS);
    }
    cargo.args(&tests.targets);
    match sanitizer {
        Sanitizer::Address => cargo.args(["--", "--skip", MANY_LAUNCHES]),
        Sanitizer::Thread => cargo.args(["-Zbuild-std", "--", "--skip", STEPPED]),
    };
    cargo.args(&tests.names);
    for name in ONE_THREAD.iter().chain(TOO_SLOW) {
        cargo.args(["--skip", name]);
    }
    cargo
}

/// The platform that rustc builds for by default.
fn host() -> Result<String> {
    let version = workspace::output(Command::new("rustc").arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.ok_or("rustc -vV does not name its host")?.to_owned())
}

/// The sources of the standard library, installed by rustup if they are missing.
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
    use crate::house;

    /// An outdated name in the lists would silently leave nothing out.
    #[test]
    fn what_is_left_out_is_there() {
        for name in ONE_THREAD {
            let (module, test) = name.rsplit_once("::").expect("a path");
            let files = [
                "nccl/src",
                "crates/nccl-base/src",
                "crates/nccl-control/src",
                "crates/nccl-core/src",
                "crates/nccl-diagnose/src",
            ]
            .map(|sources| {
                let stem = workspace::root()
                    .join(sources)
                    .join(module.replace("::", "/"));
                let inside = stem
                    .parent()
                    .expect("it is in a crate")
                    .with_extension("rs");
                [stem.with_extension("rs"), stem.join("mod.rs"), inside]
            });
            let text = files
                .iter()
                .flatten()
                .find_map(|file| fs::read_to_string(file).ok())
                .unwrap_or_else(|| panic!("no file for {module}"));
            assert!(text.contains(&format!("fn {test}")), "{name}");
            assert!(
                !text.contains("unsafe {") && !text.contains("thread::"),
                "{name}"
            );
        }
    }

    #[test]
    fn every_file_is_there_and_modules_are_chosen_in_their_binary_alone() {
        let all = |sanitizer| selected(sanitizer, true).unwrap();
        let [unit, alone, api, failures, tools] = &all(Sanitizer::Address)[..] else {
            panic!("five commands");
        };
        assert_eq!((&*unit.targets[0], unit.names.len()), ("--lib", 0));
        assert_eq!(alone.targets, ["--test=aborts", "--test=profiler_storm"]);
        assert!(api.names.contains(&"plans::".to_owned()) && alone.names.is_empty());
        assert_eq!(failures.targets, ["--test=failures"]);
        assert_eq!(tools.names, ["recorder::"]);
        let chosen = [api, failures, tools].map(|tests| tests.names.len());
        let files = CAPABILITIES.len() + ENDS.len();
        assert_eq!(chosen.iter().sum::<usize>() + alone.targets.len(), files);
        for sanitizer in [Sanitizer::Address, Sanitizer::Thread] {
            let [unit] = &selected(sanitizer, false).unwrap()[..] else {
                panic!("one command");
            };
            assert_eq!(unit.targets, ["--lib"]);
        }
    }

    #[test]
    fn every_crate_of_the_product_is_checked() {
        // All of candle would be built with the sanitizer as well.
        let all = house::CRATES.iter().map(|path| house::package_of(path));
        for package in all.filter(|package| *package != "nccl-candle") {
            let option = format!("--package={package}");
            assert!(CRATES.contains(&&*option), "{package}");
        }
    }

    #[test]
    fn sanitizers_are_known_by_the_names_of_rustc() {
        for sanitizer in [Sanitizer::Address, Sanitizer::Thread] {
            assert_eq!(Sanitizer::named(sanitizer.name()), Some(sanitizer));
        }
        assert_eq!(Sanitizer::named("memory"), None);
    }
}
