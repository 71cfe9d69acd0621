//! The first warning of NCCL in this process, if NCCL wrote it into a file.

use nccl_base::warning::{Class, FirstWarning, KnownWarning};
use std::io::Read as _;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

use super::line::{self, Level};

/// How long a failing rank waits for its file.
const SOON: Duration = Duration::from_millis(200);

/// Bytes read of a longer file: the first warning is what counts.
const MOST: u64 = 16 << 20;

/// The first warning in NCCL's file (`NCCL_DEBUG_FILE`) that can be a cause, else the first of an unknown kind.
/// Warnings that follow from another rank's failure, or from an abort, do not count.
pub fn first_warning() -> Option<FirstWarning> {
    let path = std::env::var_os("NCCL_DEBUG_FILE")?;
    let mut bytes = Vec::new();
    let file = std::fs::File::open(file_of(path.to_str()?)).ok()?;
    // Reading a pipe would block.
    file.metadata().ok().filter(|file| file.is_file())?;
    file.take(MOST).read_to_end(&mut bytes).ok()?;
    first_in(&String::from_utf8_lossy(&bytes), std::process::id())
}

/// As [`first_warning`], but gives up when the file system does not answer within 200 ms.
pub fn first_warning_soon() -> Option<FirstWarning> {
    std::env::var_os("NCCL_DEBUG_FILE")?;
    let (say, said) = mpsc::channel();
    let thread = std::thread::Builder::new().name(String::from("nccl-warning"));
    let reading = thread.spawn(move || say.send(first_warning()));
    reading.ok()?;
    said.recv_timeout(SOON).ok()?
}

/// NCCL's file name from the pattern: `%h` is the host and `%p` the process.
fn file_of(pattern: &str) -> PathBuf {
    let host = crate::host::name();
    let host = host.split('.').next().unwrap_or_default();
    pattern
        .replace("%h", host)
        .replace("%p", &std::process::id().to_string())
        .into()
}

fn first_in(log: &str, pid: u32) -> Option<FirstWarning> {
    let mut unknown = None;
    for text in log.lines() {
        for record in line::parse(text).records {
            if record.level != Level::Warn || ![0, pid].contains(&record.pid) {
                continue;
            }
            let warning = |check: Option<&str>| FirstWarning {
                text: record.text.to_owned(),
                check: check.map(str::to_owned),
            };
            match Class::of(record.text) {
                Class::Cause => {
                    return Some(warning(
                        KnownWarning::of(record.text).map(|known| known.check),
                    ));
                }
                Class::Unknown if unknown.is_none() => unknown = Some(warning(None)),
                _ => {}
            }
        }
    }
    unknown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_warning_that_can_be_a_cause_is_found_behind_what_follows_from_others() {
        let log = "node-a:77:80 [0] NCCL INFO Bootstrap: Using eth0\n\
            \n\
            node-a:77:80 [0] socket.cc:1 NCCL WARN socketProgress: Connection closed by remote peer h2<41234>\n\
            node-a:77:81 [0] proxy.cc:2 NCCL WARN [Service thread] Accept failed Resource temporarily unavailable\n\
            node-a:78:81 [0] shm.cc:2 NCCL WARN Call to socket failed: Too many open files\n\
            node-a:77:80 [0] odd.cc:3 NCCL WARN something that no release said so far\n\
            node-a:77:80 [0] shm.cc:3 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-1 \
            (size 9637888), error: No space left on device (28)\n\
            node-a:77:80 [0] x.cc:3 NCCL WARN Cuda failure 2 'out of memory'\n";
        let first = first_in(log, 77).expect("there is one");
        assert_eq!(first.resource(), Some("shared memory (/dev/shm)"));
        assert!(first.fix().is_some_and(|fix| fix.contains("shm-size")));
        let until = log.find("node-a:77:80 [0] shm.cc:3").expect("it is there");
        let first = first_in(&log[..until], 77).expect("there is one");
        assert_eq!(first.text, "something that no release said so far");
        assert_eq!((first.resource(), first.fix()), (None, None));
        let until = log.find("node-a:78").expect("it is there");
        assert_eq!(first_in(&log[..until], 77), None, "noise is no cause");
    }

    #[test]
    fn the_name_of_the_file_is_made_as_nccl_makes_it() {
        let pid = std::process::id();
        let file = file_of("/logs/nccl.%p.log");
        assert_eq!(file, PathBuf::from(format!("/logs/nccl.{pid}.log")));
    }
}
