//! The recordings of several ranks on one time axis.
//!
//! - `value`: the timeline; `json`: its format in files;
//! - `merge`: which recordings belong together, and how their clocks are related; `files`: reads recordings from files;
//! - `standing`: which ranks are behind; `describe`: calls as sentences;
//! - `layout`: the place of a call on the axis; `chrome`, `html`: the outputs;
//! - `pytorch`: files for PyTorch's analyser.

mod chrome;
mod describe;
mod files;
mod html;
mod json;
mod layout;
mod merge;
mod pytorch;
mod standing;
mod value;

pub use standing::Standing;
pub use value::{MissingRank, RankRecording, Timeline};

#[cfg(test)]
mod tests;
