//! Variables and files that NCCL does not read, or not as intended: with a wrong name, with quotes, or set too late.

use std::collections::BTreeMap;

use super::super::view::FactsView;
use super::origin::with_origin;
use nccl_base::report::Finding;
use nccl_base::system::nccl_variables;
use nccl_base::system::variables::Variable;

pub(super) fn names(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    let unknown = |variable: &Variable| match &variable.name[..] {
        // NCCL takes the names in a file with their blanks.
        name if name.trim() != name || name.contains(char::is_whitespace) => {
            let last = name.split_whitespace().last().unwrap_or_default();
            Some((
                format!(
                    "{name:?} in {} is no variable to NCCL, which takes blanks and words before the = for a \
                         part of the name",
                    variable.origin()
                ),
                format!(
                    "write {last}={} at the beginning of the line",
                    variable.value.trim()
                ),
            ))
        }
        name if nccl_variables::is_removed(name) => Some((
            format!("{} does nothing since NCCL 2.5", with_origin(variable)),
            format!("unset {name}; NCCL_ALGO and NCCL_PROTO choose now"),
        )),
        name if nccl_variables::find(name).is_none() => {
            let meant = nccl_variables::closest(name)?;
            Some((
                format!("{} is no variable of NCCL", with_origin(variable)),
                format!("did you mean {meant}?"),
            ))
        }
        _ => quoted(variable),
    };
    let mut seen: BTreeMap<(String, String), Vec<usize>> = BTreeMap::new();
    for rank in view.ranks() {
        for variable in view
            .process(rank)
            .iter()
            .flat_map(|process| &process.variables)
        {
            if let Some(pair) = unknown(variable) {
                seen.entry(pair).or_default().push(rank);
            }
        }
    }
    for ((what, fix), ranks) in seen {
        let what = format!("{}: {what}", view.who(&ranks));
        found.push(view.about(&ranks, Finding::warning("variable-names", what).fix(fix)));
    }
}

/// A shell removes quotes, and NCCL does not.
fn quoted(variable: &Variable) -> Option<(String, String)> {
    let value = &variable.value;
    let bare = value.trim().trim_matches(['"', '\'']);
    let is_meant = variable.name.ends_with("_FORMAT") || variable.name.ends_with("_FILE");
    if bare == value || is_meant {
        return None;
    }
    Some((
        format!(
            "{}={value:?} in {} has blanks or quotes, which belong to the value",
            variable.name,
            variable.origin()
        ),
        format!("write {}={bare}", variable.name),
    ))
}

pub(super) fn files(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    for (path, ranks) in view.groups(|rank| view.process(rank)?.missing_file.clone()) {
        let what = format!(
            "{}: NCCL_CONF_FILE names {path}, which cannot be read; NCCL goes on without a word, and without \
             ~/.nccl.conf",
            view.who(&ranks)
        );
        let finding = Finding::warning("variable-files", what).fix(format!(
            "put the file at {path} on every host, or unset NCCL_CONF_FILE"
        ));
        found.push(view.about(&ranks, finding));
    }
}

pub(super) fn late(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    let mut seen: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for rank in view.ranks() {
        for late in view.process(rank).iter().flat_map(|process| &process.late) {
            let name = &late.name;
            let now = match &late.is {
                Some(is) => format!("{name}={is} was set"),
                None => format!("{name} was unset"),
            };
            let keeps = match &late.was {
                Some(was) => format!("keeps {name}={was}"),
                None => String::from("does not see it"),
            };
            let what = format!("{now} after NCCL had been started in this process, which {keeps}");
            seen.entry(what).or_default().push(rank);
        }
    }
    for (what, ranks) in seen {
        let what = format!("{}: {what}", view.who(&ranks));
        let finding = Finding::warning("variable-late", what).fix(
            "set NCCL's variables before the process starts, and start it again to change them",
        );
        found.push(view.about(&ranks, finding));
    }
}
