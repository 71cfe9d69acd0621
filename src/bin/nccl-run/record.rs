//! `--record`: writes the recordings of an attempt's ranks as a page and a trace.

use std::collections::HashSet;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use nccl::launch::{RankEnd, Report};
use nccl::recorder::{Snapshot, Timeline};
use nccl_tools::doctor;

/// Approximate bytes of a recording.
const RECORDING: usize = 256 << 10;

/// The directory of recordings.
pub(crate) struct Directory {
    path: PathBuf,
    /// Files that were there before.
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

    /// Merges the recordings of the attempt that has just ended; returns the message about it, made safe for a
    /// terminal: the names of files and communicators come from the ranks.
    pub(crate) fn merge(&self, report: &Report) -> Option<String> {
        Some(doctor::clean(&self.merged(report)?))
    }

    fn merged(&self, report: &Report) -> Option<String> {
        let mut files = recordings(&self.path);
        files.retain(|file| !self.before.contains(file));
        if files.is_empty() {
            // After a failure, a full disk may be why no rank left a recording; the rank has no way to report that.
            let error = (!report.is_success()).then(|| self.try_to_write())?.err()?;
            return Some(format!(
                "no rank has left a recording, and none can be written to {}: {error}",
                self.path.display()
            ));
        }
        let (mut snapshots, mut unread) = (Vec::new(), Vec::new());
        for file in &files {
            match Timeline::read(&[file]) {
                Ok(read) => snapshots.extend(read.ranks.into_iter().map(|rank| rank.snapshot)),
                Err(error) => unread.push(error.to_string()),
            }
        }
        let ends: Vec<&RankEnd> = report.ranks.iter().map(AsRef::as_ref).collect();
        // Another job may share the directory.
        let own = snapshots.iter().filter(|snapshot| {
            let is_it = |end: &&RankEnd| (&*end.host, end.pid) == (&*snapshot.host, snapshot.pid);
            ends.iter().any(is_it)
        });
        let latest = own.max_by_key(|snapshot| snapshot.taken);
        // Behind a wrapper, the recorded process differs from the one that the launcher knows.
        let latest = latest.or_else(|| snapshots.iter().max_by_key(|snapshot| snapshot.taken));
        let Some(latest) = latest.map(world) else {
            // One line, whatever the names of files in it are.
            let why = unread.join("; ").replace('\n', "\u{fffd}");
            return Some(format!("the recordings cannot be merged: {why}"));
        };
        let (snapshots, others): (Vec<_>, Vec<_>) = snapshots
            .into_iter()
            .partition(|snapshot| world(snapshot) == latest);
        let mut timeline = Timeline::merge(snapshots).ok()?;
        timeline.left_out.extend(unread);
        // Recordings of other attempts have been reported.
        let job = |world: &Option<(String, u64)>| world.as_ref().map(|(job, _)| job.clone());
        let others = others
            .iter()
            .filter(|other| job(&world(other)) != job(&latest));
        timeline.left_out.extend(others.map(of_another_job));
        let parts = &timeline.ranks;
        let has_recorded = |end: &&RankEnd| {
            parts
                .iter()
                .any(|part| (&*part.snapshot.host, part.snapshot.pid) == (&end.host, end.pid))
        };
        let newest = ends.iter().map(|end| end.generation).max();
        // Then the generation decides.
        if !ends.iter().any(&has_recorded) && newest != Some(timeline.generation) {
            // Recordings of an earlier attempt, which are merged already.
            return None;
        }
        let silent: Vec<_> = ends.iter().filter(|end| !has_recorded(end)).collect();
        let missing: Vec<_> = timeline
            .missing
            .iter()
            .map(|missing| missing.rank)
            .collect();
        // A later generation of the world may number the processes differently from this launcher.
        let is_first = newest == Some(timeline.generation);
        let launched = missing.iter().map(|&rank| {
            let same = is_first.then_some(rank);
            timeline.launcher_rank(rank).or(same)
        });
        let launched: Vec<_> = launched.collect();
        for (missing, launched) in timeline.missing.iter_mut().zip(launched) {
            let is_it = |end: &&&&RankEnd| match (missing.pid, &missing.host) {
                (Some(pid), Some(host)) => (&*end.host, end.pid) == (&**host, pid),
                _ => launched == Some(end.rank),
            };
            if let Some(end) = silent.iter().rev().find(is_it) {
                missing.host = Some(end.host.to_string());
                missing.pid = Some(end.pid);
                missing.why = format!("{}, and left none", end.exit);
            }
        }
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
                    text.push_str(&format!("\n  {}: {}", standing.named, standing.sentence));
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

/// The world of a recording: the job and the generation.
fn world(snapshot: &Snapshot) -> Option<(String, u64)> {
    let place = snapshot.place.as_ref()?;
    Some((place.job.clone(), place.generation))
}

fn of_another_job(snapshot: &Snapshot) -> String {
    let Snapshot { host, pid, .. } = snapshot;
    match &snapshot.place {
        Some(place) => format!(
            "the recording of {host}, pid {pid} is of job {:?}",
            place.job
        ),
        None => format!("the recording of {host}, pid {pid} is of no world"),
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

    /// The launcher's rank 1 has left. Its ranks 0 and 2 have continued as ranks 0 and 1 of generation 1, in which rank 1 is
    /// killed.
    #[test]
    fn after_a_recovery_the_end_of_a_process_is_told_of_the_rank_that_it_was() {
        let place = tempfile::tempdir().expect("a directory");
        let directory = Directory::new(place.path());
        let recording = nccl::recorder::snapshot().to_json();
        let mut recording: serde_json::Value = serde_json::from_str(&recording).expect("values");
        recording["place"] =
            serde_json::json!({"job": "job", "generation": 1, "rank": 0, "world_size": 2});
        recording["pid"] = 4711.into();
        recording["communicators"] = serde_json::json!([{
            "name": "work", "key": "aa", "generation": 1, "number": 1, "rank": 0, "world_size": 2, "launcher_ranks": [0, 2],
            "life": "aborted", "calls": [],
        }]);
        let recording = recording.to_string().replace("4711", "'$$'");
        let file = place.path().join("rank-0.json");
        let write = format!("printf %s '{recording}' > '{}'", file.display());
        let fleet = Fleet::builder(3)
            .with(|fleet| fleet.output = Output::Discard)
            .start(move |rank| {
                let mut shell = Command::new("sh");
                shell.arg("-c").arg(match rank {
                    0 => write.clone(),
                    1 => String::from("exit 0"),
                    _ => format!(
                        "while ! [ -s '{}' ]; do sleep 0.01; done; kill -9 $$",
                        file.display()
                    ),
                });
                shell
            })
            .expect("it starts");
        let said = directory
            .merge(&fleet.wait())
            .expect("it is of this attempt");
        assert!(said.starts_with("what 1 of 2 ranks did last"), "{said}");
        let page = std::fs::read_to_string(place.path().join("timeline.html")).expect("a page");
        assert!(page.contains("killed by SIGKILL, and left none"), "{said}");
        // Recordings of an earlier attempt are not reported again.
        let other = Fleet::builder(1)
            .with(|fleet| fleet.output = Output::Discard)
            .start(|_| Command::new("false"))
            .expect("it starts");
        assert_eq!(directory.merge(&other.wait()), None);
    }

    /// The other job has written last.
    #[test]
    fn recordings_of_another_job_in_the_directory_are_left_out() {
        let place = tempfile::tempdir().expect("a directory");
        let directory = Directory::new(place.path());
        let recording = |job: &str, pid: u32, taken: u64| {
            let recording = nccl::recorder::snapshot().to_json();
            let mut recording: serde_json::Value =
                serde_json::from_str(&recording).expect("values");
            recording["place"] =
                serde_json::json!({"job": job, "generation": 0, "rank": 0, "world_size": 2});
            recording["pid"] = pid.into();
            recording["taken_unix_ns"] = taken.into();
            recording.to_string()
        };
        let now = 1_760_000_001_000_000_000;
        let other = place.path().join("rank-0.other.json");
        std::fs::write(other, recording("theirs", 1, now + 1)).expect("a recording");
        let own = recording("ours", 4711, now).replace("4711", "'$$'");
        let file = place.path().join("rank-0.json");
        let write = format!("printf %s '{own}' > '{}'; exit 3", file.display());
        let fleet = Fleet::builder(1)
            .with(|fleet| fleet.output = Output::Discard)
            .start(move |_| {
                let mut shell = Command::new("sh");
                shell.arg("-c").arg(&write);
                shell
            })
            .expect("it starts");
        let said = directory.merge(&fleet.wait()).expect("a page");
        assert!(said.starts_with("what 1 of 2 ranks did last"), "{said}");
        let page = std::fs::read_to_string(place.path().join("timeline.html")).expect("a page");
        assert!(page.contains("ours, generation 0"), "{page}");
        assert!(page.contains("pid 1 is of job"), "{page}");
    }

    /// The launcher knows the wrapper's process, and the recording that of the program.
    #[test]
    fn recordings_of_programs_behind_a_wrapper_are_merged() {
        let place = tempfile::tempdir().expect("a directory");
        let directory = Directory::new(place.path());
        let recording = nccl::recorder::snapshot().to_json();
        let mut recording: serde_json::Value = serde_json::from_str(&recording).expect("values");
        recording["place"] =
            serde_json::json!({"job": "job", "generation": 0, "rank": 0, "world_size": 1});
        let file = place.path().join("rank-0.json");
        std::fs::write(&file, recording.to_string()).expect("a recording");
        let fleet = Fleet::builder(1)
            .with(|fleet| fleet.output = Output::Discard)
            .start(|_| Command::new("false"))
            .expect("it starts");
        let said = directory.merge(&fleet.wait()).expect("a page");
        assert!(said.starts_with("what 1 of 1 ranks did last"), "{said}");
    }

    #[test]
    fn names_of_files_that_ranks_made_are_no_commands_to_the_terminal() {
        let place = tempfile::tempdir().expect("a directory");
        let directory = Directory::new(place.path());
        let name = "rank-\x1b[2J\n\u{202e}0.json";
        std::fs::write(place.path().join(name), "no recording").expect("a file");
        let fleet = Fleet::builder(1)
            .with(|fleet| fleet.output = Output::Discard)
            .start(|_| Command::new("false"))
            .expect("it starts");
        let said = directory.merge(&fleet.wait()).expect("it cannot be read");
        let shown = "rank-\u{fffd}[2J\u{fffd}\u{fffd}0.json";
        assert!(said.contains(shown), "{said:?}");
        assert!(!said.contains(char::is_control), "{said:?}");
    }
}
