//! An operation under measurement: buffers, data, events, graphs, waiting, and the copy for comparison.

use std::ops::Range;
use std::time::Instant;

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaEvent, CudaSlice, DriverError};
use nccl::plan::CapturedPlan;
use nccl::{Communicator, Erased, ErasedMut, Group, OwnedBuffer, ReduceOp, Request};

use super::memory::Buffers;
use super::operation::{Call, Operands, Operation};
use super::rank::Rank;
use crate::bench::{Collective, HostCopy, Placement};
use crate::failure::{Exit, Failure};
use crate::self_test::SelfTest;
use crate::shape::{Case, Shape};
use crate::verify::Data;

/// Bytes that are generated, transferred and compared at a time.
const PIECE: usize = 4 << 20;

/// An operation with buffers of bytes; their element type changes from row to row.
pub(super) struct Runner<O, B: OwnedBuffer> {
    operation: O,
    rank: Rank,
    buffers: Buffers<B>,
    /// The last operation that was enqueued, and not yet waited for.
    pending: Option<Request>,
    events: Vec<CudaEvent>,
    /// The copy that the operation is compared with on the emulator.
    memcpy: Option<HostCopy>,
    /// Data on its way to and from the device, in pieces.
    staging: Vec<u8>,
    self_test: SelfTest,
    /// One element, for the alignment of ranks.
    meeting: CudaSlice<u8>,
}

impl<O: Operation, B: OwnedBuffer<Element = u8>> Runner<O, B> {
    pub(super) fn new(operation: O, rank: Rank, [first, second]: [B; 2]) -> Result<Self, Failure> {
        let memcpy = if rank.emulation.is_emulated() && rank.options.memcpy_ratio {
            let copy = HostCopy::new(rank.options.sweep.max as usize);
            Some(copy.map_err(|error| Failure::new(Exit::Failed, error.to_string()))?)
        } else {
            None
        };
        Ok(Self {
            operation,
            staging: vec![0; PIECE.min(rank.buffer_bytes)],
            self_test: SelfTest::from_environment()?,
            meeting: cuda(rank.stream.alloc_zeros(1))?,
            buffers: Buffers::Free(first, second),
            pending: None,
            events: Vec::new(),
            memcpy,
            rank,
        })
    }

    fn call(&self, shape: Shape) -> Call {
        Call {
            shape,
            rank: self.rank.world.rank(),
        }
    }

    /// The bytes of both buffers that the operations at `shifts` use; operations of a group are adjacent.
    fn span(&self, shape: Shape, shifts: &[u64]) -> Range<usize> {
        let shift = shifts.first().copied().unwrap_or(0) as usize;
        let begin = shift + self.rank.options.unalign as usize * shape.element().size;
        begin..begin + shape.bytes as usize * shifts.len()
    }

    fn data(&self, shape: Shape, repetition: u64) -> Data {
        let rank = self.rank.world.rank();
        let contents = self.operation.contents(shape, rank);
        Data::new(contents, rank, shape.ranks, shape.element(), repetition)
    }
}

/// Whether an operation uses another buffer, and its result is copied back.
fn is_copied_back<O: Operation>(placement: Placement) -> bool {
    placement == Placement::InPlace && !O::PROGRAM.in_place
}

/// Issues one operation as one call, several as one group.
fn issue<'a, O: Operation>(
    operation: &mut O,
    communicator: &'a Communicator,
    call: Call,
    operations: usize,
    operands: Operands<'a>,
) -> nccl::Result<Request> {
    match operations {
        1 => operation.issue(communicator, call, operands),
        _ => communicator.group(|group| record(operation, group, call, operands)),
    }
}

/// Records the operations of a group, whose places are adjacent.
fn record<'a, O: Operation>(
    operation: &O,
    group: &mut Group<'a>,
    call: Call,
    operands: Operands<'a>,
) -> nccl::Result<()> {
    let bytes = call.shape.bytes as usize;
    if bytes == 0 {
        return Ok(());
    }
    match operands {
        Operands::Apart(send, recv) => {
            let sends = (0..).map(|n| send.slice(n * bytes..(n + 1) * bytes));
            recv.chunks_exact_mut(bytes)
                .zip(sends)
                .try_for_each(|(recv, send)| {
                    operation.record(group, call, Operands::Apart(send, recv))
                })
        }
        Operands::InPlace(both) => both
            .chunks_exact_mut(bytes)
            .try_for_each(|both| operation.record(group, call, Operands::InPlace(both))),
    }
}

impl<O: Operation, B: OwnedBuffer<Element = u8>> Collective for Runner<O, B> {
    fn shape(&self, bytes: u64, case: Case) -> Shape {
        self.operation.shape(bytes, case, self.rank.world.size())
    }

    fn prepare(&mut self, shape: Shape) -> Result<(), Failure> {
        let call = self.call(shape);
        self.operation.prepare(&self.rank.communicator, call)
    }

    fn fill(&mut self, shape: Shape, placement: Placement, repetition: u64) -> Result<(), Failure> {
        let span = self.span(shape, &[0]);
        if span.is_empty() {
            return Ok(());
        }
        let data = self.data(shape, repetition);
        let stream = &self.rank.stream;
        let [first, second] = self.buffers.both()?;
        let (mut send, mut recv) = match placement {
            Placement::OutOfPlace => (first, second),
            Placement::InPlace => (second, first),
        };
        cuda(stream.memset_zeros(&mut recv.slice_mut(span.clone())))?;
        for begin in span.clone().step_by(PIECE) {
            let end = span.end.min(begin + PIECE);
            let piece = &mut self.staging[..end - begin];
            data.fill((begin - span.start) as u64, piece);
            cuda(stream.memcpy_htod(piece, &mut send.slice_mut(begin..end)))?;
            cuda(stream.synchronize())?;
        }
        Ok(())
    }

    fn start(&mut self, shape: Shape, placement: Placement, shifts: &[u64]) -> Result<(), Failure> {
        let (span, call) = (self.span(shape, shifts), self.call(shape));
        let swapped = is_copied_back::<O>(placement);
        let (operation, communicator) = (&mut self.operation, &self.rank.communicator);
        let (send, mut recv) = self.buffers.apart(swapped)?;
        let recv = recv.slice_mut(span.clone());
        let operands = match placement == Placement::InPlace && !swapped {
            true => Operands::InPlace(recv),
            false => Operands::Apart(send.slice(span.clone()), recv),
        };
        let request = issue(operation, communicator, call, shifts.len(), operands)?;
        if swapped && !span.is_empty() {
            let (from, mut to) = self.buffers.apart(false)?;
            let mut to = to.slice_mut(span.clone());
            cuda(self.rank.stream.memcpy_dtod(&from.slice(span), &mut to))?;
        }
        self.pending = Some(request);
        Ok(())
    }

    fn capture(
        &mut self,
        shape: Shape,
        placement: Placement,
        iterations: &[Vec<u64>],
    ) -> Result<(), Failure> {
        let call = self.call(shape);
        let spans: Vec<_> = iterations
            .iter()
            .map(|shifts| self.span(shape, shifts))
            .collect();
        let (operation, swapped) = (&self.operation, is_copied_back::<O>(placement));
        let in_place = placement == Placement::InPlace && !swapped;
        let buffers = self.buffers.take()?;
        let communicator = &self.rank.communicator;
        let plan: CapturedPlan<(B, B)> = communicator.capture(buffers, |capture, views| {
            let (mut first, mut second) = views;
            for span in spans.iter().filter(|span| !span.is_empty()) {
                let (send, recv) = match swapped {
                    true => (&second, &mut first),
                    false => (&first, &mut second),
                };
                capture.group(|group| {
                    let recv = recv.slice_mut(span.clone());
                    let operands = match in_place {
                        true => Operands::InPlace(recv),
                        false => Operands::Apart(send.slice(span.clone()), recv),
                    };
                    record(operation, group, call, operands)
                })?;
                if swapped {
                    // In a graph of NCCL's operations, a copy is a message to oneself.
                    let from = Erased::from_bytes(first.slice(span.clone()), call.data_type())?;
                    let to = second.slice_mut(span.clone());
                    let to = ErasedMut::from_bytes(to, call.data_type())?;
                    capture.group(|group| {
                        group.isend(from, call.rank)?;
                        group.irecv(to, call.rank)
                    })?;
                }
            }
            Ok(())
        })?;
        self.buffers = Buffers::Captured(plan);
        Ok(())
    }

    fn launch(&mut self) -> Result<(), Failure> {
        if let Buffers::Captured(plan) = &mut self.buffers {
            self.pending = Some(plan.launch()?);
        }
        Ok(())
    }

    fn release(&mut self) -> Result<(), Failure> {
        let (first, second) = self.buffers.take()?;
        self.buffers = Buffers::Free(first, second);
        Ok(())
    }

    fn finish(&mut self) -> Result<(), Failure> {
        let Some(request) = self.pending.take() else {
            return Ok(());
        };
        // As programs wait: the emulator does the work in the waiting thread; a thread that polls would share a core
        // with it. The watchdog ends an operation that does not end, after -T, and the request returns the error.
        let synchronized = self.rank.stream.synchronize();
        request.wait()?;
        cuda(synchronized)
    }

    fn align(&mut self) -> Result<(), Failure> {
        let mut place = self.meeting.slice_mut(..);
        let met = self
            .rank
            .communicator
            .all_reduce_in_place(&mut place, ReduceOp::Sum)?;
        self.pending = Some(met);
        self.finish()
    }

    fn count_wrong(&mut self, shape: Shape, _: Placement, repetition: u64) -> Result<u64, Failure> {
        let span = self.span(shape, &[0]);
        let data = self.data(shape, repetition);
        let stream = &self.rank.stream;
        // Both placements end in the second buffer.
        let [_, mut received] = self.buffers.both()?;
        let rank = self.rank.world.rank();
        if let Some(byte) = self.self_test.flipped_byte(rank, span.len()) {
            let mut spoiled = received.slice_mut(span.start + byte..span.start + byte + 1);
            let mut value = [0u8];
            cuda(stream.memcpy_dtoh(&spoiled, &mut value))?;
            cuda(stream.synchronize())?;
            value[0] ^= SelfTest::FLIPPED;
            cuda(stream.memcpy_htod(&value, &mut spoiled))?;
            cuda(stream.synchronize())?;
        }
        let mut wrong = 0;
        for begin in span.clone().step_by(PIECE) {
            let end = span.end.min(begin + PIECE);
            let piece = &mut self.staging[..end - begin];
            cuda(stream.memcpy_dtoh(&received.slice(begin..end), piece))?;
            cuda(stream.synchronize())?;
            wrong += data.count_wrong((begin - span.start) as u64, piece);
        }
        Ok(wrong)
    }

    fn mark(&mut self, index: usize) -> Result<(), Failure> {
        while self.events.len() <= index {
            let timed = Some(CUevent_flags::CU_EVENT_DEFAULT);
            self.events.push(cuda(self.rank.context.new_event(timed))?);
        }
        cuda(self.events[index].record(&self.rank.stream))
    }

    fn seconds_between(&mut self, from: usize, to: usize) -> Result<f64, Failure> {
        let milliseconds = cuda(self.events[from].elapsed_ms(&self.events[to]))?;
        Ok(f64::from(milliseconds) * 1e-3)
    }

    fn copy(&mut self, bytes: u64, shift: u64) -> Result<(), Failure> {
        let (begin, end) = (shift as usize, (shift + bytes) as usize);
        match &mut self.memcpy {
            Some(memcpy) => memcpy.copy(end - begin, begin),
            None => {
                let (from, mut to) = self.buffers.apart(false)?;
                let mut to = to.slice_mut(begin..end);
                cuda(
                    self.rank
                        .stream
                        .memcpy_dtod(&from.slice(begin..end), &mut to),
                )?;
            }
        }
        Ok(())
    }

    fn finish_copies(&mut self) -> Result<(), Failure> {
        if self.memcpy.is_some() {
            return Ok(());
        }
        let done = cuda(self.rank.stream.record_event(None))?;
        let begun = Instant::now();
        while !cuda(done.try_is_complete())? {
            if begun.elapsed() > self.rank.options.timeout {
                return Err(Failure::new(
                    Exit::TimedOut,
                    "a copy on the device does not end",
                ));
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    fn notes(&self, shape: Shape, seconds: f64) -> Vec<String> {
        self.operation.notes(shape, seconds)
    }
}

fn cuda<T>(result: Result<T, DriverError>) -> Result<T, Failure> {
    result.map_err(|error| Failure::new(Exit::Nccl, format!("CUDA: {error}")))
}
