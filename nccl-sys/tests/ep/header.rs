//! Compares what is not plain bindgen output with the header: `NCCL_EP_HEADER` names the `nccl_ep.h`, `NCCL_HEADER` the `nccl.h`
//! that it includes. `cargo xtask check-bindings` and `check-symbols` set both.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use nccl_sys::ep::*;

/// Returns `nccl_ep.h` and `nccl.h`; without one of them, returns `None` and prints that the test is skipped.
fn headers() -> Option<(PathBuf, PathBuf)> {
    let named = |variable| env::var_os(variable).map(PathBuf::from);
    let headers = named("NCCL_EP_HEADER").zip(named("NCCL_HEADER"));
    if headers.is_none() {
        // Not `eprintln!`, which the test harness would swallow.
        let message = b"NOT TESTED: NCCL_EP_HEADER and NCCL_HEADER name no nccl_ep.h and nccl.h\n";
        std::io::stderr().write_all(message).unwrap();
    }
    headers
}

/// Runs the compiler on a C program that includes the header; its static assertions are compiled as well.
fn printed_by(code: &str, headers: &(PathBuf, PathBuf)) -> String {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("values.c");
    let program = directory.path().join("values");
    fs::write(&source, code).unwrap();
    let stubs = Path::new(env!("CARGO_MANIFEST_DIR")).join("build/stubs");
    let mut compiler = Command::new("cc");
    compiler
        .args(["-std=c11", "-I"])
        .arg(stubs.join("cuda"))
        .arg("-I")
        .arg(headers.1.parent().unwrap())
        .arg("-include")
        .arg(stubs.join("ep/cuda_error.h"))
        .arg("-include")
        .arg(&headers.0)
        .arg(&source)
        .arg("-o")
        .arg(&program);
    let compiled = compiler.output().unwrap();
    let said = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{compiler:?}: {said}");
    String::from_utf8(Command::new(&program).output().unwrap().stdout).unwrap()
}

/// Returns the bytes of a value, without padding, as hexadecimal digits.
fn bytes_of<T>(value: &T) -> String {
    // SAFETY: the structs have no padding, which the header asserts with its `padding_vN` fields and the test of sizes repeats.
    let bytes =
        unsafe { std::slice::from_raw_parts((&raw const *value).cast::<u8>(), size_of::<T>()) };
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

#[test]
fn initialisers_of_ep_are_those_of_the_header_byte_by_byte() {
    let Some(headers) = headers() else { return };
    let mut code = String::from(
        "#include <stdio.h>\n\
         static void print(const unsigned char *b, size_t n) {\n\
         \x20 for (size_t i = 0; i < n; i++) printf(\"%02x\", b[i]);\n  printf(\"\\n\");\n}\n\
         int main(void) {\n",
    );
    let mut expected = String::new();
    macro_rules! compare {
        ($($macro:literal: $type:ident),* $(,)?) => {$(
            writeln!(
                code,
                "  {{ static {0} v; v = {1}; print((const unsigned char *)&v, sizeof v); }}",
                stringify!($type), $macro
            ).unwrap();
            writeln!(expected, "{}", bytes_of(&$type::init())).unwrap();
        )*};
    }
    compare!(
        "NCCL_EP_TENSOR_INIT": ncclEpTensor_t,
        "NCCL_EP_TENSOR_ALLOC_CONFIG_INIT": ncclEpTensorAllocConfig_t,
        "NCCL_EP_GROUP_CONFIG_INIT": ncclEpGroupConfig_t,
        "NCCL_EP_LAYOUT_INFO_INIT": ncclEpLayoutInfo_t,
        "NCCL_EP_DISPATCH_INPUTS_INIT": ncclEpDispatchInputs_t,
        "NCCL_EP_DISPATCH_OUTPUTS_INIT": ncclEpDispatchOutputs_t,
        "NCCL_EP_COMBINE_INPUTS_INIT": ncclEpCombineInputs_t,
        "NCCL_EP_COMBINE_OUTPUTS_INIT": ncclEpCombineOutputs_t,
        "NCCL_EP_HANDLE_CONFIG_INIT": ncclEpHandleConfig_t,
        "NCCL_EP_DISPATCH_CONFIG_INIT": ncclEpDispatchConfig_t,
        "NCCL_EP_COMBINE_CONFIG_INIT": ncclEpCombineConfig_t,
        "NCCL_EP_COMPLETE_CONFIG_INIT": ncclEpCompleteConfig_t,
    );
    code += "  return 0;\n}\n";
    assert_eq!(
        printed_by(&code, &headers),
        expected,
        "left: the header, right: this crate"
    );
}

#[test]
fn every_number_of_the_header_of_ep_is_a_constant_here() {
    let Some(headers) = headers() else { return };
    let directory = headers.0.parent().unwrap();
    let text = fs::read_to_string(&headers.0).unwrap()
        + &fs::read_to_string(directory.join("nccl_ep/ep_enums.h")).unwrap();
    let ours = include_str!("../../src/ep/bindings/types.rs");
    let initializers = include_str!("../../src/ep/bindings/initializers.rs");
    let mut compared = 0;
    for definition in text
        .lines()
        .filter_map(|line| line.strip_prefix("#define "))
    {
        let name = definition.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let name = name.into_iter().next().unwrap();
        let is_function = definition[name.len()..].starts_with('(');
        // Fields, and sizes that are `size_of` in Rust; the byte-by-byte test has both. A value of a type of nccl.h.
        let is_other = name.ends_with("_LAST_FIELD")
            || definition.contains("sizeof(")
            || name == "ncclFloat4x2";
        if is_function || is_other {
            continue;
        }
        let there = match name.ends_with("_INIT") {
            true => initializers.contains(&format!(" {name}: ")),
            false => ours.contains(&format!("pub const {name}: ")),
        };
        assert!(there, "{name}");
        compared += 1;
    }
    assert!(compared > 40, "{compared}");
}

#[test]
fn the_table_of_ep_has_every_function_of_its_header() {
    let Some(headers) = headers() else { return };
    let text = fs::read_to_string(&headers.0).unwrap();
    let mut declared: Vec<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("ncclResult_t ")?.split('(').next())
        .collect();
    let mut table = Api::NAMES.to_vec();
    declared.sort_unstable();
    // Some are declared twice.
    declared.dedup();
    table.sort_unstable();
    assert_eq!(declared, table);
}
