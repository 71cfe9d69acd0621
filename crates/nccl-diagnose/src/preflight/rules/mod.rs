//! The rules: from the facts of all ranks to findings, in one process, without reading anything else.
//!
//! - `view`: the facts of all ranks side by side, which ranks differ, and how ranks are named;
//! - one file for each kind of rule.

mod builds;
mod devices;
mod limits;
mod namespaces;
mod network;
mod rdma;
mod reachability;
mod variables;
mod versions;
mod view;

#[doc(hidden)]
pub use limits::ResourceShortage;
pub(super) use limits::{OPEN_FILES, resource_shortage};
pub(super) use network::networks;
pub(super) use view::FactsView;

use super::reachability::{Failure, ProbeListener};
use nccl_base::report::{Finding, Report};

/// Findings from facts alone.
pub(super) fn check(view: &FactsView<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    versions::check(view, &mut found);
    builds::check(view, &mut found);
    variables::check(view, &mut found);
    devices::check(view, &mut found);
    network::check(view, &mut found);
    rdma::check(view, &mut found);
    namespaces::check(view, &mut found);
    limits::check(view, &mut found);
    found
}

/// Findings from facts, and from failed probes.
pub(super) fn check_reachability(
    view: &FactsView<'_>,
    listeners: &[ProbeListener],
    failures: &[Failure],
) -> Report {
    let mut found = check(view);
    reachability::check(view, listeners, failures, &mut found);
    Report::new(found)
}
