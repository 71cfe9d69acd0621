//! The unauthenticated connections of an acceptor, and the interface to its driver.

use std::collections::BTreeMap;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::{Arc, Weak};

use crate::admission::{Refusal, log_refused_connection};
use crate::connection::Connection;
use crate::departure::cut;
use crate::frame::{Decoder, Frame};
use crate::handshake::{HandshakeMessage, Hello};
use crate::secret::Secret;
use crate::sync::Mutex;
use crate::transport::PeerConnection;

/// The interface of the listening sockets of a process to its driver.
pub(super) trait Admission: Send + Sync + UnwindSafe + RefUnwindSafe {
    fn secret(&self) -> Option<Secret>;
    /// Decides whether the peer of this hello may join; returns the answer for it.
    fn admit(&self, hello: &Hello) -> Result<HandshakeMessage, Refusal>;
    /// Takes over the connection of a process that has proved its identity: it carries frames of the machines from now on.
    fn accept_peer(&self, connection: Arc<Connection>, decoder: Decoder) -> Arc<PeerConnection>;
    /// Handles a request of a peer that only asks for recordings. Returns whether it stays.
    fn answer_recording_request(
        &self,
        connection: &Arc<Connection>,
        frame: &Frame,
    ) -> Result<bool, String>;
    /// Records a refused peer for the errors of ranks that wait.
    fn remark(&self, text: String);
}

pub(super) struct InboundConnections {
    pub(super) admission: Weak<dyn Admission>,
    /// The most unauthenticated connections.
    most: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    /// The connections and addresses of the peers, in the order in which they came.
    all: BTreeMap<u64, (Arc<Connection>, String)>,
    refused_count: u64,
}

impl InboundConnections {
    pub(super) fn new(admission: Weak<dyn Admission>, most: usize) -> Arc<Self> {
        Arc::new(Self {
            admission,
            most,
            state: Mutex::default(),
        })
    }

    /// Returns the number of the next connection.
    pub(super) fn next_number(&self) -> u64 {
        let mut state = self.state.lock();
        state.next += 1;
        state.next - 1
    }

    /// Adds a connection; where there are too many, the oldest is closed.
    pub(super) fn add(&self, number: u64, connection: &Arc<Connection>, from: &str) {
        let mut state = self.state.lock();
        let guest = (Arc::clone(connection), from.to_owned());
        state.all.insert(number, guest);
        let too_many = state.all.len() > self.most;
        let oldest = too_many.then(|| state.all.pop_first()).flatten();
        drop(state);
        if let Some((_, (connection, from))) = oldest {
            self.log_refusal(&from, "there were too many who had not greeted");
            close(&connection);
        }
    }

    /// Removes a connection.
    pub(super) fn remove(&self, number: u64) {
        self.state.lock().all.remove(&number);
    }

    /// Records a refused connection, in the log and for errors of ranks that wait.
    pub(super) fn log_refusal(&self, from: &str, why: &str) {
        let count = {
            let mut state = self.state.lock();
            state.refused_count += 1;
            state.refused_count
        };
        log_refused_connection(from, why, count);
        let mut text = format!("{from} was turned away: {why}");
        cut(&mut text, 300);
        if let Some(admission) = self.admission.upgrade() {
            admission.remark(text);
        }
    }

    pub(super) fn close_all(&self) {
        let all = std::mem::take(&mut self.state.lock().all);
        all.into_values()
            .for_each(|(connection, _)| close(&connection));
    }
}

/// Closes a connection for both directions.
pub(super) fn close(connection: &Connection) {
    connection.forget();
    connection.shut();
}
