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
    let (mut speeds, mut steps, mut shares) = (Vec::new(), Vec::new(), Vec::new());
    // The first one is not counted.
    for turn in 0..=turns {
        let found = Turn::take(&server, clients, turn, text);
        if turn > 0 {
            speeds.push(found.tokens_per_second);
            steps.push(found.step_seconds);
            shares.push(found.communication);
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

/// One text for each of the clients.
struct Turn {
    tokens_per_second: f64,
    step_seconds: f64,
    communication: f64,
}

impl Turn {
    fn take(server: &Server, clients: usize, number: usize, text: &Text) -> Self {
        let names = [
            "inference_generated_tokens_total",
            "inference_steps_total",
            "inference_step_seconds_total",
            "inference_communication_seconds_total",
        ];
        let before = names.map(|name| server.metric(name));
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for client in 0..clients {
                let body = text.body(number * clients + client);
                let url = &server.url;
                scope.spawn(move || Stream::new(url, &body).finish());
            }
        });
        let seconds = begun.elapsed().as_secs_f64();
        let after = names.map(|name| server.metric(name));
        let [tokens, steps, stepping, communicating] =
            std::array::from_fn(|i| after[i] - before[i]);
        Self {
            tokens_per_second: tokens / seconds,
            step_seconds: stepping / steps,
            communication: communicating / stepping,
        }
    }
}

/// A step of ranks that agree on each step beforehand, and of ranks that do not.
pub(crate) struct Agreement {
    pub(crate) ranks: usize,
    pub(crate) clients: usize,
    pub(crate) without: Spread,
    pub(crate) with: Spread,
    /// Of the turns that follow each other.
    pub(crate) ratio: Spread,
}

/// Turns of two servers, one after the other, in alternating order.
pub(crate) fn agreement(
    ranks: usize,
    clients: usize,
    turns: usize,
    text: &Text,
) -> Outcome<Agreement> {
    let number = ranks.to_string();
    let options = ["--ranks", &number, "--model", text.model];
    let without = Server::start(&options);
    let with = Server::start(&[&options[..], &["--agree-steps", "10"]].concat());
    let (mut steps, mut ratios) = ([Vec::new(), Vec::new()], Vec::new());
    // The first one is not counted.
    for turn in 0..=turns {
        let mut seconds = [0.0; 2];
        let mut order = [0, 1];
        order.rotate_left(turn % 2);
        for which in order {
            let server = [&without, &with][which];
            seconds[which] = Turn::take(server, clients, turn, text).step_seconds;
        }
        if turn > 0 {
            steps[0].push(seconds[0]);
            steps[1].push(seconds[1]);
            ratios.push(seconds[1] / seconds[0]);
        }
    }
    let found = Agreement {
        ranks,
        clients,
        without: Spread::of(&steps[0]).ok_or("no turns")?,
        with: Spread::of(&steps[1]).ok_or("no turns")?,
        ratio: Spread::of(&ratios).ok_or("no turns")?,
    };
    eprintln!(
        "agreement on each step of {ranks} ranks, {clients} clients: {:.3} of the time",
        found.ratio.median
    );
    Ok(found)
}
