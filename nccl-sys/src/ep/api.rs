//! [`Api`]: the functions of one NCCL EP library, looked up once; made as [`crate::Api`] is.

// The names are C's.
#![allow(non_snake_case)]

use super::types::*;
use crate::Version;
use crate::bindings::types::*;

/// A function that the loaded NCCL EP library does not have.
///
/// ```
/// let error = nccl_sys::ep::Api::empty().ncclEpDispatch().unwrap_err();
/// assert_eq!(error.to_string(), "ncclEpDispatch needs NCCL EP 0.2.0 or newer");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{function} needs NCCL EP {needs} or newer")]
#[non_exhaustive]
pub struct MissingFunction {
    /// The name of the function.
    pub function: &'static str,
    /// The oldest known release that has it. Headers older than [`VERSION`] were not examined.
    pub needs: Version,
}

impl MissingFunction {
    fn new(function: &'static str) -> Self {
        let needs = VERSION;
        Self { function, needs }
    }
}

/// Makes [`Api`] of the prototypes of `nccl_ep.h`.
macro_rules! nccl_ep_api {
    ($($prototypes:tt)*) => {
        crate::table::function_table! {
            library: "an NCCL EP library",
            header: "nccl_ep.h",
            module: "nccl_sys::ep::",
            function: "ncclEpDispatch",
            version: "ncclEpGetVersion",
            arguments: "ncclEpGroupDestroy" "[(\"ep_group\", \"ncclEpGroup_t\")]",
            $($prototypes)*
        }
    };
}

include!("bindings/functions.rs");
