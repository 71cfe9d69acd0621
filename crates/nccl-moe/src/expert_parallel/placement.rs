//! The ranks that have the experts, and copies of them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt;

use crate::error::{Error, ErrorKind, Result};

/// Which experts each rank has: any number of copies of each, on different ranks.
///
/// Each rank has the same number of *places*; each place has one expert or is empty. A token that chooses an expert
/// goes to one of its copies, its *replicas*; tokens take turns among the replicas, so that each gets an equal share.
/// All copies give the same bits, so neither the placement nor the choice of a replica changes a result of
/// [`combine`](super::ExpertParallel::combine).
///
/// A placement is computed with the same arithmetic on all ranks: the same numbers give the same placement.
///
/// ```
/// use nccl::moe::ExpertPlacement;
///
/// // Eight experts on four ranks with five places each, two copies of each at least. Expert 0 is chosen most.
/// let loads = [900, 100, 100, 100, 100, 100, 100, 100];
/// let placement = ExpertPlacement::balanced(&loads, 4, 5, 2)?;
/// assert!(placement.replicas(0).len() > 2);
/// assert!((1..8).all(|expert| placement.replicas(expert).len() >= 2));
///
/// // Rank 2 dies; the others are ranks 0 to 2 of the next communicator, and go on with what they have.
/// let left = placement.after(&[Some(0), Some(1), Some(3)])?;
/// assert!(left.missing().is_empty());
///
/// // Later, every expert has two copies again.
/// let next = left.rebalanced(&loads, 6, 2)?;
/// for transfer in left.transfers(&next)? {
///     println!("expert {} from rank {:?} to rank {}", transfer.expert, transfer.from, transfer.to);
/// }
/// # Ok::<(), nccl::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct ExpertPlacement {
    experts: usize,
    places_per_rank: usize,
    /// The expert of each place, `[rank][place]`.
    held: Vec<Option<u32>>,
    /// The places of each expert, one expert after another, and the range of each expert in that list.
    places: Vec<usize>,
    first: Vec<usize>,
}

pub(super) fn refuse<T>(field: &'static str, reason: String) -> Result<T> {
    Err(Error::new(ErrorKind::InvalidConfig { field, reason }))
}

/// Rejects numbers that no placement has, or that do not fit into the kernel's 31 bits.
fn check_sizes(experts: usize, places_per_rank: usize, places: usize) -> Result<()> {
    let fits = |number: usize| i32::try_from(number).is_ok();
    if places_per_rank == 0 || places == 0 || !places.is_multiple_of(places_per_rank) {
        let reason = format!("{places} places are not {places_per_rank} for each of some ranks");
        return refuse("placement", reason);
    }
    match fits(places) && fits(experts) {
        true => Ok(()),
        false => refuse(
            "placement",
            format!(
                "{experts} experts and {places} places: at most {} are possible",
                i32::MAX
            ),
        ),
    }
}

impl ExpertPlacement {
    /// Returns the placement in blocks, without copies: expert `e` is on rank `e / (experts / ranks)`. It is the default of
    /// [`ExpertParallel::builder`](super::ExpertParallel::builder).
    ///
    /// # Errors
    /// [`ErrorKind::InvalidConfig`] if `experts` is no multiple of `ranks`.
    ///
    /// ```
    /// let placement = nccl::moe::ExpertPlacement::blocks(8, 4)?;
    /// assert_eq!(placement.expert_at(3, 1), Some(7));
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn blocks(experts: usize, ranks: usize) -> Result<Self> {
        if ranks == 0 || !experts.is_multiple_of(ranks) {
            return refuse(
                "experts",
                format!("{experts} experts cannot be dealt out evenly to {ranks} ranks"),
            );
        }
        let held: Vec<_> = (0..experts).map(Some).collect();
        Self::new(experts, experts / ranks, &held)
    }

    /// Returns the placement given by a table: the expert of each place, `[rank][place]`, with `places_per_rank` places
    /// for each rank.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidConfig`] for an expert that does not exist, for two copies of an expert on one rank, and for a table that has
    /// no full rank or more than 2³¹ − 1 places.
    ///
    /// ```
    /// use nccl::moe::ExpertPlacement;
    ///
    /// // Rank 0 has experts 0 and 1, rank 1 has expert 1 and room for another.
    /// let placement = ExpertPlacement::new(2, 2, &[Some(0), Some(1), Some(1), None])?;
    /// assert_eq!(placement.replicas(1), [1, 2]);
    /// let error = ExpertPlacement::new(2, 2, &[Some(0), Some(0)]).unwrap_err();
    /// assert!(error.to_string().contains("two copies of expert 0 on rank 0"));
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn new(experts: usize, places_per_rank: usize, held: &[Option<usize>]) -> Result<Self> {
        if experts == 0 {
            return refuse(
                "experts",
                String::from("it has to be given, and at least 1"),
            );
        }
        check_sizes(experts, places_per_rank, held.len())?;
        for (rank, own) in held.chunks(places_per_rank).enumerate() {
            for (place, expert) in own.iter().enumerate() {
                let Some(expert) = *expert else { continue };
                if expert >= experts {
                    let reason = format!("expert {expert} of {experts} on rank {rank}");
                    return refuse("placement", reason);
                }
                if own[..place].contains(&Some(expert)) {
                    let reason = format!("two copies of expert {expert} on rank {rank}");
                    return refuse("placement", reason);
                }
            }
        }
        let mut first = vec![0; experts + 1];
        for expert in held.iter().flatten() {
            first[expert + 1] += 1;
        }
        for expert in 0..experts {
            first[expert + 1] += first[expert];
        }
        let mut next = first.clone();
        let mut places = vec![0; first[experts]];
        for (place, expert) in held.iter().enumerate() {
            if let Some(expert) = *expert {
                places[next[expert]] = place;
                next[expert] += 1;
            }
        }
        // They fit: their number was checked.
        let held = held.iter().map(|expert| expert.map(|expert| expert as u32));
        Ok(Self {
            experts,
            places_per_rank,
            held: held.collect(),
            places,
            first,
        })
    }

    /// Returns a placement for experts that are chosen with unequal frequency: `loads` has the number of tokens that
    /// chose each expert, in any unit. Each expert has at least `copies` copies; further places go to the most chosen
    /// experts; and the copies are distributed so that each rank has about the same load, as in the balancers of
    /// DeepSeek's and vLLM's servers.
    ///
    /// With `copies` copies, the loss of any `copies - 1` ranks leaves a copy of each expert.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidConfig`] if there are fewer than `copies` ranks, or not enough places.
    ///
    /// ```
    /// use nccl::moe::ExpertPlacement;
    ///
    /// let loads = [700, 100, 100, 100];
    /// let blocks = ExpertPlacement::blocks(4, 2)?;
    /// let balanced = ExpertPlacement::balanced(&loads, 2, 3, 1)?;
    /// assert_eq!(blocks.imbalance(&loads), 1.6); // rank 0 has 800 of 1000 tokens, and 500 would be even
    /// assert!(balanced.imbalance(&loads) < 1.2);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn balanced(
        loads: &[u64],
        ranks: usize,
        places_per_rank: usize,
        copies: usize,
    ) -> Result<Self> {
        let experts = loads.len();
        let places = ranks.saturating_mul(places_per_rank);
        if copies == 0 || copies > ranks {
            return refuse(
                "copies",
                format!("{copies} copies of each expert on {ranks} ranks"),
            );
        }
        if experts.saturating_mul(copies) > places {
            return refuse(
                "copies",
                format!(
                    "{copies} copies of {experts} experts do not fit into {places_per_rank} places on each of {ranks} ranks"
                ),
            );
        }
        check_sizes(experts, places_per_rank, places)?;
        let shares = shares(loads, ranks, places, copies);
        let order = by_load(&shares);
        let held = pack(&shares, &order, ranks, places_per_rank)
            .unwrap_or_else(|| cyclic(&shares, &order, ranks, places_per_rank));
        Self::new(experts, places_per_rank, &held)
    }

    /// Returns the rest of the placement after the ranks have changed. `former[rank]` is the rank of this placement
    /// that becomes `rank` of the next communicator, or `None` for a new rank, which has no experts.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidConfig`] for a rank that does not exist or is named twice.
    ///
    /// ```
    /// let placement = nccl::moe::ExpertPlacement::blocks(4, 4)?;
    /// let next = placement.after(&[Some(0), Some(2), Some(3), None])?;
    /// assert_eq!(next.missing(), [1]);
    /// assert_eq!(next.replicas(3), [2]);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn after(&self, former: &[Option<usize>]) -> Result<Self> {
        let mut held = Vec::with_capacity(former.len() * self.places_per_rank);
        for (rank, was) in former.iter().enumerate() {
            let Some(was) = *was else {
                held.extend(std::iter::repeat_n(None, self.places_per_rank));
                continue;
            };
            if was >= self.ranks() {
                let ranks = self.ranks();
                return refuse("former", format!("rank {was} of {ranks}"));
            }
            if former[..rank].contains(&Some(was)) {
                return refuse("former", format!("rank {was} twice"));
            }
            held.extend((0..self.places_per_rank).map(|place| self.expert_at(was, place)));
        }
        Self::new(self.experts, self.places_per_rank, &held)
    }

    /// Returns a [`balanced`](Self::balanced) placement for the same ranks that moves few experts: each rank keeps the
    /// experts that it can keep, at the same place if that place still exists. An expert that no rank has gets its
    /// copies too.
    ///
    /// # Errors
    /// As [`balanced`](Self::balanced); [`ErrorKind::InvalidConfig`] if the number of loads differs from the number of
    /// experts.
    ///
    /// ```
    /// use nccl::moe::ExpertPlacement;
    ///
    /// let placement = ExpertPlacement::balanced(&[1, 1, 1, 1], 2, 4, 2)?;
    /// // Nothing has changed, and nothing moves.
    /// let again = placement.rebalanced(&[1, 1, 1, 1], 4, 2)?;
    /// assert_eq!(again, placement);
    /// // With less room, one copy of each is left.
    /// let less = placement.rebalanced(&[1, 1, 1, 1], 2, 1)?;
    /// assert!(placement.transfers(&less)?.iter().all(|transfer| transfer.from == Some(transfer.to)));
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn rebalanced(&self, loads: &[u64], places_per_rank: usize, copies: usize) -> Result<Self> {
        self.check_loads(loads)?;
        let ranks = self.ranks();
        let target = Self::balanced(loads, ranks, places_per_rank, copies)?;
        // The experts planned for one rank go to the rank that has most of them already.
        let own = |rank: usize| self.held_by(rank).map(|(_, expert)| expert);
        let mut pairs = Vec::with_capacity(ranks * ranks);
        for group in 0..ranks {
            let mut planned = vec![false; self.experts];
            target
                .held_by(group)
                .for_each(|(_, expert)| planned[expert] = true);
            for rank in 0..ranks {
                let kept = own(rank).filter(|expert| planned[*expert]).count();
                pairs.push((Reverse(kept), rank, group));
            }
        }
        pairs.sort_unstable();
        let (mut group_of, mut is_taken) = (vec![None; ranks], vec![false; ranks]);
        for (_, rank, group) in pairs {
            if group_of[rank].is_none() && !is_taken[group] {
                (group_of[rank], is_taken[group]) = (Some(group), true);
            }
        }
        let mut held = vec![None; ranks * places_per_rank];
        for (rank, group) in group_of.into_iter().enumerate() {
            let places = &mut held[rank * places_per_rank..(rank + 1) * places_per_rank];
            let mut moved = Vec::new();
            for (_, expert) in group.into_iter().flat_map(|group| target.held_by(group)) {
                let mut same = self.held_by(rank).filter(|(_, other)| *other == expert);
                match same.next() {
                    Some((place, _)) if place < places_per_rank => places[place] = Some(expert),
                    _ => moved.push(expert),
                }
            }
            let free = places.iter_mut().filter(|place| place.is_none());
            free.zip(moved)
                .for_each(|(place, expert)| *place = Some(expert));
        }
        Self::new(self.experts, places_per_rank, &held)
    }

    fn check_loads(&self, loads: &[u64]) -> Result<()> {
        match loads.len() == self.experts {
            true => Ok(()),
            false => refuse(
                "loads",
                format!("{} loads of {} experts", loads.len(), self.experts),
            ),
        }
    }

    /// Returns the number of experts, each counted once.
    ///
    /// ```
    /// assert_eq!(nccl::moe::ExpertPlacement::blocks(8, 4)?.experts(), 8);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Returns the number of ranks.
    ///
    /// ```
    /// assert_eq!(nccl::moe::ExpertPlacement::blocks(8, 4)?.ranks(), 4);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.held.len() / self.places_per_rank
    }

    /// Returns the number of places of each rank.
    ///
    /// ```
    /// assert_eq!(nccl::moe::ExpertPlacement::blocks(8, 4)?.places_per_rank(), 2);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn places_per_rank(&self) -> usize {
        self.places_per_rank
    }

    /// Returns the expert at a place of a rank; `None` for an empty place.
    ///
    /// # Panics
    /// If the rank or the place does not exist.
    ///
    /// ```
    /// let placement = nccl::moe::ExpertPlacement::new(1, 2, &[Some(0), None])?;
    /// assert_eq!(placement.expert_at(0, 1), None);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn expert_at(&self, rank: usize, place: usize) -> Option<usize> {
        assert!(
            place < self.places_per_rank,
            "place {place} of {}",
            self.places_per_rank
        );
        self.held[rank * self.places_per_rank + place].map(|expert| expert as usize)
    }

    /// Returns the expert of each place of a rank, in the order of the places.
    ///
    /// # Panics
    /// If the rank does not exist.
    ///
    /// ```
    /// let placement = nccl::moe::ExpertPlacement::new(1, 2, &[Some(0), None])?;
    /// assert_eq!(placement.places_of(0).collect::<Vec<_>>(), [Some(0), None]);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn places_of(&self, rank: usize) -> impl Iterator<Item = Option<usize>> + '_ {
        let own = &self.held[rank * self.places_per_rank..(rank + 1) * self.places_per_rank];
        own.iter()
            .map(|expert| expert.map(|expert| expert as usize))
    }

    /// Returns the experts of a rank with their places, in the order of the places.
    ///
    /// # Panics
    /// If the rank does not exist.
    ///
    /// ```
    /// let placement = nccl::moe::ExpertPlacement::blocks(4, 2)?;
    /// assert_eq!(placement.held_by(1).collect::<Vec<_>>(), [(0, 2), (1, 3)]);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn held_by(&self, rank: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
        let places = self.places_of(rank).enumerate();
        places.filter_map(|(place, expert)| Some((place, expert?)))
    }

    /// Returns the places of an expert, ascending: `rank * places_per_rank + place`.
    ///
    /// # Panics
    /// If the expert does not exist.
    ///
    /// ```
    /// let placement = nccl::moe::ExpertPlacement::new(2, 2, &[Some(0), Some(1), None, Some(0)])?;
    /// assert_eq!(placement.replicas(0), [0, 3]);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn replicas(&self, expert: usize) -> &[usize] {
        &self.places[self.first[expert]..self.first[expert + 1]]
    }

    /// Returns the experts that no rank has, ascending.
    ///
    /// ```
    /// let placement = nccl::moe::ExpertPlacement::new(3, 1, &[Some(1)])?;
    /// assert_eq!(placement.missing(), [0, 2]);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn missing(&self) -> Vec<usize> {
        (0..self.experts)
            .filter(|expert| self.replicas(*expert).is_empty())
            .collect()
    }

    /// Returns the load of the most loaded rank, divided by the mean load of all ranks: 1 is even. Replicas share the
    /// load of their expert equally; without any load the result is 1.
    ///
    /// # Panics
    /// If there is not one load for each expert.
    ///
    /// ```
    /// let placement = nccl::moe::ExpertPlacement::blocks(2, 2)?;
    /// assert_eq!(placement.imbalance(&[3, 1]), 1.5);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn imbalance(&self, loads: &[u64]) -> f64 {
        assert_eq!(loads.len(), self.experts, "one load for each expert");
        let share = |expert: usize| loads[expert] as f64 / self.replicas(expert).len() as f64;
        let of = |rank| {
            self.held_by(rank)
                .map(|(_, expert)| share(expert))
                .sum::<f64>()
        };
        let all: Vec<f64> = (0..self.ranks()).map(of).collect();
        let total: f64 = all.iter().sum();
        match total > 0.0 {
            true => all.iter().copied().fold(0.0, f64::max) * all.len() as f64 / total,
            false => 1.0,
        }
    }

    /// Returns the table that the kernel reads: the range of each expert's places, and the places.
    pub(super) fn table(&self) -> Vec<i32> {
        // All fit: the numbers were checked.
        let numbers = self.first.iter().chain(&self.places);
        numbers.map(|number| *number as i32).collect()
    }

    /// Returns a fingerprint of the placement (FNV-1a); different placements have different ones, except by chance.
    pub(super) fn fingerprint(&self) -> u64 {
        let own = [self.experts as u64, self.places_per_rank as u64];
        let held = self
            .held
            .iter()
            .map(|held| held.map_or(u64::MAX, u64::from));
        own.into_iter()
            .chain(held)
            .flat_map(u64::to_le_bytes)
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
            })
    }
}

impl fmt::Debug for ExpertPlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            experts,
            places_per_rank,
            ..
        } = self;
        let ranks = self.ranks();
        let copies = |expert: usize| self.replicas(expert).len();
        let least = (0..*experts).map(copies).min().unwrap_or(0);
        let most = (0..*experts).map(copies).max().unwrap_or(0);
        write!(
            f,
            "{experts} experts in {least} to {most} copies on {ranks} ranks × {places_per_rank} places"
        )
    }
}

/// The number of copies of an expert, and the load of each in a fixed-point unit that is the same on all ranks.
#[derive(Clone, Copy, Debug)]
struct Share {
    copies: usize,
    load: u128,
}

/// Distributes all places: `copies` to each expert, and each further place to the expert whose copies have the highest
/// load.
fn shares(loads: &[u64], ranks: usize, places: usize, copies: usize) -> Vec<Share> {
    // An expert that was never chosen has a small weight, so that copies of such experts are spread as well.
    let share =
        |expert: usize, copies: usize| ((u128::from(loads[expert]) + 1) << 32) / copies as u128;
    let mut counts = vec![copies; loads.len()];
    let key = |expert: usize, copies: usize| (share(expert, copies), Reverse(expert));
    let mut heap: BinaryHeap<_> = (0..loads.len())
        .filter(|_| copies < ranks)
        .map(|expert| key(expert, copies))
        .collect();
    for _ in loads.len() * copies..places {
        let Some((_, Reverse(expert))) = heap.pop() else {
            break;
        };
        counts[expert] += 1;
        if counts[expert] < ranks {
            heap.push(key(expert, counts[expert]));
        }
    }
    let all = counts.into_iter().enumerate();
    all.map(|(expert, copies)| Share {
        copies,
        load: share(expert, copies),
    })
    .collect()
}

/// Returns the experts, ordered by the load of their copies, highest first.
fn by_load(shares: &[Share]) -> Vec<usize> {
    let mut order: Vec<_> = (0..shares.len()).collect();
    order.sort_by_key(|expert| (Reverse(shares[*expert].load), *expert));
    order
}

/// Assigns the copies to ranks, in this order of their experts: each to the least loaded rank that has a free place and
/// does not have the expert. `None` if some copy cannot be assigned.
fn pack(
    shares: &[Share],
    order: &[usize],
    ranks: usize,
    places_per_rank: usize,
) -> Option<Vec<Option<usize>>> {
    let mut all = vec![(0u128, Vec::new()); ranks];
    for &expert in order {
        for _ in 0..shares[expert].copies {
            let has_room = |own: &Vec<usize>| own.len() < places_per_rank;
            let free = (0..ranks)
                .filter(|rank| has_room(&all[*rank].1) && !all[*rank].1.contains(&expert));
            let least = free.min_by_key(|rank| (all[*rank].0, all[*rank].1.len(), *rank));
            match least {
                Some(rank) => {
                    all[rank].0 += shares[expert].load;
                    all[rank].1.push(expert);
                }
                None if exchange(&mut all, shares, expert, places_per_rank) => {}
                None => return None,
            }
        }
    }
    let mut held = vec![None; ranks * places_per_rank];
    for (rank, (_, mut own)) in all.into_iter().enumerate() {
        own.sort_unstable();
        for (place, expert) in own.into_iter().enumerate() {
            held[rank * places_per_rank + place] = Some(expert);
        }
    }
    Some(held)
}

/// Makes room when every rank with a free place already has the expert: a full rank takes the expert and gives one of
/// its own to a rank with a free place. Of all such exchanges, chooses the one after which the more loaded of the two
/// ranks has the lowest load. Returns whether there was one.
fn exchange(
    all: &mut [(u128, Vec<usize>)],
    shares: &[Share],
    expert: usize,
    places_per_rank: usize,
) -> bool {
    let mut best: Option<(u128, usize, usize, usize)> = None;
    for (to, (to_load, to_own)) in all.iter().enumerate() {
        if to_own.len() == places_per_rank {
            continue;
        }
        for (from, (from_load, from_own)) in all.iter().enumerate() {
            if from_own.contains(&expert) {
                continue;
            }
            for (at, other) in from_own.iter().enumerate() {
                if to_own.contains(other) {
                    continue;
                }
                let load = shares[*other].load;
                let loads = (to_load + load).max(from_load - load + shares[expert].load);
                if best.is_none_or(|(least, ..)| loads < least) {
                    best = Some((loads, from, at, to));
                }
            }
        }
    }
    let Some((_, from, at, to)) = best else {
        return false;
    };
    let other = std::mem::replace(&mut all[from].1[at], expert);
    all[from].0 = all[from].0 - shares[other].load + shares[expert].load;
    all[to].0 += shares[other].load;
    all[to].1.push(other);
    true
}

/// Assigns one copy after another to one rank after another. No expert has more copies than there are ranks, so no rank
/// gets two of them.
fn cyclic(
    shares: &[Share],
    order: &[usize],
    ranks: usize,
    places_per_rank: usize,
) -> Vec<Option<usize>> {
    let mut held = vec![None; ranks * places_per_rank];
    let copies = order
        .iter()
        .flat_map(|expert| std::iter::repeat_n(*expert, shares[*expert].copies));
    for (number, expert) in copies.enumerate() {
        held[number % ranks * places_per_rank + number / ranks] = Some(expert);
    }
    held
}

#[cfg(test)]
mod tests {
    use super::super::transfers::ExpertTransfer;
    use super::*;

    /// A number of experts, ranks, places and copies that fit, and loads of very different sizes.
    fn draw(random: &mut fastrand::Rng) -> (Vec<u64>, usize, usize, usize) {
        let ranks = random.usize(1..=9);
        let copies = random.usize(1..=ranks.min(4));
        let experts = random.usize(1..=24);
        let needed = (experts * copies).div_ceil(ranks);
        let per_rank = needed + random.usize(0..=3);
        let skew = random.u32(0..20);
        let loads = (0..experts).map(|_| {
            let most = 1 << random.u32(0..=skew);
            random.u64(0..=most)
        });
        (loads.collect(), ranks, per_rank, copies)
    }

    #[test]
    fn every_expert_has_its_copies_on_ranks_of_their_own() {
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..3000 {
            let (loads, ranks, per_rank, copies) = draw(&mut random);
            let placement = ExpertPlacement::balanced(&loads, ranks, per_rank, copies).unwrap();
            // `new` has checked that no rank has two copies.
            for expert in 0..loads.len() {
                assert!(placement.replicas(expert).len() >= copies, "{placement:?}");
            }
            // No place is empty that could have had another copy.
            let used = placement.held.iter().flatten().count();
            assert_eq!(used, (ranks * per_rank).min(loads.len() * ranks));
            assert_eq!(
                placement,
                ExpertPlacement::balanced(&loads, ranks, per_rank, copies).unwrap()
            );
            assert!(placement.imbalance(&loads) < ranks as f64 + 1e-9);
        }
    }

    #[test]
    fn any_ranks_but_one_copy_may_go_and_what_moves_is_what_is_not_there() {
        let mut random = fastrand::Rng::with_seed(2);
        for _ in 0..2000 {
            let (loads, ranks, per_rank, copies) = draw(&mut random);
            let before = ExpertPlacement::balanced(&loads, ranks, per_rank, copies).unwrap();
            let mut former: Vec<_> = (0..ranks).map(Some).collect();
            random.shuffle(&mut former);
            former.truncate(ranks - (copies - 1));
            let left = before.after(&former).unwrap();
            assert_eq!(left.missing(), [0; 0], "{before:?}");
            // Newcomers in the places of those that went.
            former.resize(ranks, None);
            let left = before.after(&former).unwrap();
            let loads: Vec<_> = loads
                .iter()
                .map(|load| load / 2 + random.u64(0..9))
                .collect();
            let next = left.rebalanced(&loads, per_rank, copies).unwrap();
            let mut held = left.held.clone();
            for transfer in left.transfers(&next).unwrap() {
                let ExpertTransfer {
                    expert,
                    from,
                    to,
                    place,
                } = transfer;
                let from = from.expect("one of each is left");
                assert!(
                    left.held_by(from).any(|(_, own)| own == expert),
                    "{transfer:?}"
                );
                let at = to * per_rank + place;
                assert_ne!(held[at], Some(expert as u32), "{transfer:?}");
                held[at] = Some(expert as u32);
            }
            for (at, expert) in next.held.iter().enumerate() {
                assert!(expert.is_none() || held[at] == *expert);
            }
            assert_eq!(next.rebalanced(&loads, per_rank, copies).unwrap(), next);
            // With as much room as that needs, and no more, what a rank keeps is at the same place, or moved on the rank.
            let least = (loads.len() * copies).div_ceil(ranks);
            let tight = next.rebalanced(&loads, least, copies).unwrap();
            assert_eq!(tight.places_per_rank(), least);
            for transfer in next.transfers(&tight).unwrap() {
                let stays = |rank: usize| next.held_by(rank).any(|(_, own)| own == transfer.expert);
                assert_eq!(transfer.from == Some(transfer.to), stays(transfer.to));
            }
        }
    }

    #[test]
    fn experts_that_are_chosen_more_have_more_copies_and_the_ranks_equal_loads() {
        // As often as the words of a text: the n-th has a share of 1/n.
        let loads: Vec<u64> = (1..=64).map(|n| 1_000_000 / n).collect();
        for (ranks, per_rank) in [(8, 9), (8, 12), (16, 6), (32, 4)] {
            let placement = ExpertPlacement::balanced(&loads, ranks, per_rank, 1).unwrap();
            let (blocks, balanced) = (
                ExpertPlacement::blocks(64, ranks)
                    .unwrap()
                    .imbalance(&loads),
                placement.imbalance(&loads),
            );
            assert!(
                balanced < 1.1,
                "{ranks} × {per_rank}: {balanced:.3}, blocks {blocks:.3}"
            );
            assert!(blocks > 4.0, "{blocks}");
            let copies = |expert: usize| placement.replicas(expert).len();
            assert!((1..64).all(|expert| copies(expert) <= copies(expert - 1)));
        }
    }

    #[test]
    fn where_only_ranks_with_the_expert_have_room_a_full_rank_exchanges_one() {
        let loads = [5, 3, 1, 1, 4];
        let shares = loads.map(|load| Share { copies: 1, load });
        let mut all = [(9, vec![0, 1, 3]), (5, vec![2, 4])];
        assert!(exchange(&mut all, &shares, 2, 3));
        assert_eq!(all, [(7, vec![0, 2, 3]), (8, vec![2, 4, 1])]);
        // Here nothing can be exchanged.
        let mut all = [(1, vec![2]), (6, vec![0, 2])];
        assert!(!exchange(&mut all, &shares, 2, 2));
    }

    #[test]
    fn one_after_another_fits_as_well() {
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..3000 {
            let (loads, ranks, per_rank, copies) = draw(&mut random);
            let shares = shares(&loads, ranks, ranks * per_rank, copies);
            let held = cyclic(&shares, &by_load(&shares), ranks, per_rank);
            ExpertPlacement::new(loads.len(), per_rank, &held).unwrap();
        }
    }

    #[test]
    fn what_cannot_be_placed_is_refused_by_name() {
        let refused = |made: Result<ExpertPlacement>| format!("{:#}", made.unwrap_err());
        let balanced = ExpertPlacement::balanced;
        assert!(refused(balanced(&[1, 1], 2, 1, 3)).contains("3 copies of each expert on 2 ranks"));
        assert!(
            refused(balanced(&[1, 1], 2, 1, 2))
                .contains("2 copies of 2 experts do not fit into 1 places")
        );
        assert!(refused(balanced(&[], 2, 1, 1)).contains("experts"));
        assert!(refused(balanced(&[1], 0, 1, 1)).contains("on 0 ranks"));
        assert!(refused(balanced(&[1], 2, usize::MAX, 1)).contains("at most 2147483647"));
        assert!(refused(balanced(&[1], 2, 1 << 40, 1)).contains("at most 2147483647"));
        assert!(refused(ExpertPlacement::blocks(7, 2)).contains("7 experts"));
        assert!(refused(ExpertPlacement::blocks(0, 2)).contains("experts"));
        assert!(refused(ExpertPlacement::new(1, 2, &[Some(0)])).contains("1 places"));
        assert!(refused(ExpertPlacement::new(1, 0, &[])).contains("0 places"));
        assert!(
            refused(ExpertPlacement::new(1, 1, &[Some(1)])).contains("expert 1 of 1 on rank 0")
        );
        let blocks = ExpertPlacement::blocks(4, 2).unwrap();
        assert!(refused(blocks.after(&[Some(2)])).contains("rank 2 of 2"));
        assert!(refused(blocks.after(&[Some(1), Some(1)])).contains("rank 1 twice"));
        assert!(refused(blocks.rebalanced(&[1], 2, 1)).contains("1 loads of 4 experts"));
        let other = ExpertPlacement::blocks(4, 4).unwrap();
        assert!(format!("{:#}", blocks.transfers(&other).unwrap_err()).contains("cannot become"));
    }

    #[test]
    fn different_placements_have_different_fingerprints() {
        let table = |held: [usize; 4]| ExpertPlacement::new(4, 2, &held.map(Some)).unwrap();
        let all = [[0, 1, 2, 3], [1, 0, 2, 3], [0, 1, 3, 2], [2, 3, 0, 1]];
        let mut seen: Vec<_> = all.map(|held| table(held).fingerprint()).into();
        seen.push(
            ExpertPlacement::new(4, 4, &[0, 1, 2, 3].map(Some))
                .unwrap()
                .fingerprint(),
        );
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), all.len() + 1);
    }
}
