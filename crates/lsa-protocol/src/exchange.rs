//! The protocol of one rank and one epoch, as a state machine that is stepped and never blocks.
//!
//! ```text
//! Pushing ──all blocks pushed, all flags released──▶ Taking
//!    └──an earlier exchange failed────▶ as that
//! Taking  ──all blocks taken──▶ Done
//!    ├──a block of another size──▶ Differs
//!    ├──the flag of the host─────▶ Aborted
//!    └──the deadline─────────────▶ Missing
//! ```
//!
//! The kernel does the same with one thread block for each peer, which pushes to one rank and takes from another.

use std::task::Poll;

use crate::{STATUS_ABORTED, STATUS_DIFFERS};

/// The memory and the clock of one rank in one epoch.
///
/// A slot or a flag belongs to the epoch's buffer; [`Layout`](crate::Layout) gives its position.
pub trait Machine {
    /// Why an access failed.
    type Error;

    /// Copies the block for this rank itself to its place among the received blocks.
    ///
    /// # Errors
    /// The access failed.
    fn keep(&mut self) -> Result<(), Self::Error>;

    /// Copies the block for `peer` into this rank's slot of that peer's window.
    ///
    /// # Errors
    /// The access failed.
    fn push(&mut self, peer: u32) -> Result<(), Self::Error>;

    /// Writes the size of a block beside this rank's flag in the window of `peer`, and then sets that flag to the epoch, with
    /// release ordering.
    ///
    /// # Errors
    /// The access failed.
    fn release(&mut self, peer: u32) -> Result<(), Self::Error>;

    /// Returns whether the flag of `source` in this rank's own window is the epoch, with acquire ordering.
    ///
    /// # Errors
    /// The access failed.
    fn acquire(&mut self, source: u32) -> Result<bool, Self::Error>;

    /// Returns whether the size beside the flag of `source`, which was seen to be the epoch, is that of this rank's blocks.
    ///
    /// # Errors
    /// The access failed.
    fn is_as_large(&mut self, source: u32) -> Result<bool, Self::Error>;

    /// Copies the block of `source` out of this rank's own window.
    ///
    /// # Errors
    /// The access failed.
    fn take(&mut self, source: u32) -> Result<(), Self::Error>;

    /// Returns whether the host has told the kernel to leave.
    ///
    /// # Errors
    /// The access failed.
    fn is_aborted(&mut self) -> Result<bool, Self::Error>;

    /// Returns whether the deadline of the exchange has passed.
    fn is_overdue(&mut self) -> bool;

    /// Returns the failure of an earlier exchange of this rank over the same window, if there was one.
    ///
    /// # Errors
    /// The access failed.
    fn failed(&mut self) -> Result<Option<Outcome>, Self::Error>;

    /// Records that this exchange has failed: [`failed`](Self::failed) returns `outcome` from now on.
    ///
    /// # Errors
    /// The access failed.
    fn fail(&mut self, outcome: Outcome) -> Result<(), Self::Error>;
}

/// How an exchange ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Every block has arrived.
    Done,
    /// The block of this rank did not arrive in time; those of other ranks may be missing as well.
    Missing(u32),
    /// The block of this rank has another size than the blocks of the rank that received it.
    Differs(u32),
    /// The host told the kernel to leave.
    Aborted,
}

impl Outcome {
    /// The status value that the kernel writes for this outcome.
    ///
    /// ```
    /// use lsa_protocol::Outcome;
    ///
    /// assert_eq!(Outcome::Done.status(), 0);
    /// assert_eq!(Outcome::Missing(0).status(), 1);
    /// assert_eq!(Outcome::Differs(2).status(), 0x8000_0002);
    /// assert_eq!(Outcome::Aborted.status(), 0xFFFF_FFFF);
    /// ```
    #[must_use]
    pub const fn status(self) -> u32 {
        match self {
            Self::Done => 0,
            Self::Missing(source) => 1 + source,
            Self::Differs(source) => STATUS_DIFFERS | source,
            Self::Aborted => STATUS_ABORTED,
        }
    }

    /// The outcome for a status that the kernel has written.
    ///
    /// ```
    /// use lsa_protocol::Outcome;
    ///
    /// assert_eq!(Outcome::from_status(3), Outcome::Missing(2));
    /// ```
    #[must_use]
    pub const fn from_status(status: u32) -> Self {
        match status {
            0 => Self::Done,
            STATUS_ABORTED => Self::Aborted,
            source if source >= STATUS_DIFFERS => Self::Differs(source - STATUS_DIFFERS),
            source => Self::Missing(source - 1),
        }
    }
}

/// The exchange of one rank in one epoch.
///
/// ```
/// use lsa_protocol::{Exchange, Machine, Outcome};
/// use std::convert::Infallible;
/// use std::task::Poll;
///
/// /// One rank of two, whose peer has already pushed its block.
/// struct Alone(Vec<String>);
///
/// impl Machine for Alone {
///     type Error = Infallible;
///     fn keep(&mut self) -> Result<(), Infallible> {
///         Ok(self.0.push("keep".to_owned()))
///     }
///     fn push(&mut self, peer: u32) -> Result<(), Infallible> {
///         Ok(self.0.push(format!("push to {peer}")))
///     }
///     fn release(&mut self, peer: u32) -> Result<(), Infallible> {
///         Ok(self.0.push(format!("release to {peer}")))
///     }
///     fn acquire(&mut self, _source: u32) -> Result<bool, Infallible> {
///         Ok(true)
///     }
///     fn is_as_large(&mut self, _source: u32) -> Result<bool, Infallible> {
///         Ok(true)
///     }
///     fn take(&mut self, source: u32) -> Result<(), Infallible> {
///         Ok(self.0.push(format!("take from {source}")))
///     }
///     fn is_aborted(&mut self) -> Result<bool, Infallible> {
///         Ok(false)
///     }
///     fn is_overdue(&mut self) -> bool {
///         false
///     }
///     fn failed(&mut self) -> Result<Option<Outcome>, Infallible> {
///         Ok(None)
///     }
///     fn fail(&mut self, outcome: Outcome) -> Result<(), Infallible> {
///         Ok(self.0.push(format!("{outcome:?}")))
///     }
/// }
///
/// let (mut exchange, mut machine) = (Exchange::new(0, 2), Alone(Vec::new()));
/// assert_eq!(exchange.step(&mut machine)?, Poll::Ready(Outcome::Done));
/// assert_eq!(machine.0, ["push to 1", "release to 1", "keep", "take from 1"]);
/// # Ok::<(), Infallible>(())
/// ```
#[derive(Clone, Debug)]
pub struct Exchange {
    rank: u32,
    ranks: u32,
    pushed: bool,
    /// The ranks whose blocks have not arrived, in the order of the kernel's blocks.
    missing: Vec<u32>,
}

impl Exchange {
    /// The exchange of `rank` among `ranks`.
    ///
    /// # Panics
    /// There is no such rank.
    ///
    /// ```
    /// assert_eq!(lsa_protocol::Exchange::new(0, 4).missing(), [3, 2, 1]);
    /// ```
    #[must_use]
    pub fn new(rank: u32, ranks: u32) -> Self {
        assert!(rank < ranks, "rank {rank} of {ranks}");
        // Block c of the kernel takes from the rank whose block c pushes to this one.
        let source =
            |block| ((u64::from(rank) + u64::from(ranks - block)) % u64::from(ranks)) as u32;
        Self {
            rank,
            ranks,
            pushed: false,
            missing: (1..ranks).map(source).collect(),
        }
    }

    /// The ranks whose blocks have not arrived yet.
    ///
    /// ```
    /// assert!(lsa_protocol::Exchange::new(0, 1).missing().is_empty());
    /// ```
    #[must_use]
    pub fn missing(&self) -> &[u32] {
        &self.missing
    }

    /// Pushes all blocks in the first call, and in each call takes the blocks that have arrived. `Pending` means that
    /// there is nothing more to do until another rank sets a flag.
    ///
    /// After a failed exchange, later ones push nothing: their blocks would overwrite blocks that a peer may still
    /// take.
    ///
    /// Blocks that have arrived are taken before the abort flag and the deadline are checked, so an exchange whose
    /// blocks are all there is done however late it is. A block of another size is not taken. After `Ready` or an error it must not
    /// be called again.
    ///
    /// # Errors
    /// The error of the machine.
    pub fn step<M: Machine>(&mut self, machine: &mut M) -> Result<Poll<Outcome>, M::Error> {
        if !self.pushed {
            if let Some(outcome) = machine.failed()? {
                return Ok(Poll::Ready(outcome));
            }
            for block in 1..self.ranks {
                let peer =
                    ((u64::from(self.rank) + u64::from(block)) % u64::from(self.ranks)) as u32;
                machine.push(peer)?;
                machine.release(peer)?;
            }
            machine.keep()?;
            self.pushed = true;
        }
        let mut ended = None;
        self.missing.retain(|&source| {
            if ended.is_some() {
                return true;
            }
            match Self::try_take(machine, source) {
                Ok(Arrival::Taken) => return false,
                Ok(Arrival::None) => {}
                Ok(Arrival::Differs) => ended = Some(Ok(Outcome::Differs(source))),
                Err(error) => ended = Some(Err(error)),
            }
            true
        });
        if let Some(ended) = ended {
            let outcome = ended?;
            machine.fail(outcome)?;
            return Ok(Poll::Ready(outcome));
        }
        let Some(&source) = self.missing.first() else {
            return Ok(Poll::Ready(Outcome::Done));
        };
        let outcome = if machine.is_aborted()? {
            Outcome::Aborted
        } else if machine.is_overdue() {
            Outcome::Missing(source)
        } else {
            return Ok(Poll::Pending);
        };
        machine.fail(outcome)?;
        Ok(Poll::Ready(outcome))
    }

    fn try_take<M: Machine>(machine: &mut M, source: u32) -> Result<Arrival, M::Error> {
        if !machine.acquire(source)? {
            return Ok(Arrival::None);
        }
        if !machine.is_as_large(source)? {
            return Ok(Arrival::Differs);
        }
        machine.take(source)?;
        Ok(Arrival::Taken)
    }
}

/// What a look at the flag of a rank has found.
enum Arrival {
    None,
    Taken,
    Differs,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Records the calls, with scripted results.
    #[derive(Default)]
    struct Script {
        calls: Vec<(&'static str, u32)>,
        come: Vec<u32>,
        /// The ranks whose blocks have another size.
        differ: Vec<u32>,
        aborted: bool,
        overdue: bool,
        failed: Option<Outcome>,
        /// The call that fails.
        fails: Option<(&'static str, u32)>,
    }

    impl Script {
        fn call(&mut self, name: &'static str, rank: u32) -> Result<(), &'static str> {
            self.calls.push((name, rank));
            match self.fails {
                Some(call) if call == (name, rank) => Err(name),
                _ => Ok(()),
            }
        }
    }

    impl Machine for Script {
        type Error = &'static str;

        fn keep(&mut self) -> Result<(), &'static str> {
            self.call("keep", 0)
        }

        fn push(&mut self, peer: u32) -> Result<(), &'static str> {
            self.call("push", peer)
        }

        fn release(&mut self, peer: u32) -> Result<(), &'static str> {
            self.call("release", peer)
        }

        fn acquire(&mut self, source: u32) -> Result<bool, &'static str> {
            Ok(self.come.contains(&source))
        }

        fn is_as_large(&mut self, source: u32) -> Result<bool, &'static str> {
            Ok(!self.differ.contains(&source))
        }

        fn take(&mut self, source: u32) -> Result<(), &'static str> {
            self.call("take", source)
        }

        fn is_aborted(&mut self) -> Result<bool, &'static str> {
            Ok(self.aborted)
        }

        fn is_overdue(&mut self) -> bool {
            self.overdue
        }

        fn failed(&mut self) -> Result<Option<Outcome>, &'static str> {
            Ok(self.failed)
        }

        fn fail(&mut self, outcome: Outcome) -> Result<(), &'static str> {
            self.failed = Some(outcome);
            Ok(())
        }
    }

    #[test]
    fn all_blocks_are_pushed_once_and_taken_as_they_come() {
        let (mut exchange, mut script) = (Exchange::new(1, 4), Script::default());
        assert_eq!(exchange.step(&mut script), Ok(Poll::Pending));
        let begin = [
            ("push", 2),
            ("release", 2),
            ("push", 3),
            ("release", 3),
            ("push", 0),
            ("release", 0),
            ("keep", 0),
        ];
        assert_eq!(script.calls, begin);
        script.calls.clear();
        script.come = vec![3];
        assert_eq!(exchange.step(&mut script), Ok(Poll::Pending));
        assert_eq!(exchange.missing(), [0, 2]);
        script.come = vec![0, 2, 3];
        assert_eq!(exchange.step(&mut script), Ok(Poll::Ready(Outcome::Done)));
        assert_eq!(script.calls, [("take", 3), ("take", 0), ("take", 2)]);
    }

    #[test]
    fn a_rank_without_peers_is_done_at_once() {
        let (mut exchange, mut script) = (Exchange::new(0, 1), Script::default());
        script.overdue = true;
        assert_eq!(exchange.step(&mut script), Ok(Poll::Ready(Outcome::Done)));
        assert_eq!(script.calls, [("keep", 0)]);
    }

    #[test]
    fn the_deadline_names_a_rank_that_is_missing_and_the_abort_comes_first() {
        let mut script = Script {
            come: vec![2],
            overdue: true,
            ..Script::default()
        };
        let step = |script: &mut Script| {
            script.failed = None;
            Exchange::new(0, 3).step(script).unwrap()
        };
        assert_eq!(step(&mut script), Poll::Ready(Outcome::Missing(1)));
        script.aborted = true;
        assert_eq!(step(&mut script), Poll::Ready(Outcome::Aborted));
        script.come.push(1);
        assert_eq!(step(&mut script), Poll::Ready(Outcome::Done));
    }

    #[test]
    fn a_block_of_another_size_is_not_taken_and_ends_the_exchange() {
        let mut script = Script {
            come: vec![1, 2],
            differ: vec![1],
            ..Script::default()
        };
        let differs = Ok(Poll::Ready(Outcome::Differs(1)));
        assert_eq!(Exchange::new(0, 3).step(&mut script), differs);
        assert_eq!(script.calls.last(), Some(&("take", 2)));
        assert_eq!(Exchange::new(0, 3).step(&mut script), differs);
        // Before it has come, its size is not looked at.
        let mut script = Script {
            differ: vec![1],
            ..Script::default()
        };
        assert_eq!(Exchange::new(0, 2).step(&mut script), Ok(Poll::Pending));
    }

    #[test]
    fn after_a_failure_nothing_is_pushed() {
        let mut script = Script {
            overdue: true,
            ..Script::default()
        };
        let missing = Ok(Poll::Ready(Outcome::Missing(2)));
        assert_eq!(Exchange::new(0, 3).step(&mut script), missing);
        script.calls.clear();
        (script.come, script.aborted) = (vec![1, 2], true);
        assert_eq!(Exchange::new(0, 3).step(&mut script), missing);
        assert_eq!(script.calls, []);
    }

    #[test]
    fn an_access_that_fails_ends_the_step() {
        for fails in [("push", 2), ("release", 1), ("keep", 0), ("take", 2)] {
            let mut script = Script {
                come: vec![1, 2],
                fails: Some(fails),
                ..Script::default()
            };
            let error = Exchange::new(0, 3).step(&mut script).unwrap_err();
            assert_eq!(error, fails.0);
            assert_eq!(script.calls.last(), Some(&fails));
        }
    }

    #[test]
    fn every_block_is_awaited_by_the_block_of_its_number() {
        for ranks in 1..6 {
            for rank in 0..ranks {
                let exchange = Exchange::new(rank, ranks);
                let sources = exchange.missing().iter().zip(1..ranks);
                assert!(sources.clone().count() as u32 == ranks - 1);
                for (&source, block) in sources {
                    assert_eq!((source + block) % ranks, rank);
                }
            }
        }
    }

    #[test]
    fn a_status_is_read_as_it_was_written() {
        let last = i32::MAX as u32 - 1;
        for outcome in [
            Outcome::Done,
            Outcome::Missing(7),
            Outcome::Missing(last),
            Outcome::Differs(0),
            Outcome::Differs(last),
            Outcome::Aborted,
        ] {
            assert_eq!(Outcome::from_status(outcome.status()), outcome);
        }
    }
}
