//! The programs, in the order in which they run: cheap ones first.

mod alone;
mod failures;
mod library;
mod pairs;

use super::Program;

/// All programs.
pub const PROGRAMS: &[&[Program]] = &[
    library::PROGRAMS,
    alone::PROGRAMS,
    pairs::PROGRAMS,
    failures::PROGRAMS,
];
