//! The rules: from the facts of all ranks to findings, in one process, without reading anything else.
//!
//! - `view`: the facts of all ranks side by side, which ranks differ, and how ranks are named;
//! - one file for each kind of rule.

mod devices;
mod limits;
mod network;
mod places;
mod rdma;
mod reach;
mod variables;
mod versions;
mod view;

#[doc(hidden)]
pub use limits::Scarce;
pub(super) use limits::{OPEN_FILES, scarce};
pub(super) use network::networks;
pub(super) use view::View;

use super::reach::{Door, Failure};
use nccl_base::report::{Finding, Report};

/// Findings from facts alone.
pub(super) fn judge(view: &View<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    versions::judge(view, &mut found);
    variables::judge(view, &mut found);
    devices::judge(view, &mut found);
    network::judge(view, &mut found);
    rdma::judge(view, &mut found);
    places::judge(view, &mut found);
    limits::judge(view, &mut found);
    found
}

/// Findings from facts, and from failed visits.
pub(super) fn judge_reached(view: &View<'_>, doors: &[Door], failures: &[Failure]) -> Report {
    let mut found = judge(view);
    reach::judge(view, doors, failures, &mut found);
    Report::new(found)
}
