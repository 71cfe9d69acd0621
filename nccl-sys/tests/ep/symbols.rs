//! The symbols of NVIDIA's builds: `NCCL_EP_TEST_LIBRARIES` names them, with `:` between. `cargo xtask check-symbols` sets it.
//! They are read from the files: loading one takes a CUDA driver.

use std::collections::BTreeSet;
use std::env;
use std::io::Write as _;
use std::process::Command;

use nccl_sys::ep::Api;

#[test]
fn each_build_of_nccl_ep_has_exactly_the_functions_of_the_table() {
    let builds = env::var("NCCL_EP_TEST_LIBRARIES").unwrap_or_default();
    let builds: Vec<_> = builds.split(':').filter(|file| !file.is_empty()).collect();
    if builds.is_empty() {
        // Not `eprintln!`, which the test harness would swallow.
        let message = b"NOT TESTED: NCCL_EP_TEST_LIBRARIES names no libnccl_ep.so\n";
        std::io::stderr().write_all(message).unwrap();
        return;
    }
    let table: BTreeSet<_> = Api::NAMES.iter().copied().collect();
    for build in builds {
        let output = Command::new("nm")
            .args(["--dynamic", "--defined-only", "--format=posix", build])
            .output()
            .expect("`nm`, which comes with a C compiler, is needed");
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        // Names of C++ begin with `_Z`.
        let found: BTreeSet<_> = text
            .lines()
            .filter_map(|line| line.split(' ').next())
            .filter(|name| name.starts_with("nccl"))
            .collect();
        assert_eq!(found, table, "{build}");
        println!("{build}: {} functions", found.len());
    }
}
