//! Whatever fails, every surviving rank has the same, correct cause within a bound, and can continue: every row of the
//! table is tried with real processes, and `docs/faults.md` has exactly these rows.
//!
//! ```text
//! cargo test -p nccl-tests --test fault_matrix -- --nocapture            what was measured
//! NCCL_TEST_FAULT=killed cargo test -p nccl-tests --test fault_matrix    rows with that in their names
//! NCCL_TEST_NOT_YET=1 cargo test -p nccl-tests --test fault_matrix       also those that are known to be wrong
//! cargo xtask fault-table                                                writes the table into docs/faults.md
//! ```

mod actor;
#[path = "../support/cgroup.rs"]
mod cgroup;
mod outcomes;
#[path = "../support/programs.rs"]
mod programs;
mod row;
mod rows;
mod stage;
// Each test file uses a part of these modules.
#[path = "../support/mod.rs"]
mod support;
#[path = "../support/switch.rs"]
mod switch;

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use nccl_tools::testing::{Role, name};
use outcomes::{Outcome, Outcomes};
use row::{Ends, OnNvidias, Row};
use stage::{Stage, Unable};
use support::table::{try_all, written_or_same};

/// Rows that are tried at the same time.
const TOGETHER: usize = 3;
/// Allowance for a loaded machine on top of every bound.
const LOADED: Duration = Duration::from_secs(2);
/// A side that is cut off looks for the others for twelve seconds after it has lost them.
const ASIDE: Duration = Duration::from_secs(22);
/// How long a lost connection may take to be resumed.
const RESUMES: Duration = Duration::from_secs(2);
/// A rank that has lost the coordinator is told by the others that the coordinator is alive, and asks them again two or
/// three seconds later.
const ASKS_AGAIN: Duration = Duration::from_secs(6);
/// Until ranks have started, and until they have ended.
const PATIENCE: Duration = Duration::from_secs(25);

/// Every row, in the order of the page.
fn all() -> Vec<&'static Row> {
    let sections = rows::SECTIONS.iter();
    sections.flat_map(|section| section.rows).collect()
}

/// The measurements of a row.
struct Measured {
    /// From the fault until the last rank has its error.
    ended: Duration,
    /// Until the last rank has a right result again.
    on: Duration,
    outcome: Outcome,
    /// The sentences that the ranks got.
    sentences: BTreeSet<String>,
}

/// Tries a row; the error says what is wrong with it.
fn attempt(test: &str, row: &'static Row) -> Result<Measured, Unable> {
    let mut stage = Stage::start(test, row)?;
    let ranks = 0..row.cast.ranks();
    for rank in ranks.clone() {
        stage.says(rank, "ready", PATIENCE)?;
    }
    let begun = match row.harm {
        Some(harm) => {
            harm(&mut stage)?;
            // Commands that change a firewall or a namespace's link take seconds on a busy machine.
            Instant::now()
        }
        None => {
            let mut begun = None;
            for rank in ranks.clone().filter(|rank| !row.lost.contains(rank)) {
                let (_, at) = stage.says(rank, "harm", PATIENCE)?;
                begun = Some(begun.map_or(at, |begun: Instant| begun.min(at)));
            }
            begun.ok_or_else(|| String::from("nobody is left"))?
        }
    };
    let live: Vec<usize> = ranks
        .clone()
        .filter(|rank| !row.lost.contains(rank))
        .collect();
    let (mut ended, mut on) = (Duration::ZERO, Duration::ZERO);
    let mut cause: Option<String> = None;
    for &rank in &live {
        let word = match row.ends {
            _ if row.aside.contains(&rank) => "ended: ",
            Ends::Cause { .. } => "ended: ",
            Ends::Refused { on, .. } if on.contains(&rank) => "refused: ",
            Ends::Refused { .. } | Ends::Nothing => "unharmed",
        };
        let (said, at) = stage.says(rank, word, PATIENCE)?;
        let took = at.saturating_duration_since(begun);
        let is_aside = row.aside.contains(&rank);
        if !is_aside {
            ended = ended.max(took);
        }
        let bound = match (is_aside, row.ends) {
            (true, _) => ASIDE,
            (
                _,
                Ends::Cause {
                    root: "host_lost",
                    culprits,
                    ..
                },
            ) => {
                let coordinates = culprits.contains(&0);
                row.bound
                    + RESUMES
                    + if coordinates {
                        ASKS_AGAIN
                    } else {
                        Duration::ZERO
                    }
            }
            _ => row.bound,
        };
        if took > bound + LOADED && word != "unharmed" {
            return Err(stage
                .told(&format!("rank {rank} had to wait {took:?}"))
                .into());
        }
        if is_aside {
            if !said.contains(row.aside_says) {
                return Err(stage.told(&format!("rank {rank} is told: {said}")).into());
            }
            continue;
        }
        if word == "unharmed" {
            continue;
        }
        if let Some(wrong) = wrong(&stage, row, &said, cause.as_ref()) {
            return Err(stage.told(&format!("rank {rank}: {wrong}: {said}")).into());
        }
        cause = cause.or(Some(said));
    }
    let together: Vec<usize> = live
        .iter()
        .copied()
        .filter(|rank| !row.aside.contains(rank) && !row.leave.contains(rank))
        .collect();
    for &rank in &together {
        let (size, at) = stage.says(rank, "on: ", PATIENCE)?;
        on = on.max(at.saturating_duration_since(begun));
        if size != format!("{} ranks", together.len()) {
            return Err(stage
                .told(&format!("rank {rank} goes on with {size}"))
                .into());
        }
        let (leaks, _) = stage.says(rank, "leaks: ", PATIENCE)?;
        if !leaks.is_empty() {
            return Err(stage.told(&format!("rank {rank} holds {leaks}")).into());
        }
    }
    for &rank in &live {
        stage.ends_well(rank, PATIENCE)?;
    }
    let host = rustix::system::uname();
    let host = host.nodename().to_string_lossy();
    let mut sentences = BTreeSet::new();
    let mut fault = None;
    let mut kinds = BTreeSet::new();
    for &rank in live.iter().filter(|rank| !row.aside.contains(rank)) {
        if let Some(told) = stage.has_said(rank, "fault: ") {
            let told: serde_json::Value =
                serde_json::from_str(told).map_err(|error| format!("rank {rank}: {error:#}"))?;
            outcomes::sentences(&told, &host, &mut sentences);
            fault = Some(told);
            kinds.extend(stage.has_said(rank, "kind: ").map(str::to_owned));
        } else if let Some(told) = stage.has_said(rank, "refused: ") {
            sentences.insert(outcomes::lasting(told, &host));
        }
    }
    if kinds.len() > 1 {
        let told = format!("the ranks have errors of different kinds: {kinds:?}");
        return Err(stage.told(&told).into());
    }
    let kind = kinds.pop_first().unwrap_or_default();
    let outcome = Outcome::of(fault.as_ref(), kind, stage.ends());
    Ok(Measured {
        ended,
        on,
        outcome,
        sentences,
    })
}

/// The ranks that a root names together: of a cycle, of a host.
fn ranks_at_fault(told: &str) -> Option<Vec<usize>> {
    let (_, root) = told.split_once("): ")?;
    let mut values = serde_json::Deserializer::from_str(root).into_iter();
    let root: serde_json::Value = values.next()?.ok()?;
    serde_json::from_value(root["ranks"].clone()).ok()
}

/// The first deviation of a rank's output from the row.
fn wrong(stage: &Stage, row: &Row, said: &str, others: Option<&String>) -> Option<String> {
    let all_of = |says: &[&str]| {
        let missing = says.iter().find(|says| !said.contains(**says));
        missing.map(|missing| format!("it lacks {missing:?}"))
    };
    match row.ends {
        Ends::Nothing => None,
        Ends::Refused { says, .. } => all_of(says),
        Ends::Cause {
            culprits,
            class,
            root,
            says,
        } => {
            let Some(of) = said.strip_prefix(&format!("{class:?} {root} of ")) else {
                return Some(format!("it is no {class:?}, {root}"));
            };
            let named = |rank: &usize| {
                let fault_of = format!("rank {rank} (pid {}): ", stage.pid(*rank));
                of.starts_with(&fault_of)
            };
            let is_right = match culprits {
                [] => of.starts_with("no rank: "),
                _ => culprits.iter().any(named),
            };
            if !is_right {
                return Some(format!("it is of none of {culprits:?}"));
            }
            // Where several ranks are at fault together, all of them, and no others.
            if let Some(ranks) = ranks_at_fault(of)
                && !culprits.iter().all(|rank| ranks.contains(rank))
                    | !ranks.iter().all(|rank| culprits.contains(rank))
            {
                return Some(format!("it blames {ranks:?} instead of {culprits:?}"));
            }
            if others.is_some_and(|others| others != said) {
                return Some(String::from("another one was told something else"));
            }
            all_of(says)
        }
    }
}

#[test]
fn every_fault_has_one_cause_on_all_ranks_within_its_bound_and_they_go_on() {
    let test = name(&|| ());
    if let Role::Child(role) = Role::of(&test) {
        let row = all().into_iter().find(|row| row.name == role);
        actor::rank(row.expect("a row of this name"));
        return;
    }
    if !support::needs_emulator("ranks that hang and fail on purpose") {
        return;
    }
    let only = std::env::var("NCCL_TEST_FAULT").ok();
    let not_yet = std::env::var_os("NCCL_TEST_NOT_YET").is_some();
    let rows: Vec<_> = all()
        .into_iter()
        .filter(|row| {
            only.as_ref()
                .is_none_or(|only| row.name.contains(only.as_str()))
        })
        .filter(|row| not_yet || row.not_yet.is_none())
        .collect();
    let measured = Mutex::new(Vec::new());
    let nvidias = support::on_nvidias();
    let outcomes = Outcomes::read();
    let failures = try_all(rows.len(), TOGETHER, |index| {
        let row = rows[index];
        let differs = match row.on_nvidias {
            OnNvidias::NotTried(why) if nvidias => {
                nccl_tools::gpu_check::not_tested(format_args!("{}: {why}", row.name));
                return Ok(());
            }
            OnNvidias::MismatchField(how) => nvidias.then_some(how),
            _ => None,
        };
        match (attempt(&test, row), differs) {
            (Err(Unable::Failed(_)), Some(how)) => {
                println!("{}: something else, as is known: {how}", row.name);
                Ok(())
            }
            (Ok(_), Some(_)) => Err(format!(
                "{}: it comes out the same on NVIDIA's library, and is said to differ",
                row.name
            )),
            (Ok(found), None) => {
                // NVIDIA's library has its own texts, and those of a failed call are not this crate's.
                if !nvidias {
                    let compared =
                        outcomes.compare(row.name, found.outcome.clone(), found.sentences.clone());
                    compared.map_err(|why| format!("{}: {why}", row.name))?;
                }
                measured.lock().unwrap().push((index, found));
                Ok(())
            }
            (Err(Unable::NotHere(why)), _) => {
                nccl_tools::gpu_check::not_tested(format_args!("{}: {why}", row.name));
                Ok(())
            }
            (Err(Unable::Failed(why)), None) => Err(format!("{}: {why}", row.name)),
        }
    });
    outcomes.write();
    let mut measured = measured.into_inner().unwrap();
    measured.sort_by_key(|(index, _)| *index);
    for (index, found) in measured {
        let row = rows[index];
        let on = format!("at work again after {:.3} s", found.on.as_secs_f64());
        match row.ends {
            Ends::Cause { .. } => println!(
                "{}: all had the cause after {:.3} s, and were {on}",
                row.name,
                found.ended.as_secs_f64()
            ),
            _ => println!("{}: {on}", row.name),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

#[test]
fn the_page_has_the_rows_of_this_table() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/faults.md");
    written_or_same(path, &rows::table());
}

#[test]
fn in_the_example_seven_ranks_name_the_eighth_which_was_killed() {
    if !support::needs_processes(8) {
        return;
    }
    let output = std::process::Command::new(programs::program("root_cause"))
        .arg("5")
        .output()
        .expect("the example runs");
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{errors}");
    assert!(said.contains("They agree, and they are right."), "{said}");
    assert!(said.contains("killed by SIGKILL"), "{said}");
}
