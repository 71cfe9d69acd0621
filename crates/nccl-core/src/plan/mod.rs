//! Operations that are captured once and launched many times.
//!
//! CUDA graphs replay work without checking whether its memory still exists, so cudarc's own capture cannot be used
//! with NCCL: operations refuse a capturing stream. A [`CapturedPlan`] owns its buffers and holds its communicator
//! instead.
//!
//! - `record`: the program's closure runs first, and its operations are only recorded;
//! - `compare`: the ranks compare what they recorded ([`agree`](crate::operation_comparison));
//! - `capture`: then the capture begins and ends within one call, on a stream of the communicator's own,
//!   which no other code ever puts work on;
//! - `make` combines these; `captured` is the resulting plan, with `launch_throttle` for its launches and `deferred_plan`
//!   for its end; `renewable` captures a plan again on the next communicator. The graphs of a communicator end before it
//!   does ([`graphs`](crate::graphs)).

mod capture;
mod captured;
mod compare;
mod deferred_plan;
mod launch_throttle;
mod make;
mod record;
mod renewable;

pub use captured::CapturedPlan;
pub use record::Capture;
pub use renewable::RenewablePlan;

pub(crate) use compare::Comparison;
