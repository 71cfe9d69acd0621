//! `check-bindings`: checks that the checked-in bindings are those of the bound release's header, and that nccl-sys
//! agrees with that header and its library; the same for NCCL EP.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::arguments::Arguments;
use crate::generator::Bindings;
use crate::{Result, bindings, ep, header, workspace};

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    arguments.finish()?;
    let release = header::release()?;
    let ep = ep::release()?;
    let header = &release.header;
    compare(&bindings::generate(header)?, &bindings::directory(), header)?;
    let of_ep = bindings::generate_ep(&ep.header, header)?;
    compare(&of_ep, &bindings::ep_directory(), &ep.header)?;
    workspace::run(
        workspace::cargo()
            .args(["test", "--quiet", "--package", "nccl-sys"])
            .args(["--features", "ep"])
            .args(["--test", "header", "--test", "loader", "--test", "ep"])
            .env("NCCL_HEADER", header)
            .env("NCCL_TEST_LIBRARY", &release.library)
            .env("NCCL_EP_HEADER", &ep.header)
            .env("NCCL_EP_TEST_LIBRARIES", ep.list()),
    )?;
    eprintln!(
        "the bindings are those of {} and {}",
        header.display(),
        ep.header.display()
    );
    Ok(())
}

/// Compares bindings that were generated again from `header` with those in the directory `checked_in`.
fn compare(bindings: &Bindings, checked_in: &Path, header: &Path) -> Result {
    let fresh = tempfile::tempdir()?;
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
