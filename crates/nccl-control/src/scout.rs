//! What an `Observer`'s thread does: it finds the coordinator, and tells the
//! ranks of rank 0's end when rank 0 cannot.
//!
//! ```text
//! looking ──found──▶ there ──connection ends──▶ there once more, or at the rank that takes over, or over
//!    │               │ └─the ranks go on──▶ in the next epoch
//!    └──rank 0's process has ended──▶ standing in for it, until all have been told
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::client::{self, Claim, Met, Tried};
use super::hub::Hub;
use super::launcher;
use super::observer::{Ear, Shared, Word};
use super::place::Address;
use super::reader::{Reader, Sink};
use super::request::Request;
use super::search::{Looked, Search};
use super::substitute::stand_in as stand_in_for_rank_0;
use super::watching::WORD;
use crate::departure::{Departure, Lost, ProcessEnd};
use crate::sync::Mutex;
use crate::time::deadline_after;
use nccl_base::threads;

/// How long one try to get somewhere may take.
const TRY: Duration = Duration::from_secs(2);

/// How many ranks are told at once.
const TELLERS: usize = 32;

/// How long the ranks may take until one has taken over: some hosts may be silent. And when the coordinator has
/// left in order: then most of them leave as well.
const SUCCESSION: Duration = Duration::from_secs(10);
const LEAVING: Duration = Duration::from_secs(2);

/// How long the ranks may take to get from one epoch to the next.
const GOING_ON: Duration = Duration::from_secs(20);

/// How long telling all ranks may take; they wait no longer than [`WORD`] for it.
const TELLING: Duration = Duration::from_millis(500);

pub(super) fn run(shared: &Arc<Shared>) {
    let deadline = deadline_after(shared.rendezvous.timeout);
    let why = observe(shared, deadline);
    let mut state = shared.state();
    state.board.end(&why);
    if let Some(link) = state.link.take() {
        link.connection.forget();
        link.connection.shut();
    }
    state.done = true;
    drop(state);
    shared.notify();
}

/// Everything, until there is nothing more to see; why.
fn observe(shared: &Arc<Shared>, deadline: Instant) -> String {
    match look(shared, deadline) {
        Found::There => {}
        Found::Stopped => return String::from("the observer was dropped"),
        Found::Nobody(why) => return why,
        Found::Dead(end) => return stand_in(shared, &end, deadline),
    }
    let mut story = String::new();
    loop {
        let coordinator = shared.state().coordinator;
        let (why, patience) = match watch(shared, coordinator) {
            Seen::Stopped => return farewell(shared),
            Seen::GoesOn(epoch) => {
                go_on(shared, epoch);
                continue;
            }
            Seen::Dead(end) => (tell_all(shared, coordinator, &end), SUCCESSION),
            Seen::Broken(why) => {
                // The coordinator may be well, and only the connection broken.
                if is_there_again(shared, coordinator) {
                    continue;
                }
                let story = format!("rank {coordinator} is gone: {why}");
                let departure = Departure::Lost(why);
                shared.state().board.gone(coordinator, departure);
                (story, SUCCESSION)
            }
            Seen::Over(how) => (how, LEAVING),
        };
        if !story.is_empty() {
            story.push_str("; then ");
        }
        story.push_str(&why);
        if !follow(shared, Instant::now() + patience) {
            return story;
        }
    }
}

/// Whether the coordinator can be had once more.
fn is_there_again(shared: &Arc<Shared>, coordinator: usize) -> bool {
    let soon = Instant::now() + TRY;
    if coordinator == 0 {
        return look_again(shared, soon);
    }
    let (size, door) = {
        let board = &shared.state().board;
        (board.size(), board.doors(coordinator).into_iter().next())
    };
    match door {
        Some((rank, door)) if rank == coordinator => {
            matches!(knock(shared, rank, &door, size, soon), Knocked::Met)
        }
        _ => false,
    }
}

/// Whether rank 0 lets this observer in again. At its address, another rank may have taken over meanwhile.
fn look_again(shared: &Arc<Shared>, deadline: Instant) -> bool {
    let address = &shared.rendezvous.address;
    let (job, size) = {
        let state = shared.state();
        (state.job(&shared.rendezvous), state.board.size())
    };
    let several = matches!(address, Address::Tcp(place) if place.is_range());
    let mut pause = Duration::from_millis(2);
    for turn in 0.. {
        let limit = deadline.min(Instant::now() + TRY);
        let claim = Claim::observer(size);
        let error = match client::attempt(address, &job, claim, turn, limit) {
            Tried::Met(met) => return enter(shared, met),
            Tried::Refused(_) => return false,
            Tried::Follows { why, .. } => std::io::Error::other(why),
            Tried::NotYet(error, _) => error,
        };
        let mut state = shared.state();
        // Rank 0 is not coming back, unless it is at another port.
        let refused = error.kind() == std::io::ErrorKind::ConnectionRefused
            || error.kind() == std::io::ErrorKind::NotFound;
        if state.stop || Instant::now() >= deadline || (refused && !several) {
            return false;
        }
        shared.wait(&mut state, Instant::now() + pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
    unreachable!("the loop ends at the deadline")
}

/// Somebody has let this observer in: from now on it hears that rank, of that epoch. Whether it does.
fn enter(shared: &Arc<Shared>, met: Met) -> bool {
    let ear;
    {
        let mut state = shared.state();
        state.broken = None;
        state.coordinator = met.by;
        state.set_epoch(met.epoch);
        state.board.connected = true;
        let before = state.link.take();
        ear = Ear::new(shared, &mut state);
        drop(state);
        if let Some(before) = before {
            let goodbye = Request::Goodbye.encode(u64::MAX);
            before.connection.enqueue(goodbye);
            before.connection.flush_quietly();
            before.connection.forget();
            before.connection.shut();
        }
    }
    let sink = ear as Arc<dyn Sink>;
    match Reader::start(met.connection, met.decoder, sink) {
        Ok(reader) => {
            arrive(shared, reader);
            true
        }
        Err(_) => false,
    }
}

/// What asking at a rank's door for the coordinator came to.
enum Knocked {
    /// It coordinates, and this observer hears it from now on.
    Met,
    /// It follows another.
    Follows(usize),
    Nobody,
}

fn knock(shared: &Arc<Shared>, rank: usize, door: &str, size: usize, deadline: Instant) -> Knocked {
    let Some(address) = launcher::place(door) else {
        return Knocked::Nobody;
    };
    let claim = Claim::follower(size);
    let job = shared.state().job(&shared.rendezvous);
    let limit = deadline.min(Instant::now() + TRY);
    match client::attempt(&address, &job, claim, 0, limit) {
        Tried::Met(met) if met.by == rank => match enter(shared, met) {
            true => Knocked::Met,
            false => Knocked::Nobody,
        },
        Tried::Met(met) => {
            met.connection.shut();
            Knocked::Nobody
        }
        Tried::Follows { rank: by, .. } => Knocked::Follows(by),
        Tried::Refused(_) | Tried::NotYet(..) => Knocked::Nobody,
    }
}

/// Finds the rank that takes over: the lowest whose door is open. Whether there is one.
fn follow(shared: &Arc<Shared>, deadline: Instant) -> bool {
    let mut pause = Duration::from_millis(4);
    loop {
        let (doors, size) = {
            let state = shared.state();
            if state.stop {
                return false;
            }
            (state.board.doors(state.coordinator + 1), state.board.size())
        };
        let mut anybody = false;
        for (rank, door) in doors {
            match knock(shared, rank, &door, size, deadline) {
                Knocked::Met => return true,
                // It has not heard yet that it is next.
                Knocked::Follows(by) if by <= rank => {
                    anybody = true;
                    break;
                }
                Knocked::Follows(_) => anybody = true,
                Knocked::Nobody => {}
            }
        }
        if !anybody || Instant::now() >= deadline {
            return false;
        }
        shared.wait(&mut shared.state(), Instant::now() + pause);
        pause = (pause * 2).min(Duration::from_millis(100));
    }
}

enum Found {
    There,
    Stopped,
    Nobody(String),
    /// Rank 0's process ended before it was there.
    Dead(ProcessEnd),
}

fn look(shared: &Arc<Shared>, deadline: Instant) -> Found {
    let rendezvous = &shared.rendezvous;
    let mut search = Search::new(rendezvous, Claim::onlooker(rendezvous.world_size));
    let mut pause = Duration::from_millis(2);
    loop {
        let is_alive = match search.step(deadline) {
            Looked::Met(met, _) => {
                return match enter(shared, met) {
                    true => Found::There,
                    false => Found::Nobody(String::from("the system has no room for a connection")),
                };
            }
            Looked::Refused(why) => return Found::Nobody(why),
            Looked::Alive(_) => true,
            Looked::Nobody(_) => false,
        };
        let mut state = shared.state();
        if state.stop {
            return Found::Stopped;
        }
        if search.has_lead() {
            continue;
        }
        let is_numbered = state.is_numbered();
        let mut words = state.words.iter();
        let word = words.find(|word| word.rank == 0 && is_numbered);
        // Where others answer, rank 0 was a rank of an epoch before.
        if let Some(word) = word.filter(|_| !is_alive) {
            return Found::Dead(word.end.clone());
        }
        if Instant::now() >= deadline {
            return Found::Nobody(search.failure());
        }
        shared.wait(&mut state, Instant::now() + pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

/// Goes on with the ranks. That may come to nothing, when one dies on the way: then the epoch before is what there
/// is, and the ranks say when they try again.
fn go_on(shared: &Arc<Shared>, epoch: u64) {
    let begun = Instant::now();
    let (mut rendezvous, mut deadline) = (shared.rendezvous.clone(), begun + GOING_ON);
    rendezvous.job.epoch = epoch;
    {
        let state = shared.state();
        // It takes what it listens at along.
        let doors = state.board.doors(state.coordinator);
        let door = doors.first().and_then(|(_, at)| launcher::place(at));
        rendezvous.others.extend(door);
    }
    let mut search = Search::new(&rendezvous, Claim::onlooker(0));
    let mut pause = Duration::from_millis(1);
    loop {
        match search.step(deadline) {
            Looked::Met(met, _) => {
                enter(shared, met);
                return;
            }
            Looked::Alive(_) if search.has_lead() => continue,
            Looked::Alive(_) | Looked::Nobody(_) | Looked::Refused(_) => {}
        }
        let mut state = shared.state();
        let is_other = state.next != Some(epoch);
        // Where the coordinator is gone, the ranks may still be in the epoch before, and have to hear how.
        if state.broken.is_some() {
            deadline = deadline.min(begun + TRY);
        }
        if is_other || state.stop || Instant::now() >= deadline {
            if !is_other {
                state.next = None;
            }
            return;
        }
        shared.wait(&mut state, Instant::now() + pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

/// Says what was to be said before.
fn arrive(shared: &Arc<Shared>, reader: Arc<Reader>) {
    let mut state = shared.state();
    if state.broken.is_none() {
        state.link = Some(reader);
        state.watch_started();
    }
    state.was_there = true;
    for index in 0..state.words.len() {
        if !state.words[index].told {
            state.tell(index);
        }
    }
    drop(state);
    shared.notify();
}

enum Seen {
    Stopped,
    /// To that epoch.
    GoesOn(u64),
    /// The coordinator's process has ended, as its parent says; nobody else has told the ranks.
    Dead(ProcessEnd),
    Broken(Lost),
    /// It has told the ranks itself.
    Over(String),
}

fn watch(shared: &Arc<Shared>, coordinator: usize) -> Seen {
    let mut patience: Option<Instant> = None;
    let mut state = shared.state();
    loop {
        let now = Instant::now();
        if let Some(epoch) = state.next {
            return Seen::GoesOn(epoch);
        }
        if let Some(departure) = state.board.departure(coordinator)
            && (state.broken.is_some() || state.link.is_none())
        {
            return Seen::Over(format!(
                "rank {coordinator} has ended the world: {departure}"
            ));
        }
        let is_its = |rank, pid| state.rank_now(rank, pid) == Some(coordinator);
        let mut words = state.words.iter();
        let word = words.find(|word| !word.told && is_its(word.rank, word.pid));
        let has_parent = state.started.iter().any(|&(rank, pid)| is_its(rank, pid));
        match (&state.broken, word) {
            (Some(_), Some(word)) => return Seen::Dead(word.end.clone()),
            (Some(why), None) => {
                // The parent hears of it at the same moment.
                if !has_parent || patience.is_some_and(|until| until <= now) {
                    return Seen::Broken(why.clone());
                }
                patience.get_or_insert(now + WORD);
            }
            (None, Some(word)) if state.board.pid(coordinator) == Some(word.pid) => {
                // What it has said before its end is still to be read, and the connection then ends,
                // unless a child of it holds it.
                if patience.is_some_and(|until| until <= now) {
                    return Seen::Dead(word.end.clone());
                }
                patience.get_or_insert(now + WORD / 3);
            }
            // Another process may have been meant: the connection decides.
            (None, _) => {
                if state.stop {
                    return Seen::Stopped;
                }
            }
        }
        let until = patience.unwrap_or(now + Duration::from_secs(3600));
        shared.wait(&mut state, until);
    }
}

/// The last words are heard before the goodbye.
fn farewell(shared: &Arc<Shared>) -> String {
    let deadline = Instant::now() + Duration::from_secs(1);
    let mut state = shared.state();
    while state.words.iter().any(|word| !word.told)
        && state.link.is_some()
        && Instant::now() < deadline
    {
        shared.wait(&mut state, deadline);
    }
    let link = state.link.take();
    drop(state);
    if let Some(link) = link {
        link.connection.enqueue(Request::Goodbye.encode(u64::MAX));
        let _ = link
            .connection
            .drain(Instant::now() + Duration::from_secs(1));
        link.connection.forget();
        link.connection.shut();
    }
    String::from("the observer was dropped")
}

/// Tells every rank at its own door how the coordinator ended.
fn tell_all(shared: &Arc<Shared>, coordinator: usize, end: &ProcessEnd) -> String {
    let (doors, pid, size) = {
        let state = shared.state();
        (
            state.board.doors(coordinator + 1),
            state.board.pid(coordinator).unwrap_or_default(),
            state.board.size(),
        )
    };
    let deadline = Instant::now() + TELLING;
    let tellers = doors.len().min(TELLERS);
    let rest = Mutex::new(doors.into_iter());
    let tell_some = || {
        loop {
            let Some((_, door)) = rest.lock().next() else {
                break;
            };
            let word = (coordinator, pid, end);
            if let Err(why) = tell(shared, &door, word, size, deadline) {
                tracing::warn!(name: "nccl.rendezvous.trouble", target: "nccl", what = "end", door, why, "a rank was not told of the coordinator's end");
            }
        }
    };
    threads::together(
        tellers,
        "nccl-teller",
        "to tell several ranks at once",
        tell_some,
    );
    let lost = Lost::from(end.clone());
    let story = format!("rank {coordinator} is gone: {lost}");
    let mut state = shared.state();
    state.board.gone(coordinator, Departure::Lost(lost));
    for index in 0..state.words.len() {
        let Word { rank, pid, .. } = state.words[index];
        let is_its = state.rank_now(rank, pid) == Some(coordinator);
        state.words[index].told |= is_its;
    }
    story
}

fn tell(
    shared: &Shared,
    door: &str,
    (rank, pid, end): (usize, u64, &ProcessEnd),
    size: usize,
    deadline: Instant,
) -> Result<(), String> {
    let address = launcher::place(door).ok_or("it has no address")?;
    let job = shared.state().job(&shared.rendezvous);
    match client::attempt(&address, &job, Claim::observer(size), 0, deadline) {
        Tried::Met(Met {
            connection,
            mut decoder,
            ..
        }) => {
            let request = Request::Ended {
                rank,
                pid,
                end: end.clone(),
            };
            connection.enqueue(request.encode(0));
            let told = connection
                .drain(deadline)
                .and_then(|()| connection.expect(&mut decoder, deadline));
            connection.shut();
            told.map(drop).map_err(|error| error.to_string())
        }
        Tried::Refused(why) | Tried::Follows { why, .. } => Err(why),
        Tried::NotYet(error, _) => Err(error.to_string()),
    }
}

/// Listens where rank 0 would have, and tells those who come that it will not.
fn stand_in(shared: &Arc<Shared>, end: &ProcessEnd, deadline: Instant) -> String {
    let rendezvous = &shared.rendezvous;
    let lost = Lost::from(end.clone());
    let over = format!("rank 0 never came: {lost}");
    let departure = Departure::Lost(lost.clone());
    shared.state().board.gone(0, departure);
    shared.notify();
    let size = rendezvous.world_size;
    if size == 0 {
        return over;
    }
    let enough = |hub: &Hub| {
        let mut state = shared.state();
        for word in state.words.iter_mut().filter(|word| !word.told) {
            word.told = true;
            if word.rank != 0 && word.rank < size {
                hub.leave(word.rank, Departure::Lost(word.end.clone().into()));
            }
        }
        if state.stop || Instant::now() >= deadline {
            return true;
        }
        shared.wait(&mut state, Instant::now() + Duration::from_millis(20));
        false
    };
    match stand_in_for_rank_0(rendezvous, Departure::Lost(lost), enough) {
        Ok(()) => over,
        Err(error) => format!("{over}; {error}"),
    }
}
