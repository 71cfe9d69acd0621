//! One communicator as one of its ranks sees it: who is in it, what ended it, and who has let go of it.
//!
//! ```text
//! (registered) ──a fault is heard──▶ struck ──let go of, or given up, here──▶ concluded
//! ```
//!
//! The verdict is written by the watch alone, once, in the order in which all ranks hear. The conclusion
//! is made by whoever ended the communicator here, once; everybody else waits for it.

use super::words;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::attach::OfLine as _;
use super::docket::{Verdict, Who};
use super::trial::{self, Trials};
use super::watch::{FAULT, Watch};
use crate::events;
use crate::peers::{AbortHandle, Ending, LetGo, Peers, Supervisor, Ward};
use crate::rendezvous::{Line, Member, Subject, Suspicion};
use crate::stats;
use crate::sync::Mutex;
use crate::time::deadline_after;
use nccl_base::departure::Ended;
use nccl_base::fault::cause::Waiting;
use nccl_base::fault::{Cause, Fault};
use nccl_base::roster::Roster;
use nccl_core::recorder::Turn;

/// See the module.
pub(crate) struct Board {
    /// What all ranks call the communicator: made from NCCL's token, of which there is one for each.
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
    /// What this rank has said.
    announced: OnceLock<Arc<Fault>>,
    /// When the operation of this rank was called that made it say so.
    began: OnceLock<Instant>,
    target: OnceLock<AbortHandle>,
    /// How long the others may take to say that they let go.
    patience: Duration,
    /// Who has not, as a sentence.
    conclusion: OnceLock<Option<String>>,
    /// Held by the thread that says how far this rank has let go, and waits for what the others say.
    saying: Mutex<()>,
    /// Whether all have said how far they had let go, and the end of all aborts is needed as well.
    needs_more: AtomicBool,
    /// The verdict, with what the ranks were at.
    complete: OnceLock<Arc<Fault>>,
    /// The same, when the world has gone on.
    past: OnceLock<String>,
    /// Whether the log has the verdict.
    told: AtomicBool,
    /// How many calls were compared before they were handed to NCCL.
    checked: AtomicU64,
    /// The last collective of which this rank was asked whether it has entered it.
    asked_about: AtomicU64,
}

/// How long the end of a communicator takes on ranks that nobody can ask any more: they see that the
/// line is lost as well.
const GRACE: Duration = Duration::from_millis(250);

/// More ranks than this do not tell each other what they were at: it would be the square of their number.
const MANY: usize = 256;

/// What a rank says of its end; behind it, what it was waiting in.
fn code_of(let_go: LetGo) -> u8 {
    match let_go {
        LetGo::Nothing => 0,
        LetGo::All => 1,
        LetGo::AllAndNeedsAll => 2,
        LetGo::Kernels => 3,
        LetGo::KernelsAndNeedsAll => 4,
    }
}

/// What was said; `None` of a rank that is gone.
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

/// What a rank says that has nothing of the communicator any more.
pub(super) const FREED: &[u8] = &[1];

impl Board {
    /// Of a communicator that this rank of the line is about to make.
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
            // An end that is said twice is waited for in vain: the others do not come again. Nothing was lent yet.
            let _ = board.conclusion.set(None);
        }
        board.tell();
        board
    }

    /// Which ranks of the world, and of the launcher, its ranks are.
    pub(crate) fn roster(&self) -> &Roster {
        &self.roster
    }

    /// Tells the log of the verdict, once.
    pub(super) fn tell(&self) {
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

    /// All have said that their kernels are over, and one needs the end of all aborts; that of this rank has come back.
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

    /// Who only ran out of time does not say that it has ended before there is a cause: the others may all have.
    fn await_verdict(&self) {
        let waits = self.announced.get().is_some_and(|own| !own.is_certain());
        let deadline = deadline_after(trial::PATIENCE + GRACE);
        while waits
            && self.members.len() > 1
            && self.fault().is_none()
            && !self.line.is_closed()
            && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// What this rank announced is about to come back in the order in which all hear it, unless the line is lost.
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

    /// This rank knows what the verdict is although nobody orders it.
    pub(super) fn decide(&self, fault: Fault) {
        self.watch
            .strike(&self.key, Arc::new(fault), self.members.to_vec());
    }

    /// The line, and which of its ranks `rank`s of this communicator are.
    pub(super) fn line(&self) -> (&Arc<Line>, &[usize]) {
        (&self.line, &self.members)
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn trials(&self) -> &Trials {
        self.watch.trials()
    }

    /// What this rank was waiting in, for the others; empty for nothing, and where that would be too much for
    /// all to tell all.
    fn standing(&self) -> String {
        let standing = self.target.get().and_then(AbortHandle::standing);
        standing
            .filter(|_| self.members.len() <= MANY)
            .unwrap_or_default()
    }

    /// Adds to the verdict what the ranks were at: all get the same parts.
    fn complete(&self, ended: &Ended) {
        let (Ended::All(parts), Some(verdict)) = (ended, self.verdict.get()) else {
            return;
        };
        let standings = parts.iter().map(|part| part.get(1..).unwrap_or_default());
        let also = Waiting::together(standings.map(String::from_utf8_lossy).enumerate());
        if verdict.also().is_empty() && !also.is_empty() {
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
                let limit = self.patience;
                let why =
                    format!("did not confirm within {limit:?} that it ended the communicator");
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
        // The rank that coordinates need not be one of its ranks.
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

    /// The board was struck: nobody uses what it protects any more. `None` when it is being made, or
    /// dropped: whoever is at it looks at the board.
    pub(super) fn begin_end(&self) -> Option<Ending> {
        self.target.get()?.begin_end(self.fault()?)
    }
}

impl Supervisor for Board {
    fn key(&self) -> &str {
        &self.key
    }

    fn peers(&self) -> &Arc<dyn Peers> {
        &self.peers
    }

    fn members(&self) -> &[usize] {
        &self.members
    }

    fn target(&self) -> Option<AbortHandle> {
        self.target.get().cloned()
    }

    fn was_asked_about(&self, turn: u64) {
        self.asked_about.fetch_max(turn, Ordering::Relaxed);
    }

    fn is_asked_about(&self, turn: u64) -> bool {
        self.asked_about.load(Ordering::Relaxed) >= turn
    }

    fn place_of(&self, member: usize) -> usize {
        let place = self.members.iter().position(|&other| other == member);
        place.unwrap_or(member)
    }

    fn name_of(&self, rank: usize) -> String {
        let members = self.line.members();
        let known = members.get().zip(self.members.get(rank));
        match known.and_then(|(known, &member)| known.get(member)) {
            Some(Member { host, pid, .. }) => {
                format!(
                    "rank {rank} ({}{host}, pid {pid})",
                    self.roster.others(rank)
                )
            }
            None => self.roster.who(&[rank]),
        }
    }

    fn names_of(&self, ranks: &[usize]) -> String {
        match *ranks {
            [rank] => self.name_of(rank),
            _ => self.roster.who(ranks),
        }
    }

    fn protects(&self, target: AbortHandle) -> Option<Arc<Fault>> {
        let set = || drop(self.target.set(target));
        self.watch.docket().protect(&self.verdict, set)
    }

    fn fault(&self) -> Option<&Arc<Fault>> {
        self.complete.get().or_else(|| self.verdict.get())
    }

    fn cause(&self) -> Option<&Arc<Fault>> {
        self.fault().or_else(|| self.announced.get())
    }

    fn is_own(&self, fault: &Fault) -> bool {
        self.announced.get().is_some_and(|own| fault.is_of(own))
    }

    fn announce(self: Arc<Self>, cause: Cause) {
        let cause = words::with_words_of_nccl(cause);
        let cause = match self.members.len() {
            1 => cause.of_one_rank(),
            _ => cause,
        };
        let began = cause.began;
        // What ended another communicator is known.
        let is_told = cause.told.is_some();
        let fault = Fault::here(
            cause,
            (&self.name, &self.roster),
            self.rank,
            self.line.job().1,
            |world_rank| self.members.iter().position(|member| *member == world_rank),
        );
        let fault = Arc::new(fault);
        if self.fault().is_some() || self.announced.set(Arc::clone(&fault)).is_err() {
            return;
        }
        if let Some(began) = began {
            let _ = self.began.set(began);
        }
        if fault.is_certain() || is_told || self.members.len() == 1 {
            let bytes = fault.encode(&self.members);
            self.line.announce(&format!("{FAULT}{}", self.key), &bytes);
        } else {
            trial::open(&self, &fault);
        }
    }

    fn let_go(&self, so_far: LetGo) -> bool {
        let _saying = self.saying.lock();
        if self.conclusion.get().is_some() {
            return true;
        }
        self.await_verdict();
        if so_far == LetGo::Nothing {
            // A rank that could not end its own does not wait for others.
            let part = [code_of(so_far)];
            end_alone(&self.line, &self.key, &self.members, &part, self.patience);
            self.await_own();
            return self.conclusion.set(None).is_ok();
        }
        if self.needs_more.load(Ordering::Acquire) {
            return !is_of_kernels(so_far) && self.end_of_all(so_far);
        }
        let part = [&[code_of(so_far)], self.standing().as_bytes()].concat();
        let ended = self
            .line
            .end(&self.key, &self.members, &part, self.patience, None);
        self.line.catch_up();
        // When the line was lost before this rank's own fault came back, that is all there is.
        if let Some(own) = self.announced.get() {
            let _ = self.verdict.set(Arc::clone(own));
            self.tell();
        }
        self.complete(&ended);
        let has_all = |ended: &Ended| match ended {
            Ended::All(parts) => {
                let said = || parts.iter().filter_map(|part| let_go_of(part));
                !(said().any(needs_all) && said().any(is_of_kernels))
            }
            _ => true,
        };
        if has_all(&ended) {
            return self.conclusion.set(self.sentence(&ended)).is_ok();
        }
        self.needs_more.store(true, Ordering::Release);
        !is_of_kernels(so_far) && self.end_of_all(so_far)
    }

    fn next_check(&self) -> u64 {
        self.checked.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn gather(
        &self,
        topic: &str,
        part: &[u8],
        patience: Duration,
        interrupted: &dyn Fn() -> bool,
    ) -> Ended {
        let name = format!("{}/{topic}", self.key);
        let ended = self
            .line
            .end(&name, &self.members, part, patience, Some(interrupted));
        if matches!(ended, Ended::All(_)) {
            // Who is missing among them was heard of before.
            self.line.catch_up();
        }
        ended
    }

    fn conclusion(&self) -> Option<&str> {
        let said = self.conclusion.get().and_then(Option::as_deref);
        let Some(epoch) = self.line.gone_on() else {
            return said;
        };
        let past = self.past.get_or_init(|| {
            let own = self.line.job().1;
            let past = format!(
                "it is of epoch {own} of its world, which has gone on to epoch {epoch}: make it anew there"
            );
            match said {
                Some(said) => format!("{said}; {past}"),
                None => past,
            }
        });
        Some(past)
    }

    fn suspect(&self, turn: u64, call: &Turn, since: Duration, is_sample: bool) {
        let everybody = self.members.iter().copied().eq(0..self.line.size());
        self.line.suspect(Suspicion {
            subject: Subject {
                key: String::from(&*self.key),
                name: String::from(&*self.name),
                turn,
                kind: call.kind,
                sequence: call.number,
            },
            members: match everybody {
                true => Vec::new(),
                false => self.members.to_vec(),
            },
            since,
            is_sample,
        });
    }
}

impl Drop for Board {
    /// Nothing is left of the communicator here.
    fn drop(&mut self) {
        let struck = self.watch.docket().forget(&self.key);
        if struck && self.conclusion.get().is_none() {
            end_alone(&self.line, &self.key, &self.members, FREED, self.patience);
        }
    }
}

/// The topic of the end of all aborts.
fn of_all(key: &str) -> String {
    format!("{key}/all")
}

/// Says how far this rank has let go, for good, without waiting for other ranks.
pub(super) fn end_alone(
    line: &Line,
    key: &str,
    members: &Arc<[usize]>,
    part: &[u8],
    patience: Duration,
) {
    for topic in [key, &of_all(key)] {
        line.end_alone(topic, members, part, patience);
    }
}
