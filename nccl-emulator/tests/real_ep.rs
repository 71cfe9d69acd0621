//! NVIDIA's NCCL EP library on the emulator's driver, as far as it works there. `NCCL_EP_TEST_LIBRARIES` names its builds,
//! separated by colons; `cargo xtask check-symbols` and `cargo xtask real-nccl test` set it. Each build runs on the emulator's
//! own NCCL, and on NVIDIA's libraries of `NCCL_REAL_LIBRARIES` if there are any.
//!
//! The CUDA runtime inside of NCCL EP is NVIDIA's, and the emulator does not answer the checks by which that verifies its driver.
//! So everything works that needs no CUDA call, and nothing else.

mod ranks;
mod real;

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::ptr::{null, null_mut};

use nccl_sys::ep::{
    self, NCCL_EP_GROUP_CONFIG_V1_SIZE, NCCL_EP_TENSOR_MAGIC, ncclEpGroupConfig_t, ncclEpTensor_t,
};
use nccl_sys::{Origin, ncclComm_t, ncclDataType_t, ncclResult_t};
use ranks::{Process, Started, is_child_of, processes_started};

const LIBRARIES: &str = "NCCL_EP_TEST_LIBRARIES";

/// The first NCCL with all functions that NCCL EP needs: 2.29.2 has the last of them, `ncclCommQueryProperties` and others.
const OLDEST: i32 = 22902;
/// What a process says if its NCCL is older, which the loader's error has to explain.
const IS_OLD: &str = "this NCCL is too old for NCCL EP";

/// Runs `body` in `ranks` processes for each build of NCCL EP on each NCCL. `ending` gets the status of a process and what it
/// has written to standard error.
fn on_each(
    test: &str,
    ranks: i32,
    ending: impl Fn(ExitStatus, &str) -> bool,
    body: impl Fn(Process, ep::Loaded),
) {
    let body = |process| {
        // NCCL first: NCCL EP depends on it.
        let is_old = real::version() < OLDEST;
        // SAFETY: the variable names NCCL EP.
        let ep = unsafe { ep::Loader::new().load() };
        if is_old {
            let error = ep.unwrap_err().to_string();
            assert!(
                error.contains("undefined symbol: nccl") && error.contains("built for NCCL 2.30.7"),
                "{error}"
            );
            eprintln!("{IS_OLD}");
            return;
        }
        body(process, ep.unwrap());
    };
    let never = Started {
        start: &|_, _| unreachable!("a child starts no children"),
        meanwhile: &|_| (),
    };
    if is_child_of(test) {
        processes_started(test, ranks, &[], never, |_, _| false, body);
        return;
    }
    let builds = std::env::var(LIBRARIES).unwrap_or_default();
    let builds: Vec<&str> = builds.split(':').filter(|path| !path.is_empty()).collect();
    if builds.is_empty() {
        println!(
            "NOT TESTED: {test}: {LIBRARIES} names no libnccl_ep.so (cargo xtask check-symbols)"
        );
        return;
    }
    let nvidias = std::env::var("NCCL_REAL_LIBRARIES").unwrap_or_default();
    let nvidias = nvidias.split(':').filter(|path| !path.is_empty());
    // An empty variable counts as not set.
    let nccls: Vec<&str> = std::iter::once("").chain(nvidias).collect();
    for (build, nccl) in builds
        .iter()
        .flat_map(|build| nccls.iter().map(move |nccl| (build, nccl)))
    {
        println!("{test}: {build} on {nccl:?}");
        let directory = tempfile::tempdir().unwrap();
        let file = |rank: i32| directory.path().join(rank.to_string());
        let started = Started {
            start: &|rank, mut command| {
                command.stderr(File::create(file(rank)).unwrap());
                command.spawn().unwrap()
            },
            meanwhile: &|_| (),
        };
        let environment = [("NCCL_EP_LIBRARY", *build)];
        let environment = real::environment_of(nccl, &environment);
        let ending = |rank: i32, status| {
            let said = fs::read_to_string(file(rank)).unwrap();
            let expected = well(status, &said) && said.contains(IS_OLD) || ending(status, &said);
            if !expected {
                println!("rank {rank} said: {said}");
            }
            expected
        };
        processes_started(test, ranks, &environment, started, ending, body);
    }
}

fn well(status: ExitStatus, _said: &str) -> bool {
    status.success()
}

/// Calls `ncclEpCreateGroup` and returns its code.
fn create_group(
    ep: &ep::Loaded,
    comm: ncclComm_t,
    config: *const ncclEpGroupConfig_t,
) -> ncclResult_t {
    let create = ep.api.ncclEpCreateGroup().unwrap();
    let mut group = null_mut();
    // SAFETY: `group` and the config outlive the call; the communicator is live.
    unsafe { create(&mut group, comm, config) }
}

/// A config with everything that is required.
fn config() -> ncclEpGroupConfig_t {
    ncclEpGroupConfig_t {
        num_experts: 8,
        max_dispatch_tokens_per_rank: 16,
        max_token_bytes: 4096,
        ..ncclEpGroupConfig_t::init()
    }
}

#[test]
fn nccl_ep_loads_and_has_every_function_of_its_header() {
    let test = "nccl_ep_loads_and_has_every_function_of_its_header";
    on_each(test, 1, well, |_, ep| {
        assert_eq!(ep.version, ep::VERSION);
        assert_eq!(ep.origin, Origin::EpEnvironment);
        assert_eq!(ep.api.missing().count(), 0);
    });
}

#[test]
fn nccl_ep_accepts_the_structs_as_they_are_laid_out_here() {
    let test = "nccl_ep_accepts_the_structs_as_they_are_laid_out_here";
    on_each(test, 1, well, |process, ep| {
        let sizes = [3, 4];
        let mut tensor: *mut ncclEpTensor_t = null_mut();
        let allocate = ep.api.ncclEpTensorAlloc().unwrap();
        // SAFETY: the arrays outlive the call, and the library allocates the tensor.
        let result = unsafe {
            allocate(
                &mut tensor,
                2,
                ncclDataType_t::ncclFloat32,
                sizes.as_ptr(),
                null(),
            )
        };
        assert_eq!(result, ncclResult_t::ncclSuccess);
        // SAFETY: the library made it.
        let made = unsafe { *tensor };
        assert_eq!(made.size as usize, size_of::<ncclEpTensor_t>());
        assert_ne!(
            made.magic, NCCL_EP_TENSOR_MAGIC,
            "the library marks its own"
        );
        assert_eq!((made.ndim, made.datatype), (2, ncclDataType_t::ncclFloat32));
        // SAFETY: an array of `ndim` numbers.
        assert_eq!(unsafe { std::slice::from_raw_parts(made.sizes, 2) }, sizes);
        // SAFETY: made above, and not used again.
        let result = unsafe { ep.api.ncclEpTensorDestroy().unwrap()(tensor) };
        assert_eq!(result, ncclResult_t::ncclSuccess);

        let rank = process.join();
        let refused = |config: &ncclEpGroupConfig_t| {
            let result = create_group(&ep, rank.comm, config);
            assert_eq!(result, ncclResult_t::ncclInvalidArgument, "{config:?}");
        };
        refused(&ncclEpGroupConfig_t {
            magic: 1,
            ..config()
        });
        refused(&ncclEpGroupConfig_t {
            size: NCCL_EP_GROUP_CONFIG_V1_SIZE - 1,
            ..config()
        });
        assert_eq!(
            create_group(&ep, rank.comm, null()),
            ncclResult_t::ncclInvalidArgument
        );
    });
}

/// What happens, not what should: the call reaches the CUDA runtime inside of NCCL EP, which refuses the driver. The library
/// throws an exception, which leaves its function.
#[test]
fn creating_a_group_of_nccl_ep_ends_the_process_on_the_emulated_driver() {
    let test = "creating_a_group_of_nccl_ep_ends_the_process_on_the_emulated_driver";
    let aborted = |status: ExitStatus, said: &str| {
        status.signal() == Some(libc::SIGABRT) && said.contains("exception")
    };
    on_each(test, 2, aborted, |process, ep| {
        let rank = process.join();
        let result = create_group(&ep, rank.comm, &config());
        panic!("it returned {result:?}");
    });
}
