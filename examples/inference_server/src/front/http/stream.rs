//! An answer in pieces: server-sent events.
//!
//! While nothing comes because a rank is gone, the stream has comments (lines that begin with a colon): every client of
//! server-sent events passes over them, and a person sees why it takes longer. An event of another name would be taken for a
//! piece of the answer by some.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_core::Stream;
use serde_json::Value;
use tokio::sync::mpsc::UnboundedReceiver;

use super::Server;
use super::completions::{Answer, usage};
use super::refusal::Refusal;
use crate::front::caller::Said;

pub(super) fn respond(
    server: &Arc<Server>,
    answer: Answer,
    said: UnboundedReceiver<Said>,
    usage: bool,
) -> Response {
    let pieces = Pieces {
        server: Arc::clone(server),
        answer,
        said,
        usage,
        ready: VecDeque::new(),
        over: false,
    };
    Sse::new(pieces)
        .keep_alive(KeepAlive::default())
        .into_response()
}

struct Pieces {
    server: Arc<Server>,
    answer: Answer,
    said: UnboundedReceiver<Said>,
    usage: bool,
    ready: VecDeque<Event>,
    over: bool,
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
            Some(Said::Text(text)) => {
                let json = self.answer.json(Some((&text, None)));
                self.data(&json);
            }
            Some(Said::Stalled(why)) => self.comment(&format!("stall: {why}")),
            Some(Said::GoesOn(how)) => self.comment(&format!("goes on: {how}")),
            Some(Said::End {
                text,
                why,
                prompt,
                made,
            }) => {
                let json = self.answer.json(Some((&text, Some(why))));
                self.data(&json);
                if self.usage {
                    let mut json = self.answer.json(None);
                    json["usage"] = usage(prompt, made);
                    self.data(&json);
                }
                self.ready.push_back(Event::default().data("[DONE]"));
                self.over("done");
            }
            Some(Said::Failed(_) | Said::Full) | None => {
                let text = "the server is ending: ask another one";
                let refusal = Refusal::new(StatusCode::SERVICE_UNAVAILABLE, text);
                self.data(&refusal.json());
                self.over("failed");
            }
        }
    }

    fn over(&mut self, outcome: &'static str) {
        self.over = true;
        self.server.count(outcome);
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
            if this.over {
                return Poll::Ready(None);
            }
            let said = ready!(this.said.poll_recv(context));
            this.take(said);
        }
    }
}

impl Drop for Pieces {
    fn drop(&mut self) {
        if !self.over {
            self.server.count("gone");
        }
    }
}
