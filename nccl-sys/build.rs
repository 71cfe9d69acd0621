//! With the feature `bindgen`: generates the bindings from the user's own `nccl.h`. Without it:
//! nothing.

#[cfg(feature = "bindgen")]
#[path = "build/generator.rs"]
mod generator;

#[cfg(feature = "bindgen")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    use std::env;
    use std::path::PathBuf;

    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=build");
    for variable in [
        "NCCL_HEADER",
        "NCCL_HOME",
        "LIBCLANG_PATH",
        "BINDGEN_EXTRA_CLANG_ARGS",
    ] {
        println!("cargo:rerun-if-env-changed={variable}");
    }

    let path = |variable| {
        env::var_os(variable)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let header = path("NCCL_HEADER")
        .or_else(|| path("NCCL_HOME").map(|home| home.join("include").join("nccl.h")))
        .ok_or(
            "the feature `bindgen` of nccl-sys needs to know your nccl.h: set NCCL_HEADER to the \
             file, or NCCL_HOME to a directory that has it as include/nccl.h",
        )?;
    println!("cargo:rerun-if-changed={}", header.display());
    // The generator reads the headers for the device beside it.
    if let Some(directory) = header.parent().map(|parent| parent.join("nccl_device"))
        && directory.exists()
    {
        println!("cargo:rerun-if-changed={}", directory.display());
    }

    let package = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").ok_or("not run by cargo")?);
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("not run by cargo")?);
    generator::generate(&header, &generator::stubs(&package), Ok)?.write_to(&out)
}

#[cfg(not(feature = "bindgen"))]
fn main() {
    println!("cargo:rerun-if-changed=build.rs");
}
