//! Agreement of all ranks on what they are about to do, before they enter a collective.

use std::cmp::Reverse;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use nccl_base::error::{Error, ErrorKind, Result};
use nccl_base::{roster, sanitize};
use nccl_control::{PendingExchange, RankProcess};

use crate::world::World;

/// Maximum number of characters of a step's description in an error.
const SHOWN: usize = 200;

/// Maximum number of ranks, and of different steps, that an error lists one by one.
const NAMED: usize = 4;

/// A step that this rank has proposed to the others ([`World::propose_step`]).
///
/// A `ProposedStep` does not keep the rank in its world. If it is dropped, the proposal still counts on the other
/// ranks, unless another rank takes over as coordinator before all have proposed: then they wait for this rank until
/// the timeout.
#[must_use = "the ranks have agreed once `agree` has returned"]
pub struct ProposedStep {
    exchange: PendingExchange,
    name: String,
    members: Arc<OnceLock<Vec<RankProcess>>>,
}

impl World {
    /// Proposes this rank's next step to the other ranks, so that ranks that would enter different steps get an error
    /// instead of hanging in NCCL. `step` is a readable text with everything that has to agree, such as `step 17: 8
    /// rows of 512`. `name` identifies the kind of step: the n-th proposal of a rank under a name is compared with the
    /// n-th of every other rank.
    ///
    /// Does not wait: propose a step while the previous one is still running, and call [`ProposedStep::agree`] before
    /// the first collective. At most two proposals of a name may be undecided at a time. Each rank receives the texts
    /// of all: of `n` ranks, `n²` texts go over the network. A rank that has missed a step first receives the failure
    /// of that step.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`] when this rank is no longer part of its world.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let world = nccl::World::single();
    /// let step = world.propose_step("decode", "step 17: 8 rows of 512", Duration::from_secs(5))?;
    /// // … what of the step before is left to do, and what of this one needs no other rank …
    /// step.agree()?;
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn propose_step(&self, name: &str, step: &str, timeout: Duration) -> Result<ProposedStep> {
        let exchange =
            self.control
                .begin_exchange(&format!("step/{name}"), step.as_bytes(), timeout)?;
        Ok(ProposedStep {
            exchange,
            name: name.to_owned(),
            members: self.control.session().members(),
        })
    }
}

impl ProposedStep {
    /// Whether [`agree`](Self::agree) would return at once.
    ///
    /// ```
    /// let world = nccl::World::single();
    /// let step = world.propose_step("decode", "step 17", std::time::Duration::from_secs(5))?;
    /// assert!(step.is_decided());
    /// step.agree()?;
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn is_decided(&self) -> bool {
        self.exchange.is_ready()
    }

    /// Waits until all ranks have proposed their step, and compares the steps.
    ///
    /// # Errors
    /// [`ErrorKind::StepsDiffer`], the same on all ranks, when the proposed steps differ: it names the ranks that
    /// differ from most others, and the step of each. [`ErrorKind::Rendezvous`] names the ranks that have proposed
    /// nothing within the timeout, or the rank that is gone, or states that this rank has left the world. A proposal
    /// never excludes a rank from the world.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let steps = std::thread::scope(|scope| {
    ///     let ranks = nccl::World::threads(2).into_iter().map(|world| {
    ///         scope.spawn(move || {
    ///             let own = format!("step {}", world.rank());
    ///             world.propose_step("decode", &own, Duration::from_secs(5))?.agree()
    ///         })
    ///     });
    ///     let ranks: Vec<_> = ranks.collect();
    ///     ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    /// });
    /// assert!(steps.iter().all(Result::is_err));
    /// ```
    pub fn agree(self) -> Result<()> {
        let Self {
            exchange,
            name,
            members,
        } = self;
        let parts = exchange.wait()?;
        let who = |rank: usize| match members.get().and_then(|members| members.get(rank)) {
            Some(member) => format!("rank {rank} ({}, pid {})", member.host, member.pid),
            None => format!("rank {rank}"),
        };
        match difference(&parts, who) {
            None => Ok(()),
            Some(difference) => Err(Error::new(ErrorKind::StepsDiffer { name, difference })),
        }
    }
}

/// Describes how the steps of the ranks differ; `None` if all are equal. `who` names a rank.
fn difference(parts: &[Vec<u8>], who: impl Fn(usize) -> String) -> Option<String> {
    let mut sides: Vec<(&[u8], Vec<usize>)> = Vec::new();
    for (rank, part) in parts.iter().enumerate() {
        match sides.iter_mut().find(|(step, _)| step == part) {
            Some((_, ranks)) => ranks.push(rank),
            None => sides.push((part, vec![rank])),
        }
    }
    if sides.len() < 2 {
        return None;
    }
    // The largest side comes last, because the others differ from it; of equal sides, the one with the lowest rank.
    sides.sort_by_key(|(_, ranks)| (ranks.len(), Reverse(ranks[0])));
    let are_most = |ranks: &[usize]| 2 * ranks.len() > parts.len();
    let names = |ranks: &[usize]| match ranks {
        _ if are_most(ranks) => String::from("the others"),
        [..] if ranks.len() <= NAMED => {
            let names: Vec<_> = ranks.iter().map(|rank| who(*rank)).collect();
            names.join(", ")
        }
        _ => roster::who(ranks),
    };
    let most = sides.len().min(NAMED) - 1;
    let shown = sides[..most].iter().chain(sides.last());
    let mut texts: Vec<_> = shown
        .map(|(step, ranks)| {
            let step = sanitize::text(&String::from_utf8_lossy(step));
            let shown: String = step.chars().take(SHOWN).collect();
            format!("{} would enter {shown:?}", names(ranks))
        })
        .collect();
    let more = sides.len() - texts.len();
    if more > 0 {
        texts.insert(
            most,
            format!("other ranks would enter {more} further steps"),
        );
    }
    Some(texts.join("; "))
}

impl fmt::Debug for ProposedStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProposedStep")
            .field("name", &self.name)
            .field("is_decided", &self.is_decided())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(steps: &[&str]) -> Option<String> {
        let parts: Vec<_> = steps.iter().map(|step| step.as_bytes().to_vec()).collect();
        difference(&parts, |rank| format!("rank {rank} (h{rank}, pid 7)"))
    }

    #[test]
    fn ranks_that_differ_from_most_are_named_with_their_step() {
        assert_eq!(of(&["a", "a", "a"]), None);
        assert_eq!(of(&["a"]), None);
        let one = "rank 1 (h1, pid 7) would enter \"b\"; the others would enter \"a\"";
        assert_eq!(of(&["a", "b", "a"]).unwrap(), one);
        let even = "rank 1 (h1, pid 7) would enter \"b\"; rank 0 (h0, pid 7) would enter \"a\"";
        assert_eq!(of(&["a", "b"]).unwrap(), even);
        let many: Vec<_> = (0..12)
            .map(|rank| ["a", "b"][usize::from(rank < 5)])
            .collect();
        let some = "ranks 0-4 would enter \"b\"; the others would enter \"a\"";
        assert_eq!(of(&many).unwrap(), some);
        let all = of(&["a", "b", "c", "d", "e", "f"]).unwrap();
        assert!(
            all.contains("; other ranks would enter 2 further steps; "),
            "{all}"
        );
        assert!(!of(&["a", "\u{1b}[2J", "a"]).unwrap().contains('\u{1b}'));
    }
}
