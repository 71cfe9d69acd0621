//! Device memory: immediate allocation, and immediate and stream-ordered free.

use std::ffi::c_void;

use super::call::{enter, store};
use super::capture;
use super::context;
use super::handles::{refuse, stream_of};
use crate::exec::{self, Step, Work};
use crate::memory::{self, Freeing};
use crate::result::CUresult;
use stand_in_object::Symbol;

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cuMemAlloc_v2", alloc as *const c_void),
        (c"cuMemFree_v2", free as *const c_void),
        (c"cuMemFreeAsync", free_async as *const c_void),
        (c"cuMemGetInfo_v2", get_info as *const c_void),
    ]
}

unsafe extern "C" fn alloc(place: *mut u64, size: usize) -> CUresult {
    enter("cuMemAlloc", || {
        if place.is_null() {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        capture::unsafe_call()?;
        let context = context::current()?;
        let pool = memory::pool(context.device())?;
        let placement = pool.allocate(size as u64, context.number(), false)?;
        // SAFETY: not null, and the caller passes a place for the address.
        unsafe { store(place, placement.address) }
    })
}

unsafe extern "C" fn free(address: u64) -> CUresult {
    enter("cuMemFree", || {
        if address == 0 {
            return Ok(());
        }
        capture::unsafe_call()?;
        let context = context::current()?;
        let freeing =
            memory::begin_free(address).map_err(|violation| refuse(violation, &context))?;
        // Waits for all work on the device, which may still use the memory.
        exec::synchronize_device(freeing.device());
        freeing.finish();
        context.check()
    })
}

/// The job of a stream-ordered free. Dropping the job frees the memory as well.
struct Release(Option<Freeing>);

impl Work for Release {
    fn step(&mut self, _budget: usize) -> Step {
        if let Some(freeing) = self.0.take() {
            freeing.finish();
        }
        Step::Done
    }

    fn describe(&self) -> String {
        "free".into()
    }
}

unsafe extern "C" fn free_async(address: u64, stream: *mut c_void) -> CUresult {
    enter("cuMemFreeAsync", || {
        let stream = stream_of(stream)?;
        if address == 0 {
            return stream.context().check();
        }
        // A graph may free only memory that it allocated itself, and the emulator's graphs do not allocate.
        capture::refuse(&stream, CUresult::ERROR_INVALID_VALUE)?;
        stream.mark()?;
        let freeing =
            memory::begin_free(address).map_err(|violation| refuse(violation, stream.context()))?;
        if stream.idle() {
            freeing.finish();
            return Ok(());
        }
        let sequence = stream.enqueue(Box::new(Release(Some(freeing))))?;
        stream.note_free(sequence);
        Ok(())
    })
}

unsafe extern "C" fn get_info(free: *mut usize, total: *mut usize) -> CUresult {
    enter("cuMemGetInfo", || {
        let (left, all) = memory::pool(context::current()?.device())?.usage();
        // SAFETY: the caller passes null or places for the numbers.
        unsafe {
            store(free, left as usize)?;
            store(total, all as usize)
        }
    })
}
