//! `ncclConfig_t`: the supported fields, their ranges, their defaults, and the environment variables that override them.
//!
//! The struct grows with every release. Fields beyond the caller's `size` stay undefined, and so do fields that are newer than
//! the caller's `version`, because older headers have padding there. A version newer than the library's is not an error.

use std::ffi::CStr;

use nccl_sys::{
    NCCL_API_MAGIC, NCCL_CONFIG_INITIALIZER, NCCL_CONFIG_UNDEF_INT, Version, ncclConfig_t,
};

use super::debug::{info, subsystem, warn};
use super::environment;
use crate::code::{INVALID_ARGUMENT, Result};

const UNDEFINED: i32 = NCCL_CONFIG_UNDEF_INT;

/// Returns the most channels of a communicator in this release.
fn max_channels() -> i32 {
    if crate::version::is_at_least(2, 25, 0) {
        64
    } else {
        32
    }
}

/// Returns the size of the struct in this release.
fn size_in(release: Version) -> usize {
    const SIZES: [(Version, usize); 6] = [
        (Version::new(2, 27, 0), 48),
        (Version::new(2, 28, 0), 72),
        (Version::new(2, 29, 0), 80),
        (Version::new(2, 30, 0), 88),
        (Version::new(2, 31, 0), 96),
        (Version::new(2, 32, 0), 112),
    ];
    SIZES
        .iter()
        .find(|(end, _)| release < *end)
        .map_or(size_of::<ncclConfig_t>(), |(_, size)| *size)
}
const MAX_CGA_CLUSTER: i32 = 8;

/// The part of a communicator's configuration that has an effect here.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// Whether calls return only when they are done.
    pub(crate) blocking: bool,
    /// The name given to the communicator, for messages. NCCL keeps the caller's pointer, which
    /// must outlive the communicator.
    pub(crate) name: Option<String>,
    /// Children of a split share this communicator's abort flag.
    pub(crate) split_share: bool,
    /// Whether children of a shrink share it, too.
    pub(crate) shrink_share: bool,
    /// The number of contexts of one-sided operations, and of signals in each.
    pub(crate) contexts: usize,
    pub(crate) signals: usize,
    /// Whether the init already does the setup of the first one-sided operation.
    pub(crate) one_sided_at_init: bool,
}

impl Config {
    /// Returns the configuration of a child without its own: that of its parent, with the present environment.
    pub(crate) fn inherit(&self) -> Self {
        let flag = |variable: &str, value: bool| match environment::integer(variable) {
            Some(value @ (0 | 1)) => value != 0,
            _ => value,
        };
        Self {
            blocking: flag("NCCL_COMM_BLOCKING", self.blocking),
            split_share: flag("NCCL_COMM_SPLIT_SHARE_RESOURCES", self.split_share),
            shrink_share: flag("NCCL_COMM_SHRINK_SHARE_RESOURCES", self.shrink_share),
            ..self.clone()
        }
    }
}

fn version(major: u32, minor: u32, patch: u32) -> u32 {
    major * 10_000 + minor * 100 + patch
}

/// Copies the caller's struct, and resets fields that its version does not have.
///
/// # Safety
/// `config` points to a config of at least the size that its first field says.
unsafe fn read(config: *const ncclConfig_t, release: Version) -> Result<ncclConfig_t> {
    let mut own = NCCL_CONFIG_INITIALIZER;
    own.magic = 0;
    // SAFETY: the first field is the size in every release; the copy has as many bytes as both sides have. The struct may be
    // less aligned than ours.
    unsafe {
        let size = config
            .cast::<usize>()
            .read_unaligned()
            .min(size_in(release));
        std::ptr::copy_nonoverlapping(
            config.cast::<u8>(),
            std::ptr::from_mut(&mut own).cast::<u8>(),
            size,
        );
    }
    if own.magic != NCCL_API_MAGIC {
        warn!("ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
        return Err(INVALID_ARGUMENT);
    }
    let undefined = NCCL_CONFIG_INITIALIZER;
    macro_rules! since {
        ($major:literal, $minor:literal, $patch:literal: $($field:ident),*) => {
            // A release checks only fields that it knows; older callers have padding there.
            if own.version < version($major, $minor, $patch) {
                $(own.$field = undefined.$field;)*
            }
        };
    }
    // Fields that replaced padding are still padding in earlier releases.
    if release < Version::new(2, 26, 2) {
        own.trafficClass = undefined.trafficClass;
    }
    if release < Version::new(2, 30, 5) {
        own.graphStreamOrdering = undefined.graphStreamOrdering;
    }
    since!(2, 14, 0: blocking);
    since!(2, 17, 0: cgaClusterSize, minCTAs, maxCTAs, netName);
    if release >= Version::new(2, 27, 0) {
        // 2.26 reads this field from every caller: its value or padding.
        since!(2, 25, 0: trafficClass);
    }
    since!(2, 27, 0: collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs);
    since!(2, 28, 0: nChannelsPerNetPeer, nvlinkCentricSched);
    since!(2, 29, 0: graphUsageMode, numRmaCtx);
    since!(2, 30, 0: maxP2pPeers);
    since!(2, 30, 5: graphStreamOrdering);
    since!(2, 31, 0: launchOrderImplicit, numRmaSig, rmaEagerInit, hostCftMode);
    Ok(own)
}

fn check(config: &ncclConfig_t, release: Version) -> Result {
    let refuse = |valid: bool, what: &str, value: i32| {
        if value == UNDEFINED || valid {
            return Ok(());
        }
        warn!("Invalid config {what} attribute value {value}");
        Err(INVALID_ARGUMENT)
    };
    let flag = |value: i32| value == 0 || value == 1;
    refuse(flag(config.blocking), "blocking", config.blocking)?;
    refuse(
        config.cgaClusterSize >= 0,
        "cgaClusterSize",
        config.cgaClusterSize,
    )?;
    let (min, max) = (config.minCTAs, config.maxCTAs);
    // Since 2.31 a minimum without a maximum is valid.
    if (min != UNDEFINED && min <= 0)
        || (max != UNDEFINED && max <= 0)
        || (min != UNDEFINED && (max != UNDEFINED || release < Version::new(2, 31, 0)) && min > max)
    {
        warn!("Invalid config min/max channels attribute value {min}/{max}");
        return Err(INVALID_ARGUMENT);
    }
    refuse(flag(config.splitShare), "splitShare", config.splitShare)?;
    refuse(
        flag(config.collnetEnable),
        "collnetEnable",
        config.collnetEnable,
    )?;
    refuse(
        (0..=3).contains(&config.CTAPolicy),
        "policy",
        config.CTAPolicy,
    )?;
    refuse(flag(config.shrinkShare), "shrinkShare", config.shrinkShare)?;
    refuse(config.nvlsCTAs > 0, "nvlsCTAs", config.nvlsCTAs)?;
    let channels = config.nChannelsPerNetPeer;
    refuse(
        (1..=max_channels()).contains(&channels),
        "nChannelsPerNetPeer",
        channels,
    )?;
    refuse(
        flag(config.nvlinkCentricSched),
        "nvlinkCentricSched",
        config.nvlinkCentricSched,
    )?;
    refuse(
        (0..=2).contains(&config.graphUsageMode),
        "graphUsageMode",
        config.graphUsageMode,
    )?;
    refuse(config.numRmaCtx >= 0, "numRmaCtx", config.numRmaCtx)?;
    refuse(config.maxP2pPeers > 0, "maxP2pPeers", config.maxP2pPeers)?;
    refuse(
        flag(config.graphStreamOrdering),
        "graphStreamOrdering",
        config.graphStreamOrdering,
    )?;
    refuse(
        flag(config.launchOrderImplicit),
        "launchOrderImplicit",
        config.launchOrderImplicit,
    )?;
    refuse(config.numRmaSig >= 0, "numRmaSig", config.numRmaSig)?;
    refuse(
        flag(config.rmaEagerInit),
        "rmaEagerInit",
        config.rmaEagerInit,
    )?;
    refuse(
        (1..=3).contains(&config.hostCftMode),
        "hostCftMode",
        config.hostCftMode,
    )
}

fn fill_defaults(config: &mut ncclConfig_t) {
    macro_rules! defaults {
        ($($field:ident $text:literal = $default:expr;)*) => {$(
            if config.$field == UNDEFINED {
                config.$field = $default;
            } else {
                info!(subsystem::ENV, concat!("Comm config ", $text, " set to {}"), config.$field);
            }
        )*};
    }
    defaults! {
        blocking "Blocking" = 1;
        cgaClusterSize "CGA cluster size" = 4;
        minCTAs "Min CTAs" = 1;
        maxCTAs "Max CTAs" = max_channels();
        splitShare "Split share" = 0;
        trafficClass "Traffic class" = UNDEFINED;
        collnetEnable "Collnet enable" = 0;
        CTAPolicy "CTA policy flags" = 0;
        shrinkShare "shrinkShare" = 0;
        nvlsCTAs "nvlsCTAs" = UNDEFINED;
        nChannelsPerNetPeer "nChannelsPerNetPeer" = UNDEFINED;
        nvlinkCentricSched "nvlinkCentricSched" = 0;
        graphUsageMode "graphUsageMode" = 2;
        numRmaCtx "numRmaCtx" = 1;
        maxP2pPeers "maxP2pPeers" = UNDEFINED;
        graphStreamOrdering "graphStreamOrdering" = UNDEFINED;
        launchOrderImplicit "launchOrderImplicit" = 0;
        numRmaSig "numRmaSig" = 1;
        rmaEagerInit "rmaEagerInit" = 0;
        hostCftMode "hostCftMode" = 2;
        nvlsHostMode "nvlsHostMode" = 0;
    }
}

/// Applies the environment, which overrides the config. Invalid values are reported and ignored.
fn apply_environment(config: &mut ncclConfig_t) {
    macro_rules! overrides {
        ($($variable:literal => $field:ident if $valid:expr;)*) => {$(
            if let Some(value) = environment::integer($variable) {
                let valid: fn(i32) -> bool = $valid;
                if valid(value) {
                    info!(subsystem::ENV, concat!("Comm config ", stringify!($field), " reset to ", $variable, "={}"), value);
                    config.$field = value;
                } else {
                    info!(subsystem::ENV, concat!($variable, " {} is not valid, leaving it set at {}"), value, config.$field);
                }
            }
        )*};
    }
    overrides! {
        "NCCL_COMM_BLOCKING" => blocking if |v| v == 0 || v == 1;
        "NCCL_CGA_CLUSTER_SIZE" => cgaClusterSize if |v| (0..=MAX_CGA_CLUSTER).contains(&v);
        "NCCL_MIN_CTAS" => minCTAs if |v| v > 0;
        "NCCL_MAX_CTAS" => maxCTAs if |v| v > 0;
        "NCCL_COMM_SPLIT_SHARE_RESOURCES" => splitShare if |v| v == 0 || v == 1;
        "NCCL_COMM_SHRINK_SHARE_RESOURCES" => shrinkShare if |v| v == 0 || v == 1;
        "NCCL_COLLNET_ENABLE" => collnetEnable if |v| v == 0 || v == 1;
        "NCCL_CTA_POLICY" => CTAPolicy if |v| (0..=3).contains(&v);
        "NCCL_NVLS_NCHANNELS" => nvlsCTAs if |v| v > 0;
        "NCCL_NCHANNELS_PER_NET_PEER" => nChannelsPerNetPeer if |v| v > 0;
        "NCCL_NVLINK_UTIL_CENTRIC_SCHED_ENABLE" => nvlinkCentricSched if |v| v == 0 || v == 1;
        "NCCL_NUM_RMA_CTX" => numRmaCtx if |v| v >= 0;
        "NCCL_P2P_MAX_PEERS" => maxP2pPeers if |v| v > 0;
        "NCCL_GRAPH_STREAM_ORDERING" => graphStreamOrdering if |v| v == 0 || v == 1;
        "NCCL_LAUNCH_ORDER_IMPLICIT" => launchOrderImplicit if |v| v == 0 || v == 1;
        "NCCL_RMA_EAGER_INIT" => rmaEagerInit if |v| v == 0 || v == 1;
    }
    if let Some(mixing @ 0..=1) = environment::integer("NCCL_GRAPH_MIXING_SUPPORT") {
        config.graphUsageMode = mixing * 2;
    }
    config.minCTAs = config.minCTAs.min(max_channels());
    config.maxCTAs = config.maxCTAs.min(max_channels());
    if config.minCTAs > config.maxCTAs {
        let max = config.maxCTAs;
        info!(
            subsystem::ENV,
            "minCTAs {} is larger than maxCTAs {max}, set both to {max}", config.minCTAs
        );
        config.minCTAs = max;
    }
    if config.CTAPolicy == 3 {
        warn!(
            "Both NCCL_CTA_POLICY_ZERO and NCCL_CTA_POLICY_EFFICIENCY are set in CTAPolicy (3). Unsetting POLICY_EFFICIENCY."
        );
        config.CTAPolicy = 2;
    }
    if config.graphStreamOrdering == UNDEFINED {
        config.graphStreamOrdering = 1;
    }
    if config.graphStreamOrdering == 0 && config.graphUsageMode == 2 {
        warn!(
            "graphStreamOrdering=0 with graphUsageMode=2 (graph mixing) is not supported; falling back to \
             graphStreamOrdering=1 for this communicator"
        );
        config.graphStreamOrdering = 1;
    }
}

/// Returns the name that a config gives to its communicator, if it can be read.
///
/// # Safety
/// As [`parse`].
pub(crate) unsafe fn name(config: *const ncclConfig_t) -> Option<String> {
    // SAFETY: the caller's promise.
    let resolved = unsafe { resolve(config, crate::version::current()) };
    // SAFETY: the caller's promise.
    unsafe { name_in(&resolved.ok()?) }
}

/// # Safety
/// The strings are valid.
unsafe fn name_in(resolved: &ncclConfig_t) -> Option<String> {
    (!resolved.commName.is_null()).then(|| {
        // SAFETY: the caller's promise.
        let name = unsafe { CStr::from_ptr(resolved.commName) };
        name.to_string_lossy().into_owned()
    })
}

/// Returns the configuration of a call's config argument; null selects all defaults.
///
/// # Safety
/// `config` is null or points to a config of the size that its first field says, whose strings are
/// valid.
pub(crate) unsafe fn parse(config: *const ncclConfig_t) -> Result<Config> {
    // SAFETY: the caller's promise.
    let resolved = unsafe { resolve(config, crate::version::current())? };
    // SAFETY: the caller's promise.
    let name = unsafe { name_in(&resolved) };
    if let Some(name) = &name {
        info!(subsystem::ENV, "Comm config Comm name set to {name}");
    }
    Ok(Config {
        blocking: resolved.blocking != 0,
        name,
        split_share: resolved.splitShare != 0,
        shrink_share: resolved.shrinkShare != 0,
        contexts: usize::try_from(resolved.numRmaCtx).unwrap_or(0),
        signals: usize::try_from(resolved.numRmaSig).unwrap_or(0),
        one_sided_at_init: resolved.rmaEagerInit != 0,
    })
}

/// Returns every field as NCCL would use it.
///
/// # Safety
/// As [`parse`].
unsafe fn resolve(config: *const ncclConfig_t, release: Version) -> Result<ncclConfig_t> {
    let mut own = if config.is_null() {
        NCCL_CONFIG_INITIALIZER
    } else {
        // SAFETY: the caller's promise.
        unsafe { read(config, release)? }
    };
    check(&own, release)?;
    fill_defaults(&mut own);
    apply_environment(&mut own);
    Ok(own)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(change: impl FnOnce(&mut ncclConfig_t)) -> Result<ncclConfig_t> {
        let mut config = NCCL_CONFIG_INITIALIZER;
        change(&mut config);
        // SAFETY: a config of the full size.
        unsafe { resolve(&config, Version::HEADER) }
    }

    fn parsed_by(release: Version, change: impl FnOnce(&mut ncclConfig_t)) -> Result<ncclConfig_t> {
        let mut config = NCCL_CONFIG_INITIALIZER;
        change(&mut config);
        // SAFETY: a config of the full size.
        unsafe { resolve(&config, release) }
    }

    #[test]
    fn null_means_defaults() {
        // SAFETY: null is allowed.
        let config = unsafe { resolve(std::ptr::null(), Version::HEADER) }.unwrap();
        assert_eq!(config.blocking, 1);
        assert_eq!((config.cgaClusterSize, config.maxCTAs), (4, max_channels()));
    }

    #[test]
    fn a_config_without_the_magic_is_refused() {
        assert_eq!(parsed(|c| c.magic = 0).unwrap_err(), INVALID_ARGUMENT);
    }

    #[test]
    fn fields_beyond_the_given_size_are_ignored() {
        let config = parsed(|c| {
            c.size = 48;
            c.nvlsCTAs = -5;
        });
        assert_eq!(config.unwrap().nvlsCTAs, UNDEFINED);
    }

    #[test]
    fn fields_newer_than_the_given_version_are_ignored() {
        let config = parsed(|c| {
            c.version = 22_499;
            c.trafficClass = 77;
            c.blocking = 0;
        })
        .unwrap();
        assert_eq!(config.trafficClass, UNDEFINED);
        assert_eq!(config.blocking, 0);
        assert_eq!(parsed(|c| c.version = 99_999).map(|_| ()), Ok(()));
    }

    #[test]
    fn an_older_release_ignores_what_it_does_not_know_and_reads_padding() {
        let all = |config: &mut ncclConfig_t| {
            config.trafficClass = 1;
            config.CTAPolicy = 1;
            config.numRmaCtx = 3;
            config.graphStreamOrdering = 1;
            config.hostCftMode = 1;
        };
        let by = |major, minor, patch| {
            let own = parsed_by(Version::new(major, minor, patch), all).unwrap();
            (
                own.trafficClass,
                own.CTAPolicy,
                own.numRmaCtx,
                own.hostCftMode,
            )
        };
        assert_eq!(by(2, 18, 3), (UNDEFINED, 0, 1, 2));
        assert_eq!(by(2, 26, 2), (1, 0, 1, 2));
        assert_eq!(by(2, 27, 7), (1, 1, 1, 2));
        assert_eq!(by(2, 30, 7), (1, 1, 3, 2));
        assert_eq!(by(2, 32, 3), (1, 1, 3, 1));
        // A value that a newer release would refuse is valid in this one.
        let bad = parsed_by(Version::new(2, 26, 2), |config| config.CTAPolicy = 77);
        assert_eq!(bad.map(|_| ()), Ok(()));
        // The caller's padding, which only 2.26 reads as a traffic class.
        let old = |config: &mut ncclConfig_t| {
            config.version = 22_403;
            config.trafficClass = 5;
        };
        let class = |minor| {
            let own = parsed_by(Version::new(2, minor, 7), old).unwrap();
            own.trafficClass
        };
        assert_eq!([class(25), class(26), class(27)], [UNDEFINED, 5, UNDEFINED]);
    }

    #[test]
    fn a_minimum_of_channels_needed_a_maximum_before_2_31() {
        let change = |config: &mut ncclConfig_t| config.minCTAs = 4;
        let by = |minor| parsed_by(Version::new(2, minor, 7), change).map(|_| ());
        assert_eq!(by(30), Err(INVALID_ARGUMENT));
        assert_eq!(by(31), Ok(()));
    }

    #[test]
    fn values_out_of_range_are_refused() {
        let bad: [fn(&mut ncclConfig_t); 8] = [
            |c| c.blocking = 2,
            |c| c.minCTAs = 0,
            |c| (c.minCTAs, c.maxCTAs) = (4, 2),
            |c| c.splitShare = -1,
            |c| c.CTAPolicy = 4,
            |c| c.nChannelsPerNetPeer = max_channels() + 1,
            |c| c.graphUsageMode = 3,
            |c| c.hostCftMode = 0,
        ];
        for change in bad {
            assert_eq!(parsed(change).unwrap_err(), INVALID_ARGUMENT);
        }
        assert_eq!(parsed(|c| c.minCTAs = 4).unwrap().minCTAs, 4);
    }
}
