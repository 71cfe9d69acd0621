//! Which of NVIDIA's device code the interpreter supports, and which it has run in this process: for tests that compare both,
//! and for the page that they write.

use std::fmt::Debug;
use std::sync::{Arc, OnceLock};

use super::covered::{CoveredFunction, RealCoverage, State};
use super::kernels::Interpreter;
use super::program::Kernel;

struct Source {
    interpreter: Arc<Interpreter>,
    kernels: Vec<Arc<Kernel>>,
}

static SOURCE: OnceLock<Source> = OnceLock::new();

/// Registers the kernels of the process's library.
pub(super) fn set(interpreter: Arc<Interpreter>, kernels: Vec<Arc<Kernel>>) {
    let source = Source {
        interpreter,
        kernels,
    };
    // A process has one library.
    let _ = SOURCE.set(source);
}

/// Returns what the interpreter has run of NVIDIA's library, if that library runs in this process.
#[must_use]
pub fn real_coverage() -> Option<RealCoverage> {
    let source = SOURCE.get()?;
    let text = |value: &dyn Debug| format!("{value:?}");
    let functions = source.interpreter.coverage().into_iter().map(|row| {
        let function = row.function;
        CoveredFunction {
            collective: text(&function.collective),
            operator: function.reduction.map(|(operator, _)| text(&operator)),
            data_type: function.reduction.map(|(_, ty)| text(&ty)),
            algorithm: text(&function.algorithm),
            protocol: text(&function.protocol),
            state: State::new(row.coverage, row.carried_out),
        }
    });
    Some(RealCoverage {
        functions: functions.collect(),
        kernels: source
            .kernels
            .iter()
            .map(|kernel| kernel.coverage())
            .collect(),
    })
}
