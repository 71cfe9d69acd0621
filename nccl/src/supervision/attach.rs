//! What this crate attaches to the lines of the control plane: under which the calls of a rank are recorded, and who looks after its
//! communicators.

use std::any::Any;
use std::sync::{Arc, Once};
use std::time::Duration;

use super::session::Session;
use super::watch::Watch;
use crate::forked;
use crate::peers::{Peers, set_of_threads};
use crate::reaper;
use crate::recorder::{MissingRank, RankRecording, Timeline};
use crate::rendezvous::{
    Asked, Attached, ClockReading, Host, Line, Watcher, World, say_goodbye, set_host,
};
use nccl_base::fault::Fault;
use nccl_core::recorder::{self, Clock, Home, Snapshot};

/// Before the first line is opened.
pub(crate) fn introduce() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        set_host(&Program);
        reaper::at_exit_say(say_goodbye);
    });
}

/// Before `main`, because a program may begin with [`Communicator::init_all`](crate::Communicator::init_all), which is below
/// this crate and calls nothing of it.
#[used]
// SAFETY: the section is a list of C functions that the loader calls, with arguments that this one does not take. It sets a
// `OnceCell`, which needs nothing of the runtime that is not there before `main`, and may be done beside other threads.
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = {
    extern "C" fn before_main() {
        set_of_threads(of_threads);
    }
    before_main
};

fn of_threads(size: usize) -> Vec<Arc<dyn Peers>> {
    introduce();
    let worlds = World::threads(size);
    worlds
        .iter()
        .map(|world| Session::of(world.line()))
        .collect()
}

struct Program;

impl Host for Program {
    fn opens(&self, job: &str, epoch: u64, rank: usize, world_size: usize) -> Arc<dyn Attached> {
        Arc::new(Records(Home::new(job, epoch, rank, world_size)))
    }

    fn recording(&self, most: usize) -> Vec<u8> {
        written(recorder::snapshot(), most)
    }

    fn last_call(&self) -> Option<String> {
        recorder::last_call()
    }
}

/// Under which the calls of a rank are recorded.
struct Records(Arc<Home>);

impl Attached for Records {
    fn recording(&self, most: usize) -> Vec<u8> {
        written(recorder::of_place(self.0.place()), most)
    }

    fn wants_clock(&self) -> bool {
        recorder::is_wanted(&self.0)
    }

    fn goes_on_from(&self, past: &Arc<dyn Attached>) {
        self.0.goes_on_from(&home(past));
    }

    fn set_clock(&self, measured: Option<ClockReading>) {
        // What is to be added to the times of this process for those of rank 0.
        let clock = measured.map_or(Clock::REFERENCE, |reading| {
            Clock::measured(-reading.ahead, reading.round_trip)
        });
        self.0.set_clock(clock);
    }
}

impl Watcher for Watch {
    fn latest(&self) -> Option<Arc<Fault>> {
        Watch::latest(self)
    }

    fn end_all(&self, reason: &str, kept: &[&str]) {
        Watch::end_all(self, reason, kept);
    }
}

fn written(mut snapshot: Snapshot, most: usize) -> Vec<u8> {
    snapshot.limit_to(most);
    snapshot.to_json().into_bytes()
}

fn home(attached: &Arc<dyn Attached>) -> Arc<Home> {
    let attached: Arc<dyn Any + Send + Sync> = Arc::clone(attached) as _;
    match attached.downcast::<Records>() {
        Ok(records) => Arc::clone(&records.0),
        Err(_) => unreachable!("a line was opened before this crate had introduced itself"),
    }
}

/// What is attached to a line.
pub(crate) trait OfLine {
    /// Under which its communicators record what they do.
    fn home(&self) -> Arc<Home>;

    /// What looks after its communicators.
    fn watch(&self) -> Arc<Watch>;
}

impl OfLine for Arc<Line> {
    fn home(&self) -> Arc<Home> {
        home(self.attached())
    }

    fn watch(&self) -> Arc<Watch> {
        let watcher = self.watcher(|line| {
            reaper::register_exit();
            Watch::start(line)
        });
        let watcher: Arc<dyn Any + Send + Sync> = watcher as _;
        match watcher.downcast() {
            Ok(watch) => watch,
            Err(_) => unreachable!("nobody else looks after communicators"),
        }
    }
}

/// What all ranks of a line did last.
pub(crate) fn recordings(line: &Arc<Line>, limit: Duration) -> Timeline {
    if forked::is_child() {
        return Timeline::default();
    }
    let home = line.home();
    let own = |rank| {
        let snapshot = recorder::of_place(&home.place().of_rank(rank));
        RankRecording::new(rank, Clock::REFERENCE, snapshot)
    };
    let reference = line.describe(line.rank());
    // Before the others are asked, who may take their time: what is compared is not to be overwritten meanwhile.
    let mine = own(line.rank());
    match line.ask_for_recordings(limit, &decode) {
        Some(asked) => timeline(reference, vec![mine], asked),
        // All ranks are threads of this process.
        None => {
            let (job, epoch) = line.job();
            let asked = Asked {
                job: job.to_owned(),
                epoch,
                answers: Vec::new(),
                missing: Vec::new(),
            };
            timeline(reference, (0..line.size()).map(own).collect(), asked)
        }
    }
}

pub(crate) fn decode(
    rank: usize,
    reading: ClockReading,
    bytes: &[u8],
) -> Result<RankRecording, String> {
    if bytes.is_empty() {
        return Err(String::from("its program records nothing"));
    }
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let snapshot = Snapshot::from_json(text).map_err(|error| error.to_string())?;
    let clock = Clock::measured(reading.ahead, reading.round_trip);
    Ok(RankRecording::new(rank, clock, snapshot))
}

pub(crate) fn timeline(
    reference: String,
    mut ranks: Vec<RankRecording>,
    asked: Asked<RankRecording>,
) -> Timeline {
    ranks.extend(asked.answers);
    ranks.sort_by_key(|one| one.rank);
    let missing = asked.missing.into_iter();
    let missing = missing
        .map(|one| MissingRank::new(one.rank, one.host, one.pid, one.why))
        .collect();
    Timeline::new((asked.job, asked.epoch), reference, ranks, missing)
}
