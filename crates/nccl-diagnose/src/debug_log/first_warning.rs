//! The first warning of NCCL in this process, if NCCL wrote it into a file.

use nccl_base::warning::{Class, FirstWarning, KnownWarning};
use std::fs::Metadata;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use super::line::{self, Level};
use crate::regular_file;

/// How long a rank waits for its file.
const SOON: Duration = Duration::from_millis(200);

/// Bytes read of a longer part of the file, half of them from its end: the first warning is what counts, but nothing says that a
/// failure was early.
const MOST: u64 = if cfg!(test) { 1 << 20 } else { 16 << 20 };

/// A place in NCCL's file. What NCCL wrote before it is about an earlier generation of the world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogPosition(u64);

/// The end of what NCCL has written so far; the file's beginning if the file system does not answer within 200 ms.
pub fn log_end() -> LogPosition {
    soon(|path| end_of(path).ok()).unwrap_or_default()
}

/// The first warning in NCCL's file (`NCCL_DEBUG_FILE`) since `from` that can be a cause, else the first of an unknown kind.
/// Warnings that follow from another rank's failure, or from an abort, do not count. Gives up when the file system does not
/// answer within 200 ms.
pub fn first_warning(from: LogPosition) -> Option<FirstWarning> {
    soon(move |path| {
        let log = read(path, from).ok()?;
        first_in(&String::from_utf8_lossy(&log), std::process::id())
    })
}

/// Calls `look` with NCCL's file, on a thread of its own.
fn soon<T: Send + 'static>(look: impl FnOnce(&Path) -> Option<T> + Send + 'static) -> Option<T> {
    let path = std::env::var_os("NCCL_DEBUG_FILE")?;
    let path = file_of(path.to_str()?);
    let (say, said) = mpsc::channel();
    let thread = std::thread::Builder::new().name(String::from("nccl-warning"));
    let looking = thread.spawn(move || say.send(look(&path)));
    looking.ok()?;
    said.recv_timeout(SOON).ok()?
}

fn end_of(path: &Path) -> io::Result<LogPosition> {
    let file = std::fs::metadata(path)?;
    // NCCL empties the file when it opens it: until then, the content is that of another process.
    let is_open = is_open_here(&file)?;
    Ok(LogPosition(if is_open { file.len() } else { 0 }))
}

fn is_open_here(file: &Metadata) -> io::Result<bool> {
    let is_it = |open: Metadata| (open.dev(), open.ino()) == (file.dev(), file.ino());
    let mut open = std::fs::read_dir("/proc/self/fd")?.flatten();
    Ok(open.any(|open| std::fs::metadata(open.path()).is_ok_and(is_it)))
}

/// Reads what was written since `from`: at most [`MOST`] bytes, of both ends.
fn read(path: &Path, LogPosition(from): LogPosition) -> io::Result<Vec<u8>> {
    let mut file = regular_file::open(path)?;
    let length = file.metadata()?.len();
    // A shorter file was begun again.
    let from = if from > length { 0 } else { from };
    let mut log = Vec::new();
    file.seek(SeekFrom::Start(from))?;
    if length - from <= MOST {
        file.take(MOST).read_to_end(&mut log)?;
        return Ok(log);
    }
    (&mut file).take(MOST / 2).read_to_end(&mut log)?;
    log.push(b'\n');
    file.seek(SeekFrom::Start(length - MOST / 2))?;
    file.take(MOST / 2).read_to_end(&mut log)?;
    Ok(log)
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

    const FULL: &str = "[0] shm.cc:3 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-1 (size 9637888), \
        error: No space left on device (28)\n";
    const ODD: &str = "[0] odd.cc:3 NCCL WARN something that no release said so far\n";

    fn line(text: &str) -> String {
        let pid = std::process::id();
        format!("node-a:{pid}:{pid} {text}")
    }

    fn first(path: &Path, from: LogPosition) -> Option<String> {
        let log = read(path, from).unwrap();
        let first = first_in(&String::from_utf8_lossy(&log), std::process::id());
        first.map(|first| first.text)
    }

    #[test]
    fn a_warning_of_an_earlier_generation_is_not_found_and_one_of_this_generation_is() {
        use std::io::Write as _;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nccl.log");
        // Of another process, until NCCL opens the file and empties it.
        std::fs::write(&path, line(FULL)).unwrap();
        assert_eq!(end_of(&path).unwrap(), LogPosition(0));
        let mut nccl = std::fs::File::create(&path).unwrap();
        nccl.write_all(line(FULL).as_bytes()).unwrap();
        let end = end_of(&path).unwrap();
        assert_eq!(first(&path, end), None);
        nccl.write_all(line(ODD).as_bytes()).unwrap();
        let found = first(&path, end).unwrap();
        assert!(found.starts_with("something"), "{found}");
        let found = first(&path, LogPosition(0)).unwrap();
        assert!(found.starts_with("Error while creating"), "{found}");
        // The file was begun again.
        nccl.set_len(0).unwrap();
        std::fs::write(&path, line(ODD)).unwrap();
        assert!(first(&path, end).is_some());
    }

    #[test]
    fn of_a_long_file_both_ends_are_searched() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nccl.log");
        let filler = line("[0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n");
        let filler = filler.repeat(MOST as usize / filler.len() + 1);
        std::fs::write(&path, format!("{filler}{}", line(FULL))).unwrap();
        assert!(first(&path, LogPosition(0)).is_some());
        std::fs::write(&path, format!("{}{filler}", line(FULL))).unwrap();
        assert!(first(&path, LogPosition(0)).is_some());
    }
}
