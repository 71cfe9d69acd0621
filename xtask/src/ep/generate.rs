//! The bindings of `nccl_ep.h`, in the manner of those of `nccl.h`. nccl-sys has no build-time variant of them, so that the
//! description is here and not in its `build` directory.
//!
//! The output is three files:
//! - `types.rs`: types and constants. Types of `nccl.h` and of CUDA are those of nccl-sys itself.
//! - `functions.rs`: the prototypes, verbatim, inside one call of `nccl_ep_api!`.
//! - `initializers.rs`: the `NCCL_EP_…_INIT` macros, inside one call of `nccl_ep_initializers!`.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use bindgen::callbacks::{DeriveTrait, ImplementsTrait, IntKind, ParseCallbacks};
use bindgen::{Abi, CodegenConfig};

use crate::Result;
use crate::generator::{self, Bindings};
use crate::workspace;

const MARK: &str = "// Generated from nccl_ep.h by `cargo xtask bindings`. Do not edit.\n\n";

/// Generates the bindings of the `nccl_ep.h` at `header`, with the `nccl.h` at `nccl`.
pub(crate) fn generate(header: &Path, nccl: &Path) -> Result<Bindings> {
    let text = fs::read_to_string(header)
        .map_err(|error| format!("cannot read the header {}: {error}", header.display()))?;
    let stubs = generator::stubs(&workspace::nccl_sys());
    let builder = || {
        let directory = nccl.parent().unwrap_or(Path::new("."));
        let cuda = stubs.join("ep").join("cuda_error.h");
        generator::builder(header, &stubs)
            .clang_arg(format!("-I{}", directory.display()))
            .clang_arg(format!("-include{}", cuda.display()))
            // The types of nccl.h are in the crate already.
            .allowlist_recursively(false)
            .parse_callbacks(Box::new(Macros))
    };
    let types = builder()
        .allowlist_type("ncclEp.*|cudaError_t")
        .allowlist_var("NCCL_EP_.*")
        .with_codegen_config(CodegenConfig::TYPES | CodegenConfig::VARS)
        .generate()?
        .to_string();
    let functions = builder()
        .allowlist_function("ncclEp.*")
        // The library is C++ and throws exceptions out of its functions.
        .override_abi(Abi::CUnwind, "ncclEp.*")
        .with_codegen_config(CodegenConfig::FUNCTIONS)
        .merge_extern_blocks(true)
        .generate()?
        .to_string();
    let format =
        |text: &str| -> Result<String> { Ok(prettyplease::unparse(&syn::parse_file(text)?)) };
    Ok(Bindings {
        files: vec![
            ("types.rs", format!("{MARK}{}", format(&types)?)),
            (
                "functions.rs",
                format!("{MARK}nccl_ep_api! {{\n{}}}\n", format(&functions)?),
            ),
            (
                "initializers.rs",
                format!(
                    "{MARK}nccl_ep_initializers! {{\n{}}}\n",
                    initializers(&text)?
                ),
            ),
        ],
    })
}

/// Gives integer macros the type of the fields that hold them, and tells that the types of `nccl.h` can be copied.
#[derive(Debug)]
struct Macros;

impl ParseCallbacks for Macros {
    fn int_macro(&self, name: &str, _value: i64) -> Option<IntKind> {
        let unsigned = name.ends_with("_SIZE")
            || name.ends_with("_MAGIC")
            || ["NCCL_EP_API_VERSION", "NCCL_EP_AUTO"].contains(&name);
        unsigned.then_some(IntKind::U32)
    }

    fn blocklisted_type_implements_trait(
        &self,
        _name: &str,
        derive: DeriveTrait,
    ) -> Option<ImplementsTrait> {
        match derive {
            DeriveTrait::Copy | DeriveTrait::Debug => Some(ImplementsTrait::Yes),
            _ => None,
        }
    }
}

/// Returns a line for each `NCCL_EP_…_INIT` macro: its name, the type, and the fields that it sets beside `size`.
///
/// # Errors
/// A macro of a form not seen before is an error, never a guess.
fn initializers(header: &str) -> Result<String> {
    let macros = macros(header);
    let mut lines = String::new();
    for (name, body) in &macros {
        if !name.starts_with("NCCL_EP_") || !name.ends_with("_INIT") || name.contains('(') {
            continue;
        }
        let unknown = || format!("{name} is not of a known form: {body}");
        if let Some(arguments) = body.strip_prefix("NCCL_EP_STRUCT_INIT(") {
            let (of, magic) = arguments
                .strip_suffix(')')
                .and_then(|arguments| arguments.split_once(','))
                .ok_or_else(unknown)?;
            writeln!(lines, "    {name}: {of} {{ magic: {} }}", magic.trim())?;
            continue;
        }
        let (of, values) = body
            .strip_prefix("((")
            .and_then(|body| body.strip_suffix("})"))
            .and_then(|body| body.split_once("){"))
            .ok_or_else(unknown)?;
        // The values may be a macro themselves.
        let inner = macros.iter().find(|(name, _)| name == values.trim());
        let values = inner.map_or(values, |(_, body)| body);
        let mut fields = Vec::new();
        for value in values.split(',') {
            let (field, value) = value
                .trim()
                .strip_prefix('.')
                .and_then(|value| value.split_once('='))
                .ok_or_else(unknown)?;
            match (field.trim(), value.trim()) {
                ("size", value) if value == format!("(unsigned int)sizeof({of})") => (),
                (field, value) if value.starts_with("NCCL_EP_") => {
                    fields.push(format!("{field}: {value}"));
                }
                _ => return Err(unknown().into()),
            }
        }
        writeln!(lines, "    {name}: {of} {{ {} }}", fields.join(", "))?;
    }
    Ok(lines)
}

/// Returns the macros of a header, with their bodies in one line.
fn macros(header: &str) -> Vec<(String, String)> {
    let joined = header.replace("\\\n", " ");
    let definitions = joined
        .lines()
        .filter_map(|line| line.strip_prefix("#define "));
    definitions
        .filter_map(|line| line.trim().split_once(char::is_whitespace))
        .map(|(name, body)| {
            let words: Vec<_> = body.split_whitespace().collect();
            (name.to_owned(), words.join(" "))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_form_of_an_initializer_gives_its_type_and_fields() {
        let header = "#define NCCL_EP_STRUCT_INIT(type_, magic_) \\\n    ((type_){ })\n\
            #define NCCL_EP_A_INIT \\\n    NCCL_EP_STRUCT_INIT(ncclEpA_t, NCCL_EP_MAGIC)\n\
            #define NCCL_EP_B_INIT ((ncclEpB_t){ \\\n .size = (unsigned int)sizeof(ncclEpB_t), \\\n \
            .magic = NCCL_EP_MAGIC, \\\n .version = NCCL_EP_API_VERSION \\\n })\n\
            #define NCCL_EP_C_INLINE .size = (unsigned int)sizeof(ncclEpC_t), .magic = NCCL_EP_C_MAGIC\n\
            #define NCCL_EP_C_INIT ((ncclEpC_t){NCCL_EP_C_INLINE})\n";
        assert_eq!(
            initializers(header).unwrap(),
            "    NCCL_EP_A_INIT: ncclEpA_t { magic: NCCL_EP_MAGIC }\n    \
             NCCL_EP_B_INIT: ncclEpB_t { magic: NCCL_EP_MAGIC, version: NCCL_EP_API_VERSION }\n    \
             NCCL_EP_C_INIT: ncclEpC_t { magic: NCCL_EP_C_MAGIC }\n"
        );
    }

    #[test]
    fn an_initializer_of_a_new_form_is_an_error_that_quotes_it() {
        for body in [
            "{ 1 }",
            "((ncclEpA_t){ .size = 4 })",
            "((ncclEpA_t){ .magic = f(1) })",
        ] {
            let error = initializers(&format!("#define NCCL_EP_A_INIT {body}\n")).unwrap_err();
            assert!(error.to_string().contains(body), "{error}");
        }
    }
}
