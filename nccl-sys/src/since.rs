//! The first release of NCCL that has each function.
//!
//! Taken from the headers of all releases from 2.3.5, the oldest of the second generation whose
//! header is public, to [`Version::HEADER`]. A new release adds a line here; a test requires it.

use crate::Version;

/// Returns the first release of NCCL that has `function`; `None` for a name that is not a function of
/// `nccl.h` or of the host's side of the device API (`nccl_device/host.h`).
///
/// For functions that 2.3.5 has, the answer is 2.3.5, although some are older.
///
/// ```
/// use nccl_sys::{Version, since};
///
/// assert_eq!(since("ncclCommRevoke"), Some(Version::new(2, 28, 7)));
/// assert_eq!(since("ncclAllReduce"), Some(Version::new(2, 3, 5)));
/// assert_eq!(since("ncclMakeCoffee"), None);
/// ```
pub fn since(function: &str) -> Option<Version> {
    let (_, version) = RELEASES
        .iter()
        .find(|(functions, _)| functions.contains(&function))?;
    Some(*version)
}

/// The functions that each release added.
const RELEASES: &[(&[&str], Version)] = &[
    (
        &[
            "ncclAllGather",
            "ncclAllReduce",
            "ncclBcast",
            "ncclBroadcast",
            "ncclCommCount",
            "ncclCommCuDevice",
            "ncclCommDestroy",
            "ncclCommInitAll",
            "ncclCommInitRank",
            "ncclCommUserRank",
            "ncclGetErrorString",
            "ncclGetUniqueId",
            "ncclGetVersion",
            "ncclGroupEnd",
            "ncclGroupStart",
            "ncclReduce",
            "ncclReduceScatter",
        ],
        Version::new(2, 3, 5),
    ),
    (
        &["ncclCommAbort", "ncclCommGetAsyncError"],
        Version::new(2, 4, 2),
    ),
    (&["ncclRecv", "ncclSend"], Version::new(2, 7, 3)),
    (
        &["ncclRedOpCreatePreMulSum", "ncclRedOpDestroy"],
        Version::new(2, 11, 4),
    ),
    (&["ncclGetLastError"], Version::new(2, 13, 4)),
    (
        &["ncclCommFinalize", "ncclCommInitRankConfig"],
        Version::new(2, 14, 3),
    ),
    (&["ncclCommSplit"], Version::new(2, 18, 1)),
    (
        &[
            "ncclCommDeregister",
            "ncclCommRegister",
            "ncclMemAlloc",
            "ncclMemFree",
        ],
        Version::new(2, 19, 1),
    ),
    (&["ncclGroupSimulateEnd"], Version::new(2, 22, 3)),
    (&["ncclCommInitRankScalable"], Version::new(2, 23, 4)),
    (&["ncclResetDebugInit"], Version::new(2, 24, 3)),
    (
        &[
            "ncclCommShrink",
            "ncclCommWindowDeregister",
            "ncclCommWindowRegister",
        ],
        Version::new(2, 27, 3),
    ),
    (
        &[
            "ncclAlltoAll",
            "ncclDevCommCreate",
            "ncclDevCommDestroy",
            "ncclGather",
            "ncclLLA2ACalcSlots",
            "ncclLLA2ACreateRequirement",
            "ncclLsaBarrierCreateRequirement",
            "ncclScatter",
            "ncclTeamLsa",
            "ncclTeamRail",
            "ncclTeamRankToLsa",
            "ncclTeamRankToWorld",
            "ncclTeamWorld",
        ],
        Version::new(2, 28, 3),
    ),
    (
        &["ncclCommRevoke", "ncclGinBarrierCreateRequirement"],
        Version::new(2, 28, 7),
    ),
    (
        &[
            "ncclCommGetUniqueId",
            "ncclCommGrow",
            "ncclCommQueryProperties",
            "ncclGetLsaDevicePointer",
            "ncclGetLsaMultimemDevicePointer",
            "ncclGetMultimemDevicePointer",
            "ncclGetPeerDevicePointer",
            "ncclPutSignal",
            "ncclSignal",
            "ncclWaitSignal",
            "ncclWinGetUserPtr",
        ],
        Version::new(2, 29, 2),
    ),
    (
        &["ncclCommMemStats", "ncclCommResume", "ncclCommSuspend"],
        Version::new(2, 29, 7),
    ),
    (
        &[
            "ncclParamBind",
            "ncclParamDumpAll",
            "ncclParamGet",
            "ncclParamGetAllParameterKeys",
            "ncclParamGetI16",
            "ncclParamGetI32",
            "ncclParamGetI64",
            "ncclParamGetI8",
            "ncclParamGetParameter",
            "ncclParamGetStr",
            "ncclParamGetU16",
            "ncclParamGetU32",
            "ncclParamGetU64",
            "ncclParamGetU8",
        ],
        Version::new(2, 30, 4),
    ),
    (
        &[
            "ncclAllGatherConfig",
            "ncclAllReduceConfig",
            "ncclAlltoAllConfig",
            "ncclBroadcastConfig",
            "ncclGatherConfig",
            "ncclGetCftDeviceLeInfo",
            "ncclGetMultimemDeviceLeInfo",
            "ncclGetPeerDeviceLeInfo",
            "ncclReduceConfig",
            "ncclReduceScatterConfig",
            "ncclScatterConfig",
            "ncclTeamCft",
            "ncclTeamCftMultimem",
        ],
        Version::new(2, 31, 2),
    ),
    (&["ncclSetEncryption"], Version::new(2, 32, 3)),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Api;

    #[test]
    fn every_function_of_the_header_has_a_first_release() {
        let unknown: Vec<_> = Api::NAMES
            .iter()
            .filter(|name| since(name).is_none())
            .collect();
        assert!(unknown.is_empty(), "add the first release of {unknown:?}");
    }

    #[test]
    fn no_function_is_listed_twice_or_in_vain() {
        let mut listed: Vec<_> = RELEASES.iter().flat_map(|(names, _)| *names).collect();
        let mut declared: Vec<_> = Api::NAMES.iter().collect();
        listed.sort();
        declared.sort();
        assert_eq!(listed, declared);
    }

    #[test]
    fn releases_are_listed_in_order_and_none_is_newer_than_the_header() {
        let versions: Vec<_> = RELEASES.iter().map(|(_, version)| *version).collect();
        assert!(versions.is_sorted());
        assert_eq!(versions.last(), Some(&Version::HEADER));
    }
}
