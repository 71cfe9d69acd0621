//! Programs: kernels that run for a while, wait for memory that others write, and are known by the function of the host
//! that a compiler puts in their place.
//!
//! A program is registered for such a function ([`register_program`]); the CUDA runtime's launches name it. A launch makes
//! a [`Run`], which the stream steps until it is done. Nothing rings when the memory changes that a run waits for, so its
//! job is left alone for longer and longer while nothing moves, and not at all as soon as something did.

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

/// What a kernel does.
pub trait Program: Send + Sync {
    /// Begins a launch. Called when the kernel is launched, and again for each replay of a graph; reads no memory of the
    /// device, which may be written until the stream gets there.
    ///
    /// # Errors
    /// Why this kernel cannot run here: the launch is refused with that text.
    fn start(&self, launch: &Launched) -> Result<Box<dyn Run>, String>;
}

/// How a kernel was launched.
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

/// A launch under way.
pub trait Run: Send {
    /// One bounded step (`budget` in bytes to copy, roughly); never blocks.
    ///
    /// # Errors
    /// Why the kernel cannot go on; its context is lost.
    fn step(&mut self, budget: usize) -> Result<Progress, Failed>;

    /// For messages: what runs, and how far it is.
    fn describe(&self) -> String;
}

/// What a step came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The kernel has ended.
    Done,
    /// Something moved; step again.
    Moved,
    /// Nothing can move until others write what it waits for.
    Waiting,
}

/// Why a kernel cannot go on.
#[derive(Debug)]
pub enum Failed {
    /// It used memory that it may not use.
    Violation(Violation),
    /// Something it was asked to do cannot be done here.
    Refused(String),
}

/// What is known of a program's kernel beside its code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attributes {
    /// Threads of a block at most.
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
/// The handles, by the function of the host.
static HANDLES: RwLock<Option<HashMap<usize, usize>>> = RwLock::new(None);

/// Makes a program known by `symbol`, the address of the function that stands for the kernel on the host, for the rest of
/// the process.
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

/// The handle (`CUfunction`) of the kernel that a function of the host stands for.
#[must_use]
pub fn handle_of(symbol: *const c_void) -> Option<*mut c_void> {
    let handles = HANDLES.read();
    let handle = *handles.as_ref()?.get(&symbol.addr())?;
    Some(std::ptr::with_exposed_provenance_mut(handle))
}

/// Name and attributes of the kernel behind a handle.
#[must_use]
pub fn attributes_of(handle: *mut c_void) -> Option<(String, Attributes)> {
    let registered = PROGRAMS.get(handle)?;
    Some((registered.name.clone(), registered.attributes.clone()))
}

/// The program behind a handle.
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
    /// Why the kernel cannot run here, if it cannot.
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
    /// It begins later than it could: then.
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
