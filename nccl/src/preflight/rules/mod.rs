//! The rules that compare facts: from all ranks' facts to findings, in one process, without looking at
//! anything else.
//!
//! - `view`: all ranks side by side, who is odd among them, and how they are named;
//! - one file for each kind of rule.

mod limits;
mod variables;
mod versions;
mod view;

pub(super) use view::View;

use super::report::Report;

/// What follows from facts alone.
pub(super) fn judge(view: &View<'_>) -> Report {
    let mut found = Vec::new();
    versions::judge(view, &mut found);
    variables::judge(view, &mut found);
    limits::judge(view, &mut found);
    Report::new(found)
}
