//! `gpu-bundle`: packs everything that a machine with a GPU needs to check this workspace into one directory.
//!
//! ```text
//! cargo xtask gpu-bundle [--out DIRECTORY] [--nccl-tests CHECKOUT] [--no-libnccl | --libnccl-if-possible]
//! ```
//!
//! The machine has a CUDA driver; no Rust, no network. The bundle holds
//!
//! ```text
//! run.sh              starts the check: run.sh [quick|full] [--emulated]
//! gpu-check.gz        what run.sh unpacks and starts: unpacks the rest, runs every step, writes the reports
//! programs.tar.xz     release binaries of tests, examples and programs; NCCL's headers, and the
//!                     sources of nccl-tests if --nccl-tests named a checkout of them
//! libnccl.so.2.xz     the release of NCCL that nccl-sys binds, with code for sm_90 only and nothing for debuggers (slim.rs)
//! bundle.json         what it was made of
//! ```
//!
//! and weighs less than [`LIMIT`].

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::arguments::{Arguments, Usage};
use crate::test_files::of_packages;
use crate::wheels::Release;
use crate::workspace::{self, cargo, root, run as run_command};
use crate::{Result, header, slim};

/// The packages, and the kinds of their targets that are included.
const PACKAGES: &[(&str, &[&str])] = &[
    ("nccl-tools", &["bin", "example"]),
    ("nccl-tests", &["test"]),
];
/// The most that a bundle may weigh in bytes.
const LIMIT: u64 = 60 << 20;
/// Compute capability, times ten, of the GPU: H100 and H200.
const ARCHITECTURE: u32 = 90;
/// The newest glibc whose symbols a binary may need.
const NEWEST_GLIBC: (u32, u32) = (2, 36);
/// Tests (binaries, or modules of binaries with many files) and examples that are not included, each with the reason.
const LEFT_OUT: &[(&str, &str, &str)] = &[
    ("example", "all_to_all_model", "it prints what formulas say"),
    ("example", "data_parallel", "the check does not run it"),
    ("example", "going_on", "the check does not run it"),
    ("example", "hello_all_reduce", "the check does not run it"),
    ("example", "moe", "the check does not run it"),
    ("example", "ring_sendrecv", "the check does not run it"),
    ("example", "root_cause", "the check does not run it"),
    ("example", "subgroups", "the check does not run it"),
    ("example", "survive_a_death", "the check does not run it"),
    (
        "example",
        "overhead_instructions",
        "it counts what the emulator makes of it",
    ),
    ("test", "abort_all", "it needs no GPU"),
    ("test", "awaiting", "it tries executors, and needs no GPU"),
    ("test", "before_nccl", "it fails before NCCL is asked"),
    ("test", "captures_differ", "it fails before NCCL is asked"),
    ("test", "events", "it needs no GPU"),
    ("test", "exits", "its faults are the emulator's"),
    ("test", "compile_fail", "it runs the compiler"),
    ("test", "doctor", "it needs no GPU"),
    ("test", "fatal", "its leaks are the emulator's"),
    ("test", "fault_matrix", "its faults are the emulator's"),
    ("test", "faults_of_one", "its faults are the emulator's"),
    ("test", "going_on", "it needs no GPU"),
    ("test", "gpu_check", "it tests the check itself"),
    ("test", "examples", "its programs are not in the bundle"),
    ("test", "manifests", "it needs no GPU"),
    ("test", "store", "it needs no GPU"),
    ("test", "hangs", "its hangs are the emulator's"),
    ("test", "isolated_hosts", "it needs no GPU"),
    (
        "test",
        "non_blocking",
        "tests that are there already, in the mode of launch_modes",
    ),
    ("test", "launch", "it needs no GPU"),
    (
        "test",
        "no_allocation",
        "it counts what the crate itself allocates",
    ),
    ("test", "nccl_run", "it needs no GPU"),
    ("test", "observability", "it reads the sources"),
    ("test", "observer", "it needs no GPU"),
    ("test", "perf", "it runs on the emulator wherever it is"),
    ("test", "preflight", "it needs no GPU"),
    ("test", "pytorch_analyser", "it needs Python and a download"),
    ("test", "recorder", "it needs no GPU"),
    ("test", "recordings", "it needs no GPU"),
    ("test", "rendezvous", "it needs no GPU"),
    ("test", "send_sync", "it has done its work when it is built"),
    ("test", "spawn", "it needs no GPU"),
    ("test", "start_up_faults", "it needs no GPU"),
    ("test", "succession", "it needs no GPU"),
    (
        "test",
        "support_itself",
        "it tests the helpers of the other tests",
    ),
    ("test", "stuck_calls", "its hangs are the emulator's"),
    ("test", "timeouts", "it needs no GPU"),
    ("test", "watchdog", "its hangs are the emulator's"),
];

/// The options of a bundle.
struct Options {
    out: PathBuf,
    nccl_tests: Option<PathBuf>,
    libnccl: Libnccl,
}

#[derive(PartialEq)]
enum Libnccl {
    Needed,
    IfPossible,
    None,
}

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    let out = arguments.path("--out")?;
    let nccl_tests = arguments.path("--nccl-tests")?;
    let libnccl = match (
        arguments.flag("--no-libnccl"),
        arguments.flag("--libnccl-if-possible"),
    ) {
        (false, false) => Libnccl::Needed,
        (false, true) => Libnccl::IfPossible,
        (true, false) => Libnccl::None,
        (true, true) => {
            let text = "--no-libnccl and --libnccl-if-possible exclude each other";
            return Err(Usage(text.into()).into());
        }
    };
    arguments.finish()?;
    if let Some(checkout) = &nccl_tests
        && !checkout.join("src/alltoall.cu").is_file()
    {
        let text = format!("{} is no checkout of nccl-tests", checkout.display());
        return Err(Usage(text).into());
    }
    let options = Options {
        out: out.unwrap_or_else(|| workspace::target_directory().join("gpu-bundle")),
        nccl_tests,
        libnccl,
    };
    bundle(&options)?;
    println!("{}", options.out.display());
    Ok(())
}

fn bundle(options: &Options) -> Result {
    let artifacts = build()?;
    let out = &options.out;
    if out.exists() && !out.join("bundle.json").is_file() && fs::read_dir(out)?.next().is_some() {
        return Err(format!("{} is something else than a bundle", out.display()).into());
    }
    let _ = fs::remove_dir_all(out);
    fs::create_dir_all(out)?;
    // The initial contents mark an interrupted bundle, which may be replaced.
    fs::write(out.join("bundle.json"), "{}\n")?;
    let work = tempfile::tempdir()?;
    let programs = work.path().join("programs");
    let mut glibc = (0, 0);
    for artifact in &artifacts {
        let target = match artifact.kind.as_str() {
            "bin" if artifact.name == "gpu-check" => work.path().join(&artifact.name),
            "bin" => programs.join(&artifact.name),
            "test" => programs.join("deps").join(&artifact.name),
            _ => programs.join("examples").join(&artifact.name),
        };
        fs::create_dir_all(target.parent().expect("it is in a directory"))?;
        run_command(
            Command::new("strip")
                .arg("-o")
                .arg(&target)
                .arg(&artifact.path),
        )?;
        glibc = glibc.max(needed_glibc(&target)?);
    }
    // This program unpacks the rest; it is compressed with gzip, which any machine has.
    let check = work.path().join("gpu-check");
    run_command(Command::new("gzip").arg("-9n").arg(&check))?;
    fs::copy(check.with_extension("gz"), out.join("gpu-check.gz"))?;
    if glibc > NEWEST_GLIBC {
        let (found, most) = (format!("{glibc:?}"), format!("{NEWEST_GLIBC:?}"));
        return Err(format!(
            "the binaries need glibc {found}, newer than {most}: build on an older system"
        )
        .into());
    }

    let release = match options.libnccl {
        Libnccl::None => None,
        Libnccl::Needed => Some(header::release()?),
        Libnccl::IfPossible => header::release()
            .inspect_err(|error| eprintln!("xtask: NO LIBNCCL IN THIS BUNDLE: {error}"))
            .ok(),
    };
    let mut library = Value::Null;
    if let Some(release) = &release {
        copy_tree(&release.include, &programs.join("include"))?;
        let slim = slimmed(release)?;
        fs::copy(&slim, out.join("libnccl.so.2.xz"))?;
        library = json!({"release": workspace::nccl_release()?, "architecture": ARCHITECTURE});
    }
    if let Some(checkout) = &options.nccl_tests {
        copy_tree(checkout, &programs.join("nccl-tests"))?;
        copy_tree(&root().join("gpu/mpi"), &programs.join("mpi"))?;
    }
    python(
        PACK,
        &[&programs, &out.join("programs.tar.xz")],
        "packing the programs",
    )?;
    let script = out.join("run.sh");
    fs::copy(root().join("gpu/run.sh"), &script)?;

    let tests: Vec<String> = wanted()?
        .into_iter()
        .filter(|target| target.kind == "test")
        .map(|target| match target.module {
            Some(module) => format!("{}::{module}", target.name),
            None => target.name,
        })
        .collect();
    let description = json!({
        "commit": commit(),
        "libnccl": library,
        "glibc": format!("{}.{}", glibc.0, glibc.1),
        "tests": tests,
        "examples": names(&artifacts, "example"),
        "nccl_tests": options.nccl_tests.as_deref().map(commit_of),
        "left_out": left_out(),
    });
    fs::write(
        out.join("bundle.json"),
        format!("{}\n", serde_json::to_string_pretty(&description)?),
    )?;

    let mut total = 0;
    for entry in fs::read_dir(out)? {
        let entry = entry?;
        let size = entry.metadata()?.len();
        eprintln!("{size:>12}  {}", entry.file_name().to_string_lossy());
        total += size;
    }
    eprintln!(
        "{total:>12}  in all, of at most {LIMIT}; needs glibc {}.{}",
        glibc.0, glibc.1
    );
    if total > LIMIT {
        return Err(format!("the bundle weighs {total} bytes, more than {LIMIT}").into());
    }
    Ok(())
}

/// The targets that are not included and why, by kind.
fn left_out() -> BTreeMap<&'static str, BTreeMap<&'static str, &'static str>> {
    let mut all = BTreeMap::<_, BTreeMap<_, _>>::new();
    for &(kind, name, why) in LEFT_OUT {
        all.entry(kind).or_default().insert(name, why);
    }
    all
}

/// An executable that cargo built.
struct Artifact {
    kind: String,
    name: String,
    path: PathBuf,
}

fn names<'a>(artifacts: &'a [Artifact], kind: &str) -> Vec<&'a str> {
    let of_kind = artifacts.iter().filter(|artifact| artifact.kind == kind);
    of_kind.map(|artifact| &*artifact.name).collect()
}

/// A target of Cargo's, or a module of one.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Target {
    kind: String,
    name: String,
    module: Option<String>,
}

/// The targets of the packages that are included.
fn wanted() -> Result<Vec<Target>> {
    let mut command = cargo();
    command.args(["metadata", "--no-deps", "--format-version", "1"]);
    let metadata: Value = serde_json::from_str(&workspace::output(&mut command)?)?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut all = Vec::new();
    for &(name, kinds) in PACKAGES {
        let mut packages = metadata["packages"].as_array().into_iter().flatten();
        let own = packages.find(|package| package["name"] == name);
        let targets = own.and_then(|package| package["targets"].as_array());
        let targets = targets.ok_or_else(|| format!("cargo knows no package {name}"))?;
        let targets = targets.iter().map(|target| Target {
            kind: text(&target["kind"][0]),
            name: text(&target["name"]),
            module: None,
        });
        // Tests are selected by file.
        all.extend(targets.filter(|one| one.kind != "test" && kinds.contains(&one.kind.as_str())));
        if kinds.contains(&"test") {
            all.extend(of_packages(&[name])?.into_iter().map(|file| Target {
                kind: "test".to_owned(),
                name: file.target,
                module: file.module,
            }));
        }
    }
    chosen(&all)
}

/// Returns the targets to include.
fn chosen(all: &[Target]) -> Result<Vec<Target>> {
    let is = |target: &Target, left: &(&str, &str, &str)| {
        let name = target.module.as_ref().unwrap_or(&target.name);
        (target.kind.as_str(), name.as_str()) == (left.0, left.1)
    };
    if let Some((kind, name, _)) = LEFT_OUT
        .iter()
        .find(|left| !all.iter().any(|target| is(target, left)))
    {
        return Err(format!("there is no {kind} {name} to be left out").into());
    }
    let goes = all
        .iter()
        .filter(|target| !LEFT_OUT.iter().any(|left| is(target, left)));
    Ok(goes.cloned().collect())
}

/// Builds the included targets, optimised, and nothing else.
fn build() -> Result<Vec<Artifact>> {
    let wanted: BTreeSet<_> = wanted()?
        .into_iter()
        .map(|target| (target.kind, target.name))
        .collect();
    let mut command = cargo();
    // The bundle is for measurements, so it is optimised as a whole.
    command.args(["build", "--profile", "bench"]);
    for (package, _) in PACKAGES {
        command.args(["--package", package]);
    }
    // With a GPU, NVIDIA's library runs on it, and not on the emulator.
    command.arg("--no-default-features");
    for (kind, name) in &wanted {
        command.arg(format!("--{kind}={name}"));
    }
    command.arg("--message-format=json-render-diagnostics");
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("cannot run cargo: {error}"))?;
    if !output.status.success() {
        return Err("the programs cannot be built".into());
    }
    let mut artifacts = Vec::new();
    for line in String::from_utf8(output.stdout)?.lines() {
        let message: Value = serde_json::from_str(line)?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let target = (
            text(&message["target"]["kind"][0]),
            text(&message["target"]["name"]),
        );
        let path = text(&message["executable"]);
        // Cargo builds programs along with tests, whether or not they are included.
        if message["reason"] == "compiler-artifact" && !path.is_empty() && wanted.contains(&target)
        {
            let (path, (kind, name)) = (path.into(), target);
            artifacts.push(Artifact { kind, name, path });
        }
    }
    artifacts.sort_by(|a, b| (&a.kind, &a.name).cmp(&(&b.kind, &b.name)));
    artifacts.dedup_by(|a, b| (&a.kind, &a.name) == (&b.kind, &b.name));
    if artifacts.len() != wanted.len() {
        let (made, asked) = (artifacts.len(), wanted.len());
        return Err(format!("cargo made {made} of {asked} programs").into());
    }
    Ok(artifacts)
}

/// The newest `GLIBC_` version among the symbols that a binary imports.
fn needed_glibc(binary: &Path) -> Result<(u32, u32)> {
    let output = Command::new("objdump").arg("-T").arg(binary).output();
    let output = output.map_err(|error| format!("cannot run objdump (binutils): {error}"))?;
    Ok(newest_glibc(&String::from_utf8_lossy(&output.stdout)))
}

fn newest_glibc(text: &str) -> (u32, u32) {
    let versions = text.split("GLIBC_").skip(1).filter_map(|rest| {
        let version = rest
            .split(|c: char| !c.is_ascii_digit() && c != '.')
            .next()?;
        let mut parts = version.split('.').map(|part| part.parse().ok());
        Some((parts.next()??, parts.next()??))
    });
    versions.max().unwrap_or((0, 0))
}

/// Returns the slimmed and compressed library, kept beside the whole one.
fn slimmed(release: &Release) -> Result<PathBuf> {
    let name = format!("libnccl-sm{ARCHITECTURE}-slim.so.2");
    let packed = release.library.with_file_name(format!("{name}.xz"));
    if packed.is_file() {
        return Ok(packed);
    }
    let mut image = fs::read(&release.library)?;
    let kept = slim::keep_architecture(&mut image, ARCHITECTURE)
        .map_err(|error| format!("{}: {error}", release.library.display()))?;
    eprintln!(
        "kept {kept} bytes of device code for sm_{ARCHITECTURE} of a library of {}",
        image.len()
    );
    let directory = tempfile::tempdir_in(packed.parent().expect("it is in the cache"))?;
    let [plain, compressed] =
        [name.clone(), format!("{name}.xz")].map(|n| directory.path().join(n));
    fs::write(&plain, image)?;
    python(COMPRESS, &[&plain, &compressed], "compressing libnccl")?;
    fs::rename(&compressed, &packed)?;
    Ok(packed)
}

fn python(program: &str, arguments: &[&Path], what: &str) -> Result {
    run_command(
        Command::new("python3")
            .args(["-c", program])
            .args(arguments),
    )
    .map_err(|error| format!("{what}: {error}").into())
}

const COMPRESS: &str = r#"
import lzma, shutil, sys
with open(sys.argv[1], "rb") as source, lzma.open(sys.argv[2], "wb", preset=6) as target:
    shutil.copyfileobj(source, target, 1 << 20)
"#;

/// Without owners, so that it unpacks alike for every user. The programs share most of their code: a window that holds
/// several of them halves the archive.
const PACK: &str = r#"
import lzma, sys, tarfile
def anonymous(member):
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
window = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 256 << 20}]
with lzma.open(sys.argv[2], "wb", filters=window) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
    archive.add(sys.argv[1], arcname="programs", filter=anonymous)
"#;

/// Copies files and directories, except names that begin with a dot and build outputs.
fn copy_tree(from: &Path, to: &Path) -> Result {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let name = entry.file_name();
        if name.to_string_lossy().starts_with('.') || name == "build" {
            continue;
        }
        let target = to.join(&name);
        if entry.file_type()?.is_dir() {
            copy_tree(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

/// The commit of this workspace, with a `+` if there are uncommitted changes.
fn commit() -> String {
    commit_of(root())
}

fn commit_of(directory: &Path) -> String {
    let git = |arguments: &[&str]| {
        let output = Command::new("git")
            .arg("-C")
            .arg(directory)
            .args(arguments)
            .stderr(Stdio::null())
            .output()
            .ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]) else {
        return "unknown".into();
    };
    let changed = git(&["status", "--porcelain", "--untracked-files=no"]);
    let mark = if changed.is_none_or(|text| !text.is_empty()) {
        "+"
    } else {
        ""
    };
    format!("{commit}{mark}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_a_kind_and_a_name_and_its_namesakes_go_along() {
        let own = |(kind, name): &(&str, &str)| Target {
            kind: (*kind).to_owned(),
            name: (*name).to_owned(),
            module: None,
        };
        let mut all: Vec<_> = LEFT_OUT.iter().map(|left| own(&(left.0, left.1))).collect();
        // A module has its own name.
        let first = all.iter_mut().find(|target| target.kind == "test").unwrap();
        let module = std::mem::replace(&mut first.name, "api".to_owned());
        first.module = Some(module);
        assert!(chosen(&all).unwrap().is_empty());
        all.push(own(&("example", "perf")));
        let [benchmark] = &chosen(&all).unwrap()[..] else {
            panic!("one program");
        };
        assert_eq!(*benchmark, own(&("example", "perf")));
        let error = chosen(&all[1..]).unwrap_err().to_string();
        let (kind, name, _) = LEFT_OUT[0];
        let expected = format!("there is no {kind} {name}");
        assert!(error.contains(&expected), "{error}");
    }

    #[test]
    fn files_of_a_binary_of_many_are_included_one_by_one() {
        let wanted = wanted().unwrap();
        let has = |module: &str| {
            let mut modules = wanted.iter().filter_map(|target| target.module.as_deref());
            modules.any(|one| one == module)
        };
        assert!(has("plans") && has("killed") && has("ras"));
        assert!(!has("awaiting") && !has("exits") && !has("doctor"));
    }

    #[test]
    fn versions_of_glibc_are_compared_as_numbers() {
        let text = "0000 DF *UND* 0000 (GLIBC_2.9)  x\n (GLIBC_2.34) y\n (GLIBC_2.2.5) z (GLIBC_PRIVATE) p";
        assert_eq!(newest_glibc(text), (2, 34));
        assert_eq!(newest_glibc("nothing"), (0, 0));
    }
}
