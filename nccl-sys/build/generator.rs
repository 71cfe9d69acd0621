//! Generates Rust from a `nccl.h`, and from the `nccl_device/host.h` beside it if there is one: the only description of how the bindings are made.
//!
//! Included by path from two places that must generate the same: the build script of this crate (feature
//! `bindgen`, the user's own header) and the workspace's `xtask` (the files that are checked in).
//!
//! The output is three files:
//! - `types.rs`: types and constants. Enums become newtypes over their C integer, because a library
//!   newer than the header may return a value that the header does not know.
//! - `functions.rs`: the prototypes, verbatim, inside one call of `nccl_api!`.
//! - `initializers.rs`: the `..._INITIALIZER` macros as constants; see `initializers.rs`.
//!
//! The header's comments are left out.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use bindgen::callbacks::{IntKind, ParseCallbacks};
use bindgen::{
    CodegenConfig, EnumVariation, Formatter, MacroTypeVariation, RustEdition, RustTarget,
};

#[path = "initializers.rs"]
mod initializers;

/// The text of the generated files.
pub(crate) struct Bindings {
    /// `(file name, contents)`
    pub(crate) files: Vec<(&'static str, String)>,
}

impl Bindings {
    /// Writes all files into `directory`.
    pub(crate) fn write_to(&self, directory: &Path) -> Result<(), Box<dyn Error>> {
        for (name, contents) in &self.files {
            let path = directory.join(name);
            fs::write(&path, contents)
                .map_err(|e| format!("cannot write {}: {e}", path.display()))?;
        }
        Ok(())
    }
}

/// Generates the bindings of the `nccl.h` at `header`. `stubs` is the directory that holds the
/// stand-ins for what `nccl.h` includes. `format` formats a file of Rust; a caller that only
/// compiles the result returns the text unchanged.
pub(crate) fn generate(
    header: &Path,
    stubs: &Path,
    format: impl Fn(String) -> Result<String, Box<dyn Error>>,
) -> Result<Bindings, Box<dyn Error>> {
    let read = |path: &Path| {
        let text = fs::read_to_string(path);
        text.map_err(|e| format!("cannot read the header {}: {e}", path.display()))
    };
    let mut text = read(header)?;
    let device = device_header(header);
    if let Some(device) = &device {
        text += &read(device)?;
    }

    let builder = || {
        let builder = builder(header, stubs);
        match &device {
            Some(device) => builder.header(device.to_string_lossy()),
            None => builder,
        }
    };
    let types = builder()
        .allowlist_type("(nccl|cuda).*")
        .allowlist_var("NCCL_.*")
        // A `double` to bindgen, a `float` wherever NCCL uses it: written by hand.
        .blocklist_var("NCCL_UNDEF_FLOAT")
        // Exists in the header only to measure an enum.
        .blocklist_type("ncclRedOp_dummy_t")
        .with_codegen_config(CodegenConfig::TYPES | CodegenConfig::VARS)
        .generate()?
        .to_string();
    let functions = builder()
        .allowlist_function("nccl.*")
        .blocklist_function("pnccl.*")
        // Declared, but in no library.
        .blocklist_function("ncclCftBarrierCreateRequirement")
        .with_codegen_config(CodegenConfig::FUNCTIONS)
        .merge_extern_blocks(true)
        .generate()?
        .to_string();
    let initializers = initializers::generate(&text, &types)?;

    Ok(Bindings {
        files: vec![
            ("types.rs", format!("{MARK}{}", format(types)?)),
            (
                "functions.rs",
                format!("{MARK}nccl_api! {{\n{}}}\n", format(functions)?),
            ),
            (
                "initializers.rs",
                format!("{MARK}{}", format(initializers)?),
            ),
        ],
    })
}

/// Returns the header of the host's side of the device API, which `nccl.h` does not include; `None` where the release
/// has it only in headers for CUDA's compiler (before 2.31).
fn device_header(header: &Path) -> Option<PathBuf> {
    let device = header.parent()?.join("nccl_device").join("host.h");
    device.exists().then_some(device)
}

/// Returns where the stand-ins for included headers are in the `nccl-sys` package at `package`.
pub(crate) fn stubs(package: &Path) -> PathBuf {
    package.join("build").join("stubs")
}

const MARK: &str = "// Generated from nccl.h by `cargo xtask bindings`. Do not edit.\n\n";

/// Returns the settings that all bindings of `header` share.
pub(crate) fn builder(header: &Path, stubs: &Path) -> bindgen::Builder {
    bindgen::builder()
        .header(header.to_string_lossy())
        // Stand-ins instead of the headers of CUDA and of the C library: then only
        // libclang is needed, and the result does not depend on the machine.
        .clang_arg("-nostdinc")
        .clang_arg(format!("-I{}", stubs.join("cuda").display()))
        .clang_arg(format!("-I{}", stubs.join("c").display()))
        // For `nccl_device/host.h`, which includes `nccl.h`.
        .clang_arg(format!(
            "-I{}",
            header.parent().unwrap_or(Path::new(".")).display()
        ))
        // `ncclResetDebugInit` is a function only where this is defined.
        .clang_arg("-DNCCL_OS_LINUX")
        // Headers up to 2.23 declare `ncclBfloat16` only then.
        .clang_arg("-D__CUDA_BF16_TYPES_EXIST__")
        .disable_header_comment()
        .generate_comments(false)
        .generate_cstr(true)
        .use_core()
        .layout_tests(true)
        .default_enum_style(EnumVariation::NewType {
            is_bitfield: false,
            is_global: false,
        })
        .prepend_enum_name(false)
        .default_macro_constant_type(MacroTypeVariation::Signed)
        .parse_callbacks(Box::new(Macros))
        .rust_edition(RustEdition::Edition2024)
        .rust_target(RustTarget::stable(88, 0).expect("a released version of Rust"))
        .wrap_unsafe_ops(true)
        .formatter(Formatter::None)
}

/// Gives integer macros the type that NCCL's functions and structs use them with; all others are
/// `i32`, like the flags.
#[derive(Debug)]
struct Macros;

impl ParseCallbacks for Macros {
    fn int_macro(&self, name: &str, _value: i64) -> Option<IntKind> {
        match name {
            "NCCL_API_MAGIC" => Some(IntKind::U32),
            "NCCL_UNIQUE_ID_BYTES" | "NCCL_WIN_REQUIRED_ALIGNMENT" => Some(IntKind::Custom {
                name: "usize",
                is_signed: false,
            }),
            _ => None,
        }
    }
}
