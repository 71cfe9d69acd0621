//! The guests of an acceptor, and the interface to its driver.

use std::collections::BTreeMap;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::{Arc, Weak};

use crate::admission::{Refusal, stranger};
use crate::connection::Connection;
use crate::departure::cut;
use crate::frame::{Decoder, Frame};
use crate::greeting::{Greeting, Hello};
use crate::secret::Secret;
use crate::sync::Mutex;
use crate::transport::Port;

/// The interface of the listening sockets of a process to its driver.
pub(super) trait Gate: Send + Sync + UnwindSafe + RefUnwindSafe {
    fn secret(&self) -> Option<Secret>;
    /// Decides whether the peer of this hello may join; returns the answer for it.
    fn admit(&self, hello: &Hello) -> Result<Greeting, Refusal>;
    /// Takes over the connection of a process that has proved its identity: it carries frames of the machines from now on.
    fn let_in(&self, connection: Arc<Connection>, decoder: Decoder) -> Arc<Port>;
    /// Handles a request of a guest that only asks for recordings. Returns whether it stays.
    fn answer_asker(&self, connection: &Arc<Connection>, frame: &Frame) -> Result<bool, String>;
    /// Records a refused guest for the errors of ranks that wait.
    fn remark(&self, text: String);
}

pub(super) struct Guests {
    pub(super) gate: Weak<dyn Gate>,
    /// The most guests.
    most: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    /// The connections and addresses of the guests, in the order in which they came.
    all: BTreeMap<u64, (Arc<Connection>, String)>,
    turned_away: u64,
}

impl Guests {
    pub(super) fn new(gate: Weak<dyn Gate>, most: usize) -> Arc<Self> {
        Arc::new(Self {
            gate,
            most,
            state: Mutex::default(),
        })
    }

    /// Returns the number of the next guest.
    pub(super) fn number(&self) -> u64 {
        let mut state = self.state.lock();
        state.next += 1;
        state.next - 1
    }

    /// Adds a guest; where there are too many, the oldest is closed.
    pub(super) fn keep(&self, number: u64, connection: &Arc<Connection>, from: &str) {
        let mut state = self.state.lock();
        let guest = (Arc::clone(connection), from.to_owned());
        state.all.insert(number, guest);
        let too_many = state.all.len() > self.most;
        let oldest = too_many.then(|| state.all.pop_first()).flatten();
        drop(state);
        if let Some((_, (connection, from))) = oldest {
            self.note(&from, "there were too many who had not greeted");
            close(&connection);
        }
    }

    /// Removes a guest.
    pub(super) fn forget(&self, number: u64) {
        self.state.lock().all.remove(&number);
    }

    /// Records a refused connection, in the log and for errors of ranks that wait.
    pub(super) fn note(&self, from: &str, why: &str) {
        let count = {
            let mut state = self.state.lock();
            state.turned_away += 1;
            state.turned_away
        };
        stranger(from, why, count);
        let mut text = format!("{from} was turned away: {why}");
        cut(&mut text, 300);
        if let Some(gate) = self.gate.upgrade() {
            gate.remark(text);
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
