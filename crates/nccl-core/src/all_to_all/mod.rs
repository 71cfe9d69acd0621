//! All-to-all: every rank sends one part to every rank.
//!
//! Part `j` of rank `i`'s send buffer becomes part `i` of rank `j`'s receive buffer. There are several algorithms
//! ([`Algorithm`]), and none is the fastest everywhere.
//!
//! - `communicator`: the public functions; `uniform`, `variable`, `in_place`: parts of equal length, of unequal length, and
//!   with one buffer;
//! - `plan`: an all-to-all that is checked once and issued often, by the algorithm that the model predicts to be the fastest;
//! - `schedule`: the steps of one rank, as values;
//! - `record`: from a schedule to an operation;
//! - `warm_up`: connects all pairs of ranks;
//! - `model`: a cost model of each algorithm; `measure`: its constants.

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
pub use plan::{AllToAll, AllToAllBuilder, Alternative, Explanation, Payloads};
pub use variable::Parts;
