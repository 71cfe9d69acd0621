//! The settings with which a communicator is made (`ncclConfig_t`).
//!
//! NCCL silently ignores a field that is newer than the library. So every field that is set here is
//! checked against the loaded library, and refused by name if the library would ignore it.

use std::collections::HashSet;
use std::ffi::{CStr, CString};
use std::sync::LazyLock;

use nccl_sys as sys;
use nccl_sys::Version;

use crate::error::{Error, ErrorKind, Result};
use crate::library::Library;
use crate::sync::Mutex;

/// Settings of a communicator; NCCL chooses every setting that is not set.
///
/// ```
/// use nccl::Config;
///
/// # fn example(builder: nccl::CommunicatorBuilder<'_>) {
/// let mut config = Config::default();
/// config.max_ctas = Some(8);
/// config.network = Some(String::from("Socket"));
/// let builder = builder.with(|comm| comm.config = config);
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// Thread blocks per cluster, 0 or more (`cgaClusterSize`).
    pub cga_cluster_size: Option<i32>,
    /// The least number of thread blocks per operation, from 1 (`minCTAs`).
    pub min_ctas: Option<i32>,
    /// The greatest number of thread blocks per operation (`maxCTAs`).
    pub max_ctas: Option<i32>,
    /// The network to use, for instance `Socket` or `IB` (`netName`).
    pub network: Option<String>,
    /// The traffic class of InfiniBand packets (`trafficClass`, NCCL ≥ 2.26.2).
    pub traffic_class: Option<i32>,
    /// Whether network switches may perform reductions (`collnetEnable`, NCCL ≥ 2.27.3).
    pub collnet: Option<bool>,
    /// How multiprocessors are shared (`CTAPolicy`, NCCL ≥ 2.27.3).
    pub cta_policy: Option<CtaPolicy>,
    /// Thread blocks for NVLink SHARP, from 1 (`nvlsCTAs`, NCCL ≥ 2.27.3).
    pub nvls_ctas: Option<i32>,
    /// Channels to each peer over the network, from 1 (`nChannelsPerNetPeer`, NCCL ≥ 2.28.3).
    pub channels_per_net_peer: Option<i32>,
    /// Whether transfers are scheduled for the use of NVLink (`nvlinkCentricSched`,
    /// NCCL ≥ 2.28.3); nccl-tests turns it on.
    pub nvlink_centric_scheduling: Option<bool>,
    /// The number of peers with which a rank exchanges messages, from 1 (`maxP2pPeers`,
    /// NCCL ≥ 2.30.3).
    pub max_p2p_peers: Option<i32>,
    /// The number of contexts for one-sided operations, 0 or more; 1 unless set (`numRmaCtx`, NCCL ≥ 2.29.2; more than 1:
    /// NCCL ≥ 2.31.2).
    pub rma_contexts: Option<i32>,
    /// The number of signals in each of these contexts, 0 or more; 1 unless set (`numRmaSig`, NCCL ≥ 2.31.2).
    pub rma_signals: Option<i32>,
}

/// How NCCL shares the multiprocessors with other kernels (`NCCL_CTA_POLICY_*`).
///
/// ```
/// let mut config = nccl::Config::default();
/// config.cta_policy = Some(nccl::CtaPolicy::Efficiency);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CtaPolicy {
    /// NCCL's own choice.
    Default,
    /// Fewer blocks, where that costs little.
    Efficiency,
    /// No blocks at all, where copy engines can do the work (NCCL ≥ 2.28.3).
    Zero,
}

impl CtaPolicy {
    pub(crate) fn raw(self) -> i32 {
        match self {
            Self::Default => 0,
            Self::Efficiency => 1,
            Self::Zero => 2,
        }
    }
}

/// The name of a field in this crate, and the release that added it.
struct Field {
    name: &'static str,
    since: Version,
}

const fn field(name: &'static str, major: u32, minor: u32, patch: u32) -> Field {
    Field {
        name,
        since: Version::new(major, minor, patch),
    }
}

impl Config {
    /// Checks the values against each other, without a library.
    ///
    /// [`ErrorKind::InvalidConfig`] names the first field whose value is invalid.
    pub(crate) fn check(&self) -> Result<()> {
        at_least("cga_cluster_size", self.cga_cluster_size, 0)?;
        at_least("min_ctas", self.min_ctas, 1)?;
        at_least("max_ctas", self.max_ctas, 1)?;
        at_least("nvls_ctas", self.nvls_ctas, 1)?;
        at_least("channels_per_net_peer", self.channels_per_net_peer, 1)?;
        at_least("max_p2p_peers", self.max_p2p_peers, 1)?;
        at_least("rma_contexts", self.rma_contexts, 0)?;
        at_least("rma_signals", self.rma_signals, 0)?;
        ordered(self.min_ctas, self.max_ctas)?;
        if let Some(name) = &self.network
            && (name.is_empty() || name.contains('\0'))
        {
            return Err(invalid(
                "network",
                format!("{name:?} is not the name of a network"),
            ));
        }
        Ok(())
    }

    /// Returns the fields that are set, each with the release that it needs.
    fn set_fields(&self) -> impl Iterator<Item = Field> {
        [
            (
                self.cga_cluster_size.is_some(),
                field("cga_cluster_size", 2, 17, 0),
            ),
            (self.min_ctas.is_some(), field("min_ctas", 2, 17, 0)),
            (self.max_ctas.is_some(), field("max_ctas", 2, 17, 0)),
            (self.network.is_some(), field("network", 2, 17, 0)),
            (
                self.traffic_class.is_some(),
                field("traffic_class", 2, 26, 2),
            ),
            (self.collnet.is_some(), field("collnet", 2, 27, 3)),
            (self.cta_policy.is_some(), field("cta_policy", 2, 27, 3)),
            (
                self.cta_policy == Some(CtaPolicy::Zero),
                field("cta_policy(Zero)", 2, 28, 3),
            ),
            (self.nvls_ctas.is_some(), field("nvls_ctas", 2, 27, 3)),
            (
                self.channels_per_net_peer.is_some(),
                field("channels_per_net_peer", 2, 28, 3),
            ),
            (
                self.nvlink_centric_scheduling.is_some(),
                field("nvlink_centric_scheduling", 2, 28, 3),
            ),
            (
                self.max_p2p_peers.is_some(),
                field("max_p2p_peers", 2, 30, 3),
            ),
            (self.rma_contexts.is_some(), field("rma_contexts", 2, 29, 2)),
            (
                self.rma_contexts.is_some_and(|contexts| contexts > 1),
                field("rma_contexts(more than 1)", 2, 31, 2),
            ),
            (self.rma_signals.is_some(), field("rma_signals", 2, 31, 2)),
        ]
        .into_iter()
        .filter_map(|(set, field)| set.then_some(field))
    }

    /// The numbers of signals and of contexts for one-sided operations.
    pub(crate) fn rma_limits(&self) -> (usize, usize) {
        let or_one = |value: Option<i32>| usize::try_from(value.unwrap_or(1)).unwrap_or(0);
        (or_one(self.rma_signals), or_one(self.rma_contexts))
    }

    /// Whether NCCL is to use no multiprocessors where copy engines can do the work.
    pub(crate) fn is_zero_cta(&self) -> bool {
        self.cta_policy == Some(CtaPolicy::Zero)
    }

    /// Returns the C structure for `library`; its pointers stay valid for the life of the process.
    ///
    /// The structure is the newest layout with everything unset: older libraries read the part they know.
    /// `version` is the smaller of the header's and the library's, so that padding of an older layout is
    /// not read as a value.
    pub(crate) fn to_raw(&self, library: &Library, name: &str) -> Result<sys::ncclConfig_t> {
        self.check()?;
        let found = library.version();
        for field in self.set_fields() {
            if found < field.since {
                return Err(Error::new(ErrorKind::Unsupported {
                    what: format!("configuration field `{}`", field.name),
                    needs: field.since,
                    found,
                    path: library.path().to_owned(),
                }));
            }
        }
        let c_string = |field, text: &str| {
            CString::new(text).map_err(|_| invalid(field, format!("{text:?} holds a NUL byte")))
        };
        let network = self
            .network
            .as_deref()
            .map(|name| c_string("network", name))
            .transpose()?;
        let name = c_string("name", name)?;

        let mut raw = sys::NCCL_CONFIG_INITIALIZER;
        raw.version = found.min(Version::HEADER).code().unsigned_abs();
        raw.blocking = 0;
        let set = |slot: &mut i32, value: Option<i32>| {
            if let Some(value) = value {
                *slot = value;
            }
        };
        set(&mut raw.cgaClusterSize, self.cga_cluster_size);
        set(&mut raw.minCTAs, self.min_ctas);
        set(&mut raw.maxCTAs, self.max_ctas);
        if self.min_ctas.is_some() && self.max_ctas.is_none() && found < Version::new(2, 31, 2) {
            // Those releases compare minCTAs with the unset maxCTAs and refuse.
            raw.maxCTAs = if found < Version::new(2, 25, 0) {
                32
            } else {
                64
            };
        }
        set(&mut raw.trafficClass, self.traffic_class);
        set(&mut raw.collnetEnable, self.collnet.map(i32::from));
        set(&mut raw.CTAPolicy, self.cta_policy.map(CtaPolicy::raw));
        set(&mut raw.nvlsCTAs, self.nvls_ctas);
        set(&mut raw.nChannelsPerNetPeer, self.channels_per_net_peer);
        set(
            &mut raw.nvlinkCentricSched,
            self.nvlink_centric_scheduling.map(i32::from),
        );
        set(&mut raw.maxP2pPeers, self.max_p2p_peers);
        set(&mut raw.numRmaCtx, self.rma_contexts);
        set(&mut raw.numRmaSig, self.rma_signals);
        if let Some(network) = network {
            raw.netName = kept(network).as_ptr();
        }
        if found >= Version::new(2, 27, 3) {
            raw.commName = kept(name).as_ptr();
        }
        Ok(raw)
    }
}

/// Returns the same string, kept for the life of the process: one copy per text.
///
/// NCCL copies the network name, but keeps the pointer to the communicator's name and passes it to profiler plugins,
/// which also keep the pointer and read it when the communicator ends. This crate cannot know when that is: if several
/// ranks live in one process, NCCL ends all of them when the last one is destroyed or aborted, and the calls for the
/// others return earlier.
pub(crate) fn kept(text: CString) -> &'static CStr {
    static KEPT: LazyLock<Mutex<HashSet<&'static CStr>>> = LazyLock::new(Mutex::default);
    let mut kept = KEPT.lock();
    match kept.get(text.as_c_str()) {
        Some(same) => same,
        None => {
            let text: &'static CStr = Box::leak(text.into_boxed_c_str());
            kept.insert(text);
            text
        }
    }
}

pub(crate) fn at_least(field: &'static str, value: Option<i32>, least: i32) -> Result<()> {
    match value {
        Some(value) if value < least => Err(invalid(
            field,
            format!("{value} is less than {least}, the least value possible"),
        )),
        _ => Ok(()),
    }
}

/// Refuses a minimum number of thread blocks that exceeds the maximum.
pub(crate) fn ordered(min_ctas: Option<i32>, max_ctas: Option<i32>) -> Result<()> {
    match (min_ctas, max_ctas) {
        (Some(min), Some(max)) if min > max => Err(invalid(
            "min_ctas",
            format!("{min} is more than max_ctas, {max}"),
        )),
        _ => Ok(()),
    }
}

pub(crate) fn invalid(field: &'static str, reason: String) -> Error {
    Error::new(ErrorKind::InvalidConfig { field, reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_values_are_refused_by_name() {
        let none = Config::default;
        for (config, field) in [
            (
                Config {
                    min_ctas: Some(0),
                    ..none()
                },
                "min_ctas",
            ),
            (
                Config {
                    max_ctas: Some(-3),
                    ..none()
                },
                "max_ctas",
            ),
            (
                Config {
                    cga_cluster_size: Some(-1),
                    ..none()
                },
                "cga_cluster_size",
            ),
            (
                Config {
                    min_ctas: Some(9),
                    max_ctas: Some(8),
                    ..none()
                },
                "min_ctas",
            ),
            (
                Config {
                    network: Some(String::new()),
                    ..none()
                },
                "network",
            ),
            (
                Config {
                    network: Some(String::from("a\0b")),
                    ..none()
                },
                "network",
            ),
            (
                Config {
                    max_p2p_peers: Some(0),
                    ..none()
                },
                "max_p2p_peers",
            ),
        ] {
            let error = config.check().unwrap_err();
            assert!(error.to_string().contains(field), "{error}");
        }
    }

    #[test]
    fn a_name_is_kept_once_and_for_ever() {
        let keep = |text: &str| kept(CString::new(text).unwrap());
        let first = keep("kept/a");
        assert_eq!(first.as_ptr(), keep("kept/a").as_ptr());
        assert_ne!(first.as_ptr(), keep("kept/b").as_ptr());
        assert_eq!(first.to_str(), Ok("kept/a"));
    }

    #[test]
    fn every_field_that_is_set_is_gated() {
        let all = Config {
            cga_cluster_size: Some(1),
            min_ctas: Some(1),
            max_ctas: Some(2),
            network: Some(String::from("Socket")),
            traffic_class: Some(1),
            collnet: Some(true),
            cta_policy: Some(CtaPolicy::Zero),
            nvls_ctas: Some(1),
            channels_per_net_peer: Some(1),
            nvlink_centric_scheduling: Some(true),
            max_p2p_peers: Some(1),
            rma_contexts: Some(2),
            rma_signals: Some(1),
        };
        assert_eq!(
            all.set_fields().count(),
            15,
            "thirteen fields, two values with releases of their own"
        );
    }
}
