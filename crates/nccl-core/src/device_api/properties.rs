//! The capabilities of a communicator.

use nccl_sys as sys;

use crate::communicator::{Communicator, ask};
use crate::error::{Error, Result};
use crate::ffi;

const CALL: &str = "ncclCommQueryProperties";

/// The capabilities of a communicator on its devices and networks; see [`Communicator::properties`]. A field that the loaded
/// release does not report is `None`.
///
/// ```
/// # fn example(comm: &nccl::Communicator) -> nccl::Result<()> {
/// let properties = comm.properties()?;
/// if !properties.device_api {
///     eprintln!("kernels cannot reach the memory of other ranks");
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Properties {
    /// The number of the device in NVML; `None` where NVML does not have it.
    pub nvml_device: Option<u32>,
    /// Whether the ranks support windows and device communicators.
    pub device_api: bool,
    /// Whether all ranks of a team have a multicast address (NVLink SHARP).
    pub multimem: bool,
    /// How kernels send data over the network.
    pub gin: Gin,
    /// Like `gin`, but only among ranks that have the same place on their hosts; from NCCL 2.29.7 on.
    pub railed_gin: Option<Gin>,
    /// Whether one-sided operations are possible; from NCCL 2.29.7 on.
    pub host_rma: Option<bool>,
    /// The number of teams whose ranks reach each other's memory ([`Team::load_store`](super::Team::load_store)); from NCCL
    /// 2.29.7 on.
    pub load_store_teams: Option<usize>,
    /// NCCL's hash of the communicator, the same on all ranks; from NCCL 2.31.2 on.
    pub hash: Option<u64>,
}

/// How kernels send data over the network (GPU-initiated networking, GIN).
///
/// ```
/// use nccl::device_api::Gin;
///
/// assert_ne!(Gin::None, Gin::Proxy);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Gin {
    /// Kernels cannot send over the network.
    None,
    /// Through an NCCL thread on the host.
    Proxy,
    /// Through DOCA GPUNetIO.
    Gdaki,
    /// Through GPI.
    Gpi,
    /// Through AWS's EFA.
    EfaGda,
    /// Through a mechanism that this release of the crate does not know, with its number in `ncclGinType_t`.
    Other(u32),
}

impl Gin {
    fn from_raw(raw: sys::ncclGinType_t) -> Self {
        use sys::ncclGinType_t as Raw;
        match raw {
            Raw::NCCL_GIN_TYPE_NONE => Self::None,
            Raw::NCCL_GIN_TYPE_PROXY => Self::Proxy,
            Raw::NCCL_GIN_TYPE_GDAKI => Self::Gdaki,
            Raw::NCCL_GIN_TYPE_GPI => Self::Gpi,
            Raw::NCCL_GIN_TYPE_EFA_GDA => Self::EfaGda,
            Raw(other) => Self::Other(other),
        }
    }
}

pub(crate) fn properties(comm: &Communicator) -> Result<Properties> {
    let function = comm.library().function(sys::Api::ncclCommQueryProperties)?;
    ask(comm, CALL, move |inner, raw| {
        let version = inner.library.version();
        let mut answer = sys::NCCL_COMM_PROPERTIES_INITIALIZER;
        // An older library fills only the beginning of the struct, and refuses a version that it does not know.
        answer.version = answer.version.min(version.code() as u32);
        // SAFETY: the communicator is alive, under its lock. `answer` is valid for the call, and large enough for
        // any library that knows the version in it.
        let code = unsafe { function(raw.as_ptr(), &mut answer) };
        ffi::check(&inner.library, CALL, code).map_err(Error::from)?;
        let (with_rma, with_hash) = (
            version >= sys::Version::new(2, 29, 7),
            version >= sys::Version::new(2, 31, 2),
        );
        Ok(Properties {
            nvml_device: u32::try_from(answer.nvmlDev).ok(),
            device_api: answer.deviceApiSupport,
            multimem: answer.multimemSupport,
            gin: Gin::from_raw(answer.ginType),
            railed_gin: with_rma.then(|| Gin::from_raw(answer.railedGinType)),
            host_rma: with_rma.then_some(answer.hostRmaSupport),
            load_store_teams: with_rma.then_some(answer.nLsaTeams.max(0) as usize),
            hash: with_hash.then_some(answer.commHash),
        })
    })
}
