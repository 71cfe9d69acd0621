//! `--log-dir`: says that a file of it ends before its rank's output does.

use std::io;
use std::path::Path;
use std::thread::JoinHandle;

use nccl::launch::{Event, Events};

use crate::say;

/// Says so once, of the first file: a disk is full for all. Ends with the fleet.
pub(crate) fn watch(events: Events, directory: &Path) -> io::Result<JoinHandle<()>> {
    let directory = directory.to_owned();
    let watch = move || {
        let mut cut = events.filter_map(|event| match event {
            Event::LogCut {
                rank,
                stream,
                error,
            } => Some((rank, stream, error)),
            _ => None,
        });
        if let Some((rank, stream, error)) = cut.next() {
            let file = directory.join(format!("rank-{rank}.{}", stream.name()));
            say(&format!(
                "{} ends here, and is not written any more: {error}; of other files of --log-dir this is not said again",
                file.display()
            ));
        }
    };
    std::thread::Builder::new()
        .name(String::from("logs"))
        .spawn(watch)
}
