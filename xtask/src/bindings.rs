//! `bindings`: writes `nccl-sys/src/bindings` anew.

use std::path::Path;

use crate::arguments::Arguments;
use crate::generator::{self, Bindings};
use crate::{Result, header, workspace};

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    let header = arguments.path("--header")?;
    arguments.finish()?;
    let header = match header {
        Some(header) => header,
        None => header::release()?.header,
    };
    let target = workspace::nccl_sys().join("src").join("bindings");
    generate(&header)?.write_to(&target)?;
    eprintln!("wrote {} from {}", target.display(), header.display());
    Ok(())
}

/// The bindings of `header`, in the layout in which they are checked in.
pub(crate) fn generate(header: &Path) -> Result<Bindings> {
    let stubs = generator::stubs(&workspace::nccl_sys());
    let bindings = generator::generate(header, &stubs, |text| {
        Ok(prettyplease::unparse(&syn::parse_file(&text)?))
    });
    bindings.map_err(|error| format!("cannot bind {}: {error}", header.display()).into())
}
