//! `header`: fetches the NCCL release that nccl-sys binds, as NVIDIA packs it for Python; and older releases, for the
//! chores that compare. NCCL EP is fetched by [`ep`](crate::ep).

use crate::Result;
use crate::arguments::Arguments;
use crate::wheels::{self, Release};
use crate::workspace;

/// The releases that are checked beside the one that nccl-sys binds, oldest first: the oldest available one that the
/// safe crate accepts, the one that CuPy is built for, and one in between.
const OLDER: [&str; 3] = ["2.18.3", "2.27.7", "2.30.7"];

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    arguments.finish()?;
    println!("{}", release()?.header.display());
    Ok(())
}

/// The releases that a command line requests: `--oldest-and-newest`, `--release X.Y.Z`, or `--all`, which is the
/// default.
pub(crate) fn asked_for(arguments: &mut Arguments) -> Result<Vec<Release>> {
    let bound = workspace::nccl_release()?;
    let versions = if arguments.flag("--oldest-and-newest") {
        vec![OLDER[0].to_owned(), bound]
    } else if let Some(version) = arguments.value("--release")? {
        vec![version]
    } else {
        arguments.flag("--all");
        OLDER
            .iter()
            .map(|&version| version.to_owned())
            .chain([bound])
            .collect()
    };
    arguments.finish()?;
    versions
        .iter()
        .map(|version| wheels::fetch_newest(version))
        .collect()
}

/// The release that nccl-sys binds, downloaded if it is missing.
pub(crate) fn release() -> Result<Release> {
    wheels::fetch_newest(&workspace::nccl_release()?)
}
