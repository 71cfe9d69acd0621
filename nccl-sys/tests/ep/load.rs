//! The loader of NCCL EP, its order and its errors.

use std::fs;
use std::path::Path;

use nccl_sys::ep::{self, LoadError, Loaded, Loader};
use nccl_sys::{Origin, Version};

use crate::libraries::{Source, is_mapped, load_elsewhere};
use crate::process::alone;

fn load(loader: &Loader) -> Result<Loaded, LoadError> {
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

/// A library that is NCCL EP to the loader, of the version with this code.
fn nccl_ep(code: i32) -> Source {
    Source::of(&format!(
        "int ncclEpGetVersion(int *version) {{ *version = {code}; return 0; }}\n"
    ))
    .with_soname("libnccl_ep.so.0")
}

#[test]
fn any_version_of_nccl_ep_loads_and_a_missing_function_is_named() {
    alone(
        |dir, _| {
            nccl_ep(10_000)
                .with_function("ncclEpCombine")
                .compile_to(dir.join("libnccl_ep.so.1"));
        },
        |dir| {
            let file = dir.canonicalize().unwrap().join("libnccl_ep.so.1");
            let ep = load(&Loader::new().path(&file)).unwrap();
            assert_eq!(ep.version, Version::new(1, 0, 0));
            assert_eq!(ep.path, file);
            assert_eq!(
                ep.to_string(),
                format!("NCCL EP 1.0.0 at {} (named by the program)", file.display())
            );
            assert!(ep.api.ncclEpCombine().is_ok());
            assert!(!ep.symbol(c"ncclEpCombine").is_null());
            assert_eq!(ep.api.missing().count(), ep::Api::NAMES.len() - 2);
            let missing = ep.api.ncclEpDispatch().unwrap_err();
            assert_eq!(missing.function, "ncclEpDispatch");
            assert_eq!(
                missing.to_string(),
                "ncclEpDispatch needs NCCL EP 0.2.0 or newer"
            );
        },
    );
}

#[test]
fn what_is_not_nccl_ep_is_refused_with_the_reason() {
    alone(
        |dir, _| {
            fs::write(dir.join("broken.so"), [0x7f; 4096]).unwrap();
            Source::of("int zlibVersion(void) { return 1; }").compile_to(dir.join("libz.so"));
            Source::of("int ncclEpGetVersion(int *v) { return 3; }")
                .compile_to(dir.join("fails.so"));
            Source::of("int ncclEpGetVersion(int *v) { *v = 0; return 0; }")
                .compile_to(dir.join("nonsense.so"));
            Source::of(
                "int ncclCommCount(void); int ncclEpGetVersion(int *v) { return ncclCommCount(); }",
            )
            .compile_to(dir.join("newer.so"));
        },
        |dir| {
            let missing = reason(&dir.join("libnccl_ep.so.0"));
            assert!(missing.contains("No such file"), "{missing}");
            let broken = reason(&dir.join("broken.so"));
            assert!(broken.contains("ELF"), "{broken}");
            assert_eq!(
                reason(&dir.join("libz.so")),
                "it is not NCCL EP: it does not have ncclEpGetVersion"
            );
            assert_eq!(
                reason(&dir.join("fails.so")),
                "its ncclEpGetVersion failed with code 3"
            );
            assert_eq!(
                reason(&dir.join("nonsense.so")),
                "its ncclEpGetVersion says 0, which stands for no release"
            );
            let newer = reason(&dir.join("newer.so"));
            assert!(
                newer.contains("undefined symbol: ncclCommCount")
                    && newer.contains("built for NCCL 2.30.7"),
                "{newer}"
            );
        },
    );
}

#[test]
fn the_variable_and_the_argument_name_the_only_nccl_ep_that_is_tried() {
    alone(
        |dir, command| {
            nccl_ep(200).compile_to(dir.join("path/libnccl_ep.so.0"));
            command
                .env("LD_LIBRARY_PATH", dir.join("path"))
                .env("NCCL_EP_LIBRARY", dir.join("none.so"));
        },
        |dir| {
            let text = load(&Loader::new()).unwrap_err().to_string();
            assert!(
                text.contains("none.so (named by NCCL_EP_LIBRARY)")
                    && text.ends_with("unset NCCL_EP_LIBRARY to search the usual places"),
                "{text}"
            );
            let ep = load(&Loader::new().path(dir.join("path/libnccl_ep.so.0"))).unwrap();
            assert_eq!(ep.origin, Origin::Argument);
        },
    );
}

#[test]
fn nccl_ep_is_searched_by_both_names_and_then_in_the_process() {
    alone(
        |dir, command| {
            nccl_ep(200).compile_to(dir.join("path/libnccl_ep.so"));
            command.env("LD_LIBRARY_PATH", dir.join("path"));
        },
        |_| {
            let first = load(&Loader::new()).unwrap();
            assert_eq!(first.origin, Origin::LinkerPath);
            let second = load(&Loader::new()).unwrap();
            assert_eq!(second.origin, Origin::AlreadyLoaded);
            assert_eq!(first.path, second.path);
        },
    );
}

#[test]
fn the_wheel_for_the_chosen_cuda_is_searched_last_and_only_when_asked_for() {
    alone(
        |dir, command| {
            let hidden = dir.join("hidden");
            fs::create_dir(&hidden).unwrap();
            for name in ["libnccl_ep.so.0", "libnccl_ep.so"] {
                fs::write(hidden.join(name), [0; 4096]).unwrap();
            }
            let packages = dir.join("venv/lib/python3.12/site-packages");
            nccl_ep(200).compile_to(packages.join("nccl/ep/lib/cu12/libnccl_ep.so"));
            command
                .env("LD_LIBRARY_PATH", hidden)
                .env("VIRTUAL_ENV", dir.join("venv"));
        },
        |_| {
            let text = format!("{:#}", load(&Loader::new()).unwrap_err());
            assert_eq!(text.lines().count(), 4, "{text}");
            assert!(
                text.ends_with(
                    "install NVIDIA's NCCL EP, put its directory into LD_LIBRARY_PATH, \
                     or name the file in NCCL_EP_LIBRARY"
                ),
                "{text}"
            );
            assert!(load(&Loader::new().pip_layout(13)).is_err());
            let ep = load(&Loader::new().pip_layout(12)).unwrap();
            assert_eq!(ep.origin, Origin::Pip);
        },
    );
}

/// NCCL EP in `dir`, and the NCCL that it depends on in another directory.
fn with_nccl(dir: &Path) {
    let nccl = Source::nccl(23007).compile_to(dir.join("nccl/libnccl.so.2"));
    nccl_ep(200)
        .needing(&nccl)
        .compile_to(dir.join("libnccl_ep.so"));
}

#[test]
fn the_nccl_in_the_process_is_the_one_that_nccl_ep_gets() {
    alone(
        |dir, _| with_nccl(dir),
        |dir| {
            let file = dir.join("nccl/libnccl.so.2");
            // SAFETY: the test compiled it.
            unsafe { nccl_sys::Loader::new().path(file).load() }.unwrap();
            let ep = load(&Loader::new().path(dir.join("libnccl_ep.so"))).unwrap();
            assert_eq!(ep.version, ep::VERSION);
        },
    );
}

#[test]
fn without_nccl_the_error_names_it_and_says_what_to_do() {
    alone(
        |dir, _| with_nccl(dir),
        |dir| {
            // SAFETY: libraries by this name are trusted to be NCCL.
            if unsafe { nccl_sys::Loader::new().path("libnccl.so.2").load() }.is_ok() {
                println!("NOT TESTED: NCCL is installed on this machine");
                return;
            }
            let reason = reason(&dir.join("libnccl_ep.so"));
            assert!(
                reason.starts_with("libnccl.so.2: cannot open shared object file")
                    && reason.contains("load it first (nccl_sys::Loader)"),
                "{reason}"
            );
        },
    );
}

#[test]
fn without_a_driver_the_error_names_it_and_says_what_to_do() {
    alone(
        |dir, _| {
            let driver = Source::of("int cuInit(unsigned flags) { return 0; }")
                .with_soname("libcuda.so.1")
                .compile_to(dir.join("driver/libcuda.so.1"));
            nccl_ep(200)
                .needing(&driver)
                .compile_to(dir.join("libnccl_ep.so"));
        },
        |dir| {
            // SAFETY: libraries by this name are trusted to be the CUDA driver.
            let driver = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY) };
            if !driver.is_null() {
                println!("NOT TESTED: a CUDA driver is installed on this machine");
                return;
            }
            let reason = reason(&dir.join("libnccl_ep.so"));
            assert!(
                reason.starts_with("libcuda.so.1: cannot open shared object file")
                    && reason.contains("install NVIDIA's driver"),
                "{reason}"
            );
        },
    );
}

#[test]
fn an_nccl_of_another_name_is_not_joined_by_a_second_one() {
    alone(
        |dir, _| {
            with_nccl(dir);
            Source::nccl(23007)
                .without_soname()
                .compile_to(dir.join("own/libnccl.so.2.30"));
        },
        |dir| {
            let own = dir.canonicalize().unwrap().join("own/libnccl.so.2.30");
            load_elsewhere(&own);
            let error = load(&Loader::new().path(dir.join("libnccl_ep.so"))).unwrap_err();
            let text = error.to_string();
            let LoadError::OtherNccl { loaded, .. } = error else {
                panic!("{text}")
            };
            assert_eq!(loaded, own);
            assert!(text.contains(&own.display().to_string()), "{text}");
            assert!(!is_mapped("libnccl_ep.so"));
        },
    );
}

#[test]
fn an_nccl_beside_the_one_that_nccl_ep_depends_on_is_refused_as_well() {
    alone(
        |dir, _| {
            with_nccl(dir);
            Source::nccl(23007)
                .without_soname()
                .compile_to(dir.join("own/libnccl.so.2.30"));
        },
        |dir| {
            let dir = dir.canonicalize().unwrap();
            load_elsewhere(&dir.join("nccl/libnccl.so.2"));
            let own = dir.join("own/libnccl.so.2.30");
            load_elsewhere(&own);
            let error = load(&Loader::new().path(dir.join("libnccl_ep.so"))).unwrap_err();
            let LoadError::OtherNccl { loaded, .. } = error else {
                panic!("{error}")
            };
            assert_eq!(loaded, own);
        },
    );
}
