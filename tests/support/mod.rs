//! Worlds for tests: a few ranks, as threads or as processes, which certainly end.
//!
//! ```ignore
//! use crate::support;
//!
//! #[test]
//! fn every_rank_receives_what_the_others_sent() {
//!     support::ranks_as_threads(4, |world| {
//!         let context = support::device(&world)?;
//!         …
//!         Ok::<(), Box<dyn std::error::Error>>(())
//!     });
//! }
//! ```
//!
//! Either way the ranks are in processes of their own, started from the test binary for this one test, so that each
//! test has its own emulator with as many devices as it needs, and that all processes can be killed at the deadline.
//! Code of the test *before* one of these functions is run again in those processes; code after it is not. A test may
//! call them several times, in a loop for instance; [`Ranks::outcome`] only last. A rank fails by a panic or an `Err`;
//! the first failure ends the other ranks, and the test, with the last output of each rank.

//! The same tests run on real NCCL, where ranks may have to share a device ([`device`]) and not every arrangement of
//! them works (`nccl_tools::gpu_check`). Tests that cannot run print a line that begins with `NOT TESTED:`; a test that
//! needs the emulator begins with [`needs_emulator`].

// Each test binary uses a part of this.
#![allow(dead_code, unreachable_pub)]

pub mod apart;
pub mod gate;
pub mod held;
mod hosts;
pub mod sums;
pub mod table;

use std::ffi::OsString;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use nccl::cudarc::driver::{CudaContext, DriverError};
use nccl::{Communicator, CommunicatorBuilder, LaunchMode, Rendezvous, World};
use nccl_tools::gpu_check::{ARRANGEMENTS, MOST_RANKS, not_tested, tested};
use nccl_tools::perf;
use nccl_tools::spawn::{Ended, Job, Outcome, Output, describe_process, threads as rank_threads};
use nccl_tools::testing::{Call, Place, Verdict, again, end_with};

/// How long a test may take by default.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// The factor for the duration of tests: `NCCL_TEST_PATIENCE`, where a sanitizer or valgrind makes them slow.
fn patience() -> u32 {
    let times = std::env::var("NCCL_TEST_PATIENCE");
    times.ok().and_then(|times| times.parse().ok()).unwrap_or(1)
}

/// The variable that runs a test file in another launch mode: `blocking-child`, `non-blocking`, or `default`, in which
/// no mode is requested.
pub const LAUNCH_MODE: &str = "NCCL_TEST_LAUNCH_MODE";

/// The launch mode that [`LAUNCH_MODE`] requests, or the name of the test binary: the tests of `tests/non_blocking.rs`
/// are those of other files, in the mode of its name.
fn asked_for() -> Option<LaunchMode> {
    match std::env::var(LAUNCH_MODE).as_deref() {
        Ok("blocking-child") => Some(LaunchMode::BlockingChild),
        Ok("non-blocking") => Some(LaunchMode::NonBlocking),
        Ok("default") => None,
        Ok(other) => {
            panic!("{LAUNCH_MODE} is blocking-child, non-blocking or default, not {other}")
        }
        Err(_) if env!("CARGO_CRATE_NAME") == "non_blocking" => Some(LaunchMode::NonBlocking),
        Err(_) => None,
    }
}

/// The launch mode of the communicators of the tests' worlds.
pub fn launch_mode() -> LaunchMode {
    asked_for().unwrap_or(LaunchMode::BlockingChild)
}

/// The world in the requested launch mode.
pub fn in_launch_mode(world: World) -> World {
    match asked_for() {
        Some(mode) => world.with_launch_mode(mode),
        None => world,
    }
}

/// Fails if the emulator recorded a use of a communicator after its end: NCCL would have freed it.
fn nothing_was_used_after_its_end() -> Result<(), String> {
    let violations = nccl_emulator::violations();
    let late = |violation: &&nccl_emulator::Violation| {
        violation.kind() == nccl_emulator::ViolationKind::UseAfterDestroy
    };
    match violations.iter().find(late) {
        Some(violation) => Err(format!("{violation}")),
        None => Ok(()),
    }
}

/// The device of a rank: one of its own, or one that it shares where there are fewer devices than ranks.
///
/// # Errors
/// CUDA's.
pub fn device(world: &World) -> Result<Arc<CudaContext>, DriverError> {
    let devices = CudaContext::device_count()?.max(1) as usize;
    CudaContext::new(world.local_rank() % devices)
}

/// A builder for a communicator of all ranks that do not share faults.
///
/// # Errors
/// Those of the library, and of the exchange of the id.
pub fn strangers<'a>(world: &World, name: &'a str) -> nccl::Result<CommunicatorBuilder<'a>> {
    let id = nccl::UniqueId::new(&nccl::Library::load()?)?;
    let id = world.broadcast(name, 0, id.as_bytes())?;
    let id = nccl::UniqueId::from_bytes(id.try_into().expect("as many bytes as were given"));
    let builder = Communicator::builder(name, id, world.rank(), world.size());
    Ok(match asked_for() {
        Some(mode) => builder.with(|comm| comm.launch_mode = Some(mode)),
        None => builder,
    })
}

/// Whether this runs on the emulator; otherwise reports that the test is left out because it needs `what`.
#[must_use]
pub fn needs_emulator(what: &str) -> bool {
    static EMULATED: OnceLock<bool> = OnceLock::new();
    // In a rank the test has been admitted already, and the emulator must not be installed yet.
    let emulated = *EMULATED.get_or_init(|| {
        nccl_tools::testing::is_child() || perf::install(1).is_ok_and(|found| found.is_emulated())
    });
    if !emulated {
        not_tested(format_args!(
            "{what}: the emulator does that, a GPU does not"
        ));
    }
    emulated
}

/// Whether kernels can be compiled at run time, or run without that; otherwise reports that the test is left out.
#[must_use]
pub fn needs_nvrtc() -> bool {
    static ADMITTED: OnceLock<bool> = OnceLock::new();
    *ADMITTED.get_or_init(|| {
        // SAFETY: only looks whether the library can be loaded.
        let is_there = || unsafe { nccl::cudarc::nvrtc::sys::is_culib_present() };
        let admitted = nccl_tools::testing::is_child()
            || perf::install(1).is_ok_and(|found| found.is_emulated())
            || on_nvidias()
            || is_there();
        if !admitted {
            not_tested(format_args!("there is no libnvrtc.so for the kernel"));
        }
        admitted
    })
}

/// Whether NVIDIA's own library runs on the emulator's driver, in place of the emulator's own NCCL.
#[must_use]
pub fn on_nvidias() -> bool {
    std::env::var_os("NCCL_EMULATOR_NCCL").is_some_and(|library| !library.is_empty())
}

/// Whether there are this many devices; otherwise reports that the test is left out.
#[must_use]
pub fn needs_devices(devices: usize) -> bool {
    if nccl_tools::testing::is_child() {
        return true;
    }
    install(devices);
    let found = CudaContext::device_count().map_or(0, |count| count as usize);
    if found < devices {
        not_tested(format_args!(
            "{devices} devices are needed, and there are {found}"
        ));
    }
    found >= devices
}

/// Whether ranks can be processes here; otherwise reports that they cannot.
#[must_use]
pub fn needs_processes(ranks: usize) -> bool {
    possible(ranks, "processes")
}

/// Whether this arrangement of ranks works here; otherwise reports that it does not.
fn possible(ranks: usize, arrangement: &str) -> bool {
    let most = std::env::var(MOST_RANKS)
        .ok()
        .and_then(|most| most.parse().ok());
    if most.is_some_and(|most: usize| ranks > most) {
        not_tested(format_args!(
            "{ranks} ranks as {arrangement}: the devices here take no more"
        ));
        return false;
    }
    match std::env::var(ARRANGEMENTS) {
        Ok(those) if ranks > 1 && !those.split(',').any(|one| one == arrangement) => {
            not_tested(format_args!(
                "{ranks} ranks as {arrangement}: that does not work here"
            ));
            false
        }
        _ => true,
    }
}

/// Runs `body` once per rank, each on a thread of one process.
///
/// # Panics
/// When a rank fails, or not all end within [`DEADLINE`].
pub fn ranks_as_threads<V: Verdict>(
    ranks: usize,
    body: impl Fn(World) -> V + Send + Sync + 'static,
) {
    Ranks::new(ranks).threads(body);
}

/// Runs `body` once per rank, each in a process.
///
/// # Panics
/// When a rank fails, or not all end within [`DEADLINE`].
pub fn ranks_as_processes<V: Verdict>(ranks: usize, body: impl Fn(World) -> V) {
    Ranks::new(ranks).processes(body);
}

/// Ranks with further settings.
pub struct Ranks {
    ranks: usize,
    deadline: Duration,
    variables: Vec<(OsString, OsString)>,
}

impl Ranks {
    /// This many ranks.
    pub fn new(ranks: usize) -> Self {
        Self {
            ranks,
            deadline: DEADLINE * patience(),
            variables: Vec::new(),
        }
    }

    /// The timeout of the whole test.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline * patience();
        self
    }

    /// Sets a variable in the environment of the ranks.
    pub fn variable(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.variables.push((name.into(), value.into()));
        self
    }

    /// As [`ranks_as_threads`].
    ///
    /// # Panics
    /// As [`ranks_as_threads`].
    pub fn threads<V: Verdict>(self, body: impl Fn(World) -> V + Send + Sync + 'static) {
        let call = Call::of(&body);
        match call.place() {
            Place::Parent if possible(self.ranks, "threads") => {
                // A little longer than the process's own timeout, because the process can report more.
                let job = Job::new(1)
                    .output(Output::Collect)
                    .deadline(self.deadline + GRACE);
                let ended = self.run(job, &call);
                expect_success(&ended);
                show_figures(&ended);
                tested(format_args!("{} ranks as threads", self.ranks));
            }
            Place::Parent => {}
            Place::Rank => threads_of_this_process(self.ranks, self.deadline, body),
            Place::Past => {}
        }
    }

    /// Processes only: this many ranks on each host; hosts have names of their own and are one machine. Skipped, with a
    /// message, where this process may not set a host name.
    #[must_use]
    pub fn ranks_per_host(self, ranks: usize) -> Self {
        self.variable(hosts::RANKS_PER_HOST, ranks.to_string())
    }

    /// As [`ranks_as_processes`].
    ///
    /// # Panics
    /// As [`ranks_as_processes`].
    pub fn processes<V: Verdict>(self, body: impl Fn(World) -> V) {
        let call = Call::of(&body);
        let ranks = self.ranks;
        if call.place() == Place::Parent {
            let named = self
                .variables
                .iter()
                .any(|(name, _)| name == hosts::RANKS_PER_HOST);
            if !possible(ranks, "processes") || (named && !hosts::possible()) {
                return;
            }
        }
        if let Some(ended) = self.run_processes(&call, body) {
            expect_success(&ended);
            show_figures(&ended);
            tested(format_args!("{ranks} ranks as processes"));
        }
    }

    /// As [`processes`](Self::processes), for tests in which ranks are meant to fail: returns how they ended.
    ///
    /// # Panics
    /// When the test runs ranks again after this.
    pub fn outcome<V: Verdict>(self, body: impl Fn(World) -> V) -> Ended {
        let call = Call::of(&body);
        self.run_processes(&call, body)
            .expect("a test looks at an outcome after all other ranks")
    }

    /// `None` in a rank of a later call.
    fn run_processes<V: Verdict>(self, call: &Call, body: impl Fn(World) -> V) -> Option<Ended> {
        match call.place() {
            Place::Parent => {
                let job = Job::new(self.ranks)
                    .output(Output::Collect)
                    .deadline(self.deadline);
                Some(self.run(job, call))
            }
            Place::Rank => end_with(|| {
                hosts::move_to_own()?;
                install(self.ranks);
                let rendezvous = Rendezvous::from_env().expect("the starter set our variables");
                let world = World::join(rendezvous).map_err(|error| format!("{error:#}"))?;
                body(in_launch_mode(world)).verdict()?;
                nothing_was_used_after_its_end()
            }),
            Place::Past => None,
        }
    }

    fn run(&self, job: Job, call: &Call) -> Ended {
        let ended = job.run(|_| {
            let mut command = again(&call.test, &call.number.to_string());
            command.envs(self.variables.iter().map(|(name, value)| (name, value)));
            command
        });
        let ended =
            ended.unwrap_or_else(|error| panic!("the ranks could not be started: {error:#}"));
        // A test binary that is asked for a test which it does not have succeeds.
        let mut lines = ended.ranks.iter().flat_map(|rank| &rank.stdout);
        assert!(
            !lines.any(|line| line == "running 0 tests"),
            "{} is no name of a test",
            call.test
        );
        ended
    }
}

/// The extra time for a process that notices its deadline itself.
const GRACE: Duration = Duration::from_secs(5);

fn install(devices: usize) {
    if let Err(failure) = perf::install(devices) {
        panic!("there is neither a GPU nor the emulator: {failure}");
    }
}

fn threads_of_this_process<V: Verdict>(
    ranks: usize,
    deadline: Duration,
    body: impl Fn(World) -> V + Send + Sync + 'static,
) -> ! {
    end_with(|| {
        install(ranks);
        let worlds = World::threads(ranks).into_iter();
        let worlds = worlds.map(in_launch_mode);
        let ended = rank_threads::run(worlds.collect(), Some(deadline), move |_, world| {
            body(world).verdict()
        });
        ended.map_err(|failure| {
            if !failure.running.is_empty() {
                eprintln!("{}", describe_process(std::process::id()));
                eprintln!("{failure}");
                // Hanging threads must not keep the process from ending.
                // SAFETY: ends the process at once; nothing is left to be written.
                unsafe { libc::_exit(101) }
            }
            failure.to_string()
        })?;
        nothing_was_used_after_its_end()
    })
}

/// The beginning of a rank's output lines that are shown although the rank ended well.
pub const FIGURE: &str = "FIGURE: ";

fn show_figures(ended: &Ended) {
    for rank in &ended.ranks {
        for line in rank.stdout.iter().filter(|line| line.contains(FIGURE)) {
            println!("{line}");
        }
    }
}

/// # Panics
/// Unless all ranks ended well; the message has everything that is known about the failure.
pub fn expect_success(ended: &Ended) {
    let reason = match &ended.outcome {
        Outcome::Succeeded => return,
        Outcome::Failed(failure) => failure.to_string(),
        Outcome::TimedOut(states) => format!("the deadline passed:\n{states}"),
        Outcome::OutputClosed => "the output is closed".to_owned(),
    };
    let mut text = reason;
    for rank in &ended.ranks {
        for (name, lines) in [("stdout", &rank.stdout), ("stderr", &rank.stderr)] {
            for line in lines.iter().rev().take(40).rev() {
                text.push_str(&format!("\n[rank {} {name}] {line}", rank.rank));
            }
        }
    }
    panic!("{text}");
}
