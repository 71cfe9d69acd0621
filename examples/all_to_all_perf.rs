//! How fast all-to-all is, and whether every element arrives: nccl-tests' `alltoall_perf`, on the safe
//! crate.
//!
//! ```text
//! cargo run --release --example all_to_all_perf
//! cargo run --release --example all_to_all_perf -- -b 8 -e 128M -f 2 -d half -n 50
//! torchrun --no-python --nproc-per-node 8 target/release/examples/all_to_all_perf
//! ```
//!
//! Without arguments it starts as many ranks as there are GPUs, each a process; where there is none,
//! four ranks on the emulator. Options, header, rows, footer and JSON are those of nccl-tests; `--help`
//! lists them. All of that is in `nccl_tools`; here is what it measures.

use std::ops::Range;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl::cudarc::driver::sys::CUevent_flags;
use nccl::cudarc::driver::{CudaEvent, CudaSlice, CudaView, CudaViewMut, DriverError};
use nccl::{Communicator, DataType, Erased, ErasedMut, Request};
use nccl_tools::bench::{Collective, HostCopy, Placement};
use nccl_tools::failure::{Exit, Failure};
use nccl_tools::perf::{self, Rank};
use nccl_tools::self_test::SelfTest;
use nccl_tools::sizes::Shape;
use nccl_tools::verify::Source;

fn main() -> ExitCode {
    perf::main(AllToAll::new)
}

/// All-to-all between two buffers of bytes; the element type changes from row to row.
struct AllToAll {
    rank: Rank,
    /// Sends out of place, and is the other buffer in place.
    first: CudaSlice<u8>,
    /// Receives out of place; in place it does both.
    second: CudaSlice<u8>,
    /// The last operation that was enqueued, and not yet waited for.
    pending: Option<Request>,
    events: Vec<CudaEvent>,
    /// What all-to-all is compared with on the emulator.
    memcpy: Option<HostCopy>,
    /// Data on its way to and from the device, in pieces.
    staging: Vec<u8>,
    self_test: SelfTest,
}

/// Bytes that are made, moved and compared at a time.
const PIECE: usize = 4 << 20;

/// How long a rank waits for its operations without sleeping.
const PATIENCE: Duration = Duration::from_secs(1);

impl AllToAll {
    fn new(rank: Rank) -> Result<Self, Failure> {
        // On the communicator's stream, whose order then keeps the buffers alive for nothing.
        let first = cuda(rank.stream.alloc_zeros::<u8>(rank.buffer_bytes))?;
        let second = cuda(rank.stream.alloc_zeros::<u8>(rank.buffer_bytes))?;
        let memcpy = if rank.emulation.is_emulated() && rank.options.memcpy_ratio {
            let copy = HostCopy::new(rank.options.sweep.max as usize);
            Some(copy.map_err(|error| Failure::new(Exit::Failed, error.to_string()))?)
        } else {
            None
        };
        Ok(Self {
            staging: vec![0; PIECE.min(rank.buffer_bytes)],
            self_test: SelfTest::from_environment()?,
            pending: None,
            events: Vec::new(),
            first,
            second,
            memcpy,
            rank,
        })
    }

    /// The bytes of both buffers that the operations at `shifts` use; those of a group lie side by side.
    fn span(&self, shape: Shape, shifts: &[u64]) -> Range<usize> {
        let shift = shifts.first().copied().unwrap_or(0) as usize;
        let begin = shift + self.rank.options.unalign as usize * shape.element.size;
        begin..begin + shape.total_bytes() as usize * shifts.len()
    }

    /// The buffer that an operation reads, and the one that it writes.
    fn sides(&mut self, placement: Placement) -> (&mut CudaSlice<u8>, &mut CudaSlice<u8>) {
        match placement {
            Placement::OutOfPlace => (&mut self.first, &mut self.second),
            Placement::InPlace => (&mut self.second, &mut self.first),
        }
    }
}

/// One operation as one call, several as one group of messages.
fn all_to_all(
    communicator: &Communicator,
    shape: Shape,
    operations: usize,
    send: CudaView<'_, u8>,
    recv: CudaViewMut<'_, u8>,
) -> nccl::Result<Request> {
    let data_type = DataType::from_raw(shape.element.code);
    if operations == 1 {
        let (x, y) = (
            Erased::from_bytes(send, data_type)?,
            ErasedMut::from_bytes(recv, data_type)?,
        );
        return communicator.all_to_all(x, y);
    }
    let part = shape.part_bytes() as usize;
    communicator.group(|group| {
        if part == 0 {
            return Ok(());
        }
        let sends = (0..operations * shape.ranks).map(|n| send.slice(n * part..(n + 1) * part));
        for (n, (x, y)) in sends.zip(recv.chunks_exact_mut(part)).enumerate() {
            let peer = n % shape.ranks;
            group.isend(Erased::from_bytes(x, data_type)?, peer)?;
            group.irecv(ErasedMut::from_bytes(y, data_type)?, peer)?;
        }
        Ok(())
    })
}

impl Collective for AllToAll {
    fn fill(&mut self, shape: Shape, placement: Placement, repetition: u64) -> Result<(), Failure> {
        let span = self.span(shape, &[0]);
        if span.is_empty() {
            return Ok(());
        }
        let source = Source::new(repetition, self.rank.world.rank());
        let stream = Arc::clone(&self.rank.stream);
        let mut staging = std::mem::take(&mut self.staging);
        let (send, recv) = self.sides(placement);
        cuda(stream.memset_zeros(&mut recv.slice_mut(span.clone())))?;
        for begin in span.clone().step_by(PIECE) {
            let end = span.end.min(begin + PIECE);
            let piece = &mut staging[..end - begin];
            source.fill((begin - span.start) as u64, piece);
            cuda(stream.memcpy_htod(piece, &mut send.slice_mut(begin..end)))?;
            cuda(stream.synchronize())?;
        }
        self.staging = staging;
        Ok(())
    }

    fn start(&mut self, shape: Shape, placement: Placement, shifts: &[u64]) -> Result<(), Failure> {
        let span = self.span(shape, shifts);
        let (send, recv) = match placement {
            Placement::OutOfPlace => (&self.first, &mut self.second),
            Placement::InPlace => (&self.second, &mut self.first),
        };
        let request = all_to_all(
            &self.rank.communicator,
            shape,
            shifts.len(),
            send.slice(span.clone()),
            recv.slice_mut(span.clone()),
        )?;
        // NCCL has no all-to-all in place: what arrived in the other buffer is copied back.
        if placement == Placement::InPlace && !span.is_empty() {
            let from = self.first.slice(span.clone());
            cuda(
                self.rank
                    .stream
                    .memcpy_dtod(&from, &mut self.second.slice_mut(span)),
            )?;
        }
        self.pending = Some(request);
        Ok(())
    }

    fn finish(&mut self) -> Result<(), Failure> {
        let Some(request) = self.pending.take() else {
            return Ok(());
        };
        // The request's event is recorded at the first question, behind all that was enqueued. At
        // first as nccl-tests does it: ask, and let others have the core.
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            if request.is_complete()? {
                return Ok(());
            }
            std::thread::yield_now();
        }
        // From here on it is no matter of microseconds; this looks for errors, too, and ends with -T.
        Ok(request.wait()?)
    }

    fn count_wrong(&mut self, shape: Shape, _: Placement, repetition: u64) -> Result<u64, Failure> {
        let span = self.span(shape, &[0]);
        let stream = Arc::clone(&self.rank.stream);
        // Both placements end there.
        let received = &mut self.second;
        let rank = self.rank.world.rank();
        if let Some(byte) = self.self_test.flipped_byte(rank, span.len()) {
            let mut spoiled = received.slice_mut(span.start + byte..span.start + byte + 1);
            let mut value = [0u8];
            cuda(stream.memcpy_dtoh(&spoiled, &mut value))?;
            cuda(stream.synchronize())?;
            value[0] ^= 1;
            cuda(stream.memcpy_htod(&value, &mut spoiled))?;
            cuda(stream.synchronize())?;
        }
        let part = shape.part_bytes() as usize;
        let mut wrong = 0;
        for begin in span.clone().step_by(PIECE) {
            let end = span.end.min(begin + PIECE);
            let piece = &mut self.staging[..end - begin];
            cuda(stream.memcpy_dtoh(&received.slice(begin..end), piece))?;
            cuda(stream.synchronize())?;
            // A piece may hold the blocks of several ranks, or a part of one.
            let mut rest = &piece[..];
            while !rest.is_empty() {
                let at = end - rest.len() - span.start;
                let (peer, within) = (at / part, at % part);
                let (block, more) = rest.split_at(rest.len().min(part - within));
                let start = (rank * part + within) as u64;
                let source = Source::new(repetition, peer);
                wrong += source.count_wrong(start, block, shape.element.size);
                rest = more;
            }
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
                let from = self.first.slice(begin..end);
                let stream = &self.rank.stream;
                cuda(stream.memcpy_dtod(&from, &mut self.second.slice_mut(begin..end)))?;
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
}

fn cuda<T>(result: Result<T, DriverError>) -> Result<T, Failure> {
    result.map_err(|error| Failure::new(Exit::Nccl, format!("CUDA: {error}")))
}
