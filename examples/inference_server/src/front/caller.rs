//! A client's side of a request: the messages of the engine to the HTTP handler that waits.

use tokio::sync::mpsc::UnboundedSender;

use super::scheduler::{Client, Finish};
use super::text::Speech;
use crate::model::tokenizer::Tokenizer;

/// A message to a client, in this order: whether the request is taken, its text, and the end. In between, reports of
/// interruptions.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Said {
    Taken,
    /// Too many requests wait already.
    Full,
    Text(String),
    /// The cause of an interruption.
    Stalled(String),
    GoesOn(String),
    End {
        /// Text that had been held back.
        text: String,
        why: Finish,
        prompt: usize,
        /// The number of tokens of the text that the client got, without an end token and without tokens cut off by a stop.
        made: usize,
    },
    /// The reason why there will be no answer.
    Failed(String),
}

/// The client of a request over HTTP.
#[derive(Debug)]
pub(super) struct Caller {
    to: UnboundedSender<Said>,
    speech: Speech,
    tokenizer: Tokenizer,
    /// Whether the client has been told of an interruption.
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
        // The scheduler detects a disconnected client.
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

    fn end(self, why: Finish, prompt: usize) {
        let (text, made) = self.speech.finish();
        // The client may have disconnected.
        let _ = self.to.send(Said::End {
            text,
            why,
            prompt,
            made,
        });
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;

    #[test]
    fn the_count_at_the_end_is_that_of_the_text_that_was_told() {
        let (to, mut said) = mpsc::unbounded_channel();
        let stops = vec![String::from("yz")];
        let mut caller = Caller::new(to, Tokenizer::default(), stops);
        let enough: Vec<_> = b"axyz".map(|byte| caller.say(byte.into())).into();
        assert_eq!(enough, [false, false, false, true]);
        caller.end(Finish::Stop, 5);
        let end = Said::End {
            text: String::new(),
            why: Finish::Stop,
            prompt: 5,
            made: 2,
        };
        let text = |text: &str| Said::Text(text.to_owned());
        for expected in [text("a"), text("x"), end] {
            assert_eq!(said.try_recv(), Ok(expected));
        }
    }
}
