//! Ordered messages from rank to rank beside NCCL.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::exchange::check_rank;
use super::inbox::ReceiveOutcome;
use super::request::{NO_ANSWER, Request};
use super::service::{CAPACITY, LARGEST_MESSAGE};
use super::world::World;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Result};
use crate::forked;
use crate::time::deadline_after;

impl World {
    /// Returns the ordered channel between all ranks with this name, for step-by-step instructions among ranks.
    pub fn channel(&self, name: &str) -> Channel<'_> {
        Channel {
            world: self,
            name: name.to_owned(),
        }
    }
}

/// Ordered messages between all ranks of a [`World`], from [`World::channel`].
///
/// Each rank receives each message once, in the order of all messages of the channel, also after its connection was
/// interrupted. When a rank leaves, fails or dies, every other rank receives the messages sent before that, and then the
/// same error, which names the rank. If that rank is the coordinator, through which all messages pass, some ranks may have
/// received more of the last messages than others. The same holds, with an error that says so, if another rank coordinates
/// now because the coordinator was not reached for some time, although it lives.
///
/// ```
/// fn replicate(steps: &nccl::control::Channel<'_>, step: &[u8]) -> nccl::Result<()> {
///     steps.send(step)
/// }
/// ```
pub struct Channel<'w> {
    world: &'w World,
    name: String,
}

/// A message, from [`Channel::recv`].
///
/// ```
/// fn show(message: &nccl::control::ChannelMessage) {
///     println!("{} bytes from rank {}", message.bytes.len(), message.from);
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChannelMessage {
    /// The rank that sent the message.
    pub from: usize,
    /// The content of the message.
    pub bytes: Arc<[u8]>,
}

impl Channel<'_> {
    /// Sends `bytes` (1 MiB at most) to all other ranks. Returns when the message has its place in the
    /// order, and every rank has room for it.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`] names the ranks that have not taken their messages within the world's
    /// timeout, or the rank that has departed or no longer coordinates; [`ErrorKind::Io`] for a message that is too large.
    ///
    /// ```
    /// nccl::World::single().channel("steps").send(b"to nobody")?;
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn send(&self, bytes: &[u8]) -> Result<()> {
        self.send_message(None, bytes)
    }

    /// Sends `bytes` to one rank alone, in the order of all messages of this channel.
    ///
    /// # Errors
    /// As [`send`](Self::send); [`ErrorKind::NoSuchRank`].
    ///
    /// ```
    /// let world = nccl::World::single();
    /// let steps = world.channel("steps");
    /// steps.send_to(0, b"to myself")?;
    /// assert!(steps.recv(std::time::Duration::ZERO)?.is_some());
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn send_to(&self, rank: usize, bytes: &[u8]) -> Result<()> {
        check_rank("rank", rank, self.world.size())?;
        self.send_message(Some(rank), bytes)
    }

    fn send_message(&self, to: Option<usize>, bytes: &[u8]) -> Result<()> {
        let topic = format!("channel/{}", self.name);
        let session = &self.world.session;
        if bytes.len() > LARGEST_MESSAGE {
            let bytes = bytes.len();
            let error = std::io::Error::new(
                std::io::ErrorKind::InvalidInput,
                format!("{bytes} bytes are more than the {LARGEST_MESSAGE} of one message"),
            );
            return Err(Error::io(format!("sending to {topic:?}"))(error));
        }
        let request = |timeout| Request::Send {
            channel: self.name.clone(),
            to,
            timeout,
            bytes: bytes.to_vec(),
        };
        let deadline = deadline_after(self.world.timeout());
        let full = format!("{topic}, where {CAPACITY} messages wait");
        session.ask(&full, request, deadline, None).map(drop)
    }

    /// Returns the next message; `None` when none arrives within `timeout`.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`] names the rank that has departed, after all messages sent before that have been
    /// received, or the rank that no longer coordinates.
    ///
    /// ```
    /// let world = nccl::World::single();
    /// assert_eq!(world.channel("steps").recv(std::time::Duration::ZERO)?, None);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn recv(&self, timeout: Duration) -> Result<Option<ChannelMessage>> {
        forked::check()?;
        let session = &self.world.session;
        let topic = format!("channel/{}", self.name);
        match session.inbox.receive(&self.name, deadline_after(timeout)) {
            ReceiveOutcome::Message { from, bytes, took } => {
                if let Some(taken) = took {
                    let channel = self.name.clone();
                    session.send(NO_ANSWER, Request::Consumed { channel, taken });
                }
                Ok(Some(ChannelMessage { from, bytes }))
            }
            ReceiveOutcome::Late => Ok(None),
            ReceiveOutcome::ChannelsEnded(why) => Err(session.error_of(&topic, &why)),
            ReceiveOutcome::Closed(why) => {
                // The inbox is closed, so this does not wait.
                let lost = (session.coordinator(), why);
                Err(session.lost_with_coordinator(&topic, lost, Instant::now(), None))
            }
        }
    }
}

impl fmt::Debug for Channel<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel").field("name", &self.name).finish()
    }
}
