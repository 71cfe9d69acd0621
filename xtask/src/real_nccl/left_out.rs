//! The test files that are not run on NVIDIA's library, each with its reason. A new file in `tests/` or
//! `nccl-emulator/tests/` is run on it unless it stands here.

/// Package, test file, and why it is left out.
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
    (
        "nccl-emulator",
        "nccl_faults",
        "its faults are those of the emulator's own NCCL",
    ),
    (
        "nccl-emulator",
        "nccl_version",
        "its releases are those that the emulator's own NCCL pretends to be",
    ),
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
    ("nccl-tools", "compile_fail", "it runs the compiler"),
    (
        "nccl-tools",
        "send_sync",
        "it has done its work when it is built",
    ),
];

/// What `--quick` runs on the library beside the tests about it: files that show in little time that the safe layer's
/// operations are right on it, and end when something hangs.
pub(super) const QUICK: &[(&str, &str)] = &[("nccl-tools", "killed"), ("nccl-tools", "operations")];
