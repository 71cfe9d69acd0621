//! Runs tests one by one, each in a separate process and with a limit, and compares the results with the expected ones.
//!
//! `exceptions.txt` lists the tests that cannot run on NVIDIA's library, with the reasons. They are still run: an exception
//! that passes is as wrong as an unlisted failure, unless it is marked as passing sometimes.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::Result;
use crate::arguments::Usage;
use crate::test_files::TestFile;
use crate::workspace::output;

/// How a test is run.
pub(super) struct Way<'a> {
    /// Longer than any test waits for its children.
    pub(super) limit: Duration,
    /// The program, with its options, under which the test runs, if any.
    pub(super) under: &'a [OsString],
    pub(super) prepare: &'a (dyn Fn(&mut Command) + Sync),
}

impl Way<'_> {
    /// Longer than any test takes.
    pub(super) const LIMIT: Duration = Duration::from_secs(600);

    fn command(&self, executable: &Path) -> Command {
        match self.under {
            [] => Command::new(executable),
            [program, options @ ..] => {
                let mut command = Command::new(program);
                command.args(options).arg(executable);
                command
            }
        }
    }
}

/// The exceptions in the repository.
const EXCEPTIONS: &str = include_str!("exceptions.txt");

/// A built test file: a binary, or a module of one.
#[derive(Debug, Clone)]
pub(super) struct Built {
    /// The name of the file.
    pub(super) name: String,
    /// The prefix of the names of its tests in the binary.
    prefix: String,
    pub(super) executable: PathBuf,
    /// The directory in which cargo would run it.
    pub(super) directory: PathBuf,
}

impl Built {
    /// The binaries in cargo's messages.
    pub(super) fn of_messages(messages: &str) -> Vec<Self> {
        let messages = messages
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let built = |message: Value| {
            let target = &message["target"];
            if target["kind"][0] != "test" {
                return None;
            }
            let manifest = PathBuf::from(message["manifest_path"].as_str()?);
            Some(Self {
                name: target["name"].as_str()?.to_owned(),
                prefix: String::new(),
                executable: message["executable"].as_str()?.into(),
                directory: manifest.parent()?.to_owned(),
            })
        };
        messages.filter_map(built).collect()
    }

    /// Returns these files, with their binaries.
    pub(super) fn of_files(binaries: &[Self], files: &[&TestFile]) -> Vec<Self> {
        let built = |file: &&TestFile| {
            let binary = binaries.iter().find(|binary| binary.name == file.target)?;
            Some(Self {
                name: file.name().to_owned(),
                prefix: file.prefix(),
                ..binary.clone()
            })
        };
        files.iter().filter_map(built).collect()
    }

    /// Returns `file::test`; the name of a test in a module already has this form.
    fn full_name(&self, test: &str) -> String {
        match self.prefix.is_empty() {
            true => format!("{}::{test}", self.name),
            false => test.to_owned(),
        }
    }

    /// Returns its tests, except those that run only on request.
    fn tests(&self) -> Result<Vec<String>> {
        let list = |more: &[&str]| -> Result<Vec<String>> {
            let mut command = Command::new(&self.executable);
            command.args(["--list", "--format", "terse"]).args(more);
            let said = output(command.current_dir(&self.directory))?;
            let names = said.lines().filter_map(|line| line.strip_suffix(": test"));
            Ok(names.map(str::to_owned).collect())
        };
        let ignored = list(&["--ignored"])?;
        let mut all = list(&[])?;
        all.retain(|name| name.starts_with(&self.prefix) && !ignored.contains(name));
        Ok(all)
    }
}

/// The exceptions, by `file::test`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Exceptions(BTreeMap<String, Exception>);

/// A test that cannot run on NVIDIA's library.
#[derive(Debug, PartialEq, Eq)]
struct Exception {
    reason: String,
    /// Whether the test passes on a fast machine, or with a lucky order of its threads.
    sometimes_passes: bool,
}

impl Exceptions {
    pub(super) fn known() -> Result<Self> {
        Self::parse(EXCEPTIONS)
    }

    /// A reason begins a line; its tests follow, each in a line that begins with blanks, and ends with
    /// `(sometimes passes)` or not.
    fn parse(text: &str) -> Result<Self> {
        let mut known = BTreeMap::new();
        let mut reason = None;
        for (number, line) in (1..).zip(text.lines()) {
            let wrong = |what: &str| format!("exceptions.txt, line {number}: {what}");
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            if !line.starts_with(' ') {
                reason = Some(line.trim().to_owned());
                continue;
            }
            let reason = reason
                .clone()
                .ok_or_else(|| wrong("a test without a reason"))?;
            let name = line.trim();
            let bare = name.strip_suffix("(sometimes passes)");
            let exception = Exception {
                reason,
                sometimes_passes: bare.is_some(),
            };
            let name = bare.unwrap_or(name).trim_end().to_owned();
            if known.insert(name, exception).is_some() {
                return Err(wrong("the test is there twice").into());
            }
        }
        Ok(Self(known))
    }
}

/// The result of a test.
#[derive(Debug, Clone)]
struct Outcome {
    passed: bool,
    took: Duration,
    said: String,
}

/// The arguments after `--`, as for a test program: the number of concurrent tests, and which to run.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Options {
    at_a_time: usize,
    /// Parts of test names; empty: all tests.
    filters: Vec<String>,
}

impl Options {
    pub(super) fn parse(behind: &[OsString]) -> Result<Self> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        // Tests of several processes mostly wait.
        let mut options = Self {
            at_a_time: cores.max(4),
            filters: Vec::new(),
        };
        for option in behind {
            let option = option.to_string_lossy();
            match option.strip_prefix("--test-threads=") {
                Some(number) => {
                    let number = number.parse().ok().filter(|&number| number > 0);
                    options.at_a_time = number
                        .ok_or_else(|| Usage(format!("`{option}` is no number of threads")))?;
                }
                None if option.starts_with('-') => {
                    let text = format!("tests that run one by one do not know `{option}`");
                    return Err(Usage(text).into());
                }
                None => options.filters.push(option.into_owned()),
            }
        }
        Ok(options)
    }

    /// Without filters: selects these tests and no others.
    pub(super) fn only<'t>(&mut self, tests: impl Iterator<Item = &'t &'t str>) {
        if self.filters.is_empty() {
            self.filters = tests.map(|&test| test.to_owned()).collect();
        }
    }

    fn takes(&self, test: &str) -> bool {
        self.filters.is_empty() || self.filters.iter().any(|filter| test.contains(filter))
    }
}

/// Runs all tests of these files, several at a time.
///
/// # Errors
/// A test that failed and is no exception, an exception that passed, or an exception for a test that does not exist.
pub(super) fn run(
    files: &[Built],
    exceptions: &Exceptions,
    options: &Options,
    way: &Way<'_>,
) -> Result {
    let mut tests = Vec::new();
    for file in files {
        let taken = file.tests()?.into_iter().filter(|test| options.takes(test));
        tests.extend(taken.map(|test| (file, test)));
    }
    if let Some(unknown) = options
        .filters
        .iter()
        .find(|filter| !tests.iter().any(|(_, test)| test.contains(*filter)))
    {
        return Err(format!("no test has `{unknown}` in its name").into());
    }
    let next = AtomicUsize::new(0);
    let outcomes = Mutex::new(BTreeMap::new());
    thread::scope(|scope| {
        for _ in 0..options.at_a_time {
            scope.spawn(|| {
                while let Some((file, test)) = tests.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let outcome = run_one(file, test, way).unwrap_or_else(|error| Outcome {
                        passed: false,
                        took: Duration::ZERO,
                        said: error.to_string(),
                    });
                    let name = file.full_name(test);
                    let word = match (outcome.passed, exceptions.0.contains_key(&name)) {
                        (true, false) => "ok",
                        (false, true) => "fails, as it must",
                        (true, true) => "PASSES, but is an exception",
                        (false, false) => "FAILED",
                    };
                    eprintln!(
                        "test {name} ... {word} ({:.1} s)",
                        outcome.took.as_secs_f64()
                    );
                    if let Ok(mut outcomes) = outcomes.lock() {
                        outcomes.insert(name, outcome);
                    }
                }
            });
        }
    });
    let outcomes = outcomes.into_inner().unwrap_or_default();
    let whole = files.iter().filter(|_| options.filters.is_empty());
    let names: Vec<_> = whole.map(|file| file.name.as_str()).collect();
    judge(&names, &outcomes, exceptions)
}

/// Compares the outcomes of all tests of these files with the expected ones.
fn judge(
    files: &[&str],
    outcomes: &BTreeMap<String, Outcome>,
    Exceptions(exceptions): &Exceptions,
) -> Result {
    let mut text = String::new();
    let mut failed = 0;
    for (name, outcome) in outcomes {
        match (outcome.passed, exceptions.get(name)) {
            (false, None) => {
                failed += 1;
                let _ = writeln!(text, "---- {name}\n{}", outcome.said.trim_end());
            }
            (true, Some(exception)) if !exception.sometimes_passes => {
                failed += 1;
                let reason = &exception.reason;
                let _ = writeln!(text, "---- {name} passes, but is an exception: {reason}");
            }
            (true, _) | (false, Some(_)) => {}
        }
    }
    for name in exceptions.keys() {
        let file = name.split("::").next().unwrap_or_default();
        if files.contains(&file) && !outcomes.contains_key(name) {
            failed += 1;
            let _ = writeln!(text, "---- there is no test {name}, but it is an exception");
        }
    }
    let excepted = outcomes
        .keys()
        .filter(|name| exceptions.contains_key(*name));
    let (all, excepted) = (outcomes.len(), excepted.count());
    eprint!("{text}");
    eprintln!("real-nccl: {all} tests one by one, {excepted} exceptions, {failed} not as expected");
    match failed {
        0 => Ok(()),
        _ => Err(format!("{failed} of {all} tests are not as expected").into()),
    }
}

fn run_one(file: &Built, test: &str, way: &Way<'_>) -> Result<Outcome> {
    // A file, not a pipe: processes that a test leaves behind may hold a pipe open.
    let mut said = tempfile::tempfile()?;
    let mut command = way.command(&file.executable);
    command
        .args(["--exact", test, "--test-threads=1"])
        .current_dir(&file.directory)
        .env("CARGO_MANIFEST_DIR", &file.directory)
        .stdin(Stdio::null())
        .stdout(said.try_clone()?)
        .stderr(said.try_clone()?)
        .process_group(0);
    (way.prepare)(&mut command);
    let begun = Instant::now();
    let mut child = command.spawn()?;
    let mut late = false;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if begun.elapsed() > way.limit && !late {
            late = true;
            let group = format!("-{}", child.id());
            Command::new("kill")
                .args(["-KILL", "--", &group])
                .status()?;
        }
        thread::sleep(Duration::from_millis(5));
    };
    let took = begun.elapsed();
    let mut text = read(&mut said)?;
    if late {
        let _ = writeln!(text, "it has not ended after {} s", way.limit.as_secs());
    }
    Ok(Outcome {
        passed: status.success(),
        took,
        said: text,
    })
}

fn read(file: &mut File) -> Result<String> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcomes(all: &[(&str, bool)]) -> BTreeMap<String, Outcome> {
        let outcome = |passed| Outcome {
            passed,
            took: Duration::ZERO,
            said: "what it said".into(),
        };
        let named = |&(name, passed): &(&str, bool)| (name.to_owned(), outcome(passed));
        all.iter().map(named).collect()
    }

    #[test]
    fn exceptions_are_reasons_with_tests() {
        let text = "# about\n\nit asks for an old release\n  a::one\n  a::b::two (sometimes passes)\n\nit reads nothing\n  c::d\n";
        let known = Exceptions::parse(text).unwrap().0;
        assert_eq!(known.len(), 3);
        let has = |name, reason, sometimes| {
            let known: &Exception = &known[name];
            assert_eq!(
                (&*known.reason, known.sometimes_passes),
                (reason, sometimes)
            );
        };
        has("a::one", "it asks for an old release", false);
        has("a::b::two", "it asks for an old release", true);
        has("c::d", "it reads nothing", false);
        for wrong in ["  a::one\n", "why\n  a::one\n  a::one\n"] {
            assert!(Exceptions::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_exceptions_have_reasons_that_say_something() {
        for (test, Exception { reason, .. }) in Exceptions::known().unwrap().0 {
            assert!(
                reason.len() > 20 && !reason.contains("fail"),
                "{test}: {reason}"
            );
        }
    }

    #[test]
    fn what_is_behind_the_dashes_is_threads_and_filters() {
        let parse =
            |all: &[&str]| Options::parse(&all.iter().map(OsString::from).collect::<Vec<_>>());
        let options = parse(&["--test-threads=3", "aborts"]).unwrap();
        assert_eq!(options.at_a_time, 3);
        assert!(options.takes("all::aborts_end") && !options.takes("sends"));
        assert!(parse(&[]).unwrap().takes("sends"));
        for wrong in ["--test-threads=0", "--nocapture"] {
            assert!(parse(&[wrong]).unwrap_err().is::<Usage>());
        }
    }

    #[test]
    fn a_test_has_the_name_of_its_file_whether_that_is_a_binary_or_a_module() {
        let binary = Built {
            name: "api".into(),
            prefix: String::new(),
            executable: "api-0".into(),
            directory: "tests".into(),
        };
        assert_eq!(binary.full_name("plans::one"), "api::plans::one");
        let file = TestFile {
            package: "nccl-tests".into(),
            target: "api".into(),
            module: Some("plans".into()),
        };
        let [module] = &Built::of_files(&[binary], &[&file])[..] else {
            panic!("one file");
        };
        assert_eq!(module.full_name("plans::one"), "plans::one");
    }

    #[test]
    fn both_ways_are_compared() {
        let known = Exceptions::parse("a reason\n  a::excepted\n").unwrap();
        let judge = |all| judge(&["a"], &outcomes(all), &known);
        assert!(judge(&[("a::one", true), ("a::excepted", false)]).is_ok());
        assert!(judge(&[("a::one", false), ("a::excepted", false)]).is_err());
        assert!(judge(&[("a::one", true), ("a::excepted", true)]).is_err());
        assert!(judge(&[("a::one", true)]).is_err(), "the exception is gone");
        let known = Exceptions::parse("a reason\n  a::excepted (sometimes passes)\n").unwrap();
        for passes in [true, false] {
            assert!(super::judge(&["a"], &outcomes(&[("a::excepted", passes)]), &known).is_ok());
        }
    }

    #[test]
    fn exceptions_of_files_that_are_not_run_are_not_missed() {
        let known = Exceptions::parse("a reason\n  b::excepted\n").unwrap();
        assert!(judge(&["a"], &outcomes(&[("a::one", true)]), &known).is_ok());
    }
}
