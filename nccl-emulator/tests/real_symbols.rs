//! The functions of a real NCCL against the tables of `nccl-sys`, and against the emulator as that release.
//!
//! `NCCL_TEST_LIBRARY` names the library, of any release; `cargo xtask check-symbols` fetches several and
//! runs this on each. The real library is loaded into this process, the emulator into another.

use std::collections::BTreeSet;
use std::env;
use std::ffi::CString;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use nccl_sys::{Api, Loader, Version, since};

/// What NCCL exports beside the functions of its headers for the host. Neither `nccl-sys` nor the emulator has it.
const UNDECLARED: &[(Version, &[&str])] = &[
    (Version::new(2, 28, 3), &["ncclResetDebugInitInternal"]),
    (
        Version::new(2, 29, 7),
        &[
            "ncclGinInboxA2ACreateRequirement",
            "ncclGinOutboxCreateRequirement",
        ],
    ),
];

/// The function without a second name for profilers.
const WITHOUT_TWIN: &str = "ncclResetDebugInitInternal";

/// Tells the child of a test which names to look up in the emulator.
const NAMES: &str = "NCCL_EMULATOR_TEST_NAMES";

/// Returns the real library; without one, returns `None` and prints that the test is skipped.
fn library() -> Option<PathBuf> {
    let library = env::var_os("NCCL_TEST_LIBRARY").map(PathBuf::from);
    if library.is_none() {
        // Not `eprintln!`, which the test harness would swallow.
        let message = b"NOT TESTED: NCCL_TEST_LIBRARY names no real libnccl.so.2\n";
        std::io::stderr().write_all(message).unwrap();
    }
    library
}

fn release_of(library: &Path) -> Version {
    // SAFETY: the caller who set the variable vouches for the library.
    let loaded = unsafe { Loader::new().path(library).load() };
    loaded.unwrap().version
}

type Names = BTreeSet<String>;

/// The names of `nccl.h`, and the others, that a release should have.
fn expected(release: Version) -> (Names, Names) {
    let declared = Api::NAMES
        .iter()
        .filter(|name| since(name).is_some_and(|first| first <= release));
    let others = UNDECLARED
        .iter()
        .filter(|(first, _)| *first <= release)
        .flat_map(|(_, names)| *names);
    let owned = |name: &&str| (*name).to_owned();
    (declared.map(owned).collect(), others.map(owned).collect())
}

/// Each name, and its twin.
fn with_twins(names: &Names) -> Names {
    let twins = names
        .iter()
        .filter(|name| *name != WITHOUT_TWIN)
        .map(|name| format!("p{name}"));
    names.iter().cloned().chain(twins).collect()
}

/// Says how `found` differs from `expected`, if it does.
fn compare(what: &str, found: &Names, expected: &Names) {
    let missing: Vec<_> = expected.difference(found).collect();
    let unexpected: Vec<_> = found.difference(expected).collect();
    assert!(
        missing.is_empty() && unexpected.is_empty(),
        "{what}: missing {missing:?}; there too early, or unknown: {unexpected:?}"
    );
}

#[test]
fn the_tables_know_every_function_of_the_real_library_and_its_release() {
    let Some(library) = library() else { return };
    let release = release_of(&library);
    let (declared, others) = expected(release);
    let all = with_twins(&declared.union(&others).cloned().collect());
    let found = exported(&library);
    compare(&format!("NCCL {release}"), &found, &all);
    println!(
        "NCCL {release}: {} functions of nccl.h, {} others, {} symbols",
        declared.len(),
        others.len(),
        found.len()
    );
}

#[test]
fn the_emulator_has_what_the_release_that_it_pretends_to_be_has() {
    let Some(library) = library() else { return };
    let release = release_of(&library);
    let (_, others) = expected(release);
    let real = exported(&library);
    let declared = real.difference(&with_twins(&others)).cloned().collect();
    // The names of all releases.
    let (every, every_other) = expected(Version::new(u32::MAX, 0, 0));
    let every: Names = every.union(&every_other).cloned().collect();
    let asked: Names = with_twins(&every).union(&real).cloned().collect();
    let asked: Vec<_> = asked.into_iter().collect();

    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", "the_emulator_of_another_test", "--nocapture"])
        .env(NAMES, asked.join(" "))
        .env("NCCL_EMULATOR_VERSION", release.to_string())
        .env_remove("NCCL_TEST_LIBRARY")
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let printed = String::from_utf8(output.stdout).unwrap();
    let found: Names = printed
        .lines()
        .filter_map(|line| line.strip_prefix("symbol ").map(str::to_owned))
        .collect();
    compare(&format!("the emulator as {release}"), &found, &declared);
}

/// Not a test: the code of the child process of the test above.
#[test]
fn the_emulator_of_another_test() {
    let Ok(names) = env::var(NAMES) else { return };
    nccl_emulator::install().unwrap();
    // SAFETY: the name leads to the emulator.
    let handle = unsafe { libc::dlopen(c"libnccl.so.2".as_ptr(), libc::RTLD_NOW) };
    assert!(!handle.is_null());
    // The test harness has begun a line.
    println!();
    for name in names.split(' ') {
        let symbol = CString::new(name).unwrap();
        // SAFETY: a live handle and a C string.
        if !unsafe { libc::dlsym(handle, symbol.as_ptr()) }.is_null() {
            println!("symbol {name}");
        }
    }
}

/// What a library exports under NCCL's names, from its dynamic symbol table: `dlsym` finds only names that
/// the caller knows.
fn exported(library: &Path) -> Names {
    const DYNSYM: u32 = 11;
    const ENTRY: usize = 24;
    let file = File::open(library).unwrap();
    let read = |at: u64, length: u64| {
        let mut bytes = vec![0; length as usize];
        file.read_exact_at(&mut bytes, at).unwrap();
        bytes
    };
    let u16_at = |b: &[u8], at: usize| u16::from_le_bytes([b[at], b[at + 1]]);
    let u32_at = |b: &[u8], at: usize| u32::from_le_bytes(b[at..at + 4].try_into().unwrap());
    let u64_at = |b: &[u8], at: usize| u64::from_le_bytes(b[at..at + 8].try_into().unwrap());

    // The ELF header says where the section headers are, how large one is, and how many there are.
    let header = read(0, 64);
    assert_eq!(&header[..6], b"\x7fELF\x02\x01", "{}", library.display());
    let (size, count) = (u16_at(&header, 58), u16_at(&header, 60));
    let headers = read(u64_at(&header, 40), u64::from(size) * u64::from(count));
    let sections: Vec<_> = headers.chunks(size.into()).collect();
    let contents = |section: &[u8]| read(u64_at(section, 24), u64_at(section, 32));

    let symbols = sections.iter().find(|section| u32_at(section, 4) == DYNSYM);
    let symbols = symbols.expect("a shared object has dynamic symbols");
    let strings = contents(sections[u32_at(symbols, 40) as usize]);
    let text = |at: u32| {
        let rest = &strings[at as usize..];
        let end = rest.iter().position(|byte| *byte == 0).unwrap();
        String::from_utf8_lossy(&rest[..end]).into_owned()
    };
    contents(symbols)
        .chunks(ENTRY)
        // Section 0: not defined here.
        .filter(|symbol| u16_at(symbol, 6) != 0)
        .map(|symbol| text(u32_at(symbol, 0)))
        .filter(|name| name.starts_with("nccl") || name.starts_with("pnccl"))
        .collect()
}
