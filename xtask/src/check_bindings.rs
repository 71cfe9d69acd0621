//! `check-bindings`: checks that the checked-in bindings are those of the bound release's header, and that nccl-sys
//! agrees with that header and its library.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::arguments::Arguments;
use crate::{Result, bindings, header, workspace};

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    arguments.finish()?;
    let release = header::release()?;
    compare(&release.header)?;
    workspace::run(
        workspace::cargo()
            .args(["test", "--quiet", "--package", "nccl-sys"])
            .args(["--test", "header", "--test", "loader"])
            .env("NCCL_HEADER", &release.header)
            .env("NCCL_TEST_LIBRARY", &release.library),
    )?;
    eprintln!("the bindings are those of {}", release.header.display());
    Ok(())
}

/// Generates the bindings again, in a temporary directory, and compares.
fn compare(header: &Path) -> Result {
    let checked_in = workspace::nccl_sys().join("src").join("bindings");
    let fresh = tempfile::tempdir()?;
    let bindings = bindings::generate(header)?;
    bindings.write_to(fresh.path())?;
    let mut different = Vec::new();
    for (name, contents) in &bindings.files {
        let file = checked_in.join(name);
        if fs::read_to_string(&file).ok().as_deref() != Some(contents) {
            // Only for the reader: the difference is already known, so `diff` may be missing.
            let _ = Command::new("diff")
                .arg("-u")
                .arg(&file)
                .arg(fresh.path().join(name))
                .status();
            different.push(file.display().to_string());
        }
    }
    if different.is_empty() {
        return Ok(());
    }
    Err(format!(
        "not what {} gives: {}\nrun `cargo xtask bindings` and commit the result",
        header.display(),
        different.join(", ")
    )
    .into())
}
