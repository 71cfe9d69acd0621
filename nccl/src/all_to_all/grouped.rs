//! All-to-all as one group of messages.
//!
//! The order of the messages does not matter: NCCL serves the peers of a group in an order of its own.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::native::block;
use crate::collectives::Pair;
use crate::communicator::{Calls, Issue, Leased};
use crate::dtype::DataType;
use crate::error::{NcclFailure, Result};
use crate::ffi::{self, Progress};
use crate::operation::Shape;
use crate::point_to_point::grouped;

pub(super) struct Grouped<'a> {
    pair: Pair<'a>,
    per_peer: usize,
    data_type: DataType,
    ranks: usize,
}

impl<'a> Grouped<'a> {
    pub(super) fn new(pair: Pair<'a>, shape: Shape, ranks: usize) -> Self {
        let (per_peer, data_type) = block(shape);
        Self {
            pair,
            per_peer,
            data_type,
            ranks,
        }
    }
}

impl<'s, 'a: 's> Issue<'s> for Grouped<'a> {
    fn streams(&self, visit: impl FnMut(&Arc<CudaStream>) -> Result<()>) -> Result<()> {
        self.pair.streams(visit)
    }

    fn lease(&mut self, on: &'s CudaStream, leases: &mut Vec<Leased<'s>>) {
        self.pair.lease(on, leases);
    }

    fn call(&self, calls: &Calls<'_>) -> Result<Progress, NcclFailure> {
        if self.per_peer == 0 {
            return Ok(Progress::Done);
        }
        let block = self.per_peer * self.data_type.size_in_bytes().unwrap_or_default();
        grouped(calls.library, |functions| {
            for peer in 0..self.ranks {
                // Fits: the number of ranks was checked when the communicator was made.
                let rank = peer as i32;
                let from = self
                    .pair
                    .send_address(calls)
                    .wrapping_byte_add(peer * block);
                // SAFETY: both buffers hold a block per rank, valid until the work is done on the
                // stream, which the order of streams sees to; communicator and stream are alive.
                let code = unsafe {
                    (functions.send)(
                        from,
                        self.per_peer,
                        self.data_type.raw(),
                        rank,
                        calls.comm,
                        calls.stream,
                    )
                };
                ffi::check(calls.library, "ncclSend", code)?;
                let to = self
                    .pair
                    .recv_address(calls)
                    .wrapping_byte_add(peer * block);
                // SAFETY: as above, and nothing else reads or writes the receive buffer meanwhile.
                let code = unsafe {
                    (functions.recv)(
                        to,
                        self.per_peer,
                        self.data_type.raw(),
                        rank,
                        calls.comm,
                        calls.stream,
                    )
                };
                ffi::check(calls.library, "ncclRecv", code)?;
            }
            Ok(())
        })
    }
}
