//! Copies and fills.
//!
//! | from, to | when the call returns |
//! |---|---|
//! | device, device | at once |
//! | pinned host memory, device, either way | at once |
//! | other host memory, device, up to 64 KiB | at once: the bytes are staged |
//! | other host memory, device, beyond | when the bytes have been read |
//! | device, other host memory | when the copy is complete |
//! | host memory, host memory | as if the pinned side were a device |
//!
//! In a capture each call returns at once, and the host's memory is used when the graph runs.
//!
//! This matches CUDA, and cudarc depends on it. The variants without "Async" go to the default stream, and wait whenever the
//! host is involved.
//!
//! Each end of a copy that CUDA knows is located at the call, and checked before and after the bytes
//! move.

use std::ffi::c_void;
use std::sync::Arc;

use super::call::enter;
use super::capture;
use super::context::{self, Context};
use super::handles::{refuse, stream_of};
use crate::exec::{Recipe, Step, Stream, Work};
use crate::memory::{self, Place};
use crate::result::CUresult;
use crate::violations::{self, Violation, ViolationKind};
use stand_in_object::Symbol;

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cuMemcpy", any_sync as *const c_void),
        (c"cuMemcpyAsync", any as *const c_void),
        (c"cuMemcpyBatchAsync", batch as *const c_void),
        (c"cuMemcpyBatchAsync_v2", batch_v2 as *const c_void),
        (c"cuMemcpyHtoD_v2", htod_sync as *const c_void),
        (c"cuMemcpyHtoDAsync_v2", htod as *const c_void),
        (c"cuMemcpyDtoH_v2", dtoh_sync as *const c_void),
        (c"cuMemcpyDtoHAsync_v2", dtoh as *const c_void),
        (c"cuMemcpyDtoD_v2", dtod_sync as *const c_void),
        (c"cuMemcpyDtoDAsync_v2", dtod as *const c_void),
        (c"cuMemcpyPeer", peer_sync as *const c_void),
        (c"cuMemcpyPeerAsync", peer as *const c_void),
        (c"cuMemsetD8_v2", set_d8_sync as *const c_void),
        (c"cuMemsetD8Async", set_d8 as *const c_void),
        (c"cuMemsetD16_v2", set_d16_sync as *const c_void),
        (c"cuMemsetD16Async", set_d16 as *const c_void),
        (c"cuMemsetD32_v2", set_d32_sync as *const c_void),
        (c"cuMemsetD32Async", set_d32 as *const c_void),
    ]
}

/// The most bytes of pageable memory that are staged, so that the call need not wait.
const STAGED: usize = 64 << 10;

/// One end of a copy.
#[derive(Clone)]
enum End {
    /// Memory that CUDA knows.
    Known(Place),
    /// Pageable memory of the caller, which must stay valid until the copy is done.
    Pageable(*mut u8),
    /// A staged copy of pageable memory.
    Staged(Box<[u8]>),
}

// SAFETY: only the thread that runs the job touches a pageable end, and the caller of the driver function promised that the
// memory is valid for it.
unsafe impl Send for End {}
// SAFETY: as above; a shared end is only cloned.
unsafe impl Sync for End {}

impl End {
    /// Returns an end that must be device memory or pinned host memory.
    fn known(address: u64, len: usize, context: &Context) -> Result<Self, CUresult> {
        let place = memory::locate(address, len as u64)
            .and_then(|place| place.copyable().map(|()| place))
            .map_err(|violation| refuse(violation, context))?;
        Ok(Self::Known(place))
    }

    /// Returns an end that must be host memory.
    fn host(pointer: *mut u8, len: usize) -> Result<Self, CUresult> {
        if pointer.is_null() {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        if memory::is_device_address(pointer.expose_provenance() as u64) {
            let text = format!("host memory is needed, but {pointer:p} is an address of a device");
            violations::record(Violation::new(ViolationKind::Misuse, None, text));
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        // Partly pinned memory is treated as pageable.
        Ok(match memory::locate(pointer.addr() as u64, len as u64) {
            Ok(place) => Self::Known(place),
            Err(_) => Self::Pageable(pointer),
        })
    }

    /// Returns the address of the bytes, if they may be used now.
    fn locate(&mut self) -> Result<*mut u8, Violation> {
        match self {
            Self::Known(place) => place.view(),
            Self::Pageable(pointer) => Ok(*pointer),
            Self::Staged(bytes) => Ok(bytes.as_mut_ptr()),
        }
    }

    /// Reports that work uses the bytes.
    fn used(&self, len: usize) {
        if let Self::Known(place) = self {
            place.used(0, len);
        }
    }

    fn still_valid(&self) -> Result<(), Violation> {
        match self {
            Self::Known(place) => place.still_valid(),
            Self::Pageable(_) | Self::Staged(_) => Ok(()),
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Known(place) if !place.is_host() => "device",
            _ => "host",
        }
    }
}

struct Copy {
    stream: Arc<Stream>,
    /// The context of the stream that the copy was enqueued on; it fails if the memory is invalid.
    context: Arc<Context>,
    to: End,
    from: End,
    len: usize,
    done: usize,
}

impl Copy {
    fn advance(&mut self, budget: usize) -> Result<bool, Violation> {
        let (to, from) = (self.to.locate()?, self.from.locate()?);
        self.to.used(self.len);
        self.from.used(self.len);
        let part = budget.min(self.len - self.done);
        // SAFETY: both ends have `len` bytes: those that CUDA knows were just checked, and stay
        // mapped while the job has the place; pageable ones were promised by the caller. They may overlap.
        unsafe { std::ptr::copy(from.add(self.done), to.add(self.done), part) };
        self.done += part;
        if self.done < self.len {
            return Ok(false);
        }
        self.to.used(self.len);
        self.from.used(self.len);
        self.to.still_valid()?;
        self.from.still_valid()?;
        Ok(true)
    }
}

impl Work for Copy {
    fn step(&mut self, budget: usize) -> Step {
        match self.advance(budget) {
            Ok(true) => Step::Done,
            Ok(false) => Step::Progress,
            Err(violation) => {
                self.context.fail(violation.during(&self.describe()));
                Step::Done
            }
        }
    }

    fn describe(&self) -> String {
        format!(
            "copy of {} bytes from {} to {} on {}",
            self.len,
            self.from.name(),
            self.to.name(),
            self.stream
        )
    }
}

/// The source of a copy or a fill.
#[derive(Clone)]
enum Source {
    From(End),
    /// A pattern of 1, 2 or 4 bytes, repeated to 4 bytes.
    Pattern([u8; 4]),
}

/// A copy or a fill that a graph can replay.
#[derive(Clone)]
struct Transfer {
    context: Arc<Context>,
    to: End,
    from: Source,
    len: usize,
}

impl Recipe for Transfer {
    fn job(&self, stream: &Arc<Stream>) -> Box<dyn Work> {
        self.clone().into_job(stream)
    }

    fn into_job(self, stream: &Arc<Stream>) -> Box<dyn Work> {
        let stream = Arc::clone(stream);
        let Self {
            context,
            to,
            from,
            len,
        } = self;
        match from {
            Source::From(from) => Box::new(Copy {
                stream,
                context,
                to,
                from,
                len,
                done: 0,
            }),
            Source::Pattern(pattern) => Box::new(Fill {
                stream,
                context,
                to,
                pattern,
                len,
                done: 0,
            }),
        }
    }
}

/// Appends a copy, or a node in a capture. Returns the job's number if there is one.
fn enqueue(stream: &Arc<Stream>, to: End, from: End, len: usize) -> Result<Option<u64>, CUresult> {
    stream.submit(Transfer {
        context: Arc::clone(stream.context()),
        to,
        from: Source::From(from),
        len,
    })
}

/// Waits for a copy, unless it was captured: then the host memory is used at each launch of the graph.
fn wait_for(stream: &Arc<Stream>, sequence: Option<u64>) -> Result<(), CUresult> {
    sequence.map_or(Ok(()), |sequence| stream.wait_until(sequence))
}

/// Returns the stream of the variants without "Async". CUDA considers them unsafe during a capture.
fn default_stream() -> Result<Arc<Stream>, CUresult> {
    let stream = context::current()?.legacy_stream()?;
    stream.mark()?;
    capture::unsafe_call()?;
    Ok(stream)
}

fn host_to_device(
    stream: &Arc<Stream>,
    to: u64,
    from: *const u8,
    len: usize,
    wait: bool,
) -> Result<(), CUresult> {
    if len == 0 {
        return stream.context().check();
    }
    let to = End::known(to, len, stream.context())?;
    upload(stream, to, End::host(from.cast_mut(), len)?, len, wait)
}

/// Copies from the host.
fn upload(
    stream: &Arc<Stream>,
    to: End,
    from: End,
    len: usize,
    wait: bool,
) -> Result<(), CUresult> {
    let kept = !wait && len <= STAGED && !stream.capturing();
    let from = match from {
        End::Pageable(pointer) if kept => {
            // SAFETY: the caller promises `len` readable bytes.
            End::Staged(unsafe { std::slice::from_raw_parts(pointer, len) }.into())
        }
        from => from,
    };
    let pageable = matches!(from, End::Pageable(_));
    let sequence = enqueue(stream, to, from, len)?;
    match wait || pageable {
        true => wait_for(stream, sequence),
        false => Ok(()),
    }
}

fn device_to_host(
    stream: &Arc<Stream>,
    to: *mut u8,
    from: u64,
    len: usize,
    wait: bool,
) -> Result<(), CUresult> {
    if len == 0 {
        return stream.context().check();
    }
    let from = End::known(from, len, stream.context())?;
    let to = End::host(to, len)?;
    let wait = wait || matches!(to, End::Pageable(_));
    let sequence = enqueue(stream, to, from, len)?;
    match wait {
        true => wait_for(stream, sequence),
        false => Ok(()),
    }
}

fn device_to_device(stream: &Arc<Stream>, to: u64, from: u64, len: usize) -> Result<(), CUresult> {
    if len == 0 {
        return stream.context().check();
    }
    let context = stream.context();
    enqueue(
        stream,
        End::known(to, len, context)?,
        End::known(from, len, context)?,
        len,
    )?;
    Ok(())
}

/// Copies between addresses of either kind.
fn anywhere(
    stream: &Arc<Stream>,
    to: u64,
    from: u64,
    len: usize,
    wait: bool,
) -> Result<(), CUresult> {
    let pointer = |address: u64| std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
    match (
        memory::is_device_address(to),
        memory::is_device_address(from),
    ) {
        (true, true) => device_to_device(stream, to, from, len),
        (true, false) => host_to_device(stream, to, pointer(from), len, wait),
        (false, true) => device_to_host(stream, pointer(to), from, len, wait),
        (false, false) if len == 0 => stream.context().check(),
        (false, false) => {
            let (to, from) = (End::host(pointer(to), len)?, End::host(pointer(from), len)?);
            let wait = wait || matches!(to, End::Pageable(_));
            upload(stream, to, from, len, wait)
        }
    }
}

unsafe extern "C" fn any_sync(to: u64, from: u64, len: usize) -> CUresult {
    enter("cuMemcpy", || {
        anywhere(&default_stream()?, to, from, len, true)
    })
}

unsafe extern "C" fn any(to: u64, from: u64, len: usize, stream: *mut c_void) -> CUresult {
    enter("cuMemcpyAsync", || {
        anywhere(&stream_of(stream)?, to, from, len, false)
    })
}

/// Makes several copies between addresses of either kind. The attributes (the location of the memory, and when the source may
/// be read) are hints and are ignored: pageable sources are read at the call, the others in stream order. An error has the
/// index of the copy that failed.
fn several(
    to: *const u64,
    from: *const u64,
    sizes: *const usize,
    count: usize,
    stream: *mut c_void,
) -> Result<(), (CUresult, usize)> {
    // The index of an error that belongs to no single copy.
    let whole = |error| (error, usize::MAX);
    if count == 0 || to.is_null() || from.is_null() || sizes.is_null() || stream.addr() <= 1 {
        return Err(whole(CUresult::ERROR_INVALID_VALUE));
    }
    let stream = stream_of(stream).map_err(whole)?;
    for index in 0..count {
        // SAFETY: the caller passes `count` of each.
        let (to, from, len) = unsafe {
            (
                to.add(index).read(),
                from.add(index).read(),
                sizes.add(index).read(),
            )
        };
        anywhere(&stream, to, from, len, false).map_err(|error| (error, index))?;
    }
    Ok(())
}

unsafe extern "C" fn batch(
    to: *const u64,
    from: *const u64,
    sizes: *const usize,
    count: usize,
    _attributes: *const c_void,
    _attribute_indices: *const usize,
    _attribute_count: usize,
    failed: *mut usize,
    stream: *mut c_void,
) -> CUresult {
    enter("cuMemcpyBatchAsync", || {
        several(to, from, sizes, count, stream).map_err(|(error, index)| {
            if !failed.is_null() {
                // SAFETY: not null, so the caller's place for the number.
                unsafe { failed.write(index) };
            }
            error
        })
    })
}

unsafe extern "C" fn batch_v2(
    to: *const u64,
    from: *const u64,
    sizes: *const usize,
    count: usize,
    _attributes: *const c_void,
    _attribute_indices: *const usize,
    _attribute_count: usize,
    stream: *mut c_void,
) -> CUresult {
    enter("cuMemcpyBatchAsync", || {
        several(to, from, sizes, count, stream).map_err(|(error, _)| error)
    })
}

unsafe extern "C" fn htod_sync(to: u64, from: *const c_void, len: usize) -> CUresult {
    enter("cuMemcpyHtoD", || {
        host_to_device(&default_stream()?, to, from.cast(), len, true)
    })
}

unsafe extern "C" fn htod(
    to: u64,
    from: *const c_void,
    len: usize,
    stream: *mut c_void,
) -> CUresult {
    enter("cuMemcpyHtoDAsync", || {
        host_to_device(&stream_of(stream)?, to, from.cast(), len, false)
    })
}

unsafe extern "C" fn dtoh_sync(to: *mut c_void, from: u64, len: usize) -> CUresult {
    enter("cuMemcpyDtoH", || {
        device_to_host(&default_stream()?, to.cast(), from, len, true)
    })
}

unsafe extern "C" fn dtoh(to: *mut c_void, from: u64, len: usize, stream: *mut c_void) -> CUresult {
    enter("cuMemcpyDtoHAsync", || {
        device_to_host(&stream_of(stream)?, to.cast(), from, len, false)
    })
}

unsafe extern "C" fn dtod_sync(to: u64, from: u64, len: usize) -> CUresult {
    enter("cuMemcpyDtoD", || {
        device_to_device(&default_stream()?, to, from, len)
    })
}

unsafe extern "C" fn dtod(to: u64, from: u64, len: usize, stream: *mut c_void) -> CUresult {
    enter("cuMemcpyDtoDAsync", || {
        device_to_device(&stream_of(stream)?, to, from, len)
    })
}

/// Checks that the contexts of a copy between devices exist. The devices follow from the addresses.
fn known_contexts(one: *mut c_void, other: *mut c_void) -> Result<(), CUresult> {
    Context::lookup(one)?.check()?;
    Context::lookup(other)?.check()
}

unsafe extern "C" fn peer_sync(
    to: u64,
    to_context: *mut c_void,
    from: u64,
    from_context: *mut c_void,
    len: usize,
) -> CUresult {
    enter("cuMemcpyPeer", || {
        known_contexts(to_context, from_context)?;
        device_to_device(&default_stream()?, to, from, len)
    })
}

unsafe extern "C" fn peer(
    to: u64,
    to_context: *mut c_void,
    from: u64,
    from_context: *mut c_void,
    len: usize,
    stream: *mut c_void,
) -> CUresult {
    enter("cuMemcpyPeerAsync", || {
        known_contexts(to_context, from_context)?;
        device_to_device(&stream_of(stream)?, to, from, len)
    })
}

/// A fill with a pattern of 1, 2 or 4 bytes, repeated to 4 bytes.
struct Fill {
    stream: Arc<Stream>,
    context: Arc<Context>,
    to: End,
    pattern: [u8; 4],
    len: usize,
    done: usize,
}

impl Fill {
    fn advance(&mut self, budget: usize) -> Result<bool, Violation> {
        let start = self.to.locate()?;
        self.to.used(self.len);
        // Whole patterns but for the last part.
        let part = budget.next_multiple_of(4).min(self.len - self.done);
        // SAFETY: `len` bytes were just checked, and stay mapped while the job has the mapping.
        // `done` is a multiple of four except at the end, and so is the address, which the call saw
        // to for patterns that need it.
        unsafe {
            let at = start.add(self.done);
            if self.pattern == [self.pattern[0]; 4] {
                at.write_bytes(self.pattern[0], part);
            } else {
                let word = u32::from_ne_bytes(self.pattern);
                for index in 0..part / 4 {
                    at.cast::<u32>().add(index).write_unaligned(word);
                }
                for index in part / 4 * 4..part {
                    at.add(index).write(self.pattern[index % 4]);
                }
            }
        }
        self.done += part;
        if self.done < self.len {
            return Ok(false);
        }
        self.to.used(self.len);
        self.to.still_valid()?;
        Ok(true)
    }
}

impl Work for Fill {
    fn step(&mut self, budget: usize) -> Step {
        match self.advance(budget) {
            Ok(true) => Step::Done,
            Ok(false) => Step::Progress,
            Err(violation) => {
                self.context.fail(violation.during(&self.describe()));
                Step::Done
            }
        }
    }

    fn describe(&self) -> String {
        format!("fill of {} bytes on {}", self.len, self.stream)
    }
}

/// Enqueues a fill. Without "Async" the call waits for one of pinned host memory, but not for one of device memory.
fn fill(
    stream: &Arc<Stream>,
    to: u64,
    pattern: [u8; 4],
    width: usize,
    count: usize,
    sync: bool,
) -> Result<(), CUresult> {
    let len = count
        .checked_mul(width)
        .ok_or(CUresult::ERROR_INVALID_VALUE)?;
    if !to.is_multiple_of(width as u64) {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    if len == 0 {
        return stream.context().check();
    }
    let to = End::known(to, len, stream.context())?;
    let wait = sync && matches!(&to, End::Known(place) if place.is_host());
    let sequence = stream.submit(Transfer {
        context: Arc::clone(stream.context()),
        to,
        from: Source::Pattern(pattern),
        len,
    })?;
    match wait {
        true => wait_for(stream, sequence),
        false => Ok(()),
    }
}

fn twice(value: u16) -> [u8; 4] {
    let [a, b] = value.to_ne_bytes();
    [a, b, a, b]
}

unsafe extern "C" fn set_d8_sync(to: u64, value: u8, count: usize) -> CUresult {
    enter("cuMemsetD8", || {
        fill(&default_stream()?, to, [value; 4], 1, count, true)
    })
}

unsafe extern "C" fn set_d8(to: u64, value: u8, count: usize, stream: *mut c_void) -> CUresult {
    enter("cuMemsetD8Async", || {
        fill(&stream_of(stream)?, to, [value; 4], 1, count, false)
    })
}

unsafe extern "C" fn set_d16_sync(to: u64, value: u16, count: usize) -> CUresult {
    enter("cuMemsetD16", || {
        fill(&default_stream()?, to, twice(value), 2, count, true)
    })
}

unsafe extern "C" fn set_d16(to: u64, value: u16, count: usize, stream: *mut c_void) -> CUresult {
    enter("cuMemsetD16Async", || {
        fill(&stream_of(stream)?, to, twice(value), 2, count, false)
    })
}

unsafe extern "C" fn set_d32_sync(to: u64, value: u32, count: usize) -> CUresult {
    enter("cuMemsetD32", || {
        fill(&default_stream()?, to, value.to_ne_bytes(), 4, count, true)
    })
}

unsafe extern "C" fn set_d32(to: u64, value: u32, count: usize, stream: *mut c_void) -> CUresult {
    enter("cuMemsetD32Async", || {
        fill(
            &stream_of(stream)?,
            to,
            value.to_ne_bytes(),
            4,
            count,
            false,
        )
    })
}
