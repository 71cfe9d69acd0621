//! An answer in pieces: server-sent events.
//!
//! During an interruption, the stream has comments (lines that begin with a colon): every client of server-sent events
//! skips them, and a person sees the cause of the delay. Some clients would take an event of another name for a piece of
//! the answer.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_core::Stream;
use serde_json::Value;
use tokio::sync::mpsc::UnboundedReceiver;

use super::completions::{Answer, failed, usage};
use super::server::Ticket;
use crate::front::caller::Said;
use crate::front::scheduler::Finish;

pub(super) fn respond(
    ticket: Ticket,
    answer: Answer,
    said: UnboundedReceiver<Said>,
    usage: bool,
) -> Response {
    let pieces = Pieces {
        ticket: Some(ticket),
        answer,
        said,
        usage,
        ready: VecDeque::new(),
    };
    Sse::new(pieces)
        .keep_alive(KeepAlive::default())
        .into_response()
}

struct Pieces {
    /// `None` at the end of the answer.
    ticket: Option<Ticket>,
    answer: Answer,
    said: UnboundedReceiver<Said>,
    /// Whether the last piece is the usage. The other pieces then have a null usage.
    usage: bool,
    ready: VecDeque<Event>,
}

impl Pieces {
    fn data(&mut self, json: &Value) {
        self.ready
            .push_back(Event::default().data(json.to_string()));
    }

    fn comment(&mut self, text: &str) {
        // A line end would end the comment.
        let text = text.replace(['\r', '\n'], " ");
        self.ready.push_back(Event::default().comment(text));
    }

    fn take(&mut self, said: Option<Said>) {
        match said {
            Some(Said::Taken) => {}
            Some(Said::Text(text)) => self.piece(&text, None),
            Some(Said::Stalled(why)) => self.comment(&format!("stall: {why}")),
            Some(Said::GoesOn(how)) => self.comment(&format!("goes on: {how}")),
            Some(Said::End {
                text,
                why,
                prompt,
                made,
            }) => {
                self.piece(&text, Some(why));
                if self.usage {
                    let mut json = self.answer.json(None);
                    json["usage"] = usage(prompt, made);
                    self.data(&json);
                }
                self.ready.push_back(Event::default().data("[DONE]"));
                self.over("done");
            }
            Some(Said::Failed(why)) => self.fail(Some(why)),
            // A request with a place never gets `Full`.
            Some(Said::Full) | None => self.fail(None),
        }
    }

    fn piece(&mut self, text: &str, finish: Option<Finish>) {
        let mut json = self.answer.json(Some((text, finish)));
        if self.usage {
            json["usage"] = Value::Null;
        }
        self.data(&json);
    }

    fn fail(&mut self, why: Option<String>) {
        self.data(&failed(why).json());
        self.over("failed");
    }

    fn over(&mut self, outcome: &'static str) {
        if let Some(ticket) = self.ticket.take() {
            ticket.ends(outcome);
        }
    }
}

impl Stream for Pieces {
    type Item = Result<Event, Infallible>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if let Some(event) = this.ready.pop_front() {
                return Poll::Ready(Some(Ok(event)));
            }
            if this.ticket.is_none() {
                return Poll::Ready(None);
            }
            let said = ready!(this.said.poll_recv(context));
            this.take(said);
        }
    }
}
