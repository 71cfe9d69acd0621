//! The real library: `NCCL_TEST_LIBRARY` names one, of any release. No GPU is needed.

use std::env;
use std::io::Write as _;
use std::path::PathBuf;

use nccl_sys::{Api, Loader, Origin, ncclResult_t, ncclUniqueId, since};

use crate::identify::load;
use crate::process::alone;

/// Returns the real library; without one, returns `None` and prints that the test is skipped.
fn library() -> Option<PathBuf> {
    let library = env::var_os("NCCL_TEST_LIBRARY").map(PathBuf::from);
    if library.is_none() {
        // Not `eprintln!`, which the test harness would swallow.
        let message = b"NOT TESTED: NCCL_TEST_LIBRARY names no real libnccl.so.2\n";
        std::io::stderr().write_all(message).unwrap();
    }
    library
}

#[test]
fn the_real_library_has_exactly_the_functions_of_its_release() {
    let Some(library) = library() else { return };
    alone(
        |_, _| (),
        |_| {
            let nccl = load(&Loader::new().path(&library)).unwrap();
            assert_eq!(nccl.origin, Origin::Argument);
            assert_eq!(nccl.path, library.canonicalize().unwrap());
            let expected: Vec<_> = Api::NAMES
                .iter()
                .copied()
                .filter(|name| since(name).is_some_and(|first| first > nccl.version))
                .collect();
            assert_eq!(nccl.api.missing().collect::<Vec<_>>(), expected, "{nccl}");
        },
    );
}

#[test]
fn the_real_library_answers_calls() {
    let Some(library) = library() else { return };
    alone(
        |_, command| {
            command.env("NCCL_SOCKET_IFNAME", "lo");
        },
        |_| {
            let nccl = load(&Loader::new().path(&library)).unwrap();
            let mut id = ncclUniqueId::default();
            // SAFETY: `id` outlives the call.
            let result = unsafe { nccl.api.ncclGetUniqueId().unwrap()(&mut id) };
            assert_eq!(result, ncclResult_t::ncclSuccess);
            assert_ne!(id, ncclUniqueId::default());
        },
    );
}
