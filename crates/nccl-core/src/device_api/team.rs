//! Teams of ranks that reach each other in one way: by loads and stores, or over the network.

use nccl_sys as sys;

use crate::communicator::{Communicator, ask};
use crate::error::{Error, ErrorKind, Result};

/// Ranks of a communicator at equal distances; NCCL's device functions take a team as a `ncclTeam_t`.
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
    /// The difference between the communicator ranks of two consecutive members of the team.
    pub stride: usize,
    /// The rank of the communicator at place 0.
    first: usize,
}

impl Team {
    /// The ranks whose memory the kernels of this rank can load and store (LSA): those on the same host, or in the same NVLink
    /// domain. NCCL determines them from where the ranks run; [`Properties::device_api`](super::Properties::device_api) tells
    /// whether the accesses are really possible.
    ///
    /// # Errors
    /// As [`Communicator::properties`], and [`ErrorKind::Unsupported`] before NCCL 2.28.3. [`ErrorKind::Unavailable`] if NCCL
    /// reports no team.
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

    /// The ranks that have the same place in their [`load_store`](Self::load_store) teams. They reach each other over
    /// the network.
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
        let found = ask(comm, name, move |_, raw| {
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
