//! Memory operations in streams: waiting for a value in memory, and writing a value (`cuStreamWaitValue32`,
//! `cuStreamBatchMemOp`).

use std::ffi::{c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::call::enter;
use super::context::Context;
use super::handles::{refuse, stream_of};
use super::refused;
use crate::exec::{Backoff, Pause, Recipe, Step, Stream, Work};
use crate::memory::{self, Place};
use crate::result::CUresult;
use crate::violations::Violation;
use stand_in_object::Symbol;

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cuStreamWaitValue32_v2", wait_value_32 as *const c_void),
        (c"cuStreamWaitValue64_v2", wait_value_64 as *const c_void),
        (c"cuStreamWriteValue32_v2", write_value_32 as *const c_void),
        (c"cuStreamWriteValue64_v2", write_value_64 as *const c_void),
        (c"cuStreamBatchMemOp_v2", batch_mem_op as *const c_void),
    ]
}

/// The condition that ends a wait, for the found value and the given value: `CUstreamWaitValue_flags`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Until {
    /// The found value is not less, in wrapping (serial number) order.
    GreaterOrEqual,
    Equal,
    /// The values have a set bit in common.
    And,
    /// Some bit is clear in both values.
    Nor,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Width {
    Bits32,
    Bits64,
}

impl Width {
    fn bytes(self) -> u64 {
        match self {
            Self::Bits32 => 4,
            Self::Bits64 => 8,
        }
    }
}

impl Until {
    fn holds(self, width: Width, found: u64, value: u64) -> bool {
        match (self, width) {
            (Self::GreaterOrEqual, Width::Bits32) => {
                (found as u32).wrapping_sub(value as u32).cast_signed() >= 0
            }
            (Self::GreaterOrEqual, Width::Bits64) => found.wrapping_sub(value).cast_signed() >= 0,
            (Self::Equal, Width::Bits32) => found as u32 == value as u32,
            (Self::Equal, Width::Bits64) => found == value,
            (Self::And, Width::Bits32) => (found & value) as u32 != 0,
            (Self::And, Width::Bits64) => found & value != 0,
            (Self::Nor, Width::Bits32) => !(found | value) as u32 != 0,
            (Self::Nor, Width::Bits64) => !(found | value) != 0,
        }
    }
}

/// One operation.
#[derive(Clone)]
enum Operation {
    Wait(Target, Until),
    Write(Target),
    /// Orders the operations before it with the operations after it.
    Barrier,
}

#[derive(Clone)]
struct Target {
    place: Place,
    width: Width,
    value: u64,
}

impl Target {
    fn new(address: u64, width: Width, value: u64, context: &Context) -> Result<Self, CUresult> {
        if !address.is_multiple_of(width.bytes()) {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        let place = memory::locate(address, width.bytes())
            .and_then(|place| place.reachable_from(context.device()).map(|()| place))
            .map_err(|violation| refuse(violation, context))?;
        Ok(Self {
            place,
            width,
            value,
        })
    }

    fn load(&self) -> Result<u64, Violation> {
        let at = self.place.view()?;
        // SAFETY: the place has as many bytes, which stay mapped with it, and is aligned as its device address is, since
        // memory is mapped in pages; others use it with atomic operations as well, or race as they would on a GPU.
        let found = unsafe {
            match self.width {
                Width::Bits32 => u64::from(AtomicU32::from_ptr(at.cast()).load(Ordering::Acquire)),
                Width::Bits64 => AtomicU64::from_ptr(at.cast()).load(Ordering::Acquire),
            }
        };
        self.place.still_valid()?;
        Ok(found)
    }

    fn store(&self) -> Result<(), Violation> {
        let at = self.place.view()?;
        self.place.used(0, self.width.bytes() as usize);
        // SAFETY: as in `load`.
        unsafe {
            match self.width {
                Width::Bits32 => {
                    AtomicU32::from_ptr(at.cast()).store(self.value as u32, Ordering::Release);
                }
                Width::Bits64 => {
                    AtomicU64::from_ptr(at.cast()).store(self.value, Ordering::Release);
                }
            }
        }
        self.place.still_valid()
    }
}

/// A sequence of operations.
#[derive(Clone)]
struct Batch {
    context: Arc<Context>,
    operations: Arc<[Operation]>,
}

impl Recipe for Batch {
    fn job(&self, stream: &Arc<Stream>) -> Box<dyn Work> {
        Box::new(Running {
            batch: self.clone(),
            stream: Arc::clone(stream),
            done: 0,
            backoff: Backoff::default(),
        })
    }
}

struct Running {
    batch: Batch,
    stream: Arc<Stream>,
    /// The number of finished operations.
    done: usize,
    backoff: Backoff,
}

impl Running {
    /// Runs operations until all are done, or one has to wait. Returns false in the latter case.
    fn advance(&mut self) -> Result<bool, Violation> {
        while let Some(operation) = self.batch.operations.get(self.done) {
            match operation {
                Operation::Wait(target, until) => {
                    if !until.holds(target.width, target.load()?, target.value) {
                        return Ok(false);
                    }
                }
                Operation::Write(target) => target.store()?,
                Operation::Barrier => fence(Ordering::SeqCst),
            }
            self.done += 1;
            self.backoff.moved();
        }
        Ok(true)
    }
}

impl Work for Running {
    fn step(&mut self, _budget: usize) -> Step {
        match self.advance() {
            Ok(true) => Step::Done,
            Ok(false) => {
                self.backoff.missed();
                Step::Blocked { seen: 0 }
            }
            Err(violation) => {
                self.batch.context.fail(violation.during(&self.describe()));
                Step::Done
            }
        }
    }

    fn pause(&self) -> Pause {
        self.backoff.pause()
    }

    fn describe(&self) -> String {
        let what = match self.batch.operations.get(self.done) {
            Some(Operation::Wait(target, until)) => {
                format!("wait for {until:?} {} in memory", target.value)
            }
            _ => "memory operations".to_owned(),
        };
        format!("{what} on {}", self.stream)
    }
}

/// The operations of a call, in order.
enum Asked {
    Wait(Width),
    Write(Width),
}

fn operation(
    asked: &Asked,
    address: u64,
    value: u64,
    flags: c_uint,
    context: &Context,
) -> Result<Operation, CUresult> {
    /// Waits first for writes of devices other than GPUs, which do not exist here.
    const FLUSH: c_uint = 1 << 30;
    /// `CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER`, which is ignored: an additional barrier is harmless.
    const NO_BARRIER: c_uint = 1;
    match *asked {
        Asked::Wait(width) => {
            let until = match flags & !FLUSH {
                0 => Until::GreaterOrEqual,
                1 => Until::Equal,
                2 => Until::And,
                3 => Until::Nor,
                _ => return Err(CUresult::ERROR_INVALID_VALUE),
            };
            if flags & FLUSH != 0 {
                refused::say("cuStreamWaitValue32", "no remote writes can be flushed");
                return Err(CUresult::ERROR_NOT_SUPPORTED);
            }
            let target = Target::new(address, width, value, context)?;
            Ok(Operation::Wait(target, until))
        }
        Asked::Write(_) if flags & !NO_BARRIER != 0 => Err(CUresult::ERROR_INVALID_VALUE),
        Asked::Write(width) => {
            let target = Target::new(address, width, value, context)?;
            Ok(Operation::Write(target))
        }
    }
}

fn submit(stream: &Arc<Stream>, operations: Vec<Operation>) -> Result<(), CUresult> {
    let batch = Batch {
        context: Arc::clone(stream.context()),
        operations: operations.into(),
    };
    stream.submit(batch).map(drop)
}

fn one(
    stream: *mut c_void,
    asked: Asked,
    address: u64,
    value: u64,
    flags: c_uint,
) -> Result<(), CUresult> {
    let stream = stream_of(stream)?;
    let operation = operation(&asked, address, value, flags, stream.context())?;
    submit(&stream, vec![operation])
}

unsafe extern "C" fn wait_value_32(
    stream: *mut c_void,
    address: u64,
    value: u32,
    flags: c_uint,
) -> CUresult {
    enter("cuStreamWaitValue32", || {
        let asked = Asked::Wait(Width::Bits32);
        one(stream, asked, address, u64::from(value), flags)
    })
}

unsafe extern "C" fn wait_value_64(
    stream: *mut c_void,
    address: u64,
    value: u64,
    flags: c_uint,
) -> CUresult {
    enter("cuStreamWaitValue64", || {
        one(stream, Asked::Wait(Width::Bits64), address, value, flags)
    })
}

unsafe extern "C" fn write_value_32(
    stream: *mut c_void,
    address: u64,
    value: u32,
    flags: c_uint,
) -> CUresult {
    enter("cuStreamWriteValue32", || {
        let asked = Asked::Write(Width::Bits32);
        one(stream, asked, address, u64::from(value), flags)
    })
}

unsafe extern "C" fn write_value_64(
    stream: *mut c_void,
    address: u64,
    value: u64,
    flags: c_uint,
) -> CUresult {
    enter("cuStreamWriteValue64", || {
        one(stream, Asked::Write(Width::Bits64), address, value, flags)
    })
}

/// `CUstreamBatchMemOpParams`: of a wait and of a write, which have the same layout.
#[derive(Clone, Copy)]
#[repr(C)]
struct Parameters {
    operation: c_uint,
    address: u64,
    value: u64,
    flags: c_uint,
    alias: u64,
    pad: u64,
}

unsafe extern "C" fn batch_mem_op(
    stream: *mut c_void,
    count: c_uint,
    parameters: *const Parameters,
    flags: c_uint,
) -> CUresult {
    /// The most operations that CUDA accepts in one call.
    const MOST: c_uint = 256;
    enter("cuStreamBatchMemOp", || {
        let stream = stream_of(stream)?;
        if flags != 0 || count > MOST || parameters.is_null() && count > 0 {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        let mut operations = Vec::with_capacity(count as usize);
        for index in 0..count as usize {
            // SAFETY: the caller passes `count` of them.
            let given = unsafe { parameters.add(index).read() };
            let asked = match given.operation {
                1 => Asked::Wait(Width::Bits32),
                4 => Asked::Wait(Width::Bits64),
                2 => Asked::Write(Width::Bits32),
                5 => Asked::Write(Width::Bits64),
                6 => {
                    operations.push(Operation::Barrier);
                    continue;
                }
                kind => {
                    let reason = format!(
                        "of memory operations in streams the emulator has waits, writes and barriers, and not number {kind}"
                    );
                    refused::say("cuStreamBatchMemOp", &reason);
                    return Err(CUresult::ERROR_NOT_SUPPORTED);
                }
            };
            let context = stream.context();
            operations.push(operation(
                &asked,
                given.address,
                given.value,
                given.flags,
                context,
            )?);
        }
        submit(&stream, operations)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_over_when_its_condition_holds_at_its_width() {
        use Until::*;
        use Width::*;
        let wraps = u64::from(u32::MAX);
        for (until, width, found, value, over) in [
            (GreaterOrEqual, Bits32, 5, 5, true),
            (GreaterOrEqual, Bits32, 4, 5, false),
            (GreaterOrEqual, Bits32, 2, wraps, true),
            (GreaterOrEqual, Bits64, 2, wraps, false),
            (GreaterOrEqual, Bits64, 1, u64::MAX, true),
            (Equal, Bits32, 1 << 40 | 7, 7, true),
            (Equal, Bits64, 1 << 40 | 7, 7, false),
            (And, Bits32, 6, 3, true),
            (And, Bits32, 4, 3, false),
            (And, Bits32, 1 << 40, 1 << 40, false),
            (And, Bits64, 1 << 40, 1 << 40, true),
            (Nor, Bits32, wraps - 1, 0, true),
            (Nor, Bits32, wraps - 1, 1, false),
            (Nor, Bits64, wraps, 0, true),
        ] {
            assert_eq!(
                until.holds(width, found, value),
                over,
                "{until:?} {width:?} {found:x} {value:x}"
            );
        }
    }
}
