//! An exchange that is begun first and waited for later.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::forked::{self, ForkGuarded};
use crate::session::{BegunRequest, RankSession};
use crate::time::deadline_after;
use crate::world::World;

/// An exchange to which this rank has contributed its part. It does not keep the rank in its world.
pub struct PendingExchange(ForkGuarded<(Weak<RankSession>, BegunRequest)>);

impl World {
    /// Contributes this rank's part to an exchange of `topic` between all ranks. The deadline is `timeout` after the
    /// first rank has contributed its own.
    pub fn begin_exchange(
        &self,
        topic: &str,
        bytes: &[u8],
        timeout: Duration,
    ) -> Result<PendingExchange> {
        let session = self.session();
        let begun = session.begin_exchange(topic, None, bytes, deadline_after(timeout))?;
        let session = Arc::downgrade(session);
        Ok(PendingExchange(ForkGuarded::new((session, begun))))
    }
}

impl PendingExchange {
    /// Whether [`wait`](Self::wait) would return at once.
    pub fn is_ready(&self) -> bool {
        forked::is_child() || self.0.1.is_ready()
    }

    /// Waits for the parts of all ranks, and returns them by rank.
    pub fn wait(self) -> Result<Vec<Vec<u8>>> {
        forked::check()?;
        let (session, begun) = &*self.0;
        let session = session.upgrade();
        let session = session.filter(|session| begun.is_ready() || session.is_in_world());
        match session {
            Some(session) => session.finish_exchange(begun, None),
            None => Err(Error::rendezvous(format!(
                "{:?} is about a world that this rank has left",
                begun.topic
            ))),
        }
    }
}
