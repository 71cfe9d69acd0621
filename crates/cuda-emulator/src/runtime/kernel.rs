//! Kernels by the address of their host stub, and launches.

use std::cell::RefCell;
use std::ffi::{c_int, c_uint, c_void};

use super::caller::caller;
use super::device::{context, store};
use super::driver::{self, LaunchConfig};
use super::error::{Code, run};
use stand_in_object::Symbol;

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cudaGetFuncBySymbol", get_by_symbol as *const c_void),
        (c"cudaFuncGetAttributes", get_attributes as *const c_void),
        (c"cudaFuncSetAttribute", set_attribute as *const c_void),
        (c"cudaLaunchKernel", launch as *const c_void),
        (c"cudaLaunchKernelExC", launch_ex as *const c_void),
        (c"__cudaGetKernel", get_kernel as *const c_void),
        (c"__cudaLaunchKernel", launch as *const c_void),
        (
            c"__cudaPushCallConfiguration",
            push_configuration as *const c_void,
        ),
        (
            c"__cudaPopCallConfiguration",
            pop_configuration as *const c_void,
        ),
    ]
}

/// `dim3`, which travels by value.
#[derive(Clone, Copy)]
#[repr(C)]
struct Dim3 {
    x: c_uint,
    y: c_uint,
    z: c_uint,
}

/// The configuration of a launch in CUDA's own syntax, stored for the kernel's host stub, which launches the kernel.
struct Call {
    grid: Dim3,
    block: Dim3,
    shared: usize,
    stream: *mut c_void,
}

thread_local! {
    static CALLS: RefCell<Vec<Call>> = const { RefCell::new(Vec::new()) };
}

/// `cudaLaunchConfig_t`. The debug information of callers lacks this structure, because only code that is built without debug
/// information uses it. Its layout is the same in all of CUDA 12 and 13.
#[repr(C)]
struct Config {
    grid: Dim3,
    block: Dim3,
    shared: usize,
    stream: *mut c_void,
    /// The driver's attributes, with the same numbers and layout.
    attributes: *mut c_void,
    attribute_count: c_uint,
}

/// Returns the driver's function for the kernel of a host stub.
fn function_of(symbol: *const c_void) -> Result<*mut c_void, Code> {
    (caller()?.function_of)(symbol).ok_or_else(|| {
        eprintln!(
            "cuda-emulator: no kernel is known for the host function at {symbol:p}: the call returns \
             cudaErrorInvalidDeviceFunction"
        );
        Code::INVALID_DEVICE_FUNCTION
    })
}

unsafe extern "C" fn get_by_symbol(place: *mut *mut c_void, symbol: *const c_void) -> Code {
    run(|| {
        context()?;
        // SAFETY: the caller passes null or a place for the function.
        unsafe { store(place, function_of(symbol)?) }
    })
}

unsafe extern "C" fn get_attributes(place: *mut u8, symbol: *const c_void) -> Code {
    run(|| {
        context()?;
        let function = function_of(symbol)?;
        if place.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let layout = &caller()?.layouts.function;
        let mut attributes = layout.empty();
        for (field, attribute) in &layout.fields {
            let mut value: c_int = 0;
            // SAFETY: a place for the number, and a function of the driver's.
            unsafe { driver::cuFuncGetAttribute(&raw mut value, *attribute, function) }?;
            attributes.put_number(*field, value);
        }
        // SAFETY: not null, and the caller passes a `cudaFuncAttributes` of its build.
        unsafe { attributes.copy_to(place) };
        Ok(())
    })
}

unsafe extern "C" fn set_attribute(symbol: *const c_void, attribute: c_int, value: c_int) -> Code {
    run(|| {
        context()?;
        // SAFETY: a function of the driver's.
        unsafe { driver::cuFuncSetAttribute(function_of(symbol)?, attribute, value) }
    })
}

/// Checks the launch limits that the runtime enforces before it calls the driver.
fn check(grid: Dim3, block: Dim3, shared: usize) -> Result<c_uint, Code> {
    let sizes = [grid.x, grid.y, grid.z, block.x, block.y, block.z];
    match c_uint::try_from(shared) {
        Ok(shared) if !sizes.contains(&0) => Ok(shared),
        _ => Err(Code::INVALID_CONFIGURATION),
    }
}

unsafe extern "C" fn launch(
    symbol: *const c_void,
    grid: Dim3,
    block: Dim3,
    arguments: *mut *mut c_void,
    shared: usize,
    stream: *mut c_void,
) -> Code {
    run(|| {
        context()?;
        let shared = check(grid, block, shared)?;
        let function = function_of(symbol)?;
        // SAFETY: the caller passes a pointer to each argument of the kernel.
        unsafe {
            driver::cuLaunchKernel(
                function,
                grid.x,
                grid.y,
                grid.z,
                block.x,
                block.y,
                block.z,
                shared,
                stream,
                arguments,
                std::ptr::null_mut(),
            )
        }
    })
}

/// Returns the host stub itself, which identifies a kernel as well as a function.
unsafe extern "C" fn get_kernel(place: *mut *const c_void, symbol: *const c_void) -> Code {
    // SAFETY: the host stub passes a place for the kernel.
    run(|| unsafe { store(place, symbol) })
}

unsafe extern "C" fn push_configuration(
    grid: Dim3,
    block: Dim3,
    shared: usize,
    stream: *mut c_void,
) -> c_uint {
    let call = Call {
        grid,
        block,
        shared,
        stream,
    };
    CALLS.with_borrow_mut(|calls| calls.push(call));
    0
}

unsafe extern "C" fn pop_configuration(
    grid: *mut Dim3,
    block: *mut Dim3,
    shared: *mut usize,
    stream: *mut *mut c_void,
) -> Code {
    run(|| {
        let call = CALLS.with_borrow_mut(Vec::pop);
        let call = call.ok_or(Code::INVALID_CONFIGURATION)?;
        // SAFETY: the host stub passes places for all four.
        unsafe {
            store(grid, call.grid)?;
            store(block, call.block)?;
            store(shared, call.shared)?;
            store(stream, call.stream)
        }
    })
}

unsafe extern "C" fn launch_ex(
    config: *const Config,
    symbol: *const c_void,
    arguments: *mut *mut c_void,
) -> Code {
    run(|| {
        context()?;
        // SAFETY: the caller passes null or a configuration.
        let given = unsafe { config.as_ref() }.ok_or(Code::INVALID_VALUE)?;
        let config = LaunchConfig {
            grid: [given.grid.x, given.grid.y, given.grid.z],
            block: [given.block.x, given.block.y, given.block.z],
            shared: check(given.grid, given.block, given.shared)?,
            stream: given.stream,
            attributes: given.attributes,
            attribute_count: given.attribute_count,
        };
        let function = function_of(symbol)?;
        // SAFETY: a configuration of the driver's with the caller's attributes, and a pointer to each argument.
        unsafe {
            driver::cuLaunchKernelEx(&raw const config, function, arguments, std::ptr::null_mut())
        }
    })
}
