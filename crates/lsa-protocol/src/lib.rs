//! An all-to-all of small messages between GPUs that can load and store each other's memory (in NCCL's words:
//! load/store accessible, LSA), by its own kernel instead of NCCL's send and receive.
//!
//! Each rank has a *window* of device memory that all ranks reach. An exchange has a number, its *epoch*, which is the
//! same on all ranks. A rank copies the block for each peer into a slot of that peer's window, writes its size beside the
//! flag of the slot, and then sets that flag to the epoch; it waits for the flags of its own window, compares the sizes with
//! that of its own blocks, and copies the blocks out.
//!
//! | item | |
//! |---|---|
//! | [`Layout`] | the positions of flags and slots in a window |
//! | [`Exchange`] | the protocol of one rank and one epoch, without memory and clocks |
//! | [`Machine`] | the memory and the clock that an [`Exchange`] works on |
//! | [`CUDA_SOURCE`] | the same protocol as a kernel |
//!
//! The emulator runs [`Exchange`] in the kernel's place, and `tests/loom.rs` explores its interleavings: a change to
//! one of the two sources needs the same change to the other.
//!
//! # Why two buffers are enough
//!
//! The slots and flags of a window exist twice; epoch `e` uses buffer `e % 2`. Rank `a` overwrites its slot in the window
//! of rank `b` in epoch `e + 2` only after `b` has read what epoch `e` left there:
//!
//! 1. The launches of a rank are ordered, on one stream or by events. So the kernel `e + 2` of `a` begins after its kernel
//!    `e + 1` has ended, which has seen the flag `e + 1` of every rank, also that of `b`.
//! 2. `b` sets that flag in its kernel `e + 1`, which for the same reason begins after its kernel `e` has ended, and which
//!    therefore has copied out every block of epoch `e`.
//!
//! Setting a flag is a release and seeing it an acquire, at system scope, so the reads of `b` and the later writes of
//! `a` are ordered for the memory as well. One buffer would not suffice: at the end of epoch `e`, nothing tells `a`
//! that `b` has read. By the same reasoning, a flag that is awaited in epoch `e` never already has the value `e + 2`,
//! so it is compared for equality.
//!
//! This holds as long as
//!
//! - every epoch is completed. After [`Outcome::Missing`], [`Outcome::Differs`] or [`Outcome::Aborted`] a late peer may still
//!   write, so the window serves no other exchange. Launches of that rank that are already on its stream do nothing
//!   ([`Layout::failed_offset`]): otherwise they would overwrite blocks that a peer may still take;
//! - consecutive epochs differ in their last bit, even where the counter wraps around: [`next_epoch`];
//! - the flags are 0 before the first epoch, on all ranks, before any rank begins;
//! - all blocks of a launch are resident at once, because a block waits for the block of the same number on another
//!   device. With 256 threads and hardly any shared memory, some hundreds of blocks fit on a device.

#![forbid(unsafe_code)]

mod exchange;
mod layout;

pub use exchange::{Exchange, Machine, Outcome};
pub use layout::{FLAG_BYTES, Layout, LayoutError, SLOT_ALIGNMENT};

/// The kernel, as CUDA C++ that needs no header.
///
/// Its arguments are described in the source. The grid is `(ranks, 1, 1)`, the block [`BLOCK_THREADS`] threads.
///
/// ```
/// assert!(lsa_protocol::CUDA_SOURCE.contains(lsa_protocol::KERNEL));
/// ```
pub const CUDA_SOURCE: &str = include_str!("all_to_all.cu");

/// The name of the kernel.
///
/// ```
/// assert_eq!(lsa_protocol::KERNEL, "nccl_lsa_all_to_all");
/// ```
pub const KERNEL: &str = "nccl_lsa_all_to_all";

/// The threads of a block of the kernel, all in x.
///
/// ```
/// let define = format!("BLOCK_THREADS {}", lsa_protocol::BLOCK_THREADS);
/// assert!(lsa_protocol::CUDA_SOURCE.contains(&define));
/// ```
pub const BLOCK_THREADS: u32 = 256;

/// The status that the kernel writes after an abort; otherwise the status is 0, one more than the missing rank, or
/// [`STATUS_DIFFERS`] with the rank whose block has another size. The first failure stays. The word behind it holds the epoch
/// that the kernel has begun.
///
/// ```
/// use lsa_protocol::{Outcome, STATUS_ABORTED};
///
/// assert_eq!(Outcome::from_status(STATUS_ABORTED), Outcome::Aborted);
/// ```
pub const STATUS_ABORTED: u32 = u32::MAX;

/// The bit of a status that the kernel writes for a block of another size; the rank is in the lower bits.
///
/// ```
/// use lsa_protocol::{Outcome, STATUS_DIFFERS};
///
/// assert_eq!(Outcome::from_status(STATUS_DIFFERS + 3), Outcome::Differs(3));
/// ```
pub const STATUS_DIFFERS: u32 = 1 << 31;

/// The last epoch before [`next_epoch`] wraps around to 1. It is even, so that the next one uses the other buffer.
///
/// ```
/// assert_eq!(lsa_protocol::LAST_EPOCH % 2, 0);
/// ```
pub const LAST_EPOCH: u32 = u32::MAX - 1;

/// The next epoch: never 0, which is the value of a flag that was never set, and always in the other buffer.
///
/// ```
/// use lsa_protocol::{LAST_EPOCH, next_epoch};
///
/// assert_eq!(next_epoch(0), 1);
/// assert_eq!(next_epoch(1), 2);
/// assert_eq!(next_epoch(LAST_EPOCH), 1);
/// ```
#[must_use]
pub const fn next_epoch(epoch: u32) -> u32 {
    if epoch >= LAST_EPOCH { 1 } else { epoch + 1 }
}

/// A module that declares the kernel with its parameters but without its code, **for the emulator alone**: its driver
/// neither has a compiler nor executes PTX, and runs a Rust function in the kernel's place. NVIDIA's driver does not
/// load this module, because its target does not exist.
///
/// ```
/// assert!(lsa_protocol::STAND_IN_PTX.contains(lsa_protocol::KERNEL));
/// ```
pub const STAND_IN_PTX: &str = "\
// For the emulator, which runs a Rust function in place of this kernel.
.version 6.3
.target sm_emulated
.address_size 64
.visible .entry nccl_lsa_all_to_all(
    .param .u64 send,
    .param .u64 recv,
    .param .u64 bytes,
    .param .u64 windows,
    .param .u32 rank,
    .param .u32 ranks,
    .param .u32 epoch,
    .param .u64 capacity,
    .param .u64 abort_flag,
    .param .u64 timeout_ns,
    .param .u64 status
)
{
    trap;
}
";
