//! One process, one NCCL.

use std::ffi::CString;
use std::fs;
use std::os::fd::FromRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::thread;

use nccl_sys::{LoadError, Loader, Origin, Version};

use crate::identify::load;
use crate::libraries::{Source, hide_installed, is_mapped, load_elsewhere};
use crate::process::alone;

fn real(path: impl AsRef<Path>) -> PathBuf {
    path.as_ref().canonicalize().unwrap()
}

#[test]
fn a_copy_that_is_loaded_is_used_before_any_search() {
    alone(
        |dir, command| {
            // As a framework ships it: in a directory of its own.
            Source::nccl(22707).compile_to(dir.join("framework/libnccl.so.2"));
            Source::nccl(23203).compile_to(dir.join("path/libnccl.so.2"));
            command.env("LD_LIBRARY_PATH", dir.join("path"));
        },
        |dir| {
            load_elsewhere(&dir.join("framework/libnccl.so.2"));
            let nccl = load(&Loader::new()).unwrap();
            assert_eq!(nccl.origin, Origin::AlreadyLoaded);
            assert_eq!(nccl.version, Version::new(2, 27, 7));
            assert_eq!(nccl.path, real(dir.join("framework/libnccl.so.2")));
        },
    );
}

#[test]
fn a_copy_is_recognised_by_the_name_inside_it() {
    alone(
        |dir, command| {
            hide_installed(dir, command);
            Source::nccl(22707).compile_to(dir.join("renamed.so"));
        },
        |dir| {
            load_elsewhere(&dir.join("renamed.so"));
            let nccl = load(&Loader::new()).unwrap();
            assert_eq!(nccl.origin, Origin::AlreadyLoaded);
            assert_eq!(nccl.path, real(dir.join("renamed.so")));
        },
    );
}

#[test]
fn a_copy_is_recognised_by_the_name_of_its_file() {
    alone(
        |dir, command| {
            hide_installed(dir, command);
            Source::nccl(22707)
                .without_soname()
                .compile_to(dir.join("libnccl-custom.so.1"));
        },
        |dir| {
            load_elsewhere(&dir.join("libnccl-custom.so.1"));
            let nccl = load(&Loader::new()).unwrap();
            assert_eq!(nccl.origin, Origin::AlreadyLoaded);
            assert_eq!(nccl.path, real(dir.join("libnccl-custom.so.1")));
        },
    );
}

#[test]
fn a_copy_whose_file_was_deleted_is_still_used() {
    alone(
        |dir, command| {
            hide_installed(dir, command);
            Source::nccl(22707)
                .without_soname()
                .compile_to(dir.join("libnccl.so.2.27.7"));
        },
        |dir| {
            let file = real(dir.join("libnccl.so.2.27.7"));
            load_elsewhere(&file);
            fs::remove_file(&file).unwrap();
            let nccl = load(&Loader::new()).unwrap();
            assert_eq!(nccl.origin, Origin::AlreadyLoaded);
            assert_eq!(nccl.path, file);
        },
    );
}

#[test]
fn a_copy_whose_package_was_upgraded_is_still_one() {
    alone(
        |dir, command| {
            hide_installed(dir, command);
            Source::nccl(22707).compile_to(dir.join("lib/libnccl.so.2.27.7"));
            Source::nccl(22803).compile_to(dir.join("lib/libnccl.so.2.28.3"));
            symlink("libnccl.so.2.27.7", dir.join("lib/libnccl.so.2")).unwrap();
        },
        |dir| {
            let link = dir.join("lib/libnccl.so.2");
            load_elsewhere(&link);
            fs::remove_file(&link).unwrap();
            symlink("libnccl.so.2.28.3", &link).unwrap();
            fs::remove_file(dir.join("lib/libnccl.so.2.27.7")).unwrap();
            let nccl = load(&Loader::new()).unwrap();
            assert_eq!(nccl.origin, Origin::AlreadyLoaded);
            assert_eq!(nccl.version, Version::new(2, 27, 7));
        },
    );
}

#[test]
fn a_copy_that_exists_only_in_memory_is_used_and_named_as_the_system_names_it() {
    alone(
        |dir, command| {
            hide_installed(dir, command);
            Source::nccl(23203).compile_to(dir.join("source.so"));
        },
        |dir| {
            // SAFETY: the name is a C string.
            let fd = unsafe { libc::memfd_create(c"made-up:libnccl.so.2".as_ptr(), 0) };
            assert!(fd >= 0);
            // SAFETY: just made, and owned here.
            let mut memory = unsafe { fs::File::from_raw_fd(fd) };
            let mut source = fs::File::open(dir.join("source.so")).unwrap();
            std::io::copy(&mut source, &mut memory).unwrap();
            load_elsewhere(Path::new(&format!("/proc/{}/fd/{fd}", std::process::id())));

            let nccl = load(&Loader::new()).unwrap();
            assert_eq!(nccl.origin, Origin::AlreadyLoaded);
            assert_eq!(
                nccl.path,
                Path::new("/memfd:made-up:libnccl.so.2 (deleted)")
            );
        },
    );
}

#[test]
fn a_copy_that_was_preloaded_under_any_name_is_used() {
    alone(
        |dir, command| {
            hide_installed(dir, command);
            let library = Source::nccl(22707).without_soname();
            command.env("LD_PRELOAD", library.compile_to(dir.join("preloaded.so")));
        },
        |dir| {
            let nccl = load(&Loader::new()).unwrap();
            assert_eq!(nccl.origin, Origin::AlreadyLoaded);
            assert_eq!(nccl.path, real(dir.join("preloaded.so")));
        },
    );
}

#[test]
fn one_library_under_two_names_is_one_copy() {
    alone(
        |dir, command| {
            hide_installed(dir, command);
            let library = Source::nccl(22707).without_soname();
            let library = library.compile_to(dir.join("libnccl-custom.so"));
            let name = Source::of("int nothing;").with_soname("libnccl.so.2");
            name.needing(&library).compile_to(dir.join("name.so"));
        },
        |dir| {
            load_elsewhere(&dir.join("name.so"));
            assert!(is_mapped("libnccl-custom.so"));
            let nccl = load(&Loader::new()).unwrap();
            assert_eq!(nccl.origin, Origin::AlreadyLoaded);
            assert_eq!(nccl.version, Version::new(2, 27, 7));
        },
    );
}

#[test]
fn a_plugin_of_nccl_is_not_a_copy_of_it() {
    alone(
        |dir, command| {
            Source::of("int ncclNetPlugin_v8;").compile_to(dir.join("libnccl-net.so"));
            Source::nccl(23203).compile_to(dir.join("path/libnccl.so.2"));
            command.env("LD_LIBRARY_PATH", dir.join("path"));
        },
        |dir| {
            load_elsewhere(&dir.join("libnccl-net.so"));
            assert_eq!(load(&Loader::new()).unwrap().origin, Origin::LinkerPath);
        },
    );
}

#[test]
fn another_copy_than_the_loaded_one_is_refused_and_not_opened() {
    alone(
        |dir, command| {
            Source::nccl(22707).compile_to(dir.join("framework/libnccl.so.2"));
            Source::nccl(23203).compile_to(dir.join("wanted/libnccl.so.2"));
            command.env("NCCL_LIBRARY", dir.join("wanted/libnccl.so.2"));
        },
        |dir| {
            load_elsewhere(&dir.join("framework/libnccl.so.2"));
            for (loader, asked_by) in [
                (Loader::new(), Origin::Environment),
                (
                    Loader::new().path(dir.join("wanted/libnccl.so.2")),
                    Origin::Argument,
                ),
            ] {
                let error = load(&loader).unwrap_err();
                let text = error.to_string();
                let LoadError::AnotherIsLoaded {
                    wanted,
                    origin,
                    loaded,
                    ..
                } = error
                else {
                    panic!("{error:?}")
                };
                assert_eq!(wanted, dir.join("wanted/libnccl.so.2"));
                assert_eq!(origin, asked_by);
                assert_eq!(loaded, [real(dir.join("framework/libnccl.so.2"))]);
                assert!(text.contains(&wanted.display().to_string()), "{text}");
                assert!(text.contains(&loaded[0].display().to_string()), "{text}");
                assert!(!is_mapped("wanted/libnccl.so.2"));
            }
        },
    );
}

#[test]
fn the_loaded_copy_may_be_wanted_by_any_of_its_names() {
    alone(
        |dir, _| {
            Source::nccl(22707).compile_to(dir.join("lib/libnccl.so.2.27.7"));
            symlink("lib", dir.join("link")).unwrap();
        },
        |dir| {
            load_elsewhere(&dir.join("lib/libnccl.so.2.27.7"));
            for name in [dir.join("link/libnccl.so.2.27.7"), "libnccl.so.2".into()] {
                let nccl = load(&Loader::new().path(name)).unwrap();
                assert_eq!(nccl.path, real(dir.join("lib/libnccl.so.2.27.7")));
            }
        },
    );
}

#[test]
fn of_several_loaded_copies_one_has_to_be_named() {
    alone(
        |dir, _| {
            Source::nccl(22707).compile_to(dir.join("a/libnccl.so.2"));
            Source::nccl(23203).compile_to(dir.join("b/libnccl.so.2"));
        },
        |dir| {
            let files = [dir.join("a/libnccl.so.2"), dir.join("b/libnccl.so.2")];
            files.iter().for_each(|file| load_elsewhere(file));

            let error = load(&Loader::new()).unwrap_err();
            let LoadError::SeveralAreLoaded { mut loaded, .. } = error else {
                panic!("{error:?}")
            };
            loaded.sort();
            assert_eq!(loaded, files.clone().map(real));

            for (file, version) in files.iter().zip([Version::new(2, 27, 7), Version::HEADER]) {
                let nccl = load(&Loader::new().path(file)).unwrap();
                assert_eq!(nccl.version, version);
                assert_eq!(nccl.path, real(file));
            }
        },
    );
}

#[cfg(target_env = "gnu")]
#[test]
fn a_copy_that_cannot_be_reached_is_refused_too() {
    alone(
        |dir, command| {
            Source::nccl(22707).compile_to(dir.join("apart/libnccl.so.2"));
            Source::nccl(23203).compile_to(dir.join("path/libnccl.so.2"));
            command.env("LD_LIBRARY_PATH", dir.join("path"));
        },
        |dir| {
            let file = dir.join("apart/libnccl.so.2");
            let name = CString::new(file.as_os_str().as_bytes()).unwrap();
            // SAFETY: a library without initialisers, in a namespace of its own.
            let handle = unsafe { libc::dlmopen(libc::LM_ID_NEWLM, name.as_ptr(), libc::RTLD_NOW) };
            assert!(!handle.is_null());

            let error = load(&Loader::new()).unwrap_err();
            let LoadError::OutOfReach { loaded, .. } = error else {
                panic!("{error:?}")
            };
            assert_eq!(loaded, real(&file));

            let error = load(&Loader::new().path(dir.join("path/libnccl.so.2"))).unwrap_err();
            let LoadError::AnotherIsLoaded { loaded, .. } = error else {
                panic!("{error:?}")
            };
            assert_eq!(loaded, [real(&file)]);
            assert!(!is_mapped("path/libnccl.so.2"));
        },
    );
}

#[test]
fn loading_again_gives_the_same_library() {
    alone(
        |dir, command| {
            Source::nccl(23203).compile_to(dir.join("libnccl.so.2"));
            command.env("LD_LIBRARY_PATH", dir);
        },
        |_| {
            let first = load(&Loader::new()).unwrap();
            let second = load(&Loader::new()).unwrap();
            assert_eq!(first.origin, Origin::LinkerPath);
            assert_eq!(second.origin, Origin::AlreadyLoaded);
            assert_eq!(first.path, second.path);
            assert_eq!(
                first.symbol(c"ncclGetVersion"),
                second.symbol(c"ncclGetVersion")
            );
        },
    );
}

#[test]
fn threads_that_want_different_files_at_once_get_one_copy() {
    alone(
        |dir, _| {
            for n in 0..8 {
                Source::nccl(23203).compile_to(dir.join(format!("{n}/libnccl.so.2")));
            }
        },
        |dir| {
            let start = Barrier::new(8);
            let results: Vec<_> = thread::scope(|scope| {
                let threads: Vec<_> = (0..8)
                    .map(|n| {
                        let file = dir.join(format!("{n}/libnccl.so.2"));
                        let start = &start;
                        scope.spawn(move || {
                            start.wait();
                            load(&Loader::new().path(file))
                        })
                    })
                    .collect();
                threads
                    .into_iter()
                    .map(|thread| thread.join().unwrap())
                    .collect()
            });
            assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1);
        },
    );
}
