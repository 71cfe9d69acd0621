use super::super::view::FactsView;
use super::check;
use crate::preflight::facts::Facts;
use crate::preflight::tests::ranks_on;
use nccl_base::launch_mode::{LaunchMode, LaunchPreference};
use nccl_base::report::{Finding, Report, Severity};
use nccl_base::system::env_drift::DriftedVariable;
use nccl_base::system::variables::Variable;

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

fn checked(facts: &[Facts]) -> Report {
    let mut found = Vec::new();
    check(&FactsView::of(facts), &mut found);
    Report::new(found)
}

#[track_caller]
fn only(report: &Report) -> &Finding {
    match &report.findings[..] {
        [one] => one,
        other => panic!("{other:#?}"),
    }
}

#[test]
fn a_variable_that_differs_on_one_rank_is_an_error_that_names_it_and_both_values() {
    let mut facts = ranks_on(&["h1", "h1", "h2", "h2"]);
    set(&mut facts, &[0, 1, 2], "NCCL_ALGO", "Ring");
    set_in(&mut facts, &[3], "NCCL_ALGO", "Tree", "/etc/nccl.conf");
    let report = checked(&facts);
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
    let report = checked(&facts).to_string();
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
    let report = checked(&facts);
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
    assert!(checked(&facts).worst() == Severity::Ok);
}

#[test]
fn a_default_agrees_with_nothing_and_numbers_agree_however_they_are_written() {
    let mut facts = ranks_on(&["h1", "h2", "h3"]);
    set(&mut facts, &[0], "NCCL_P2P_DISABLE", "0");
    set(&mut facts, &[0, 1], "NCCL_BUFFSIZE", "4194304");
    set(&mut facts, &[2], "NCCL_BUFFSIZE", "0x400000");
    assert!(
        checked(&facts).worst() == Severity::Ok,
        "{}",
        checked(&facts)
    );
    set(&mut facts, &[1], "NCCL_P2P_DISABLE", "1");
    assert_eq!(checked(&facts).of(Severity::Error).count(), 1);
}

#[test]
fn of_two_hosts_that_differ_neither_is_blamed() {
    let mut facts = ranks_on(&["h1", "h2"]);
    set(&mut facts, &[0], "NCCL_PROTO", "LL");
    set(&mut facts, &[1], "NCCL_PROTO", "Simple");
    let report = checked(&facts);
    assert_eq!(only(&report).ranks, [0, 1]);
    set(&mut facts, &[0], "NCCL_NET", "Socket");
    let report = checked(&facts).to_string();
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
    let report = checked(&facts);
    assert!(
        report
            .to_string()
            .contains("NCCL_COMM_BLOCKING=0x1 (from /root/.nccl.conf)")
    );
    assert_eq!(only(&report).severity, Severity::Error);
    let mut facts = ranks_on(&["h1"]);
    set(&mut facts, &[0], "NCCL_COMM_BLOCKING", "0");
    assert!(checked(&facts).worst() == Severity::Ok);
    set(&mut facts, &[0], "NCCL_COMM_SPLIT_SHARE_RESOURCES", "1");
    assert_eq!(only(&checked(&facts)).severity, Severity::Warning);
    // `BlockingChild` needs both variables unset.
    for (variable, value) in [
        ("NCCL_COMM_BLOCKING", "0"),
        ("NCCL_COMM_BLOCKING", "1"),
        ("NCCL_COMM_SPLIT_SHARE_RESOURCES", "0"),
        ("NCCL_COMM_SPLIT_SHARE_RESOURCES", "1"),
    ] {
        let mut facts = ranks_on(&["h1"]);
        facts[0].launch_mode = LaunchPreference::Asked(LaunchMode::BlockingChild)
            .code()
            .into();
        set(&mut facts, &[0], variable, value);
        let report = checked(&facts);
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
        let report = checked(&facts);
        assert_eq!(only(&report).severity, Severity::Warning);
        assert!(report.to_string().contains(words), "{words:?} in {report}");
    }
    let mut facts = ranks_on(&["h1"]);
    set(&mut facts, &[0], "NCCL_MY_PLUGINS_OWN", "1");
    assert!(checked(&facts).worst() == Severity::Ok);
}

#[test]
fn one_host_id_on_two_machines_is_an_error() {
    let mut facts = ranks_on(&["h1", "h1", "h2"]);
    set(&mut facts, &[0, 1, 2], "NCCL_HOSTID", "a");
    let report = checked(&facts).to_string();
    assert!(
        report.contains("ranks 0,1 (h1), 2 (h2) have NCCL_HOSTID=a"),
        "{report}"
    );
}

#[test]
fn what_was_changed_when_nccl_had_read_it_is_a_warning() {
    let mut facts = ranks_on(&["h1", "h2"]);
    let late = |was: Option<&str>, is: Option<&str>| DriftedVariable {
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
        super::late(&FactsView::of(&facts), &mut found);
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
