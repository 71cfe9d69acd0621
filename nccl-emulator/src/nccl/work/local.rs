//! A copy within one rank's memory, as the collective of a single rank. With an operator that
//! scales it is a product.

use std::sync::Arc;

use super::scope::{Outcome, Scope};
use crate::nccl::communicator::Communicator;
use crate::nccl::task::Function;
use crate::numbers::datatype::{DataType, Operator, Scalar};
use crate::numbers::reduction;
use crate::transport;
use cuda_emulator::driver::context::Context;
use cuda_emulator::exec::{Bell, Recipe, Step, Stream, Work};
use cuda_emulator::memory::Span;

/// See the module: `bytes` from one address of the communicator's device to another, each element
/// multiplied by a scalar if there is one.
pub(crate) struct LocalCopy {
    pub(crate) communicator: Arc<Communicator>,
    pub(crate) function: Function,
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) bytes: u64,
    pub(crate) scale: Option<(DataType, Scalar)>,
}

impl Recipe for LocalCopy {
    fn job(&self, stream: &Arc<Stream>) -> Box<dyn Work> {
        Box::new(Copy {
            communicator: Arc::clone(&self.communicator),
            context: Arc::clone(stream.context()),
            function: self.function,
            from: self.from,
            to: self.to,
            bytes: self.bytes,
            scale: self.scale,
            spans: None,
            copied: 0,
            bell: Bell::new(),
        })
    }
}

struct Copy {
    communicator: Arc<Communicator>,
    /// The context of the stream.
    context: Arc<Context>,
    function: Function,
    from: u64,
    to: u64,
    bytes: u64,
    scale: Option<(DataType, Scalar)>,
    spans: Option<(Span, Span, u64)>,
    copied: u64,
    bell: Bell,
}

impl Copy {
    fn try_step(
        &mut self,
        scope: &Scope<'_>,
        budget: usize,
    ) -> Result<Outcome, cuda_emulator::violations::Violation> {
        let (from, to, scalar) = match self.spans {
            Some(spans) => spans,
            None => {
                let scalar = match self.scale {
                    Some((data_type, scalar)) => scope.scalar(scalar, data_type)?,
                    None => 0,
                };
                let spans = (
                    scope.resolve(self.from, self.bytes)?,
                    scope.resolve(self.to, self.bytes)?,
                    scalar,
                );
                *self.spans.insert(spans)
            }
        };
        let pool = scope.session.pool(scope.session.rank);
        let (source, destination) = (pool.view(&from)?, pool.view(&to)?);
        // Whole elements: a multiple of the largest.
        let part = (budget as u64).next_multiple_of(16).max(16);
        let n = (self.bytes - self.copied).min(part) as usize;
        // SAFETY: both views are valid for `bytes` bytes, of which `copied + n` are no more.
        unsafe {
            let at = self.copied as usize;
            let (source, destination) = (source.add(at), destination.add(at));
            match self.scale {
                None => transport::copy(source, destination, n),
                Some((data_type, _)) => reduction::reduce(
                    data_type,
                    Operator::PreMulSum,
                    &[source.cast_const()],
                    &[scalar],
                    &[destination],
                    n / data_type.size() as usize,
                ),
            }
        }
        self.copied += n as u64;
        if self.copied < self.bytes {
            return Ok(Outcome::Progress);
        }
        pool.still_valid(&from)?;
        pool.still_valid(&to)?;
        Ok(Outcome::Done)
    }
}

impl Work for Copy {
    fn step(&mut self, budget: usize) -> Step {
        let (communicator, context) = (Arc::clone(&self.communicator), Arc::clone(&self.context));
        let Some(session) = communicator.session() else {
            return Step::Done;
        };
        if communicator.abort.is_raised() {
            return Step::Done;
        }
        let scope = Scope {
            communicator: &communicator,
            session,
            context: &context,
        };
        match self.try_step(&scope, budget) {
            Ok(Outcome::Progress) => Step::Progress,
            Ok(_) => Step::Done,
            Err(violation) => {
                scope.fail(violation, self.function.name());
                Step::Done
            }
        }
    }

    fn bell(&self) -> &Bell {
        &self.bell
    }

    fn describe(&self) -> String {
        format!(
            "{} of {} bytes on {}",
            self.function.name(),
            self.bytes,
            self.communicator
        )
    }
}
