//! All ranks' facts side by side, and how ranks are named.

use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::preflight::facts::{Facts, ProcessFacts};
use crate::preflight::interfaces::{Address, Rule};
use nccl_base::report::Finding;

/// The facts of all ranks, by rank.
pub(in crate::preflight) struct FactsView<'f> {
    facts: &'f [Facts],
    /// For each rank, the first rank of its process.
    process: Vec<Option<usize>>,
    /// For each rank that is the first of a process, what the rules need often.
    places: Vec<Option<Place<'f>>>,
    /// How many processes of a network take an address.
    taken: BTreeMap<(usize, IpAddr), usize>,
    /// The ranks on this host and altogether, when these facts belong to no world yet.
    alone: Option<(usize, usize)>,
}

/// Where NCCL starts in a process.
struct Place<'f> {
    /// The number of its network, which is the same for all processes of the network.
    network: usize,
    choice: Option<(&'f Address, Rule)>,
}

/// A value, and the ranks that have it.
pub(in crate::preflight) type Group<V> = (V, Vec<usize>);

/// The most values that one sentence shows.
const SHOWN: usize = 6;

impl<'f> FactsView<'f> {
    pub(in crate::preflight) fn of(facts: &'f [Facts]) -> Self {
        let mut last = None;
        let process = facts.iter().enumerate().map(|(rank, facts)| {
            if facts.process.is_some() {
                last = Some(rank);
            }
            last
        });
        let mut networks: BTreeMap<String, usize> = BTreeMap::new();
        let mut taken: BTreeMap<(usize, IpAddr), usize> = BTreeMap::new();
        let places = facts.iter().map(|facts| {
            let process = facts.process.as_ref()?;
            let next = networks.len();
            let network = *networks.entry(process.network()).or_insert(next);
            let choice = process.choice();
            if let Some((address, _)) = choice {
                *taken.entry((network, address.address)).or_default() += 1;
            }
            Some(Place { network, choice })
        });
        Self {
            process: process.collect(),
            places: places.collect(),
            taken,
            facts,
            alone: None,
        }
    }

    /// A view of one host, before there is a world.
    pub(in crate::preflight) fn alone(facts: &'f [Facts], local: usize, all: usize) -> Self {
        Self {
            alone: Some((local, all)),
            ..Self::of(facts)
        }
    }

    pub(super) fn is_alone(&self) -> bool {
        self.alone.is_some()
    }

    pub(in crate::preflight) fn ranks(&self) -> impl Iterator<Item = usize> + use<> {
        0..self.facts.len()
    }

    /// The number of ranks of the world.
    pub(super) fn size(&self) -> usize {
        self.alone.map_or(self.facts.len(), |(_, all)| all)
    }

    pub(super) fn facts(&self, rank: usize) -> &'f Facts {
        &self.facts[rank]
    }

    pub(in crate::preflight) fn process(&self, rank: usize) -> Option<&'f ProcessFacts> {
        self.facts[self.process[rank]?].process.as_ref()
    }

    fn place(&self, rank: usize) -> Option<&Place<'f>> {
        self.places[self.process[rank]?].as_ref()
    }

    /// A number that is equal for ranks of one network.
    pub(in crate::preflight) fn network(&self, rank: usize) -> Option<usize> {
        Some(self.place(rank)?.network)
    }

    /// The address that NCCL takes for a rank.
    pub(super) fn choice(&self, rank: usize) -> Option<(&'f Address, Rule)> {
        self.place(rank)?.choice
    }

    /// The number of processes in other networks than `network` that take an address in the subnet of `own`.
    pub(super) fn taken_near(&self, network: usize, own: &Address) -> usize {
        let others = self.taken.iter().filter(|((of, _), _)| *of != network);
        let near = others.filter(|((_, address), _)| own.is_near(*address));
        near.map(|(_, count)| count).sum()
    }

    /// The first rank of each process, with the process.
    pub(in crate::preflight) fn processes(
        &self,
    ) -> impl Iterator<Item = (usize, &'f ProcessFacts)> {
        let own = |(rank, facts): (usize, &'f Facts)| Some((rank, facts.process.as_ref()?));
        self.facts.iter().enumerate().filter_map(own)
    }

    pub(in crate::preflight) fn host(&self, rank: usize) -> &'f str {
        self.process(rank)
            .map_or("unknown host", |process| &process.host)
    }

    /// The number of ranks on the machine of `process`.
    pub(super) fn local_ranks(&self, process: &ProcessFacts) -> usize {
        if let Some((local, _)) = self.alone {
            return local;
        }
        let same = |&rank: &usize| {
            let other = self.process(rank);
            other.is_some_and(|other| (&other.boot, &other.host) == (&process.boot, &process.host))
        };
        self.ranks().filter(same).count()
    }

    /// Ranks grouped by their `key`, the largest group first, and of equal ones the group with the lowest rank.
    pub(in crate::preflight) fn groups<V: Ord>(
        &self,
        key: impl Fn(usize) -> Option<V>,
    ) -> Vec<Group<V>> {
        let mut found: BTreeMap<V, Vec<usize>> = BTreeMap::new();
        for rank in self.ranks() {
            if let Some(key) = key(rank) {
                found.entry(key).or_default().push(rank);
            }
        }
        let mut groups: Vec<_> = found.into_iter().collect();
        groups.sort_by_key(|(_, ranks)| (std::cmp::Reverse(ranks.len()), ranks[0]));
        groups
    }

    /// The ranks that differ among the groups, and a sentence that gives the value of each group: `said` of a value
    /// follows the ranks. Without a majority, no rank counts as different and all groups are named.
    pub(in crate::preflight) fn contrast<V>(
        &self,
        groups: &[Group<V>],
        said: impl Fn(&V) -> String,
    ) -> (Vec<usize>, String) {
        let has_majority = match groups {
            [_] => true,
            [first, second, ..] => first.1.len() > second.1.len(),
            [] => false,
        };
        let odd = if has_majority { &groups[1..] } else { groups };
        let mut sorted: Vec<_> = odd.iter().collect();
        sorted.sort_by_key(|(_, ranks)| ranks[0]);
        let mut parts: Vec<String> = sorted
            .iter()
            .take(SHOWN)
            .map(|(value, ranks)| format!("{} {}", self.who(ranks), said(value)))
            .collect();
        if sorted.len() > SHOWN {
            parts.push(format!(
                "{} more groups of ranks other values",
                sorted.len() - SHOWN
            ));
        }
        if let (true, Some((value, ranks))) = (has_majority, groups.first()) {
            parts.push(format!("{} {}", self.others(ranks), said(value)));
        }
        let mut ranks: Vec<usize> = odd.iter().flat_map(|(_, ranks)| ranks.clone()).collect();
        ranks.sort_unstable();
        (ranks, parts.join(", "))
    }

    /// `rank 5 (h2)`, or `ranks 0-3 (h1), 5 (h2)`.
    pub(in crate::preflight) fn who(&self, ranks: &[usize]) -> String {
        if self.is_alone() {
            return format!(
                "this host ({})",
                ranks.first().map_or("", |&rank| self.host(rank))
            );
        }
        let mut parts = Vec::new();
        for (host, ranks) in self.by_host(ranks) {
            parts.push(format!("{} ({host})", spans(&ranks)));
        }
        if parts.len() > 2 * SHOWN {
            let more = parts.len() - 2 * SHOWN;
            parts.truncate(2 * SHOWN);
            parts.push(format!("and on {more} more hosts"));
        }
        let word = if ranks.len() == 1 { "rank" } else { "ranks" };
        format!("{word} {}", parts.join(", "))
    }

    /// `the other 6 ranks (h1, h3)`.
    pub(super) fn others(&self, ranks: &[usize]) -> String {
        if let [rank] = ranks {
            return format!("the other one, rank {rank} ({}),", self.host(*rank));
        }
        format!(
            "the other {} ranks ({})",
            ranks.len(),
            shortened(&self.hosts(ranks))
        )
    }

    /// The hosts of these ranks, each once, in the order of the ranks.
    pub(in crate::preflight) fn hosts(&self, ranks: &[usize]) -> Vec<String> {
        let hosts = self.by_host(ranks).into_iter();
        hosts.map(|(host, _)| host.to_owned()).collect()
    }

    fn by_host(&self, ranks: &[usize]) -> Vec<(&'f str, Vec<usize>)> {
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        let mut found: Vec<(&str, Vec<usize>)> = Vec::new();
        let mut places: BTreeMap<&str, usize> = BTreeMap::new();
        for rank in sorted {
            let host = self.host(rank);
            let place = *places.entry(host).or_insert_with(|| {
                found.push((host, Vec::new()));
                found.len() - 1
            });
            found[place].1.push(rank);
        }
        found
    }

    /// Adds ranks and their hosts to a finding.
    pub(in crate::preflight) fn about(&self, ranks: &[usize], mut finding: Finding) -> Finding {
        finding.hosts = self.hosts(ranks);
        if !self.is_alone() {
            finding.ranks = ranks.to_vec();
            finding.ranks.sort_unstable();
        }
        finding
    }
}

/// The first few of a list of names.
pub(super) fn shortened(names: &[String]) -> String {
    if names.len() <= 2 * SHOWN {
        return names.join(", ");
    }
    let more = names.len() - 2 * SHOWN;
    format!("{} and {more} more", names[..2 * SHOWN].join(", "))
}

/// `0-3,5`.
fn spans(ranks: &[usize]) -> String {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for &rank in ranks {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => parts.push((rank, rank)),
        }
    }
    let told = parts
        .iter()
        .take(32)
        .map(|&(first, last)| match last - first {
            0 => first.to_string(),
            1 => format!("{first},{last}"),
            _ => format!("{first}-{last}"),
        });
    let mut text = told.collect::<Vec<_>>().join(",");
    if parts.len() > 32 {
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::tests::ranks_on;

    #[test]
    fn the_odd_one_of_three_hosts_is_named_and_the_majority_shown() {
        let facts = ranks_on(&["h1", "h1", "h2", "h2", "h3", "h3"]);
        let view = FactsView::of(&facts);
        let groups = view.groups(|rank| Some(if rank == 3 { "LL" } else { "Ring" }));
        let (odd, text) = view.contrast(&groups, |value| format!("has {value}"));
        assert_eq!(odd, [3]);
        assert_eq!(
            text,
            "rank 3 (h2) has LL, the other 5 ranks (h1, h2, h3) has Ring"
        );
    }

    #[test]
    fn of_two_equal_groups_none_is_odd() {
        let facts = ranks_on(&["h1", "h1", "h2", "h2"]);
        let view = FactsView::of(&facts);
        let groups = view.groups(|rank| Some(rank / 2));
        let (odd, text) = view.contrast(&groups, |value| format!("got {value}"));
        assert_eq!(odd, [0, 1, 2, 3]);
        assert_eq!(text, "ranks 0,1 (h1) got 0, ranks 2,3 (h2) got 1");
    }

    #[test]
    fn when_everyone_differs_the_first_few_are_shown() {
        let facts = ranks_on(&["h"; 9]);
        let view = FactsView::of(&facts);
        let groups = view.groups(Some);
        let (odd, text) = view.contrast(&groups, ToString::to_string);
        assert_eq!(odd.len(), 9);
        assert!(
            text.ends_with("rank 5 (h) 5, 3 more groups of ranks other values"),
            "{text}"
        );
    }

    #[test]
    fn ranks_are_named_by_host_and_in_spans() {
        let facts = ranks_on(&["h1", "h1", "h1", "h2", "h2", "h1"]);
        let view = FactsView::of(&facts);
        assert_eq!(view.who(&[5, 0, 1, 2, 4]), "ranks 0-2,5 (h1), 4 (h2)");
        assert_eq!(view.who(&[3]), "rank 3 (h2)");
        assert_eq!(
            FactsView::alone(&facts[..1], 8, 8).who(&[0]),
            "this host (h1)"
        );
    }
}
