//! A collective on one channel, for the algorithms.

use super::arithmetic::Arithmetic;
use super::block::Block;
use super::functions::Function;
use super::works::{Collective, Share};

/// A collective on one channel.
pub(super) struct Task<'a> {
    pub(super) block: &'a Block,
    pub(super) function: Function,
    pub(super) work: &'a Collective,
    pub(super) arithmetic: Arithmetic,
    pub(super) share: Share,
}
