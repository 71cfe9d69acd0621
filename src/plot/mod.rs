//! The picture of `--plot`: bus bandwidth above, time below, both over the size, as SVG.
//!
//! All axes are logarithmic, and all algorithms, types and operators of a run are in one picture. The picture states
//! the origin of its figures, because pictures get separated from their text.
//!
//! - `axis`: the position of a value, and the labels of an axis;
//! - `svg`: the drawing.

pub mod axis;
mod svg;

use std::io::Write as _;
use std::path::Path;

use crate::bench::Row;
use crate::failure::{Exit, Failure};

/// The texts beside the curves.
#[derive(Clone, Debug, Default)]
pub struct Heading {
    /// The operation, the number of ranks, and the device.
    pub title: String,
    /// Date, program and settings.
    pub details: String,
    /// A warning that readers must see.
    pub warning: Option<String>,
    /// What the time measures.
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
    /// The fastest iteration, and the 99th percentile, with `-I`.
    spread: Option<(f64, f64)>,
}

impl Plot {
    /// Adds a row to the curve called `name`, creating it if needed. Of several rows of one size the last one counts.
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

    /// Writes the picture to `path`, replacing an existing file.
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

/// Checks that a picture can be written to `path`.
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

/// A temporary file in the directory of `path`, to be renamed to it when complete.
fn beside(path: &Path) -> std::io::Result<tempfile::NamedTempFile> {
    use std::os::unix::fs::PermissionsExt;
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    // The mode of ordinary files; temporary ones are readable by their owner only.
    let readable = std::fs::Permissions::from_mode(0o666);
    tempfile::Builder::new()
        .permissions(readable)
        .tempfile_in(directory)
}

#[cfg(test)]
mod tests;
