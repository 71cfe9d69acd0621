//! `feature-mixes`: checks that the crates `nccl` and `nccl-candle` build alone, and beside other programs' choices for
//! cudarc.
//!
//! Cargo unifies features: a program that uses `nccl` and, for example, candle gets one cudarc with the choices of both. cudarc
//! does not build with two CUDA versions, nor with two ways of linking, so `nccl` must make neither choice. Only a program
//! outside of this workspace can show this, so each mix becomes such a program, which is checked.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

use crate::arguments::Arguments;
use crate::{Result, workspace};

/// A program whose choices `nccl` has to build with.
struct Mix {
    name: &'static str,
    /// The features that the program itself requests of cudarc; empty: it does not use cudarc.
    cudarc: &'static [&'static str],
    /// A CUDA version in the environment, by cudarc's own variable.
    version: Option<&'static str>,
    /// The features of `nccl`, without its default ones.
    only: Option<&'static [&'static str]>,
    /// Whether the program uses `nccl-candle` and candle itself. `check-candle-cuda` checks candle's feature `cuda`.
    candle: bool,
}

impl Mix {
    const fn cudarc(name: &'static str, cudarc: &'static [&'static str]) -> Self {
        Self {
            name,
            cudarc,
            version: None,
            only: None,
            candle: false,
        }
    }

    const fn version(name: &'static str, version: &'static str) -> Self {
        Self {
            name,
            cudarc: &[],
            version: Some(version),
            only: None,
            candle: false,
        }
    }

    const fn only(name: &'static str, features: &'static [&'static str]) -> Self {
        Self {
            only: Some(features),
            ..Self::cudarc(name, &[])
        }
    }

    const fn candle(name: &'static str, cudarc: &'static [&'static str]) -> Self {
        Self {
            candle: true,
            ..Self::cudarc(name, cudarc)
        }
    }
}

const MIXES: &[Mix] = &[
    Mix::cudarc("alone", &[]),
    Mix::only("core", &[]),
    Mix::only("core-metrics", &["float8", "metrics"]),
    Mix::only("core-moe", &["moe"]),
    Mix::only("world", &["world"]),
    Mix::only("world-nvml", &["nvml"]),
    Mix::cudarc("dynamic-linking", &["driver", "dynamic-linking"]),
    Mix::cudarc("dynamic-loading", &["driver", "dynamic-loading"]),
    Mix::cudarc("cuda-12090", &["driver", "cuda-12090"]),
    // The choices of an inference engine that uses cudarc's own NCCL.
    Mix::cudarc(
        "engine",
        &[
            "driver",
            "cublas",
            "nccl",
            "nvrtc",
            "cuda-13000",
            "dynamic-linking",
        ],
    ),
    Mix::candle("candle", &["driver", "dynamic-linking", "cuda-13000"]),
    Mix::version("cuda-11.8", "11080"),
    Mix::version("cuda-12.8", "12080"),
    Mix::version("cuda-13.4", "13040"),
];

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    arguments.finish()?;
    // All programs use the same directory in turn, with the workspace's target directory: packages that do not depend
    // on cudarc are checked once.
    let program = tempfile::tempdir()?;
    let target = workspace::target_directory();
    let mut failed = Vec::new();
    for mix in MIXES {
        let start = Instant::now();
        write_program(program.path(), mix)?;
        let outcome = check(program.path(), &target, mix);
        let seconds = start.elapsed().as_secs_f32();
        match outcome {
            Ok(()) => eprintln!("{:<16} ok, {seconds:.1} s", mix.name),
            Err(error) => {
                eprintln!("{:<16} FAILED: {error}", mix.name);
                failed.push(mix.name);
            }
        }
    }
    if failed.is_empty() {
        Ok(())
    } else {
        Err(format!("cannot build {}", failed.join(", ")).into())
    }
}

/// Writes the program of a mix, with the versions of the workspace's lock file.
fn write_program(directory: &Path, mix: &Mix) -> Result {
    let nccl = workspace::root().join("nccl");
    let mut manifest = format!(
        "[package]\nname = \"mix\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n\
         [workspace]\n\n[dependencies]\nnccl = {{ path = {:?}{} }}\n",
        nccl.display().to_string(),
        mix.only.map_or_else(String::new, |features| format!(
            ", default-features = false, features = {features:?}"
        )),
    );
    let mut code = String::from("pub use nccl as library;\n");
    if mix.only.is_some() {
        code += "pub fn all(comm: &nccl::Communicator, x: &mut nccl::cudarc::driver::CudaSlice<f32>) \
                 -> nccl::Result<()> { comm.all_reduce_in_place(x, nccl::ReduceOp::Sum)?.wait() }\n";
    }
    if !mix.cudarc.is_empty() {
        manifest += &format!(
            "cudarc = {{ version = \"*\", default-features = false, features = {:?} }}\n",
            mix.cudarc
        );
        // Fails unless both use the same cudarc: otherwise its types differ.
        code += "pub fn same(context: &cudarc::driver::CudaContext)\n    \
                 -> &nccl::cudarc::driver::CudaContext { context }\n";
    }
    if mix.candle {
        let bridge = workspace::root().join("nccl-candle");
        let bridge = bridge.display().to_string();
        manifest += &format!("nccl-candle = {{ path = {bridge:?} }}\ncandle-core = \"*\"\n");
        code += "pub fn sum(comm: &nccl_candle::TensorCommunicator, x: &candle_core::Tensor)\n    \
                 -> candle_core::Result<candle_core::Tensor> { comm.all_reduce(x, nccl::ReduceOp::Sum) }\n";
    }
    fs::create_dir_all(directory.join("src"))?;
    fs::write(directory.join("Cargo.toml"), manifest)?;
    fs::write(directory.join("src").join("lib.rs"), code)?;
    fs::copy(
        workspace::root().join("Cargo.lock"),
        directory.join("Cargo.lock"),
    )?;
    Ok(())
}

fn check(directory: &Path, target: &Path, mix: &Mix) -> Result {
    let cargo = |arguments: &[&str]| {
        let mut cargo = workspace::cargo();
        cargo
            .current_dir(directory)
            .args(arguments)
            .env("CARGO_TARGET_DIR", target);
        match mix.version {
            Some(version) => cargo.env("CUDARC_CUDA_VERSION", version),
            None => cargo.env_remove("CUDARC_CUDA_VERSION"),
        };
        cargo
    };
    // The workspace's own build has already fetched nearly everything; only the rest needs the network.
    let complete = cargo(&["fetch", "--offline", "--quiet"])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    let offline: &[&str] = if complete { &["--offline"] } else { &[] };
    workspace::run(cargo(&["check", "--quiet"]).args(offline))
}
