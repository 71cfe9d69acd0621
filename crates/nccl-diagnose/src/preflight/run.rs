//! Runs the checks: of one host, and of a world.
//!
//! ```text
//!  every rank            rank 0
//!  facts   ──set──▶      compares them
//!          ◀─plan──      nothing more to do, or who tries to reach whom
//!  listeners   ──all──▶      (one rank of each network, which all others of them go to)
//!  failures ─set──▶      finds out who is to blame
//!          ◀report─      the same on all ranks
//! ```
//!
//! Facts go to rank 0 only: an exchange among all would be too much for a thousand ranks.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::bounds::Bounded;
use super::check_input::CheckInput;
use super::facts::{ControlConnection, Facts, PROTOCOL, ProcessFacts};
use super::reachability::{self, Failure, OpenListener, ProbeListener};
use super::rules::{FactsView, check, check_reachability, networks};
use crate::error::{Error, Result};
use crate::sync::Mutex;
use nccl_base::report::{Finding, Report};
use nccl_base::system::System;
use nccl_base::system::env_drift;
use nccl_base::wire;
use nccl_control::{World, own_addresses};
use serde::{Deserialize, Serialize};

/// Checks this host alone, before there is a world.
#[must_use]
pub fn host(input: &CheckInput) -> Report {
    let facts = [Facts {
        process: Some(own_process().with(input)),
        ..Facts::of_rank(input)
    }];
    let view = FactsView::alone(&facts, input.local_ranks, input.world_size);
    Report::new(check(&view))
}

/// The answer of rank 0 after comparing the facts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct ProbePlan {
    /// The result, when there is nothing more to find out.
    report: Option<Report>,
    /// The ranks that connect to each other.
    probers: Vec<usize>,
}

/// Gathers the facts of this process.
fn own_process() -> ProcessFacts {
    let process = ProcessFacts::gather(
        &System::real(),
        &own_addresses().unwrap_or_default(),
        &ControlConnection::default(),
    );
    ProcessFacts {
        late: env_drift::gather(&process.variables),
        ..process
    }
}

/// The facts of a process, which are kept for 100 ms, so that its ranks share them.
fn process(control: &ControlConnection) -> ProcessFacts {
    type Kept = Option<(Instant, Arc<ProcessFacts>)>;
    static KEPT: Mutex<Kept> = Mutex::new(None);
    const FRESH: Duration = Duration::from_millis(100);

    let mut kept = KEPT.lock();
    let shared = match &*kept {
        Some((at, process)) if at.elapsed() < FRESH => Arc::clone(process),
        _ => {
            let process = Arc::new(own_process());
            *kept = Some((Instant::now(), Arc::clone(&process)));
            process
        }
    };
    drop(kept);
    let mut own = ProcessFacts::clone(&shared);
    own.control = control.address;
    own.interface.clone_from(&control.interface);
    own
}

/// One check of a world, on one rank.
struct WorldCheck<'w> {
    world: &'w World,
    deadline: Instant,
    interrupted: &'w dyn Fn() -> bool,
    /// The rounds that this rank has not entered.
    left: RefCell<Vec<&'static str>>,
}

/// All possible rounds, in order.
const ROUNDS: [&str; 5] = ["facts", "plan", "listeners", "failures", "report"];

/// Checks a world; all ranks get the same report. `input` is `None` on a rank that requests no checks; then no rank is
/// checked.
///
/// # Errors
/// When a rank does not take part.
pub fn world(
    world: &World,
    input: Option<&CheckInput>,
    deadline: Instant,
    interrupted: &dyn Fn() -> bool,
) -> Result<Report> {
    let span = tracing::info_span!(
        target: "nccl",
        "nccl.preflight",
        rank = world.rank(),
        nranks = world.size()
    );
    let _entered = span.enter();
    let check = WorldCheck {
        world,
        deadline,
        interrupted,
        left: RefCell::new(ROUNDS.to_vec()),
    };
    let facts = match input {
        None => Facts::off(PROTOCOL, &crate::host::name()),
        Some(input) => {
            let mut facts = Facts::of_rank(input);
            // The threads of one process share it.
            if world.rank() == 0 || !is_threads(world) {
                facts.process = Some(process(&control(world)).with(input));
            }
            facts
        }
    };
    let report = check.run(facts);
    if report.is_err() {
        check.give_up();
    }
    report
}

/// Whether the ranks are threads of this process.
fn is_threads(world: &World) -> bool {
    world.session().address_of(0).is_none()
}

/// This rank's address, and the interface that the program named.
fn control(world: &World) -> ControlConnection {
    let at = world.session().address_of(world.rank());
    let at: Option<std::net::SocketAddr> = at.and_then(|at| at.strip_prefix("tcp:")?.parse().ok());
    ControlConnection {
        address: at.map(|at| at.ip()),
        interface: world.interface().map(str::to_owned),
    }
}

impl WorldCheck<'_> {
    fn run(&self, own: Facts) -> Result<Report> {
        let own = own.bounded();
        let all = self.gather_at_rank_0("facts", &own)?;
        let all: Option<Vec<Facts>> = all.map(|all| all.into_iter().map(decode_facts).collect());
        let plan =
            self.broadcast_from_rank_0("plan", || plan(all.as_deref().unwrap_or_default()))?;
        if let Some(report) = plan.report {
            return Ok(report);
        }
        let visits = plan.probers.contains(&self.world.rank());
        let open = own.process.as_ref().filter(|_| visits);
        let open = open.map(|process| OpenListener::new(self.world.rank(), process));
        let part = open.as_ref().map(|open| wire::encode(&open.listener));
        let parts = self.round("listeners", &part.unwrap_or_default())?;
        let listener = |(rank, part): (usize, &Vec<u8>)| {
            let listener = wire::decode::<ProbeListener>(part).ok()?;
            Some(ProbeListener { rank, ..listener })
        };
        let listeners: Vec<ProbeListener> = parts.iter().enumerate().filter_map(listener).collect();
        let failures = match &open {
            Some(open) if open.listener.failed.is_empty() => {
                let until = self
                    .deadline
                    .min(Instant::now() + reachability::PROBE_TIMEOUT);
                reachability::probe(self.world.rank(), &listeners, until)
            }
            _ => Vec::new(),
        };
        let failures = self.gather_at_rank_0("failures", &failures)?;
        // All probes have ended.
        drop(open);
        self.broadcast_from_rank_0("report", || {
            let failures: Vec<Failure> = failures
                .into_iter()
                .flatten()
                .filter_map(|bytes| wire::decode::<Vec<Failure>>(&bytes).ok())
                .flatten()
                .collect();
            let all = all.as_deref().unwrap_or_default();
            check_reachability(&FactsView::of(all), &listeners, &failures).bounded()
        })
    }

    /// Ends the remaining rounds for this rank: others may have completed the round in which it failed, and wait in the
    /// next.
    fn give_up(&self) {
        let now: &dyn Fn() -> bool = &|| true;
        for what in self.left.take() {
            let topic = format!("preflight/{what}");
            let _ = self.world.exchange_all(&topic, &[], self.deadline, now);
        }
    }

    fn round(&self, what: &str, part: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.left.borrow_mut().retain(|left| *left != what);
        let topic = format!("preflight/{what}");
        self.world
            .exchange_all(&topic, part, self.deadline, self.interrupted)
    }

    /// Sends a value to rank 0, which gets the values of all ranks.
    fn gather_at_rank_0<T: Serialize>(
        &self,
        what: &str,
        value: &T,
    ) -> Result<Option<Vec<Vec<u8>>>> {
        let key = |rank: usize| format!("nccl/preflight/{what}/{rank}");
        self.world
            .set(&key(self.world.rank()), &wire::encode(value))?;
        self.round(what, &[])?;
        if self.world.rank() > 0 {
            return Ok(None);
        }
        let take = |rank| {
            let bytes = self.world.get(&key(rank))?;
            // Frees the memory of the value.
            self.world.set(&key(rank), &[])?;
            Ok(bytes)
        };
        (0..self.world.size())
            .map(take)
            .collect::<Result<_>>()
            .map(Some)
    }

    /// Returns the value that `make` returns on rank 0.
    fn broadcast_from_rank_0<T: for<'b> Deserialize<'b> + Serialize>(
        &self,
        what: &str,
        make: impl FnOnce() -> T,
    ) -> Result<T> {
        let part = match self.world.rank() {
            0 => wire::encode(&make()),
            _ => Vec::new(),
        };
        let parts = self.round(what, &part)?;
        let bytes = parts.first().map_or(&[][..], |part| part);
        wire::decode(bytes).map_err(|broken| {
            Error::rendezvous(format!(
                "{} checked the ranks, and its answer cannot be read ({}): it has another version of the nccl \
                 crate",
                self.world.session().describe(0),
                broken.0
            ))
        })
    }
}

/// Decodes the facts of a rank. If that fails, returns facts that show only that the rank uses another protocol.
fn decode_facts(bytes: Vec<u8>) -> Facts {
    wire::decode(&bytes).map_or_else(|_| Facts::off(0, "unknown host"), Facts::bounded)
}

fn plan(facts: &[Facts]) -> ProbePlan {
    let done = |findings| ProbePlan {
        report: Some(Report::new(findings).bounded()),
        probers: Vec::new(),
    };
    let view = FactsView::of(facts);
    let foreign: Vec<usize> = view
        .ranks()
        .filter(|&rank| facts[rank].protocol != PROTOCOL)
        .collect();
    if !foreign.is_empty() {
        let what = format!(
            "{} cannot be understood by rank 0: they have another version of the nccl crate",
            view.who(&foreign)
        );
        let finding =
            Finding::error("crate-version", what).fix("build all ranks from the same sources");
        return done(vec![view.about(&foreign, finding)]);
    }
    let off: Vec<usize> = view.ranks().filter(|&rank| facts[rank].off).collect();
    if off.len() == facts.len() {
        return done(Vec::new());
    }
    if !off.is_empty() {
        let what = format!("{} wants no checks, so that none are made", view.who(&off));
        let finding = Finding::warning("preflight", what)
            .fix("set NCCL_RUN_PREFLIGHT to the same on every rank");
        return done(vec![view.about(&off, finding)]);
    }
    if networks(&view) < 2 {
        return done(check(&view));
    }
    let groups = view.groups(|rank| view.network(rank));
    let mut probers: Vec<usize> = groups.into_iter().map(|(_, ranks)| ranks[0]).collect();
    probers.sort_unstable();
    ProbePlan {
        report: None,
        probers,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::tests::ranks_on;
    use nccl_base::report::Severity;

    fn only(plan: &ProbePlan) -> &Finding {
        match plan.report.as_ref().map(|report| &report.findings[..]) {
            Some([one]) => one,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_rank_of_another_version_is_named_and_nothing_else_is_judged() {
        let mut facts = ranks_on(&["h1", "h2", "h3"]);
        facts[1] = decode_facts(vec![1, 2, 3]);
        let plan = plan(&facts);
        let finding = only(&plan);
        assert_eq!(
            (finding.severity, &finding.ranks[..]),
            (Severity::Error, &[1][..])
        );
        assert_eq!(finding.check, "crate-version");
    }

    #[test]
    fn one_rank_that_wants_no_checks_is_named_and_all_of_them_are_silent() {
        let mut facts = ranks_on(&["h1", "h2"]);
        facts[1] = Facts::off(PROTOCOL, "h2");
        let some = plan(&facts);
        assert_eq!(
            (only(&some).severity, &only(&some).ranks[..]),
            (Severity::Warning, &[1][..])
        );
        facts[0] = Facts::off(PROTOCOL, "h1");
        assert_eq!(plan(&facts).report, Some(Report::default()));
    }

    #[test]
    fn the_lowest_rank_of_each_network_goes_to_the_others() {
        let mut facts = ranks_on(&["h1", "h2", "h1", "h3", "h2"]);
        let probers = plan(&facts).probers;
        assert_eq!(probers, [0, 1, 3]);
        facts.truncate(1);
        assert!(plan(&facts).report.is_some(), "there is nobody to go to");
    }
}
