//! `conformance`: compares the emulator with NVIDIA's libraries.
//!
//! On a release that the emulator's driver supports, all programs run, and the emulator's own NCCL runs them as the same
//! release. On any other release, and on another CPU, only those programs run that use the library alone: without a driver it
//! still loads, counts group calls, creates unique ids and checks arguments. Every difference is either listed in
//! `src/conformance/intended.rs` or a failure. `--page FILE` writes the tables.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::arguments::Arguments;
use crate::workspace::{self, cargo, run as run_command};
use crate::{Result, header, real_nccl};

/// The beginning of the page.
const HEAD: &str = "\
# The emulator beside NVIDIA's NCCL

Written by `cargo xtask conformance --all --page docs/results/real_nccl.md`: do not edit.

Small programs call NCCL's functions and note what they observe: codes, texts of errors, what arrived, what hangs. They run on
NVIDIA's library, which the emulator's driver carries, and on the emulator's own NCCL as the same release. A row of a
table is an observation that is not equal. *Stricter*: the emulator refuses or waits where NCCL may go on. *Kinder*: it goes on
where NCCL refuses or hangs.
";

/// A library, and how it runs.
struct Subject {
    name: String,
    library: PathBuf,
    /// Whether the library runs on the emulator's driver, with all programs.
    carried: bool,
}

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    let page = arguments.path("--page")?;
    let subjects: Vec<Subject> = match arguments.path("--library")? {
        Some(library) => {
            arguments.finish()?;
            vec![Subject {
                name: library.display().to_string(),
                library,
                carried: false,
            }]
        }
        None => header::asked_for(arguments)?
            .into_iter()
            .map(|release| Subject {
                name: format!("NCCL {}", release.version),
                carried: real_nccl::carries(&release.version),
                library: release.library,
            })
            .collect(),
    };
    let package = ["--package", "nccl-tools", "--features", "real-nccl"];
    run_command(
        cargo()
            .arg("build")
            .args(package)
            .args(["--bin", "conformance"]),
    )?;
    let program = workspace::target_directory().join("debug/conformance");
    let mut different = Vec::new();
    let mut text = HEAD.to_owned();
    for subject in subjects {
        let name = &subject.name;
        eprintln!("{name} and the emulator:");
        let (table, equal) = compare(&program, &subject)?;
        eprint!("{table}");
        let extent = match subject.carried {
            true => "All programs.",
            false => "Programs that need no device.",
        };
        // Angle brackets in NCCL's texts are not HTML.
        let table = table.replace('<', "&lt;");
        write!(text, "\n## {name}\n\n{extent} {table}")?;
        if !equal {
            different.push(subject.name);
        }
    }
    if let Some(page) = page {
        fs::write(&page, text)
            .map_err(|error| format!("cannot write {}: {error}", page.display()))?;
    }
    if different.is_empty() {
        return Ok(());
    }
    Err(format!(
        "the emulator differs from {} where nobody meant it to; see the tables",
        different.join(", ")
    )
    .into())
}

/// Returns the table of one library, and whether all its differences are intended.
fn compare(program: &Path, subject: &Subject) -> Result<(String, bool)> {
    let directory = tempfile::tempdir()?;
    let [theirs, ours] =
        ["library", "emulator"].map(|name| directory.path().join(format!("{name}.json")));
    let run = |out: &Path, prepare: &dyn Fn(&mut Command)| {
        let mut command = Command::new(program);
        command.args(["run", "--out"]).arg(out);
        if !subject.carried {
            command.arg("--library-only");
        }
        for variable in [
            "NCCL_DEBUG",
            "NCCL_LIBRARY",
            "NCCL_EMULATOR_NCCL",
            "NCCL_EMULATOR_VERSION",
        ] {
            command.env_remove(variable);
        }
        command
            .env("NCCL_NET", "Socket")
            .env("NCCL_IB_DISABLE", "1");
        prepare(&mut command);
        match run_command(&mut command) {
            // How each program ended is compared as well: some do not complete on old releases.
            Err(_) if out.exists() => Ok(()),
            outcome => outcome,
        }
    };
    let library = &subject.library;
    run(&theirs, &|command| {
        match subject.carried {
            true => command
                .env("NCCL_EMULATOR", "1")
                .env("NCCL_EMULATOR_NCCL", library),
            false => command
                .env("NCCL_EMULATOR", "0")
                .env("NCCL_LIBRARY", library),
        };
    })?;
    run(&ours, &|command| {
        command.env("NCCL_EMULATOR", "1").arg("--like").arg(&theirs);
    })?;
    let output = Command::new(program)
        .arg("compare")
        .args([&theirs, &ours])
        .stderr(Stdio::inherit())
        .output()?;
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok((table, output.status.success()))
}
