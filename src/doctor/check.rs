//! Checks one host, or all ranks of a launcher.

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::CudaStream;
use nccl::preflight::{Finding, Severity, host};
use nccl::{ReduceOp, Rendezvous, World};
use serde_json::{Value, json};

use super::host::{findings as host_findings, of_stuck_call};
use super::local::{Local, device};
use super::options::CheckOptions;
use super::{code, complain, could_not, show};
use crate::report;
use crate::spawn::Launcher;

pub(super) fn run(options: &CheckOptions) -> ExitCode {
    if options.emulator
        && let Err(error) = nccl_emulator::install()
    {
        return could_not(&format!("the emulator cannot be put in place: {error}"));
    }
    let lookup = |name: &str| {
        let given = options.explicit.iter().find(|(given, _)| *given == name);
        let given = given.map(|(_, value)| OsString::from(value));
        // An empty secret is an error for ranks, and here.
        let secret = matches!(name, "NCCL_RUN_SECRET" | "NCCL_RUN_SECRET_FILE");
        given.or_else(|| std::env::var_os(name).filter(|value| secret || !value.is_empty()))
    };
    let launcher = Launcher::detect(|name| lookup(name)?.into_string().ok());
    if launcher.is_none() {
        return one_host(options);
    }
    if options.ranks.is_some() {
        return could_not("--ranks is for a host alone; a launcher says itself how many there are");
    }
    match Rendezvous::from_variables(lookup) {
        Ok(rendezvous) => all_ranks(
            options,
            rendezvous.with(|meet| meet.timeout = options.timeout),
        ),
        Err(error) => could_not(&error.to_string()),
    }
}

/// The first lines of a report.
fn head(options: &CheckOptions, what: &str) -> String {
    let emulated = match options.emulator {
        true => " on the emulator of NCCL and CUDA: nothing is said about its GPUs and libnccl",
        false => "",
    };
    format!("nccl-doctor: {what}{emulated}\n")
}

fn one_host(options: &CheckOptions) -> ExitCode {
    let ranks = options.ranks.unwrap_or(1);
    let local = Local::look(ranks - 1, false);
    let report = host(&local.settings().with(|settings| {
        settings.local_ranks = ranks;
        settings.world_size = ranks;
    }));
    let mut entries = local.entries;
    entries.extend(host_findings());
    entries.extend_from_slice(&report.findings);
    let what = match ranks {
        1 => host_name(),
        _ => format!("{}, for {ranks} ranks", host_name()),
    };
    if options.communicate {
        match not_tried(&entries) {
            Some(why) => entries.push(why),
            None => entries.extend(among_threads(ranks, options.timeout)),
        }
    }
    sort(&mut entries);
    let facts =
        json!({"kind": "host", "host": host_name(), "emulator": options.emulator, "ranks": ranks});
    show(options.form, &head(options, &what), || facts, &entries)
}

/// Sorts the worst first; keeps the order otherwise.
fn sort(entries: &mut [Finding]) {
    entries.sort_by_key(|entry| std::cmp::Reverse(entry.severity));
}

fn all_ranks(options: &CheckOptions, rendezvous: Rendezvous) -> ExitCode {
    let (rank, ranks) = (rendezvous.rank(), rendezvous.world_size());
    let world = match World::join(rendezvous) {
        Ok(world) => world,
        Err(error) => return alone(options, rank, ranks, &error),
    };
    let outcome = together(options, &world);
    let (facts, entries) = match outcome {
        Ok(outcome) => outcome,
        Err(error) => return alone(options, rank, ranks, &error),
    };
    // The standard output of the other ranks would only repeat it.
    if rank > 0 {
        return ExitCode::from(code(report::worst(&entries)));
    }
    let what = format!("{ranks} ranks, seen from rank 0 on {}", host_name());
    show(options.form, &head(options, &what), || facts, &entries)
}

/// Reports what one rank can check when the ranks did not join a world.
fn alone(options: &CheckOptions, rank: usize, ranks: usize, error: &nccl::Error) -> ExitCode {
    let local = Local::look(0, true);
    let report = host(&local.settings());
    let mut entries = local.entries;
    entries.extend(host_findings());
    entries.extend_from_slice(&report.findings);
    let fix = "start the same command on every rank at about the same time; NCCL_RUN_RENDEZVOUS=tcp:HOST:PORT says \
               where they meet, and --timeout how long they wait";
    entries.insert(0, Finding::error("world", error.to_string()).fix(fix));
    sort(&mut entries);
    if rank > 0 {
        complain(&format!("rank {rank} of {ranks}: {error}"));
        return ExitCode::from(code(Severity::Error));
    }
    let facts = json!({"kind": "world", "emulator": options.emulator, "ranks": ranks});
    show(
        options.form,
        &head(options, &format!("rank 0 of {ranks}, alone")),
        || facts,
        &entries,
    )
}

/// The findings of all ranks; the same on all of them.
fn together(options: &CheckOptions, world: &World) -> nccl::Result<(Value, Vec<Finding>)> {
    world.phase("looks for libnccl, the driver and a device");
    let mut local = Local::look(world.local_rank(), true);
    // One rank of a host looks for all of them.
    if world.local_rank() == 0 {
        local.entries.extend(host_findings());
    }
    world.phase("compares what has to agree");
    let report = world.preflight(&local.settings())?;
    let mut entries = gathered(world, "local", &local.entries)?;
    entries.extend_from_slice(&report.findings);
    if options.communicate {
        let own = match (not_tried(&entries), &local.stream) {
            (Some(why), _) => why,
            (None, Some(stream)) => communicate(world, stream, options.timeout),
            (None, None) => {
                Finding::warning("communicate", "there is no device to communicate with")
            }
        };
        entries.extend(gathered(world, "communicate", &[own])?);
    }
    sort(&mut entries);
    let facts = json!({
        "kind": "world",
        "emulator": options.emulator,
        "ranks": world.size(),
    });
    // A rank that leaves early would look like a dead one.
    world.barrier("nccl-doctor/end")?;
    Ok((facts, entries))
}

/// The entries of all ranks; equal entries are merged.
fn gathered(world: &World, topic: &str, own: &[Finding]) -> nccl::Result<Vec<Finding>> {
    let own = json!({
        "host": host_name(),
        "entries": own.iter().map(report::json).collect::<Value>(),
    });
    let parts = world.all_gather(&format!("nccl-doctor/{topic}"), own.to_string().as_bytes())?;
    let parts = parts.iter().enumerate().filter_map(|(rank, part)| {
        // It may be of another version of this program; preflight reports that.
        let part = serde_json::from_slice::<Value>(part).ok()?;
        let host = part["host"].as_str().unwrap_or_default().to_owned();
        let entries = part["entries"].as_array().into_iter().flatten();
        Some((rank, host, entries.filter_map(report::from_json).collect()))
    });
    Ok(merged(world.size(), parts))
}

/// The entries of ranks of these hosts, equal entries merged.
fn merged(
    ranks: usize,
    parts: impl IntoIterator<Item = (usize, String, Vec<Finding>)>,
) -> Vec<Finding> {
    let mut all: Vec<Finding> = Vec::new();
    for (rank, host, entries) in parts {
        for mut entry in entries {
            let same = |other: &&mut Finding| {
                (other.severity, &other.check, &other.what)
                    == (entry.severity, &entry.check, &entry.what)
            };
            if let Some(known) = all.iter_mut().find(same) {
                known.ranks.push(rank);
                known.hosts.push(host.clone());
                continue;
            }
            entry.ranks = vec![rank];
            entry.hosts = vec![host.clone()];
            all.push(entry);
        }
    }
    for entry in &mut all {
        entry.ranks.sort_unstable();
        entry.hosts.sort();
        entry.hosts.dedup();
        let who = who(&entry.ranks, ranks, &entry.hosts);
        entry.what = format!("{who}: {}", entry.what);
    }
    all
}

/// `all ranks`, `rank 3 on node-b`
fn who(ranks: &[usize], of: usize, hosts: &[String]) -> String {
    if ranks.len() == of {
        return "all ranks".to_owned();
    }
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    let numbers: Vec<_> = ranks.iter().take(16).map(ToString::to_string).collect();
    let more = if ranks.len() > 16 { ", …" } else { "" };
    let hosts: Vec<_> = hosts.iter().take(4).map(String::as_str).collect();
    format!(
        "{word} {}{more} on {}",
        numbers.join(", "),
        hosts.join(", ")
    )
}

fn host_name() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}

/// After an error, the consequences are not worth a check.
fn not_tried(entries: &[Finding]) -> Option<Finding> {
    let bad = |entry: &Finding| entry.severity == Severity::Error;
    entries.iter().any(bad).then(because_of_errors)
}

fn because_of_errors() -> Finding {
    Finding::warning("communicate", "not tried, because of the errors")
}

/// The findings of `ranks` ranks of this host, each of them a thread with a device of its own.
fn among_threads(ranks: usize, timeout: Duration) -> Vec<Finding> {
    let devices: Result<Vec<_>, _> = (0..ranks).map(|rank| device(rank, false)).collect();
    let devices = match devices {
        Ok(devices) => devices.into_iter().map(|(stream, _)| stream),
        Err(entry) => return vec![*entry, because_of_errors()],
    };
    let (to, said) = mpsc::channel();
    // No thread is joined at the end: it may be inside a driver call that never returns.
    for (world, stream) in World::threads(ranks).into_iter().zip(devices) {
        let to = to.clone();
        thread::spawn(move || {
            let own = communicate(&world, &stream, timeout);
            // The world is sent along: other ranks may still need its connections.
            let _ = to.send((world, own));
        });
    }
    drop(to);
    let (mut worlds, mut parts) = (Vec::new(), Vec::new());
    // For the communicator, the operation and the end; their set-up comes on top.
    let until = Instant::now() + timeout.saturating_mul(3) + Duration::from_secs(5);
    while let Ok((world, own)) = said.recv_timeout(until.saturating_duration_since(Instant::now()))
    {
        parts.push((world.rank(), own));
        worlds.push(world);
    }
    for rank in 0..ranks {
        if !parts.iter().any(|(said, _)| *said == rank) {
            let (seen, fix) = of_stuck_call();
            let what = format!(
                "the thread of the rank has not returned from NCCL or the driver, or has panicked{seen}"
            );
            parts.push((rank, Finding::error("communicate", what).fix(fix)));
        }
    }
    if let ([(_, only)], 1) = (&parts[..], ranks) {
        return vec![only.clone()];
    }
    let host = host_name();
    let parts = parts
        .into_iter()
        .map(|(rank, own)| (rank, host.clone(), vec![own]));
    merged(ranks, parts)
}

/// Elements of the all-reduce.
const ELEMENTS: usize = 1 << 18;

/// A communicator of all ranks, and an all-reduce whose result is known.
fn communicate(world: &World, stream: &Arc<CudaStream>, timeout: Duration) -> Finding {
    let started = Instant::now();
    let fix = "run it again with NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/nccl.%h.%p, and then: nccl-doctor log \
               /tmp/nccl.*";
    match all_reduce(world, stream, timeout) {
        Ok(0) => {
            let what =
                format!("a communicator came up, and an all-reduce of {ELEMENTS} floats is right");
            in_time(started, what)
        }
        Ok(wrong) => {
            let what = format!("{wrong} of {ELEMENTS} floats of an all-reduce are wrong");
            Finding::error("communicate", what).fix(fix)
        }
        Err(error) => Finding::error("communicate", error.to_string()).fix(fix),
    }
}

/// Leaves out the time unless it is long: times differ among ranks, and would keep equal entries from being merged.
fn in_time(started: Instant, what: String) -> Finding {
    match started.elapsed().as_secs() {
        0..10 => Finding::ok("communicate", what),
        seconds => Finding::warning("communicate", format!("{what}, but only after {seconds} s"))
            .fix("NCCL_DEBUG=INFO tells where the time goes (Init timings)"),
    }
}

/// Returns the number of wrong elements.
fn all_reduce(
    world: &World,
    stream: &Arc<CudaStream>,
    timeout: Duration,
) -> Result<usize, Box<dyn std::error::Error>> {
    let communicator = world
        .communicator("nccl-doctor")
        .stream(stream)
        .with(|comm| {
            comm.timeouts.operation = timeout;
            comm.timeouts.init = timeout;
            comm.timeouts.finalize = timeout;
        })
        .build()?;
    let own = vec![world.rank() as f32 + 1.0; ELEMENTS];
    let own = stream.clone_htod(&own)?;
    let mut sum = stream.alloc_zeros::<f32>(ELEMENTS)?;
    communicator
        .all_reduce(&own, &mut sum, ReduceOp::Sum)?
        .wait()?;
    let expected = (world.size() * (world.size() + 1) / 2) as f32;
    let sum = stream.clone_dtoh(&sum)?;
    communicator.finalize()?;
    Ok(sum.iter().filter(|&&element| element != expected).count())
}
