//! Compares all code that is not plain bindgen output with the header itself: `NCCL_HEADER` names the `nccl.h`.
//!
//! The test builds a small C program from the header, and compares its output with the values here.
//! `cargo xtask check-bindings` runs this with the header that the bindings were made from.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::ffi::c_void;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::mem::{offset_of, size_of, size_of_val};
use std::path::{Path, PathBuf};
use std::process::Command;

use nccl_sys::*;

/// Returns the header; without one, returns `None` and prints that the test is skipped.
fn header() -> Option<PathBuf> {
    let header = env::var_os("NCCL_HEADER").map(PathBuf::from);
    if header.is_none() {
        // Not `eprintln!`, which the test harness would swallow.
        std::io::stderr()
            .write_all(b"NOT TESTED: NCCL_HEADER names no nccl.h\n")
            .unwrap();
    }
    header
}

fn compiler(header: &Path) -> Command {
    let mut command = Command::new("cc");
    command
        .arg("-I")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("build/stubs/cuda"));
    command.arg("-DNCCL_OS_LINUX").arg("-include").arg(header);
    command
}

fn output(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// Compares C with Rust: `(C expression, value in Rust)`. Values are compared as text.
fn compare(header: &Path, expected: &[(String, String)]) {
    let directory = tempfile::tempdir().unwrap();
    let mut code = String::from("#include <stdio.h>\n");
    // One conversion for everything; floats and pointers are compared as integers.
    code += "#define PRINT(x) printf(\"%lld\\n\", (long long)(x))\n";
    code += "int main(void) {\n";
    code += "  ncclConfig_t NCCL_CONFIG_INITIALIZER_ = NCCL_CONFIG_INITIALIZER;\n";
    code += "  ncclCollConfig_t NCCL_COLLCONFIG_INITIALIZER_ = NCCL_COLLCONFIG_INITIALIZER;\n";
    code += "  ncclSimInfo_t NCCL_SIM_INFO_INITIALIZER_ = NCCL_SIM_INFO_INITIALIZER;\n";
    code += "  ncclEncryptionConfig_t NCCL_ENCRYPTION_CONFIG_INITIALIZER_ =\n";
    code += "      NCCL_ENCRYPTION_CONFIG_INITIALIZER;\n";
    for (expression, _) in expected {
        writeln!(code, "  PRINT({expression});").unwrap();
    }
    code += "  return 0;\n}\n";
    let source = directory.path().join("values.c");
    let program = directory.path().join("values");
    fs::write(&source, code).unwrap();
    output(compiler(header).arg(&source).arg("-o").arg(&program));
    let printed = output(&mut Command::new(&program));
    let found: BTreeMap<_, _> = expected
        .iter()
        .map(|(name, _)| name.as_str())
        .zip(printed.lines())
        .collect();
    let expected: BTreeMap<_, _> = expected
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_str()))
        .collect();
    assert_eq!(found, expected, "left: the header, right: this crate");
}

/// A value of a field, as the C program prints it.
trait Printed {
    fn printed(&self) -> String;
}

macro_rules! printed_as_integer {
    ($($type:ty),*) => {
        $(impl Printed for $type {
            fn printed(&self) -> String {
                (*self as i64).to_string()
            }
        })*
    };
}
printed_as_integer!(
    i32,
    u32,
    u64,
    usize,
    f32,
    *const i8,
    *const u8,
    *mut ncclConfigExt,
    cudaEvent_t
);

/// Adds size and every field of an initializer: offset, size, value. With a field missing from this list,
/// the sizes of the fields do not add up.
macro_rules! initializer {
    ($expected:ident, $name:ident: $type:ty { $($field:ident),* $(,)? }) => {{
        $expected.push((format!("sizeof({})", stringify!($type)), size_of::<$type>().to_string()));
        let mut end = 0;
        $(
            let offset = offset_of!($type, $field);
            let size = size_of_val(&$name.$field);
            assert!(offset - end < size, "a field before {} is missing", stringify!($field));
            end = offset + size;
            let field = stringify!($field);
            let variable = concat!(stringify!($name), "_.", stringify!($field));
            $expected.push((
                format!("offsetof({}, {field})", stringify!($type)), offset.to_string(),
            ));
            $expected.push((format!("sizeof({variable})"), size.to_string()));
            $expected.push((variable.to_owned(), $name.$field.printed()));
        )*
        assert!(size_of::<$type>() - end < align_of::<$type>(), "the last field is missing");
    }};
}

#[test]
fn initializers_are_those_of_the_header() {
    let Some(header) = header() else { return };
    let mut expected = Vec::new();
    initializer!(expected, NCCL_CONFIG_INITIALIZER: ncclConfig_t {
        size, magic, version, blocking, cgaClusterSize, minCTAs, maxCTAs, netName, splitShare,
        trafficClass, commName, collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs,
        nChannelsPerNetPeer, nvlinkCentricSched, graphUsageMode, numRmaCtx, maxP2pPeers,
        graphStreamOrdering, launchOrderImplicit, numRmaSig, rmaEagerInit, hostCftMode,
        nvlsHostMode,
    });
    initializer!(expected, NCCL_COLLCONFIG_INITIALIZER: ncclCollConfig_t {
        size, magic, version, ext, minCTAs, maxCTAs, nvlsCTAs, cgaClusterSize, algSelection,
        forceAlgSelection, CTAPolicy, userProfilerTag, launchCompletionEvent,
    });
    initializer!(expected, NCCL_SIM_INFO_INITIALIZER: ncclSimInfo_t {
        size, magic, version, estimatedTime,
    });
    initializer!(expected, NCCL_ENCRYPTION_CONFIG_INITIALIZER: ncclEncryptionConfig_t {
        size, magic, version, mode, psk,
    });
    compare(&header, &expected);
}

#[test]
fn defaults_are_the_initializers() {
    assert_eq!(ncclConfig_t::default().magic, NCCL_API_MAGIC);
    assert_eq!(ncclConfig_t::default().blocking, NCCL_CONFIG_UNDEF_INT);
    assert_eq!(ncclCollConfig_t::default().forceAlgSelection, 1);
    assert_eq!(ncclSimInfo_t::default().estimatedTime, NCCL_UNDEF_FLOAT);
    assert_eq!(
        ncclEncryptionConfig_t::default().size,
        size_of::<ncclEncryptionConfig_t>()
    );
    assert!(
        ncclUniqueId::default()
            .internal
            .iter()
            .all(|byte| *byte == 0)
    );
}

#[test]
fn constants_written_by_hand_are_those_of_the_header() {
    let Some(header) = header() else { return };
    let none: *const c_void = NCCL_COMM_NULL.cast();
    let undefined: *const c_void = NCCL_CONFIG_UNDEF_PTR;
    compare(
        &header,
        &[
            (
                "NCCL_CONFIG_UNDEF_INT".into(),
                NCCL_CONFIG_UNDEF_INT.to_string(),
            ),
            (
                "NCCL_UNDEF_FLOAT * 1024".into(),
                (NCCL_UNDEF_FLOAT as i64 * 1024).to_string(),
            ),
            ("NCCL_COMM_NULL".into(), (none as usize).to_string()),
            (
                "NCCL_CONFIG_UNDEF_PTR".into(),
                (undefined as usize).to_string(),
            ),
        ],
    );
}

#[test]
fn version_codes_are_those_of_the_header() {
    let Some(header) = header() else { return };
    let mut expected = vec![(
        "NCCL_VERSION_CODE".into(),
        Version::HEADER.code().to_string(),
    )];
    for major in 1..=3 {
        for minor in 0..=40 {
            for patch in [0, 1, 9, 10, 99] {
                let version = Version::new(major, minor, patch);
                expected.push((
                    format!("NCCL_VERSION({major}, {minor}, {patch})"),
                    version.code().to_string(),
                ));
            }
        }
    }
    compare(&header, &expected);
}

#[test]
fn the_table_has_every_function_of_the_header() {
    let Some(header) = header() else { return };
    let empty = tempfile::Builder::new().suffix(".c").tempfile().unwrap();
    let text = output(compiler(&header).args(["-E", "-P"]).arg(empty.path()));
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let declared: BTreeSet<_> = text
        .match_indices('(')
        .map(|(at, _)| text[..at].trim_end())
        .map(|before| &before[before.trim_end_matches(is_name).len()..])
        .filter(|name| name.starts_with("nccl"))
        .collect();
    let device = header.with_file_name("nccl_device").join("host.h");
    let device = fs::read_to_string(device).unwrap_or_default();
    // The others are inline, or of another system.
    let common = device.split("#if defined(NCCL_OS_WINDOWS)").next().unwrap();
    let on_the_host = common
        .split("NCCL_EXTERN_C ")
        .skip(1)
        .filter_map(|prototype| prototype.split('(').next()?.split(' ').next_back());
    let table: BTreeSet<_> = Api::NAMES.iter().copied().collect();
    let declared: BTreeSet<_> = declared
        .into_iter()
        .chain(on_the_host)
        // In no library.
        .filter(|name| *name != "ncclCftBarrierCreateRequirement")
        .collect();
    assert_eq!(declared, table);
    assert_eq!(table.len(), Api::NAMES.len());
}

#[test]
fn every_macro_of_the_header_is_a_constant_here() {
    let Some(header) = header() else { return };
    let header = fs::read_to_string(header).unwrap();
    let ours = [
        include_str!("../src/bindings/types.rs"),
        include_str!("../src/bindings/initializers.rs"),
        include_str!("../src/constants.rs"),
    ];
    let missing: Vec<_> = header
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("#define NCCL_"))
        .filter_map(|line| {
            line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
                .next()
        })
        // The header's guard, and the macro that is `Version::code`.
        .filter(|name| !["H_", "VERSION"].contains(name))
        .filter(|name| {
            let constant = format!("pub const NCCL_{name}: ");
            !ours.iter().any(|text| text.contains(&constant))
        })
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}
