//! Variables that have to agree on all ranks, and variables that did not reach a host.

use std::collections::BTreeMap;

use super::super::view::{FactsView, shortened};
use super::origin::with_origin;
use nccl_base::report::{Finding, Severity};
use nccl_base::system::nccl_variables::{self, Agreement};
use nccl_base::system::variables::number;

/// The value as NCCL takes it; `None` for a variable that is not set or has the default value.
fn taken(name: &str, value: Option<&str>) -> Option<String> {
    let value = value.filter(|value| !value.is_empty())?;
    let known = nccl_variables::find(name);
    let Some(taken) = number(value) else {
        return Some(value.to_owned());
    };
    if known.and_then(|known| known.default) == Some(taken) {
        return None;
    }
    // `010` and `8` are the same number, but a list of numbers is no number.
    let is_number = value
        .trim()
        .chars()
        .all(|c| c.is_ascii_hexdigit() || "xX+-".contains(c));
    Some(if is_number {
        taken.to_string()
    } else {
        value.to_owned()
    })
}

/// Variables that differ on the same ranks, which mostly have the same cause.
struct Odd {
    ranks: Vec<usize>,
    /// Whether these ranks lack the variables, and all others have them.
    missing: bool,
    names: Vec<String>,
    texts: Vec<String>,
    agreement: Agreement,
}

pub(super) fn agreement(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    let mut names: BTreeMap<&str, Agreement> = BTreeMap::new();
    for (_, process) in view.processes() {
        for variable in &process.variables {
            if let Some(known) = nccl_variables::find(&variable.name) {
                names.insert(&variable.name, known.agreement);
            }
        }
    }
    let mut odds: Vec<Odd> = Vec::new();
    for (name, agreement) in names {
        let groups = view.groups(|rank| {
            let process = view.process(rank)?;
            Some(taken(name, process.value(name)))
        });
        if groups.len() < 2 {
            continue;
        }
        let set = |rank: usize| view.process(rank)?.variable(name);
        let missing =
            groups.len() == 2 && groups[1].0.is_none() && groups[0].1.len() > groups[1].1.len();
        let relevant = match agreement {
            Agreement::Must | Agreement::Should => true,
            // Values may differ by host, but a host without a value was probably forgotten.
            Agreement::PerHost => is_missing_on_whole_hosts(view, name),
            Agreement::Free => false,
        };
        if !relevant {
            continue;
        }
        let said = |value: &Option<String>| match value {
            None => format!("without {name}"),
            Some(_) => {
                let of = groups.iter().find(|(other, _)| other == value);
                match of.and_then(|(_, ranks)| set(ranks[0])) {
                    Some(variable) => with_origin(variable),
                    None => format!("without {name}"),
                }
            }
        };
        let (ranks, text) = match agreement {
            Agreement::PerHost => {
                let (having, lacking): (Vec<usize>, Vec<usize>) =
                    view.ranks().partition(|&rank| is_set(view, rank, name));
                let example = having.first().and_then(|&rank| set(rank));
                let text = format!(
                    "{} without {name}, {} with {}",
                    view.who(&lacking),
                    view.others(&having),
                    example.map_or_else(String::new, with_origin)
                );
                (lacking, text)
            }
            _ => view.contrast(&groups, said),
        };
        let missing = missing || agreement == Agreement::PerHost;
        let same = odds.iter_mut().find(|odd| {
            (&odd.ranks, odd.missing, odd.agreement) == (&ranks, missing, agreement) && missing
        });
        match same {
            Some(odd) => {
                odd.names.push(name.to_owned());
                odd.texts.push(text);
            }
            None => odds.push(Odd {
                ranks,
                missing,
                names: vec![name.to_owned()],
                texts: vec![text],
                agreement,
            }),
        }
    }
    for odd in odds {
        found.push(view.about(&odd.ranks, describe(view, &odd)));
    }
}

fn describe(view: &FactsView<'_>, odd: &Odd) -> Finding {
    let hosts = shortened(&view.hosts(&odd.ranks));
    let lines: Vec<String> = odd
        .names
        .iter()
        .filter_map(|name| {
            let mut values = view
                .processes()
                .filter_map(|(_, process)| process.value(name));
            Some(format!("{name}={}", values.next()?))
        })
        .collect();
    let whole_hosts = are_whole_hosts(view, &odd.ranks);
    let (what, fix) = match (odd.missing, whole_hosts) {
        (true, true) => (
            format!(
                "the environment did not reach host {hosts}: {}",
                odd.texts.join("; ")
            ),
            match odd.agreement {
                Agreement::PerHost => format!(
                    "pass {} on to every host, with the name that the interface or adapter has there (export \
                     {})",
                    odd.names.join(" and "),
                    lines.join(" ")
                ),
                _ => format!(
                    "export {} on host {hosts}, or write it to /etc/nccl.conf there",
                    lines.join(" ")
                ),
            },
        ),
        _ => (
            format!("the ranks disagree: {}", odd.texts.join("; ")),
            format!(
                "give {} the same value on every rank, or unset it everywhere",
                odd.names.join(" and ")
            ),
        ),
    };
    let severity = match odd.agreement {
        Agreement::Must => Severity::Error,
        _ => Severity::Warning,
    };
    Finding::new(severity, "variables-differ", what).fix(fix)
}

/// Whether all ranks of some hosts lack a variable that all ranks of others have.
fn is_missing_on_whole_hosts(view: &FactsView<'_>, name: &str) -> bool {
    let lacking: Vec<usize> = view
        .ranks()
        .filter(|&rank| !is_set(view, rank, name))
        .collect();
    !lacking.is_empty() && are_whole_hosts(view, &lacking)
}

fn is_set(view: &FactsView<'_>, rank: usize, name: &str) -> bool {
    let value = view.process(rank).and_then(|process| process.value(name));
    value.is_some_and(|value| !value.is_empty())
}

/// Whether `ranks` are all ranks of some hosts, and not all ranks.
fn are_whole_hosts(view: &FactsView<'_>, ranks: &[usize]) -> bool {
    let hosts = view.hosts(ranks);
    let on_them = |rank: &usize| hosts.iter().any(|host| host == view.host(*rank));
    let count = view.ranks().filter(on_them).count();
    count == ranks.len() && ranks.len() < view.ranks().count()
}
