//! The bytes that each rank sends to each rank in an all-to-all-v: nccl-tests' patterns, by its variables.
//!
//! Either all ranks send the same total, with more to the ranks that are farther away (by rank), or a file has the
//! amounts: a square matrix of bytes, rows for senders and columns for receivers, separated by blanks. Every amount is
//! rounded down to a multiple of 16 bytes.

use std::path::PathBuf;

use crate::failure::Failure;
use crate::shape::{Case, Shape};
use crate::sizes::Sweep;
use crate::verify::Block;

/// From 0, all pairs alike, to 1, in proportion to the distance.
pub const SPREAD: &str = "NCCL_TESTS_ALLTOALLV_SPREAD";
/// The file with the matrix.
pub const MATRIX_FILE: &str = "NCCL_TESTS_ALLTOALLV_MATRIX_FILE";
/// The factor for all amounts of the matrix.
pub const MATRIX_SCALE: &str = "NCCL_TESTS_ALLTOALLV_MATRIX_SCALE";
/// Whether to print a summary of each rank.
pub const PRINT_SUMMARY: &str = "NCCL_TESTS_ALLTOALLV_PRINT_SUMMARY";

/// A pattern.
#[derive(Clone, Debug, PartialEq)]
pub struct Traffic {
    pattern: Pattern,
    prints_summary: bool,
}

#[derive(Clone, Debug, PartialEq)]
enum Pattern {
    Distance { spread: f64 },
    Matrix(Matrix),
}

#[derive(Clone, Debug, PartialEq)]
struct Matrix {
    file: PathBuf,
    scale: f64,
    /// The number of rows, and of columns.
    size: usize,
    bytes: Vec<u64>,
}

impl Traffic {
    /// The pattern that the environment requests.
    ///
    /// # Errors
    /// When a variable or the file is invalid: one sentence that names it.
    pub fn from_environment() -> Result<Self, Failure> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    fn from_variables(get: impl Fn(&str) -> Option<String>) -> Result<Self, Failure> {
        let get = |name: &str| get(name).filter(|value| !value.is_empty());
        let number = |name: &str, most: f64, needs: &str| match get(name) {
            None => Ok(1.0),
            Some(text) => match text.trim().parse::<f64>() {
                Ok(number) if (0.0..=most).contains(&number) => Ok(number),
                _ => Err(Failure::usage(format!("{name}={text}: {needs} is needed"))),
            },
        };
        let prints_summary = match get(PRINT_SUMMARY).as_deref().map(str::trim) {
            None | Some("0") => false,
            Some("1") => true,
            Some(text) => {
                return Err(Failure::usage(format!(
                    "{PRINT_SUMMARY}={text}: 0 or 1 is needed"
                )));
            }
        };
        let spread = number(SPREAD, 1.0, "a number from 0 to 1")?;
        let scale = number(MATRIX_SCALE, f64::MAX, "a number from 0 on")?;
        let pattern = match get(MATRIX_FILE) {
            None => Pattern::Distance { spread },
            Some(file) => {
                let file = PathBuf::from(file);
                let text = std::fs::read_to_string(&file).map_err(|error| {
                    Failure::usage(format!(
                        "{MATRIX_FILE}={}: the file cannot be read: {error}",
                        file.display()
                    ))
                })?;
                Pattern::Matrix(Matrix::read(file, &text, scale)?)
            }
        };
        Ok(Self {
            pattern,
            prints_summary,
        })
    }

    /// Whether the sizes and the number of ranks fit the matrix, if there is one.
    ///
    /// # Errors
    /// When they do not.
    pub fn check(&self, sweep: Sweep, ranks: usize) -> Result<(), Failure> {
        let Pattern::Matrix(matrix) = &self.pattern else {
            return Ok(());
        };
        let (file, size) = (matrix.file.display(), matrix.size);
        if ranks > size {
            return Err(Failure::usage(format!(
                "{MATRIX_FILE}={file}: the matrix is for {size} ranks, and there are {ranks}"
            )));
        }
        let needed = self.busiest(ranks, 0);
        if sweep.min != sweep.max || sweep.max < needed {
            return Err(Failure::usage(format!(
                "{MATRIX_FILE}={file}: the matrix says how much is sent, and there is one size, which has to hold \
                 the {needed} bytes of the busiest rank: say -b and -e with the same size of at least that much"
            )));
        }
        Ok(())
    }

    /// Bytes that differ between different patterns.
    #[must_use]
    pub fn fingerprint(&self) -> Vec<u8> {
        match &self.pattern {
            Pattern::Distance { spread } => spread.to_le_bytes().to_vec(),
            Pattern::Matrix(matrix) => matrix.bytes.iter().flat_map(|n| n.to_le_bytes()).collect(),
        }
    }

    /// The shape of a row with `bytes` per rank.
    #[must_use]
    pub fn shape(&self, bytes: u64, case: Case, ranks: usize) -> Shape {
        let even = Shape::split(bytes, case, ranks);
        let count = match self.pattern {
            Pattern::Distance { .. } => even.count,
            // As in nccl-tests: the pairs have different counts.
            Pattern::Matrix(_) => 0,
        };
        Shape {
            count,
            bytes: self.busiest(ranks, even.bytes),
            ..even
        }
    }

    /// The bytes that go from one rank to another.
    #[must_use]
    pub fn bytes(&self, shape: Shape, from: usize, to: usize) -> u64 {
        self.between(
            from,
            to,
            shape.ranks,
            shape.part_bytes() * shape.ranks as u64,
        )
    }

    /// The blocks that `rank` receives: one from each rank, and nothing behind them.
    #[must_use]
    pub fn blocks(&self, shape: Shape, rank: usize) -> Vec<Block> {
        let mut blocks: Vec<Block> = (0..shape.ranks)
            .map(|from| {
                let before = (0..rank).map(|to| self.bytes(shape, from, to)).sum();
                Block {
                    from: Some((from, before)),
                    bytes: self.bytes(shape, from, rank),
                }
            })
            .collect();
        let received: u64 = blocks.iter().map(|block| block.bytes).sum();
        blocks.push(Block {
            from: None,
            bytes: shape.bytes - received,
        });
        blocks
    }

    /// The summary of each rank that nccl-tests prints, if it was requested; without `# `.
    #[must_use]
    pub fn summary(&self, shape: Shape, seconds: f64) -> Vec<String> {
        if !self.prints_summary {
            return Vec::new();
        }
        let (ranks, us) = (shape.ranks, seconds * 1e6);
        let mode = match &self.pattern {
            Pattern::Distance { spread } => format!(
                "mode=generated nranks={ranks} total_bytes={} spread={spread:.3}",
                shape.part_bytes() * ranks as u64
            ),
            Pattern::Matrix(Matrix { size, scale, .. }) => {
                format!("mode=matrix nranks={ranks} matrix_dim={size} scale={scale:.3}")
            }
        };
        let mut lines = vec![format!("{PRINT_SUMMARY}: {mode} time_usec={us:.2}")];
        lines.extend((0..ranks).map(|rank| {
            let sent: u64 = (0..ranks).map(|peer| self.bytes(shape, rank, peer)).sum();
            let received: u64 = (0..ranks).map(|peer| self.bytes(shape, peer, rank)).sum();
            let speed = Shape {
                bytes: sent.max(received),
                ..shape
            }
            .speed(seconds);
            format!(
                "  rank={rank} send_bytes={sent} recv_bytes={received} alg_bw={:.2} bus_bw={:.2}",
                speed.algorithm, speed.bus
            )
        }));
        lines
    }

    /// The most bytes that a rank sends or receives, when all send `total`.
    fn busiest(&self, ranks: usize, total: u64) -> u64 {
        let of = |rank: usize| {
            let sent: u64 = (0..ranks)
                .map(|to| self.between(rank, to, ranks, total))
                .sum();
            let received: u64 = (0..ranks)
                .map(|from| self.between(from, rank, ranks, total))
                .sum();
            sent.max(received)
        };
        match self.pattern {
            // All ranks have the same.
            Pattern::Distance { .. } => of(0),
            Pattern::Matrix(_) => (0..ranks).map(of).max().unwrap_or(0),
        }
    }

    fn between(&self, from: usize, to: usize, ranks: usize, total: u64) -> u64 {
        let spread = match &self.pattern {
            Pattern::Matrix(matrix) => return matrix.bytes[from * matrix.size + to],
            Pattern::Distance { spread } => *spread,
        };
        if ranks == 1 {
            return total & !15;
        }
        let distance = (to + ranks - from) % ranks;
        let distances = ranks * (ranks - 1) / 2;
        let uniform = total as f64 / ranks as f64;
        let weighted = distance as f64 * total as f64 / distances as f64;
        ((1.0 - spread) * uniform + spread * weighted) as u64 & !15
    }
}

impl Matrix {
    fn read(file: PathBuf, text: &str, scale: f64) -> Result<Self, Failure> {
        let refused =
            |why: String| Failure::usage(format!("{MATRIX_FILE}={}: {why}", file.display()));
        let mut bytes = Vec::new();
        let (mut rows, mut columns) = (0, 0);
        for line in text.lines() {
            let mut found = 0;
            for word in line.split_whitespace() {
                let at = format!("row {rows}, column {found}");
                let number = word.parse::<f64>().ok().filter(|number| number.is_finite());
                let number = number.ok_or_else(|| {
                    refused(format!("\"{word}\" at {at} is not a number of bytes"))
                })?;
                if number < 0.0 {
                    return Err(refused(format!("{word} at {at} is negative")));
                }
                let scaled = number * scale;
                // A limit, so that no sum of a row can overflow; it is more than any device has.
                if scaled >= 2f64.powi(48) {
                    return Err(refused(format!(
                        "{word} at {at}, times {scale}, is too much"
                    )));
                }
                bytes.push(scaled as u64 & !15);
                found += 1;
            }
            match found {
                0 => continue,
                _ if rows == 0 => columns = found,
                _ if found != columns => {
                    return Err(refused(format!(
                        "row {rows} has {found} columns, and those above have {columns}"
                    )));
                }
                _ => {}
            }
            rows += 1;
        }
        if rows == 0 {
            return Err(refused("the file is empty".to_owned()));
        }
        if rows != columns {
            return Err(refused(format!(
                "the matrix has {rows} rows and {columns} columns, and has to be square"
            )));
        }
        Ok(Self {
            file,
            scale,
            size: rows,
            bytes,
        })
    }
}

#[cfg(test)]
mod tests;
