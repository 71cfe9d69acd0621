//! Tests of programs with several ranks: as threads of the test, or each in a process of its own.
//!
//! A process can be killed, has environment variables of its own, and limits an emulated fault to one test; threads
//! start faster.
//! Without a GPU the ranks run on the emulator (a dev-dependency on `nccl-emulator`).
//!
//! ```no_run
//! use std::error::Error;
//!
//! use nccl::{ReduceOp, World};
//!
//! fn sum(world: &World) -> Result<(), Box<dyn Error>> {
//!     nccl_emulator::install_unless_gpu()?;
//!     let stream = nccl::device(world.local_rank())?.new_stream()?;
//!     let comm = world.communicator("test").stream(&stream).build()?;
//!     let mut y = stream.clone_htod(&[1.0f32; 100])?;
//!     comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
//!     assert_eq!(stream.clone_dtoh(&y)?, [world.size() as f32; 100]);
//!     Ok(())
//! }
//!
//! #[test]
//! fn gradients_are_summed_between_processes() {
//!     nccl::testing::processes(3, sum);
//! }
//!
//! #[test]
//! fn gradients_are_summed_between_threads() {
//!     nccl::testing::threads(3, sum);
//! }
//! # fn main() {}
//! ```

use std::any::{Any, type_name};
use std::collections::HashMap;
use std::env;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, exit};
use std::sync::Arc;
use std::time::Duration;

use crate::launch::{Fleet, Output};
use crate::sync::Mutex;
use crate::{Rendezvous, World};

/// Maximum time for the ranks of a test.
const DEADLINE: Duration = Duration::from_secs(300);

/// What a rank of a test returns: nothing, or a result.
///
/// ```
/// use nccl::testing::Verdict;
///
/// assert_eq!(().verdict(), Ok(()));
/// assert_eq!(Err::<(), _>("too late").verdict(), Err(String::from("too late")));
/// ```
pub trait Verdict {
    /// Returns why the rank failed, if it did.
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

/// Runs `rank` once for each of `ranks`, on threads of this process, and waits for all of them.
///
/// A rank that fails leaves its world with its error, so that operations of the other ranks end with that error as the
/// cause.
///
/// # Panics
/// When a rank returns an error or panics: the message has the errors of all such ranks.
///
/// ```
/// nccl::testing::threads(2, |world| world.barrier("both are here"));
/// ```
pub fn threads<V: Verdict>(ranks: usize, rank: impl Fn(&World) -> V + Sync) {
    let failures = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for world in World::threads(ranks) {
            let (number, rank, failures) = (world.rank(), &rank, &failures);
            let run = move || {
                let outcome = catch_unwind(AssertUnwindSafe(|| judge(world, &rank)));
                let why = match outcome {
                    Ok(Ok(())) => return,
                    Ok(Err(error)) => error,
                    Err(panic) => format!("it panicked: {}", panic_text(&*panic)),
                };
                failures.lock().push(format!("rank {number}: {why}"));
            };
            let named = std::thread::Builder::new().name(format!("rank {number}"));
            named.spawn_scoped(scope, run).expect("a thread of a rank");
        }
    });
    let failures = failures.into_inner();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Runs `rank` once for each of `ranks`, each in a process of its own, and waits for all of them.
///
/// The ranks are this test's own binary, started again for this one test: code before this call runs in each of them as
/// well, code after it only in the test. A test may call this several times. `rank` runs in other processes, so it
/// cannot change variables of the test.
///
/// # Panics
/// When a rank returns an error, panics, dies, or has not ended after 5 minutes: the message has the first such rank,
/// and the output of all ranks. When this is called in a thread that the test has started, or not in all ranks alike.
///
/// ```no_run
/// #[test]
/// fn a_barrier_between_processes() {
///     nccl::testing::processes(2, |world| world.barrier("both are here"));
/// }
/// # fn main() {}
/// ```
pub fn processes<V: Verdict>(ranks: usize, rank: impl Fn(&World) -> V) {
    let call = Call::of(&rank);
    match call.place() {
        Place::Parent => start(ranks, call),
        Place::Past => {}
        Place::Rank => end_with(|| {
            let join = || World::join(Rendezvous::from_env()?);
            let world = join().map_err(|error| format!("{error:#}"))?;
            judge(world, &rank)?;
            println!("\n{PROOF}");
            Ok::<(), String>(())
        }),
    }
}

/// Runs a rank. If it fails, the other ranks receive the reason.
fn judge<V: Verdict>(world: World, rank: &impl Fn(&World) -> V) -> Result<(), String> {
    let outcome = rank(&world).verdict();
    if let Err(why) = &outcome {
        world.fail(&std::io::Error::other(why.clone()));
    }
    outcome
}

/// What a rank prints at its end, as proof that it ran: a test runner that finds no such test succeeds as well.
const PROOF: &str = "nccl::testing: this rank has ended well";

fn start(ranks: usize, call: Call) {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let test = call.test.clone();
    let sink = Arc::clone(&lines);
    let fleet = Fleet::builder(ranks)
        .with(|fleet| {
            fleet.output = Output::Lines(Arc::new(move |line| {
                let text = String::from_utf8_lossy(line.bytes);
                sink.lock().push(format!("[{}] {text}", line.rank));
            }));
        })
        .start(move |_| again(&call.test, &call.number.to_string()));
    let fleet = fleet.unwrap_or_else(|error| panic!("the ranks cannot be started: {error:#}"));
    let is_late = fleet.wait_timeout(DEADLINE).is_none();
    if is_late {
        fleet.kill();
    }
    let report = fleet.wait();
    let mut lines = std::mem::take(&mut *lines.lock());
    let proofs: Vec<_> = (0..ranks).map(|rank| format!("[{rank}] {PROOF}")).collect();
    let without = proofs.iter().position(|proof| !lines.contains(proof));
    lines.retain(|line| !proofs.contains(line));
    let lines = lines.join("\n");
    assert!(
        !is_late,
        "not all ranks have ended within {DEADLINE:?}\n{lines}"
    );
    if let Some(first) = &report.first {
        panic!("{first}\n{lines}");
    }
    if let Some(rank) = without {
        panic!(
            "rank {rank} has never come to this call, in a process for test {:?}: call it in the thread of the test, and in the same \
             order in all processes\n{lines}",
            test
        );
    }
}

/// Names the test, and the role, for which a test binary was started again.
const VARIABLE: &str = "NCCL_TEST_ROLE";

/// The process of a test that this code runs in.
#[doc(hidden)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// The process that the user started.
    Test,
    /// A process that the test started, for the role of this name.
    Child(String),
}

impl Role {
    /// Returns the role of this process in the test called `test`.
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

/// Returns whether this process was started for a role of some test.
#[doc(hidden)]
#[must_use]
pub fn is_child() -> bool {
    env::var_os(VARIABLE).is_some()
}

/// One call that starts ranks: the test, and the number of its calls before this one.
#[doc(hidden)]
pub struct Call {
    /// The name of the test.
    pub test: String,
    /// The number of calls before.
    pub number: usize,
}

/// The process that a call runs in.
#[doc(hidden)]
#[derive(PartialEq)]
pub enum Place {
    /// The test: the ranks are to be started.
    Parent,
    /// A rank that this call started.
    Rank,
    /// A rank that a later call started: this call has succeeded, or the later call would not exist.
    Past,
}

impl Call {
    /// Counts this call; `body` is a closure or function of the test.
    pub fn of<F>(body: &F) -> Self {
        static CALLS: Mutex<Option<HashMap<String, usize>>> = Mutex::new(None);
        let test = name(body);
        let mut calls = CALLS.lock();
        let next = calls
            .get_or_insert_default()
            .entry(test.clone())
            .or_default();
        let number = *next;
        *next += 1;
        Self { test, number }
    }

    /// Returns in which process this is.
    #[must_use]
    pub fn place(&self) -> Place {
        match Role::of(&self.test) {
            Role::Test => Place::Parent,
            Role::Child(number) if number == self.number.to_string() => Place::Rank,
            Role::Child(_) => Place::Past,
        }
    }
}

/// Returns the name by which the test runner knows the running test, which calls this with a closure of its own (the closure's
/// type names the test function).
///
/// # Panics
/// When the caller is not a test.
#[doc(hidden)]
#[must_use]
pub fn name<F>(_: &F) -> String {
    // A thread of the test runner has the name of the test, unless tests run one after another.
    let thread = std::thread::current();
    if let Some(name) = thread.name().filter(|&name| name != "main") {
        return name.to_owned();
    }
    // In a rank, the name comes from the test.
    if let Some((test, _)) = env::var(VARIABLE)
        .ok()
        .as_deref()
        .and_then(|role| role.split_once(' '))
    {
        return test.to_owned();
    }
    // `crate::module::test::{{closure}}`
    let path = type_name::<F>();
    let name = path
        .split_once("::")
        .map(|(_, path)| path.split("::{{closure}}").next().unwrap_or(path));
    name.unwrap_or_else(|| panic!("{path} is no closure of a test"))
        .to_owned()
}

/// Returns the command that runs the test called `test` in a new process, as `role`.
///
/// # Panics
/// When the binary of the test cannot be found.
#[doc(hidden)]
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

/// Runs the code of a child and ends the process, so that no code of the test runs twice: with exit code 0, or with 101
/// after a panic or an error, as tests do.
#[doc(hidden)]
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

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => text,
        (_, Some(text)) => text,
        _ => "no message",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_knows_its_name() {
        let expected = "testing::tests::a_test_knows_its_name";
        assert_eq!(name(&|| ()), expected);
        // Also correct if the runner uses no thread for the test.
        let on_main = type_name_of(|| ());
        assert_eq!(on_main, format!("nccl::{expected}::{{{{closure}}}}"));
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

    fn failure(body: impl FnOnce()) -> String {
        let panic = catch_unwind(AssertUnwindSafe(body)).expect_err("it fails");
        panic_text(&*panic).to_owned()
    }

    #[test]
    fn threads_see_each_other_and_the_first_failure_is_told() {
        threads(3, |world| {
            let all = world.all_gather("rank", &[world.rank() as u8])?;
            assert_eq!(all, [[0], [1], [2]]);
            Ok::<(), crate::Error>(())
        });
        let said = failure(|| {
            threads(2, |world| match world.rank() {
                0 => world
                    .barrier("the other does not come")
                    .map_err(|error| error.to_string()),
                _ => Err(String::from("no weights")),
            });
        });
        assert!(said.contains("rank 1: no weights"), "{said}");
        let said = failure(|| threads(1, |_| -> () { panic!("on purpose") }));
        assert_eq!(said, "rank 0: it panicked: on purpose");
    }

    #[test]
    fn processes_see_each_other_and_the_first_failure_is_told() {
        processes(2, |world| {
            let all = world.all_gather("process", &std::process::id().to_le_bytes())?;
            assert_ne!(all[0], all[1]);
            Ok::<(), crate::Error>(())
        });
        if is_child() {
            // A rank of the call below; the ranks of the call above end inside that call.
            processes(2, one_fails);
        }
        let said = failure(|| processes(2, one_fails));
        // Rank 0 may end before rank 1 has.
        assert!(said.contains("exit code 101"), "{said}");
        assert!(said.contains("[1] no weights"), "{said}");
    }

    #[test]
    fn ranks_that_do_not_come_to_the_call_are_a_failure() {
        let elsewhere = std::thread::Builder::new().name(String::from("a worker"));
        let call = || failure(|| processes(1, |_| ()));
        let said = elsewhere.spawn(call).unwrap().join().unwrap();
        assert!(
            said.contains("rank 0 has never come to this call"),
            "{said}"
        );
    }

    fn one_fails(world: &World) -> Result<(), String> {
        match world.rank() {
            0 => world
                .barrier("the other does not come")
                .map_err(|error| error.to_string()),
            _ => Err(String::from("no weights")),
        }
    }
}
