//! All-to-all by NCCL's own call.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use nccl_sys as sys;

use crate::collectives::Pair;
use crate::communicator::{Calls, Issue, Leased};
use crate::dtype::DataType;
use crate::error::{NcclFailure, Result};
use crate::ffi::{self, Progress};
use crate::operation::Shape;

pub(super) struct Native<'a> {
    pair: Pair<'a>,
    per_peer: usize,
    data_type: DataType,
}

impl<'a> Native<'a> {
    pub(super) fn new(pair: Pair<'a>, shape: Shape) -> Self {
        let (per_peer, data_type) = block(shape);
        Self {
            pair,
            per_peer,
            data_type,
        }
    }
}

/// Elements per peer, and their type.
pub(super) fn block(shape: Shape) -> (usize, DataType) {
    (
        shape.count.unwrap_or_default(),
        shape.data_type.unwrap_or(DataType::UINT8),
    )
}

impl<'s, 'a: 's> Issue<'s> for Native<'a> {
    fn streams(&self, visit: impl FnMut(&Arc<CudaStream>) -> Result<()>) -> Result<()> {
        self.pair.streams(visit)
    }

    fn lease(&mut self, on: &'s CudaStream, leases: &mut Vec<Leased<'s>>) {
        self.pair.lease(on, leases);
    }

    fn call(&self, calls: &Calls<'_>) -> Result<Progress, NcclFailure> {
        const CALL: &str = "ncclAlltoAll";
        if self.per_peer == 0 {
            return Ok(Progress::Done);
        }
        let Some(all_to_all) = calls.library.api().ncclAlltoAll else {
            return Err(ffi::failure(
                calls.library,
                CALL,
                sys::ncclResult_t::ncclInternalError,
            ));
        };
        // SAFETY: both addresses are valid for a block per rank until the work is done on the stream,
        // which the order of streams sees to; communicator and stream are alive.
        let code = unsafe {
            all_to_all(
                self.pair.send_address(calls),
                self.pair.recv_address(calls),
                self.per_peer,
                self.data_type.raw(),
                calls.comm,
                calls.stream,
            )
        };
        ffi::check(calls.library, CALL, code)
    }
}
