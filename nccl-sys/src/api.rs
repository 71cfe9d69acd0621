//! [`Api`]: the functions of one NCCL library, looked up once.
//!
//! The macro `nccl_api!` makes the struct out of the prototypes in `bindings/functions.rs`, so
//! that a function exists here exactly when the header declares it. Every entry is optional: one
//! build of a program runs on old and new libraries, and only the functions that it calls have to exist.
//!
//! A table comes from [`Api::load`] (the loader calls it), or is filled by hand from
//! [`Api::empty`]: tests and benchmarks do so for a library of their own functions.

// The names are C's.
#![allow(non_snake_case)]

use core::ffi::{CStr, c_void};
use core::fmt;

use crate::Version;
use crate::bindings::types::*;

/// A function that the loaded library does not have.
///
/// ```
/// let error = nccl_sys::Api::empty().ncclAlltoAll().unwrap_err();
/// assert_eq!(error.to_string(), "ncclAlltoAll needs NCCL 2.28.3 or newer");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{function} needs NCCL {needs} or newer")]
#[non_exhaustive]
pub struct MissingFunction {
    /// The name of the function.
    pub function: &'static str,
    /// The first release that has it.
    pub needs: Version,
}

impl MissingFunction {
    fn new(function: &'static str) -> Self {
        // A function that the table does not know comes from a header newer than the table, which
        // only a build with the feature `bindgen` can have.
        let needs = crate::since(function).unwrap_or(Version::HEADER);
        Self { function, needs }
    }
}

/// Makes [`Api`] of a block of prototypes as bindgen writes them.
macro_rules! nccl_api {
    (unsafe extern "C" {
        $(pub fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?;)*
    }) => {
        /// The functions of an NCCL library: `None` where the library lacks one.
        ///
        /// Beside each field there is a method of the same name that turns `None` into a
        /// [`MissingFunction`], so that a call reads
        ///
        /// ```
        /// # fn example(api: &nccl_sys::Api) -> Result<(), nccl_sys::MissingFunction> {
        /// let mut version = 0;
        /// // SAFETY: the table comes from a real library, and `version` outlives the call.
        /// let result = unsafe { api.ncclGetVersion()?(&mut version) };
        /// # Ok(()) }
        /// ```
        ///
        /// The table holds addresses only. The code that fills it promises that they stay valid for as long as
        /// the table is used; a library opened by the [`Loader`](crate::Loader) is never closed.
        #[derive(Clone, Copy)]
        pub struct Api {
            $(
                #[doc = concat!("`", stringify!($name), "`.")]
                pub $name: Option<unsafe extern "C" fn($($argument: $type),*) $(-> $result)?>,
            )*
        }

        impl Api {
            /// The names of all functions, in the order of the header.
            ///
            /// ```
            /// assert!(nccl_sys::Api::NAMES.contains(&"ncclAllReduce"));
            /// ```
            pub const NAMES: &'static [&'static str] = &[$(stringify!($name)),*];

            /// Returns names and types of a function's arguments, as the header has them; `None` for a function that the
            /// header lacks. For code between a program and NCCL: tracing, fault injection.
            ///
            /// ```
            /// let arguments = nccl_sys::Api::arguments("ncclCommAbort").unwrap();
            /// assert_eq!(arguments, [("comm", "ncclComm_t")]);
            /// ```
            pub fn arguments(function: &str) -> Option<&'static [(&'static str, &'static str)]> {
                match function {
                    $(stringify!($name) => {
                        Some(&[$((stringify!($argument), stringify!($type))),*])
                    })*
                    _ => None,
                }
            }

            /// Returns a table without functions.
            ///
            /// ```
            /// assert!(nccl_sys::Api::empty().ncclAllReduce.is_none());
            /// ```
            pub const fn empty() -> Self {
                Self { $($name: None),* }
            }

            /// Fills the table with the address that `resolve` returns for every function; null means that there is none.
            ///
            /// # Safety
            ///
            /// An address other than null must be that of a function with the prototype that
            /// `nccl.h` gives to this name, and must stay valid for as long as the table, or a copy
            /// of it, is used.
            ///
            /// ```
            /// // SAFETY: no address is given.
            /// let api = unsafe { nccl_sys::Api::load(|_name| std::ptr::null_mut()) };
            /// assert_eq!(api.missing().count(), nccl_sys::Api::NAMES.len());
            /// ```
            pub unsafe fn load(mut resolve: impl FnMut(&CStr) -> *mut c_void) -> Self {
                Self {
                    $($name: {
                        const NAME: &CStr = c_name(concat!(stringify!($name), "\0"));
                        let address = resolve(NAME);
                        // SAFETY: null becomes `None`, every other address is by the caller's promise a
                        // function of this very type; a data pointer and a function pointer are of
                        // the same size on every platform with `dlsym`.
                        unsafe {
                            core::mem::transmute::<
                                *mut c_void,
                                Option<unsafe extern "C" fn($($argument: $type),*) $(-> $result)?>,
                            >(address)
                        }
                    }),*
                }
            }

            /// Returns the names of the functions that this table lacks.
            ///
            /// ```
            /// let api = nccl_sys::Api::empty();
            /// assert_eq!(api.missing().next(), nccl_sys::Api::NAMES.first().copied());
            /// ```
            pub fn missing(&self) -> impl Iterator<Item = &'static str> + use<> {
                let present = [$(self.$name.is_some()),*];
                Self::NAMES.iter().zip(present).filter(|(_, there)| !there).map(|(name, _)| *name)
            }

            $(
                #[doc = concat!("`", stringify!($name), "`, or that it is missing.")]
                ///
                /// # Errors
                /// [`MissingFunction`] names the function, and the first release that has it.
                #[inline]
                pub fn $name(&self) -> Result<
                    unsafe extern "C" fn($($argument: $type),*) $(-> $result)?,
                    MissingFunction,
                > {
                    match self.$name {
                        Some(function) => Ok(function),
                        None => Err(MissingFunction::new(stringify!($name))),
                    }
                }
            )*
        }
    };
}

/// Returns the C string of a name that ends in NUL.
const fn c_name(name: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("the name of a function is an identifier"),
    }
}

crate::bindings::include_generated!("functions.rs");

impl Default for Api {
    fn default() -> Self {
        Self::empty()
    }
}

impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let missing: Vec<_> = self.missing().collect();
        f.debug_struct("Api")
            .field("functions", &(Self::NAMES.len() - missing.len()))
            .field("missing", &missing)
            .finish()
    }
}
