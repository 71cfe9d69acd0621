//! A connection to another process of the job: frames of the machines, read on the reactor's thread.

use std::io;
use std::sync::{Arc, Weak};

use nccl_base::wire;

use super::dialer::Dialer;
use crate::client::Met;
use crate::connection::{Connection, Received};
use crate::departure::{How, Lost};
use crate::frame::{Decoder, Outgoing};
use crate::proto;
use crate::reactor::{EventFlags, Reactor, Source};
use crate::reader::loss_of;
use crate::server::Job;
use crate::succession::Loss;
use crate::sync::{Mutex, MutexGuard};

/// What has a machine, and connections for it.
pub(super) trait Driver: Send + Sync {
    /// Frames of one connection have come, and perhaps its end. What follows waits for [`settle`](Self::settle).
    fn came(&self, number: proto::Connection, frames: Vec<proto::Frame>, lost: Option<Lost>);
    /// Does what waits for locks to be free.
    fn settle(&self);
    fn dialled(&self, peer: proto::MemberId, met: Met);
    fn dial_failed(&self, peer: proto::MemberId, lost: Lost);
    fn dialer(&self) -> &Dialer;
    fn job(&self) -> &Job;
    /// As which rank it was started.
    fn slot(&self) -> usize;
}

pub(super) struct Port {
    driver: Weak<dyn Driver>,
    number: proto::Connection,
    pub(super) connection: Arc<Connection>,
    /// `None` when nothing comes any more.
    decoder: Mutex<Option<Decoder>>,
}

impl Port {
    pub(super) fn new(
        driver: &Weak<dyn Driver>,
        number: proto::Connection,
        connection: Arc<Connection>,
        decoder: Decoder,
    ) -> Arc<Self> {
        Arc::new(Self {
            driver: Weak::clone(driver),
            number,
            connection,
            decoder: Mutex::new(Some(decoder)),
        })
    }

    /// Has the reactor read it: for a connection that no other source reads already.
    pub(super) fn start(self: &Arc<Self>) -> io::Result<()> {
        let events = EventFlags::IN | EventFlags::RDHUP;
        let source = Arc::new(Reads(Arc::clone(self))) as Arc<dyn Source>;
        let token = Reactor::get()?.add(self.connection.fd(), events, source)?;
        self.connection.set_token(token);
        // What came with the greeting waits in the decoder, and no event tells of it.
        self.read();
        self.connection.flush_quietly();
        Ok(())
    }

    /// It cannot be read: as good as ended.
    pub(super) fn fail(&self, error: &io::Error) {
        self.close();
        if let Some(driver) = self.driver.upgrade() {
            let lost = Lost::said(error.to_string());
            driver.came(self.number, Vec::new(), Some(lost));
            driver.settle();
        }
    }

    pub(super) fn send(&self, frame: &proto::Frame) {
        self.connection
            .enqueue(Outgoing::new(0, wire::encode(frame).into()));
    }

    pub(super) fn close(&self) {
        self.connection.forget();
        self.connection.shut();
    }

    pub(super) fn ready(&self, events: EventFlags) {
        if events.contains(EventFlags::OUT) {
            self.connection.flush_quietly();
        }
        self.read();
    }

    /// Hands on all that has come.
    pub(super) fn read(&self) {
        self.read_with(self.decoder.lock());
    }

    /// The same, unless another thread is at it.
    pub(super) fn read_if_free(&self) {
        if let Some(reading) = self.decoder.try_lock() {
            self.read_with(reading);
        }
    }

    fn read_with(&self, mut reading: MutexGuard<'_, Option<Decoder>>) {
        let Some(driver) = self.driver.upgrade() else {
            return self.close();
        };
        let Some(decoder) = &mut *reading else {
            return;
        };
        let received = self.connection.receive(decoder);
        let mut frames = Vec::new();
        let mut broken = None;
        loop {
            let frame = match decoder.next() {
                Ok(None) => break,
                Ok(Some(frame)) => wire::decode::<proto::Frame>(&frame.payload),
                Err(broken) => Err(broken),
            };
            match frame {
                Ok(frame) => frames.push(frame),
                Err(why) => {
                    broken = Some(Lost::from(How::Sent(why.0.to_owned())));
                    break;
                }
            }
        }
        let lost = broken.or_else(|| match received {
            Ok(Received::Some) => None,
            Ok(Received::End) => Some(lost(loss_of(&self.connection, None))),
            Err(error) => Some(lost(loss_of(&self.connection, Some(&error)))),
        });
        if lost.is_some() {
            *reading = None;
            self.close();
        }
        // With the lock, so that another reader does not overtake.
        driver.came(self.number, frames, lost);
        drop(reading);
        driver.settle();
    }
}

fn lost(loss: Loss) -> Lost {
    loss.into_lost()
}

/// What the reactor has of a connection that this process has dialled.
struct Reads(Arc<Port>);

impl Source for Reads {
    fn ready(self: Arc<Self>, events: EventFlags) {
        self.0.ready(events);
    }
}
