//! Emulating an older library, and running out of descriptors.

mod ranks;

use std::ptr::null_mut;

use nccl_sys::{NCCL_CONFIG_INITIALIZER, Version, ncclDataType_t as Kind, ncclRedOp_t as Op};
use ranks::{Rank, alone, api, last_error, nccl, processes, threads, unique_id};

#[test]
fn an_older_library_has_the_functions_of_its_release() {
    let older = [("NCCL_EMULATOR_VERSION", "2.27.7")];
    alone(
        "an_older_library_has_the_functions_of_its_release",
        &older,
        || {
            let mut code = 0;
            assert_eq!(nccl!(ncclGetVersion(&mut code)), 0);
            assert_eq!(code, 22707);
            let missing: Vec<&str> = api().missing().collect();
            for name in nccl_sys::Api::NAMES {
                let later = nccl_sys::since(name).unwrap() > Version::new(2, 27, 7);
                assert_eq!(missing.contains(name), later, "{name}");
            }
            assert!(missing.contains(&"ncclAlltoAll") && !missing.contains(&"ncclCommShrink"));
            assert_eq!(
                nccl_sys::ncclResult_t(8),
                nccl_sys::ncclResult_t::ncclTimeout
            );
            let text = api().ncclGetErrorString().unwrap();
            // SAFETY: the text is a static C string.
            let text = unsafe { std::ffi::CStr::from_ptr(text(nccl_sys::ncclResult_t(8))) };
            assert_eq!(text, c"unknown result code");
            threads(2, |rank| {
                let memory = rank.memory(&[1i32]);
                let code = rank.all_reduce(&memory, &memory, Kind::ncclInt32, Op::ncclSum);
                assert_eq!(code, 0);
                rank.sync();
                assert_eq!(memory.read(), [2]);
            });
        },
    );
}

#[test]
fn an_older_library_ignores_newer_fields_of_the_config_without_a_word() {
    let test = "an_older_library_ignores_newer_fields_of_the_config_without_a_word";
    for release in ["2.27.7", "2.28.9"] {
        alone(test, &[("NCCL_EMULATOR_VERSION", release)], || {
            let refused = std::env::var("NCCL_EMULATOR_VERSION").unwrap() == "2.28.9";
            let mut rank = Rank::alone(1, 0);
            let mut config = NCCL_CONFIG_INITIALIZER;
            config.nvlinkCentricSched = 9;
            let id = unique_id();
            let code = nccl!(ncclCommInitRankConfig(
                &mut rank.comm,
                1,
                id,
                0,
                &mut config
            ));
            assert_eq!(code, if refused { 4 } else { 0 }, "{}", last_error());
            if !refused {
                rank.destroy();
            }
        });
    }
}

#[test]
fn ranks_of_different_releases_refuse_each_other() {
    let name = "ranks_of_different_releases_refuse_each_other";
    processes(name, 2, &[], |process| {
        nccl_emulator::Emulator::new()
            .version(2, 30, 7 - process.rank as u32)
            .install()
            .unwrap();
        let mut rank = Rank::alone(2, process.rank);
        let id = process.id("id");
        let code = nccl!(ncclCommInitRank(&mut rank.comm, 2, id, process.rank));
        assert_eq!(code, 5);
        assert!(
            last_error().starts_with("Mismatched NCCL version detected : rank "),
            "{}",
            last_error()
        );
    });
}

#[test]
fn without_descriptors_a_communicator_is_a_system_error() {
    alone(
        "without_descriptors_a_communicator_is_a_system_error",
        &[],
        || {
            let mut rank = Rank::alone(1, 0);
            // The hard limit too: making an id raises the soft limit.
            let used = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
            let limit = libc::rlimit {
                rlim_cur: used + 1,
                rlim_max: used + 1,
            };
            let id = unique_id();
            // SAFETY: the call only reads the limit.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
            let mut held = Vec::new();
            while let Ok(file) = std::fs::File::open("/dev/null") {
                held.push(file);
            }
            let code = nccl!(ncclCommInitRank(&mut rank.comm, 1, id, 0));
            assert_eq!(code, 2);
            assert!(
                last_error().contains("Too many open files"),
                "{}",
                last_error()
            );
            assert_eq!(rank.comm, null_mut());
        },
    );
}
