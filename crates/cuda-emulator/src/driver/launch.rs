//! Launches: `cuLaunchKernel` and `cuLaunchKernelEx`, of functions of modules and of programs
//! ([`crate::kernels::program`]).

use std::ffi::{c_uint, c_void};
use std::sync::Arc;

use super::call::enter;
use super::handles::stream_of;
use super::shape::{Shape, gathered};
use super::{event, module, refused};
use crate::exec::Stream;
use crate::kernels::program::{self, Launched, ProgramKernel, Registered};
use crate::result::CUresult;
use stand_in_object::Symbol;

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cuLaunchKernel", launch_kernel as *const c_void),
        (c"cuLaunchKernelEx", launch_kernel_ex as *const c_void),
    ]
}

/// Launches the kernel of a handle of either kind. Calls `before` after all checks, and before the kernel is enqueued.
///
/// # Safety
/// As `cuLaunchKernel`: the arguments are those of the kernel.
unsafe fn launch(
    function: &'static str,
    handle: *mut c_void,
    stream: &Arc<Stream>,
    shape: &Shape,
    before: impl FnOnce() -> Result<(), CUresult>,
) -> Result<(), CUresult> {
    stream.context().check()?;
    shape.check()?;
    match program::registered(handle) {
        // SAFETY: as promised.
        Some(registered) => unsafe { launch_program(function, registered, stream, shape, before) },
        // SAFETY: as promised.
        None => unsafe { module::launch(handle, stream, shape, before) },
    }
}

/// # Safety
/// As [`launch`].
unsafe fn launch_program(
    function: &'static str,
    registered: Arc<Registered>,
    stream: &Arc<Stream>,
    shape: &Shape,
    before: impl FnOnce() -> Result<(), CUresult>,
) -> Result<(), CUresult> {
    let arguments = if shape.extra.is_null() {
        // SAFETY: the caller passes a pointer to each argument.
        unsafe { gathered(&registered.attributes.parameters, shape.arguments) }?
    } else {
        // SAFETY: the caller passes a list that ends as CUDA says.
        unsafe { buffer(shape.extra) }?
    };
    let kernel = ProgramKernel {
        context: Arc::clone(stream.context()),
        launched: Launched {
            device: stream.device(),
            grid: shape.grid,
            block: shape.block,
            arguments,
        },
        registered,
    };
    if let Err(reason) = kernel.check() {
        refused::say_of(&kernel.registered.name, function, &reason);
        return Err(CUresult::ERROR_NOT_SUPPORTED);
    }
    before()?;
    stream.submit(kernel).map(drop)
}

/// Returns the arguments of a launch that passes them in one buffer.
///
/// # Safety
/// `extra` is a list of names and values that ends with `CU_LAUNCH_PARAM_END`.
unsafe fn buffer(extra: *mut *mut c_void) -> Result<Arc<[u8]>, CUresult> {
    const END: usize = 0;
    const POINTER: usize = 1;
    const SIZE: usize = 2;
    let (mut pointer, mut size) = (None, None);
    let mut at = 0;
    loop {
        // SAFETY: the list has not ended.
        let name = unsafe { extra.add(at).read() }.addr();
        if name == END {
            break;
        }
        // SAFETY: a value follows each name.
        let value = unsafe { extra.add(at + 1).read() };
        match name {
            POINTER => pointer = Some(value),
            // SAFETY: the value points to the number of bytes.
            SIZE if !value.is_null() => size = Some(unsafe { value.cast::<usize>().read() }),
            _ => return Err(CUresult::ERROR_INVALID_VALUE),
        }
        at += 2;
    }
    match (pointer, size) {
        (Some(pointer), Some(size)) if !pointer.is_null() => {
            // SAFETY: the caller says that so many bytes are there.
            Ok(unsafe { std::slice::from_raw_parts(pointer.cast::<u8>(), size) }.into())
        }
        _ => Err(CUresult::ERROR_INVALID_VALUE),
    }
}

unsafe extern "C" fn launch_kernel(
    handle: *mut c_void,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared: c_uint,
    stream: *mut c_void,
    arguments: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> CUresult {
    enter("cuLaunchKernel", || {
        let shape = Shape {
            grid: [grid_x, grid_y, grid_z],
            block: [block_x, block_y, block_z],
            shared,
            arguments,
            extra,
        };
        // SAFETY: the caller passes the kernel's arguments.
        unsafe {
            launch(
                "cuLaunchKernel",
                handle,
                &stream_of(stream)?,
                &shape,
                || Ok(()),
            )
        }
    })
}

/// `CUlaunchConfig`.
#[repr(C)]
struct Config {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: *mut c_void,
    attributes: *const Attribute,
    count: c_uint,
}

/// `CUlaunchAttribute`: a number, and a union of 64 bytes.
#[repr(C)]
struct Attribute {
    id: c_uint,
    padding: c_uint,
    value: [u64; 8],
}

/// Attributes without effect here: they control how blocks share a device, and when writes become visible.
const WITHOUT_EFFECT: [c_uint; 12] = [
    0,  // IGNORE
    1,  // ACCESS_POLICY_WINDOW
    2,  // COOPERATIVE: all blocks run at once anyway
    4,  // CLUSTER_DIMENSION
    5,  // CLUSTER_SCHEDULING_POLICY_PREFERENCE
    8,  // PRIORITY
    9,  // MEM_SYNC_DOMAIN_MAP
    10, // MEM_SYNC_DOMAIN
    11, // PREFERRED_CLUSTER_DIMENSION
    14, // PREFERRED_SHARED_MEMORY_CARVEOUT
    16, // NVLINK_UTIL_CENTRIC_SCHEDULING
    6,  // PROGRAMMATIC_STREAM_SERIALIZATION: a permission to begin earlier
];
/// The event to record when all blocks have begun.
const LAUNCH_COMPLETION_EVENT: c_uint = 12;

unsafe extern "C" fn launch_kernel_ex(
    config: *const c_void,
    handle: *mut c_void,
    arguments: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> CUresult {
    enter("cuLaunchKernelEx", || {
        if config.is_null() {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, and the caller passes a configuration.
        let config = unsafe { &*config.cast::<Config>() };
        let attributes = if config.count == 0 {
            &[]
        } else if config.attributes.is_null() {
            return Err(CUresult::ERROR_INVALID_VALUE);
        } else {
            // SAFETY: not null, and the caller passes as many.
            unsafe { std::slice::from_raw_parts(config.attributes, config.count as usize) }
        };
        let stream = stream_of(config.stream)?;
        let mut begun = None;
        for attribute in attributes {
            match attribute.id {
                id if WITHOUT_EFFECT.contains(&id) => {}
                // An all-zero value requests nothing.
                _ if attribute.value == [0; 8] => {}
                LAUNCH_COMPLETION_EVENT => begun = Some(attribute.value[0] as usize),
                id => {
                    let what = format!("cuLaunchKernelEx with attribute {id}");
                    let reason = format!("the emulator does not know the launch attribute {id}");
                    refused::say_of(&what, "cuLaunchKernelEx", &reason);
                    return Err(CUresult::ERROR_NOT_SUPPORTED);
                }
            }
        }
        let shape = Shape {
            grid: config.grid,
            block: config.block,
            shared: config.shared,
            arguments,
            extra,
        };
        let record = || match begun {
            // On a stream of the emulator, all blocks begin when the stream reaches the kernel.
            Some(event) => event::record_on(std::ptr::with_exposed_provenance_mut(event), &stream),
            None => Ok(()),
        };
        // SAFETY: the caller passes the kernel's arguments.
        unsafe { launch("cuLaunchKernelEx", handle, &stream, &shape, record) }
    })
}
