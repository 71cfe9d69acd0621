//! Variables: those that have to agree, those that did not reach a host, those that contradict how this
//! crate uses NCCL, and those that NCCL does not know.

use std::collections::BTreeMap;

use super::view::{View, shortened};
use crate::communicator::LaunchMode;
use crate::preflight::known::{self, Agreement};
use crate::preflight::report::{Finding, Severity};
use crate::preflight::variables::{Variable, number};

pub(super) fn judge(view: &View<'_>, found: &mut Vec<Finding>) {
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

/// A value as NCCL takes it, and `None` for a variable that is not set or set to what NCCL takes anyway.
fn taken(name: &str, value: Option<&str>) -> Option<String> {
    let value = value.filter(|value| !value.is_empty())?;
    let known = known::find(name);
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

/// Variables in which the same ranks are odd, which have the same cause more often than not.
struct Odd {
    ranks: Vec<usize>,
    /// Whether these ranks do not have them, and all others do.
    missing: bool,
    names: Vec<String>,
    texts: Vec<String>,
    agreement: Agreement,
}

fn agreement(view: &View<'_>, found: &mut Vec<Finding>) {
    let mut names: BTreeMap<&str, Agreement> = BTreeMap::new();
    for (_, process) in view.processes() {
        for variable in &process.variables {
            if let Some(known) = known::find(&variable.name) {
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
            // Hosts may have other values, but one without any is one that nobody thought of.
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
                    Some(variable) => written(variable),
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
                    example.map_or_else(String::new, written)
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

fn describe(view: &View<'_>, odd: &Odd) -> Finding {
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

/// `NCCL_ALGO=Ring (from /etc/nccl.conf)`.
fn written(variable: &Variable) -> String {
    format!(
        "{}={} (from {})",
        variable.name,
        variable.value,
        variable.origin()
    )
}

/// Whether all ranks of some hosts lack a variable that all ranks of others have.
fn is_missing_on_whole_hosts(view: &View<'_>, name: &str) -> bool {
    let lacking: Vec<usize> = view
        .ranks()
        .filter(|&rank| !is_set(view, rank, name))
        .collect();
    !lacking.is_empty() && are_whole_hosts(view, &lacking)
}

fn is_set(view: &View<'_>, rank: usize, name: &str) -> bool {
    let value = view.process(rank).and_then(|process| process.value(name));
    value.is_some_and(|value| !value.is_empty())
}

/// Whether these are all ranks of some hosts, and not all ranks.
fn are_whole_hosts(view: &View<'_>, ranks: &[usize]) -> bool {
    let hosts = view.hosts(ranks);
    let on_them = |rank: &usize| hosts.iter().any(|host| host == view.host(*rank));
    let count = view.ranks().filter(on_them).count();
    count == ranks.len() && ranks.len() < view.ranks().count()
}

/// What contradicts the way in which this crate calls NCCL.
fn contradictions(view: &View<'_>, found: &mut Vec<Finding>) {
    let with = |name: &'static str, is_bad: &dyn Fn(i64) -> bool| {
        view.groups(|rank| {
            if mode_of(view, rank) != Some(LaunchMode::NonBlocking) {
                return None;
            }
            let variable = view.process(rank)?.variable(name)?;
            number(&variable.value).filter(|&value| is_bad(value))?;
            Some(written(variable))
        })
    };
    for (text, ranks) in with("NCCL_COMM_BLOCKING", &|value| value == 1) {
        let who = view.who(&ranks);
        let what = format!(
            "{who}: {text} makes every call of NCCL block without a deadline, whatever a program asks for"
        );
        let finding = Finding::error("launch-mode", what)
            .fix("unset NCCL_COMM_BLOCKING, in that file or variable");
        found.push(view.about(&ranks, finding));
    }
    for (text, ranks) in with("NCCL_COMM_SPLIT_SHARE_RESOURCES", &|value| value != 0) {
        let who = view.who(&ranks);
        let what = format!(
            "{who}: {text} makes a communicator and those that NCCL splits from it be aborted together; this \
             crate makes its own splits apart from each other, those of other code are not"
        );
        let finding =
            Finding::warning("launch-mode", what).fix("unset NCCL_COMM_SPLIT_SHARE_RESOURCES");
        found.push(view.about(&ranks, finding));
    }
    for name in ["NCCL_COMM_BLOCKING", "NCCL_COMM_SPLIT_SHARE_RESOURCES"] {
        let contradicting = view.groups(|rank| {
            let mode = mode_of(view, rank).filter(|&mode| mode != LaunchMode::NonBlocking)?;
            let variable = view.process(rank)?.variable(name)?;
            let does = mode.contradiction_of(name, &variable.value)?;
            Some(format!("{} {does}", written(variable)))
        });
        for (text, ranks) in contradicting {
            let finding = Finding::error("launch-mode", format!("{}: {text}", view.who(&ranks)))
                .fix(format!("unset {name}, in that file or variable"));
            found.push(view.about(&ranks, finding));
        }
    }
}

fn mode_of(view: &View<'_>, rank: usize) -> Option<LaunchMode> {
    let code = u8::try_from(view.facts(rank).launch_mode).ok()?;
    LaunchMode::of_code(code)
}

/// One name for two machines makes NCCL look for memory that they do not share.
fn host_ids(view: &View<'_>, found: &mut Vec<Finding>) {
    for (id, ranks) in
        view.groups(|rank| view.process(rank)?.value("NCCL_HOSTID").map(str::to_owned))
    {
        let boots = view.groups(|rank| {
            ranks.binary_search(&rank).ok()?;
            Some(view.process(rank)?.boot.clone())
        });
        if boots.len() > 1 {
            let what = format!(
                "{} have NCCL_HOSTID={id}, which tells NCCL that they share a machine, and they run on {} of \
                 them",
                view.who(&ranks),
                boots.len()
            );
            let finding = Finding::error("host-id", what)
                .fix("give every machine an NCCL_HOSTID of its own, or unset it");
            found.push(view.about(&ranks, finding));
        }
    }
}

fn names(view: &View<'_>, found: &mut Vec<Finding>) {
    let unknown = |variable: &Variable| match &variable.name[..] {
        // A file's names are taken as they are written.
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
        name if known::is_removed(name) => Some((
            format!("{} does nothing since NCCL 2.5", written(variable)),
            format!("unset {name}; NCCL_ALGO and NCCL_PROTO choose now"),
        )),
        name if known::find(name).is_none() => {
            let meant = known::closest(name)?;
            Some((
                format!("{} is no variable of NCCL", written(variable)),
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

/// A shell takes quotes away, and NCCL does not.
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

fn files(view: &View<'_>, found: &mut Vec<Finding>) {
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

fn late(view: &View<'_>, found: &mut Vec<Finding>) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::facts::Facts;
    use crate::preflight::late::Late;
    use crate::preflight::report::Report;
    use crate::preflight::tests::ranks_on;

    fn set(facts: &mut [Facts], ranks: &[usize], name: &str, value: &str) {
        set_in(facts, ranks, name, value, "");
    }

    fn set_in(facts: &mut [Facts], ranks: &[usize], name: &str, value: &str, file: &str) {
        for &rank in ranks {
            let process = facts[rank].process.as_mut().unwrap();
            process.variables.push(Variable {
                name: name.to_owned(),
                value: value.to_owned(),
                file: file.to_owned(),
            });
        }
    }

    fn judged(facts: &[Facts]) -> Report {
        let mut found = Vec::new();
        judge(&View::of(facts), &mut found);
        Report::new(found)
    }

    #[track_caller]
    fn only(report: &Report) -> &Finding {
        match report.findings() {
            [one] => one,
            other => panic!("{other:#?}"),
        }
    }

    #[test]
    fn a_variable_that_differs_on_one_rank_is_an_error_that_names_it_and_both_values() {
        let mut facts = ranks_on(&["h1", "h1", "h2", "h2"]);
        set(&mut facts, &[0, 1, 2], "NCCL_ALGO", "Ring");
        set_in(&mut facts, &[3], "NCCL_ALGO", "Tree", "/etc/nccl.conf");
        let report = judged(&facts);
        let finding = only(&report);
        assert_eq!(
            (finding.severity, &finding.ranks[..]),
            (Severity::Error, &[3][..])
        );
        assert_eq!(finding.hosts, ["h2"]);
        for words in [
            "rank 3 (h2) NCCL_ALGO=Tree (from /etc/nccl.conf)",
            "the other 3 ranks (h1, h2) NCCL_ALGO=Ring (from the process's environment)",
            "give NCCL_ALGO the same value",
        ] {
            assert!(report.to_string().contains(words), "{words:?} in {report}");
        }
    }

    #[test]
    fn variables_that_a_whole_host_lacks_did_not_reach_it() {
        let mut facts = ranks_on(&["h1", "h2", "h3"]);
        set(&mut facts, &[0, 2], "NCCL_SOCKET_IFNAME", "bond0");
        set(&mut facts, &[0, 2], "NCCL_PROTO", "Simple");
        set(&mut facts, &[0, 2], "NCCL_BUFFSIZE", "1048576");
        let report = judged(&facts).to_string();
        for words in [
            "error (variables-differ): the environment did not reach host h2: rank 1 (h2) without \
             NCCL_BUFFSIZE",
            "without NCCL_PROTO",
            "export NCCL_BUFFSIZE=1048576 NCCL_PROTO=Simple on host h2",
            "warning (variables-differ): the environment did not reach host h2: rank 1 (h2) without \
             NCCL_SOCKET_IFNAME, the other 2 ranks (h1, h3) with NCCL_SOCKET_IFNAME=bond0",
        ] {
            assert!(report.contains(words), "{words:?} in {report}");
        }
    }

    #[test]
    fn a_variable_that_only_the_first_host_has_did_not_reach_the_others() {
        let mut facts = ranks_on(&["h1", "h2", "h3"]);
        set(&mut facts, &[0], "NCCL_SOCKET_IFNAME", "bond0");
        let report = judged(&facts);
        assert_eq!(only(&report).ranks, [1, 2]);
        let text = "did not reach host h2, h3: ranks 1 (h2), 2 (h3) without NCCL_SOCKET_IFNAME";
        assert!(report.to_string().contains(text), "{report}");
    }

    #[test]
    fn hosts_may_name_other_interfaces_and_debug_as_they_like() {
        let mut facts = ranks_on(&["h1", "h2"]);
        set(&mut facts, &[0], "NCCL_SOCKET_IFNAME", "eth0");
        set(&mut facts, &[1], "NCCL_SOCKET_IFNAME", "ens3");
        set(&mut facts, &[1], "NCCL_DEBUG", "INFO");
        assert!(judged(&facts).is_fine());
    }

    #[test]
    fn a_default_agrees_with_nothing_and_numbers_agree_however_they_are_written() {
        let mut facts = ranks_on(&["h1", "h2", "h3"]);
        set(&mut facts, &[0], "NCCL_P2P_DISABLE", "0");
        set(&mut facts, &[0, 1], "NCCL_BUFFSIZE", "4194304");
        set(&mut facts, &[2], "NCCL_BUFFSIZE", "0x400000");
        assert!(judged(&facts).is_fine(), "{}", judged(&facts));
        set(&mut facts, &[1], "NCCL_P2P_DISABLE", "1");
        assert_eq!(judged(&facts).errors().count(), 1);
    }

    #[test]
    fn of_two_hosts_that_differ_neither_is_blamed() {
        let mut facts = ranks_on(&["h1", "h2"]);
        set(&mut facts, &[0], "NCCL_PROTO", "LL");
        set(&mut facts, &[1], "NCCL_PROTO", "Simple");
        let report = judged(&facts);
        assert_eq!(only(&report).ranks, [0, 1]);
        set(&mut facts, &[0], "NCCL_NET", "Socket");
        let report = judged(&facts).to_string();
        assert!(report.contains("rank 0 (h1) NCCL_NET=Socket"), "{report}");
        assert!(report.contains("rank 1 (h2) without NCCL_NET"), "{report}");
    }

    #[test]
    fn what_contradicts_the_launch_mode_is_found_in_files_too() {
        let mut facts = ranks_on(&["h1", "h2"]);
        set_in(
            &mut facts,
            &[0, 1],
            "NCCL_COMM_BLOCKING",
            "0x1",
            "/root/.nccl.conf",
        );
        let report = judged(&facts);
        assert!(
            report
                .to_string()
                .contains("NCCL_COMM_BLOCKING=0x1 (from /root/.nccl.conf)")
        );
        assert_eq!(only(&report).severity, Severity::Error);
        let mut facts = ranks_on(&["h1"]);
        set(&mut facts, &[0], "NCCL_COMM_BLOCKING", "0");
        assert!(judged(&facts).is_fine());
        set(&mut facts, &[0], "NCCL_COMM_SPLIT_SHARE_RESOURCES", "1");
        assert_eq!(only(&judged(&facts)).severity, Severity::Warning);
        // In the other mode both have to be as they are without these variables.
        for (variable, value) in [
            ("NCCL_COMM_BLOCKING", "0"),
            ("NCCL_COMM_BLOCKING", "1"),
            ("NCCL_COMM_SPLIT_SHARE_RESOURCES", "0"),
            ("NCCL_COMM_SPLIT_SHARE_RESOURCES", "1"),
        ] {
            let mut facts = ranks_on(&["h1"]);
            facts[0].launch_mode = LaunchMode::KillSwitch.code().into();
            set(&mut facts, &[0], variable, value);
            let report = judged(&facts);
            assert_eq!(only(&report).severity, Severity::Error, "{report}");
        }
    }

    #[test]
    fn names_and_values_that_nccl_takes_otherwise_than_they_were_meant_are_warned_of() {
        for (name, value, words) in [
            (
                "NCCL_SOCKET_IFNAMES",
                "eth0",
                "did you mean NCCL_SOCKET_IFNAME?",
            ),
            (
                "export NCCL_ALGO",
                "Ring",
                "write NCCL_ALGO=Ring at the beginning",
            ),
            (
                " NCCL_ALGO",
                "Ring",
                "write NCCL_ALGO=Ring at the beginning",
            ),
            (
                "NCCL_SOCKET_IFNAME",
                "\"eth0\"",
                "write NCCL_SOCKET_IFNAME=eth0",
            ),
            ("NCCL_TREE_THRESHOLD", "0", "does nothing"),
        ] {
            let mut facts = ranks_on(&["h1"]);
            set_in(&mut facts, &[0], name, value, "/etc/nccl.conf");
            let report = judged(&facts);
            assert_eq!(only(&report).severity, Severity::Warning);
            assert!(report.to_string().contains(words), "{words:?} in {report}");
        }
        let mut facts = ranks_on(&["h1"]);
        set(&mut facts, &[0], "NCCL_MY_PLUGINS_OWN", "1");
        assert!(judged(&facts).is_fine());
    }

    #[test]
    fn one_host_id_on_two_machines_is_an_error() {
        let mut facts = ranks_on(&["h1", "h1", "h2"]);
        set(&mut facts, &[0, 1, 2], "NCCL_HOSTID", "a");
        let report = judged(&facts).to_string();
        assert!(
            report.contains("ranks 0,1 (h1), 2 (h2) have NCCL_HOSTID=a"),
            "{report}"
        );
    }

    #[test]
    fn what_was_changed_when_nccl_had_read_it_is_a_warning() {
        let mut facts = ranks_on(&["h1", "h2"]);
        let late = |was: Option<&str>, is: Option<&str>| Late {
            name: String::from("NCCL_ALGO"),
            was: was.map(str::to_owned),
            is: is.map(str::to_owned),
        };
        for (late, words) in [
            (
                late(Some("Ring"), Some("Tree")),
                "NCCL_ALGO=Tree was set after NCCL had been started in this process, which keeps NCCL_ALGO=Ring",
            ),
            (late(None, Some("Tree")), "which does not see it"),
            (late(Some("Ring"), None), "NCCL_ALGO was unset after"),
        ] {
            facts[1].process.as_mut().unwrap().late = vec![late];
            let mut found = Vec::new();
            super::late(&View::of(&facts), &mut found);
            let [finding] = &found[..] else {
                panic!("{found:?}");
            };
            assert_eq!(
                (finding.severity, &finding.ranks[..]),
                (Severity::Warning, &[1][..])
            );
            assert!(finding.what.contains(words), "{finding}");
        }
    }
}
