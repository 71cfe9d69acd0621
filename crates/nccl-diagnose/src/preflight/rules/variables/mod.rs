//! Variables: those that have to agree, those that did not reach a host, those that contradict how this crate uses
//! NCCL, and those that NCCL does not read as intended.

mod agreement;
mod contradictions;
mod origin;
#[cfg(test)]
mod tests;
mod unread;

use agreement::agreement;
use contradictions::{contradictions, host_ids};
use unread::{files, late, names};

use super::view::{FactsView, shortened};
use nccl_base::report::{Finding, Severity};

pub(super) fn check(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    let before = found.len();
    agreement(view, found);
    contradictions(view, found);
    host_ids(view, found);
    names(view, found);
    files(view, found);
    late(view, found);
    if found.len() == before {
        let mut names: Vec<String> = view
            .processes()
            .flat_map(|(_, process)| process.variables.iter())
            .map(|variable| variable.name.clone())
            .collect();
        names.sort_unstable();
        names.dedup();
        let text = match names.is_empty() {
            true => String::from("no variable of NCCL is set"),
            false => format!("the variables of NCCL agree: {}", shortened(&names)),
        };
        let ranks: Vec<usize> = view.ranks().collect();
        found.push(view.about(&ranks, Finding::new(Severity::Ok, "variables", text)));
    }
}
