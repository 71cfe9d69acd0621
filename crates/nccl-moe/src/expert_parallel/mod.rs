//! Mixture of experts: tokens travel to the ranks that have their experts, and back.
//!
//! ```text
//! topk ──route──▶ slots, counts        which row each choice of a token gets; the ranks tell each other how many
//! x ─────dispatch──▶ y                 rows to the experts' ranks
//! y ─────(the experts)──▶ z
//! z ─────combine──▶ out                rows back, weighed and added up
//! ```
//!
//! Shapes are static: whatever the routing is, each rank sends and receives `capacity` rows for each pair of a rank
//! and an expert. So the host never needs to know the counts, and never waits, unless it asks ([`Routing::counts`]).
//!
//! - `experts`: an [`ExpertParallel`]; `builder`: what it is made from; `layout`: its numbers, and where rows lie;
//! - `kernels`: the device code, in `kernels.ptx`; `routing`: who goes where, and `counts`: how many;
//! - `dispatch`, `combine`: the exchanges.
//!
//! What must stay true: the staging memory is used on one stream only, by calls that have `&mut self`; and each of
//! the kernels stands between the joins of the streams of its buffers (`Inner::compute`), as the messages do.

mod builder;
mod combine;
mod counts;
mod dispatch;
mod experts;
mod kernels;
mod layout;
mod routing;

pub use builder::ExpertParallelBuilder;
pub use counts::Counts;
pub use experts::ExpertParallel;
pub use layout::Layout as ExpertLayout;
pub use routing::Routing;
