//! The picture of `--plot`: bus bandwidth above, time below, both over the size, as SVG.
//!
//! All axes are logarithmic, and all algorithms, types and operators of a run are in one picture. It says
//! itself where its figures come from, because pictures travel without their text.
//!
//! - `axis`: where a value lies, and which values are written beside an axis;
//! - `svg`: the marks on the paper.

pub mod axis;
mod svg;

use std::io::Write as _;
use std::path::Path;

use crate::bench::Row;
use crate::failure::{Exit, Failure};

/// What the picture says beside its curves.
#[derive(Clone, Debug, Default)]
pub struct Heading {
    /// What is shown, of how many ranks, and on what.
    pub title: String,
    /// When, by what, and how.
    pub details: String,
    /// What nobody must overlook.
    pub warning: Option<String>,
    /// What the time is that of.
    pub time: &'static str,
}

/// All measurements of a run.
#[derive(Clone, Debug, Default)]
pub struct Plot {
    series: Vec<Series>,
}

/// One curve.
#[derive(Clone, Debug)]
struct Series {
    name: String,
    points: Vec<Point>,
}

/// One row, out of place.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Point {
    bytes: f64,
    /// Bus bandwidth in GB/s.
    bus: f64,
    seconds: f64,
    /// The fastest iteration, and what 99 of 100 do not exceed, with `-I`.
    spread: Option<(f64, f64)>,
}

impl Plot {
    /// Adds a row to the curve called `name`, which begins with its first row. Of several rows of one size
    /// the last one counts.
    pub fn add(&mut self, name: &str, row: &Row, cpu_time: bool) {
        let measured = &row.out_of_place;
        let point = Point {
            bytes: row.shape.bytes as f64,
            bus: row.shape.speed(measured.seconds).bus,
            seconds: match cpu_time {
                true => measured.host_seconds,
                false => measured.seconds,
            },
            spread: measured
                .per_iteration
                .as_ref()
                .map(|times| (times.summary.min, times.summary.p99)),
        };
        let at = self.series.iter().position(|series| series.name == name);
        let at = at.unwrap_or_else(|| {
            self.series.push(Series {
                name: name.to_owned(),
                points: Vec::new(),
            });
            self.series.len() - 1
        });
        let points = &mut self.series[at].points;
        match points.iter_mut().find(|one| one.bytes == point.bytes) {
            Some(before) => *before = point,
            None => points.push(point),
        }
    }

    /// The picture.
    #[must_use]
    pub fn svg(&self, heading: &Heading) -> String {
        svg::draw(&self.series, heading)
    }

    /// Writes the picture to `path`, in place of what may be there.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, path: &Path, heading: &Heading) -> Result<(), Failure> {
        let written = beside(path).and_then(|mut file| {
            file.write_all(self.svg(heading).as_bytes())?;
            file.persist(path).map_err(|error| error.error)
        });
        written.map(drop).map_err(|error| {
            Failure::new(
                Exit::Failed,
                format!(
                    "the plot could not be written to {}: {error}",
                    path.display()
                ),
            )
        })
    }
}

/// Looks whether a picture can be written to `path`, before there is one.
///
/// # Errors
/// When it cannot.
pub fn check(path: &Path) -> Result<(), Failure> {
    let refused = |why: String| Failure::usage(format!("--plot {}: {why}", path.display()));
    if path.is_dir() {
        return Err(refused("this is a directory".to_owned()));
    }
    match beside(path) {
        Ok(_) => Ok(()),
        Err(error) => Err(refused(format!("the file cannot be written: {error}"))),
    }
}

/// A file that becomes `path` when it is complete.
fn beside(path: &Path) -> std::io::Result<tempfile::NamedTempFile> {
    use std::os::unix::fs::PermissionsExt;
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    // Readable as any file is, which temporary ones are not.
    let readable = std::fs::Permissions::from_mode(0o666);
    tempfile::Builder::new()
        .permissions(readable)
        .tempfile_in(directory)
}

#[cfg(test)]
mod tests;
