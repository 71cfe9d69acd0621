//! Operations that are captured once and launched many times.
//!
//! CUDA's graphs replay work without checking whether its memory still exists, so cudarc's own capture cannot
//! be used with NCCL: operations refuse a capturing stream. A [`CapturedPlan`] owns its buffers and holds its
//! communicator instead.
//!
//! - `record`: the program's closure runs first, and its operations are only recorded;
//! - `compare`: the ranks compare what they recorded ([`agree`](crate::agree));
//! - `capture`: then the capture begins and ends within one call, on a stream of the communicator's own,
//!   which no other code ever puts work on;
//! - `making` combines these; `captured` is the resulting plan, with `pace` for its launches and `remnant`
//!   for its end. The graphs of a communicator end before it does ([`graphs`](crate::graphs)).

mod capture;
mod captured;
mod compare;
mod making;
mod pace;
mod record;
mod remnant;

pub use captured::CapturedPlan;
pub use record::Capture;

pub(crate) use compare::Comparison;
