//! Programs: kernels that run for a while, wait for memory written by others, and are identified by their host stub, the
//! function that a compiler puts in their place on the host.
//!
//! [`register_program`] registers a program for a host stub, which the CUDA runtime's launches name. A launch creates a
//! [`Run`], which the stream steps until it is done. No bell rings when memory changes that a run waits for. So its job is
//! polled: at growing intervals while nothing moves, and at once after progress.

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use crate::exec::context::Context;
use crate::exec::{Backoff, Pause, Recipe, Step, Stream, Work};
use crate::hooks;
use crate::registry::Registry;
use crate::result::CUresult;
use crate::sync::RwLock;
use crate::violations::Violation;

/// The implementation of a kernel.
pub trait Program: Send + Sync {
    /// Begins a launch. Called when the kernel is launched, and again for each replay of a graph. Must not read device memory,
    /// which may be written until the stream reaches the kernel.
    ///
    /// # Errors
    /// The reason why this kernel cannot run here; the launch is refused with this text.
    fn start(&self, launch: &Launched) -> Result<Box<dyn Run>, String>;
}

/// The parameters of a launch.
#[derive(Debug, Clone)]
pub struct Launched {
    /// The device of the stream.
    pub device: i32,
    /// The number of blocks, in x, y and z.
    pub grid: [u32; 3],
    /// The number of threads of a block, in x, y and z.
    pub block: [u32; 3],
    /// The arguments, as they were at the launch.
    pub arguments: Arc<[u8]>,
}

/// A launch in progress.
pub trait Run: Send {
    /// Runs one bounded step (`budget` in bytes to copy, roughly); never blocks.
    ///
    /// # Errors
    /// The reason why the kernel cannot continue; its context fails.
    fn step(&mut self, budget: usize) -> Result<Progress, Failed>;

    /// Describes the kernel and its progress, for messages.
    fn describe(&self) -> String;
}

/// The result of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The kernel has ended.
    Done,
    /// The kernel made progress; step again.
    Moved,
    /// The kernel waits for memory written by others.
    Waiting,
}

/// Why a kernel cannot continue.
#[derive(Debug)]
pub enum Failed {
    /// An invalid memory access.
    Violation(Violation),
    /// An operation that is not supported here.
    Refused(String),
}

/// The properties of a program's kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attributes {
    /// The most threads of a block.
    pub max_threads: u32,
    /// Offset and size of each parameter.
    pub parameters: Vec<(usize, usize)>,
}

/// A registered program.
pub(crate) struct Registered {
    pub(crate) name: String,
    pub(crate) attributes: Attributes,
    program: Arc<dyn Program>,
}

/// Every registered program, by its handle.
static PROGRAMS: Registry<Registered> = Registry::new(0x4C);
/// The handles, by host stub.
static HANDLES: RwLock<Option<HashMap<usize, usize>>> = RwLock::new(None);

/// Registers a program for the rest of the process. `symbol` is the address of its host stub.
///
/// # Errors
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub fn register_program(
    symbol: *const c_void,
    name: impl Into<String>,
    attributes: Attributes,
    program: Arc<dyn Program>,
) -> Result<(), CUresult> {
    let registered = Registered {
        name: name.into(),
        attributes,
        program,
    };
    let handle = PROGRAMS
        .insert(Arc::new(registered))
        .ok_or(CUresult::ERROR_OUT_OF_MEMORY)?;
    let mut handles = HANDLES.write();
    let before = handles
        .get_or_insert_default()
        .insert(symbol.addr(), handle.expose_provenance());
    if let Some(before) = before {
        PROGRAMS.remove(std::ptr::without_provenance_mut(before));
    }
    Ok(())
}

/// Returns the handle (`CUfunction`) of the kernel with this host stub.
#[must_use]
pub fn handle_of(symbol: *const c_void) -> Option<*mut c_void> {
    let handles = HANDLES.read();
    let handle = *handles.as_ref()?.get(&symbol.addr())?;
    Some(std::ptr::with_exposed_provenance_mut(handle))
}

/// Returns the name and the attributes of the kernel with this handle.
#[must_use]
pub fn attributes_of(handle: *mut c_void) -> Option<(String, Attributes)> {
    let registered = PROGRAMS.get(handle)?;
    Some((registered.name.clone(), registered.attributes.clone()))
}

/// Returns the program with this handle.
pub(crate) fn registered(handle: *mut c_void) -> Option<Arc<Registered>> {
    PROGRAMS.get(handle)
}

/// A launch as work on a stream: once, or again whenever a graph is replayed.
#[derive(Clone)]
pub(crate) struct ProgramKernel {
    pub(crate) registered: Arc<Registered>,
    pub(crate) context: Arc<Context>,
    pub(crate) launched: Launched,
}

impl ProgramKernel {
    /// Checks that the kernel can run here; otherwise returns the reason.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.registered.program.start(&self.launched).map(drop)
    }
}

impl Recipe for ProgramKernel {
    fn job(&self, stream: &Arc<Stream>) -> Box<dyn Work> {
        let start = hooks::lateness().map(|delay| Instant::now() + delay);
        Box::new(Running {
            run: self.registered.program.start(&self.launched),
            name: self.registered.name.clone(),
            context: Arc::clone(&self.context),
            stream: Arc::clone(stream),
            backoff: Backoff::default(),
            start,
        })
    }
}

struct Running {
    run: Result<Box<dyn Run>, String>,
    name: String,
    context: Arc<Context>,
    stream: Arc<Stream>,
    backoff: Backoff,
    /// The time at which a delayed kernel begins.
    start: Option<Instant>,
}

impl Work for Running {
    fn step(&mut self, budget: usize) -> Step {
        if let Some(start) = self.start {
            if Instant::now() < start {
                return Step::Blocked { seen: 0 };
            }
            self.start = None;
        }
        let progress = match &mut self.run {
            Ok(run) => run.step(budget),
            Err(reason) => Err(Failed::Refused(reason.clone())),
        };
        match progress {
            Ok(Progress::Done) => Step::Done,
            Ok(Progress::Moved) => {
                self.backoff.moved();
                Step::Progress
            }
            Ok(Progress::Waiting) => {
                self.backoff.missed();
                Step::Blocked { seen: 0 }
            }
            Err(Failed::Violation(violation)) => {
                self.context.fail(violation.during(&self.describe()));
                Step::Done
            }
            Err(Failed::Refused(reason)) => {
                eprintln!(
                    "nccl-emulator: {}: {reason}; its context is lost",
                    self.describe()
                );
                self.context.kill(CUresult::ERROR_LAUNCH_FAILED);
                Step::Done
            }
        }
    }

    fn pause(&self) -> Pause {
        if let Some(start) = self.start {
            return Pause::For(start.saturating_duration_since(Instant::now()));
        }
        self.backoff.pause()
    }

    fn describe(&self) -> String {
        match &self.run {
            Ok(run) => format!("{} on {}", run.describe(), self.stream),
            Err(_) => format!("kernel {} on {}", self.name, self.stream),
        }
    }
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registered")
            .field("name", &self.name)
            .field("attributes", &self.attributes)
            .finish_non_exhaustive()
    }
}
