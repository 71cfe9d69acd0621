//! What a check covers.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use nccl_base::launch_mode::{LaunchMode, LaunchPreference};
use nccl_diagnose::preflight::{CheckInput, Loaded};
use nccl_sys::Version;

use crate::library::Library;
use crate::peers::InitSetup;

/// What to check: everything, and a device or a library if one is named.
///
/// ```
/// use nccl::preflight::{Settings, host};
///
/// // Eight ranks on this host, of 32 altogether.
/// let report = host(&Settings::new().ranks(8, 32));
/// println!("{report}");
/// ```
#[derive(Clone, Debug)]
#[must_use = "settings check nothing by themselves"]
pub struct Settings {
    stream: Option<Arc<CudaStream>>,
    library: Option<Library>,
    wish: LaunchPreference,
    local_ranks: usize,
    world_size: usize,
}

impl Settings {
    /// Covers everything that needs neither a device nor a library.
    ///
    /// ```
    /// let settings = nccl::preflight::Settings::new();
    /// ```
    pub fn new() -> Self {
        Self {
            stream: None,
            library: None,
            wish: LaunchPreference::Either,
            local_ranks: 1,
            world_size: 1,
        }
    }

    /// Sets the stream of this rank's operations: its device is checked as well.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let settings = nccl::preflight::Settings::new().stream(&stream);
    /// # Ok(())
    /// # }
    /// ```
    pub fn stream(mut self, stream: &Arc<CudaStream>) -> Self {
        self.stream = Some(Arc::clone(stream));
        self
    }

    /// Sets the library that will be used: its release and file are checked as well.
    ///
    /// ```
    /// # nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
    /// let settings = nccl::preflight::Settings::new().library(&nccl::Library::load()?);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn library(mut self, library: &Library) -> Self {
        self.library = Some(library.clone());
        self
    }

    /// Sets how NCCL is going to be called, unless the ranks agree on that: variables that contradict it are found.
    ///
    /// ```
    /// let settings = nccl::preflight::Settings::new().launch_mode(nccl::LaunchMode::BlockingChild);
    /// ```
    pub fn launch_mode(mut self, mode: LaunchMode) -> Self {
        self.wish = LaunchPreference::Asked(mode);
        self
    }

    /// Sets, without a world, how many ranks there will be on this host, and altogether; 1 unless set. What a
    /// host needs grows with both.
    ///
    /// ```
    /// let settings = nccl::preflight::Settings::new().ranks(8, 1024);
    /// ```
    pub fn ranks(mut self, on_this_host: usize, altogether: usize) -> Self {
        self.local_ranks = on_this_host.max(1);
        self.world_size = altogether.max(self.local_ranks);
        self
    }
}

impl Settings {
    /// Returns the settings for a communicator that is about to be made.
    pub(crate) fn setup(setup: InitSetup) -> Self {
        let settings = Self::new();
        Self {
            stream: setup.stream,
            library: setup.library,
            wish: setup.wish.unwrap_or(settings.wish),
            ..settings
        }
    }

    /// Returns the settings in the form that the checks take.
    pub(crate) fn check_input(&self) -> CheckInput {
        let library = self.library.as_ref();
        CheckInput {
            stream: self.stream.clone(),
            library: library.map(|library| Loaded {
                version: library.version().to_string(),
                path: library.path().display().to_string(),
            }),
            takes_virtual: library
                .is_some_and(|library| library.version() < Version::new(2, 28, 3)),
            wish: self.wish,
            local_ranks: self.local_ranks,
            world_size: self.world_size,
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self::new()
    }
}
