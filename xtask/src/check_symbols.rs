//! `check-symbols`: compares the functions of real libraries with those that nccl-sys lists for their releases, and
//! with the emulator acting as each release; and the interface that each library takes with the one that preflight predicts,
//! on hosts that are network namespaces. Compares the functions of NCCL EP's libraries with the table of nccl-sys, and the
//! sizes of its structs with its header; its libraries also run on the emulator's driver, as far as they do.

use std::path::Path;
use std::process::Command;

use crate::arguments::Arguments;
use crate::wheels::Unavailable;
use crate::{Result, ep, header, workspace};

/// The variable of the tests about one real library.
const LIBRARY: &str = "NCCL_TEST_LIBRARY";
/// The binary of `nccl-tests`, and the module in it, with the test of the predicted interface.
const PREDICTION: (&str, &str) = ("tools", "preflight::real::");

const PREDICTED: &str = "crates/nccl-diagnose/src/preflight predicts";

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    let mut failed = Vec::new();
    for release in header::asked_for(arguments)? {
        for (what, mut command) in commands(&release.library) {
            if what == PREDICTED && !may_make_hosts() {
                println!(
                    "{:<8} NOT TESTED (needs root and ip): what {what}",
                    release.version
                );
                continue;
            }
            let outcome = workspace::run(&mut command);
            let verdict = match &outcome {
                Ok(()) => "as",
                Err(_) => "DIFFERENT (above) from what",
            };
            println!("{:<8} {verdict} {what}", release.version);
            if outcome.is_err() {
                failed.push(format!("what {what} of {}", release.version));
            }
        }
    }
    let of_ep = match of_ep() {
        // Unlike NCCL itself, it is a young package, without which a change can be judged.
        Err(error) if error.is::<Unavailable>() => {
            println!("{:<8} NOT TESTED: {error}", "NCCL EP");
            Ok(())
        }
        outcome => {
            let verdict = match &outcome {
                Ok(()) => "as the table says",
                Err(_) => "DIFFERENT (above)",
            };
            println!("{:<8} {verdict}", "NCCL EP");
            outcome
        }
    };
    if failed.is_empty() {
        return of_ep;
    }
    Err(format!("not true: {}", failed.join("; ")).into())
}

/// Whether this process can make network namespaces.
fn may_make_hosts() -> bool {
    let says = |program: &str, argument: &str| {
        let output = Command::new(program).arg(argument).output().ok()?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    says("id", "-u").is_some_and(|user| user == "0") && says("ip", "-V").is_some()
}

/// Returns the tests of one library, each with the source of the statements that it checks.
fn commands(library: &Path) -> [(&'static str, Command); 2] {
    let mut tables = workspace::cargo();
    tables
        .args(["test", "--quiet", "--package", "nccl-sys"])
        .args(["--test", "loader"])
        .args(["--package", "nccl-emulator", "--test", "real_symbols"])
        .args(["--", "real", "release", "--nocapture"]);
    let (binary, module) = PREDICTION;
    let mut prediction = workspace::cargo();
    prediction
        .args(["test", "--quiet", "--package", "nccl-tests"])
        .args(["--test", binary, module, "--", "--nocapture"]);
    let mut all = [
        (
            "nccl-sys/src/since.rs, nccl-emulator/tests/real_symbols.rs and the emulator say",
            tables,
        ),
        (PREDICTED, prediction),
    ];
    for (_, command) in &mut all {
        command.env(LIBRARY, library);
    }
    all
}

/// Checks NCCL EP's libraries for both versions of CUDA, with its header.
fn of_ep() -> Result {
    let release = ep::release()?;
    workspace::run(
        workspace::cargo()
            .args([
                "test",
                "--quiet",
                "--package",
                "nccl-sys",
                "--features",
                "nccl-sys/ep",
            ])
            .args([
                "--test",
                "ep",
                "--package",
                "nccl-emulator",
                "--test",
                "real_ep",
            ])
            .args(["--", "--nocapture"])
            .env("NCCL_HEADER", header::release()?.header)
            .env("NCCL_EP_HEADER", &release.header)
            .env("NCCL_EP_TEST_LIBRARIES", release.list())
            // The tests choose their NCCL themselves.
            .env_remove("NCCL_REAL_LIBRARIES"),
    )
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::fs;

    use super::*;

    #[test]
    fn the_prediction_of_preflight_is_compared_with_each_library() {
        let library = Path::new("/lib/libnccl.so.2");
        for (what, command) in &commands(library) {
            let mut variables = command.get_envs();
            let named = (OsStr::new(LIBRARY), Some(library.as_os_str()));
            assert!(variables.any(|variable| variable == named), "{what}");
        }
        // A filter that selects no test passes.
        let names = workspace::root().join("docs/results/test_names.txt");
        let names = fs::read_to_string(names).unwrap();
        let (binary, module) = PREDICTION;
        assert!(names.contains(&format!("\nnccl-tests {binary} {module}")));
        let [_, (_, command)] = &commands(library);
        let arguments: Vec<_> = command.get_args().collect();
        assert!(arguments.contains(&OsStr::new(module)));
    }
}
