//! Requests for the recordings of this process at its address.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nccl_base::clock;

use super::driver::Node;
use crate::application::application;
use crate::connection::Connection;
use crate::coordinator_message::Answer;
use crate::departure::Reason;
use crate::frame::{Frame, Outgoing};
use crate::recordings::LARGEST_ANSWER;
use crate::request::Request;
use crate::round::RequestError;
use crate::transport::MachineDriver as _;

/// The maximum number of recordings that a process writes at the same time; further requests are refused.
const MAX_RECORDINGS: usize = 4;

static RUNNING_RECORDINGS: AtomicUsize = AtomicUsize::new(0);

impl Node {
    /// Answers a peer that only asks for recordings; the error states why the request is refused.
    pub(super) fn answer(&self, connection: &Arc<Connection>, frame: &Frame) -> Result<(), String> {
        match Request::decode(frame).map_err(|broken| broken.0.to_owned())? {
            Request::Clock => {
                let now = clock::clock().to_le_bytes();
                answer(connection, frame.id, &Answer::Value(now.as_slice().into()));
            }
            Request::Recording { bytes } => self.record_for(connection, frame.id, bytes),
            request => {
                tracing::debug!(name: "nccl.rendezvous.ignored", target: "nccl", ?request, "a request that a reader of recordings may not make");
            }
        }
        Ok(())
    }

    /// Records on a separate thread: copying and writing takes milliseconds, for which the reading thread must not
    /// block.
    fn record_for(&self, connection: &Arc<Connection>, id: u64, bytes: usize) {
        let refuse = |reason: &str| {
            let why = RequestError::GivenUp {
                rank: self.slot(),
                reason: Reason::Text(reason.to_owned()),
            };
            answer(connection, id, &Answer::Failed(Arc::new(why)));
        };
        if RUNNING_RECORDINGS.fetch_add(1, Ordering::AcqRel) >= MAX_RECORDINGS {
            RUNNING_RECORDINGS.fetch_sub(1, Ordering::AcqRel);
            return refuse("it is answering other requests for recordings");
        }
        let (to, recorder) = (Arc::clone(connection), self.recorder.lock().clone());
        let write = move || {
            let max_bytes = bytes.min(LARGEST_ANSWER);
            let recording = match recorder {
                Some(recorder) => recorder.recording(max_bytes),
                None => application().recording(max_bytes),
            };
            RUNNING_RECORDINGS.fetch_sub(1, Ordering::AcqRel);
            answer(&to, id, &Answer::Value(recording.into()));
        };
        let spawned = std::thread::Builder::new()
            .name(String::from("nccl-recording"))
            .spawn(write);
        if spawned.is_err() {
            RUNNING_RECORDINGS.fetch_sub(1, Ordering::AcqRel);
            refuse("there is no thread for it");
        }
    }
}

fn answer(to: &Connection, id: u64, answer: &Answer) {
    to.enqueue(Outgoing::new(id, answer.encode()));
    to.flush_quietly();
}
