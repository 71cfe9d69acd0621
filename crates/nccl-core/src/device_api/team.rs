//! Which ranks reach each other how.

use nccl_sys as sys;

use crate::communicator::Communicator;
use crate::error::{Error, ErrorKind, Result};

/// Some ranks of a communicator, at equal distances: what NCCL's device functions take as a `ncclTeam_t`.
///
/// ```
/// use nccl::device_api::Team;
///
/// # fn example(comm: &nccl::Communicator) -> nccl::Result<()> {
/// let near = Team::load_store(comm)?;
/// let ranks: Vec<usize> = (0..near.size).map(|place| near.rank_at(place)).collect();
/// println!("kernels of this rank reach the memory of ranks {ranks:?}");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Team {
    /// The number of ranks.
    pub size: usize,
    /// The place of this rank in the team.
    pub place: usize,
    /// How many ranks of the communicator lie between a rank of the team and its next one, plus one.
    pub stride: usize,
    /// The rank of the communicator at place 0.
    first: usize,
}

impl Team {
    /// The ranks whose memory the kernels of this rank can load and store (LSA): those of its host, or of its NVLink domain. NCCL counts
    /// them by their place; whether they really can is [`Properties::device_api`](super::Properties::device_api).
    ///
    /// # Errors
    /// As [`Communicator::properties`], and [`ErrorKind::Unsupported`] before NCCL 2.28.3. [`ErrorKind::Unavailable`] where NCCL
    /// knows no team.
    ///
    /// Wraps `ncclTeamLsa`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let world = nccl::World::threads(1).remove(0);
    /// # let comm = world.communicator("demo").stream(&stream).build()?;
    /// assert_eq!(nccl::device_api::Team::load_store(&comm)?.size, 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn load_store(comm: &Communicator) -> Result<Self> {
        Self::ask(comm, "ncclTeamLsa", sys::Api::ncclTeamLsa)
    }

    /// The ranks of the same place in their teams of [`load_store`](Self::load_store): those beyond the network.
    ///
    /// # Errors
    /// As [`load_store`](Self::load_store).
    ///
    /// Wraps `ncclTeamRail`.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<()> {
    /// let rail = nccl::device_api::Team::rail(comm)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn rail(comm: &Communicator) -> Result<Self> {
        Self::ask(comm, "ncclTeamRail", sys::Api::ncclTeamRail)
    }

    fn ask(
        comm: &Communicator,
        name: &'static str,
        function: impl FnOnce(
            &sys::Api,
        ) -> std::result::Result<
            unsafe extern "C" fn(sys::ncclComm_t) -> sys::ncclTeam_t,
            sys::MissingFunction,
        >,
    ) -> Result<Self> {
        let function = comm.library().function(function)?;
        let found = comm.ask(name, move |_, raw| {
            // SAFETY: the communicator is alive, under its lock.
            Ok(unsafe { function(raw.as_ptr()) })
        })?;
        let own = comm.rank();
        let number = |value| usize::try_from(value).ok();
        let team = || {
            Some(Self {
                size: number(found.nRanks).filter(|&size| size > 0)?,
                place: number(found.rank)?,
                stride: number(found.stride)?,
                first: own.checked_sub(number(found.rank)? * number(found.stride)?)?,
            })
        };
        team().ok_or_else(|| {
            Error::new(ErrorKind::Unavailable {
                what: "a team of ranks",
                reason: format!("{name} knows none for this communicator"),
            })
        })
    }

    /// Returns the rank of the communicator at a place of the team.
    ///
    /// # Panics
    /// When the team has no such place.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let world = nccl::World::threads(1).remove(0);
    /// # let comm = world.communicator("demo").stream(&stream).build()?;
    /// let near = nccl::device_api::Team::load_store(&comm)?;
    /// assert_eq!(near.rank_at(near.place), comm.rank());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn rank_at(&self, place: usize) -> usize {
        assert!(place < self.size, "the team has {} ranks", self.size);
        self.first + place * self.stride
    }
}
