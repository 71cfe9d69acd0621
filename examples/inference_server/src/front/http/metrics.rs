//! `GET /metrics`, in Prometheus' text format.

use std::fmt::{Display, Write};
use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::Server;
use crate::front::links::strangers;
use crate::front::view::{View, process_state};

pub(super) async fn metrics(State(server): State<Arc<Server>>) -> Response {
    let text = text(&server.view(), server.settings.slots);
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4")];
    (kind, text).into_response()
}

/// One text, of which each metric is a block.
#[derive(Default)]
struct Page(String);

impl Page {
    fn metric(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn value(&mut self, name: &str, labels: &str, value: impl Display) {
        let _ = writeln!(self.0, "{name}{labels} {value}");
    }

    fn counter(&mut self, name: &str, help: &str, value: impl Display) {
        self.metric(name, "counter", help);
        self.value(name, "", value);
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.metric(name, "gauge", help);
        self.value(name, "", value);
    }
}

fn text(view: &View, slots: usize) -> String {
    let mut page = Page::default();
    let numbers = &view.numbers;
    page.gauge(
        "inference_ready",
        "1 when a request would be worked on now.",
        u8::from(view.trouble().is_none()),
    );
    let name = "inference_requests_total";
    let help = "Requests that are over: done, invalid, refused (the queue was full), crowded (too many clients), gone (the client), failed.";
    page.metric(name, "counter", help);
    for outcome in ["done", "invalid", "refused", "crowded", "gone", "failed"] {
        let count = numbers.requests.get(outcome).copied().unwrap_or(0);
        page.value(name, &format!("{{outcome=\"{outcome}\"}}"), count);
    }
    page.counter(
        "inference_prompt_tokens_total",
        "Tokens of the prompts of requests that were taken.",
        numbers.prompt_tokens,
    );
    page.counter(
        "inference_generated_tokens_total",
        "Tokens that were drawn, with those that ended a text and are no part of it.",
        numbers.made_tokens,
    );
    page.gauge(
        "inference_requests_waiting",
        "Requests without a slot.",
        numbers.waiting,
    );
    page.gauge(
        "inference_requests_running",
        "Requests that have a slot.",
        numbers.running,
    );
    page.gauge("inference_slots", "How many slots there are.", slots);
    page.counter(
        "inference_steps_total",
        "Steps of the model.",
        numbers.steps,
    );
    page.counter(
        "inference_step_seconds_total",
        "Time in steps, on the rank that has the first part of the model.",
        numbers.step_seconds,
    );
    page.counter(
        "inference_communication_seconds_total",
        "How much of that was communication, with the wait for the other ranks.",
        numbers.communication_seconds,
    );
    page.counter(
        "inference_rank_ends_total",
        "Processes of ranks that ended without being asked to.",
        numbers.rank_ends,
    );
    page.counter(
        "inference_recoveries_total",
        "How often the server became ready again after a fault.",
        numbers.recoveries,
    );
    page.counter(
        "inference_recovery_seconds_total",
        "How long that took, all together.",
        numbers.recovery_seconds,
    );
    page.gauge(
        "inference_last_recovery_seconds",
        "How long it took the last time.",
        numbers.last_recovery_seconds,
    );
    page.counter(
        "inference_strangers_total",
        "Connections of other users to the ranks' socket, which were closed.",
        strangers(),
    );
    if let Some((generation, ..)) = view.serving {
        page.gauge(
            "inference_generation",
            "The generation that serves.",
            generation,
        );
    }
    let copies = view.members.iter().filter_map(|member| member.copies);
    if let Some(copies) = copies.map(|copies| copies.now).min() {
        page.gauge(
            "inference_expert_copies",
            "How many copies of each expert there are, at least.",
            copies,
        );
    }
    page.counter(
        "inference_expert_rounds_total",
        "In how many rounds experts moved to other ranks.",
        numbers.expert_rounds,
    );
    page.counter(
        "inference_expert_balances_total",
        "How often the places of experts were balanced, or found to be balanced.",
        numbers.balances,
    );
    if let Some((done, rounds)) = view.moving {
        page.gauge(
            "inference_expert_rounds_left",
            "In how many more rounds experts move to other ranks.",
            rounds - done,
        );
    }
    if let Some(imbalance) = view.imbalance {
        page.gauge(
            "inference_expert_imbalance",
            "What the busiest rank has to do, over the mean of all ranks, when the experts were placed by that.",
            imbalance,
        );
    }
    let name = "inference_ranks";
    page.metric(name, "gauge", "Ranks by state.");
    let mut counts = [
        ("serving", 0),
        ("spare", 0),
        ("coming", 0),
        ("frozen", 0),
        ("gone", 0),
    ];
    for member in &view.members {
        let state = member.state(member.pid.and_then(process_state));
        for (name, count) in &mut counts {
            *count += u64::from(*name == state);
        }
    }
    for (state, count) in counts {
        page.value(name, &format!("{{state=\"{state}\"}}"), count);
    }
    page.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_metric_is_explained_once_and_has_values_that_are_numbers() {
        let mut view = View::new(3);
        view.numbers.requests.insert("done", 3);
        view.numbers.step_seconds = 0.25;
        view.members[1].pid = Some(std::process::id());
        let text = text(&view, 8);
        let mut known = Vec::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let name = rest.split(' ').next().unwrap().to_owned();
                assert!(!known.contains(&name), "{name} twice");
                known.push(name);
            } else if !line.starts_with("# TYPE ") {
                let (name, value) = line.rsplit_once(' ').unwrap();
                let name = name.split('{').next().unwrap();
                assert_eq!(known.last().map(String::as_str), Some(name));
                value.parse::<f64>().unwrap();
            }
        }
        for line in [
            "inference_requests_total{outcome=\"done\"} 3",
            "inference_step_seconds_total 0.25",
            "inference_ready 0",
            "inference_ranks{state=\"gone\"} 2",
            "inference_ranks{state=\"coming\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }
}
