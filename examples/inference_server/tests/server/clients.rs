//! Clients that send one request after another, and check each answer.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::client::Stream;
use crate::program::Server;
use crate::{Question, reference, until};

const CLIENTS: usize = 3;

/// Calls `act` while clients send requests, and waits for their last answers.
pub(crate) fn under_load<T>(server: &Server, act: impl FnOnce(&Clients) -> T) -> T {
    let questions: Vec<_> = (0..12).map(Question::number).collect();
    let expected = reference(&questions);
    let clients = Clients::default();
    std::thread::scope(|scope| {
        // Also ends the clients when this thread panics.
        let _closing = Closing(&clients);
        for client in 0..CLIENTS {
            let (clients, questions, expected) = (&clients, &questions, &expected);
            scope.spawn(move || {
                let turns = (client..).step_by(CLIENTS);
                for number in turns.map(|turn| turn % questions.len()) {
                    let Some(_asking) = clients.ask() else { return };
                    let stream = Stream::new(&server.url, &questions[number].streaming());
                    assert_eq!(stream.finish().0, expected[number], "question {number}");
                }
            });
        }
        act(&clients)
    })
}

/// The state of the clients, which send requests repeatedly unless they are paused.
#[derive(Default)]
pub(crate) struct Clients {
    state: Mutex<Asking>,
    changed: Condvar,
}

#[derive(Default)]
struct Asking {
    under_way: usize,
    paused: bool,
    over: bool,
}

impl Clients {
    fn lock(&self) -> MutexGuard<'_, Asking> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a client may send a request; returns `None` at the end.
    fn ask(&self) -> Option<UnderWay<'_>> {
        let waits = |state: &mut Asking| state.paused && !state.over;
        let state = self.changed.wait_while(self.lock(), waits);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        (!state.over).then(|| {
            state.under_way += 1;
            UnderWay(self)
        })
    }

    /// Pauses the clients, and waits until no request is open.
    pub(crate) fn pause(&self) {
        self.lock().paused = true;
        until("the end of all texts", || {
            (self.lock().under_way == 0).then_some(())
        });
    }

    pub(crate) fn resume(&self) {
        self.lock().paused = false;
        self.changed.notify_all();
    }
}

/// A request without an answer yet.
struct UnderWay<'a>(&'a Clients);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.lock().under_way -= 1;
    }
}

struct Closing<'a>(&'a Clients);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.lock().over = true;
        self.0.changed.notify_all();
    }
}
