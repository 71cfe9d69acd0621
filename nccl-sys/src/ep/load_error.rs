//! [`LoadError`]: why NCCL EP could not be loaded, with everything that was tried and what to do.

use core::fmt;
use std::path::PathBuf;

use crate::load_error::write_attempts;
use crate::{Attempt, Origin};

/// The environment variable that names the library to load.
pub(super) const VARIABLE: &str = "NCCL_EP_LIBRARY";

/// NCCL EP could not be loaded.
///
/// ```
/// use nccl_sys::ep::{LoadError, Loader};
///
/// // SAFETY: there is no such file, so that nothing is opened.
/// let error = unsafe { Loader::new().path("/no/such/libnccl_ep.so.0").load() }.unwrap_err();
/// assert!(matches!(error, LoadError::NotFound { .. }));
/// assert!(error.to_string().contains("1. /no/such/libnccl_ep.so.0 (named by the program)"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// No place had a library that loads and is NCCL EP.
    #[error(fmt = not_found)]
    #[non_exhaustive]
    NotFound {
        /// Everything that was tried, in order.
        attempts: Vec<Attempt>,
    },

    /// The NCCL in the process does not have the name by which NCCL EP depends on it. The dynamic linker would load a second
    /// copy for NCCL EP, which does not know the communicators of the first.
    #[error(
        "the process has loaded NCCL from {}, but not under the name libnccl.so.2, by which NCCL EP depends on it: \
         NCCL EP would get a second copy of NCCL; load a file whose SONAME is libnccl.so.2",
        loaded.display()
    )]
    #[non_exhaustive]
    OtherNccl {
        /// The file of the NCCL in the process.
        loaded: PathBuf,
    },
}

/// One line; in the alternate form each attempt has a line of its own.
fn not_found(attempts: &[Attempt], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let hint = match attempts.first().map(|attempt| attempt.origin) {
        Some(Origin::Argument) => "nothing else was tried: this file is wanted",
        Some(Origin::EpEnvironment) => {
            "nothing else was tried: unset NCCL_EP_LIBRARY to search the usual places"
        }
        _ => {
            "install NVIDIA's NCCL EP, put its directory into LD_LIBRARY_PATH, or name the file in NCCL_EP_LIBRARY"
        }
    };
    write_attempts("NCCL EP", attempts, hint, f)
}

/// Adds to the linker's reason what is missing beneath NCCL EP, and what to do about it. The linker has no other form for it
/// than its words; those that are not glibc's stay as they are.
pub(super) fn explained(reason: String) -> String {
    let missing = |name| {
        reason
            .strip_prefix(name)
            .is_some_and(|rest| rest.starts_with(": cannot open shared object file"))
    };
    let remedy = if missing("libnccl.so.2") {
        "NCCL EP depends on NCCL, which is missing: load it first (nccl_sys::Loader), or put its directory into \
         LD_LIBRARY_PATH"
    } else if missing("libcuda.so.1") {
        "NCCL EP depends on the CUDA driver, which is missing: install NVIDIA's driver, or put the directory of \
         libcuda.so.1 into LD_LIBRARY_PATH"
    } else if reason.contains("undefined symbol: nccl") {
        "the NCCL in this process lacks a function that NCCL EP needs: NCCL EP 0.2.0 was built for NCCL 2.30.7"
    } else if reason.contains("undefined symbol: cu") {
        "the CUDA driver lacks a function that NCCL EP needs: install a newer driver"
    } else {
        return reason;
    };
    format!("{reason} ({remedy})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_missing_beneath_is_named_with_what_to_do() {
        for (name, remedy) in [
            ("libnccl.so.2", "load it first (nccl_sys::Loader)"),
            ("libcuda.so.1", "install NVIDIA's driver"),
        ] {
            let reason =
                format!("{name}: cannot open shared object file: No such file or directory");
            let text = explained(reason.clone());
            assert!(text.starts_with(&reason), "{text}");
            assert!(text.contains(remedy), "{text}");
        }
    }

    #[test]
    fn a_function_missing_beneath_is_explained_and_anything_else_is_as_the_linker_says() {
        let nccl = "libnccl_ep.so: undefined symbol: ncclCommQueryProperties";
        assert!(explained(nccl.into()).contains("built for NCCL 2.30.7"));
        let driver = "libnccl_ep.so: undefined symbol: cuLaunchKernelEx";
        assert!(explained(driver.into()).contains("a newer driver"));
        for reason in [
            "libnccl_ep.so.0: cannot open shared object file: No such file or directory",
            "libnccl_ep.so: invalid ELF header",
        ] {
            assert_eq!(explained(reason.into()), reason);
        }
    }
}
