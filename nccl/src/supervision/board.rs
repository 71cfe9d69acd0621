//! One communicator as one of its ranks sees it: who is in it, what ended it, and who has let go of it.
//!
//! ```text
//! (registered) ──a fault is heard──▶ struck ──let go of, or given up, here──▶ concluded
//! ```
//!
//! The verdict is written by the watch alone, once, in the order in which all ranks hear. The conclusion
//! is made by whoever ended the communicator here, once; everybody else waits for it.

use super::words;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use sha2::{Digest as _, Sha256};

use super::cause::Waiting;
use super::docket::{Verdict, Who};
use super::fault::{Cause, Fault};
use super::roster::Roster;
use super::trial::{self, Trials};
use super::watch::{FAULT, Watch};
use crate::communicator::Inner;
use crate::events;
use crate::rendezvous::{Ended, Line, Member};
use crate::stats;
use crate::supervision::OfLine as _;
use crate::sync::Mutex;
use crate::time::deadline_after;
use crate::unique_id::UniqueId;

/// What is to be ended, and whether that begins here.
pub(super) type Ending = (Arc<Inner>, bool);

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
    watch: Arc<Watch>,
    verdict: Arc<Verdict<Arc<Fault>>>,
    /// What this rank has said.
    announced: OnceLock<Arc<Fault>>,
    /// When the operation of this rank was called that made it say so.
    began: OnceLock<Instant>,
    target: OnceLock<Weak<Inner>>,
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

/// How far a rank has let go of a communicator that is being aborted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LetGo {
    /// Its kernels are over, and nothing else of NCCL's used memory that was lent.
    Kernels,
    /// Its kernels are over. More than kernels used memory that was lent, so that it needs the end of all aborts.
    KernelsAndNeedsAll,
    /// Its abort has come back, and it needs the end of all others.
    AllAndNeedsAll,
    /// Its abort has come back.
    All,
    /// Its abort has not come back in time.
    Nothing,
}

impl LetGo {
    /// What a rank says of its end; behind it, what it was waiting in.
    fn code(self) -> u8 {
        match self {
            Self::Nothing => 0,
            Self::All => 1,
            Self::AllAndNeedsAll => 2,
            Self::Kernels => 3,
            Self::KernelsAndNeedsAll => 4,
        }
    }

    /// What was said; `None` of a rank that is gone.
    fn of(part: &[u8]) -> Option<Self> {
        Some(match part.first()? {
            1 => Self::All,
            2 => Self::AllAndNeedsAll,
            3 => Self::Kernels,
            4 => Self::KernelsAndNeedsAll,
            _ => Self::Nothing,
        })
    }

    fn is_of_kernels(self) -> bool {
        matches!(self, Self::Kernels | Self::KernelsAndNeedsAll)
    }

    fn needs_all(self) -> bool {
        matches!(self, Self::KernelsAndNeedsAll | Self::AllAndNeedsAll)
    }
}

/// What a rank says that has nothing of the communicator any more.
pub(super) const FREED: &[u8] = &[1];

impl Board {
    /// Of the communicator that is made with `id` by `members` of the line, of which this is number
    /// `rank`.
    pub(crate) fn new(
        line: &Arc<Line>,
        name: &Arc<str>,
        id: &UniqueId,
        (members, roster): (Arc<[usize]>, Arc<Roster>),
        rank: usize,
        patience: Duration,
    ) -> Arc<Self> {
        let watch = line.watch();
        let board = Arc::new(Self {
            key: Self::key_of(id),
            name: Arc::clone(name),
            members,
            roster,
            rank,
            line: Arc::clone(line),
            watch,
            verdict: Arc::default(),
            announced: OnceLock::new(),
            began: OnceLock::new(),
            target: OnceLock::new(),
            patience,
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

    /// What all ranks call the communicator.
    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    /// What it is the end of; none while it is being made.
    pub(super) fn target(&self) -> Option<Weak<Inner>> {
        self.target.get().cloned()
    }

    /// Somebody has asked whether this rank has entered the `turn`-th collective.
    pub(super) fn was_asked_about(&self, turn: u64) {
        self.asked_about.fetch_max(turn, Ordering::Relaxed);
    }

    pub(super) fn is_asked_about(&self, turn: u64) -> bool {
        self.asked_about.load(Ordering::Relaxed) >= turn
    }

    /// What all ranks call the communicator that is made with `id`.
    pub(crate) fn key_of(id: &UniqueId) -> Arc<str> {
        let mut key = String::with_capacity(32);
        for byte in &Sha256::digest(id.as_bytes())[..16] {
            // Writing to a string does not fail.
            let _ = write!(key, "{byte:02x}");
        }
        key.into()
    }

    /// The line, and which of its ranks `rank`s of this communicator are.
    pub(crate) fn line(&self) -> (&Arc<Line>, &[usize]) {
        (&self.line, &self.members)
    }

    /// Which ranks of the world, and of the launcher, its ranks are.
    pub(crate) fn roster(&self) -> &Roster {
        &self.roster
    }

    /// Which of its ranks is this one of the line.
    pub(crate) fn place_of(&self, member: usize) -> usize {
        let place = self.members.iter().position(|&other| other == member);
        place.unwrap_or(member)
    }

    /// One of its ranks, with host and process.
    pub(crate) fn name_of(&self, rank: usize) -> String {
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

    /// One of them with host and process, several in short form.
    pub(crate) fn names_of(&self, ranks: &[usize]) -> String {
        match *ranks {
            [rank] => self.name_of(rank),
            _ => self.roster.who(ranks),
        }
    }

    /// What is to be ended when the board is struck; the fault, if it has been.
    pub(crate) fn protects(&self, target: Weak<Inner>) -> Option<Arc<Fault>> {
        let set = || drop(self.target.set(target));
        self.watch.docket().protect(&self.verdict, set)
    }

    /// What ended the communicator on all ranks.
    pub(crate) fn fault(&self) -> Option<&Arc<Fault>> {
        self.complete.get().or_else(|| self.verdict.get())
    }

    /// The same, or what this rank has said that ends it.
    pub(crate) fn cause(&self) -> Option<&Arc<Fault>> {
        self.fault().or_else(|| self.announced.get())
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

    /// Whether the fault is what this rank said.
    pub(crate) fn is_own(&self, fault: &Fault) -> bool {
        self.announced.get().is_some_and(|own| fault.is_of(own))
    }

    /// Whether the communicator is ended on all ranks, or about to be.
    pub(crate) fn is_at_fault(&self) -> bool {
        self.fault().is_some() || self.announced.get().is_some()
    }

    /// Tells all ranks that this one gives the communicator up. The first to say so is right.
    ///
    /// Whoever only ran out of time, or saw what follows from something, says that, and the cause is looked for.
    pub(crate) fn announce(self: &Arc<Self>, cause: Cause) {
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
            trial::open(self, &fault);
        }
    }

    /// This rank has let go so far: tells the others, and waits until they have said how far they have. Whether that is
    /// all; otherwise it is to be called again with the end of the abort here.
    pub(crate) fn let_go(&self, so_far: LetGo) -> bool {
        let _saying = self.saying.lock();
        if self.conclusion.get().is_some() {
            return true;
        }
        self.await_verdict();
        if so_far == LetGo::Nothing {
            // A rank that could not end its own does not wait for others.
            let part = [so_far.code()];
            end_alone(&self.line, &self.key, &self.members, &part, self.patience);
            self.await_own();
            return self.conclusion.set(None).is_ok();
        }
        if self.needs_more.load(Ordering::Acquire) {
            return !so_far.is_of_kernels() && self.end_of_all(so_far);
        }
        let part = [&[so_far.code()], self.standing().as_bytes()].concat();
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
                let said = || parts.iter().filter_map(|part| LetGo::of(part));
                !(said().any(LetGo::needs_all) && said().any(LetGo::is_of_kernels))
            }
            _ => true,
        };
        if has_all(&ended) {
            return self.conclusion.set(self.sentence(&ended)).is_ok();
        }
        self.needs_more.store(true, Ordering::Release);
        !so_far.is_of_kernels() && self.end_of_all(so_far)
    }

    /// All have said that their kernels are over, and one needs the end of all aborts; that of this rank has come back.
    fn end_of_all(&self, so_far: LetGo) -> bool {
        let part = [so_far.code()];
        let ended = self.line.end(
            &of_all(&self.key),
            &self.members,
            &part,
            self.patience,
            None,
        );
        self.conclusion.set(self.sentence(&ended)).is_ok()
    }

    /// The abort has come back here, or has not: as [`let_go`](Self::let_go). Who has not let go, as a sentence.
    pub(crate) fn conclude(&self, freed: bool, needs_all: bool) -> Option<&str> {
        self.let_go(match (freed, needs_all) {
            (false, _) => LetGo::Nothing,
            (true, true) => LetGo::AllAndNeedsAll,
            (true, false) => LetGo::All,
        });
        self.conclusion.get().and_then(Option::as_deref)
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

    /// Its number among the calls that are compared, from 1.
    pub(crate) fn next_check(&self) -> u64 {
        self.checked.fetch_add(1, Ordering::Relaxed) + 1
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
        let target = self.target.get().and_then(Weak::upgrade);
        let standing = target.and_then(|inner| inner.tracked.track().standing());
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

    /// Gives the other ranks `part` for `topic`, once, and gets theirs: as [`Line::end`].
    pub(crate) fn gather(
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

    /// What [`conclude`](Self::conclude) said, once it has; and that the world has gone on since, if it has.
    pub(crate) fn conclusion(&self) -> Option<&str> {
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

    fn sentence(&self, ended: &Ended) -> Option<String> {
        let (unsure, why): (Vec<usize>, _) = match ended {
            Ended::All(parts) => {
                let leaked = self.members.iter().zip(parts);
                let leaked = leaked.filter(|(_, part)| LetGo::of(part) == Some(LetGo::Nothing));
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
        let target = self.target.get()?.upgrade()?;
        let begun = target.begin_end(self.fault()?);
        Some((target, begun))
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
