//! What a check covers.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use nccl_base::launch_mode::{LaunchMode, LaunchPreference};
use nccl_diagnose::host_evidence::build_id;
use nccl_diagnose::preflight::{CheckInput, Loaded};
use nccl_sys::Version;

use crate::library::Library;
use crate::nccl_environment;
use crate::peers::InitSetup;

/// What to check: everything, and a device or a library if one is named. The fields are the settings.
///
/// ```
/// use nccl::preflight::{Settings, host};
///
/// let report = host(&Settings::default().with(|settings| {
///     settings.local_ranks = 8;
///     settings.world_size = 32;
/// }));
/// println!("{report}");
/// ```
#[derive(Clone, Debug)]
#[must_use = "settings check nothing by themselves"]
#[non_exhaustive]
pub struct Settings {
    /// The stream of this rank's operations, whose device is checked; `None` (default) checks no device.
    pub stream: Option<Arc<CudaStream>>,
    /// The library that will be used, whose release and file are checked; `None` (default) checks no library.
    pub library: Option<Library>,
    /// How NCCL will be called: a variable that contradicts this is a finding. With `None` (default) the ranks agree on
    /// the mode.
    pub launch_mode: Option<LaunchMode>,
    /// How many ranks there will be on this host, for a check without a world; default 1. What a host needs grows with this and with
    /// [`world_size`](Self::world_size).
    pub local_ranks: usize,
    /// How many ranks there will be altogether, for a check without a world; default 1. A value below
    /// [`local_ranks`](Self::local_ranks) counts as `local_ranks`.
    pub world_size: usize,
    /// The launch preference of the rank, for a communicator that is about to be made.
    preference: LaunchPreference,
}

impl Settings {
    /// Sets fields in a chain of calls.
    ///
    /// ```
    /// # nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
    /// let library = nccl::Library::load()?;
    /// let settings = nccl::preflight::Settings::default().with(|settings| settings.library = Some(library));
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }

    /// Returns the settings for a communicator that is about to be made.
    pub(crate) fn setup(setup: InitSetup) -> Self {
        let settings = Self::default();
        Self {
            stream: setup.stream,
            library: setup.library,
            preference: setup.preference.unwrap_or(settings.preference),
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
                build_id: build_id(library.path()),
            }),
            takes_virtual: library
                .is_some_and(|library| library.version() < Version::new(2, 28, 3)),
            set_variables: library.map_or_else(Vec::new, |library| {
                nccl_environment::interface_variables(library.version())
            }),
            preference: (self.launch_mode).map_or(self.preference, LaunchPreference::Asked),
            local_ranks: self.local_ranks.max(1),
            world_size: self.world_size.max(self.local_ranks).max(1),
        }
    }
}

impl Default for Settings {
    /// Covers everything that needs neither a device nor a library.
    fn default() -> Self {
        Self {
            stream: None,
            library: None,
            launch_mode: None,
            local_ranks: 1,
            world_size: 1,
            preference: LaunchPreference::Either,
        }
    }
}
