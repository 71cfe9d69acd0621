//! The connections of a driver, and its machine's requests for them.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Instant;

use super::dialer::Dialer;
use super::driver::MachineDriver;
use super::peer_connection::PeerConnection;
use crate::connect::AuthenticatedConnection;
use crate::connection::Connection;
use crate::frame::Decoder;
use crate::proto::{self, ConnectionRequest, Input, MemberId};

#[derive(Default)]
pub(crate) struct PeerConnections {
    all: HashMap<proto::Connection, Arc<PeerConnection>>,
    made: u64,
    /// Whether new connections are closed at once.
    is_closed: bool,
    /// The connection to the first process that the machine dials, which is already open.
    first: Option<AuthenticatedConnection>,
    /// Work to do once the driver's lock is free.
    pub(crate) work: ConnectionWork,
}

#[derive(Default)]
pub(crate) struct ConnectionWork {
    start: Vec<Arc<PeerConnection>>,
    dial: Vec<(MemberId, String)>,
    flush: Vec<Arc<Connection>>,
    close: Vec<Arc<PeerConnection>>,
}

impl PeerConnections {
    pub(crate) fn starting_with(first: Option<AuthenticatedConnection>) -> Self {
        Self {
            first,
            ..Self::default()
        }
    }

    pub(crate) fn get(&self, number: proto::Connection) -> Option<&Arc<PeerConnection>> {
        self.all.get(&number)
    }

    /// Whether there is no connection.
    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Returns the number of bytes that wait to be written.
    pub(crate) fn backlog(&self) -> usize {
        let connections = self.all.values();
        connections
            .map(|peer_connection| peer_connection.connection.backlog())
            .sum()
    }

    /// Returns the machine's inputs for data of a connection, unless the connection was closed in the meantime.
    pub(crate) fn inputs(
        &mut self,
        number: proto::Connection,
        frames: Vec<proto::Frame>,
        has_ended: bool,
    ) -> Vec<Input> {
        let is_known = match has_ended {
            true => self.all.remove(&number).is_some(),
            false => self.all.contains_key(&number),
        };
        if !is_known {
            return Vec::new();
        }
        let frames = frames.into_iter().map(|frame| Input::Frame(number, frame));
        let end = has_ended.then_some(Input::Closed(number));
        frames.chain(end).collect()
    }

    /// Carries out a request of the machine; returns the immediate input for the machine, if any.
    pub(crate) fn handle_connection_request(
        &mut self,
        driver: &Weak<dyn MachineDriver>,
        request: ConnectionRequest,
    ) -> Option<Input> {
        match request {
            ConnectionRequest::Dial { peer, at } => match self.first.take() {
                Some(connection) => return Some(self.connected(driver, peer, connection)),
                None => self.work.dial.push((peer, at)),
            },
            ConnectionRequest::Transmit(number, frame) => {
                if let Some(peer_connection) = self.all.get(&number) {
                    peer_connection.send(&frame);
                    self.work.flush(&peer_connection.connection);
                }
            }
            ConnectionRequest::Close(number) => {
                if let Some(peer_connection) = self.all.remove(&number) {
                    self.work.close.push(peer_connection);
                }
            }
        }
        None
    }

    /// Registers a connection that this process has opened; returns the machine's input.
    pub(crate) fn connected(
        &mut self,
        driver: &Weak<dyn MachineDriver>,
        peer: MemberId,
        connection: AuthenticatedConnection,
    ) -> Input {
        let (number, peer_connection) = self.add(driver, connection.connection, connection.decoder);
        if !self.is_closed {
            self.work.start.push(peer_connection);
        }
        Input::Connected(peer, number)
    }

    /// Registers a connection that another process has opened.
    pub(crate) fn accepted(
        &mut self,
        driver: &Weak<dyn MachineDriver>,
        connection: Arc<Connection>,
        decoder: Decoder,
    ) -> Arc<PeerConnection> {
        self.add(driver, connection, decoder).1
    }

    fn add(
        &mut self,
        driver: &Weak<dyn MachineDriver>,
        connection: Arc<Connection>,
        decoder: Decoder,
    ) -> (proto::Connection, Arc<PeerConnection>) {
        self.made += 1;
        let number = proto::Connection(self.made);
        let peer_connection = PeerConnection::new(driver, number, connection, decoder);
        match self.is_closed {
            true => peer_connection.close(),
            false => _ = self.all.insert(number, Arc::clone(&peer_connection)),
        }
        (number, peer_connection)
    }

    /// Simulates a network failure of all connections.
    #[cfg(test)]
    pub(crate) fn cut_for_a_test(&self) {
        self.all
            .values()
            .for_each(|peer_connection| peer_connection.connection.shut());
    }

    /// Closes all connections, and those that are added later.
    pub(crate) fn close_all(&mut self) {
        self.is_closed = true;
        let all = std::mem::take(&mut self.all);
        self.work.close.extend(all.into_values());
    }
}

impl ConnectionWork {
    pub(crate) fn is_empty(&self) -> bool {
        self.start.is_empty()
            && self.dial.is_empty()
            && self.flush.is_empty()
            && self.close.is_empty()
    }

    fn flush(&mut self, connection: &Arc<Connection>) {
        let is_same = |other: &Arc<Connection>| Arc::ptr_eq(other, connection);
        if !self.flush.last().is_some_and(is_same) {
            self.flush.push(Arc::clone(connection));
        }
    }

    pub(crate) fn carry_out(self, driver: &Weak<dyn MachineDriver>, dialer: &Dialer) {
        for (peer, at) in self.dial {
            dialer.dial(driver, peer, at);
        }
        let now = Instant::now();
        for connection in self.flush {
            connection.flush_and_mark(now);
        }
        for peer_connection in self.start {
            if let Err(error) = peer_connection.start() {
                peer_connection.fail(&error);
            }
        }
        for peer_connection in self.close {
            peer_connection.connection.flush_quietly();
            peer_connection.close();
        }
    }
}
