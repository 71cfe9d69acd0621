//! Which processes a node admits, and how it answers the processes that it refuses.

use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::{Arc, Weak};

use super::driver::{Node, State};
use crate::connection::Connection;
use crate::frame::{Decoder, Frame};
use crate::handshake::{HandshakeMessage, Hello, PeerRole, Retry};
use crate::refusal::{Refusal, check_room};
use crate::secret::Secret;
use crate::transport::{MachineDriver as _, PeerConnection};

/// The interface between a process's listening sockets and its driver.
pub(super) trait Admission: Send + Sync + UnwindSafe + RefUnwindSafe {
    fn secret(&self) -> Option<Secret>;
    /// Decides whether the peer that sent this hello may join; returns the answer.
    fn admit(&self, hello: &Hello) -> Result<HandshakeMessage, Refusal>;
    /// Takes over the connection of a process that has proved its identity; from now on, it carries frames of the
    /// machines.
    fn accept_peer(&self, connection: Arc<Connection>, decoder: Decoder) -> Arc<PeerConnection>;
    /// Handles a request of a peer that only asks for recordings; the error states why the request is refused.
    fn answer_recording_request(
        &self,
        connection: &Arc<Connection>,
        frame: &Frame,
    ) -> Result<(), String>;
    /// Records a refused peer, for the errors of waiting ranks.
    fn note_for_errors(&self, text: String);
}

impl Admission for Node {
    fn secret(&self) -> Option<Secret> {
        self.job.secret.clone()
    }

    fn admit(&self, hello: &Hello) -> Result<HandshakeMessage, Refusal> {
        let Hello {
            job,
            generation,
            world_size,
            role,
            rank,
            host,
            pid,
            ..
        } = hello;
        let mut state = self.state.lock();
        let state = &mut *state;
        let own = state.generation();
        let size = match state.sessions.last() {
            Some(session) => session.membership.members.len(),
            None => state.services.size,
        };
        if *job != self.job.name {
            return Err(Refusal::of_job(job, &self.job.name));
        }
        match role {
            PeerRole::Joiner => self.may_admit(state)?,
            PeerRole::Rank => {
                if *generation != own {
                    return Err(Refusal::of_generation(*generation, own));
                }
                if self.slot() != 0 {
                    return Err(self.refer(state));
                }
                if *world_size != size {
                    return Err(Refusal::from(format!(
                        "rank {rank} expects {world_size} ranks, rank 0 expects {size}"
                    )));
                }
                if *rank == self.slot() || *rank >= size {
                    return Err(Refusal::from(format!("there is no rank {rank} to join")));
                }
                let active = state
                    .sessions
                    .last()
                    .map(|session| &session.membership.members[*rank]);
                if let Some(known) = active.or_else(|| state.machine.joined(*rank as u32)) {
                    let end = state.departed.iter().find(|(id, _)| *id == known.id);
                    let end = end.map_or_else(String::new, |(_, end)| format!("; {end}"));
                    return Err(Refusal::from(format!(
                        "rank {rank} has joined already, as {}, pid {}{end}: this one is {}, pid {pid}, and \
                         two processes cannot be one rank",
                        known.host,
                        known.pid,
                        crate::sanitize::name(host)
                    )));
                }
            }
            PeerRole::Observer | PeerRole::NewObserver => {
                // In a later generation than the first, an observer need not know the number of ranks.
                if *generation == own && ![0, size].contains(world_size) {
                    return Err(Refusal::of_observer(*world_size, size));
                }
                check_room(state.machine.observers().len(), size)?;
            }
            PeerRole::Member | PeerRole::RecordingReader => {}
        }
        let by = match state.sessions.last() {
            Some(session) => session.rank,
            None => self.slot(),
        };
        Ok(HandshakeMessage::Welcome {
            by,
            generation: own,
        })
    }

    fn accept_peer(&self, connection: Arc<Connection>, decoder: Decoder) -> Arc<PeerConnection> {
        let mut state = self.state.lock();
        state
            .connections
            .accepted(&self.driver(), connection, decoder)
    }

    fn answer_recording_request(
        &self,
        connection: &Arc<Connection>,
        frame: &Frame,
    ) -> Result<(), String> {
        self.answer(connection, frame)
    }

    fn note_for_errors(&self, text: String) {
        self.state.lock().services.note_for_errors(text);
    }
}

impl Node {
    pub(super) fn admission(&self) -> Weak<dyn Admission> {
        Weak::clone(&self.this) as Weak<dyn Admission>
    }

    /// Checks whether a process may join here as it asks to.
    fn may_admit(&self, state: &State) -> Result<(), Refusal> {
        let Some(session) = state.sessions.last() else {
            return Err(Refusal::later(String::from(
                "the first generation of the world is not formed yet",
            )));
        };
        let rank = session.rank;
        if state.excluded.is_some() {
            return Err(Refusal::later(format!(
                "rank {rank} has lost the other ranks"
            )));
        }
        if state.machine.is_coordinator() {
            return Ok(());
        }
        if !state.machine.has_coordinator() {
            return Err(Refusal::later(format!(
                "rank {rank} has no coordinator at the moment"
            )));
        }
        Err(self.refer(state))
    }

    /// Returns a referral to the process that coordinates, with its address if known here.
    fn refer(&self, state: &State) -> Refusal {
        let coordinator = state.machine.coordinator();
        let session = state.sessions.last();
        let rank = session.map_or(self.slot(), |session| session.rank);
        let rank_and_address = session.and_then(|session| {
            let by = session.membership.rank_of(coordinator)?;
            Some((by, session.membership.members[by].at.clone()))
        });
        let (by, at) = rank_and_address.unwrap_or_default();
        Refusal {
            why: format!("this is rank {rank}, and rank {by} coordinates the job"),
            retry: Retry::At { rank: by, at },
        }
    }
}
