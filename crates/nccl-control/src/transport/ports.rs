//! The connections of a driver, and its machine's requests for them.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Instant;

use super::dialer::Dialer;
use super::driver::Driver;
use super::port::Port;
use crate::client::Met;
use crate::connection::Connection;
use crate::frame::Decoder;
use crate::proto::{self, Input, MemberId, Wire};

#[derive(Default)]
pub(crate) struct Ports {
    all: HashMap<proto::Connection, Arc<Port>>,
    made: u64,
    /// The connection to the first process that the machine dials, which is already open.
    first: Option<Met>,
    /// Work for when the driver's lock is free.
    pub(crate) work: Work,
}

#[derive(Default)]
pub(crate) struct Work {
    start: Vec<Arc<Port>>,
    dial: Vec<(MemberId, String)>,
    flush: Vec<Arc<Connection>>,
    close: Vec<Arc<Port>>,
}

impl Ports {
    pub(crate) fn starting_with(first: Option<Met>) -> Self {
        Self {
            first,
            ..Self::default()
        }
    }

    pub(crate) fn get(&self, number: proto::Connection) -> Option<&Arc<Port>> {
        self.all.get(&number)
    }

    /// Whether there is no connection.
    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Returns the number of bytes that wait to be written.
    pub(crate) fn backlog(&self) -> usize {
        let ports = self.all.values();
        ports.map(|port| port.connection.backlog()).sum()
    }

    /// Returns the machine's inputs for data of a connection, unless that was closed meanwhile.
    pub(crate) fn inputs(
        &mut self,
        number: proto::Connection,
        frames: Vec<proto::Frame>,
        has_ended: bool,
    ) -> Vec<Input> {
        let is_there = match has_ended {
            true => self.all.remove(&number).is_some(),
            false => self.all.contains_key(&number),
        };
        if !is_there {
            return Vec::new();
        }
        let frames = frames.into_iter().map(|frame| Input::Frame(number, frame));
        let end = has_ended.then_some(Input::Closed(number));
        frames.chain(end).collect()
    }

    /// Carries out a request of the machine; returns the immediate input for it, if any.
    pub(crate) fn wire(&mut self, driver: &Weak<dyn Driver>, wire: Wire) -> Option<Input> {
        match wire {
            Wire::Dial { peer, at } => match self.first.take() {
                Some(met) => return Some(self.connected(driver, peer, met)),
                None => self.work.dial.push((peer, at)),
            },
            Wire::Transmit(number, frame) => {
                if let Some(port) = self.all.get(&number) {
                    port.send(&frame);
                    self.work.flush(&port.connection);
                }
            }
            Wire::HangUp(number) => {
                if let Some(port) = self.all.remove(&number) {
                    self.work.close.push(port);
                }
            }
        }
        None
    }

    /// Registers a connection that this process has made; returns the machine's input.
    pub(crate) fn connected(
        &mut self,
        driver: &Weak<dyn Driver>,
        peer: MemberId,
        met: Met,
    ) -> Input {
        let (number, port) = self.add(driver, met.connection, met.decoder);
        self.work.start.push(port);
        Input::Connected(peer, number)
    }

    /// Registers a connection that another process has made.
    pub(crate) fn accepted(
        &mut self,
        driver: &Weak<dyn Driver>,
        connection: Arc<Connection>,
        decoder: Decoder,
    ) -> Arc<Port> {
        self.add(driver, connection, decoder).1
    }

    fn add(
        &mut self,
        driver: &Weak<dyn Driver>,
        connection: Arc<Connection>,
        decoder: Decoder,
    ) -> (proto::Connection, Arc<Port>) {
        self.made += 1;
        let number = proto::Connection(self.made);
        let port = Port::new(driver, number, connection, decoder);
        self.all.insert(number, Arc::clone(&port));
        (number, port)
    }

    /// Simulates a network failure of all connections.
    #[cfg(test)]
    pub(crate) fn cut_for_a_test(&self) {
        self.all.values().for_each(|port| port.connection.shut());
    }

    pub(crate) fn close_all(&mut self) {
        let all = std::mem::take(&mut self.all);
        self.work.close.extend(all.into_values());
    }
}

impl Work {
    pub(crate) fn is_empty(&self) -> bool {
        self.start.is_empty()
            && self.dial.is_empty()
            && self.flush.is_empty()
            && self.close.is_empty()
    }

    fn flush(&mut self, connection: &Arc<Connection>) {
        let is_there = |other: &Arc<Connection>| Arc::ptr_eq(other, connection);
        if !self.flush.last().is_some_and(is_there) {
            self.flush.push(Arc::clone(connection));
        }
    }

    pub(crate) fn carry_out(self, driver: &Weak<dyn Driver>, dialer: &Dialer) {
        for (peer, at) in self.dial {
            dialer.dial(driver, peer, at);
        }
        let now = Instant::now();
        for connection in self.flush {
            connection.flush_and_mark(now);
        }
        for port in self.start {
            if let Err(error) = port.start() {
                port.fail(&error);
            }
        }
        for port in self.close {
            port.connection.flush_quietly();
            port.close();
        }
    }
}
