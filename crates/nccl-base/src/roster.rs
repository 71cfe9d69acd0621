//! The world ranks and launcher ranks of a communicator's ranks, with which a reader can find a named rank among the
//! processes of the job.
//!
//! Texts contain such a number only if it differs: none is added for a communicator of the whole world in order whose
//! ranks have their launcher ranks as world ranks.

use serde::{Deserialize, Serialize};

use crate::ranges::ranges;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[doc(hidden)]
pub struct Roster {
    /// World ranks, by rank; empty for all ranks of the world in order, and without a world.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    world_ranks: Vec<usize>,
    /// Launcher ranks, by rank; empty if they equal the world ranks, or are unknown.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    launcher_ranks: Vec<usize>,
}

impl Roster {
    /// Builds the roster of the world ranks `members`; `launched` has the launcher rank of each world rank, if known.
    #[doc(hidden)]
    pub fn new(members: &[usize], launched: &[Option<usize>]) -> Self {
        let size = launched.len().max(members.len());
        let is_whole = members.iter().copied().eq(0..size);
        let launched = |member: &usize| *launched.get(*member)?;
        let launcher = members
            .iter()
            .map(|member| launched(member).unwrap_or(*member));
        let is_same = launcher.clone().eq(members.iter().copied());
        Self {
            world_ranks: if is_whole {
                Vec::new()
            } else {
                members.to_vec()
            },
            launcher_ranks: if is_same {
                Vec::new()
            } else {
                launcher.collect()
            },
        }
    }

    /// Builds the roster of a communicator that was recorded.
    #[doc(hidden)]
    pub fn recorded(world_ranks: Option<&[usize]>, launcher_ranks: Option<&[usize]>) -> Self {
        Self {
            world_ranks: world_ranks.unwrap_or_default().to_vec(),
            launcher_ranks: launcher_ranks.unwrap_or_default().to_vec(),
        }
    }

    /// Returns the world rank of `rank`.
    #[doc(hidden)]
    pub fn world_rank(&self, rank: usize) -> usize {
        self.world_ranks.get(rank).copied().unwrap_or(rank)
    }

    /// Returns the world rank of `rank`, if it differs.
    fn other_world_rank(&self, rank: usize) -> Option<usize> {
        let world_rank = self.world_ranks.get(rank).copied();
        world_rank.filter(|world_rank| *world_rank != rank)
    }

    /// Returns the launcher rank of `rank`, if it differs from the world rank.
    #[doc(hidden)]
    pub fn launcher_rank(&self, rank: usize) -> Option<usize> {
        let launched = self.launcher_ranks.get(rank).copied();
        launched.filter(|launched| *launched != self.world_rank(rank))
    }

    /// Returns the launcher ranks, by rank, if any of them differs from the world rank.
    #[doc(hidden)]
    pub fn launcher_ranks(&self) -> Option<&[usize]> {
        (!self.launcher_ranks.is_empty()).then_some(&*self.launcher_ranks)
    }

    /// Returns the world ranks in short form; `None` if they are all ranks of the world in order.
    #[doc(hidden)]
    pub fn world_ranks(&self) -> Option<String> {
        (!self.world_ranks.is_empty()).then(|| short(&self.world_ranks))
    }

    /// Returns the name of the communicator, with its world ranks unless they are all ranks of the world in order.
    #[doc(hidden)]
    pub fn named(&self, name: &str) -> String {
        match self.world_ranks() {
            Some(ranks) => format!(
                "{name:?} (world {})",
                plural(&ranks, self.world_ranks.len())
            ),
            None => format!("{name:?}"),
        }
    }

    /// Formats ranks: `ranks 0-1 (world ranks 2-3)`.
    #[doc(hidden)]
    pub fn who(&self, ranks: &[usize]) -> String {
        let world: Vec<_> = ranks.iter().map(|rank| self.world_rank(*rank)).collect();
        let launcher = |rank: &usize| self.launcher_rank(*rank);
        let mut also = Vec::new();
        if world != ranks {
            also.push(format!("world {}", who(&world)));
        }
        if ranks.iter().any(|rank| launcher(rank).is_some()) {
            let launched = ranks.iter().zip(&world);
            let launched = launched.map(|(rank, world)| launcher(rank).unwrap_or(*world));
            also.push(format!("launcher {}", who(&launched.collect::<Vec<_>>())));
        }
        match &also[..] {
            [] => who(ranks),
            also => format!("{} ({})", who(ranks), also.join(", ")),
        }
    }

    /// Returns the differing numbers of `rank` in the form in which they precede its host:
    /// `world rank 3, launcher rank 4, `, or nothing.
    #[doc(hidden)]
    pub fn others(&self, rank: usize) -> String {
        let world = self.other_world_rank(rank).map(|rank| ("world", rank));
        let launcher = self.launcher_rank(rank).map(|rank| ("launcher", rank));
        let others = world.into_iter().chain(launcher);
        others
            .map(|(whose, rank)| format!("{whose} rank {rank}, "))
            .collect()
    }

    /// Returns a line with the world and launcher ranks, for a reader; `None` if all numbers are the same.
    #[doc(hidden)]
    pub fn legend(&self, name: &str) -> Option<String> {
        let world = self
            .world_ranks()
            .map(|ranks| format!("world ranks {ranks}"));
        let launcher = (!self.launcher_ranks.is_empty())
            .then(|| format!("launcher ranks {}", short(&self.launcher_ranks)));
        let all: Vec<_> = world.into_iter().chain(launcher).collect();
        (!all.is_empty()).then(|| format!("{name:?} has {} in order", all.join(", ")))
    }
}

/// Returns the beginning of a communicator's key, which distinguishes it from others of the same name and ranks.
#[doc(hidden)]
pub fn short_key(key: &str) -> &str {
    key.get(..8).unwrap_or(key)
}

/// Formats ranks: `rank 3`, or `ranks 0-2,5`.
#[doc(hidden)]
pub fn who(ranks: &[usize]) -> String {
    let list = ranges(ranks);
    match ranks.len() {
        1 => format!("rank {list}"),
        _ => format!("ranks {list}"),
    }
}

fn plural(list: &str, ranks: usize) -> String {
    match ranks {
        1 => format!("rank {list}"),
        _ => format!("ranks {list}"),
    }
}

/// Formats ranks in order: `2-3,7`, and `0-1016 by 8` for ranks at equal distances.
fn short(ranks: &[usize]) -> String {
    if let [first, second, .., last] = ranks
        && let Some(step) = second.checked_sub(*first).filter(|step| *step > 1)
        && ranks.windows(2).all(|two| two[0] + step == two[1])
    {
        return format!("{first}-{last} by {step}");
    }
    ranges(ranks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_said_where_they_differ_and_nowhere_else() {
        let four = [None; 4];
        let whole = Roster::new(&[0, 1, 2, 3], &four);
        assert_eq!(whole, Roster::default());
        assert_eq!(whole.named("job"), "\"job\"");
        assert_eq!(whole.who(&[1, 2]), "ranks 1-2");
        assert_eq!(whole.legend("job"), None);
        let low = Roster::new(&[0, 1], &four);
        assert_eq!(low.named("tp"), "\"tp\" (world ranks 0-1)");
        assert_eq!(low.who(&[1]), "rank 1");
        assert_eq!(low.others(1), "");
        let high = Roster::new(&[2, 3], &four);
        assert_eq!(high.named("tp"), "\"tp\" (world ranks 2-3)");
        assert_eq!(high.who(&[0, 1]), "ranks 0-1 (world ranks 2-3)");
        assert_eq!(high.others(1), "world rank 3, ");
        assert_eq!((high.world_rank(1), high.other_world_rank(1)), (3, Some(3)));
        let turned = Roster::new(&[3, 0], &four);
        assert_eq!(turned.named("dp"), "\"dp\" (world ranks 3,0)");
        assert_eq!(
            turned.legend("dp").as_deref(),
            Some("\"dp\" has world ranks 3,0 in order")
        );
        assert_eq!(
            Roster::new(&[2], &four).named("pp"),
            "\"pp\" (world rank 2)"
        );
    }

    #[test]
    fn the_number_that_a_launcher_gave_is_said_where_the_world_has_another_one() {
        // The launcher's rank 1 is gone.
        let left = [Some(0), Some(2), Some(3)];
        let whole = Roster::new(&[0, 1, 2], &left);
        assert_eq!(whole.launcher_rank(0), None);
        assert_eq!(whole.others(1), "launcher rank 2, ");
        assert_eq!(whole.who(&[0, 1]), "ranks 0-1 (launcher ranks 0,2)");
        assert_eq!(whole.named("job"), "\"job\"");
        let part = Roster::new(&[1, 2], &left);
        assert_eq!(part.others(0), "world rank 1, launcher rank 2, ");
        assert_eq!(
            part.legend("tp").as_deref(),
            Some("\"tp\" has world ranks 1-2, launcher ranks 2-3 in order")
        );
    }

    #[test]
    fn many_ranks_are_listed_in_a_short_form() {
        let all = [None; 1024];
        let every_eighth: Vec<_> = (0..1024).step_by(8).collect();
        assert_eq!(
            Roster::new(&every_eighth, &all).named("dp"),
            "\"dp\" (world ranks 0-1016 by 8)"
        );
    }
}
