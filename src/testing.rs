//! Tests that need processes of their own.
//!
//! A test starts its own binary again, for this one test alone ([`again`]); the function of the test then runs a second
//! time, in the new process, and detects that ([`Role::of`]). So the code of a rank is in the test itself, a killed
//! rank is a real process, and process-wide settings, like the emulator, apply to one test only.

use std::any::type_name;
use std::env;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, exit};
use std::time::{Duration, Instant};

use procfs::FromRead;
use procfs::process::Stat;

/// The test, and the role, for which a test binary was started again.
const VARIABLE: &str = "NCCL_TOOLS_TEST_ROLE";

/// The process of a test that this code runs in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// The process that the user started.
    Test,
    /// A process that the test started, for the role of this name.
    Child(String),
}

impl Role {
    /// The role of this process in the test called `test`.
    #[must_use]
    pub fn of(test: &str) -> Self {
        let Ok(value) = env::var(VARIABLE) else {
            return Self::Test;
        };
        match value.split_once(' ') {
            Some((name, role)) if name == test => Self::Child(role.to_owned()),
            _ => Self::Test,
        }
    }
}

/// Whether this process was started for a role of some test.
#[must_use]
pub fn is_child() -> bool {
    env::var_os(VARIABLE).is_some()
}

/// The name by which the test runner knows the running test, which calls this with a closure of its own (the closure's
/// type names the test function).
///
/// # Panics
/// When the caller is no test.
#[must_use]
pub fn name<F>(_: &F) -> String {
    // A thread of the test runner has the name of the test, unless tests run one after another.
    let thread = std::thread::current();
    if let Some(name) = thread.name().filter(|&name| name != "main") {
        return name.to_owned();
    }
    // `crate::module::test::{{closure}}`
    let path = type_name::<F>();
    let name = path
        .split_once("::")
        .map(|(_, path)| path.split("::{{closure}}").next().unwrap_or(path));
    name.unwrap_or_else(|| panic!("{path} is no closure of a test"))
        .to_owned()
}

/// The command that runs the test called `test` in a new process, as `role`.
///
/// # Panics
/// When the binary of the test cannot be found.
#[must_use]
pub fn again(test: &str, role: &str) -> Command {
    let binary = env::current_exe().expect("a test binary knows where it is");
    let mut command = Command::new(binary);
    command
        .args([
            "--exact",
            test,
            "--nocapture",
            "--include-ignored",
            "--test-threads",
            "1",
        ])
        .env(VARIABLE, format!("{test} {role}"));
    command
}

/// Waits until `condition` holds.
///
/// # Panics
/// When that takes more than 20 s.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "never happened: {what}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a process exists and is no zombie.
#[must_use]
pub fn lives(pid: u32) -> bool {
    let stat = Stat::from_file(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| stat.state != 'Z')
}

/// The return value of a rank of a test: nothing, or a result.
pub trait Verdict {
    /// Why it failed, if it did.
    ///
    /// # Errors
    /// The failure's text.
    fn verdict(self) -> Result<(), String>;
}

impl Verdict for () {
    fn verdict(self) -> Result<(), String> {
        Ok(())
    }
}

impl<E: fmt::Display> Verdict for Result<(), E> {
    fn verdict(self) -> Result<(), String> {
        self.map_err(|error| format!("{error:#}"))
    }
}

/// Runs the code of a child and ends the process, so that no code of the test runs twice: with exit code 0, or with 101
/// after a panic or an error, as tests do.
pub fn end_with<V: Verdict>(body: impl FnOnce() -> V) -> ! {
    match catch_unwind(AssertUnwindSafe(|| body().verdict())) {
        Ok(Ok(())) => exit(0),
        Ok(Err(error)) => {
            eprintln!("{error}");
            exit(101)
        }
        // The panic has been printed.
        Err(_) => exit(101),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_knows_its_name() {
        let expected = "testing::tests::a_test_knows_its_name";
        assert_eq!(name(&|| ()), expected);
        // Also where the runner uses no thread for it.
        let on_main = type_name_of(|| ());
        assert_eq!(on_main, format!("nccl_tools::{expected}::{{{{closure}}}}"));
    }

    fn type_name_of<F>(_: F) -> &'static str {
        type_name::<F>()
    }

    #[test]
    fn a_test_can_be_two_processes() {
        let test = name(&|| ());
        if let Role::Child(role) = Role::of(&test) {
            end_with(|| {
                if role == "good" {
                    Ok(())
                } else {
                    Err(format!("{role} is no good"))
                }
            });
        }
        let good = again(&test, "good").output().unwrap();
        assert_eq!(good.status.code(), Some(0), "{good:?}");
        let bad = again(&test, "evil twin").output().unwrap();
        assert_eq!(bad.status.code(), Some(101), "{bad:?}");
        assert!(
            String::from_utf8_lossy(&bad.stderr).contains("evil twin is no good"),
            "{bad:?}"
        );
    }
}
