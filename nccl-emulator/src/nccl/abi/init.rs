//! Unique ids, and all functions that create a communicator.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nccl_sys::{ncclComm_t, ncclConfig_t, ncclResult_t, ncclUniqueId};

use super::guard::{call, guarded, not_null};
use crate::code::{IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, Result, SYSTEM, UNHANDLED_CUDA};
use crate::faults::{self, Subject};
use crate::nccl::bootstrap;
use crate::nccl::communicator::{self, Communicator, InitRequest, Meeting};
use crate::nccl::config::{self, Config};
use crate::nccl::debug::{self, Level, info, subsystem, warn};
use crate::nccl::environment;
use crate::nccl::group::{self, Job, JobKind};
use crate::nccl::network;
use crate::nccl::timer;
use crate::nccl::unique_id::{self, UniqueId};
use crate::version;
use cuda_emulator::driver::{self, context};

/// Fails if the faults cannot be parsed: otherwise every test with faults would pass.
fn check_faults() -> Result {
    faults::check_environment().map_err(|error| {
        warn!("NCCL_EMULATOR_FAULTS: {error}");
        INVALID_ARGUMENT
    })
}

fn announce_bootstrap() {
    static ONCE: AtomicBool = AtomicBool::new(false);
    if !ONCE.swap(true, Ordering::Relaxed) {
        let blank = if version::is_at_least(2, 24, 0) {
            ""
        } else {
            " "
        };
        info!(
            subsystem::BOOTSTRAP,
            "Bootstrap{blank}: Using unix:@nccl-emulator<0>"
        );
    }
}

/// `showVersion`: logs the version, once.
pub(super) fn announce_version(rank: c_int) {
    static ONCE: AtomicBool = AtomicBool::new(false);
    let everyone = debug::enabled(Level::Info, subsystem::ALL);
    let first = rank == 0 && debug::enabled(Level::Version, subsystem::ALL);
    if !(everyone || first) || ONCE.swap(true, Ordering::Relaxed) {
        return;
    }
    if everyone {
        debug::print(Level::Info, None, format_args!("{}", version::banner()));
        debug::print(Level::Info, None, format_args!("{}", version::ORIGIN));
    } else {
        debug::print(Level::Version, None, format_args!("{}", version::banner()));
    }
}

pub(super) unsafe extern "C" fn ncclGetUniqueId(out: *mut ncclUniqueId) -> ncclResult_t {
    call("ncclGetUniqueId", std::ptr::null_mut(), || {
        check_faults()?;
        announce_bootstrap();
        // NCCL reads the environment before it checks its argument.
        let fixed = unique_id::fixed()?;
        if fixed.is_none() {
            network::check_interfaces()?;
        }
        not_null(out, "GetUniqueId", "out")?;
        let id = match fixed {
            // Rank 0 starts the root in its init.
            Some(fixed) => fixed,
            None => new_id()?,
        };
        // SAFETY: not null, and by the function's contract the caller's to write to.
        unsafe { out.write_unaligned(id.to_c()) };
        Ok(())
    })
}

fn new_id() -> Result<UniqueId> {
    let id = UniqueId::new();
    start_root(&id)?;
    Ok(id)
}

fn start_root(id: &UniqueId) -> Result {
    bootstrap::start_root(id).map_err(|error| {
        warn!("Bootstrap : no socket could be opened: {error}");
        SYSTEM
    })
}

/// Checks that CUDA has a device, before any other use of it.
fn check_device() -> Result {
    if driver::visible::count() == 0 {
        warn!("Cuda failure 100 'no CUDA-capable device is detected'");
        return Err(UNHANDLED_CUDA);
    }
    Ok(())
}

/// `cudaGetDevice`: device 0 unless the thread has chosen another.
pub(super) fn current_device() -> i32 {
    driver::current_device().unwrap_or(0)
}

struct Init<'a> {
    out: *mut ncclComm_t,
    ranks: c_int,
    ids: &'a [ncclUniqueId],
    /// The caller's value; invalid values are refused here.
    id_count: c_int,
    rank: c_int,
    device: i32,
    function: &'static str,
}

/// `ncclCommInitRankDev`: checks the arguments, creates the handle, and queues the job. Outside of a group the job runs
/// immediately; if it fails, the communicator is removed.
///
/// # Safety
/// `out` is null or writable; `config` is null or a config.
unsafe fn init_rank(init: &Init<'_>, config: *const ncclConfig_t) -> Result {
    if init.id_count <= 0 || init.id_count > init.ranks {
        warn!(
            "improper usage of ncclCommInitRank: nId = {}, nranks={}",
            init.id_count, init.ranks
        );
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: the caller's promise.
    let result = unsafe { try_init_rank(init, config) }.and_then(|job| {
        let communicator = Arc::clone(&job.communicator);
        let result = group::run_or_add_job(job);
        // Another thread may have aborted the communicator meanwhile, which ends its handle.
        if result.is_err() && !communicator.is_destroyed() {
            let _ = communicator::reclaim(&communicator);
        }
        result
    });
    if result.is_err() && !init.out.is_null() {
        // SAFETY: not null, so writable by the caller's promise.
        unsafe { init.out.write_unaligned(std::ptr::null_mut()) };
    }
    group::record(result)
}

/// # Safety
/// As [`init_rank`].
unsafe fn try_init_rank(init: &Init<'_>, config: *const ncclConfig_t) -> Result<Job> {
    if unique_id::fixed_address().is_none() {
        network::check_interfaces()?;
    }
    announce_bootstrap();
    announce_version(init.rank);
    let cuda = |error: driver::CUresult| {
        warn!("Cuda failure {} on device {}", error.0, init.device);
        UNHANDLED_CUDA
    };
    context::primary(init.device)
        .map_err(cuda)?
        .check()
        .map_err(cuda)?;
    not_null(init.out, "CommInitRank", "newcomm")?;
    if init.ranks < 1 || init.rank < 0 || init.rank >= init.ranks {
        warn!("Invalid rank requested : {}/{}", init.rank, init.ranks);
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: the caller's promise.
    let config: Config = unsafe { config::parse(config)? };
    let hash = unique_id::id_hash(&init.ids[0]);
    let ids = match unique_id::fixed()? {
        Some(fixed) => {
            if init.rank == 0 {
                info!(subsystem::ENV, "NCCL_COMM_ID set by environment");
                if let Some(address) = unique_id::fixed_address() {
                    network::check_root(address)?;
                }
                start_root(&fixed)?;
            }
            vec![fixed]
        }
        None => init
            .ids
            .iter()
            .map(UniqueId::from_c)
            .collect::<Result<Vec<_>>>()?,
    };
    let blocking = config.blocking;
    let communicator = Arc::new(Communicator::new(
        init.rank,
        init.ranks,
        init.device,
        hash,
        config,
    ));
    let handle = communicator.publish()?;
    if !blocking {
        timer::watch(&communicator);
    }
    // SAFETY: not null, so writable by the caller's promise. Written before the job begins, so that another thread can abort
    // it.
    unsafe { init.out.write_unaligned(handle) };
    let request = Some(Arc::new(InitRequest {
        meeting: Meeting::At(ids),
        function: init.function,
    }));
    Ok(Job {
        request,
        ..Job::new(JobKind::Init, &communicator)
    })
}

pub(super) unsafe extern "C" fn ncclCommInitRank(
    comm: *mut ncclComm_t,
    nranks: c_int,
    commId: ncclUniqueId,
    rank: c_int,
) -> ncclResult_t {
    guarded("ncclCommInitRank", || {
        check_faults()?;
        faults::check_call("ncclCommInitRank", &[Subject { rank, name: None }], &|| {
            false
        })?;
        check_device()?;
        let device = current_device();
        let init = Init {
            out: comm,
            ranks: nranks,
            ids: &[commId],
            id_count: 1,
            rank,
            device,
            function: "ncclCommInitRank",
        };
        // Opens no group of its own: outside of a group it blocks, regardless of the environment.
        // SAFETY: the function's contract.
        unsafe { init_rank(&init, std::ptr::null()) }
    })
}

/// Ends the group that an init opened for itself. For a non-blocking communicator, returns its state.
fn finish_init(result: Result, out: *mut ncclComm_t) -> Result {
    let ended = group::end();
    if let Err(error) = ended
        && error != IN_PROGRESS
    {
        return Err(error);
    }
    result?;
    // SAFETY: an init that succeeded so far has written a handle to it.
    let handle = unsafe { out.read_unaligned() };
    match communicator::peek(handle) {
        Some(communicator) if !communicator.config.blocking => communicator.state(),
        _ => Ok(()),
    }
}

/// `ncclCommInitRankConfig` and `…Scalable`. If CUDA cannot determine the device, NCCL leaves the thread inside a group: that
/// is the only cause of this code so early in these functions.
///
/// # Safety
/// As [`init_rank`].
unsafe fn init_with_config(mut init: Init<'_>, config: *const ncclConfig_t) -> Result {
    check_faults()?;
    group::start();
    // SAFETY: the caller's promise.
    let name = unsafe { faults::any().then(|| config::name(config)).flatten() };
    let subject = Subject {
        rank: init.rank,
        name: name.as_deref(),
    };
    let checked =
        faults::check_call(init.function, &[subject], &|| false).and_then(|()| check_device());
    if let Err(code) = checked {
        // Releases before 2.23.4 do not have this leak.
        if code != UNHANDLED_CUDA || !version::is_at_least(2, 23, 4) {
            group::end()?;
        }
        return Err(code);
    }
    init.device = current_device();
    // SAFETY: the caller's promise.
    let result = unsafe { init_rank(&init, config) };
    finish_init(result, init.out)
}

pub(super) unsafe extern "C" fn ncclCommInitRankConfig(
    comm: *mut ncclComm_t,
    nranks: c_int,
    commId: ncclUniqueId,
    rank: c_int,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    guarded("ncclCommInitRankConfig", || {
        let init = Init {
            out: comm,
            ranks: nranks,
            ids: &[commId],
            id_count: 1,
            rank,
            device: 0,
            function: "ncclCommInitRankConfig",
        };
        // SAFETY: the function's contract.
        unsafe { init_with_config(init, config) }
    })
}

pub(super) unsafe extern "C" fn ncclCommInitRankScalable(
    newcomm: *mut ncclComm_t,
    nranks: c_int,
    myrank: c_int,
    nId: c_int,
    commIds: *mut ncclUniqueId,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    guarded("ncclCommInitRankScalable", || {
        let count = usize::try_from(nId).unwrap_or(0);
        let ids: Vec<ncclUniqueId> = if nId > 0 && nId <= nranks {
            not_null(commIds, "CommInitRankScalable", "commId")?;
            // SAFETY: the function's contract: as many ids. They may be unaligned.
            (0..count)
                .map(|at| unsafe { commIds.add(at).read_unaligned() })
                .collect()
        } else {
            Vec::new()
        };
        let init = Init {
            out: newcomm,
            ranks: nranks,
            ids: &ids,
            id_count: nId,
            rank: myrank,
            device: 0,
            function: "ncclCommInitRankScalable",
        };
        // SAFETY: the function's contract.
        unsafe { init_with_config(init, config) }
    })
}

pub(super) unsafe extern "C" fn ncclCommInitAll(
    comm: *mut ncclComm_t,
    ndev: c_int,
    devlist: *const c_int,
) -> ncclResult_t {
    call("ncclCommInitAll", std::ptr::null_mut(), || {
        check_faults()?;
        check_device()?;
        not_null(comm, "CommInitAll", "comms")?;
        let Ok(count) = usize::try_from(ndev) else {
            warn!("Invalid device count requested : {ndev}");
            return Err(INVALID_ARGUMENT);
        };
        let device = |at: usize| {
            if devlist.is_null() {
                return at as c_int;
            }
            // SAFETY: the function's contract: as many numbers.
            unsafe { devlist.add(at).read() }
        };
        let devices: Vec<c_int> = (0..count).map(device).collect();
        let total = cuda_emulator::driver::visible::count();
        if !devlist.is_null() {
            for (at, &device) in devices.iter().enumerate() {
                if device < 0 || device as u32 >= total {
                    warn!("Invalid device {device} (totalnDev={total})");
                    return Err(INVALID_ARGUMENT);
                }
                if devices[..at].contains(&device)
                    && !environment::switch("NCCL_MULTI_RANK_GPU_ENABLE")
                {
                    return Err(INVALID_USAGE);
                }
            }
        }
        let id = new_id()?.to_c();
        group::start();
        for (rank, &device) in devices.iter().enumerate() {
            let init = Init {
                // SAFETY: the function's contract: room for as many handles.
                out: unsafe { comm.add(rank) },
                ranks: ndev,
                ids: &[id],
                id_count: 1,
                rank: rank as c_int,
                device,
                function: "ncclCommInitAll",
            };
            // The error is recorded in the group, and returned at the group's end.
            // SAFETY: the function's contract.
            let _ = unsafe { init_rank(&init, std::ptr::null()) };
        }
        group::end()
    })
}
