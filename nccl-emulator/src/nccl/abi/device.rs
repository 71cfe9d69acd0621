//! The host's side of the device API: the properties of a communicator, its teams, and the device addresses of peers' memory.
//! NCCL's device code does not run here, so there are no device communicators.

use std::ffi::{c_int, c_void};

use nccl_sys::{
    NCCL_API_MAGIC, ncclCftLeId, ncclCftTeamMode_t, ncclComm_t, ncclCommProperties_t,
    ncclDevComm_t, ncclDevCommRequirements_t, ncclDevResourceRequirements_t,
    ncclGinBarrierHandle_t, ncclLLA2AHandle_t, ncclLsaBarrierHandle_t, ncclMultimemHandle_t,
    ncclResult_t, ncclTeam_t, ncclWindow_t,
};

use super::guard::{call, guarded, not_null};
use crate::code::{INVALID_ARGUMENT, INVALID_USAGE, Result};
use crate::nccl::communicator::{self, Communicator, Team};
use crate::nccl::debug::warn;
use crate::version;

pub(super) unsafe extern "C" fn ncclCommQueryProperties(
    comm: ncclComm_t,
    props: *mut ncclCommProperties_t,
) -> ncclResult_t {
    call("ncclCommQueryProperties", comm, || {
        let communicator = communicator::lookup(comm, "ncclCommQueryProperties")?;
        not_null(props, "ncclCommQueryProperties", "props")?;
        communicator.ensure_ready()?;
        // SAFETY: not null, and by the function's contract the caller's to read and write. Older programs have the beginning of
        // the struct, with the length of the release that they name.
        let props = unsafe { &mut *props };
        if props.magic != NCCL_API_MAGIC {
            warn!(
                "Cannot get communicator properties: ncclCommProperties_t argument must be initialized via \
                 NCCL_COMM_PROPERTIES_INITIALIZER"
            );
            return Err(INVALID_USAGE);
        }
        props.rank = communicator.rank;
        props.nRanks = communicator.ranks;
        props.cudaDev = communicator.device;
        props.nvmlDev = communicator.device;
        props.deviceApiSupport = communicator.supports_windows();
        props.multimemSupport = false;
        if props.version > 22903 && version::is_at_least(2, 29, 7) {
            props.hostRmaSupport =
                communicator.config.contexts != 0 && communicator.supports_windows();
            props.nLsaTeams = communicator.team(Team::Rail).nRanks;
        }
        if props.version >= 23102 && version::is_at_least(2, 31, 2) {
            props.commHash = communicator.hash;
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn ncclDevCommCreate(
    comm: ncclComm_t,
    reqs: *const ncclDevCommRequirements_t,
    outDevComm: *mut ncclDevComm_t,
) -> ncclResult_t {
    call("ncclDevCommCreate", comm, || {
        let communicator = communicator::lookup(comm, "ncclDevCommCreate")?;
        not_null(reqs, "ncclDevCommCreate", "reqs")?;
        not_null(outDevComm, "ncclDevCommCreate", "outDevComm")?;
        match communicator.supports_windows() {
            true => warn!(
                "nccl-emulator: no device code of NCCL's runs here, so there is no device communicator"
            ),
            false => warn!("Communicator does not support symmetric memory!"),
        }
        Err(INVALID_USAGE)
    })
}

pub(super) unsafe extern "C" fn ncclDevCommDestroy(
    comm: ncclComm_t,
    devComm: *const ncclDevComm_t,
) -> ncclResult_t {
    call("ncclDevCommDestroy", comm, || {
        communicator::lookup(comm, "ncclDevCommDestroy")?;
        not_null(devComm, "ncclDevCommDestroy", "devComm")
    })
}

/// Writes what `find` returns for a window.
fn point(
    function: &'static str,
    window: ncclWindow_t,
    out: *mut *mut c_void,
    find: impl FnOnce() -> Result<u64>,
) -> ncclResult_t {
    guarded(function, || {
        not_null(window, function, "window")?;
        not_null(out, function, "outPtr")?;
        let address = find()?;
        let pointer = std::ptr::without_provenance_mut(address as usize);
        // SAFETY: not null, and by the function's contract the caller's to write to.
        unsafe { out.write(pointer) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn ncclGetLsaMultimemDevicePointer(
    window: ncclWindow_t,
    _offset: usize,
    outPtr: *mut *mut c_void,
) -> ncclResult_t {
    point("ncclGetLsaMultimemDevicePointer", window, outPtr, || Ok(0))
}

pub(super) unsafe extern "C" fn ncclGetMultimemDevicePointer(
    window: ncclWindow_t,
    _offset: usize,
    multimem: ncclMultimemHandle_t,
    outPtr: *mut *mut c_void,
) -> ncclResult_t {
    point("ncclGetMultimemDevicePointer", window, outPtr, || {
        if multimem.mcBasePtr.is_null() {
            warn!("MCBasePtr {:p} needs to be valid.", multimem.mcBasePtr);
            return Err(INVALID_ARGUMENT);
        }
        Ok(0)
    })
}

pub(super) unsafe extern "C" fn ncclGetLsaDevicePointer(
    window: ncclWindow_t,
    offset: usize,
    lsaRank: c_int,
    outPtr: *mut *mut c_void,
) -> ncclResult_t {
    point("ncclGetLsaDevicePointer", window, outPtr, || {
        communicator::lsa_pointer(window, offset as u64, lsaRank)
    })
}

pub(super) unsafe extern "C" fn ncclGetPeerDevicePointer(
    window: ncclWindow_t,
    offset: usize,
    peer: c_int,
    outPtr: *mut *mut c_void,
) -> ncclResult_t {
    point("ncclGetPeerDevicePointer", window, outPtr, || {
        communicator::peer_pointer(window, offset as u64, peer)
    })
}

fn without_cft(function: &'static str, window: ncclWindow_t) -> ncclResult_t {
    guarded(function, || {
        not_null(window, function, "window")?;
        warn!("nccl-emulator: {function}: the emulated devices have no CFT");
        Err(INVALID_USAGE)
    })
}

pub(super) unsafe extern "C" fn ncclGetMultimemDeviceLeInfo(
    window: ncclWindow_t,
    _offset: usize,
    _leId: *mut ncclCftLeId,
    _leOffset: *mut usize,
) -> ncclResult_t {
    without_cft("ncclGetMultimemDeviceLeInfo", window)
}

pub(super) unsafe extern "C" fn ncclGetCftDeviceLeInfo(
    window: ncclWindow_t,
    _offset: usize,
    _peerCft: c_int,
    _cftTeam: ncclTeam_t,
    _leId: *mut ncclCftLeId,
    _leOffset: *mut usize,
) -> ncclResult_t {
    without_cft("ncclGetCftDeviceLeInfo", window)
}

pub(super) unsafe extern "C" fn ncclGetPeerDeviceLeInfo(
    window: ncclWindow_t,
    _offset: usize,
    _peerWorld: c_int,
    _leId: *mut ncclCftLeId,
    _leOffset: *mut usize,
) -> ncclResult_t {
    without_cft("ncclGetPeerDeviceLeInfo", window)
}

/// A team without ranks: of an invalid communicator, and of missing hardware.
const NO_TEAM: ncclTeam_t = ncclTeam_t {
    nRanks: 0,
    rank: 0,
    stride: 0,
};

fn with<R>(comm: ncclComm_t, otherwise: R, answer: impl FnOnce(&Communicator) -> R) -> R {
    let of = |communicator: std::sync::Arc<Communicator>| answer(&communicator);
    communicator::peek(comm).map_or(otherwise, of)
}

pub(super) unsafe extern "C" fn ncclTeamWorld(comm: ncclComm_t) -> ncclTeam_t {
    with(comm, NO_TEAM, |communicator| communicator.team(Team::World))
}

pub(super) unsafe extern "C" fn ncclTeamLsa(comm: ncclComm_t) -> ncclTeam_t {
    with(comm, NO_TEAM, |communicator| communicator.team(Team::Lsa))
}

pub(super) unsafe extern "C" fn ncclTeamRail(comm: ncclComm_t) -> ncclTeam_t {
    with(comm, NO_TEAM, |communicator| communicator.team(Team::Rail))
}

pub(super) unsafe extern "C" fn ncclTeamCft(_: ncclComm_t, _: ncclCftTeamMode_t) -> ncclTeam_t {
    NO_TEAM
}

pub(super) unsafe extern "C" fn ncclTeamCftMultimem(_: ncclComm_t) -> ncclTeam_t {
    NO_TEAM
}

pub(super) unsafe extern "C" fn ncclTeamRankToWorld(
    comm: ncclComm_t,
    team: ncclTeam_t,
    rank: c_int,
) -> c_int {
    with(comm, -1, |communicator| {
        communicator.rank + (rank - team.rank) * team.stride
    })
}

pub(super) unsafe extern "C" fn ncclTeamRankToLsa(
    comm: ncclComm_t,
    team: ncclTeam_t,
    rank: c_int,
) -> c_int {
    with(comm, -1, |communicator| {
        communicator.team(Team::Lsa).rank + (rank - team.rank) * team.stride
    })
}

/// Refuses a resource requirement of device code: NCCL's device code does not run here.
fn require(function: &'static str, outReq: *mut ncclDevResourceRequirements_t) -> ncclResult_t {
    guarded(function, || {
        not_null(outReq, function, "outReq")?;
        warn!("nccl-emulator: {function}: no device code of NCCL's runs here");
        Err(INVALID_USAGE)
    })
}

pub(super) unsafe extern "C" fn ncclLsaBarrierCreateRequirement(
    _team: ncclTeam_t,
    _nBarriers: c_int,
    _outHandle: *mut ncclLsaBarrierHandle_t,
    outReq: *mut ncclDevResourceRequirements_t,
) -> ncclResult_t {
    require("ncclLsaBarrierCreateRequirement", outReq)
}

pub(super) unsafe extern "C" fn ncclGinBarrierCreateRequirement(
    _comm: ncclComm_t,
    _team: ncclTeam_t,
    _nBarriers: c_int,
    _outHandle: *mut ncclGinBarrierHandle_t,
    outReq: *mut ncclDevResourceRequirements_t,
) -> ncclResult_t {
    require("ncclGinBarrierCreateRequirement", outReq)
}

pub(super) unsafe extern "C" fn ncclLLA2ACalcSlots(maxElts: c_int, maxEltSize: c_int) -> c_int {
    // Each slot has eight bytes of data.
    maxElts.saturating_mul(maxEltSize.saturating_add(7) / 8)
}

pub(super) unsafe extern "C" fn ncclLLA2ACreateRequirement(
    _nBlocks: c_int,
    _nSlots: c_int,
    _outHandle: *mut ncclLLA2AHandle_t,
    outReq: *mut ncclDevResourceRequirements_t,
) -> ncclResult_t {
    require("ncclLLA2ACreateRequirement", outReq)
}
