//! Requests for the recordings of this process at its address.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nccl_base::clock;

use super::driver::Node;
use crate::attached::host;
use crate::connection::Connection;
use crate::departure::Reason;
use crate::frame::{Frame, Outgoing};
use crate::incoming::Answer;
use crate::message::Incomplete;
use crate::recordings::LARGEST_ANSWER;
use crate::request::Request;
use crate::transport::Driver as _;

/// How many recordings a process writes at once; further askers have to come again.
const RECORDINGS: usize = 4;

static RECORDING: AtomicUsize = AtomicUsize::new(0);

impl Node {
    /// Answers a guest that only asks for recordings. Returns whether it stays.
    pub(super) fn answer(
        &self,
        connection: &Arc<Connection>,
        frame: &Frame,
    ) -> Result<bool, String> {
        match Request::decode(frame).map_err(|broken| broken.0.to_owned())? {
            Request::Goodbye => return Ok(false),
            Request::Clock => {
                let now = clock::clock().to_le_bytes();
                answer(connection, frame.id, &Answer::Value(now.as_slice().into()));
            }
            Request::Recording { bytes } => self.record_for(connection, frame.id, bytes),
            request => {
                tracing::debug!(name: "nccl.rendezvous.ignored", target: "nccl", ?request, "not of who asks for recordings");
            }
        }
        Ok(true)
    }

    /// Records on a thread of its own: copying and writing takes milliseconds, which the reading thread cannot spare.
    fn record_for(&self, connection: &Arc<Connection>, id: u64, bytes: usize) {
        let refuse = |reason: &str| {
            let why = Incomplete::GivenUp {
                rank: self.slot(),
                reason: Reason::Said(reason.to_owned()),
            };
            answer(connection, id, &Answer::Incomplete(Arc::new(why)));
        };
        if RECORDING.fetch_add(1, Ordering::AcqRel) >= RECORDINGS {
            RECORDING.fetch_sub(1, Ordering::AcqRel);
            return refuse("others ask already");
        }
        let (to, attached) = (Arc::clone(connection), self.attached.lock().clone());
        let write = move || {
            let most = bytes.min(LARGEST_ANSWER);
            let recording = match attached {
                Some(attached) => attached.recording(most),
                None => host().recording(most),
            };
            RECORDING.fetch_sub(1, Ordering::AcqRel);
            answer(&to, id, &Answer::Value(recording.into()));
        };
        let spawned = std::thread::Builder::new()
            .name(String::from("nccl-recording"))
            .spawn(write);
        if spawned.is_err() {
            RECORDING.fetch_sub(1, Ordering::AcqRel);
            refuse("there is no thread for it");
        }
    }
}

fn answer(to: &Connection, id: u64, answer: &Answer) {
    to.enqueue(Outgoing::new(id, answer.encode()));
    to.flush_quietly();
}
