//! A connection to another process of the job: frames of the machines, read on the reactor's thread.

use std::io;
use std::sync::{Arc, Weak};
use std::time::Instant;

use nccl_base::wire;

use super::driver::MachineDriver;
use crate::connection::{Connection, Received};
use crate::departure::{LossKind, Lost, UnreachableEvidence};
use crate::frame::{Broken, Decoder, LARGEST_FRAME, Outgoing};
use crate::proto;
use crate::reactor::{EventFlags, Reactor, Source};
use crate::sync::{Mutex, MutexGuard};

pub(crate) struct PeerConnection {
    driver: Weak<dyn MachineDriver>,
    number: proto::Connection,
    pub(crate) connection: Arc<Connection>,
    /// `None` when nothing more will arrive.
    decoder: Mutex<Option<FrameAssembler>>,
}

/// Received data: frames, of which a large one has several parts.
struct FrameAssembler {
    decoder: Decoder,
    parts: Vec<u8>,
}

/// The maximum number of bytes of a part; a heartbeat never waits behind more than that.
const LARGEST_PART: usize = 256 << 10;

/// The numbers of: a part that others follow, the last or only part, and a frame that may come between parts.
const FIRST_PARTS: u64 = 1;
const LAST: u64 = 0;
const WHOLE: u64 = 2;

impl FrameAssembler {
    fn next(&mut self) -> Result<Option<proto::Frame>, Broken> {
        while let Some(frame) = self.decoder.next()? {
            if frame.id == WHOLE {
                return wire::decode(&frame.payload).map(Some);
            }
            if self.parts.len() + frame.payload.len() > LARGEST_FRAME {
                return Err(Broken("a frame that is too long"));
            }
            match frame.id {
                LAST if self.parts.is_empty() => return wire::decode(&frame.payload).map(Some),
                LAST => {
                    let mut whole = std::mem::take(&mut self.parts);
                    whole.extend_from_slice(&frame.payload);
                    return wire::decode(&whole).map(Some);
                }
                _ => self.parts.extend_from_slice(&frame.payload),
            }
        }
        Ok(None)
    }
}

impl PeerConnection {
    pub(crate) fn new(
        driver: &Weak<dyn MachineDriver>,
        number: proto::Connection,
        connection: Arc<Connection>,
        decoder: Decoder,
    ) -> Arc<Self> {
        Arc::new(Self {
            driver: Weak::clone(driver),
            number,
            connection,
            decoder: Mutex::new(Some(FrameAssembler {
                decoder,
                parts: Vec::new(),
            })),
        })
    }

    /// Registers the connection with the reactor; only for a connection that no other source reads already.
    pub(crate) fn start(self: &Arc<Self>) -> io::Result<()> {
        let events = EventFlags::IN | EventFlags::RDHUP;
        let source = Arc::new(ReadSource(Arc::clone(self))) as Arc<dyn Source>;
        let token = Reactor::get()?.add(self.connection.fd(), events, source)?;
        self.connection.set_token(token);
        // Data that arrived with the handshake is already in the decoder, and no event reports it.
        self.read();
        self.connection.flush_quietly();
        Ok(())
    }

    /// Reports that the connection cannot be read, which is equivalent to its end.
    pub(crate) fn fail(&self, error: &io::Error) {
        self.close();
        if let Some(driver) = self.driver.upgrade() {
            let lost = Lost::reported(error.to_string());
            driver.frames_arrived(self.number, Vec::new(), Some(lost));
            driver.run_deferred_work();
        }
    }

    pub(crate) fn send(&self, frame: &proto::Frame) {
        let bytes = wire::encode(frame);
        if !matches!(
            frame,
            proto::Frame::Data { .. } | proto::Frame::Acknowledge(_)
        ) {
            let frame = Outgoing::new(WHOLE, bytes.into());
            return self.connection.enqueue_first(frame);
        }
        let mut rest = &bytes[..];
        while let Some((part, more)) = rest
            .split_at_checked(LARGEST_PART)
            .filter(|(_, more)| !more.is_empty())
        {
            self.connection
                .enqueue(Outgoing::new(FIRST_PARTS, part.into()));
            rest = more;
        }
        self.connection.enqueue(Outgoing::new(LAST, rest.into()));
    }

    pub(crate) fn close(&self) {
        self.connection.forget();
        self.connection.shut();
    }

    pub(crate) fn ready(&self, events: EventFlags) {
        if events.contains(EventFlags::OUT) {
            self.connection.flush_quietly();
        }
        self.read();
    }

    /// Delivers everything that has arrived.
    pub(crate) fn read(&self) {
        self.read_with(self.decoder.lock());
    }

    /// As [`read`](Self::read), unless another thread is reading.
    pub(crate) fn read_if_free(&self) {
        if let Some(reading) = self.decoder.try_lock() {
            self.read_with(reading);
        }
    }

    fn read_with(&self, mut reading: MutexGuard<'_, Option<FrameAssembler>>) {
        let Some(driver) = self.driver.upgrade() else {
            return self.close();
        };
        let Some(assembler) = &mut *reading else {
            return;
        };
        let received = self.connection.receive(&mut assembler.decoder);
        let mut frames = Vec::new();
        let mut broken = None;
        loop {
            match assembler.next() {
                Ok(None) => break,
                Ok(Some(frame)) => frames.push(frame),
                Err(why) => {
                    broken = Some(Lost::from(LossKind::ProtocolViolation(why.0.to_owned())));
                    break;
                }
            }
        }
        let lost = broken.or_else(|| match received {
            Ok(Received::Some) => None,
            Ok(Received::End) => Some(loss_of(&self.connection, None)),
            Err(error) => Some(loss_of(&self.connection, Some(&error))),
        });
        if lost.is_some() {
            *reading = None;
            self.close();
        }
        // Called while the lock is held, so that another reader does not overtake.
        driver.frames_arrived(self.number, frames, lost);
        drop(reading);
        driver.run_deferred_work();
    }
}

/// Returns what the end or the failure of a connection shows about the process at its other end.
fn loss_of(connection: &Connection, error: Option<&io::Error>) -> Lost {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    let failed = error.filter(|error| !matches!(error.kind(), ConnectionReset | BrokenPipe));
    match (failed, connection.unacknowledged_for(Instant::now())) {
        (Some(error), _) => Lost::from(UnreachableEvidence::Error(error.to_string())),
        // The end was reported by the peer's kernel.
        (None, None) => Lost::from(LossKind::Closed),
        // Also reported by the peer's kernel, but that host does not receive this host's packets and gave up the
        // connection.
        (None, Some(unacknowledged)) => Lost::from(UnreachableEvidence::GaveUp { unacknowledged }),
    }
}

/// The reactor's source for a connection that this process has dialled.
struct ReadSource(Arc<PeerConnection>);

impl Source for ReadSource {
    fn ready(self: Arc<Self>, events: EventFlags) {
        self.0.ready(events);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assembler(frames: &[(u64, &[u8])]) -> FrameAssembler {
        let mut decoder = Decoder::new(LARGEST_FRAME);
        for (id, payload) in frames {
            let frame = Outgoing::new(*id, (*payload).into());
            decoder.push(&frame.head);
            decoder.push(&frame.payload);
        }
        FrameAssembler {
            decoder,
            parts: Vec::new(),
        }
    }

    #[test]
    fn a_small_frame_between_the_parts_of_a_large_one_is_a_frame_of_its_own() {
        let [large, small] = [7, 8].map(|number| wire::encode(&proto::Frame::Acknowledge(number)));
        let (first, rest) = large.split_at(1);
        let mut assembler = assembler(&[
            (FIRST_PARTS, first),
            (WHOLE, &small),
            (LAST, rest),
            (LAST, &small),
        ]);
        for number in [8, 7, 8] {
            let frame = assembler.next().unwrap();
            assert_eq!(frame, Some(proto::Frame::Acknowledge(number)));
        }
        assert_eq!(assembler.next().unwrap(), None);
    }

    #[test]
    fn parts_without_an_end_are_refused() {
        let part = vec![0; LARGEST_FRAME / 2 + 1];
        let mut assembler = assembler(&[(FIRST_PARTS, &part), (FIRST_PARTS, &part)]);
        assert!(assembler.next().is_err());
    }
}
