//! The programs, in the order in which they run: cheap ones first.

mod alone;
mod failures;
mod identity;
mod library;
mod loading;
mod pairs;

use super::Program;

/// All programs.
pub const PROGRAMS: &[&[Program]] = &[
    library::PROGRAMS,
    identity::PROGRAMS,
    loading::PROGRAMS,
    alone::PROGRAMS,
    pairs::PROGRAMS,
    failures::PROGRAMS,
];
