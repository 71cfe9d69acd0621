//! The facts of a loaded library, and the error for one that is not NCCL.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use nccl_sys::{Api, LoadError, Loaded, Loader, Origin, Version};

use crate::libraries::Source;
use crate::process::alone;

pub(crate) fn load(loader: &Loader) -> Result<Loaded, LoadError> {
    // SAFETY: the tests load what they compiled.
    unsafe { loader.load() }
}

/// Loads `file`, which must fail in one attempt, and returns the reason.
fn reason(file: &Path) -> String {
    match load(&Loader::new().path(file)).unwrap_err() {
        LoadError::NotFound { attempts, .. } => {
            assert_eq!(attempts.len(), 1, "{attempts:?}");
            assert_eq!(attempts[0].file, file);
            assert_eq!(attempts[0].origin, Origin::Argument);
            attempts[0].reason.clone()
        }
        error => panic!("{error:?}"),
    }
}

#[test]
fn the_loaded_file_is_named_with_links_resolved() {
    alone(
        |dir, _| {
            Source::nccl(23203).compile_to(dir.join("lib/libnccl.so.2.32.3"));
            symlink("libnccl.so.2.32.3", dir.join("lib/libnccl.so.2")).unwrap();
        },
        |dir| {
            let nccl = load(&Loader::new().path(dir.join("lib/libnccl.so.2"))).unwrap();
            let file = dir.canonicalize().unwrap().join("lib/libnccl.so.2.32.3");
            assert_eq!(nccl.version, Version::new(2, 32, 3));
            assert_eq!(nccl.path, file);
            assert_eq!(
                nccl.to_string(),
                format!("NCCL 2.32.3 at {} (named by the program)", file.display())
            );
        },
    );
}

#[test]
fn an_old_library_loads_and_each_missing_function_names_its_release() {
    alone(
        |dir, _| {
            let old = Source::nccl(2804)
                .with_function("ncclSend")
                .with_function("ncclRecv");
            old.compile_to(dir.join("libnccl.so.2"));
        },
        |dir| {
            let nccl = load(&Loader::new().path(dir.join("libnccl.so.2"))).unwrap();
            assert_eq!(nccl.version, Version::new(2, 8, 4));
            assert!(nccl.api.ncclSend().is_ok());
            assert_eq!(nccl.api.missing().count(), Api::NAMES.len() - 3);
            assert!(nccl.api.missing().all(|name| name != "ncclRecv"));

            let missing = nccl.api.ncclCommRevoke().unwrap_err();
            assert_eq!(missing.function, "ncclCommRevoke");
            assert_eq!(missing.needs, Version::new(2, 28, 7));
            assert_eq!(
                missing.to_string(),
                "ncclCommRevoke needs NCCL 2.28.7 or newer"
            );
        },
    );
}

#[test]
fn symbols_outside_the_header_can_be_asked_for() {
    alone(
        |dir, _| {
            let library = Source::nccl(23203).with_function("ncclCommQueryProperties");
            library.compile_to(dir.join("libnccl.so.2"));
        },
        |dir| {
            let nccl = load(&Loader::new().path(dir.join("libnccl.so.2"))).unwrap();
            assert!(!nccl.symbol(c"ncclCommQueryProperties").is_null());
            assert!(nccl.symbol(c"ncclMakeCoffee").is_null());
        },
    );
}

#[test]
fn a_library_that_is_not_nccl_is_refused_with_the_reason() {
    alone(
        |dir, _| {
            Source::of("int zlibVersion(void) { return 1; }").compile_to(dir.join("libz.so"));
        },
        |dir| {
            assert_eq!(
                reason(&dir.join("libz.so")),
                "it is not NCCL: it does not have ncclGetVersion"
            );
        },
    );
}

#[test]
fn a_broken_file_is_refused_in_the_words_of_the_linker() {
    alone(
        |dir, _| fs::write(dir.join("libnccl.so.2"), [0x7f; 4096]).unwrap(),
        |dir| {
            let reason = reason(&dir.join("libnccl.so.2"));
            assert!(
                reason.contains("libnccl.so.2") && reason.contains("ELF"),
                "{reason}"
            );
        },
    );
}

#[test]
fn a_library_with_an_unresolved_symbol_is_refused_when_it_is_loaded() {
    alone(
        |dir, _| {
            let code = "int elsewhere(void); int ncclGetVersion(int *v) { return elsewhere(); }";
            Source::of(code).compile_to(dir.join("libnccl.so.2"));
        },
        |dir| {
            let reason = reason(&dir.join("libnccl.so.2"));
            assert!(reason.contains("undefined symbol: elsewhere"), "{reason}");
        },
    );
}

#[test]
fn a_version_that_fails_or_makes_no_sense_is_refused() {
    alone(
        |dir, _| {
            Source::of("int ncclGetVersion(int *v) { return 3; }").compile_to(dir.join("fails.so"));
            Source::nccl(17)
                .without_soname()
                .compile_to(dir.join("nonsense.so"));
        },
        |dir| {
            assert_eq!(
                reason(&dir.join("fails.so")),
                "its ncclGetVersion failed with code 3"
            );
            assert_eq!(
                reason(&dir.join("nonsense.so")),
                "its ncclGetVersion says 17, which stands for no release"
            );
        },
    );
}

#[test]
fn no_name_is_not_the_name_of_the_program() {
    alone(
        |_, _| (),
        |_| assert_eq!(reason(Path::new("")), "the name is empty"),
    );
}
