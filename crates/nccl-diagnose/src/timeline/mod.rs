//! The recordings of several ranks together, on one time axis.
//!
//! - `value`: what it is; `json`: how it is written, and read again;
//! - `merge`: which recordings belong together, and how their clocks stand to each other; `files`: from files;
//! - `standing`: who is behind; `words`: calls as sentences;
//! - `layout`: where a call lies on the axis; `chrome`, `html`: what there is to look at.

mod chrome;
mod files;
mod html;
mod json;
mod layout;
mod merge;
mod standing;
mod value;
mod words;

pub use standing::Standing;
pub use value::{MissingRank, RankRecording, Timeline};

#[cfg(test)]
mod tests;
