//! The predicted interface is the one that NCCL takes: compared with a real library, which `NCCL_TEST_LIBRARY` names,
//! of any release; `cargo xtask check-symbols` fetches several and runs this. No GPU is needed.

use std::error::Error;

use nccl::preflight::{Settings, host};
use nccl::{Library, UniqueId};

use super::hosts::Kind::{Cable, Nowhere};
use super::hosts::{Hosts, Interface};

/// In the child: the prediction, and the log of the library.
pub(crate) fn ask() -> Result<String, Box<dyn Error>> {
    // The library reads its variables when it is first used, not on loading.
    // SAFETY: the variable names NVIDIA's library.
    let library = unsafe { Library::load_from(std::env::var("NCCL_TEST_LIBRARY_IN_CHILD")?) }?;
    let report =
        host(&Settings::default().with(|settings| settings.library = Some(library.clone())));
    let finding = report
        .findings
        .iter()
        .find(|finding| finding.check == "interface");
    let predicted = finding
        .ok_or("no finding about the interface")?
        .what
        .clone();
    let taken = UniqueId::new(&library).is_ok();
    Ok(format!("{} {taken} {predicted}", library.version()))
}

/// The interface and address in the library's log.
fn logged(text: &str) -> Option<(String, String)> {
    let line = text
        .lines()
        .find(|line| line.contains("Bootstrap") && line.contains("Using "))?;
    let (_, rest) = line.split_once("Using ")?;
    let (interface, address) = rest.split_once(':')?;
    Some((
        interface.to_owned(),
        address.split(['<', '%']).next()?.to_owned(),
    ))
}

#[test]
fn the_interface_that_nccl_takes_is_the_one_that_was_predicted() {
    use nccl_tools::gpu_check::verdict::Verdict;
    use std::io::Write as _;
    let left_out = |why: &str| {
        Verdict::NotTested(why.to_owned()).leave();
        // Not `eprintln!`, which the test harness would capture.
        let message = format!("NOT TESTED: {why}\n");
        std::io::stderr().write_all(message.as_bytes()).unwrap();
    };
    let Some(library) = std::env::var_os("NCCL_TEST_LIBRARY") else {
        return left_out("NCCL_TEST_LIBRARY names no real libnccl.so.2");
    };
    let library = library.to_str().expect("a path in UTF-8").to_owned();
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let file = write(
        "plain.conf",
        "# NCCL_SOCKET_IFNAME=eth0\nNCCL_SOCKET_IFNAME=eth1\nNCCL_SOCKET_IFNAME=ib\n",
    );
    let returns = write("returns.conf", "NCCL_SOCKET_IFNAME=eth1\r\n");
    let quoted = write("quoted.conf", "NCCL_SOCKET_IFNAME=\"eth1\"\n");
    let indented = write(
        "indented.conf",
        " NCCL_SOCKET_IFNAME=eth1\nexport NCCL_SOCKET_IFNAME=eth1\n",
    );
    write(".nccl.conf", "NCCL_SOCKET_IFNAME=eth10\n");
    let home = directory.path().to_str().unwrap();

    const DOCKER: Interface<'_> = ("docker0", Nowhere, &["172.17.0.1/16"]);
    const BRIDGE: Interface<'_> = ("br-7", Nowhere, &["172.18.0.1/16"]);
    const VIRTUAL: Interface<'_> = ("virbr0", Nowhere, &["192.168.122.1/24"]);
    const ETH0: Interface<'_> = ("eth0", Cable, &["10.77.0.1/24", "fd77::1/64"]);
    const ETH1: Interface<'_> = ("eth1", Cable, &["10.78.0.1/24"]);
    const ETH10: Interface<'_> = ("eth10", Cable, &["10.79.0.1/24"]);
    const IB: Interface<'_> = ("ibs3", Cable, &["10.80.0.1/24"]);
    const SIX: Interface<'_> = ("ens6", Cable, &["fd78::1/64"]);
    type Case<'a> = (&'a [Interface<'a>], &'a [&'a [(&'a str, &'a str)]]);
    const NONE: &[(&str, &str)] = &[];
    let ifname = |value: &'static str| [("NCCL_SOCKET_IFNAME", value)];
    let cases: &[Case<'_>] = &[
        (&[], &[NONE]),
        (&[VIRTUAL], &[NONE, &ifname("virbr")]),
        (&[DOCKER, VIRTUAL], &[NONE]),
        (&[BRIDGE, ETH0], &[NONE, &ifname("eth0")]),
        (
            &[DOCKER, ETH0],
            &[
                NONE,
                &ifname("^eth"),
                &ifname("^docker,lo,eth"),
                &ifname("lo"),
            ],
        ),
        (
            &[SIX, ETH0],
            &[NONE, &ifname("ens6"), &[("NCCL_SOCKET_FAMILY", "AF_INET6")]],
        ),
        (
            &[ETH0, ETH10, ETH1, IB],
            &[
                NONE,
                &ifname("eth1"),
                &ifname("=eth1"),
                &ifname("=eth"),
                &ifname("^ib,eth0"),
                &ifname("^=eth0,lo"),
                &ifname("e"),
                &ifname(""),
                &ifname("nope,eth1"),
                &ifname("eth10:7"),
                &ifname("nope"),
                &[("NCCL_SOCKET_FAMILY", "AF_INET6")],
                &[
                    ("NCCL_SOCKET_FAMILY", "inet6"),
                    ("NCCL_SOCKET_IFNAME", "eth"),
                ],
                &[("NCCL_COMM_ID", "10.78.0.200:4000")],
                &[
                    ("NCCL_COMM_ID", "10.78.0.200:4000"),
                    ("NCCL_SOCKET_IFNAME", "eth0"),
                ],
                &[("NCCL_COMM_ID", "[fd77::9]:4000")],
                &[("NCCL_COMM_ID", "10.99.0.1:4000")],
                &[("NCCL_CONF_FILE", &file)],
                &[("NCCL_CONF_FILE", &file), ("NCCL_SOCKET_IFNAME", "eth0")],
                &[("NCCL_CONF_FILE", &returns)],
                &[("NCCL_CONF_FILE", &quoted)],
                &[("NCCL_CONF_FILE", &indented)],
                &[("HOME", home)],
            ],
        ),
    ];
    let mut asked = 0;
    for (interfaces, variables) in cases {
        let Some(hosts) = Hosts::new(&[interfaces]) else {
            return left_out("hosts that are namespaces need root, and ip of iproute2");
        };
        for variables in *variables {
            let mut more = vec![
                ("NCCL_TEST_LIBRARY_IN_CHILD", &library[..]),
                ("NCCL_DEBUG", "INFO"),
                ("NCCL_DEBUG_SUBSYS", "ALL"),
            ];
            more.extend(variables.iter().copied());
            let rank = hosts.start(0, 0, 1, "what a real library takes", &more);
            let output = rank.wait_with_output().expect("its output");
            let text = String::from_utf8_lossy(&output.stdout);
            let result = text.lines().find_map(|line| line.split_once("result: "));
            let (_, result) = result.unwrap_or_else(|| panic!("no result in {text}"));
            let case = format!(
                "{variables:?} among {:?}",
                interfaces.iter().map(|i| i.0).collect::<Vec<_>>()
            );
            // Older releases do not support such files, or their ends of lines, and ask the system for the user's
            // directory.
            let (version, result) = result.split_once(' ').expect("a version");
            let since = |since: &[u32]| {
                let numbers: Vec<u32> = version
                    .split('.')
                    .map(|part| part.parse().unwrap())
                    .collect();
                &numbers[..] >= since
            };
            let needed: &[u32] = match variables {
                [("NCCL_CONF_FILE", path), ..] if *path == returns => &[2, 30, 3],
                [("NCCL_CONF_FILE", _), ..] => &[2, 23, 4],
                [("HOME", _)] => &[2, 30, 3],
                _ => &[],
            };
            if !since(needed) {
                continue;
            }
            match logged(&text) {
                Some((interface, address)) => {
                    let expected = format!("NCCL takes {address} on {interface} ");
                    assert!(
                        result.contains(&expected),
                        "{case}: {expected:?}, and predicted was {result:?}"
                    );
                }
                None => assert!(
                    result.starts_with("false") && result.contains("NCCL finds no interface"),
                    "{case}: NCCL took none, and predicted was {result:?}: {text}"
                ),
            }
            asked += 1;
        }
    }
    assert!(asked > 25, "{asked}");
}
