//! Mixture of experts: tokens are sent to the ranks that have their experts, and back.
//!
//! ```text
//! topk ──route──▶ slots, counts        which copy of an expert and which row of it each choice of a token gets; the ranks
//!                                      tell each other how many
//! x ─────dispatch──▶ y                 rows to the experts' ranks
//! y ─────(the experts)──▶ z
//! z ─────combine──▶ out                rows back, weighed and added up
//! ```
//!
//! Shapes are static: whatever the routing is, each rank sends and receives `capacity` rows for each pair of a rank and
//! an expert. So the host does not need the counts, and never waits, unless the program calls [`Routing::counts`].
//!
//! - `experts`: an [`ExpertParallel`]; `builder`: its builder; `layout`: its sizes, and the order of rows;
//! - `placement`: the ranks that have the experts, and copies of them; `transfers`: the transfers when a placement
//!   changes;
//! - `kernels`: the device code, in `kernels.ptx`; `routing`: the row of each choice, and `counts`: the number of rows;
//! - `dispatch`, `combine`: the exchanges; `captured`: the same in captured plans.
//!
//! Invariants: the staging memory is used on one stream only, by calls that have `&mut self` and by plans, of which the
//! program lets one run at a time; each kernel, like the
//! messages, is enqueued between the joins with the streams of its buffers (`Inner::compute`).

mod builder;
mod captured;
mod combine;
mod counts;
mod dispatch;
mod experts;
mod kernels;
mod layout;
mod placement;
mod routing;
mod transfers;

pub use builder::ExpertParallelBuilder;
pub use captured::{ExpertCapture, RoutingMut};
pub use counts::Counts;
pub use experts::ExpertParallel;
pub use layout::{DispatchWay, Layout as ExpertLayout};
pub use placement::ExpertPlacement;
pub use routing::Routing;
pub use transfers::{ExpertTransfer, TransferPart};
