//! Notes of the program, shown beside the calls of its communicators.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use nccl_base::clock;

use super::fields;
use crate::forked;
use crate::sync::{Mutex, MutexGuard};

/// How many notes are kept.
const MAX_NOTES: usize = 256;

/// How many bytes of a text are kept.
const MAX_NOTE_BYTES: usize = 1024;

/// A note of the program.
///
/// ```
/// nccl::recorder::note("step 17");
/// let notes = nccl::recorder::snapshot().notes;
/// assert_eq!(notes.last().unwrap().text, "step 17");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Note {
    /// When it was made, since the origin of its process's times ([`Snapshot::origin`](super::Snapshot::origin)).
    #[serde(rename = "since_ns", with = "fields::nanoseconds")]
    pub since: Duration,
    /// When it was made, by the wall clock.
    #[serde(rename = "unix_ns", with = "fields::unix_time")]
    pub at: SystemTime,
    /// The text.
    pub text: String,
    /// Whether it was made by `World::phase`.
    #[serde(rename = "phase")]
    pub is_phase: bool,
}

fn notes() -> MutexGuard<'static, VecDeque<Note>> {
    static NOTES: Mutex<VecDeque<Note>> = Mutex::new(VecDeque::new());
    NOTES.lock()
}

/// Adds a note, to be read beside the calls: for instance the current step, the model that is loaded, or the request
/// that is served.
///
/// The last 256 notes are kept, and the first 1024 bytes of each. Takes a lock and allocates, so it belongs between steps, not
/// between calls.
///
/// ```
/// nccl::recorder::note("loading layer 3");
/// ```
pub fn note(text: &str) {
    add_note(text, false);
}

/// Adds a note for [`World::phase`](crate::World::phase).
#[doc(hidden)]
pub fn phase(name: &str) {
    add_note(name, true);
}

fn add_note(text: &str, is_phase: bool) {
    // The lock may have been held at the fork.
    if forked::is_child() {
        return;
    }
    let since = clock::now();
    let note = Note {
        since,
        at: clock::origin().wall + since,
        text: cut(text, MAX_NOTE_BYTES).to_owned(),
        is_phase,
    };
    let mut all = notes();
    if all.len() == MAX_NOTES {
        all.pop_front();
    }
    all.push_back(note);
}

/// The beginning of a text, at most `longest` bytes, cut between characters.
pub(super) fn cut(text: &str, longest: usize) -> &str {
    let mut end = longest.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// The notes, oldest first.
pub(super) fn all() -> Vec<Note> {
    match forked::is_child() {
        false => notes().iter().cloned().collect(),
        true => Vec::new(),
    }
}
