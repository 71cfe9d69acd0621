//! A communicator without some of its ranks.
//!
//! Two ways lead there, and the ranks that stay agree on one of them over their line, before any of them
//! asks NCCL:
//!
//! ```text
//! all have ncclCommShrink, the parent lives on all, nobody is gone ──▶ ncclCommShrink
//! otherwise                                                       ──▶ a token, and a new communicator
//! ```
//!
//! Of a communicator that a rank's death has ended there is nothing to shrink: an error is handed out only
//! when nobody writes into this rank's memory any more, and only an abort makes sure of that. So after a death
//! it is always the second way. The first is for a rank that lives and is not wanted any more; NCCL then
//! reuses what it knows of the machine.
//!
//! A shrink that aborts ends what is under way, and with it the parent: NCCL lowers the parent's abort flag
//! again, so that a destroy would wait for the rank that was left out, and only an abort does not. The parent
//! is aborted after all ranks have their new one, because the abort of one is announced to all.
//!
//! One that was revoked has been stopped on all ranks already, and can be shrunk as if it were idle.

use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nccl_sys as sys;

use super::free::{free, within};
use super::handle::{RawComm, Unsettled, settle};
use super::init::{Begin, Prepared};
use super::lifecycle::{Outcome, Why};
use super::state::{Left, Way};
use super::{Communicator, CommunicatorBuilder, Inner, State, lock};
use crate::error::{Error, ErrorKind, Result};
use crate::ffi;
use crate::operation::{OperationKind, Shape};
use crate::rendezvous::{Fields, Line, put_bytes, put_index};
use crate::supervision::{Board, Cause};
use crate::time::deadline_after;
use crate::unique_id::UniqueId;

/// What a shrink has made, and how.
///
/// ```
/// # fn example(shrunk: nccl::Shrunk) {
/// println!("{} ranks are left: {}", shrunk.communicator.world_size(), shrunk.way);
/// # }
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct Shrunk {
    /// Of the ranks that are left, in their order.
    pub communicator: Communicator,
    /// How it was made; the same on all of them.
    pub way: ShrinkWay,
}

/// How a shrink was done.
///
/// ```
/// # fn example(way: &nccl::ShrinkWay) {
/// if let nccl::ShrinkWay::Anew { why, .. } = way {
///     println!("ncclCommShrink was not used: {why}");
/// }
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShrinkWay {
    /// By `ncclCommShrink`.
    Native,
    /// As a new communicator, from a token of its own.
    #[non_exhaustive]
    Anew {
        /// Why NCCL's own way was not possible.
        why: String,
    },
}

impl fmt::Display for ShrinkWay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Native => f.write_str("by ncclCommShrink"),
            Self::Anew { why } => write!(f, "as a new communicator, because {why}"),
        }
    }
}

/// Between two looks at who is left.
const PAUSE: Duration = Duration::from_millis(5);

impl Communicator {
    /// Makes a communicator without the ranks `without`, and without those that are gone.
    ///
    /// All ranks that are left have to call it with the same ranks; those that are left out do not, and drop
    /// or abort this communicator. The new ranks are in the order of the old ones. It has this one's stream
    /// and limits.
    ///
    /// Nothing may be under way on this communicator: wait for its operations first. It stays as it is. Also
    /// when it has ended, because a rank died: then the ranks that live make a new one.
    ///
    /// # Errors
    /// As [`CommunicatorBuilder::build`]. [`ErrorKind::Rendezvous`] names ranks that did not come within the
    /// init limit, or came with other ranks to leave out; [`ErrorKind::InvalidConfig`] for a communicator
    /// whose ranks did not meet in a [`World`](crate::World), and on a rank that is to be left out.
    ///
    /// Wraps `ncclCommShrink` where that is possible ([`Shrunk::way`]).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let context = cudarc::driver::CudaContext::new(0)?;
    /// # let streams = [context.new_stream()?, cudarc::driver::CudaContext::new(1)?.new_stream()?];
    /// let comms = nccl::Communicator::init_all("both", &streams)?;
    /// let shrunk = comms[1].shrink("without rank 0", &[0])?;
    /// assert_eq!(shrunk.communicator.world_size(), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn shrink(&self, name: &str, without: &[usize]) -> Result<Shrunk> {
        self.shrink_as(name, without, false)
    }

    /// As [`shrink`](Self::shrink), when operations may be under way that will not end: they end now, and so
    /// does this communicator, on all ranks, those that are left out included.
    ///
    /// # Errors
    /// As [`shrink`](Self::shrink).
    ///
    /// Wraps `ncclCommShrink` with `NCCL_SHRINK_ABORT`, and `ncclCommAbort`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let context = cudarc::driver::CudaContext::new(0)?;
    /// # let streams = [context.new_stream()?, cudarc::driver::CudaContext::new(1)?.new_stream()?];
    /// let comms = nccl::Communicator::init_all("both", &streams)?;
    /// let shrunk = comms[1].shrink_aborting("without rank 0", &[0])?;
    /// assert!(comms[1].finalize().is_err(), "it has ended");
    /// # Ok(())
    /// # }
    /// ```
    pub fn shrink_aborting(&self, name: &str, without: &[usize]) -> Result<Shrunk> {
        self.shrink_as(name, without, true)
    }

    fn shrink_as(&self, name: &str, without: &[usize], aborting: bool) -> Result<Shrunk> {
        let started = Instant::now();
        self.shrink_in(name, without, aborting).map_err(|error| {
            error.during(|| {
                let inner = &self.inner;
                inner.operation(OperationKind::Shrink, Shape::default(), None, started)
            })
        })
    }

    fn shrink_in(&self, name: &str, without: &[usize], aborting: bool) -> Result<Shrunk> {
        let inner = &self.inner;
        for &rank in without {
            super::init::check_ranks(rank, self.world_size())?;
        }
        let invalid = |reason: &str| {
            Error::new(ErrorKind::InvalidConfig {
                field: "without",
                reason: reason.to_owned(),
            })
        };
        if without.contains(&self.rank()) {
            return Err(invalid(
                "this rank is to be left out: it does not call shrink, and drops or aborts its \
                 communicator",
            ));
        }
        let board = inner.board.as_ref().ok_or_else(|| {
            invalid("the ranks of this communicator did not meet in a world, and cannot agree")
        })?;
        let deadline = deadline_after(inner.timeouts.init);
        let agreed = self.agree(board, name, without, aborting, deadline)?;
        let way = agreed.way();
        let prepared = agreed.prepared?;
        if let Some((member, why)) = agreed.failed {
            return Err(Error::rendezvous(format!(
                "rank {member} of {:?} cannot take part in {name:?}: {why}",
                self.name()
            )));
        }
        tracing::info!(name: "nccl.comm.shrinking", target: "nccl", comm = name, %way, nranks = agreed.ranks.len(), "shrinking");
        let made = match &way {
            ShrinkWay::Native => self.shrink_native(prepared, agreed.id, aborting, &agreed.places),
            ShrinkWay::Anew { .. } => {
                if aborting {
                    // Those that are left out hear of it.
                    inner.abort(&*self.ended_by(&agreed.places));
                }
                self.shrink_anew(prepared, board, name, &agreed.ranks, deadline)
            }
        }?;
        if let (ShrinkWay::Native, true, false) = (&way, aborting, inner.is_revoked()) {
            // Not before all have theirs: from then on it is not needed any more.
            let topic = topic("shrunk", board.key());
            let all_have_it =
                board
                    .line()
                    .0
                    .round(&topic, Some(&agreed.ranks), &[], deadline, None);
            board.announce(Cause::asked(&self.ended_by(&agreed.places)));
            inner.carry_out_abort();
            all_have_it?;
        }
        let communicator = Self::of(made);
        Ok(Shrunk { communicator, way })
    }

    /// What the other ranks are told of the end of the parent.
    fn ended_by(&self, places: &[usize]) -> String {
        let out: Vec<_> = (0..self.world_size())
            .filter(|rank| !places.contains(rank))
            .collect();
        format!("it was shrunk, and ranks {out:?} are left out")
    }

    /// The ranks that are left tell each other what they can do. Who is gone may be heard of meanwhile.
    fn agree(
        &self,
        board: &Board,
        name: &str,
        without: &[usize],
        aborting: bool,
        deadline: Instant,
    ) -> Result<Agreed> {
        let (line, members) = board.line();
        let topic = topic("shrink", board.key());
        loop {
            let gone: Vec<usize> = line
                .departures()
                .into_iter()
                .map(|(rank, _)| rank)
                .collect();
            let places: Vec<usize> = (0..self.world_size())
                .filter(|place| !without.contains(place) && !gone.contains(&members[*place]))
                .collect();
            let own = places.iter().position(|&place| place == self.rank());
            let own = own.ok_or_else(|| {
                Error::rendezvous("this rank counts as gone: the others have gone on without it")
            })?;
            let ranks: Arc<[usize]> = places.iter().map(|&place| members[place]).collect();
            let prepared = CommunicatorBuilder::of_split(name, own, self, &places)
                .prepare_split(false)
                .map(|(prepared, _)| prepared);
            let said = Said {
                failed: prepared
                    .as_ref()
                    .err()
                    .map(|error| error.kind().to_string()),
                not_native: self.not_native(&places),
                aborting,
                token: token()?,
            };
            match line.round(&topic, Some(&ranks), &said.encode(), deadline, None) {
                Ok(parts) => return Agreed::new(prepared, places, ranks, aborting, &parts),
                // A rank that is gone may be known to some, and not yet to others.
                Err(error) if Instant::now() < deadline && !is_lost(line) => {
                    tracing::debug!(name: "nccl.comm.shrink_again", target: "nccl", %error, "agreeing on a shrink once more");
                    std::thread::sleep(PAUSE);
                }
                Err(error) => {
                    return Err(Error::rendezvous(format!(
                        "the ranks that are to be left do not agree on that: {}; this one leaves out \
                         {without:?} and those that are gone",
                        error.kind()
                    )));
                }
            }
        }
    }

    /// Why this rank cannot go NCCL's own way.
    fn not_native(&self, places: &[usize]) -> Option<String> {
        let inner = &self.inner;
        let version = inner.library.version();
        if let Err(error) = inner.library.function(sys::Api::ncclCommShrink) {
            return Some(error.kind().to_string());
        }
        if inner.phase.get() != State::Ready && !inner.is_revoked() {
            let state = inner.phase.get().text();
            return Some(format!("the communicator is {state}"));
        }
        if inner.blocks {
            return Some(String::from("its calls block, and could not be ended"));
        }
        if places.len() == self.world_size() {
            return Some(format!("NCCL {version} leaves out one rank at least"));
        }
        None
    }

    fn shrink_anew(
        &self,
        prepared: Prepared,
        board: &Board,
        name: &str,
        ranks: &Arc<[usize]>,
        deadline: Instant,
    ) -> Result<Arc<Inner>> {
        let (line, _) = board.line();
        let first = ranks.first() == Some(&line.rank());
        let token = first
            .then(|| UniqueId::new(&self.inner.library))
            .transpose();
        let sealed = match &token {
            Ok(Some(id)) => line.seal(name, id),
            _ => Vec::new(),
        };
        let topic = topic("shrink token", board.key());
        let parts = line.round(&topic, Some(ranks), &sealed, deadline, None);
        // What is wrong here is the better answer on this rank.
        token?;
        let parts = parts?;
        let sealed = parts.first().map(|part| &part[..]).unwrap_or_default();
        if sealed.is_empty() {
            let who = line.describe(ranks.first().copied().unwrap_or_default());
            return Err(Error::rendezvous(format!(
                "{who} could not make a token for {name:?}"
            )));
        }
        let id = line.unseal(name, sealed)?;
        prepared.join(&id, deadline, || false)
    }

    fn shrink_native(
        &self,
        prepared: Prepared,
        id: UniqueId,
        aborting: bool,
        places: &[usize],
    ) -> Result<Arc<Inner>> {
        let parent = &self.inner;
        // One that was revoked has been stopped already.
        let aborting = aborting && !parent.is_revoked();
        if aborting
            && !parent.begin_abort(Why::Quietly("it was shrunk, and what ran on it was ended"))
        {
            return Err(parent.conclude(parent.out_of_use()));
        }
        let limit = parent.timeouts.init;
        let without: Vec<i32> = (0..self.world_size())
            .filter(|rank| !places.contains(rank))
            .map(|rank| rank as i32)
            .collect();
        let made = Arc::new(Slot::default());
        let begin: Begin = {
            let (parent, made) = (Arc::clone(parent), Arc::clone(&made));
            Box::new(move |config| {
                let config = Config(*config);
                let shrunk = within(limit.saturating_add(PATIENCE), "nccl-shrink", move || {
                    parent.shrink_raw(without, config, aborting, &made, limit)
                });
                match shrunk {
                    Some(Ok(raw)) => Ok(raw),
                    Some(Err(unsettled)) => {
                        Err((Left::Nothing, unsettled.into_error("shrinking", limit)))
                    }
                    None => {
                        let error = Unsettled::TimedOut.into_error("ncclCommShrink", limit);
                        Err((Left::Lost, error))
                    }
                }
            })
        };
        let prepared = prepared.begun_by(begin);
        let outcome = prepared.join(&id, deadline_after(limit), || false);
        outcome.inspect_err(|error| {
            // NCCL's rule for a child that was not made: no other follows, and the parent is aborted, which
            // ends what is under way of it.
            let outcome = match aborting {
                true => {
                    // Those that are left out wait for nothing else.
                    if let Some(board) = &parent.board {
                        board.announce(Cause::from(error));
                    }
                    parent.carry_out_abort()
                }
                false => parent.abort(error),
            };
            if outcome == Outcome::Freed
                && let Some(ruin) = made.take()
            {
                let library = parent.library.clone();
                within(parent.timeouts.abort, "nccl-abort", move || {
                    free(&library, Way::Abort, ruin)
                });
            }
        })
    }
}

/// How much longer than its own limit a call may take that looks at its limit itself.
const PATIENCE: Duration = Duration::from_secs(2);

impl Inner {
    /// Asks NCCL, and waits until the parent is at rest. On a thread that may be given up.
    fn shrink_raw(
        &self,
        mut without: Vec<i32>,
        mut config: Config,
        aborting: bool,
        made: &Arc<Slot>,
        limit: Duration,
    ) -> Result<RawComm, Unsettled> {
        const CALL: &str = "ncclCommShrink";
        let failed = Unsettled::Failed;
        let library = &self.library;
        let handle = self.handle.wait_for_it();
        let raw = handle.raw.or_else(|| self.revoked());
        let (Some(raw), Some(shrink)) = (raw, library.api().ncclCommShrink) else {
            return Err(failed(ffi::missing(library, CALL)));
        };
        let bound = self.context.bind_to_thread();
        if bound.is_err() {
            return Err(Unsettled::Interrupted);
        }
        let flags = match aborting {
            true => sys::NCCL_SHRINK_ABORT,
            false => sys::NCCL_SHRINK_DEFAULT,
        };
        // NCCL writes there when the parent comes to rest, which may be after this thread is gone.
        std::mem::forget(Arc::clone(made));
        let count = without.len() as i32;
        // SAFETY: the lock is held, so nobody else calls on `raw`; the list and the config are valid for the
        // call, and the place for as long as the process lives.
        let code = unsafe {
            shrink(
                raw.as_ptr(),
                without.as_mut_ptr(),
                count,
                made.place(),
                &mut config.0,
                flags,
            )
        };
        ffi::check(library, CALL, code).map_err(failed)?;
        // By an abort that another rank asked for, or a rank that died. An abort of our own has begun already.
        let is_revoked = self.is_revoked();
        let interrupted = || match aborting {
            _ if is_revoked => self.abort_signal.is_aborted(),
            true => self
                .board
                .as_ref()
                .is_some_and(|board| board.fault().is_some()),
            false => self.interrupted(),
        };
        settle(library, raw, CALL, deadline_after(limit), interrupted)?;
        // SAFETY: the parent is at rest: NCCL writes no more.
        unsafe { Arc::decrement_strong_count(Arc::as_ptr(made)) };
        made.take()
            .ok_or_else(|| failed(ffi::missing(library, CALL)))
    }
}

/// Where NCCL puts a communicator that it makes in the background.
#[derive(Default)]
struct Slot(Mutex<Place>);

struct Place(std::cell::UnsafeCell<sys::ncclComm_t>);

impl Default for Place {
    fn default() -> Self {
        Self(std::cell::UnsafeCell::new(std::ptr::null_mut()))
    }
}

// SAFETY: a pointer to a communicator, which any thread may have ([`RawComm`]).
unsafe impl Send for Place {}

impl Slot {
    /// For NCCL, which writes before the parent is at rest.
    fn place(&self) -> *mut sys::ncclComm_t {
        lock(&self.0).0.get()
    }

    /// What NCCL has put there; only when the parent is at rest, or freed.
    fn take(&self) -> Option<RawComm> {
        let place = lock(&self.0);
        // SAFETY: the caller's promise: NCCL writes no more, and the lock is held.
        let made = unsafe { std::ptr::replace(place.0.get(), std::ptr::null_mut()) };
        NonNull::new(made).map(RawComm)
    }
}

/// A configuration on its way to another thread.
struct Config(sys::ncclConfig_t);

// SAFETY: the strings that it points to are never freed, nor changed.
unsafe impl Send for Config {}

/// What a rank says before a shrink.
#[derive(Debug, PartialEq, Eq)]
struct Said {
    failed: Option<String>,
    not_native: Option<String>,
    aborting: bool,
    /// Names what is made by NCCL's own way, for which there is no token of NCCL's.
    token: [u8; TOKEN],
}

const TOKEN: usize = 16;

impl Said {
    fn encode(&self) -> Vec<u8> {
        let mut to = Vec::new();
        put_index(&mut to, self.aborting.into());
        put_bytes(&mut to, &self.token);
        for text in [&self.failed, &self.not_native] {
            put_index(&mut to, text.is_some().into());
            put_bytes(&mut to, text.as_deref().unwrap_or_default().as_bytes());
        }
        to
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields(bytes);
        let aborting = fields.number().ok()? != 0;
        let token = fields.bytes().ok()?.try_into().ok()?;
        let mut text = || {
            let is_there = fields.number().ok()? != 0;
            let text = fields.text().ok()?;
            Some(is_there.then_some(text))
        };
        let (failed, not_native) = (text()?, text()?);
        Some(Self {
            failed,
            not_native,
            aborting,
            token,
        })
    }
}

/// What came of it.
struct Agreed {
    prepared: Result<Prepared>,
    /// The ranks that stay, in the parent.
    places: Vec<usize>,
    /// The same, in the line.
    ranks: Arc<[usize]>,
    /// Who cannot take part, and why.
    failed: Option<(usize, String)>,
    not_native: Option<(usize, String)>,
    id: UniqueId,
}

impl Agreed {
    fn new(
        prepared: Result<Prepared>,
        places: Vec<usize>,
        ranks: Arc<[usize]>,
        aborting: bool,
        parts: &[Vec<u8>],
    ) -> Result<Self> {
        let said = parts.iter().map(|part| Said::decode(part));
        let said = said.collect::<Option<Vec<_>>>();
        let said =
            said.ok_or_else(|| Error::rendezvous("a rank said something else to a shrink"))?;
        if let Some(other) = said.iter().position(|said| said.aborting != aborting) {
            return Err(Error::rendezvous(format!(
                "rank {} shrinks another way than this one: all have to call shrink, or all \
                 shrink_aborting",
                places[other]
            )));
        }
        let find = |text: fn(&Said) -> Option<&String>| {
            let mut texts = said.iter().zip(&places);
            texts.find_map(|(said, &place)| Some((place, text(said)?.clone())))
        };
        let mut id = [0; UniqueId::LEN];
        if let Some(first) = said.first() {
            id[..TOKEN].copy_from_slice(&first.token);
        }
        Ok(Self {
            prepared,
            failed: find(|said| said.failed.as_ref()),
            not_native: find(|said| said.not_native.as_ref()),
            places,
            ranks,
            id: UniqueId::from_bytes(id),
        })
    }

    fn way(&self) -> ShrinkWay {
        match &self.not_native {
            None => ShrinkWay::Native,
            Some((rank, why)) => ShrinkWay::Anew {
                why: format!("of rank {rank}: {why}"),
            },
        }
    }
}

fn topic(what: &str, key: &str) -> String {
    format!("{what}/{key}")
}

/// Whether there is no coordinator any more.
fn is_lost(line: &Line) -> bool {
    line.rank() != 0 && line.departures().iter().any(|(rank, _)| *rank == 0)
}

fn token() -> Result<[u8; TOKEN]> {
    let mut token = [0; TOKEN];
    let flags = rustix::rand::GetRandomFlags::empty();
    rustix::rand::getrandom(&mut token[..], flags)
        .map_err(|error| Error::io("getting random numbers")(error.into()))?;
    Ok(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_rank_says_survives_the_way_through_bytes() {
        for failed in [None, Some(String::from("no memory"))] {
            let said = Said {
                failed,
                not_native: Some(String::from("it is too old")),
                aborting: true,
                token: [7; TOKEN],
            };
            let bytes = said.encode();
            assert_eq!(Said::decode(&bytes), Some(said));
            assert_eq!(Said::decode(&bytes[..bytes.len() - 1]), None);
        }
    }
}
