//! Reports lost output of ranks: on this program's own output, or in a file of `--log-dir`.

use std::io;
use std::path::PathBuf;
use std::thread::JoinHandle;

use nccl::launch::{Event, Events, Stream};

use crate::say;

/// Reports each loss once per stream, and for the first file only: a full disk affects all files. Ends with the fleet.
pub(crate) fn watch(events: Events, directory: Option<PathBuf>) -> io::Result<JoinHandle<()>> {
    let watch = move || {
        let mut directory = directory;
        for event in events {
            match event {
                Event::LogCut {
                    rank,
                    stream,
                    error,
                } => {
                    let Some(directory) = directory.take() else {
                        continue;
                    };
                    let file = directory.join(format!("rank-{rank}.{stream}"));
                    say(&format!(
                        "{} ends here, and is not written any more: {error}; of other files of --log-dir this is not said again",
                        file.display()
                    ));
                }
                Event::OutputCut { stream, error } => {
                    let name = match stream {
                        Stream::Stdout => "standard output",
                        Stream::Stderr => "standard error",
                    };
                    say(&format!(
                        "{name} cannot be written any more: {error}; the ranks go on, and what else they print there is lost"
                    ));
                }
                _ => {}
            }
        }
    };
    std::thread::Builder::new()
        .name(String::from("logs"))
        .spawn(watch)
}
