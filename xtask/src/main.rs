//! Chores of the workspace, run as `cargo xtask CHORE`; without a chore it lists them.
//!
//! One file per chore, each with a `run` that takes the arguments after the chore's name. A chore fails with exit code
//! 1 and one message; wrong usage ends with exit code 2.

mod arguments;
mod bindings;
mod check_bindings;
mod check_candle_cuda;
mod check_nvrtc;
mod check_ptx;
mod check_symbols;
mod conformance;
mod ep;
mod fault_table;
mod feature_mixes;
mod flight_recorder;
mod foreign_clients;
mod gpu_bundle;
mod header;
mod house;
mod launchers;
mod links;
mod public_api;
mod real_nccl;
mod sanitize;
mod site;
mod slim;
mod test_files;
mod test_names;
mod train_tiny;
mod wheels;
mod workspace;

/// The same description of the bindings that nccl-sys uses with its feature `bindgen`.
#[path = "../../nccl-sys/build/generator.rs"]
mod generator;

use std::env;
use std::error::Error;
use std::process::ExitCode;

use arguments::{Arguments, Usage};

/// The result of a chore.
type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

/// A chore: its name, its arguments, its description, and its function.
struct Chore {
    name: &'static str,
    arguments: &'static str,
    purpose: &'static str,
    run: fn(&mut Arguments) -> Result,
}

const CHORES: &[Chore] = &[
    Chore {
        name: "links",
        arguments: "",
        purpose: "fail if a link in a page leads to no file, or to no heading",
        run: links::run,
    },
    Chore {
        name: "site",
        arguments: "",
        purpose: "make the pages a site with search (target/site/book), and check its links",
        run: site::run,
    },
    Chore {
        name: "header",
        arguments: "",
        purpose: "download the NCCL release that nccl-sys binds; print the path of its nccl.h",
        run: header::run,
    },
    Chore {
        name: "bindings",
        arguments: "[--header PATH]",
        purpose: "generate the bindings from PATH, or from the header that `header` gives",
        run: bindings::run,
    },
    Chore {
        name: "check-bindings",
        arguments: "",
        purpose: "fail if the bindings differ from that header, or nccl-sys from that library",
        run: check_bindings::run,
    },
    Chore {
        name: "check-candle-cuda",
        arguments: "",
        purpose: "fail if nccl-candle does not compile with its feature `cuda`; needs no CUDA",
        run: check_candle_cuda::run,
    },
    Chore {
        name: "check-ptx",
        arguments: "",
        purpose: "fail if NVIDIA's assembler refuses the kernels of the crate `nccl`",
        run: check_ptx::run,
    },
    Chore {
        name: "check-nvrtc",
        arguments: "",
        purpose: "fail if NVIDIA's compiler refuses the kernels that are CUDA C++; needs no GPU",
        run: check_nvrtc::run,
    },
    Chore {
        name: "house",
        arguments: "[--tree DIRECTORY]",
        purpose: "count files, lines of code and circles of each crate, of this tree or of another one",
        run: house::run,
    },
    Chore {
        name: "check-symbols",
        arguments: "[--all|--oldest-and-newest|--release X.Y.Z]",
        purpose: "fail if real libraries have other functions than nccl-sys or the emulator say, or take another interface than preflight predicts",
        run: check_symbols::run,
    },
    Chore {
        name: "fault-table",
        arguments: "",
        purpose: "write the table of faults that are tried into docs/faults.md",
        run: fault_table::run,
    },
    Chore {
        name: "feature-mixes",
        arguments: "",
        purpose: "build `nccl` and `nccl-candle` beside other choices of cudarc's features",
        run: feature_mixes::run,
    },
    Chore {
        name: "flight-recorder",
        arguments: "",
        purpose: "give recordings to PyTorch's flight-recorder analyser, which it downloads",
        run: flight_recorder::run,
    },
    Chore {
        name: "foreign-clients",
        arguments: "",
        purpose: "run CuPy's and NVIDIA's Python bindings of NCCL on the emulator",
        run: foreign_clients::run,
    },
    Chore {
        name: "launchers",
        arguments: "[--write] [OPTIONS]",
        purpose: "run programs under Slurm, Open MPI, MPICH and nccl-run; or write what comes of it",
        run: launchers::run,
    },
    Chore {
        name: "public-api",
        arguments: "[--write]",
        purpose: "fail if the public items of the library crates differ from their lists; or write those",
        run: public_api::run,
    },
    Chore {
        name: "sanitize",
        arguments: "address|thread [--all]",
        purpose: "run tests of the crates under that sanitizer",
        run: sanitize::run,
    },
    Chore {
        name: "test-names",
        arguments: "[--write]",
        purpose: "fail if the names of all tests differ from their list; or write it",
        run: test_names::run,
    },
    Chore {
        name: "conformance",
        arguments: "[--all|--oldest-and-newest|--release X.Y.Z|--library PATH]",
        purpose: "compare the emulator with real libraries, as far as those answer without a GPU",
        run: conformance::run,
    },
    Chore {
        name: "real-nccl",
        arguments: "run|test|valgrind|fetch|terms [OPTIONS]",
        purpose: "run programs and tests on NVIDIA's library without a GPU; options: docs/real-nccl.md",
        run: real_nccl::run,
    },
    Chore {
        name: "train-tiny",
        arguments: "[OPTIONS]",
        purpose: "train the model of examples/inference_server; options: see --help",
        run: train_tiny::run,
    },
    Chore {
        name: "gpu-bundle",
        arguments: "[OPTIONS]",
        purpose: "pack what a machine with a GPU needs to check us; options: see gpu_bundle.rs",
        run: gpu_bundle::run,
    },
];

fn main() -> ExitCode {
    let mut arguments = Arguments::new(env::args_os().skip(1));
    let outcome = arguments.chore().and_then(|name| {
        let chore = CHORES
            .iter()
            .find(|chore| chore.name == name)
            .ok_or_else(|| Usage(format!("there is no chore `{name}`")))?;
        (chore.run)(&mut arguments)
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error}");
            if error.is::<Usage>() {
                eprint!("{}", usage());
                ExitCode::from(2)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}

fn usage() -> String {
    let mut text = String::from("usage: cargo xtask CHORE\n");
    for Chore {
        name,
        arguments,
        purpose,
        ..
    } in CHORES
    {
        let call = format!("{name} {arguments}");
        text += &format!("  {call:<25} {purpose}\n");
    }
    text
}
