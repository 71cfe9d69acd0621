//! Records how this package was built, for benchmark headers and bug reports. It never fails a build: unknown values
//! are left empty.

use std::env;
use std::path::Path;
use std::process::Command;

fn main() {
    let set = |name: &str, value: String| println!("cargo:rustc-env=NCCL_TOOLS_{name}={value}");
    set("COMMIT", commit().unwrap_or_default());
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    set(
        "RUSTC",
        run(Command::new(rustc).arg("--version")).unwrap_or_default(),
    );
    set("PROFILE", profile());
    set("TARGET", env::var("TARGET").unwrap_or_default());
    // Flags are separated by 0x1f.
    let flags = env::var("CARGO_ENCODED_RUSTFLAGS")
        .unwrap_or_default()
        .replace('\x1f', " ");
    set("RUSTFLAGS", one_line(&flags));

    // Changes of these files can change the commit or its comparison with the files.
    let of_git = ["HEAD", "index"].map(|name| {
        // In a worktree of git, they are elsewhere.
        run(Command::new("git").args(["rev-parse", "--git-path", name])).unwrap_or_default()
    });
    for path in of_git.iter().map(String::as_str).chain([
        "Cargo.toml",
        "Cargo.lock",
        "build.rs",
        "src",
        "examples",
        "benches",
        "nccl/src",
        "nccl-sys/src",
        "nccl-emulator/src",
        "crates",
    ]) {
        if Path::new(path).exists() {
            println!("cargo:rerun-if-changed={path}");
        }
    }
}

/// The commit of the repository at whose root this package lies, `-modified` if tracked files differ from it.
fn commit() -> Option<String> {
    // A package unpacked inside another repository has no commit of its own.
    if !Path::new(".git").exists() {
        return None;
    }
    let hash = run(Command::new("git").args(["rev-parse", "--short=12", "HEAD"]))?;
    // Without optional locks, so that a build beside another git command does not disturb it.
    let clean = Command::new("git")
        .args(["--no-optional-locks", "diff-index", "--quiet", "HEAD", "--"])
        .status()
        .ok()?;
    // 1 means that files differ; other codes but 0, that git does not know.
    Some(if clean.code() == Some(1) {
        format!("{hash}-modified")
    } else {
        hash
    })
}

/// The directory name of the profile, which unlike `PROFILE` distinguishes custom profiles.
fn profile() -> String {
    let named = env::var_os("OUT_DIR").and_then(|out| {
        // …/target/[triple/]<profile>/build/<package>/out
        let profile = Path::new(&out).ancestors().nth(3)?.file_name()?;
        Some(profile.to_string_lossy().into_owned())
    });
    one_line(
        &named
            .or_else(|| env::var("PROFILE").ok())
            .unwrap_or_default(),
    )
}

fn run(command: &mut Command) -> Option<String> {
    let output = command.output().ok()?;
    let text = output
        .status
        .success()
        .then(|| String::from_utf8(output.stdout).ok())??;
    Some(one_line(&text))
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
