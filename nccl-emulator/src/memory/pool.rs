//! The memory of one device of this process.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::Mapping;

/// The memory of one device of this process.
#[derive(Debug)]
pub(crate) struct Pool {
    mapping: Arc<Mapping>,
}

impl Pool {
    /// The memfd behind the pool: pass it to a peer, who maps it with `import`.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        todo!()
    }

    /// Random, unique for each process and device.
    pub(crate) fn token(&self) -> u128 {
        todo!()
    }

    /// The pool as mapped here.
    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }
}
