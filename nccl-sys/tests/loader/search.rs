//! The places where the loader searches, and their order.

use std::fs;

use nccl_sys::{LoadError, Loader, Origin, Version};

use crate::identify::load;
use crate::libraries::{Source, hide_installed};
use crate::process::alone;

#[test]
fn an_error_numbers_every_place_with_its_reason() {
    alone(
        |dir, command| {
            hide_installed(dir, command);
            let home = dir.join("home");
            Source::of("int nothing;").compile_to(home.join("lib/libnccl.so.2"));
            let venv = dir.join("venv");
            fs::create_dir_all(venv.join("lib/python3.11/site-packages")).unwrap();
            command.env("NCCL_HOME", home).env("VIRTUAL_ENV", venv);
        },
        |dir| {
            let error = load(&Loader::new().pip_layout(true)).unwrap_err();
            assert_eq!(error.to_string().lines().count(), 1, "{error}");
            let text = format!("{error:#}");
            let LoadError::NotFound { attempts, .. } = error else {
                panic!("{text}")
            };

            let origins: Vec<_> = attempts.iter().map(|attempt| attempt.origin).collect();
            assert_eq!(
                origins[..5],
                [
                    Origin::LinkerPath,
                    Origin::LinkerPath,
                    Origin::NcclHome,
                    Origin::NcclHome,
                    Origin::Pip
                ]
            );
            let lines: Vec<_> = text.lines().collect();
            let home = dir.join("home/lib");
            assert_eq!(lines[0], "no NCCL library could be loaded:");
            assert!(lines[1].starts_with("  1. libnccl.so.2 (the dynamic linker's search path): "));
            assert!(lines[1].contains("invalid ELF header"), "{}", lines[1]);
            assert!(lines[2].starts_with("  2. libnccl.so (the dynamic linker's search path): "));
            assert_eq!(
                lines[3],
                format!(
                    "  3. {}/libnccl.so.2 (from NCCL_HOME): \
                     it is not NCCL: it does not have ncclGetVersion",
                    home.display()
                )
            );
            assert!(
                lines[4].starts_with("  4. ") && lines[4].contains("No such file"),
                "{text}"
            );
            let wheel = dir.join("venv/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2");
            assert!(
                lines[5].starts_with(&format!("  5. {} ", wheel.display())),
                "{text}"
            );
            assert_eq!(lines.len(), attempts.len() + 2);
            assert!(
                lines.last().unwrap().contains("NCCL_LIBRARY"),
                "the last line helps: {text}"
            );
        },
    );
}

#[test]
fn the_linkers_search_path_goes_before_nccl_home() {
    alone(
        |dir, command| {
            Source::nccl(22707).compile_to(dir.join("path/libnccl.so.2"));
            Source::nccl(23203).compile_to(dir.join("home/lib/libnccl.so.2"));
            command
                .env("LD_LIBRARY_PATH", dir.join("path"))
                .env("NCCL_HOME", dir.join("home"));
        },
        |_| {
            let nccl = load(&Loader::new()).unwrap();
            assert_eq!(nccl.origin, Origin::LinkerPath);
            assert_eq!(nccl.version, Version::new(2, 27, 7));
        },
    );
}

#[test]
fn nccl_home_is_searched_for_both_names() {
    alone(
        |dir, command| {
            hide_installed(dir, command);
            Source::nccl(23203).compile_to(dir.join("home/lib/libnccl.so"));
            command.env("NCCL_HOME", dir.join("home"));
        },
        |dir| {
            let nccl = load(&Loader::new()).unwrap();
            assert_eq!(nccl.origin, Origin::NcclHome);
            assert_eq!(
                nccl.path,
                dir.canonicalize().unwrap().join("home/lib/libnccl.so")
            );
        },
    );
}

#[test]
fn python_packages_are_searched_only_when_asked_for() {
    alone(
        |dir, command| {
            hide_installed(dir, command);
            let packages = dir.join("venv/lib/python3.12/site-packages");
            Source::nccl(23203).compile_to(packages.join("nvidia/nccl/lib/libnccl.so.2"));
            command.env("VIRTUAL_ENV", dir.join("venv"));
        },
        |dir| {
            let error = load(&Loader::new()).unwrap_err();
            assert!(matches!(error, LoadError::NotFound { .. }), "{error:?}");

            let nccl = load(&Loader::new().pip_layout(true)).unwrap();
            assert_eq!(nccl.origin, Origin::Pip);
            assert!(
                nccl.path
                    .starts_with(dir.canonicalize().unwrap().join("venv"))
            );
        },
    );
}

#[test]
fn what_is_wanted_and_cannot_be_loaded_is_not_replaced_by_something_else() {
    alone(
        |dir, command| {
            Source::nccl(23203).compile_to(dir.join("libnccl.so.2"));
            command
                .env("LD_LIBRARY_PATH", dir)
                .env("NCCL_LIBRARY", dir.join("absent.so"));
        },
        |dir| {
            let error = load(&Loader::new()).unwrap_err();
            let text = error.to_string();
            let LoadError::NotFound { attempts, .. } = error else {
                panic!("{text}")
            };
            assert_eq!(attempts.len(), 1);
            assert_eq!(attempts[0].file, dir.join("absent.so"));
            assert_eq!(attempts[0].origin, Origin::Environment);
            assert!(text.contains("unset NCCL_LIBRARY"), "{text}");
        },
    );
}

#[test]
fn the_variable_goes_before_the_search_and_the_argument_before_the_variable() {
    alone(
        |dir, command| {
            Source::nccl(22707).compile_to(dir.join("path/libnccl.so.2"));
            command.env("LD_LIBRARY_PATH", dir.join("path"));
            command.env("NCCL_LIBRARY", dir.join("absent.so"));
            Source::nccl(23203).compile_to(dir.join("argument.so"));
        },
        |dir| {
            let nccl = load(&Loader::new().path(dir.join("argument.so"))).unwrap();
            assert_eq!(nccl.origin, Origin::Argument);
            assert_eq!(nccl.version, Version::new(2, 32, 3));
        },
    );
}

#[test]
fn an_empty_variable_is_as_good_as_none() {
    alone(
        |dir, command| {
            Source::nccl(23203).compile_to(dir.join("libnccl.so.2"));
            command
                .env("LD_LIBRARY_PATH", dir)
                .env("NCCL_LIBRARY", "")
                .env("NCCL_HOME", "");
        },
        |_| assert_eq!(load(&Loader::new()).unwrap().origin, Origin::LinkerPath),
    );
}
