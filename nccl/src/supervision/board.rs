//! One communicator as one of its ranks sees it: its members, its verdict, and which ranks have let go of it.
//!
//! ```text
//! (registered) ──a fault is heard──▶ struck ──let go of, or given up, here──▶ concluded
//! ```
//!
//! Only the watch writes the verdict, once, in the order in which all ranks hear. The thread that ended the
//! communicator on this rank concludes, once; all other threads wait for the conclusion.

mod supervisor;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::attach::OfLine as _;
use super::docket::{Verdict, Who};
use super::trials::{PATIENCE, Trials};
use super::watch::{FREED, Watch, Watched, end_alone, of_all};
use crate::events;
use crate::peers::{AbortHandle, Ending, LetGo, Peers, Supervisor, Ward};
use crate::rendezvous::Line;
use crate::stats;
use crate::sync::Mutex;
use crate::time::deadline_after;
use nccl_base::departure::Ended;
use nccl_base::fault::Fault;
use nccl_base::fault::cause::Waiting;
use nccl_base::roster::Roster;

/// See the module.
pub(crate) struct Board {
    /// Key of the communicator on all ranks: made from NCCL's token, which is unique.
    key: Arc<str>,
    name: Arc<str>,
    /// The ranks of the line that are its ranks, in order.
    members: Arc<[usize]>,
    roster: Arc<Roster>,
    rank: usize,
    line: Arc<Line>,
    peers: Arc<dyn Peers>,
    watch: Arc<Watch>,
    verdict: Arc<Verdict<Arc<Fault>>>,
    /// The fault that this rank announced.
    announced: OnceLock<Arc<Fault>>,
    /// When this rank called the operation whose failure it announced.
    began: OnceLock<Instant>,
    target: OnceLock<AbortHandle>,
    /// How long the other ranks may take to report that they let go.
    patience: Duration,
    /// Set when the end is over: a sentence that names the ranks that did not let go, if any.
    conclusion: OnceLock<Option<String>>,
    /// Held by the thread that reports how far this rank has let go, and waits for the reports of the others.
    saying: Mutex<()>,
    /// Whether all ranks have reported how far they let go, and the end of all aborts is needed as well.
    needs_more: AtomicBool,
    /// The verdict, with what the ranks waited in.
    complete: OnceLock<Arc<Fault>>,
    /// The conclusion, once the world has gone on.
    past: OnceLock<String>,
    /// Whether the verdict was logged.
    told: AtomicBool,
    /// Number of calls that were compared before they were handed to NCCL.
    checked: AtomicU64,
    /// Number of the last collective of which this rank was asked whether it has entered it.
    asked_about: AtomicU64,
}

/// How long the end of a communicator takes on ranks that cannot be asked any more: they see that the
/// line is lost as well.
const GRACE: Duration = Duration::from_millis(250);

/// Above this number, ranks do not tell each other what they waited in: it would be the square of their number.
const MANY: usize = 256;

/// Returns the code of `let_go` in a report of the end; what the rank waited in follows it.
fn code_of(let_go: LetGo) -> u8 {
    match let_go {
        LetGo::Nothing => 0,
        LetGo::All => 1,
        LetGo::AllAndNeedsAll => 2,
        LetGo::Kernels => 3,
        LetGo::KernelsAndNeedsAll => 4,
    }
}

/// Returns the decoded report; `None` for a rank that is gone.
fn let_go_of(part: &[u8]) -> Option<LetGo> {
    Some(match part.first()? {
        1 => LetGo::All,
        2 => LetGo::AllAndNeedsAll,
        3 => LetGo::Kernels,
        4 => LetGo::KernelsAndNeedsAll,
        _ => LetGo::Nothing,
    })
}

fn is_of_kernels(let_go: LetGo) -> bool {
    matches!(let_go, LetGo::Kernels | LetGo::KernelsAndNeedsAll)
}

fn needs_all(let_go: LetGo) -> bool {
    matches!(let_go, LetGo::KernelsAndNeedsAll | LetGo::AllAndNeedsAll)
}

impl Board {
    /// Creates the board of a communicator that this rank of the line is about to make.
    pub(super) fn new(line: &Arc<Line>, peers: Arc<dyn Peers>, ward: Ward<'_>) -> Arc<Self> {
        let watch = line.watch();
        let board = Arc::new(Self {
            key: ward.key,
            name: Arc::clone(ward.name),
            members: ward.members,
            roster: ward.roster,
            rank: ward.rank,
            line: Arc::clone(line),
            peers,
            watch,
            verdict: Arc::default(),
            announced: OnceLock::new(),
            began: OnceLock::new(),
            target: OnceLock::new(),
            patience: ward.patience,
            conclusion: OnceLock::new(),
            saying: Mutex::new(()),
            needs_more: AtomicBool::new(false),
            complete: OnceLock::new(),
            past: OnceLock::new(),
            told: AtomicBool::new(false),
            checked: AtomicU64::new(0),
            asked_about: AtomicU64::new(0),
        });
        let weak = Arc::downgrade(&board);
        let who = Who {
            members: &board.members,
            name: &board.name,
        };
        if board.watch.register(&board.key, &who, &board.verdict, weak) {
            // A second report of the end would wait in vain: the others do not report again. Nothing was lent yet.
            let _ = board.conclusion.set(None);
        }
        board.tell();
        board
    }

    /// Returns which ranks of the world, and of the launcher, its ranks are.
    pub(crate) fn roster(&self) -> &Roster {
        &self.roster
    }

    /// Reports that this rank's abort has returned, and waits for the end of all aborts, which one rank needs.
    fn end_of_all(&self, so_far: LetGo) -> bool {
        let part = [code_of(so_far)];
        let ended = self.line.end(
            &of_all(&self.key),
            &self.members,
            &part,
            self.patience,
            None,
        );
        self.conclusion.set(self.sentence(&ended)).is_ok()
    }

    /// Delays the end report of a rank that only ran out of time until there is a cause: the others may all have reported.
    fn await_verdict(&self) {
        let waits = self.announced.get().is_some_and(|own| !own.is_certain());
        let deadline = deadline_after(PATIENCE + GRACE);
        while waits
            && self.members.len() > 1
            && self.fault().is_none()
            && !self.line.is_closed()
            && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits for this rank's own announcement to come back in the order in which all ranks hear it, unless the line is lost.
    fn await_own(&self) {
        let deadline = deadline_after(GRACE);
        while self.announced.get().is_some()
            && self.fault().is_none()
            && !self.line.is_closed()
            && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Writes a verdict that this rank derived itself, without the coordinator's order.
    pub(super) fn decide(&self, fault: Fault) {
        self.watch
            .strike(&self.key, Arc::new(fault), self.members.to_vec());
    }

    /// Returns the line, and which of its ranks the communicator's ranks are.
    pub(super) fn line(&self) -> (&Arc<Line>, &[usize]) {
        (&self.line, &self.members)
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn trials(&self) -> &Trials {
        self.watch.trials()
    }

    /// Returns what this rank was waiting in, for the other ranks; empty for nothing, and above [`MANY`] ranks.
    fn standing(&self) -> String {
        let standing = self.target.get().and_then(AbortHandle::standing);
        standing
            .filter(|_| self.members.len() <= MANY)
            .unwrap_or_default()
    }

    /// Adds to the verdict what the ranks waited in: all ranks get the same parts.
    fn complete(&self, ended: &Ended) {
        let (Ended::All(parts), Some(verdict)) = (ended, self.verdict.get()) else {
            return;
        };
        let standings = parts.iter().map(|part| part.get(1..).unwrap_or_default());
        let also = Waiting::together(standings.map(String::from_utf8_lossy).enumerate());
        if verdict.also.is_empty() && !also.is_empty() {
            let _ = self.complete.set(Arc::new(verdict.with_also(also)));
            self.watch.complete_latest(self.fault());
        }
    }

    fn sentence(&self, ended: &Ended) -> Option<String> {
        let (unsure, why): (Vec<usize>, _) = match ended {
            Ended::All(parts) => {
                let leaked = self.members.iter().zip(parts);
                let leaked = leaked.filter(|(_, part)| let_go_of(part) == Some(LetGo::Nothing));
                let leaked = leaked.map(|(&rank, _)| rank).collect();
                (leaked, String::from("could not end the communicator"))
            }
            Ended::Missing(ranks) => {
                let timeout = self.patience;
                let why =
                    format!("did not confirm within {timeout:?} that it ended the communicator");
                (ranks.clone(), why)
            }
            Ended::Unheard => {
                std::thread::sleep(GRACE.min(self.patience));
                return Some(String::from(
                    "the line to the other ranks is lost, so that they could not confirm that they \
                     ended the communicator",
                ));
            }
        };
        if unsure.is_empty() {
            return None;
        }
        // The coordinator need not be a rank of the communicator.
        let name_of = |&rank: &usize| match self.members.contains(&rank) {
            true => self.name_of(self.place_of(rank)),
            false => self.line.describe(rank),
        };
        let names: Vec<_> = unsure.iter().map(name_of).collect();
        Some(format!(
            "{} {why}, and may still write into memory that was lent to it",
            names.join(", ")
        ))
    }
}

impl Watched for Board {
    fn begin_end(&self) -> Option<Ending> {
        self.target.get()?.begin_end(self.fault()?)
    }

    fn tell(&self) {
        if let Some(fault) = self.fault()
            && !self.told.swap(true, Ordering::AcqRel)
        {
            self.watch.set_latest(fault);
            events::fault(fault, Some(&self.key), self.rank, self.members.len());
            if !fault.is_on_purpose() {
                self.line.home().breaks();
                if let Some(began) = self.began.get() {
                    stats::DETECT.add(began.elapsed());
                }
            }
        }
    }
}

impl Drop for Board {
    /// Forgets the communicator, and reports the end of one that was struck and not concluded.
    fn drop(&mut self) {
        let struck = self.watch.docket().forget(&self.key);
        if struck && self.conclusion.get().is_none() {
            end_alone(&self.line, &self.key, &self.members, FREED, self.patience);
        }
    }
}
