//! What the program says about itself, beside what its communicators do.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// Notes that are kept.
const KEPT: usize = 256;

/// Something that the program noted.
///
/// ```
/// nccl::recorder::note("step 17");
/// let notes = nccl::recorder::snapshot().notes;
/// assert_eq!(notes.last().unwrap().text, "step 17");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Note {
    /// When.
    pub at: SystemTime,
    /// What.
    pub text: String,
    /// Whether it is a [`World::phase`](crate::World::phase).
    pub is_phase: bool,
}

fn kept() -> MutexGuard<'static, VecDeque<Note>> {
    static NOTES: Mutex<VecDeque<Note>> = Mutex::new(VecDeque::new());
    NOTES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes something, to be read beside the calls: which step this is, what is loaded, who is served.
///
/// The last 256 are kept. Takes a lock and allocates, so it belongs between steps and not between calls.
///
/// ```
/// nccl::recorder::note("loading layer 3");
/// ```
pub fn note(text: &str) {
    keep(text, false);
}

/// Notes what [`World::phase`](crate::World::phase) was told.
pub(crate) fn phase(name: &str) {
    keep(name, true);
}

fn keep(text: &str, is_phase: bool) {
    let note = Note {
        at: SystemTime::now(),
        text: text.to_owned(),
        is_phase,
    };
    let mut notes = kept();
    if notes.len() == KEPT {
        notes.pop_front();
    }
    notes.push_back(note);
}

/// The notes, oldest first.
pub(super) fn all() -> Vec<Note> {
    kept().iter().cloned().collect()
}
