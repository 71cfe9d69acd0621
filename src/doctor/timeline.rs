//! Writes the recordings of all ranks as pages and traces: from files, or from a running job.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use nccl::recorder::Timeline;

use super::job::observe;
use super::options::{Job, Recordings, TimelineOptions};
use super::{could_not, print};
use crate::report::steers;

pub(super) fn run(options: &TimelineOptions) -> ExitCode {
    let timeline = match &options.of {
        Recordings::Files(files) => Timeline::read(files).map_err(|error| error.to_string()),
        Recordings::Job(job) => ask(job, options),
    };
    match timeline.and_then(|timeline| show(&timeline, options)) {
        Ok(text) => print(&text),
        Err(why) => could_not(&why),
    }
}

/// Collects the recordings of a running job, which may hang.
fn ask(job: &Job, options: &TimelineOptions) -> Result<Timeline, String> {
    Ok(observe(job, options.timeout)?.recordings(options.timeout))
}

/// Writes the requested files; returns the text to print.
fn show(timeline: &Timeline, options: &TimelineOptions) -> Result<String, String> {
    if timeline.ranks.is_empty() {
        let missing = timeline.missing.first();
        let why = missing.map_or("there are none", |missing| missing.why.as_str());
        return Err(format!("no rank has answered: {why}"));
    }
    let mut text = summary(timeline);
    let page = options.out.as_deref();
    let named = page.unwrap_or(Path::new("timeline.html"));
    // A name from the command line is overwritten; a default name must not overwrite a file.
    write(named, page.is_some(), &timeline.to_html())?;
    text.push_str(&format!("  to look at:      {}\n", named.display()));
    for (path, content, what) in [
        (
            &options.trace,
            Timeline::to_chrome_trace as fn(&Timeline) -> String,
            "for Perfetto:   ",
        ),
        (&options.json, Timeline::to_json, "to be read again:"),
    ] {
        if let Some(path) = path {
            write(path, true, &content(timeline))?;
            text.push_str(&format!("  {what} {}\n", path.display()));
        }
    }
    if let Some(directory) = &options.pytorch {
        write_for_pytorch(directory, timeline)?;
        // Without it the analyser refuses to begin.
        let partial = match timeline.missing.is_empty() {
            true => "",
            false => "--allow-incomplete-ranks ",
        };
        let directory = directory.display();
        text.push_str(&format!(
            "  for PyTorch:     torchfrtrace {partial}{directory}\n"
        ));
    }
    Ok(text)
}

/// Writes the files for PyTorch's analyser, which takes all files of a directory for one job's.
fn write_for_pytorch(directory: &Path, timeline: &Timeline) -> Result<(), String> {
    let failed = |path: &Path, error: io::Error| format!("{}: {error}", path.display());
    std::fs::create_dir_all(directory).map_err(|error| failed(directory, error))?;
    let mut entries = std::fs::read_dir(directory).map_err(|error| failed(directory, error))?;
    if entries.next().is_some() {
        return Err(format!(
            "{} is not empty, and PyTorch's analyser reads every file in it: name another directory with --pytorch",
            directory.display()
        ));
    }
    for (rank, pickle) in timeline.to_pytorch_traces() {
        // PyTorch's own name.
        let path = directory.join(format!("nccl_trace_rank_{rank}"));
        let written = File::create_new(&path).and_then(|file| fill(&path, file, &pickle));
        written.map_err(|error| failed(&path, error))?;
    }
    Ok(())
}

/// The most ranks of a communicator whose call inside NCCL the summary lists.
const RANKS_INSIDE_NCCL: usize = 16;

/// The summary of a timeline.
#[must_use]
pub fn summary(timeline: &Timeline) -> String {
    let all = timeline.ranks.len() + timeline.missing.len();
    let mut text = format!(
        "nccl-doctor: recordings of {} of {all} ranks\n",
        timeline.ranks.len()
    );
    for missing in &timeline.missing {
        text.push_str(&format!("  rank {}: none: {}\n", missing.rank, missing.why));
    }
    for standing in timeline.standings() {
        text.push_str(&format!("  {}: {}\n", standing.named, standing.sentence));
        for (rank, inside) in standing.inside_nccl.iter().take(RANKS_INSIDE_NCCL) {
            text.push_str(&format!("    rank {rank} inside NCCL, {inside}\n"));
        }
        let more = standing.inside_nccl.len().saturating_sub(RANKS_INSIDE_NCCL);
        if more > 0 {
            text.push_str(&format!("    and {more} more ranks, which --json has\n"));
        }
    }
    for why in &timeline.left_out {
        text.push_str(&format!("  left out: {why}\n"));
    }
    clean(&text)
}

/// `text` for a terminal. Names in it come from programs: characters that move the cursor, or change the order of
/// reading, are replaced. Ends of lines stay.
///
/// ```
/// let name = "rank-\u{1b}[2J.json is \u{202e}lla, live";
/// assert_eq!(nccl_tools::doctor::clean(name), "rank-\u{fffd}[2J.json is \u{fffd}lla, live");
/// ```
#[must_use]
pub fn clean(text: &str) -> String {
    let visible = |character: char| match character {
        '\n' => '\n',
        steering if steers(steering) => '\u{fffd}',
        other => other,
    };
    text.chars().map(visible).collect()
}

fn write(path: &Path, replace: bool, content: &str) -> Result<(), String> {
    let open = || match replace {
        true => OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(path),
        false => File::create_new(path),
    };
    let written = open().and_then(|file| fill(path, file, content.as_bytes()));
    written.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => format!(
            "{} is there already: name another file with --out, or this one to replace it",
            path.display()
        ),
        _ => format!("{}: {error}", path.display()),
    })
}

/// Writes a file, or removes it: a truncated page looks like a complete one.
fn fill(path: &Path, mut file: File, content: &[u8]) -> io::Result<()> {
    let is_file = file.metadata()?.is_file();
    let mut write = || {
        file.write_all(content)?;
        // Some file systems report a full disk only here; a pipe does not support it.
        if is_file { file.sync_all() } else { Ok(()) }
    };
    write().inspect_err(|_| {
        if is_file {
            let _ = std::fs::remove_file(path);
        }
    })
}

/// Writes `timeline.html` and `trace.json`, or if these exist, `timeline.2.html` and so on.
///
/// # Errors
/// The system's.
pub fn write_beside(directory: &Path, timeline: &Timeline) -> io::Result<[PathBuf; 2]> {
    let page = fresh(directory, "timeline", "html", &timeline.to_html())?;
    let trace = fresh(directory, "trace", "json", &timeline.to_chrome_trace())?;
    Ok([page, trace])
}

fn fresh(directory: &Path, name: &str, extension: &str, content: &str) -> io::Result<PathBuf> {
    for number in 1..10_000 {
        let name = match number {
            1 => format!("{name}.{extension}"),
            number => format!("{name}.{number}.{extension}"),
        };
        let path = directory.join(name);
        match File::create_new(&path) {
            Ok(file) => {
                fill(&path, file, content.as_bytes())?;
                return Ok(path);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}
