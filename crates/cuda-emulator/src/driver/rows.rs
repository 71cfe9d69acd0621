//! Copies of rows (`cuMemcpy2DAsync`) within a device, which transpositions of blocks consist of.
//!
//! Each row has `WidthInBytes` bytes and begins one pitch behind the previous row. Host memory and arrays are refused.

use std::ffi::c_void;
use std::sync::Arc;

use super::call::enter;
use super::context::Context;
use super::handles::{refuse, stream_of};
use super::refused::{self, NO_ARRAYS};
use crate::exec::{Recipe, Step, Stream, Work};
use crate::memory::{self, Place};
use crate::result::CUresult;
use crate::violations::Violation;
use stand_in_object::Symbol;

pub(super) fn symbols() -> Vec<Symbol> {
    vec![(c"cuMemcpy2DAsync_v2", copy_2d as *const c_void)]
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
struct Description {
    src_x: usize,
    src_y: usize,
    src_memory_type: u32,
    src_host: *const c_void,
    src_device: u64,
    src_array: *mut c_void,
    src_pitch: usize,
    dst_x: usize,
    dst_y: usize,
    dst_memory_type: u32,
    dst_host: *mut c_void,
    dst_device: u64,
    dst_array: *mut c_void,
    dst_pitch: usize,
    width: usize,
    height: usize,
}

const DEVICE: u32 = 2;

/// The rows of one side.
#[derive(Clone)]
struct Side {
    /// The range from the first byte of the first row to the last byte of the last row.
    place: Place,
    pitch: usize,
}

impl Side {
    fn new(
        start: u64,
        pitch: usize,
        (width, height): (usize, usize),
        context: &Context,
    ) -> Result<Self, CUresult> {
        if pitch < width {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        let bytes = (height - 1)
            .checked_mul(pitch)
            .and_then(|before| before.checked_add(width))
            .ok_or(CUresult::ERROR_INVALID_VALUE)?;
        let place = memory::locate(start, bytes as u64).map_err(|bad| refuse(bad, context))?;
        Ok(Self { place, pitch })
    }
}

#[derive(Clone)]
struct Rows {
    /// The context that fails if the memory is invalid.
    context: Arc<Context>,
    to: Side,
    from: Side,
    width: usize,
    height: usize,
}

impl Rows {
    /// Reports that work uses the rows.
    fn used(&self) {
        for side in [&self.to, &self.from] {
            side.place.rows_used((self.width, side.pitch), self.height);
        }
    }
}

impl Recipe for Rows {
    fn job(&self, stream: &Arc<Stream>) -> Box<dyn Work> {
        self.clone().into_job(stream)
    }

    fn into_job(self, stream: &Arc<Stream>) -> Box<dyn Work> {
        Box::new(Copy {
            stream: Arc::clone(stream),
            rows: self,
            done: 0,
        })
    }
}

struct Copy {
    stream: Arc<Stream>,
    rows: Rows,
    /// The number of rows that have been copied.
    done: usize,
}

impl Copy {
    fn advance(&mut self, budget: usize) -> Result<bool, Violation> {
        let Rows {
            to,
            from,
            width,
            height,
            ..
        } = &self.rows;
        let (target, source) = (to.place.view()?, from.place.view()?);
        if self.done == 0 {
            self.rows.used();
        }
        let part = (budget / width).max(1).min(height - self.done);
        for row in self.done..self.done + part {
            // SAFETY: both sides were just checked to reach to the end of their last row, and stay mapped while the
            // job has the places. They may overlap.
            unsafe {
                std::ptr::copy(
                    source.add(row * from.pitch),
                    target.add(row * to.pitch),
                    *width,
                );
            }
        }
        self.done += part;
        if self.done < *height {
            return Ok(false);
        }
        self.rows.used();
        to.place.still_valid()?;
        from.place.still_valid()?;
        Ok(true)
    }
}

impl Work for Copy {
    fn step(&mut self, budget: usize) -> Step {
        match self.advance(budget) {
            Ok(true) => Step::Done,
            Ok(false) => Step::Progress,
            Err(violation) => {
                let violation = violation.during(&self.describe());
                self.rows.context.fail(violation);
                Step::Done
            }
        }
    }

    fn describe(&self) -> String {
        let Rows { width, height, .. } = &self.rows;
        format!("copy of {height} rows of {width} bytes on {}", self.stream)
    }
}

unsafe extern "C" fn copy_2d(description: *const Description, stream: *mut c_void) -> CUresult {
    enter("cuMemcpy2DAsync", || {
        // SAFETY: the caller gives a description that can be read during the call, or null.
        let Some(given) = (unsafe { description.as_ref() }) else {
            return Err(CUresult::ERROR_INVALID_VALUE);
        };
        if given.src_memory_type != DEVICE || given.dst_memory_type != DEVICE {
            refused::say("cuMemcpy2DAsync", NO_ARRAYS);
            return Err(CUresult::ERROR_NOT_SUPPORTED);
        }
        let stream = stream_of(stream)?;
        let size @ (width, height) = (given.width, given.height);
        if width == 0 || height == 0 {
            return stream.context().check();
        }
        let context = stream.context();
        let side = |start: u64, (x, y): (usize, usize), pitch: usize| {
            let skipped = y.checked_mul(pitch).and_then(|rows| rows.checked_add(x));
            let start = skipped.and_then(|bytes| start.checked_add(bytes as u64));
            Side::new(
                start.ok_or(CUresult::ERROR_INVALID_VALUE)?,
                pitch,
                size,
                context,
            )
        };
        let rows = Rows {
            context: Arc::clone(context),
            to: side(
                given.dst_device,
                (given.dst_x, given.dst_y),
                given.dst_pitch,
            )?,
            from: side(
                given.src_device,
                (given.src_x, given.src_y),
                given.src_pitch,
            )?,
            width,
            height,
        };
        stream.submit(rows)?;
        Ok(())
    })
}
