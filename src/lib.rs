//! The common code of this workspace's benchmarks, examples and tests.
//!
//! The benchmarks follow NVIDIA's nccl-tests: its options ([`options`]), its method ([`bench`](mod@bench)), its text
//! ([`format`](mod@format)) and its JSON ([`json`]), so that figures and scripts carry over; [`perf`] makes a program
//! of them. [`spawn`] starts the ranks, and ends all of them when one fails or when the process that started them is
//! gone; [`testing`] does so for tests.
//!
//! [`gpu_check`] checks a machine with a GPU; of its parts, [`conformance`] compares NCCL with the emulator, and
//! [`measure`] measures what only a GPU can show. Both call NCCL's functions directly ([`raw`]).
//!
//! [`doctor`] is the program that checks whether NCCL can work, and reads its logs after a failure; [`report`] formats
//! findings.
//!
//! This package is not published; programs may copy parts of it.

// `nccl_call!` takes numbers, handles and addresses; its documentation forbids other arguments.
#![allow(clippy::macro_metavars_in_unsafe)]

#[cfg(not(target_os = "linux"))]
compile_error!("NCCL runs on Linux, and so does everything here");

pub mod algorithm;
pub mod bandwidth;
pub mod bench;
pub mod build_info;
pub mod clock;
pub mod conformance;
pub mod doctor;
pub mod element;
pub mod failure;
pub mod format;
pub mod gpu_check;
pub mod json;
pub mod machine;
pub mod measure;
pub mod options;
pub mod overhead;
pub mod perf;
pub mod plot;
pub mod printf;
pub mod program;
pub mod progress;
pub mod queueing;
pub mod raw;
pub mod report;
pub mod self_test;
pub mod shape;
pub mod sizes;
pub mod spawn;
pub mod statistics;
pub mod testing;
pub mod traffic;
pub mod verify;

/// Compiles the examples in the README and the guides together with the tests.
#[cfg(doctest)]
mod guides {
    macro_rules! guides {
        ($($name:ident: $file:literal,)*) => {
            $(#[doc = include_str!($file)]
            struct $name;)*
        };
    }

    guides! {
        Readme: "../README.md",
        Launching: "../docs/launching.md",
        QuickStart: "../docs/quick-start.md",
        FromCudarc: "../docs/from-cudarc-nccl.md",
        FromNccl4py: "../docs/from-nccl4py.md",
        Async: "../docs/async.md",
        Testing: "../docs/testing.md",
    }
}
