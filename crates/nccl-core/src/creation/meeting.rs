//! The meeting of the ranks of a world, in which they tell each other whether they can take part in a communicator, and
//! get the token with which they meet inside NCCL.
//!
//! So a rank that cannot take part fails the creation on every rank at once; no rank waits for it.
//!
//! ```text
//! all say whether they can ──▶ rank 0 brought no communicator: its token came with that ──▶ a new one
//!                          ──▶ it did, and all can grow it:  a token of the one that grows ──▶ ncclCommGrow
//!                          ──▶ it did, and somebody cannot:  a token, in a second round    ──▶ a new one
//! ```

use std::sync::Arc;
use std::time::Instant;

use super::ResizeWay;
use super::grow::{Growing, cannot_grow, way};
use super::init::Prepared;
use super::said::Said;
use crate::abort::AbortSignal;
use crate::communicator::Communicator;
use crate::communicator::launch_mode::{self, Wish, common_mode};
use crate::envelope::{open_on, seal_on};
use crate::error::{Error, Result};
use crate::peers::{Peers, Unmade};
use crate::unique_id::UniqueId;
use nccl_base::launch_mode::LaunchMode;

/// The input of one rank.
pub(super) struct Meeting<'m> {
    pub(super) peers: &'m dyn Peers,
    pub(super) name: &'m str,
    /// The communicator to grow; `None` on a new rank, or if there is no communicator to grow.
    pub(super) parent: Option<&'m Communicator>,
    pub(super) deadline: Instant,
    pub(super) signal: &'m AbortSignal,
}

/// The result of a meeting.
pub(super) struct Agreed<'m> {
    pub(super) prepared: Prepared,
    pub(super) id: UniqueId,
    /// How it is made; `None` if there is no communicator to grow.
    pub(super) way: Option<ResizeWay>,
    /// The communicator that grows, on its ranks.
    pub(super) growing: Option<Growing<'m>>,
}

impl<'m> Meeting<'m> {
    /// Meets the other ranks; `prepared` has the token on rank 0 of a communicator that does not grow.
    pub(super) fn agree(
        self,
        prepared: Result<(Prepared, Option<UniqueId>)>,
    ) -> Result<Agreed<'m>> {
        let Self { peers, name, .. } = self;
        let own = match &prepared {
            Ok((prepared, id)) => Said {
                mode: prepared.wish().code(),
                obstacle: prepared.obstacle().map(ToString::to_string),
                token: id.as_ref().map_or_else(Vec::new, |id| self.seal(id)),
                parent: self.parent.map(|parent| {
                    let key = parent.key().unwrap_or_default();
                    (key.to_owned(), parent.world_size())
                }),
                cannot_grow: cannot_grow(prepared, self.parent, peers),
                ..Said::default()
            },
            Err(error) => Said::failed(error, &*self.unborn()),
        };
        let topic = format!("communicator/{name}");
        let answers = self.round(&topic, &own.encode());
        // On the rank that failed, its own error is the better answer.
        let (prepared, said) = match prepared {
            Ok((prepared, _)) => (prepared, self.all_can(&topic, answers, None)?),
            Err(own) => return Err(self.none_can(&topic, answers, own)),
        };
        let wishes: Vec<_> = said.iter().map(|one| Wish::of_code(one.mode)).collect();
        let mode = common_mode(&wishes, |rank| peers.describe(rank)).map_err(|error| {
            let modes = Wish::modes(&wishes);
            let unborn = self.unborn();
            unborn.struck(error, Arc::new(unborn.differ(&modes)))
        })?;
        let prepared = prepared.in_mode(mode);
        let obstacle = said.iter().position(|one| one.obstacle.is_some());
        if let (LaunchMode::NonBlocking, Some(rank)) = (mode, obstacle) {
            let why = said[rank].obstacle.as_deref().unwrap_or_default();
            let unborn = self.unborn();
            launch_mode::not_by_default((name, unborn.roster()), rank, why);
        }
        let way = way(&said);
        let first = said.first();
        if first.is_none_or(|first| first.parent.is_none()) {
            let token = first.map(|first| &first.token[..]).unwrap_or_default();
            return Ok(Agreed {
                id: open_on(peers, name, token)?,
                prepared,
                way,
                growing: None,
            });
        }
        let (id, growing) = self.second_round(&topic, &prepared, way.as_ref())?;
        Ok(Agreed {
            prepared,
            id,
            way,
            growing,
        })
    }

    /// Exchanges the token in a second round, because its kind depends on the first.
    fn second_round(
        &self,
        topic: &str,
        prepared: &Prepared,
        way: Option<&ResizeWay>,
    ) -> Result<(UniqueId, Option<Growing<'m>>)> {
        let Self { peers, name, .. } = *self;
        let growing = match (way, self.parent) {
            (Some(ResizeWay::Native), Some(parent)) => {
                Growing::begin(&parent.inner, self.deadline).map(Some)
            }
            _ => Ok(None),
        };
        // Leaves time to tell the others why there is no token.
        let timeout = self.deadline.saturating_duration_since(Instant::now()) / 2;
        let makes_id = peers.rank() == 0;
        let token = match (&growing, makes_id) {
            (Err(error), _) => Err(Error::rendezvous(error.kind().to_string())),
            (Ok(_), false) => Ok(None),
            (Ok(Some(growing)), true) => growing.token(timeout, self.signal).map(Some),
            (Ok(None), true) => UniqueId::within(prepared.library(), timeout).map(Some),
        };
        if let (Ok(Some(growing)), Err(error)) = (&growing, &token) {
            growing.tell(error);
        }
        let own = match &token {
            Ok(id) => Said {
                token: id.as_ref().map_or_else(Vec::new, |id| self.seal(id)),
                ..Said::default()
            },
            Err(error) => Said::failed(error, &*self.unborn()),
        };
        let topic = format!("{topic}/token");
        let answers = self.round(&topic, &own.encode());
        let (token, growing) = match (token, growing) {
            (_, Err(own)) => return Err(self.none_can(&topic, answers, own)),
            (token, Ok(growing)) => (token, growing),
        };
        let received = (|| {
            let said = match token {
                Ok(_) => self.all_can(&topic, answers, None)?,
                Err(own) => return Err(self.none_can(&topic, answers, own)),
            };
            let token = said.first().map(|first| &first.token[..]);
            open_on(peers, name, token.unwrap_or_default())
        })();
        match received {
            Ok(id) => Ok((id, growing)),
            Err(error) => {
                if let Some(growing) = growing {
                    // NCCL has told its first and its last rank of this grow, and cannot begin another one.
                    growing.fail(&error, true);
                }
                Err(error)
            }
        }
    }

    fn seal(&self, id: &UniqueId) -> Vec<u8> {
        seal_on(self.peers, self.name, id)
    }

    fn round(&self, topic: &str, part: &[u8]) -> Result<Vec<Vec<u8>>> {
        // The end of the parent is no reason to leave: a rank that knows why it ended reports that in this round.
        let interrupted = || self.signal.is_aborted();
        self.peers
            .round(topic, None, part, self.deadline, Some(&interrupted))
    }

    fn unborn(&self) -> Box<dyn Unmade> {
        let everybody = (0..self.peers.size()).collect();
        self.peers.unmade(self.name, everybody, self.peers.rank())
    }

    /// Returns the messages of all ranks, or an error if a rank cannot take part or did not come; `own` is this rank's failure.
    fn all_can(
        &self,
        topic: &str,
        answers: Result<Vec<Vec<u8>>>,
        own: Option<Error>,
    ) -> Result<Vec<Said>> {
        let unborn = self.unborn();
        let parts = match answers {
            Ok(parts) => parts,
            Err(exchange) => return Err(unborn.explain(own, exchange)),
        };
        let said: Option<Vec<Said>> = parts.iter().map(|part| Said::decode(part)).collect();
        let Some(said) = said else {
            let other = || Error::rendezvous(format!("a rank said something else to {topic:?}"));
            return Err(own.unwrap_or_else(other));
        };
        let failed = said.iter().map(|said| said.failed.as_deref());
        let failed: Vec<_> = failed.enumerate().collect();
        let told = said.iter().enumerate();
        let told = told.filter(|(_, said)| said.failed.is_some());
        let told: Vec<_> = told.map(|(rank, said)| (rank, &said.fault[..])).collect();
        let elected = unborn.elect(&told);
        let teller = elected.as_ref().map(|(rank, _)| *rank);
        let teller = teller.or_else(|| failed.iter().find(|(_, why)| why.is_some()).map(|f| f.0));
        let Some((rank, Some(reason))) = teller.map(|rank| failed[rank]) else {
            return Ok(said);
        };
        let theirs = || {
            Error::rendezvous(format!(
                "{} cannot make communicator {:?}: {reason}",
                self.peers.describe(rank),
                self.name
            ))
        };
        let error = own.unwrap_or_else(theirs);
        Err(match elected {
            Some((_, fault)) => unborn.struck(error, Arc::new(fault)),
            None => error,
        })
    }

    /// Returns the error of this rank, which cannot take part itself.
    fn none_can(&self, topic: &str, answers: Result<Vec<Vec<u8>>>, own: Error) -> Error {
        // The error to return if the other ranks have reported none.
        let said = Error::rendezvous(own.kind().to_string());
        match self.all_can(topic, answers, Some(own)) {
            Err(error) => error,
            Ok(_) => said,
        }
    }
}
