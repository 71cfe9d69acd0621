//! A client's side of a request: what the engine tells those who wait for HTTP.

use tokio::sync::mpsc::UnboundedSender;

use super::scheduler::{Client, Finish};
use super::text::Speech;
use crate::model::tokenizer::Tokenizer;

/// What a client hears, in this order: whether it is taken, its text, and the end. In between, that nothing comes for a while.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Said {
    Taken,
    /// Too many wait already.
    Full,
    Text(String),
    /// Why nothing comes.
    Stalled(String),
    GoesOn(String),
    End {
        /// What had been held back.
        text: String,
        why: Finish,
        prompt: usize,
        made: usize,
    },
    /// The server gives up.
    Failed(String),
}

/// One who asked.
#[derive(Debug)]
pub(super) struct Caller {
    to: UnboundedSender<Said>,
    speech: Speech,
    tokenizer: Tokenizer,
    /// Whether it has been told that nothing comes.
    stalled: bool,
}

impl Caller {
    pub(super) fn new(to: UnboundedSender<Said>, tokenizer: Tokenizer, stops: Vec<String>) -> Self {
        Self {
            to,
            speech: Speech::new(&tokenizer, stops),
            tokenizer,
            stalled: false,
        }
    }

    pub(super) fn tell(&self, said: Said) {
        // Who has gone away is noticed by the scheduler.
        let _ = self.to.send(said);
    }

    pub(super) fn stall(&mut self, why: &str) {
        if !self.stalled {
            self.stalled = true;
            self.tell(Said::Stalled(why.to_owned()));
        }
    }

    pub(super) fn go_on(&mut self, how: &str) {
        if std::mem::take(&mut self.stalled) {
            self.tell(Said::GoesOn(how.to_owned()));
        }
    }
}

impl Client for Caller {
    fn taken(&mut self) {
        self.tell(Said::Taken);
    }

    fn is_gone(&self) -> bool {
        self.to.is_closed()
    }

    fn ends(&self, token: u32) -> bool {
        self.tokenizer.ends(token)
    }

    fn say(&mut self, token: u32) -> bool {
        let text = self.speech.push(token);
        if !text.is_empty() {
            self.tell(Said::Text(text));
        }
        self.speech.has_stopped()
    }

    fn end(self, why: Finish, prompt: usize, made: usize) {
        let text = self.speech.finish();
        // Nobody minds if it is not heard.
        let _ = self.to.send(Said::End {
            text,
            why,
            prompt,
            made,
        });
    }
}
