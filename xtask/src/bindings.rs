//! `bindings`: writes `nccl-sys/src/bindings` anew, and `nccl-sys/src/ep/bindings`.

use std::path::{Path, PathBuf};

use crate::arguments::Arguments;
use crate::generator::{self, Bindings};
use crate::{Result, ep, header, workspace};

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    let given = arguments.path("--header")?;
    arguments.finish()?;
    let header = match &given {
        Some(header) => header.clone(),
        None => header::release()?.header,
    };
    write(&generate(&header)?, &directory(), &header)?;
    // The header of another NCCL says nothing about NCCL EP.
    if given.is_none() {
        let release = ep::release()?;
        let bindings = generate_ep(&release.header, &header)?;
        write(&bindings, &ep_directory(), &release.header)?;
    }
    Ok(())
}

fn write(bindings: &Bindings, directory: &Path, header: &Path) -> Result {
    bindings.write_to(directory)?;
    eprintln!("wrote {} from {}", directory.display(), header.display());
    Ok(())
}

/// The directory of the bindings of `nccl.h`.
pub(crate) fn directory() -> PathBuf {
    workspace::nccl_sys().join("src/bindings")
}

/// The directory of the bindings of `nccl_ep.h`.
pub(crate) fn ep_directory() -> PathBuf {
    workspace::nccl_sys().join("src/ep/bindings")
}

/// The bindings of `header`, in the layout in which they are checked in.
pub(crate) fn generate(header: &Path) -> Result<Bindings> {
    let stubs = generator::stubs(&workspace::nccl_sys());
    let bindings = generator::generate(header, &stubs, |text| {
        Ok(prettyplease::unparse(&syn::parse_file(&text)?))
    });
    bindings.map_err(|error| format!("cannot bind {}: {error}", header.display()).into())
}

/// The bindings of the `nccl_ep.h` at `header`, with this `nccl.h`, in the same layout.
pub(crate) fn generate_ep(header: &Path, nccl: &Path) -> Result<Bindings> {
    ep::generate(header, nccl)
        .map_err(|error| format!("cannot bind {}: {error}", header.display()).into())
}
