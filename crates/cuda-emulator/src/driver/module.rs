//! Modules of PTX and their functions ([`crate::kernels`]).
//!
//! A module belongs to a context, and its functions to the module. Unloading the module ends their handles; launches that were
//! already enqueued still run.

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use super::call::{enter, store};
use super::context::{self, Context};
use super::handles::bad_handle;
use super::shape::{SHARED_OPT_IN, Shape, THREADS, gathered};
use super::{capture, refused};
use crate::exec::Stream;
use crate::kernels::{self, Entry, Kernel, Unreadable, program};
use crate::registry::Registry;
use crate::result::CUresult;
use crate::sync::Mutex;
use stand_in_object::Symbol;

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cuModuleLoad", load as *const c_void),
        (c"cuModuleLoadData", load_data as *const c_void),
        (c"cuModuleLoadDataEx", load_data_ex as *const c_void),
        (c"cuModuleUnload", unload as *const c_void),
        (c"cuModuleGetFunction", get_function as *const c_void),
        (c"cuModuleGetLoadingMode", get_loading_mode as *const c_void),
        (c"cuFuncGetAttribute", get_attribute as *const c_void),
        (c"cuFuncSetAttribute", set_attribute as *const c_void),
        (c"cuFuncSetCacheConfig", set_cache_config as *const c_void),
    ]
}

static MODULES: Registry<Module> = Registry::new(0x4B);
static FUNCTIONS: Registry<Function> = Registry::new(0x46);

struct Module {
    context: Arc<Context>,
    entries: Vec<Arc<Entry>>,
    /// The functions that were looked up: the index among the entries, and the handle.
    functions: Mutex<Vec<(usize, usize)>>,
}

struct Function {
    context: Arc<Context>,
    entry: Arc<Entry>,
}

/// The reported limit of dynamic shared memory in bytes. Launches are only checked against [`SHARED_OPT_IN`].
const SHARED: u32 = 48 << 10;

fn make(place: *mut *mut c_void, text: &[u8]) -> Result<(), CUresult> {
    let unread = |Unreadable(reason)| {
        eprintln!("nccl-emulator: a module's PTX cannot be read: {reason}");
        CUresult::ERROR_INVALID_PTX
    };
    if place.is_null() {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let context = context::current()?;
    // Loading may allocate memory on a GPU.
    capture::unsafe_call()?;
    let text =
        std::str::from_utf8(text).map_err(|_| unread(Unreadable("it is no text".to_owned())))?;
    let entries = kernels::entries(text).map_err(unread)?;
    let module = Module {
        context,
        entries: entries.into_iter().map(Arc::new).collect(),
        functions: Mutex::default(),
    };
    let handle = MODULES
        .insert(Arc::new(module))
        .ok_or(CUresult::ERROR_OUT_OF_MEMORY)?;
    // SAFETY: not null, and the caller passes a place for the module.
    unsafe { store(place, handle) }
}

/// Returns the text of an image, which ends with a NUL.
///
/// # Safety
/// `image` is null, PTX that ends with a zero, or a cubin or fat binary.
unsafe fn text_of<'a>(image: *const c_void) -> Result<&'a [u8], CUresult> {
    /// An ELF file, a fat binary, and its wrapper.
    const BINARIES: [[u8; 4]; 3] = [
        *b"\x7fELF",
        [0x50, 0xed, 0x55, 0xba],
        [0xb1, 0x43, 0x62, 0x46],
    ];
    if image.is_null() {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    // SAFETY: neither form is shorter than its first zero.
    let text = unsafe { CStr::from_ptr(image.cast()) }.to_bytes();
    if BINARIES.iter().any(|magic| text.starts_with(magic)) {
        refused::say(
            "cuModuleLoadData",
            "the emulator reads PTX, and neither cubins nor fat binaries",
        );
        return Err(CUresult::ERROR_NOT_SUPPORTED);
    }
    Ok(text)
}

unsafe extern "C" fn load(place: *mut *mut c_void, path: *const c_char) -> CUresult {
    enter("cuModuleLoad", || {
        if path.is_null() {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, and the caller passes a C string.
        let path = OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes());
        let mut text = std::fs::read(path).map_err(|_| CUresult::ERROR_FILE_NOT_FOUND)?;
        text.push(0);
        // SAFETY: it ends with a zero.
        make(place, unsafe { text_of(text.as_ptr().cast()) }?)
    })
}

unsafe extern "C" fn load_data(place: *mut *mut c_void, image: *const c_void) -> CUresult {
    // SAFETY: the caller passes null or an image.
    enter("cuModuleLoadData", || unsafe {
        make(place, text_of(image)?)
    })
}

/// Ignores the compiler options: there is no compiler.
unsafe extern "C" fn load_data_ex(
    place: *mut *mut c_void,
    image: *const c_void,
    _count: c_uint,
    _options: *mut c_uint,
    _values: *mut *mut c_void,
) -> CUresult {
    // SAFETY: the caller passes null or an image.
    enter("cuModuleLoadDataEx", || unsafe {
        make(place, text_of(image)?)
    })
}

unsafe extern "C" fn unload(handle: *mut c_void) -> CUresult {
    enter("cuModuleUnload", || {
        capture::unsafe_call()?;
        let module = MODULES
            .remove(handle)
            .ok_or_else(|| bad_handle("module", handle))?;
        let functions = std::mem::take(&mut *module.functions.lock());
        for (_, function) in functions {
            drop(FUNCTIONS.remove(std::ptr::without_provenance_mut(function)));
        }
        module.context.check()
    })
}

unsafe extern "C" fn get_function(
    place: *mut *mut c_void,
    handle: *mut c_void,
    name: *const c_char,
) -> CUresult {
    enter("cuModuleGetFunction", || {
        if place.is_null() || name.is_null() {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        let module = MODULES
            .get(handle)
            .ok_or_else(|| bad_handle("module", handle))?;
        // SAFETY: not null, and the caller passes a C string.
        let name = unsafe { CStr::from_ptr(name) }.to_bytes();
        let at = module
            .entries
            .iter()
            .position(|entry| entry.name.as_bytes() == name)
            .ok_or(CUresult::ERROR_NOT_FOUND)?;
        let mut functions = module.functions.lock();
        let known = functions.iter().find(|(entry, _)| *entry == at);
        let function = match known {
            Some(&(_, function)) => std::ptr::without_provenance_mut(function),
            None => {
                let function = Function {
                    context: Arc::clone(&module.context),
                    entry: Arc::clone(&module.entries[at]),
                };
                let function = FUNCTIONS
                    .insert(Arc::new(function))
                    .ok_or(CUresult::ERROR_OUT_OF_MEMORY)?;
                functions.push((at, function.addr()));
                function
            }
        };
        // SAFETY: not null, and the caller passes a place for the function.
        unsafe { store(place, function) }
    })
}

unsafe extern "C" fn get_loading_mode(place: *mut c_uint) -> CUresult {
    const EAGER: c_uint = 1;
    // SAFETY: the caller passes null or a place for the mode.
    enter("cuModuleGetLoadingMode", || unsafe { store(place, EAGER) })
}

fn function_of(handle: *mut c_void) -> Result<Arc<Function>, CUresult> {
    FUNCTIONS
        .get(handle)
        .ok_or_else(|| bad_handle("function", handle))
}

unsafe extern "C" fn get_attribute(
    place: *mut c_int,
    attribute: c_int,
    handle: *mut c_void,
) -> CUresult {
    enter("cuFuncGetAttribute", || {
        let threads = match program::registered(handle) {
            Some(program) => program.attributes.max_threads,
            None => function_of(handle).map(|_| THREADS)?,
        };
        let value = match attribute {
            0 => threads as c_int, // MAX_THREADS_PER_BLOCK
            1..=3 => 0,            // bytes of shared, constant and local memory
            4 => 32,               // NUM_REGS
            5 | 6 => 70,           // PTX_VERSION, BINARY_VERSION
            7 => 0,                // CACHE_MODE_CA
            8 => SHARED as c_int,  // MAX_DYNAMIC_SHARED_SIZE_BYTES
            9 => -1,               // PREFERRED_SHARED_MEMORY_CARVEOUT
            _ => return Err(CUresult::ERROR_INVALID_VALUE),
        };
        // SAFETY: the caller passes null or a place for the number.
        unsafe { store(place, value) }
    })
}

/// Checks the two attributes that can be set. They have no effect.
unsafe extern "C" fn set_attribute(
    handle: *mut c_void,
    attribute: c_int,
    value: c_int,
) -> CUresult {
    enter("cuFuncSetAttribute", || {
        if program::registered(handle).is_none() {
            function_of(handle)?;
        }
        match (attribute, value) {
            (8, 0..) if value.cast_unsigned() <= SHARED_OPT_IN => Ok(()),
            (9, -1..=100) => Ok(()),
            _ => Err(CUresult::ERROR_INVALID_VALUE),
        }
    })
}

unsafe extern "C" fn set_cache_config(handle: *mut c_void, config: c_uint) -> CUresult {
    enter("cuFuncSetCacheConfig", || {
        function_of(handle)?;
        match config {
            0..=3 => Ok(()),
            _ => Err(CUresult::ERROR_INVALID_VALUE),
        }
    })
}

/// Launches a function of a module.
///
/// # Safety
/// The arguments are those of the kernel.
pub(super) unsafe fn launch(
    handle: *mut c_void,
    stream: &Arc<Stream>,
    shape: &Shape,
    before: impl FnOnce() -> Result<(), CUresult>,
) -> Result<(), CUresult> {
    let function = function_of(handle)?;
    if !Arc::ptr_eq(&function.context, stream.context()) {
        return Err(CUresult::ERROR_INVALID_HANDLE);
    }
    let name = &function.entry.name;
    if !shape.extra.is_null() {
        refused::say_of(
            "cuLaunchKernel with extra",
            "cuLaunchKernel",
            "the emulator takes a kernel's arguments one by one, and not as one buffer",
        );
        return Err(CUresult::ERROR_NOT_SUPPORTED);
    }
    let Some(run) = kernels::function(name) else {
        let reason = format!(
            "the emulator executes no PTX, and knows no Rust function that stands for the kernel {name}; \
             nccl_emulator::kernels::provide gives it one"
        );
        refused::say_of(name, "cuLaunchKernel", &reason);
        return Err(CUresult::ERROR_NOT_SUPPORTED);
    };
    let parameters = function.entry.parameters.iter();
    let parameters: Vec<_> = parameters
        .map(|parameter| (parameter.offset, parameter.size))
        .collect();
    // SAFETY: as promised, and CUDA takes them at the call.
    let arguments = unsafe { gathered(&parameters, shape.arguments) }?;
    let kernel = Kernel {
        entry: Arc::clone(&function.entry),
        function: run,
        context: Arc::clone(&function.context),
        grid: shape.grid,
        block: shape.block,
        shared: shape.shared,
        arguments,
    };
    before()?;
    stream.submit(kernel).map(drop)
}
