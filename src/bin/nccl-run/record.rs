//! `--record`: the recordings that the ranks of an attempt left, as something to look at.

use std::collections::HashSet;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use nccl::launch::{RankEnd, Report};
use nccl::recorder::Timeline;
use nccl_tools::doctor;

/// Bytes in a recording, about.
const RECORDING: usize = 256 << 10;

/// Where they are.
pub(crate) struct Directory {
    path: PathBuf,
    /// Files that somebody else left there before.
    before: HashSet<PathBuf>,
}

impl Directory {
    pub(crate) fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            before: recordings(path).into_iter().collect(),
        }
    }

    /// Whether a recording could be written there now.
    fn try_to_write(&self) -> io::Result<()> {
        let mut file = tempfile::tempfile_in(&self.path)?;
        file.write_all(&[0; RECORDING])?;
        file.sync_data()
    }

    /// Merges what the ranks of the attempt that has just ended have left; what to say about it, for a terminal: the names
    /// of files and communicators are the ranks'.
    pub(crate) fn merge(&self, report: &Report) -> Option<String> {
        Some(doctor::clean(&self.merged(report)?))
    }

    fn merged(&self, report: &Report) -> Option<String> {
        let mut files = recordings(&self.path);
        files.retain(|file| !self.before.contains(file));
        if files.is_empty() {
            // Where a rank was told of a fault, a full disk may be why it left nothing; it has no way to say so.
            let error = (!report.is_success()).then(|| self.try_to_write())?.err()?;
            return Some(format!(
                "no rank has left a recording, and none can be written to {}: {error}",
                self.path.display()
            ));
        }
        let mut timeline = match Timeline::read(&files) {
            Ok(timeline) => timeline,
            Err(error) => {
                // One line, whatever the names of files in it are.
                let why = error.to_string().replace('\n', "\u{fffd}");
                return Some(format!("the recordings cannot be merged: {why}"));
            }
        };
        let epoch = report.ranks().map(RankEnd::epoch).max();
        if epoch.is_some_and(|epoch| epoch != timeline.epoch) {
            // Those of an attempt before, which are merged already.
            return None;
        }
        let ends: Vec<&RankEnd> = report.ranks().collect();
        for missing in &mut timeline.missing {
            if let Some(end) = ends.iter().rev().find(|end| end.rank() == missing.rank) {
                missing.host = Some(end.host().to_owned());
                missing.pid = Some(end.pid());
                missing.why = format!("{}, and left none", end.exit());
            }
        }
        // What is not of this attempt is no news.
        timeline
            .left_out
            .retain(|why| !why.contains(" is of epoch "));
        Some(match doctor::write_beside(&self.path, &timeline) {
            Ok([page, trace]) => {
                let all = timeline.ranks.len() + timeline.missing.len();
                let mut text = format!(
                    "what {} of {all} ranks did last: {} (for Perfetto: {})",
                    timeline.ranks.len(),
                    page.display(),
                    trace.display()
                );
                for standing in timeline.standings() {
                    text.push_str(&format!(
                        "\n  {:?}: {}",
                        standing.communicator, standing.sentence
                    ));
                }
                text
            }
            Err(error) => format!(
                "the timeline cannot be written to {}: {error}",
                self.path.display()
            ),
        })
    }
}

fn recordings(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(directory) else {
        return Vec::new();
    };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut paths: Vec<_> = paths
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("rank-") && name.ends_with(".json")
        })
        .collect();
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use super::*;
    use nccl::launch::{Fleet, Output};
    use std::process::Command;

    #[test]
    fn names_of_files_that_ranks_made_are_no_commands_to_the_terminal() {
        let place = tempfile::tempdir().expect("a directory");
        let directory = Directory::new(place.path());
        let name = "rank-\x1b[2J\n\u{202e}0.json";
        std::fs::write(place.path().join(name), "no recording").expect("a file");
        let fleet = Fleet::builder(1)
            .output(Output::Discard)
            .start(|_| Command::new("false"))
            .expect("it starts");
        let said = directory.merge(&fleet.wait()).expect("it cannot be read");
        let shown = "rank-\u{fffd}[2J\u{fffd}\u{fffd}0.json";
        assert!(said.contains(shown), "{said:?}");
        assert!(!said.contains(char::is_control), "{said:?}");
    }
}
