//! NCCL's kernels as programs of the driver: the interpreter's view of a device, and the driver's view of a kernel.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cuda_emulator::kernels::program::{Failed, Launched, Program, Progress, Run};
use cuda_emulator::memory::{self, Access};
use cuda_emulator::violations::{self, ViolationKind};

use super::covered::{CoveredKernel, State};
use super::kernels::{
    self, Cause, Failure, Interpreter, Lease, Memory, Mismatch, Running, Trouble, View, Violation,
};
use super::types::Types;

/// A kernel of the library.
pub(super) struct Kernel {
    interpreter: Arc<Interpreter>,
    /// The mangled name.
    name: String,
    /// The number of completed launches in this process.
    carried_out: Arc<AtomicU64>,
}

impl Kernel {
    pub(super) fn new(interpreter: Arc<Interpreter>, name: &str) -> Self {
        Self {
            interpreter,
            name: name.to_owned(),
            carried_out: Arc::default(),
        }
    }

    /// Returns whether the interpreter runs launches of the kernel, and how many it has run.
    pub(super) fn coverage(&self) -> CoveredKernel {
        CoveredKernel {
            name: kernels::plain(&self.name).to_owned(),
            state: State::new(
                self.interpreter.kernel_coverage(&self.name),
                self.carried_out.load(Ordering::Relaxed),
            ),
        }
    }

    /// Returns offset and size of each parameter, for kernels that are launched with a list of pointers.
    pub(super) fn parameters(name: &str) -> Vec<(usize, usize)> {
        if name.contains("oneRankReduce") {
            // Two pointers, a count, the operator's argument, and whether that is a pointer.
            return vec![(0, 8), (8, 8), (16, 8), (24, 8), (32, 1)];
        }
        if kernels::plain(name) == kernels::CLOCK {
            // A pointer.
            return vec![(0, 8)];
        }
        if let Some(kernel) = kernels::DiagnosticKernel::parse(kernels::plain(name)) {
            return kernel.parameters();
        }
        Vec::new()
    }
}

impl Program for Kernel {
    fn start(&self, launched: &Launched) -> Result<Box<dyn Run>, String> {
        let memory = Arc::new(DeviceMemory(launched.device));
        let arguments = launched.arguments.to_vec();
        let running = self
            .interpreter
            .launch(&self.name, launched.grid, launched.block, arguments, memory)
            .map_err(|refused| refused.to_string())?;
        Ok(Box::new(KernelRun {
            running,
            carried_out: self.carried_out.clone(),
        }))
    }
}

struct KernelRun {
    running: Running,
    carried_out: Arc<AtomicU64>,
}

impl Run for KernelRun {
    fn step(&mut self, budget: usize) -> Result<Progress, Failed> {
        match self.running.step(budget) {
            Ok(kernels::Progress::Done) => {
                self.carried_out.fetch_add(1, Ordering::Relaxed);
                Ok(Progress::Done)
            }
            Ok(kernels::Progress::Moved) => Ok(Progress::Moved),
            Ok(kernels::Progress::Waiting) => Ok(Progress::Waiting),
            Err(failure) => Err(failed(failure)),
        }
    }

    fn describe(&self) -> String {
        self.running.describe()
    }
}

/// Converts a failure for the driver.
fn failed(failure: Failure) -> Failed {
    let text = failure.to_string();
    match failure.trouble {
        Trouble::Violation(violation) => {
            let found = match &violation.cause {
                Cause::Driver(found) => found.downcast_ref::<violations::Violation>().cloned(),
                _ => None,
            };
            let unknown =
                || violations::Violation::new(ViolationKind::UnknownAddress, None, &*text);
            Failed::Violation(found.unwrap_or_else(unknown))
        }
        _ => Failed::Refused(text),
    }
}

/// The layouts of a library, for the interpreter.
impl kernels::Types for Types {
    fn size_of(&self, ty: &str) -> Result<usize, Mismatch> {
        Types::size_of(self, ty).map_err(|_| Mismatch::NoType { ty: ty.to_owned() })
    }

    fn field(&self, ty: &str, path: &str) -> Result<kernels::Field, Mismatch> {
        let field = Types::field(self, ty, path).map_err(|_| Mismatch::NoField {
            ty: ty.to_owned(),
            path: path.to_owned(),
        })?;
        Ok(kernels::Field {
            offset: field.offset,
            size: field.size * field.count.max(1),
            bits: field.bits.map(|bits| (bits.first, bits.count)),
        })
    }

    fn enumerator(&self, name: &str) -> Result<i64, Mismatch> {
        let missing = |_| Mismatch::NoEnumerator {
            name: name.to_owned(),
        };
        Types::enumerator(self, name).map_err(missing)
    }
}

/// The memory that a device can use.
struct DeviceMemory(i32);

impl Memory for DeviceMemory {
    fn view(&self, address: u64, length: usize) -> Result<View, Violation> {
        let access = memory::access(self.0, address, length as u64).map_err(|found| Violation {
            address,
            length,
            cause: Cause::Driver(Arc::new(found)),
        })?;
        let pointer = access.pointer;
        // SAFETY: an access keeps its mapping while it lives, whatever becomes of the right to use it.
        Ok(unsafe { View::new(address, pointer, length, Box::new(Held(access))) })
    }
}

struct Held(Access);

impl Lease for Held {
    fn still_valid(&self) -> Result<(), Violation> {
        self.0.still_valid().map_err(|found| Violation {
            address: 0,
            length: 0,
            cause: Cause::Driver(Arc::new(found)),
        })
    }
}
