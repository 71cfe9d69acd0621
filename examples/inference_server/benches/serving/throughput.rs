//! Tokens of a server to which nothing happens.

use std::time::Instant;

use crate::client::Stream;
use crate::program::Server;
use crate::{Outcome, Spread, Text};

/// What some clients at once got of a server.
pub(crate) struct Throughput {
    pub(crate) model: &'static str,
    pub(crate) ranks: usize,
    /// Copies of each expert, of a model that is laid out by requests.
    pub(crate) copies: Option<usize>,
    pub(crate) clients: usize,
    /// Tokens of each text, at most.
    pub(crate) length: usize,
    /// Of all clients together.
    pub(crate) tokens_per_second: Spread,
    /// Of a step, on the rank that has the first part of the model.
    pub(crate) step_seconds: Spread,
    /// How much of that was communication, with the wait for the other ranks: 0 to 1.
    pub(crate) communication: Spread,
}

/// Turns of so many clients: each asks for one text in each of them, and all begin together.
pub(crate) fn measure(
    ranks: usize,
    copies: Option<usize>,
    clients: usize,
    turns: usize,
    text: &Text,
) -> Outcome<Throughput> {
    let (number, of_each) = (ranks.to_string(), copies.unwrap_or_default().to_string());
    let mut arguments = vec!["--ranks", &number, "--model", text.model];
    if copies.is_some() {
        arguments.extend(["--recovery", "elastic", "--copies", &of_each]);
    }
    let server = Server::start(&arguments);
    let names = [
        "inference_generated_tokens_total",
        "inference_steps_total",
        "inference_step_seconds_total",
        "inference_communication_seconds_total",
    ];
    let (mut speeds, mut steps, mut shares) = (Vec::new(), Vec::new(), Vec::new());
    // The first one is not counted.
    for turn in 0..=turns {
        let before = names.map(|name| server.metric(name));
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for client in 0..clients {
                let body = text.body(turn * clients + client);
                let url = &server.url;
                scope.spawn(move || Stream::new(url, &body).finish());
            }
        });
        let seconds = begun.elapsed().as_secs_f64();
        let after = names.map(|name| server.metric(name));
        let [tokens, count, stepping, communicating] =
            std::array::from_fn(|i| after[i] - before[i]);
        if turn > 0 {
            speeds.push(tokens / seconds);
            steps.push(stepping / count);
            shares.push(communicating / stepping);
        }
    }
    let found = Throughput {
        model: text.model,
        ranks,
        copies,
        clients,
        length: text.most,
        tokens_per_second: Spread::of(&speeds).ok_or("no turns")?,
        step_seconds: Spread::of(&steps).ok_or("no turns")?,
        communication: Spread::of(&shares).ok_or("no turns")?,
    };
    eprintln!(
        "{} on {ranks} ranks, {clients} clients, copies {copies:?}: {:.0} tokens/s",
        text.model, found.tokens_per_second.median
    );
    Ok(found)
}
