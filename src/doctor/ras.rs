//! Queries NCCL's RAS service; NVIDIA's wheels include no client for it.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::slice;

use nccl::preflight::Finding;
use nccl::ras::{RasAnswer, RasClient, RasCommunicator, RasReport};
use serde_json::json;

use super::job::observe;
use super::options::{Job, RasOptions, RasQuestion, RasService};
use super::{Form, clean, could_not, print, show};

pub(super) fn run(options: &RasOptions) -> ExitCode {
    let asked = match &options.of {
        RasService::Address(address) => {
            connect(slice::from_ref(address), options).map_err(|why| format!("{why}; {ADVICE}"))
        }
        RasService::Job(job) => addresses(job, options).and_then(|of| connect(&of, options)),
    };
    let asked = asked.and_then(|client| ask(client, options).map_err(|error| error.to_string()));
    asked.unwrap_or_else(|why| could_not(&why))
}

/// Connects to the first service that answers: that of a stopped rank does not.
fn connect(addresses: &[String], options: &RasOptions) -> Result<RasClient, String> {
    let share = options.timeout / u32::try_from(addresses.len()).unwrap_or(1).max(1);
    let mut why = Vec::new();
    for address in addresses {
        match RasClient::connect(address, share) {
            Ok(client) => return Ok(client),
            Err(error) => why.push(error.to_string()),
        }
    }
    Err(why.join("; "))
}

/// Returns the addresses of the RAS services of a job's ranks.
fn addresses(job: &Job, options: &RasOptions) -> Result<Vec<String>, String> {
    let timeline = observe(job, options.timeout)?.recordings(options.timeout);
    let ranks = timeline.ranks.into_iter();
    let addresses: Vec<_> = ranks.filter_map(|one| one.snapshot.ras_address).collect();
    match addresses.is_empty() {
        true => Err(String::from(
            "no rank of the job says where its RAS service listens: NCCL 2.28.7 is needed for that, and a communicator; for older \
             releases, use --address",
        )),
        false => Ok(addresses),
    }
}

fn ask(client: RasClient, options: &RasOptions) -> nccl::Result<ExitCode> {
    Ok(match &options.question {
        RasQuestion::Findings => match client.status()? {
            RasAnswer::Report(report) => findings(&report, options.form),
            RasAnswer::Text(text) => print(&clean(&text)),
        },
        RasQuestion::Text { verbose } => print(&clean(&client.text(*verbose)?)),
        RasQuestion::Monitor(events) => {
            for line in client.monitor(events)? {
                let Ok(line) = line else { break };
                if print(&format!("{}\n", clean(&line))) != ExitCode::SUCCESS {
                    break;
                }
            }
            ExitCode::SUCCESS
        }
    })
}

const ADVICE: &str = "ranks of this crate have addresses of their own, which --pid finds; NCCL_RAS_ADDR of another process says where its \
                      RAS service listens (localhost:28028 unless set), from NCCL 2.24 on";

fn findings(report: &RasReport, form: Form) -> ExitCode {
    let mut head = format!(
        "nccl-doctor: NCCL {}, {} communicators, collected in {:.1} s\n",
        report.nccl_version,
        report.communicators.len(),
        report.collection_seconds()
    );
    for one in &report.communicators {
        let _ = writeln!(
            head,
            "  {}: {} ranks, {} answered{}",
            one.hash,
            one.size,
            one.ranks.len(),
            counts(one)
        );
    }
    let mut entries = Vec::new();
    for one in &report.communicators {
        about(one, &mut entries);
    }
    for rank in report.lagging() {
        entries.push(
            Finding::warning(
                "ras-lagging",
                format!(
                    "rank {} (pid {}) of communicator {} has launched {} of {} {}",
                    rank.rank, rank.pid, rank.communicator, rank.launched, rank.most, rank.function
                ),
            )
            .fix(format!("see what process {} does instead", rank.pid)),
        );
    }
    show(form, &clean(&head), || json!({ "ras": report }), &entries)
}

/// Returns the number of launched collectives.
fn counts(communicator: &RasCommunicator) -> String {
    let mut text = String::new();
    let Some(first) = communicator.ranks.first() else {
        return text;
    };
    for function in first.collective_counts.keys() {
        let launched = communicator.ranks.iter();
        let launched = launched.filter_map(|rank| rank.collective_counts.get(function));
        if let Some(most) = launched.max().filter(|most| **most > 0) {
            let _ = write!(text, ", {most} {function}");
        }
    }
    text
}

fn about(communicator: &RasCommunicator, entries: &mut Vec<Finding>) {
    let hash = &communicator.hash;
    for missing in &communicator.missing_ranks {
        let how = match missing.status.considered_dead {
            true => "is given up by NCCL: its process does not answer any more",
            false if missing.status.unresponsive => "does not answer",
            false => "has not answered, or has no communicator yet",
        };
        let who = format!(
            "rank {} ({}, pid {}) of communicator {hash} {how}",
            missing.rank, missing.host, missing.pid
        );
        let fix = format!("look at process {} on {}", missing.pid, missing.host);
        entries.push(Finding::error("ras-missing", who).fix(fix));
    }
    for rank in &communicator.ranks {
        let who = || {
            format!(
                "rank {} ({}, pid {}) of communicator {hash}",
                rank.rank, rank.host, rank.pid
            )
        };
        // 7 is ncclInProgress.
        if ![0, 7].contains(&rank.status.async_error) {
            let code = nccl_sys::ncclResult_t(rank.status.async_error.unsigned_abs());
            entries.push(Finding::error(
                "ras-error",
                format!("{} has failed: {code:?}", who()),
            ));
        }
        if rank.status.abort_flag {
            entries.push(Finding::warning(
                "ras-aborted",
                format!("{} is being aborted", who()),
            ));
        }
    }
}
