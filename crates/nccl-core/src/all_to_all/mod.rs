//! All-to-all: every rank gives every rank one part.
//!
//! Part `j` of rank `i`'s send buffer becomes part `i` of rank `j`'s receive buffer. Several ways lead there
//! ([`Algorithm`]), and none is the fastest everywhere.
//!
//! - `communicator`: what a program calls; `uniform`, `variable`, `in_place`: parts of equal length and others, and with
//!   one buffer;
//! - `plan`: the same, checked once and done often, by the way that the model holds for the fastest;
//! - `schedule`: what a rank does for it, step by step, as values;
//! - `record`: from a schedule to an operation;
//! - `warm_up`: the first contact of all pairs of ranks;
//! - `model`: how long each way takes, as far as a formula says; `measure`: its constants.

mod algorithm;
mod communicator;
mod in_place;
mod measure;
mod model;
mod plan;
mod record;
mod schedule;
mod uniform;
mod variable;
mod warm_up;

pub use algorithm::Algorithm;
pub use model::{CostModel, LinkCost, Nodes};
pub use plan::{AllToAll, AllToAllBuilder, Alternative, CapturedAllToAll, Explanation, Payloads};
pub use variable::Parts;
