//! The exchange in which the ranks of a world report to each other whether they can take part in a communicator, and get the
//! token with which they meet inside NCCL.
//!
//! So if a rank cannot take part, the creation fails on every rank at once, and no rank waits for it.
//!
//! ```text
//! all report if they can  ──▶ rank 0 brought no communicator: its token came with that ──▶ a new one
//!                          ──▶ it did, and all can grow it:  a token of the one that grows ──▶ ncclCommGrow
//!                          ──▶ it did, and one rank cannot:  a token, in a second round    ──▶ a new one
//! ```

use std::sync::Arc;
use std::time::Instant;

use super::ResizeWay;
use super::builder::roots;
use super::grow::{Growing, cannot_grow, way};
use super::init::PreparedInit;
use super::init_message::InitMessage;
use crate::abort::AbortSignal;
use crate::communicator::Communicator;
use crate::communicator::launch_mode::{self, LaunchPreference, common_mode};
use crate::error::{Error, Result};
use crate::peers::{InitSupervisor, Peers};
use crate::sealed_unique_id::{open_from, seal_for};
use crate::unique_id::UniqueId;
use nccl_base::launch_mode::LaunchMode;

/// The input of one rank.
pub(super) struct InitExchange<'m> {
    pub(super) peers: &'m dyn Peers,
    pub(super) name: &'m str,
    /// The number of tokens.
    pub(super) roots: usize,
    /// The communicator to grow; `None` on a new rank, or if there is no communicator to grow.
    pub(super) parent: Option<&'m Communicator>,
    pub(super) deadline: Instant,
    pub(super) signal: &'m AbortSignal,
}

/// The result of an exchange.
pub(super) struct InitAgreement<'m> {
    pub(super) prepared: PreparedInit,
    pub(super) id: UniqueId,
    /// How the communicator is made; `None` if there is no communicator to grow.
    pub(super) way: Option<ResizeWay>,
    /// The communicator that grows, on its ranks.
    pub(super) growing: Option<Growing<'m>>,
}

impl<'m> InitExchange<'m> {
    /// Meets the other ranks; `prepared` has the token on rank 0 of a communicator that does not grow.
    pub(super) fn agree(
        self,
        prepared: Result<(PreparedInit, Option<UniqueId>)>,
    ) -> Result<InitAgreement<'m>> {
        let Self { peers, name, .. } = self;
        let own = match &prepared {
            Ok((prepared, id)) => InitMessage {
                mode: prepared.preference().code(),
                roots: self.roots as u64,
                obstacle: prepared.obstacle().map(ToString::to_string),
                token: id.as_ref().map_or_else(Vec::new, |id| self.seal(id)),
                parent: self.parent.map(|parent| {
                    let key = parent.key().unwrap_or_default();
                    (key.to_owned(), parent.world_size())
                }),
                cannot_grow: cannot_grow(prepared, self.parent, peers),
                ..InitMessage::default()
            },
            Err(error) => InitMessage::failed(error, &*self.init_supervisor()),
        };
        let topic = format!("communicator/{name}");
        let answers = self.exchange(&topic, &own.encode());
        // On the rank that failed, its own error is more useful.
        let (prepared, messages) = match prepared {
            Ok((prepared, _)) => (prepared, self.check_all(&topic, answers, None)?),
            Err(own) => return Err(self.own_failure(&topic, answers, own)),
        };
        if let Some(other) = messages
            .iter()
            .position(|one| one.roots != messages[0].roots)
        {
            return Err(Error::rendezvous(format!(
                "{} makes communicator {name:?} with {} roots, and {} with {}: all ranks have to set the same",
                peers.describe(0),
                messages[0].roots,
                peers.describe(other),
                messages[other].roots
            )));
        }
        let preferences: Vec<_> = messages
            .iter()
            .map(|one| LaunchPreference::of_code(one.mode))
            .collect();
        let mode = common_mode(&preferences, |rank| peers.describe(rank)).map_err(|error| {
            let modes = LaunchPreference::modes(&preferences);
            let init_supervisor = self.init_supervisor();
            init_supervisor.failed_by(error, Arc::new(init_supervisor.mode_mismatch(&modes)))
        })?;
        let prepared = prepared.in_mode(mode);
        let obstacle = messages.iter().position(|one| one.obstacle.is_some());
        if let (LaunchMode::NonBlocking, Some(rank)) = (mode, obstacle) {
            let why = messages[rank].obstacle.as_deref().unwrap_or_default();
            let init_supervisor = self.init_supervisor();
            launch_mode::log_fallback((name, init_supervisor.roster()), rank, why);
        }
        let way = way(&messages);
        let first = messages.first();
        if first.is_none_or(|first| first.parent.is_none()) {
            let mut tokens = roots(self.roots, messages.len())
                .map(|root| open_from(peers, name, &messages[root].token));
            let id = tokens
                .next()
                .unwrap_or_else(|| open_from(peers, name, &[]))?;
            let others = tokens.collect::<Result<_>>()?;
            return Ok(InitAgreement {
                id,
                prepared: prepared.with_more_tokens(others),
                way,
                growing: None,
            });
        }
        let (id, growing) = self.second_round(&topic, &prepared, way.as_ref())?;
        Ok(InitAgreement {
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
        prepared: &PreparedInit,
        way: Option<&ResizeWay>,
    ) -> Result<(UniqueId, Option<Growing<'m>>)> {
        let Self { peers, name, .. } = *self;
        let growing = match (way, self.parent) {
            (Some(ResizeWay::Native), Some(parent)) => {
                Growing::begin(&parent.inner, self.deadline).map(Some)
            }
            _ => Ok(None),
        };
        // Leaves time to report to the other ranks why there is no token.
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
            Ok(id) => InitMessage {
                token: id.as_ref().map_or_else(Vec::new, |id| self.seal(id)),
                ..InitMessage::default()
            },
            Err(error) => InitMessage::failed(error, &*self.init_supervisor()),
        };
        let topic = format!("{topic}/token");
        let answers = self.exchange(&topic, &own.encode());
        let (token, growing) = match (token, growing) {
            (_, Err(own)) => return Err(self.own_failure(&topic, answers, own)),
            (token, Ok(growing)) => (token, growing),
        };
        let received = (|| {
            let messages = match token {
                Ok(_) => self.check_all(&topic, answers, None)?,
                Err(own) => return Err(self.own_failure(&topic, answers, own)),
            };
            let token = messages.first().map(|first| &first.token[..]);
            open_from(peers, name, token.unwrap_or_default())
        })();
        match received {
            Ok(id) => Ok((id, growing)),
            Err(error) => {
                if let Some(growing) = growing {
                    // NCCL has already informed its first and its last rank of this grow, and cannot begin another one.
                    growing.fail(&error, true);
                }
                Err(error)
            }
        }
    }

    fn seal(&self, id: &UniqueId) -> Vec<u8> {
        seal_for(self.peers, self.name, id)
    }

    fn exchange(&self, topic: &str, part: &[u8]) -> Result<Vec<Vec<u8>>> {
        // The end of the parent does not interrupt this round: a rank that knows why the parent ended reports that
        // here.
        let interrupted = || self.signal.is_aborted();
        self.peers
            .exchange(topic, None, part, self.deadline, Some(&interrupted))
    }

    fn init_supervisor(&self) -> Box<dyn InitSupervisor> {
        let all_ranks = (0..self.peers.size()).collect();
        self.peers
            .supervise_init(self.name, all_ranks, self.peers.rank())
    }

    /// Returns the messages of all ranks, or an error if a rank cannot take part or did not arrive; `own` is this rank's
    /// failure.
    fn check_all(
        &self,
        topic: &str,
        answers: Result<Vec<Vec<u8>>>,
        own: Option<Error>,
    ) -> Result<Vec<InitMessage>> {
        let init_supervisor = self.init_supervisor();
        let parts = match answers {
            Ok(parts) => parts,
            Err(exchange) => return Err(init_supervisor.explain_failure(own, exchange)),
        };
        let messages: Option<Vec<InitMessage>> =
            parts.iter().map(|part| InitMessage::decode(part)).collect();
        let Some(messages) = messages else {
            let other = || Error::rendezvous(format!("a rank said something else to {topic:?}"));
            return Err(own.unwrap_or_else(other));
        };
        let failed = messages.iter().map(|messages| messages.failed.as_deref());
        let failed: Vec<_> = failed.enumerate().collect();
        let failures = messages.iter().enumerate();
        let failures = failures.filter(|(_, messages)| messages.failed.is_some());
        let failures: Vec<_> = failures
            .map(|(rank, messages)| (rank, &messages.fault[..]))
            .collect();
        let chosen = init_supervisor.choose_fault(&failures);
        let reporting_rank = chosen.as_ref().map(|(rank, _)| *rank);
        let reporting_rank =
            reporting_rank.or_else(|| failed.iter().find(|(_, why)| why.is_some()).map(|f| f.0));
        let Some((rank, Some(reason))) = reporting_rank.map(|rank| failed[rank]) else {
            return Ok(messages);
        };
        let theirs = || {
            Error::rendezvous(format!(
                "{} cannot make communicator {:?}: {reason}",
                self.peers.describe(rank),
                self.name
            ))
        };
        let error = own.unwrap_or_else(theirs);
        Err(match chosen {
            Some((_, fault)) => init_supervisor.failed_by(error, Arc::new(fault)),
            None => error,
        })
    }

    /// Returns the error of this rank, which itself cannot take part.
    fn own_failure(&self, topic: &str, answers: Result<Vec<Vec<u8>>>, own: Error) -> Error {
        // The error to return if the other ranks have reported none.
        let messages = Error::rendezvous(own.kind().to_string());
        match self.check_all(topic, answers, Some(own)) {
            Err(error) => error,
            Ok(_) => messages,
        }
    }
}
