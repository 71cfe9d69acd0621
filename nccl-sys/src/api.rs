//! [`Api`]: the functions of one NCCL library, looked up once.
//!
//! The macro of `table.rs` makes the struct out of the prototypes in `bindings/functions.rs`, so
//! that a function exists here exactly when the header declares it. Every entry is optional: one
//! build of a program runs on old and new libraries, and only the functions that it calls have to exist.
//!
//! A table comes from [`Api::load`] (the loader calls it), or is filled by hand from
//! [`Api::empty`]: tests and benchmarks do so for a library of their own functions.

// The names are C's.
#![allow(non_snake_case)]

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

/// Makes [`Api`] of the prototypes of `nccl.h`.
macro_rules! nccl_api {
    ($($prototypes:tt)*) => {
        crate::table::function_table! {
            library: "an NCCL library",
            header: "nccl.h",
            module: "nccl_sys::",
            function: "ncclAllReduce",
            version: "ncclGetVersion",
            arguments: "ncclCommAbort" "[(\"comm\", \"ncclComm_t\")]",
            $($prototypes)*
        }
    };
}

crate::bindings::include_generated!("functions.rs");
