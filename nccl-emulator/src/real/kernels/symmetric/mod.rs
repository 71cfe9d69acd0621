//! Kernels over symmetric memory: `ncclSymkDevKernel_*` (2.28 and later) and `ncclSymDevKernel_*` (2.27).
//!
//! Every rank maps the windows of all ranks at equal distances, so that a kernel accesses its peers' buffers in place. The
//! kernels' control data is in a buffer of the communicator that is mapped in the same way:
//!
//! ```text
//! names         a kernel's name: collective, algorithm, operator and type; which are interpreted
//! layout        where the fields of the arguments are
//! arguments     the arguments of a launch, decoded
//! works, parts  the works, and which part of which one a block has
//! block, run    one block, and what it does
//! address       buffers and their mappings by rank
//! barrier       the barrier of one block with the same block of its peers
//! exchange      lines with flags, for small sizes (LL)
//! low_latency   the algorithms over `exchange`
//! direct        the algorithms over the peers' buffers
//! accumulate    sums, in the type that NCCL's kernels add in
//! profile       what `_profile` kernels tell the host
//! ```
//!
//! All releases except 2.27 check the abort flag in every wait, and so does this code. The arguments of 2.27 have no such flag:
//! its kernels wait for their peers for ever, as on a GPU. An aborted kernel ends at once here, while NCCL's kernel runs to its
//! end with undefined data.

mod accumulate;
mod address;
mod arguments;
mod barrier;
mod block;
mod direct;
mod exchange;
pub(super) mod layout;
mod low_latency;
mod names;
mod parts;
mod profile;
mod run;
mod works;

pub(super) use arguments::Launch;
pub(crate) use names::Kernel;

#[cfg(test)]
mod tests;
