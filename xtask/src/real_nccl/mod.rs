//! `real-nccl`: runs programs and tests on NVIDIA's own libnccl, without a GPU, on the emulator's driver.
//!
//! ```text
//! cargo xtask real-nccl run   [--release X.Y.Z] [--cuda 12|13] [--topology NAME|FILE]
//!                             (--example NAME [-- ARGUMENTS] | [--preload] -- COMMAND [ARGUMENTS])
//! cargo xtask real-nccl test  [--release X.Y.Z] [--cuda 12|13] [--allow-missing | --allow-missing-sources]
//!                             [--quick | --own | TEST FILE…] [-- TEST OPTIONS]
//! cargo xtask real-nccl valgrind [--release X.Y.Z] [--cuda 12|13] [-- TEST OPTIONS]
//! cargo xtask real-nccl fetch [--release X.Y.Z] [--cuda 12|13]
//! cargo xtask real-nccl terms [--release X.Y.Z] [--cuda 12|13]
//! ```
//!
//! The library is the file of NVIDIA's wheel ([`wheels`]): fetched, checked and kept outside of the repository.

mod each;
mod environment;
mod left_out;
mod profiler;
mod run;
mod test;
mod topology;
mod valgrind;

use std::env::consts::ARCH;
use std::fmt::Write as _;
use std::io::{self, Write as _};

use crate::arguments::{Arguments, Usage};
use crate::wheels::{self, Cuda, Release, Unavailable};
use crate::{Result, workspace};

/// The feature that builds the emulator for NVIDIA's library, from a package that depends on it.
const FEATURE: &str = "nccl-emulator/real-nccl";

/// The releases that the emulator's driver supports, oldest first.
const RELEASES: [&str; 3] = ["2.27.7", "2.30.7", "2.32.3"];

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    let behind = arguments.after_dashes();
    let task = arguments.word("run, test, valgrind, fetch or terms")?;
    let asked = Asked::parse(arguments)?;
    match task.as_str() {
        "run" => run::run(&asked, arguments, behind),
        "test" => test::run(&asked, arguments, behind.unwrap_or_default()),
        "valgrind" => {
            arguments.finish()?;
            valgrind::run(&asked, &behind.unwrap_or_default())
        }
        "fetch" => {
            arguments.finish()?;
            fetch(&asked)
        }
        "terms" => {
            arguments.finish()?;
            terms(&asked)
        }
        other => {
            let text = format!(
                "real-nccl can run, test, valgrind, fetch and tell the terms, not `{other}`"
            );
            Err(Usage(text).into())
        }
    }
}

/// The libraries that a command line requests.
#[derive(Debug, PartialEq, Eq)]
struct Asked {
    release: Option<String>,
    cuda: Cuda,
}

impl Asked {
    fn parse(arguments: &mut Arguments) -> Result<Self> {
        let release = arguments.value("--release")?;
        if let Some(release) = &release
            && !RELEASES.contains(&release.as_str())
        {
            let known = RELEASES.join(", ");
            let text = format!("NCCL {release} does not run on the emulator, only {known} do");
            return Err(Usage(text).into());
        }
        let cuda = match arguments.value("--cuda")? {
            None => Cuda::Thirteen,
            Some(number) => Cuda::numbered(&number)
                .ok_or_else(|| Usage(format!("--cuda is 12 or 13, not {number}")))?,
        };
        Ok(Self { release, cuda })
    }

    /// Returns the release to run on: by default the one that nccl-sys binds.
    fn one(&self) -> Result<Release> {
        let version = match &self.release {
            Some(release) => release.clone(),
            None => workspace::nccl_release()?,
        };
        runnable()?;
        wheels::fetch(&version, self.cuda)
    }

    /// Returns the named release, or all of them.
    fn all(&self) -> Result<Vec<Release>> {
        match &self.release {
            Some(release) => Ok(vec![wheels::fetch(release, self.cuda)?]),
            None => RELEASES
                .iter()
                .map(|release| wheels::fetch(release, self.cuda))
                .collect(),
        }
    }
}

/// Returns whether the emulator's driver supports this release on this machine.
pub(crate) fn carries(version: &str) -> bool {
    RELEASES.contains(&version) && runnable().is_ok()
}

/// Checks that the emulator's driver can run NVIDIA's library here.
fn runnable() -> Result {
    match ARCH {
        "x86_64" => Ok(()),
        other => {
            let text =
                format!("NVIDIA's library runs on the emulator on x86_64 only, not on {other}");
            Err(Unavailable(text).into())
        }
    }
}

fn fetch(asked: &Asked) -> Result {
    for release in asked.all()? {
        println!("{}", release.library.display());
    }
    Ok(())
}

fn terms(asked: &Asked) -> Result {
    let mut text = String::new();
    for release in asked.all()? {
        let terms = release.terms()?;
        let package = release.cuda.package();
        writeln!(text, "{package} {}: its metadata says", release.version)?;
        if terms.stated.is_empty() {
            text += "  nothing of a licence\n";
        }
        for line in &terms.stated {
            writeln!(text, "  {line}")?;
        }
        for (name, licence) in &terms.files {
            writeln!(text, "and its file {name}:")?;
            for line in licence.lines() {
                writeln!(text, "  {line}")?;
            }
        }
        text.push('\n');
    }
    text += "The library contains parts of NVIDIA's CUDA runtime, which has terms of its own.\n";
    // The reader may be a pager, which may end at any time.
    Ok(io::stdout().write_all(text.as_bytes())?)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;

    fn asked(text: &[&str]) -> Result<Asked> {
        Asked::parse(&mut Arguments::new(text.iter().map(OsString::from)))
    }

    #[test]
    fn a_release_and_a_cuda_are_taken_by_their_numbers() {
        let text = ["--release", "2.27.7", "--cuda", "12"];
        let expected = Asked {
            release: Some("2.27.7".into()),
            cuda: Cuda::Twelve,
        };
        assert_eq!(asked(&text).unwrap(), expected);
        assert_eq!(asked(&[]).unwrap().cuda, Cuda::Thirteen);
    }

    #[test]
    fn an_unknown_release_is_refused_with_those_that_there_are() {
        let error = asked(&["--release", "2.29.1"]).unwrap_err();
        assert!(error.is::<Usage>());
        assert_eq!(
            error.to_string(),
            "NCCL 2.29.1 does not run on the emulator, only 2.27.7, 2.30.7, 2.32.3 do"
        );
        assert!(asked(&["--cuda", "11"]).unwrap_err().is::<Usage>());
    }

    #[test]
    fn the_release_that_nccl_sys_binds_is_one_of_them() {
        let bound = workspace::nccl_release().unwrap();
        assert!(RELEASES.contains(&bound.as_str()));
    }

    #[test]
    fn another_task_is_wrong_usage() {
        let mut arguments = Arguments::new(["walk"].iter().map(OsString::from));
        assert!(run(&mut arguments).unwrap_err().is::<Usage>());
    }
}
