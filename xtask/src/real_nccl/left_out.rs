//! The test files that do not run on NVIDIA's library, each with its reason. A new file in `tests/`, `nccl-emulator/tests/` or
//! `examples/inference_server/tests/` runs on it unless it is listed here.

/// Why tests of the emulator's NCCL are left out.
const EMULATORS: &str = "it tests the emulator's own NCCL to the letter: conformance and real_behaviour compare what both do";

/// Why tests of a model in one process are left out.
const COMPUTES: &str = "it tests what a model computes, which NCCL has no part in";

/// Package, test file (a binary, or a module of a binary with many files), and the reason.
pub(super) const LEFT_OUT: &[(&str, &str, &str)] = &[
    (
        "nccl-emulator",
        "capture",
        "it tests the driver, and asks NCCL nothing",
    ),
    (
        "nccl-emulator",
        "cudarc_holes",
        "it tests the driver, and asks NCCL nothing",
    ),
    (
        "nccl-emulator",
        "driver",
        "it tests the driver, and asks NCCL nothing",
    ),
    (
        "nccl-emulator",
        "graphs",
        "it tests the driver, and asks NCCL nothing",
    ),
    (
        "nccl-emulator",
        "install",
        "it tests what the emulator takes over",
    ),
    (
        "nccl-emulator",
        "kernels",
        "it tests the driver, and asks NCCL nothing",
    ),
    ("nccl-emulator", "nccl_children", EMULATORS),
    ("nccl-emulator", "nccl_collectives", EMULATORS),
    ("nccl-emulator", "nccl_graphs", EMULATORS),
    ("nccl-emulator", "nccl_groups", EMULATORS),
    ("nccl-emulator", "nccl_grow", EMULATORS),
    ("nccl-emulator", "nccl_init", EMULATORS),
    ("nccl-emulator", "nccl_many_ranks", EMULATORS),
    ("nccl-emulator", "nccl_misuse", EMULATORS),
    ("nccl-emulator", "nccl_nonblocking", EMULATORS),
    ("nccl-emulator", "nccl_one_sided", EMULATORS),
    ("nccl-emulator", "nccl_operations", EMULATORS),
    ("nccl-emulator", "nccl_operators", EMULATORS),
    ("nccl-emulator", "nccl_profiler_proxies", EMULATORS),
    ("nccl-emulator", "nccl_shrink", EMULATORS),
    ("nccl-emulator", "nccl_suspend", EMULATORS),
    ("nccl-emulator", "nccl_version", EMULATORS),
    (
        "nccl-emulator",
        "raw_symbols",
        "it tests the driver, and asks NCCL nothing",
    ),
    (
        "nccl-emulator",
        "real_symbols",
        "check-symbols runs it on the libraries themselves",
    ),
    (
        "nccl-emulator",
        "topologies",
        "it compares files with the driver, and asks NCCL nothing",
    ),
    (
        "nccl-emulator",
        "visible_devices",
        "it tests the driver, and asks NCCL nothing",
    ),
    ("inference-server", "training", COMPUTES),
    ("nccl-tests", "compile_fail", "it runs the compiler"),
    (
        "nccl-tests",
        "send_sync",
        "it has done its work when it is built",
    ),
];

/// The files that `--quick` runs on the library in addition to the tests about the library: they quickly show that the safe
/// layer's operations are correct on it, and that hanging operations end.
pub(super) const QUICK: &[(&str, &str)] = &[("nccl-tests", "killed"), ("nccl-tests", "operations")];
