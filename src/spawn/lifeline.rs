//! How a rank notices that the process which started it is gone.
//!
//! The starter holds the writing end of a pipe, and every rank's standard input is the reading end.
//! Whatever way the starter ends, the kernel closes its end, and [`watch`] ends the rank. A rank that is
//! stopped just then cannot look; so the kernel is asked to continue it when its parent dies. (To be
//! killed by the kernel instead would leave files behind, and the kernel takes the end of the *thread*
//! that started the rank for the death of its parent.)

use std::io::Read;
use std::path::{Path, PathBuf};

/// Says that standard input is the lifeline.
pub const VARIABLE: &str = "NCCL_RUN_LIFELINE";

/// How the directory that a [`Job`](super::Job) makes for its ranks begins.
pub(super) const DIRECTORY_PREFIX: &str = "nccl-run-";

/// From now on, this process ends when the one that started it as a rank is gone.
///
/// Does nothing in a process that was not started by a [`Job`](super::Job). Call it first thing in
/// `main`: until then only the end of the pipe is waiting to be read. It must not run in a process
/// that reads standard input for itself.
pub fn watch() {
    if std::env::var_os(VARIABLE).is_none_or(|value| value != "stdin") {
        return;
    }
    // A refusal leaves the pipe, which is enough for all but stopped processes.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::CONT));
    let watcher = std::thread::Builder::new()
        .name("lifeline".to_owned())
        .spawn(|| {
            let mut stdin = std::io::stdin().lock();
            let mut byte = [0u8; 1];
            loop {
                match stdin.read(&mut byte) {
                    Ok(0) => break,
                    Ok(_) => {}
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(_) => break,
                }
            }
            end();
        });
    if watcher.is_err() {
        eprintln!("no thread could be started to watch for the end of the process that started us");
    }
}

/// Leaves without running exit handlers: one of them might wait for a rank that is gone as well.
fn end() -> ! {
    if let Some(directory) = directory(std::env::var_os("NCCL_RUN_RENDEZVOUS")) {
        // The starter would have removed it. Several ranks may try; all but one find it gone.
        let _ = std::fs::remove_dir_all(directory);
    }
    // SAFETY: `_exit` only ends the process.
    unsafe { libc::_exit(1) }
}

/// The private directory of the job, if the rendezvous lies in one.
fn directory(rendezvous: Option<std::ffi::OsString>) -> Option<PathBuf> {
    let rendezvous = rendezvous?;
    let path = Path::new(rendezvous.to_str()?.strip_prefix("unix:")?).parent()?;
    let name = path.file_name()?.to_str()?;
    name.starts_with(DIRECTORY_PREFIX).then(|| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_directory_that_a_job_made_is_ever_removed() {
        let of = |text: &str| directory(Some(text.into()));
        assert_eq!(
            of("unix:/tmp/nccl-run-ab/world"),
            Some("/tmp/nccl-run-ab".into())
        );
        assert_eq!(of("unix:/tmp/world"), None);
        assert_eq!(of("unix:/home/me/world"), None);
        assert_eq!(of("tcp:10.0.0.1:5"), None);
        assert_eq!(directory(None), None);
    }
}
