//! Builder of an [`ExpertParallel`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::experts::{ExpertParallel, OnDevice, Owned};
use super::kernels::Kernels;
use super::layout::{DispatchWay, Layout, Sizes};
use super::placement::ExpertPlacement;
use crate::communicator::Communicator;
use crate::cuda_driver;
use crate::error::{Error, ErrorKind, Result};
use crate::forked::{self, ForkGuarded};
use crate::issuing::read_back;
use nccl_core::AllToAllAlgorithm as Algorithm;

/// Builds an [`ExpertParallel`]: the fields are the settings. See [`ExpertParallel::builder`].
///
/// ```
/// # fn example(comm: &nccl::Communicator) -> nccl::Result<()> {
/// use nccl::moe::{ExpertLayout, ExpertParallel};
///
/// let ep = ExpertParallel::builder(comm)
///     .with(|ep| {
///         ep.experts = 256;
///         ep.top_k = 8;
///         ep.max_tokens = 128;
///         // Four times what each expert gets when all get as much.
///         ep.capacity = Some(4 * 128 * 8 / 256);
///         // 7168 bytes with 56 scales go out, 7168 numbers of two bytes come back.
///         ep.max_row_bytes = (7168 + 56 * 4).max(7168 * 2);
///         ep.layout = ExpertLayout::ExpertMajor;
///     })
///     .build()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing is made before `build`"]
#[non_exhaustive]
pub struct ExpertParallelBuilder<'c> {
    comm: &'c Communicator,
    /// The number of experts of all ranks together, the same on all ranks. Without a [`placement`](Self::placement) it
    /// is required, and a multiple of the number of ranks; with one it may be left out.
    pub experts: usize,
    /// The number of experts that a token may choose. Required.
    pub top_k: usize,
    /// The maximum number of tokens of this rank in one step. Required.
    pub max_tokens: usize,
    /// Which experts each rank has, the same on all ranks; each expert has at least one copy. `None` (default) is
    /// [`ExpertPlacement::blocks`].
    pub placement: Option<ExpertPlacement>,
    /// How many tokens from each rank fit into a copy of an expert, the same on all ranks. With `None` (default), the
    /// capacity is [`max_tokens`](Self::max_tokens), and no token is ever lost unless it chooses an expert twice;
    /// `max_tokens` must then be the same on all ranks.
    ///
    /// All rows are sent, filled or not: a smaller capacity saves time and memory, but a token that does not fit into
    /// its expert is an error ([`ErrorKind::ExpertCapacity`]).
    pub capacity: Option<usize>,
    /// The maximum number of bytes that are sent for a token at once: for a dispatched row together with its scales, or
    /// for a combined row. Required.
    ///
    /// The staging memory on each rank has [`ExpertParallel::rows`] times this many bytes, and with
    /// [`DispatchWay::AllGather`] at least as many for the tokens of all ranks; it must then be the same on all ranks.
    pub max_row_bytes: usize,
    /// The order of the rows that are received, the same on all ranks; default [`Layout::RankMajor`].
    pub layout: Layout,
    /// How rows are dispatched, the same on all ranks; default [`DispatchWay::Rows`]. With
    /// [`DispatchWay::AllGather`], `max_tokens` and `max_row_bytes` must be the same on all ranks.
    pub way: DispatchWay,
}

impl ExpertParallel {
    /// Returns a builder for all ranks of a communicator, on its stream.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<()> {
    /// let ep = nccl::moe::ExpertParallel::builder(comm)
    ///     .with(|ep| {
    ///         ep.experts = 256;
    ///         ep.top_k = 8;
    ///         ep.max_tokens = 128;
    ///         ep.max_row_bytes = 7168 * 2;
    ///     })
    ///     .build()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn builder(comm: &Communicator) -> ExpertParallelBuilder<'_> {
        ExpertParallelBuilder::new(comm)
    }
}

impl<'c> ExpertParallelBuilder<'c> {
    pub(super) fn new(comm: &'c Communicator) -> Self {
        Self {
            comm,
            experts: 0,
            top_k: 0,
            max_tokens: 0,
            placement: None,
            capacity: None,
            max_row_bytes: 0,
            layout: Layout::default(),
            way: DispatchWay::default(),
        }
    }

    /// Sets fields in a chain of calls.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) {
    /// let builder = nccl::moe::ExpertParallel::builder(comm).with(|ep| ep.experts = 32 * comm.world_size());
    /// # }
    /// ```
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }

    /// Allocates the staging memory, loads the kernels, connects the ranks, and compares their sizes; all ranks have to
    /// build at the same time. Waits for the other ranks, at most as long as the communicator's operations may take.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidConfig`] for sizes that cannot work or that differ between the ranks, and when another rank
    /// failed to build; [`ErrorKind::Cuda`] when there is not enough memory, or the driver does not accept the kernels;
    /// otherwise as any operation. When a rank cannot even compare its sizes with those of the others, which wait for it, the
    /// communicator is aborted.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let mut builder = nccl::moe::ExpertParallel::builder(&comm);
    /// (builder.experts, builder.top_k, builder.max_tokens) = (4, 1, 16);
    /// let error = builder.clone().build().unwrap_err();
    /// assert!(error.to_string().contains("max_row_bytes"));
    /// builder.max_row_bytes = 64;
    /// let ep = builder.build()?;
    /// assert_eq!(ep.capacity(), 16);
    /// # Ok(())
    /// # }
    /// ```
    pub fn build(self) -> Result<ExpertParallel> {
        forked::check()?;
        let made = self.make();
        // Compares after a failure as well: the other ranks learn of it, and do not wait for this rank.
        let compared = self.compare(made.as_ref().ok().map(|made| &made.sizes));
        let made = made?;
        compared?;
        made.connect_gathers()
            .map_err(|error| self.comm.inner.fail_alone(error))?;
        Ok(made)
    }

    fn make(&self) -> Result<ExpertParallel> {
        let ranks = self.comm.world_size();
        let placement = self.placement.as_ref();
        let experts = match placement {
            Some(placement) if self.experts == 0 => placement.experts(),
            _ => self.experts,
        };
        let sizes = Sizes {
            ranks,
            experts,
            own: placement.map_or(experts / ranks, ExpertPlacement::places_per_rank),
            top_k: self.top_k,
            max_tokens: self.max_tokens,
            capacity: self.capacity.unwrap_or(self.max_tokens),
            max_row_bytes: self.max_row_bytes,
            layout: self.layout,
            way: self.way,
        };
        sizes.check()?;
        let placement = match &self.placement {
            Some(placement) => placement.clone(),
            None => ExpertPlacement::blocks(experts, ranks)?,
        };
        check_placement(&placement, &sizes)?;
        let stream = self.comm.stream();
        let context = stream.context();
        let memory = cuda_driver::ignoring_stored_error(context, || {
            stream.alloc_zeros::<u8>(sizes.staging())
        })
        .map_err(Error::cuda("allocating the staging memory"))?;
        let staging = Owned::new(memory);
        let copies = cuda_driver::ignoring_stored_error(context, || context.new_stream())
            .map_err(Error::cuda("creating a stream (cuStreamCreate)"))?;
        let table = match self.placement {
            None => None,
            Some(_) => cuda_driver::ignoring_stored_error(context, || {
                stream.clone_htod(&placement.table()).map(Some)
            })
            .map_err(Error::cuda("copying the placement"))?,
        };
        let device = OnDevice {
            // The staging memory is all zeros, and not in use yet.
            kernels: Kernels::load(stream, staging.address)?,
            table: table.map(Owned::new),
            staging,
        };
        static MADE: AtomicU64 = AtomicU64::new(0);
        Ok(ExpertParallel {
            comm: self.comm.clone(),
            sizes,
            placement: Arc::new(placement),
            device: Arc::new(device),
            copies: ForkGuarded::new(copies),
            number: MADE.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// Compares the sizes that have to be the same on all ranks.
    fn compare(&self, sizes: Option<&Sizes>) -> Result<()> {
        const FIELDS: [&str; 7] = [
            "experts",
            "placement",
            "capacity",
            "layout",
            "way",
            "max_tokens",
            "max_row_bytes",
        ];
        let own: [u64; FIELDS.len() + 1] = match sizes {
            None => [0; FIELDS.len() + 1],
            Some(sizes) => {
                // These two determine how much is gathered.
                let gathered = |size: usize| match sizes.way {
                    DispatchWay::Rows => 0,
                    DispatchWay::AllGather => size as u64,
                };
                [
                    1,
                    sizes.experts as u64,
                    self.placement
                        .as_ref()
                        .map_or(0, ExpertPlacement::fingerprint),
                    sizes.capacity as u64,
                    sizes.layout as u64,
                    sizes.way as u64,
                    gathered(sizes.max_tokens),
                    gathered(sizes.max_row_bytes),
                ]
            }
        };
        let stream = self.comm.stream();
        let exchange = || Error::cuda("exchanging numbers with the other ranks");
        // The other ranks wait for the numbers of this one.
        let alone = |error| self.comm.inner.fail_alone(error);
        let told = cuda_driver::ignoring_stored_error(stream.context(), || {
            let x = stream.clone_htod(&own.repeat(self.comm.world_size()))?;
            let y = stream.alloc_zeros::<u64>(own.len() * self.comm.world_size())?;
            Ok((x, y))
        });
        let (x, mut y) = told.map_err(exchange()).map_err(alone)?;
        // Exchanged as messages, which connect all pairs of ranks: NCCL waits on the host for these connections, and no
        // later call should.
        let grouped = Algorithm::Grouped;
        self.comm.all_to_all_with(&x, &mut y, grouped)?.wait()?;
        let told = read_back(self.comm, &y)
            .map_err(exchange())
            .map_err(alone)?;
        let refuse = |field, reason| Err(Error::new(ErrorKind::InvalidConfig { field, reason }));
        let all = || told.chunks_exact(own.len()).enumerate();
        if let Some((rank, _)) = all().find(|(_, one)| one[0] == 0) {
            let reason = format!("rank {rank} could not make its part, and says why itself");
            return refuse("expert_parallel", reason);
        }
        for (at, field) in FIELDS.into_iter().enumerate() {
            let of = |one: &[u64]| one[at + 1];
            let first = of(&told);
            if let Some((rank, one)) = all().find(|(_, one)| of(one) != first) {
                let show = |value: u64| match (field, value) {
                    ("layout", value) if value == Layout::RankMajor as u64 => {
                        String::from("RankMajor")
                    }
                    ("layout", _) => String::from("ExpertMajor"),
                    ("way", value) if value == DispatchWay::Rows as u64 => String::from("Rows"),
                    ("way", _) => String::from("AllGather"),
                    ("placement", 0) => String::from("None"),
                    ("placement", value) => format!("one with the fingerprint {value:016x}"),
                    _ => value.to_string(),
                };
                let reason = format!(
                    "it is {} on rank 0 and {} on rank {rank}, and has to be the same on all ranks",
                    show(first),
                    show(of(one))
                );
                return refuse(field, reason);
            }
        }
        Ok(())
    }
}

/// Returns an error for a placement that does not fit the communicator, or that has no copy of some expert.
fn check_placement(placement: &ExpertPlacement, sizes: &Sizes) -> Result<()> {
    let refuse = |reason| {
        Err(Error::new(ErrorKind::InvalidConfig {
            field: "placement",
            reason,
        }))
    };
    let missing = placement.missing();
    let Sizes { experts, ranks, .. } = *sizes;
    match missing.first() {
        _ if placement.ranks() != ranks => {
            let planned = placement.ranks();
            refuse(format!(
                "it is of {planned} ranks, and the communicator has {ranks}"
            ))
        }
        _ if placement.experts() != experts => {
            let planned = placement.experts();
            refuse(format!(
                "it is of {planned} experts, and `experts` is {experts}"
            ))
        }
        Some(expert) => {
            let count = missing.len();
            refuse(format!(
                "no rank has expert {expert} ({count} are missing): load it somewhere first, as `ExpertPlacement::rebalanced` and `transfers` say"
            ))
        }
        None => Ok(()),
    }
}
