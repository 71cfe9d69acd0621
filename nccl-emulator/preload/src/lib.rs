//! `nccl-emulator` for programs that are not written in Rust: a shared object which, once loaded, makes
//! its process find the emulator under the names of libcuda and libnccl.
//!
//! ```console
//! $ cargo build --release --package nccl-emulator-preload
//! $ LD_PRELOAD=$PWD/target/release/libnccl_emulator_preload.so python3 program.py
//! ```
//!
//! The object has no function to call: an entry of `.init_array` runs when the dynamic linker has loaded it,
//! before the program starts. The object cannot export `nccl…` and `cu…` itself: one file has one name, and two
//! copies under two names would be two emulators.

use std::panic::catch_unwind;

/// The function that the dynamic linker runs after loading.
#[used]
#[unsafe(link_section = ".init_array")]
static INSTALL: extern "C" fn() = install;

/// Installs the emulator. Ends the process if that fails: a program with the emulator preloaded must not fall
/// back to other libraries.
extern "C" fn install() {
    let reason = match catch_unwind(nccl_emulator::install) {
        Ok(Ok(_)) => return,
        Ok(Err(error)) => error.to_string(),
        Err(_) => "it panicked (above)".into(),
    };
    eprintln!("nccl-emulator: cannot be installed in this process: {reason}");
    // Not `exit`: the program has not started, so there is no cleanup to do.
    // SAFETY: ends the process; nothing of it is used afterwards.
    unsafe { libc::_exit(FAILED) };
}

/// The exit code of a process in which the emulator could not be installed.
const FAILED: i32 = 120;
