//! Reads NCCL's debug logs: a table of processes, and findings.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use nccl::debug_log::{DebugLog, Ended, Endpoint, Membership, PluginState, Process, Transport};
use nccl::preflight::Finding;
use serde_json::{Value, json};

use super::options::LogOptions;
use super::{COULD_NOT_CHECK, could_not, show};
use crate::report::steers;

/// Most lines about processes before the findings.
const MOST_LINES: usize = 16;

pub(super) fn run(options: &LogOptions) -> ExitCode {
    let mut log = DebugLog::new();
    let mut unread = Vec::new();
    let mut files = Vec::new();
    for path in &options.files {
        match inside(path) {
            Ok(found) => files.extend(found),
            Err(error) => unread.push(format!("{}: {error}", path.display())),
        }
    }
    let unopened = unread.len();
    for path in &files {
        if let Err(error) = read(&mut log, path) {
            unread.push(format!("{}: {error}", path.display()));
        }
    }
    if unread.len() - unopened == files.len() {
        return could_not(&unread.join("; "));
    }
    let report = log.report();
    let mut entries: Vec<Finding> = report.findings.to_vec();
    entries.extend(
        unread
            .into_iter()
            .map(|why| Finding::warning("log-file", why)),
    );
    entries.sort_by_key(|entry| std::cmp::Reverse(entry.severity));
    let code = show(options.form, &table(&log), || facts(&log), &entries);
    // Without lines of NCCL, nothing was checked.
    match log.counts().nccl {
        0 => ExitCode::from(COULD_NOT_CHECK),
        _ => code,
    }
}

/// The files of a directory, in the order of their names; of a file, the file itself.
fn inside(path: &Path) -> io::Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let entries: io::Result<Vec<_>> = std::fs::read_dir(path)?.collect();
    let mut files: Vec<_> = entries?.into_iter().map(|entry| entry.path()).collect();
    files.retain(|path| path.is_file());
    files.sort();
    if files.is_empty() {
        return Err(io::Error::new(
            io::ErrorKind::NotFound,
            "there is no file in it",
        ));
    }
    Ok(files)
}

/// `-` is standard input.
fn read(log: &mut DebugLog, path: &Path) -> io::Result<()> {
    if path == Path::new("-") {
        return log.read("standard input", io::stdin().lock());
    }
    let mut file = BufReader::with_capacity(1 << 16, File::open(path)?);
    if file.fill_buf()?.starts_with(&[0x1f, 0x8b]) {
        let text = "it is compressed: gunzip -c FILE | nccl-doctor log -";
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    log.read(&path.display().to_string(), file)
}

/// One line for each process.
fn table(log: &DebugLog) -> String {
    let mut text = String::new();
    let counts = log.counts();
    let processes = log.processes();
    let _ = writeln!(
        text,
        "nccl-doctor: {} lines of NCCL's in {}, of {} processes",
        counts.nccl,
        counts.lines,
        processes.len()
    );
    if counts.left_out > 0 {
        let _ = writeln!(
            text,
            "  {} lines were left out: too many processes",
            counts.left_out
        );
    }
    let mut sorted: Vec<&Process> = processes.iter().collect();
    sorted.sort_by_key(|process| (process.rank().is_none(), process.rank()));
    for process in sorted.iter().take(MOST_LINES) {
        let _ = writeln!(text, "  {}", clean(&line(process)));
    }
    if sorted.len() > MOST_LINES {
        let _ = writeln!(
            text,
            "  … and {} more; --json has them all",
            sorted.len() - MOST_LINES
        );
    }
    text
}

/// Replaces characters that control a terminal: logs may hold anything.
fn clean(text: &str) -> String {
    text.chars()
        .map(|c| if steers(c) { ' ' } else { c })
        .collect()
}

fn line(process: &Process) -> String {
    let ranks = process.ranks();
    let mut parts = Vec::new();
    parts.push(match (&ranks[..], process.tag) {
        ([], None) => "rank ?".to_owned(),
        ([], Some(tag)) => format!("rank {tag}"),
        ([rank], _) => format!("rank {rank}"),
        ([first, .., last], _) => format!("ranks {first} to {last}"),
    });
    if !process.host.is_empty() {
        parts.push(format!("{} pid {}", process.host, process.pid));
    }
    if let Some(version) = process.version {
        parts.push(format!("NCCL {version}"));
    }
    if let Some(endpoint) = &process.bootstrap {
        parts.push(written(endpoint));
    }
    if let Some(one) = process.working().next() {
        if let Some(network) = &one.network {
            let adapters = match process.adapters.is_empty() {
                true => String::new(),
                false => format!(" ({})", process.adapters.join(" ")),
            };
            parts.push(format!("network {network}{adapters}"));
        }
        parts.push(match (one.came_up(), one.ended) {
            (_, Some(Ended::Aborted)) => "aborted".to_owned(),
            (_, Some(Ended::Destroyed)) => "ended in order".to_owned(),
            (true, _) => "came up".to_owned(),
            _ => "did not come up".to_owned(),
        });
    }
    let warnings: u64 = process.warnings.iter().map(|warning| warning.times).sum();
    match warnings + process.more_warnings {
        0 => {}
        1 => parts.push("1 warning".to_owned()),
        several => parts.push(format!("{several} warnings")),
    }
    parts.join(", ")
}

fn written(endpoint: &Endpoint) -> String {
    match endpoint.address {
        Some(address) => format!("{} {address}", endpoint.interface),
        None => endpoint.interface.clone(),
    }
}

fn facts(log: &DebugLog) -> Value {
    let counts = log.counts();
    json!({
        "kind": "log",
        "lines": counts.lines,
        "nccl_lines": counts.nccl,
        "broken_lines": counts.broken,
        "left_out": counts.left_out,
        "processes": log.processes().iter().map(process).collect::<Value>(),
    })
}

fn process(process: &Process) -> Value {
    let endpoint = |one: &Endpoint| {
        json!({
            "interface": one.interface,
            "address": one.address.map(|address| address.to_string()),
        })
    };
    json!({
        "host": process.host,
        "pid": process.pid,
        "rank": process.rank(),
        "ranks": process.ranks(),
        "nccl_version": process.version.map(|version| version.to_string()),
        "bootstrap": process.bootstrap.as_ref().map(endpoint),
        "sockets": process.sockets.iter().map(endpoint).collect::<Value>(),
        "adapters": process.adapters,
        "no_adapters": process.no_adapters,
        "plugins": process.plugins.iter().map(|plugin| json!({
            "kind": plugin.kind,
            "state": match plugin.state {
                PluginState::Missing => "missing",
                PluginState::Loaded => "loaded",
                _ => "failed",
            },
            "text": plugin.text,
        })).collect::<Value>(),
        "variables": process.variables,
        "config": process.config,
        "tuning": process.tuning,
        "direct_rdma": process.direct_rdma,
        "no_peer_access": process.no_peer_access,
        "communicators": process.working().map(member).collect::<Value>(),
        "retries": process.retries.iter().map(|retry| json!({
            "address": retry.address.map(|address| address.to_string()),
            "reason": retry.reason,
            "times": retry.times,
        })).collect::<Value>(),
        "warnings": process.warnings.iter().map(|warning| json!({
            "class": warning.class.to_string(),
            "text": warning.text,
            "place": warning.place,
            "time": warning.time,
            "log": warning.at.0,
            "line": warning.at.1,
            "rank": warning.rank,
            "times": warning.times,
        })).collect::<Value>(),
        "more_warnings": process.more_warnings,
    })
}

fn member(one: &Membership) -> Value {
    json!({
        "comm": one.comm,
        "id": one.id,
        "parent": one.parent,
        "rank": one.rank,
        "ranks": one.ranks,
        "device": one.device,
        "state": match one.came_up() {
            true => "completed",
            false => "started",
        },
        "ended": one.ended.map(|ended| match ended {
            Ended::Finalized => "finalized",
            Ended::Destroyed => "destroyed",
            Ended::Aborted => "aborted",
            _ => "revoked",
        }),
        "init_seconds": one.init_seconds.as_ref().map(|(seconds, _, _)| seconds),
        "network": one.network,
        "hosts": one.layout.map(|(hosts, _)| hosts),
        "local_ranks": one.layout.map(|(_, ranks)| ranks),
        "ring": one.ring,
        "more_links": one.more_links,
        "links": one.links.iter().map(|(link, channels)| {
            let (transport, gdr) = match &link.via {
                Transport::P2p(kind) => (format!("P2P/{kind}"), None),
                Transport::Shm => ("SHM".to_owned(), None),
                Transport::Net { net, adapter, gdr } => (format!("NET/{net}/{adapter}"), Some(gdr)),
                other => (format!("{other:?}"), None),
            };
            json!({
                "from": link.from,
                "to": link.to,
                "via": transport,
                "direct_rdma": gdr,
                "channels": channels,
            })
        }).collect::<Value>(),
    })
}
