//! A rank's way to its coordinator: finding it, making sure of it, and reading what it sends.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::connection::{Connection, Received};
use super::environment::Rendezvous;
use super::frame::{Decoder, GREETING, LARGEST_FRAME};
use super::greeting::{Greeting, Hello, Side, is_proved, nonce, prove};
use super::mailbox::Mailbox;
use super::message::{Incoming, Request};
use super::place::{self, Address};
use super::reactor::{EventFlags, Reactor, Source};
use super::server::Job;
use crate::communicator::lock;
use crate::error::{Error, Result};
use crate::time::deadline_after;

/// What is said of a rank whose connection ends before it says that it leaves.
pub(super) const LOST: &str = "its connection closed without goodbye: it died";

/// Reads what the coordinator sends, on the reactor's thread.
struct Reader {
    connection: Arc<Connection>,
    mailbox: Arc<Mailbox>,
    decoder: Mutex<Decoder>,
}

/// Joins as `rank` of `size`; answers and notices come to `mailbox` from then on.
pub(super) fn join(
    address: &Address,
    job: &Job,
    rank: usize,
    size: usize,
    deadline: Instant,
    mailbox: Arc<Mailbox>,
) -> Result<Arc<Connection>> {
    let (connection, decoder) = meet(address, job, rank, size, deadline)?;
    let failed = |error| Error::io(format!("joining at {address}"))(error);
    let reactor = Reactor::get().map_err(failed)?;
    let reader = Arc::new(Reader {
        connection: Arc::clone(&connection),
        mailbox,
        decoder: Mutex::new(decoder),
    });
    // What came with the welcome waits in the decoder, and no event tells of it.
    reader.parse(&mut lock(&reader.decoder));
    let events = EventFlags::IN | EventFlags::RDHUP;
    let token = reactor.add(connection.fd(), events, reader);
    connection.set_token(token.map_err(failed)?);
    connection.flush_quietly();
    Ok(connection)
}

/// Joins only to say that it fails.
pub(super) fn fail(rendezvous: Rendezvous, chain: String) -> Result<()> {
    let Rendezvous {
        rank,
        world_size,
        address,
        timeout,
        job,
        ..
    } = rendezvous;
    let deadline = deadline_after(timeout);
    let (connection, _) = meet(&address, &job, rank, world_size, deadline)?;
    connection.enqueue(Request::Fail { chain }.encode(0));
    connection
        .drain(deadline)
        .map_err(Error::io(format!("telling rank 0 at {address}")))?;
    connection.shut();
    Ok(())
}

/// Why one try did not end well.
enum Refusal {
    /// The job's own rank 0 says so.
    Final(String),
    /// Whoever answers is not the job's rank 0; where there are several ports, it may be at another.
    Elsewhere(String),
}

/// How long one of several ports may take to prove that it is the right one.
const TRY: Duration = Duration::from_secs(2);

/// Tries until somebody answers as the job's rank 0, or says why this rank may not come in.
fn meet(
    address: &Address,
    job: &Job,
    rank: usize,
    size: usize,
    deadline: Instant,
) -> Result<(Arc<Connection>, Decoder)> {
    let mut pause = Duration::from_millis(2);
    let several = matches!(address, Address::Tcp(place) if place.is_range());
    let mut refused = None;
    for turn in 0.. {
        let error = match place::dial(address, turn, deadline) {
            Ok(socket) => {
                let connection = Arc::new(Connection::new(socket));
                let mut decoder = Decoder::new(GREETING);
                let patience = match several {
                    true => deadline.min(Instant::now() + TRY),
                    false => deadline,
                };
                match greet(&connection, &mut decoder, job, rank, size, patience) {
                    Ok(None) => {
                        decoder.set_limit(LARGEST_FRAME);
                        return Ok((connection, decoder));
                    }
                    Ok(Some(Refusal::Elsewhere(why))) if several => {
                        refused = Some(why.clone());
                        io::Error::other(why)
                    }
                    Ok(Some(Refusal::Final(why) | Refusal::Elsewhere(why))) => {
                        return Err(Error::rendezvous(format!(
                            "rank {rank} could not join at {address}: {why}"
                        )));
                    }
                    Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                        io::Error::other("somebody takes the connection and says nothing")
                    }
                    Err(error) => error,
                }
            }
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return Err(Error::rendezvous(format!(
                    "no rank 0 at {address}: {error}"
                )));
            }
            Err(error) => error,
        };
        if Instant::now() >= deadline {
            let refused =
                refused.map_or_else(String::new, |why| format!("; somebody else did: {why}"));
            return Err(Error::rendezvous(format!(
                "rank 0 does not answer at {address} ({error}): has it been started?{refused}"
            )));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        std::thread::sleep(pause.min(left));
        pause = (pause * 2).min(Duration::from_millis(50));
    }
    unreachable!("the loop ends at the deadline")
}

/// `Ok(Some)` is a refusal, which another try would not change.
fn greet(
    connection: &Connection,
    decoder: &mut Decoder,
    job: &Job,
    rank: usize,
    size: usize,
    deadline: Instant,
) -> io::Result<Option<Refusal>> {
    let secret = job.secret.as_ref();
    let hello = Hello {
        nonce: nonce()?,
        has_secret: secret.is_some(),
        job: job.name.clone(),
        epoch: job.epoch,
        world_size: size,
        rank,
        host: crate::host::name().to_string(),
        pid: std::process::id().into(),
    };
    let mut hear = || {
        let frame = connection.expect(decoder, deadline)?;
        Greeting::decode(&frame)
            .map_err(|broken| io::Error::new(io::ErrorKind::InvalidData, broken.0))
    };
    connection.enqueue(Greeting::Hello(hello.clone()).encode());
    connection.drain(deadline)?;
    let (nonce, theirs, proof) = match hear() {
        Ok(Greeting::Challenge {
            nonce,
            has_secret,
            proof,
        }) => (nonce, has_secret, proof),
        Ok(Greeting::Refused { why, .. }) => {
            let why = format!("who answers turned it away: {why}");
            return Ok(Some(Refusal::Elsewhere(why)));
        }
        Ok(_) => return Ok(Some(no_rank_0())),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            let why = format!("who answers is no rank 0: it sent {error}");
            return Ok(Some(Refusal::Elsewhere(why)));
        }
        Err(error) => return Err(error),
    };
    if !is_proved(secret, Side::Coordinator, &hello, &nonce, &proof) {
        let why = match (hello.has_secret, theirs) {
            (true, false) => "this rank has a secret, and who answers has none",
            (false, true) => "this rank has no secret, and who answers has one",
            _ => "who answers has another secret than this rank",
        };
        let refusal = Greeting::Refused {
            why: why.to_owned(),
            elsewhere: true,
        };
        connection.enqueue(refusal.encode());
        let _ = connection.drain(deadline);
        return Ok(Some(Refusal::Elsewhere(format!(
            "{why}: set NCCL_RUN_SECRET to the same on all ranks, and see that no other job is there"
        ))));
    }
    let own = prove(secret, Side::Rank, &hello, &nonce);
    connection.enqueue(Greeting::Proof(own).encode());
    connection.drain(deadline)?;
    match hear()? {
        Greeting::Welcome => Ok(None),
        Greeting::Refused { why, elsewhere } => {
            let why = format!("rank 0 turned it away: {why}");
            Ok(Some(match elsewhere {
                true => Refusal::Elsewhere(why),
                false => Refusal::Final(why),
            }))
        }
        _ => Ok(Some(no_rank_0())),
    }
}

fn no_rank_0() -> Refusal {
    Refusal::Elsewhere(String::from("who answers is no rank 0"))
}

impl Reader {
    /// Whether all was understood.
    fn parse(&self, decoder: &mut Decoder) -> bool {
        let understood = loop {
            match decoder.next().map(|frame| frame.map(Incoming::decode)) {
                Ok(Some(Ok(Incoming::Answer(id, answer)))) => self.mailbox.answer(id, answer),
                Ok(Some(Ok(Incoming::Push(push)))) => self.mailbox.push(push),
                Ok(None) => break true,
                Ok(Some(Err(broken))) | Err(broken) => {
                    self.mailbox.close(&format!("it sent {}", broken.0));
                    break false;
                }
            }
        };
        self.mailbox.run_handlers();
        understood
    }
}

impl Source for Reader {
    fn ready(self: Arc<Self>, events: EventFlags) {
        if events.contains(EventFlags::OUT) {
            self.connection.flush_quietly();
        }
        let mut decoder = lock(&self.decoder);
        let received = self.connection.receive(&mut decoder);
        let understood = self.parse(&mut decoder);
        match received {
            Ok(Received::Some) if understood => return,
            Ok(Received::Some) => {}
            Ok(Received::End) => self.mailbox.close(LOST),
            Err(error) => self
                .mailbox
                .close(&format!("its connection broke without goodbye: {error}")),
        }
        self.mailbox.run_handlers();
        self.connection.forget();
        self.connection.shut();
    }
}
