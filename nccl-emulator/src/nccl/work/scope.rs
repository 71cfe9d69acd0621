//! The environment and the outcomes of the parts of a launch.

use crate::code;
use crate::nccl::communicator::{Communicator, Session};
use crate::nccl::debug::{self, warn};
use crate::numbers::datatype::{DataType, Scalar};
use crate::options::options;
use cuda_emulator::driver::context::Context;
use cuda_emulator::memory::{self, Span};
use cuda_emulator::violations::{self, Violation, ViolationKind};

/// The outcome of a step of a part.
pub(super) enum Outcome {
    /// The part is complete.
    Done,
    /// The part moved.
    Progress,
    /// The part waits for the bell.
    Blocked,
    /// The part can never complete. The launch waits for an abort.
    Stuck,
    /// This rank's own memory is bad, and its context has failed.
    Failed,
}

/// The environment of the parts of a launch.
pub(super) struct Scope<'a> {
    pub(super) communicator: &'a Communicator,
    pub(super) session: &'a Session,
    /// The context of the stream, which fails if the memory is bad.
    pub(super) context: &'a Context,
}

impl Scope<'_> {
    /// Returns the span of an address range of this rank, which is about to be used.
    pub(super) fn resolve(&self, address: u64, bytes: u64) -> Result<Span, Violation> {
        if bytes == 0 {
            // Any address is valid, including null.
            return Ok(Span {
                index: 0,
                generation: 0,
                offset: 0,
                len: 0,
            });
        }
        let (device, span) = memory::resolve(address, bytes)?;
        if device != self.communicator.device {
            return Err(Violation::new(
                ViolationKind::Misuse,
                Some(self.communicator.device),
                format!(
                    "{address:#x} is memory of device {device}, the communicator's is {}",
                    self.communicator.device
                ),
            ));
        }
        self.session.pool(self.session.rank).used(&span);
        Ok(span)
    }

    /// Returns the bits of an operator's scalar, read now if it lies in device memory.
    pub(super) fn scalar(&self, scalar: Scalar, data_type: DataType) -> Result<u64, Violation> {
        let address = match scalar {
            Scalar::Value(bits) => return Ok(bits),
            Scalar::At(address) => address,
        };
        let span = self
            .resolve(address, data_type.size())
            .map_err(|violation| violation.during("reading the operator's scalar"))?;
        let view = self.session.pool(self.session.rank).view(&span)?;
        let mut bits = [0; 8];
        let size = data_type.size() as usize;
        // SAFETY: the view is valid for one element, which is no longer than the bits.
        unsafe { std::ptr::copy_nonoverlapping(view, bits.as_mut_ptr(), size) };
        Ok(u64::from_le_bytes(bits))
    }

    /// Fails the context because of this rank's own bad memory, as on a GPU.
    pub(super) fn fail(&self, violation: Violation, operation: &str) -> Outcome {
        let violation = violation.during(&format!("{operation} on {}", self.communicator));
        self.context.fail(violation);
        Outcome::Failed
    }

    /// Reports a disagreement between ranks. The launch hangs, as in NCCL; only under STRICT is
    /// this an error.
    pub(super) fn mismatch(&self, first: bool, text: &str) -> Outcome {
        if first {
            let text = format!("{}: {text}", self.communicator);
            violations::record(Violation::new(
                ViolationKind::Misuse,
                Some(self.communicator.device),
                text,
            ));
        }
        if options().strict {
            let _device = debug::on_device(self.communicator.device);
            warn!("{text}");
            self.communicator.fail(code::INVALID_USAGE);
            return Outcome::Done;
        }
        Outcome::Stuck
    }
}
