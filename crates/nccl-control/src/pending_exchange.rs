//! An exchange that is waited for later than it is begun.

use std::sync::Arc;
use std::time::Duration;

use crate::error::Result;
use crate::forked::{self, ForkGuarded};
use crate::session::{BegunRequest, RankSession};
use crate::time::deadline_after;
use crate::world::World;

/// An exchange in which this rank has given its part.
pub struct PendingExchange(ForkGuarded<(Arc<RankSession>, BegunRequest)>);

impl World {
    /// As [`all_gather`](Self::all_gather), without waiting for the others. The deadline is `timeout` after the first rank has given its
    /// part.
    pub fn begin_all_gather(
        &self,
        name: &str,
        bytes: &[u8],
        timeout: Duration,
    ) -> Result<PendingExchange> {
        let topic = format!("gather/{name}");
        let session = Arc::clone(self.session());
        let begun = session.begin_exchange(&topic, None, bytes, deadline_after(timeout))?;
        Ok(PendingExchange(ForkGuarded::new((session, begun))))
    }
}

impl PendingExchange {
    /// Whether [`wait`](Self::wait) does not wait any more.
    pub fn is_over(&self) -> bool {
        forked::is_child() || self.0.1.is_over()
    }

    /// Waits for the parts of all ranks, and returns them by rank.
    pub fn wait(self) -> Result<Vec<Vec<u8>>> {
        forked::check()?;
        let (session, begun) = &*self.0;
        session.finish_exchange(begun, None)
    }
}
