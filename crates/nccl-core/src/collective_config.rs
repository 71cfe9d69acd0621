//! The configuration of single collectives (`ncclCollConfig_t`).

use std::ffi::{CStr, CString};
use std::fmt;
use std::sync::Arc;

use cudarc::driver::CudaEvent;
use nccl_sys as sys;
use nccl_sys::Version;

use crate::config::{self, CtaPolicy};
use crate::error::Result;
use crate::library::Library;

/// Settings for individual collectives; a setting that is not set here has the communicator's value. See
/// [`Communicator::with_config`](crate::Communicator::with_config).
///
/// Wraps `ncclCollConfig_t` (NCCL ≥ 2.31.2). All ranks must give the same values, except for `tag` and the choice of the
/// event.
///
/// ```
/// use nccl::CollectiveConfig;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// # let world = nccl::World::threads(1).remove(0);
/// # let comm = world.communicator("demo").stream(&stream).build()?;
/// let mut config = CollectiveConfig::default();
/// config.max_ctas = Some(4); // leave multiprocessors to a kernel that runs beside it
/// config.tag = 17; // seen by profilers
/// let mut y = stream.clone_htod(&[1.0f32, 2.0])?;
/// comm.with_config(&config)?.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum)?.wait()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct CollectiveConfig {
    /// The algorithms among which NCCL chooses (`algSelection`), for instance `RING` or `TREE,RING`, named as in
    /// `NCCL_ALGO`. With `None`, NCCL chooses among all.
    pub algorithm: Option<String>,
    /// Whether NCCL uses another algorithm if none of `algorithm` is available (`forceAlgSelection = 0`). Otherwise the
    /// collective fails.
    pub fall_back: bool,
    /// The least number of thread blocks, from 1 (`minCTAs`).
    pub min_ctas: Option<i32>,
    /// The greatest number of thread blocks, at most that of the communicator (`maxCTAs`).
    pub max_ctas: Option<i32>,
    /// Thread blocks for NVLink SHARP, from 1 (`nvlsCTAs`).
    pub nvls_ctas: Option<i32>,
    /// Thread blocks per cluster, 0 or more; the same for all collectives of a group (`cgaClusterSize`).
    pub cga_cluster_size: Option<i32>,
    /// How multiprocessors are shared (`CTAPolicy`).
    pub cta_policy: Option<CtaPolicy>,
    /// A number that NCCL passes to profiler plugins with the call's events (`userProfilerTag`), below 2⁶³; 0 for none.
    pub tag: u64,
    /// An event that NCCL records when all blocks of the kernel have started (`launchCompletionEvent`, NCCL ≥ 2.32.3), so that
    /// work on another stream can wait for the launch instead of the end. It must be created without timing, as by cudarc's
    /// `new_event(None)`. Either all ranks give an event or none does. A group may have at most one collective with an event,
    /// and a captured plan none.
    pub launch_event: Option<Arc<CudaEvent>>,
}

impl CollectiveConfig {
    /// Checks the values, without a library.
    fn check(&self) -> Result<()> {
        config::at_least("min_ctas", self.min_ctas, 1)?;
        config::at_least("max_ctas", self.max_ctas, 1)?;
        config::at_least("nvls_ctas", self.nvls_ctas, 1)?;
        config::at_least("cga_cluster_size", self.cga_cluster_size, 0)?;
        config::ordered(self.min_ctas, self.max_ctas)?;
        if let Some(name) = &self.algorithm
            && (name.is_empty() || name.contains('\0'))
        {
            return Err(config::invalid(
                "algorithm",
                format!("{name:?} names no algorithm"),
            ));
        }
        if self.tag >> 63 != 0 {
            return Err(config::invalid(
                "tag",
                format!(
                    "{:#x} has the highest bit set, which NCCL reserves",
                    self.tag
                ),
            ));
        }
        Ok(())
    }

    pub(crate) fn to_raw(&self, library: &Library) -> Result<RawCollectiveConfig> {
        self.check()?;
        library.function(sys::Api::ncclAllReduceConfig)?;
        let event_since = Version::new(2, 32, 3);
        if self.launch_event.is_some() && library.version() < event_since {
            let what = String::from("the configuration field `launch_event`");
            return Err(library.unsupported(what, event_since));
        }
        let algorithm = match &self.algorithm {
            Some(name) => CString::new(name.as_str()).ok().map(config::kept),
            None => None,
        };
        let or_unset = |value: Option<i32>| value.unwrap_or(sys::NCCL_CONFIG_UNDEF_INT);
        Ok(RawCollectiveConfig {
            raw: sys::ncclCollConfig_t {
                version: library.version().min(Version::HEADER).code().unsigned_abs(),
                minCTAs: or_unset(self.min_ctas),
                maxCTAs: or_unset(self.max_ctas),
                nvlsCTAs: or_unset(self.nvls_ctas),
                cgaClusterSize: or_unset(self.cga_cluster_size),
                algSelection: algorithm.map_or(std::ptr::null(), CStr::as_ptr),
                forceAlgSelection: i32::from(!self.fall_back),
                CTAPolicy: or_unset(self.cta_policy.map(CtaPolicy::raw)),
                userProfilerTag: self.tag,
                launchCompletionEvent: match &self.launch_event {
                    Some(event) => event.cu_event().cast(),
                    None => std::ptr::null_mut(),
                },
                ..sys::NCCL_COLLCONFIG_INITIALIZER
            },
            _launch_event: self.launch_event.clone(),
        })
    }
}

/// Prints only whether there is an event.
impl fmt::Debug for CollectiveConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CollectiveConfig")
            .field("algorithm", &self.algorithm)
            .field("fall_back", &self.fall_back)
            .field("min_ctas", &self.min_ctas)
            .field("max_ctas", &self.max_ctas)
            .field("nvls_ctas", &self.nvls_ctas)
            .field("cga_cluster_size", &self.cga_cluster_size)
            .field("cta_policy", &self.cta_policy)
            .field("tag", &self.tag)
            .field("launch_event", &self.launch_event.is_some())
            .finish()
    }
}

/// The C structure and the values that its pointers refer to. The algorithm's name is kept for the life of the process.
#[derive(Debug)]
pub(crate) struct RawCollectiveConfig {
    raw: sys::ncclCollConfig_t,
    /// Keeps the event alive. Work on the stream records it, and CUDA keeps that work.
    _launch_event: Option<Arc<CudaEvent>>,
}

// SAFETY: nothing is written through the pointers, and their targets live as long as this value.
unsafe impl Send for RawCollectiveConfig {}
// SAFETY: likewise.
unsafe impl Sync for RawCollectiveConfig {}

impl RawCollectiveConfig {
    pub(crate) fn as_ptr(&self) -> *const sys::ncclCollConfig_t {
        &raw const self.raw
    }

    pub(crate) fn has_event(&self) -> bool {
        !self.raw.launchCompletionEvent.is_null()
    }
}
