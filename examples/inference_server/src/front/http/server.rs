//! The common state of the HTTP handlers.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::front::crew::SharedObserver;
use crate::front::engine::Event;
use crate::front::options::{Options, Recovery};
use crate::front::view::View;
use crate::model::Settings;
use crate::model::tokenizer::Tokenizer;

/// The most threads that wait for the ranks' answers, for `/health` and for `/debug/timeline`.
const GLANCES: usize = 2;
const LOOKS: usize = 1;
/// The most threads that tokenize long texts.
const READERS: usize = 2;

/// The common state of the HTTP handlers.
pub(in crate::front) struct Server {
    pub(super) engine: Sender<Event>,
    view: Arc<Mutex<View>>,
    pub(super) observer: SharedObserver,
    pub(super) model: &'static str,
    pub(super) tokenizer: Tokenizer,
    pub(super) settings: Settings,
    pub(super) queue: usize,
    /// The most ranks, if their number can change.
    pub(super) ranks: Option<usize>,
    /// How long a client may take to send a request.
    pub(super) client_timeout: Duration,
    pub(super) glances: Arc<Semaphore>,
    pub(super) looks: Arc<Semaphore>,
    pub(super) readers: Arc<Semaphore>,
}

impl Server {
    pub(in crate::front) fn new(
        options: &Options,
        tokenizer: Tokenizer,
        engine: Sender<Event>,
        view: &Arc<Mutex<View>>,
        observer: SharedObserver,
    ) -> Self {
        Self {
            engine,
            view: Arc::clone(view),
            observer,
            model: options.model.name(),
            tokenizer,
            settings: options.settings,
            queue: options.queue,
            ranks: matches!(options.recovery, Recovery::Elastic { .. }).then_some(options.ranks),
            client_timeout: options.client_timeout,
            glances: Arc::new(Semaphore::new(GLANCES)),
            looks: Arc::new(Semaphore::new(LOOKS)),
            readers: Arc::new(Semaphore::new(READERS)),
        }
    }

    /// Returns a copy of the view. Its users read files of the kernel, and the engine must not wait for that.
    pub(super) fn view(&self) -> View {
        self.view.lock().clone()
    }
}

/// A request that is counted at its end, with any outcome.
pub(super) struct Ticket {
    server: Arc<Server>,
    outcome: &'static str,
}

impl Ticket {
    /// Creates a ticket. A ticket without an explicit outcome counts as a client that disconnected.
    pub(super) fn new(server: &Arc<Server>) -> Self {
        Self {
            server: Arc::clone(server),
            outcome: "gone",
        }
    }

    pub(super) fn ends(mut self, outcome: &'static str) {
        self.outcome = outcome;
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut view = self.server.view.lock();
        *view.numbers.requests.entry(self.outcome).or_default() += 1;
    }
}
