//! Adds ranks to a communicator: its ranks keep their numbers, and the new ranks follow.
//!
//! Each rank of the communicator passes it to [`Communicator::grow`]; the new ranks build a communicator of the same
//! name. All meet in one round of their world (`init_exchange.rs`), and agree on one of two ways:
//!
//! ```text
//! all have ncclCommGrow, the first ranks all bring the same one, and it lives ──▶ ncclCommGrow
//! otherwise                                                                   ──▶ a new communicator
//! ```
//!
//! If calls block, the child that carries the data, and not the old idle parent, grows into the idle parent of the new
//! communicator. A communicator that NCCL grows from one that was split with shared resources uses that one's proxy, which
//! accepts no connections from new ranks (`initTransportsRank`, init.cc; `nccl-emulator/tests/real_modes.rs`).
//!
//! In NCCL, the first rank opens a listener for the new ranks, and informs the last old rank through the old
//! communicator. Each rank holds the lock of the old communicator until the new one is ready, so that no other exchange
//! interferes. If the grow fails, the old communicator is unreliable and is aborted. The new communicator is aborted
//! first, because the NCCL thread that makes it uses the old one as long as it runs. If that thread does not end,
//! neither communicator is used any more.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl_sys as sys;

use super::CommunicatorBuilder;
use super::async_out::AsyncOut;
use super::init::{Begin, PreparedInit};
use super::init_message::InitMessage;
use super::start::{BINDING, CallLimit, SendConfig, as_int, call_result};
use super::{ResizeWay, Resized};
use crate::abort::AbortSignal;
use crate::communicator::free::discard;
use crate::communicator::handle::{HandleGuard, RawComm};
use crate::communicator::{Communicator, EndReason, Inner};
use crate::cuda_driver;
use crate::detached_call::{self, NoResult};
use crate::error::{Error, Result};
use crate::ffi;
use crate::peers::{Peers, WorldParameters};
use crate::single_rank;
use crate::state::{PartialInit, State};
use crate::time::deadline_after;
use crate::unique_id::UniqueId;

/// Makes a communicator of all ranks of the world of `parameters`, in which the ranks of `comm` come first.
pub(super) fn grow(
    comm: &Communicator,
    parameters: WorldParameters<'_>,
    name: &str,
) -> Result<Resized> {
    let world = Arc::clone(&parameters.peers);
    let builder = CommunicatorBuilder::of_grow(name, parameters, comm);
    let (communicator, way) = builder.build_from(Some(comm))?;
    // There is a way, because this rank passes a communicator.
    let way = way.unwrap_or(ResizeWay::Native);
    tracing::info!(name: "nccl.comm.grown", target: "nccl", comm = name, rank = world.rank(), world_rank = world.rank(), launcher_rank = communicator.inner.roster().launcher_rank(world.rank()), world_ranks = communicator.inner.roster().world_ranks(), %way, nranks = world.size(), "a communicator has grown");
    Ok(Resized { communicator, way })
}

/// Returns why this rank cannot use `ncclCommGrow`, with the communicator that it passes, if any.
pub(super) fn cannot_grow(
    prepared: &PreparedInit,
    parent: Option<&Communicator>,
    world: &dyn Peers,
) -> Option<String> {
    if let Err(error) = prepared.library().function(sys::Api::ncclCommGrow) {
        return Some(error.kind().to_string());
    }
    let parent = &parent?.inner;
    if single_rank::is(&parent.library) {
        return Some(String::from(
            "the communicator is of a world of one rank, of which NCCL does not know",
        ));
    }
    let (rank, size) = (parent.rank, parent.world_size);
    if parent.lifecycle.get() != State::Ready {
        let state = parent.lifecycle.get().text();
        return Some(format!("the communicator is {state}"));
    }
    if rank != world.rank() {
        return Some(format!(
            "it is rank {rank} of the communicator and would be rank {}, but NCCL lets it keep its number",
            world.rank()
        ));
    }
    if size >= world.size() {
        return Some(String::from(
            "there is no new rank, and NCCL adds at least one",
        ));
    }
    if size > 1 && parent.supervisor.is_none() {
        return Some(String::from(
            "the ranks of the communicator did not meet in a world, and cannot tell that it is the same",
        ));
    }
    if rank == 0 && std::env::var_os("NCCL_COMM_ID").is_some() {
        return Some(String::from(
            "NCCL_COMM_ID is set in its environment, with which NCCL makes no token to grow",
        ));
    }
    if parent.has_blocking_calls && parent.abort_flag_parent.is_none() {
        return Some(String::from("its calls block, and could not be ended"));
    }
    None
}

/// Returns the way that follows from the messages of all ranks; `None` if no rank passes a communicator to grow.
pub(super) fn way(messages: &[InitMessage]) -> Option<ResizeWay> {
    messages.iter().find(|messages| messages.parent.is_some())?;
    let anew = |rank: usize, why: &str| {
        let why = format!("on rank {rank}: {why}");
        Some(ResizeWay::Anew { why })
    };
    let Some(parent) = &messages[0].parent else {
        return anew(0, "it brings no communicator that could grow");
    };
    for (rank, messages) in messages.iter().enumerate() {
        if let Some(why) = &messages.cannot_grow {
            return anew(rank, why);
        }
        match &messages.parent {
            None if rank < parent.1 => return anew(rank, "it brings no communicator to grow"),
            Some(_) if rank >= parent.1 => {
                return anew(rank, "it brings a communicator that rank 0 does not have");
            }
            Some(other) if other != parent => {
                return anew(rank, "it brings another communicator than rank 0");
            }
            _ => {}
        }
    }
    Some(ResizeWay::Native)
}

/// A communicator that grows; its lock is held, so that no other call uses it.
pub(super) struct Growing<'p> {
    parent: &'p Arc<Inner>,
    guard: HandleGuard<'p>,
    raw: RawComm,
    /// Whether a call on the communicator has not returned.
    lost: Cell<bool>,
    /// Whether this value began the communicator's abort, and has to carry it out.
    ends: Cell<bool>,
}

const TOKEN: &str = "ncclCommGetUniqueId";
const CALL: &str = "ncclCommGrow";

impl<'p> Growing<'p> {
    pub(super) fn begin(parent: &'p Arc<Inner>, deadline: Instant) -> Result<Self> {
        let timeout = deadline.saturating_duration_since(Instant::now()) / 2;
        let (guard, _) = parent.handle.lock_within(None, timeout)?;
        let raw = parent.lifecycle.usable(guard.raw);
        let raw = raw.ok_or_else(|| parent.out_of_use())?;
        Ok(Self {
            parent,
            guard,
            raw,
            lost: Cell::new(false),
            ends: Cell::new(false),
        })
    }

    /// Makes the token for the new ranks; on rank 0.
    pub(super) fn token(&self, timeout: Duration, signal: &AbortSignal) -> Result<UniqueId> {
        let library = self.parent.library.clone();
        let get = library.function(sys::Api::ncclCommGetUniqueId)?;
        let (raw, context) = (self.raw, Arc::clone(&self.parent.context));
        let made = detached_call::run(
            deadline_after(timeout),
            interrupted_after_grace(|| {
                signal.is_aborted() || self.parent.lifecycle.get().abort_has_begun()
            }),
            move || {
                cuda_driver::bind(&context).map_err(Error::cuda(BINDING))?;
                let raw = raw;
                let mut token = UniqueId::from_bytes([0; UniqueId::LEN]).raw();
                // SAFETY: the communicator's lock is held until this call returns, or for ever if it does not, so no
                // other thread frees or calls the communicator; `token` is valid for the call.
                let code = unsafe { get(raw.as_ptr(), &mut token) };
                ffi::check(&library, TOKEN, code)?;
                Ok(UniqueId::from_bytes(token.internal.map(ffi::byte)))
            },
            drop,
        );
        made.map_err(|not_back| {
            self.lost.set(!matches!(not_back, NoResult::NoThread(_)));
            not_back.into_error(TOKEN, timeout)
        })?
    }

    /// Announces that the grow fails because of this rank, before the other ranks notice the consequences.
    pub(super) fn tell(&self, error: &Error) {
        if self.parent.begin_abort(EndReason::from(error)) {
            self.ends.set(true);
        }
    }

    /// Ends the parent of a failed grow; `freed` is whether NCCL has freed the unfinished communicator.
    pub(super) fn fail(self, error: &Error, freed: bool) {
        self.tell(error);
        let Self {
            parent,
            guard,
            lost,
            ends,
            ..
        } = self;
        if freed && !lost.get() {
            drop(guard);
            match ends.get() {
                true => parent.carry_out_abort(),
                false => parent.wait_for_end(),
            };
            return;
        }
        // An NCCL thread still uses the communicator. A thread that waits for the lock to free it gives up at its
        // timeout.
        std::mem::forget(guard);
        if ends.get() {
            parent.carry_out_abort_in_background();
        }
    }
}

/// Returns true a while after `interrupted` does: most calls return within that time, and giving up a call also gives
/// up the old communicator.
fn interrupted_after_grace(interrupted: impl Fn() -> bool) -> impl Fn() -> bool {
    const WHILE: Duration = Duration::from_secs(1);
    let since: Cell<Option<Instant>> = Cell::new(None);
    move || {
        if since.get().is_none() && interrupted() {
            since.set(Some(Instant::now()));
        }
        since.get().is_some_and(|since| since.elapsed() > WHILE)
    }
}

/// Makes the communicator with `ncclCommGrow`; `growing` is the communicator that grows, unless this rank is new.
pub(super) fn join(
    prepared: PreparedInit,
    growing: Option<Growing<'_>>,
    id: UniqueId,
    deadline: Instant,
) -> Result<Arc<Inner>> {
    let made = Arc::new(AsyncOut::default());
    let parent = growing.as_ref().map(|growing| growing.parent);
    let is_void = || parent.is_some_and(|parent| parent.lifecycle.get().abort_has_begun());
    let raw = growing.as_ref().map(|growing| growing.raw);
    let prepared = prepared.begun_by(begin(raw, id, &made));
    let growing = RefCell::new(growing);
    let grown = prepared.join_or(&id, deadline, is_void, |error, freed| match freed {
        None => {
            if let Some(growing) = &*growing.borrow() {
                growing.tell(error);
            }
        }
        Some(freed) => {
            if let Some(growing) = growing.take() {
                growing.fail(error, freed);
            }
        }
    })?;
    // SAFETY: the communicator is ready, so that NCCL does not write there any more.
    unsafe { Arc::decrement_strong_count(Arc::as_ptr(&made)) };
    Ok(grown)
}

/// Returns the call, which runs on a thread that can be given up, because the call may wait: it does so on the first
/// and on the last rank of the old communicator.
fn begin(parent: Option<RawComm>, id: UniqueId, made: &Arc<AsyncOut>) -> Begin {
    let made = Arc::clone(made);
    // NCCL writes there until the new communicator is ready or freed; if neither happens, the memory is leaked.
    std::mem::forget(Arc::clone(&made));
    Box::new(move |inner, config, limits| {
        let Inner {
            library,
            rank,
            world_size,
            ..
        } = inner;
        let nothing = |error| (PartialInit::Nothing, error);
        let grow = library.function(sys::Api::ncclCommGrow).map_err(nothing)?;
        let world_size = as_int(*world_size).map_err(nothing)?;
        // Of the old ranks, only rank 0, which made the token, passes it; NCCL passes it on to the others.
        let (token, rank) = match (parent, as_int(*rank).map_err(nothing)?) {
            (Some(_), 0) => (Some(id.raw()), -1),
            (Some(_), _) => (None, -1),
            (None, rank) => (Some(id.raw()), rank),
        };
        let CallLimit {
            context,
            deadline,
            timeout,
            interrupted,
        } = limits;
        let mut config = SendConfig(*config);
        let (theirs, context, freeing) = (library.clone(), Arc::clone(context), library.clone());
        let called = detached_call::run(
            deadline,
            interrupted_after_grace(interrupted),
            move || {
                cuda_driver::bind(&context).map_err(Error::cuda(BINDING))?;
                let config = &mut config;
                let parent = parent.map_or(std::ptr::null_mut(), RawComm::as_ptr);
                let token = token.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
                // SAFETY: the parent is null, or its lock is held until the new communicator is ready or
                // freed; token and config are valid for the call, and the strings of the config are never
                // freed; `made` stays valid for as long as NCCL writes to it.
                let code = unsafe {
                    grow(
                        parent,
                        world_size,
                        token,
                        rank,
                        made.as_out_pointer(),
                        &mut config.0,
                    )
                };
                match (ffi::check(&theirs, CALL, code), made.take()) {
                    (Ok(_), Some(raw)) => Ok((raw, Ok(()))),
                    (Ok(_), None) => Err(ffi::missing(&theirs, CALL).into()),
                    (Err(failure), Some(raw)) => Ok((raw, Err(failure.into()))),
                    (Err(failure), None) => Err(failure.into()),
                }
            },
            move |late: Result<(RawComm, Result<()>)>| {
                if let Ok((raw, _)) = late {
                    discard(&freeing, raw, None);
                }
            },
        );
        call_result(called, CALL, timeout, nothing)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(parent: Option<(&str, usize)>) -> InitMessage {
        InitMessage {
            parent: parent.map(|(key, size)| (key.to_owned(), size)),
            ..InitMessage::default()
        }
    }

    #[test]
    fn ncclcommgrow_is_used_where_the_first_ranks_bring_the_same_one_and_the_others_none() {
        let old = || messages(Some(("a", 2)));
        assert_eq!(way(&[messages(None), messages(None)]), None);
        assert_eq!(
            way(&[old(), old(), messages(None)]),
            Some(ResizeWay::Native)
        );
        let mut unable = messages(None);
        unable.cannot_grow = Some(String::from("it is too old"));
        for (ranks, why) in [
            (
                vec![messages(None), old(), messages(None)],
                "rank 0: it brings no",
            ),
            (
                vec![old(), messages(None), messages(None)],
                "rank 1: it brings no",
            ),
            (
                vec![old(), old(), old()],
                "rank 2: it brings a communicator that",
            ),
            (
                vec![old(), messages(Some(("b", 2))), messages(None)],
                "rank 1: it brings another",
            ),
            (
                vec![old(), messages(Some(("a", 3))), messages(None)],
                "rank 1: it brings another",
            ),
            (vec![old(), old(), unable], "rank 2: it is too old"),
        ] {
            let way = way(&ranks);
            let text = way.as_ref().map(ToString::to_string).unwrap_or_default();
            assert!(text.contains(why), "{text}");
        }
    }
}
