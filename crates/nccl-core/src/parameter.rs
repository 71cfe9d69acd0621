//! The parameters that NCCL publishes, with their current values.

use std::ffi::{CStr, CString, c_char, c_int};
use std::fmt;

use nccl_sys as sys;

use crate::error::{Error, ErrorKind, Result};
use crate::ffi;
use crate::library::Library;

/// A parameter of the loaded NCCL, bound by name; see [`Library::parameter`].
///
/// ```
/// # nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
/// let parameter = nccl::Library::load()?.parameter("NCCL_DEBUG_SUBSYS")?;
/// println!("{} is {:?}", parameter.name(), parameter.text()?);
/// # Ok::<(), nccl::Error>(())
/// ```
#[derive(Clone)]
pub struct Parameter {
    library: Library,
    name: CString,
    handle: Handle,
}

#[derive(Clone, Copy)]
struct Handle(sys::ncclParamHandle_t);

// SAFETY: a name for NCCL, which owns it for the life of the process; never dereferenced here.
unsafe impl Send for Handle {}
// SAFETY: likewise.
unsafe impl Sync for Handle {}

impl Library {
    /// Returns the names of the parameters that NCCL publishes: a few, from the environment and NCCL's settings files. With
    /// `NCCL_PARAM_DUMP_ALL=1` in the environment, the result has all parameters in NCCL's registry. Most variables that NCCL
    /// reads are not in that registry.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] before NCCL 2.30.4, [`ErrorKind::Nccl`] when NCCL fails.
    ///
    /// Wraps `ncclParamGetAllParameterKeys`.
    ///
    /// ```
    /// # nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
    /// let library = nccl::Library::load()?;
    /// assert!(library.parameters()?.iter().any(|name| name == "NCCL_DEBUG"));
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn parameters(&self) -> Result<Vec<String>> {
        let function = self.function(sys::Api::ncclParamGetAllParameterKeys)?;
        let mut table: *mut *const c_char = std::ptr::null_mut();
        let mut count: c_int = 0;
        // SAFETY: both places are valid for the call.
        let code = unsafe { function(&mut table, &mut count) };
        ffi::check(self, "ncclParamGetAllParameterKeys", code)?;
        let count = usize::try_from(count).unwrap_or(0);
        if table.is_null() {
            return Ok(Vec::new());
        }
        // SAFETY: NCCL keeps a table of that many C strings until this thread calls the function again.
        let names = unsafe { std::slice::from_raw_parts(table, count) };
        // SAFETY: as above.
        let name = |&name: &*const c_char| unsafe { text(name) };
        Ok(names.iter().map(name).collect())
    }

    /// Returns a parameter that NCCL publishes.
    ///
    /// # Errors
    /// As [`parameters`](Self::parameters); [`ErrorKind::Nccl`] for a name that is not one of them.
    ///
    /// Wraps `ncclParamBind`.
    ///
    /// ```
    /// # nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
    /// let library = nccl::Library::load()?;
    /// assert!(library.parameter("NCCL_NO_SUCH_THING").is_err());
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn parameter(&self, name: &str) -> Result<Parameter> {
        let function = self.function(sys::Api::ncclParamBind)?;
        let name = CString::new(name).map_err(|_| {
            Error::new(ErrorKind::InvalidConfig {
                field: "name",
                reason: format!("{name:?} holds a NUL byte"),
            })
        })?;
        let mut handle: sys::ncclParamHandle_t = std::ptr::null_mut();
        // SAFETY: the place and the C string are valid for the call.
        let code = unsafe { function(&mut handle, name.as_ptr()) };
        ffi::check(self, "ncclParamBind", code)?;
        Ok(Parameter {
            library: self.clone(),
            name,
            handle: Handle(handle),
        })
    }
}

impl Parameter {
    /// Returns its name.
    ///
    /// ```
    /// # nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
    /// let parameter = nccl::Library::load()?.parameter("NCCL_DEBUG")?;
    /// assert_eq!(parameter.name(), "NCCL_DEBUG");
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn name(&self) -> &str {
        self.name.to_str().unwrap_or_default()
    }

    /// Returns its value as text, empty if it is not set.
    ///
    /// # Errors
    /// [`ErrorKind::Nccl`] when NCCL fails.
    ///
    /// Wraps `ncclParamGetParameter`.
    ///
    /// ```
    /// # nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
    /// let value = nccl::Library::load()?.parameter("NCCL_DEBUG")?.text()?;
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn text(&self) -> Result<String> {
        let function = self.library.function(sys::Api::ncclParamGetParameter)?;
        let mut value: *const c_char = std::ptr::null();
        let mut length: c_int = 0;
        // SAFETY: the places and the C string are valid for the call.
        let code = unsafe { function(self.name.as_ptr(), &mut value, &mut length) };
        ffi::check(&self.library, "ncclParamGetParameter", code)?;
        // SAFETY: NCCL keeps the C string until this thread calls the function again.
        Ok(unsafe { text(value) })
    }

    /// Returns its value as a number.
    ///
    /// # Errors
    /// [`ErrorKind::Nccl`] for a parameter that is not a number.
    ///
    /// Wraps `ncclParamGetI64`.
    ///
    /// ```
    /// # nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
    /// let parameter = nccl::Library::load()?.parameter("NCCL_DEBUG")?;
    /// assert!(parameter.number().is_err(), "it is a text");
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn number(&self) -> Result<i64> {
        let function = self.library.function(sys::Api::ncclParamGetI64)?;
        let mut value = 0;
        // SAFETY: NCCL's handle, which stays valid; the place is valid for the call.
        let code = unsafe { function(self.handle.0, &mut value) };
        ffi::check(&self.library, "ncclParamGetI64", code)?;
        Ok(value)
    }
}

/// Returns a text of NCCL; empty for null.
///
/// # Safety
/// `value` is null or points to a C string.
unsafe fn text(value: *const c_char) -> String {
    if value.is_null() {
        return String::new();
    }
    // SAFETY: by the caller's promise.
    unsafe { CStr::from_ptr(value) }
        .to_string_lossy()
        .into_owned()
}

impl fmt::Debug for Parameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Parameter").field(&self.name).finish()
    }
}
