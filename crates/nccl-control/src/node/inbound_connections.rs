//! The unauthenticated connections of an acceptor.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use super::admission::Admission;
use crate::connection::Connection;
use crate::departure::cut;
use crate::refusal::log_refused_connection;
use crate::sync::Mutex;

pub(super) struct InboundConnections {
    pub(super) admission: Weak<dyn Admission>,
    max_connections: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    /// The connections and addresses of the peers, in the order in which they arrived.
    all: BTreeMap<u64, (Arc<Connection>, String)>,
    refused_count: u64,
}

impl InboundConnections {
    pub(super) fn new(admission: Weak<dyn Admission>, max_connections: usize) -> Arc<Self> {
        Arc::new(Self {
            admission,
            max_connections,
            state: Mutex::default(),
        })
    }

    /// Returns the number of the next connection.
    pub(super) fn next_number(&self) -> u64 {
        let mut state = self.state.lock();
        state.next += 1;
        state.next - 1
    }

    /// Adds a connection; if there are too many, the oldest is closed.
    pub(super) fn add(&self, number: u64, connection: &Arc<Connection>, from: &str) {
        let mut state = self.state.lock();
        let entry = (Arc::clone(connection), from.to_owned());
        state.all.insert(number, entry);
        let too_many = state.all.len() > self.max_connections;
        let oldest = too_many.then(|| state.all.pop_first()).flatten();
        drop(state);
        if let Some((_, (connection, from))) = oldest {
            self.log_refusal(
                &from,
                "too many connections had not completed their handshake",
            );
            close(&connection);
        }
    }

    /// Removes a connection.
    pub(super) fn remove(&self, number: u64) {
        self.state.lock().all.remove(&number);
    }

    /// Records a refused connection, in the log and for the errors of waiting ranks.
    pub(super) fn log_refusal(&self, from: &str, why: &str) {
        let count = {
            let mut state = self.state.lock();
            state.refused_count += 1;
            state.refused_count
        };
        log_refused_connection(from, why, count);
        let mut text = format!("{from} was refused: {why}");
        cut(&mut text, 300);
        if let Some(admission) = self.admission.upgrade() {
            admission.note_for_errors(text);
        }
    }

    pub(super) fn close_all(&self) {
        let all = std::mem::take(&mut self.state.lock().all);
        all.into_values()
            .for_each(|(connection, _)| close(&connection));
    }
}

/// Closes both directions of a connection.
pub(super) fn close(connection: &Connection) {
    connection.forget();
    connection.shut();
}
