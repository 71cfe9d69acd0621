//! How far each rank has come on each communicator, and which ranks are behind.

use std::collections::{BTreeMap, HashMap};

use super::{RankRecording, Timeline, describe};
use nccl_base::fault::{Roster, short_key};
use nccl_core::recorder::{Call, CallState, Recording, Snapshot};

/// How far the ranks of one communicator have come.
///
/// ```
/// fn show(timeline: &nccl::recorder::Timeline) {
///     for standing in timeline.standings() {
///         println!("{}: {}", standing.communicator, standing.sentence);
///     }
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Standing {
    /// The communicator's name.
    pub communicator: String,
    /// The name for readers: with the world ranks of its members unless these are all ranks in order, and with the key
    /// if several communicators would have the same name.
    pub named: String,
    /// The key that distinguishes it from other communicators of its name.
    pub key: Option<String>,
    /// Its generation.
    pub generation: u64,
    /// The sequence number of the last call of each of its ranks, by rank in the communicator: 0 before the first call;
    /// a rank without a recording has no entry.
    pub last: BTreeMap<usize, u64>,
    /// The ranks, in the communicator, whose last call has a lower number than the highest. If all ranks make the same
    /// calls, the others wait for these ranks.
    pub behind: Vec<usize>,
    /// The standing as a sentence.
    pub sentence: String,
    /// What NCCL has reported about the first call that is not done, if it was observed, by rank in the communicator.
    pub inside_nccl: BTreeMap<usize, String>,
}

/// See [`identity`].
pub(super) type Identity = (String, u64, usize, Option<Vec<usize>>);

/// What identifies a communicator on all ranks: its key, or the closest substitute, which several may have.
pub(super) fn identity(recording: &Recording) -> Identity {
    match &recording.key {
        Some(key) => (key.clone(), 0, 0, None),
        None => (
            format!("name {}", recording.name),
            recording.generation,
            recording.world_size,
            recording.members.clone(),
        ),
    }
}

/// The communicators of a snapshot, with what tells each apart on all ranks: where several have one substitute for a key, also
/// their order.
pub(super) fn identified(
    snapshot: &Snapshot,
) -> impl Iterator<Item = ((Identity, usize), &Recording)> {
    let mut seen = BTreeMap::new();
    snapshot.communicators.iter().map(move |recording| {
        let identity = identity(recording);
        let order = match recording.key {
            Some(_) => 0,
            None => {
                // A process may have several ranks of one communicator.
                let order = seen.entry((identity.clone(), recording.rank)).or_insert(0);
                *order += 1;
                *order
            }
        };
        ((identity, order), recording)
    })
}

impl Timeline {
    /// How far each rank has come on each communicator. Numbers are comparable where all ranks make the same calls, as
    /// they must with collectives.
    ///
    /// ```
    /// let timeline = nccl::recorder::Timeline::merge(vec![nccl::recorder::snapshot()])?;
    /// for standing in timeline.standings() {
    ///     println!("{}: {}", standing.communicator, standing.sentence);
    /// }
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn standings(&self) -> Vec<Standing> {
        let mut groups: BTreeMap<_, Vec<(&RankRecording, &Recording)>> = BTreeMap::new();
        let mut order = Vec::new();
        for rank in &self.ranks {
            for (identity, recording) in identified(&rank.snapshot) {
                let group = groups.entry(identity).or_insert_with_key(|identity| {
                    order.push(identity.clone());
                    Vec::new()
                });
                group.push((rank, recording));
            }
        }
        let mut standings: Vec<_> = order.iter().map(|key| standing(&groups[key])).collect();
        let mut names: HashMap<String, usize> = HashMap::new();
        for standing in &standings {
            *names.entry(standing.named.clone()).or_default() += 1;
        }
        for standing in &mut standings {
            if let Some(key) = &standing.key
                && names[&standing.named] > 1
            {
                standing.named = format!("{}, key {}", standing.named, short_key(key));
            }
        }
        standings
    }
}

fn standing(group: &[(&RankRecording, &Recording)]) -> Standing {
    let first = group[0].1;
    let roster = first.roster();
    let last: BTreeMap<usize, u64> = group
        .iter()
        .map(|(_, recording)| {
            let last = recording.calls.last().map_or(0, |call| call.sequence);
            (recording.rank, last)
        })
        .collect();
    // The ranks at each number.
    let mut ranks_at: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (&rank, &number) in &last {
        ranks_at.entry(number).or_default().push(rank);
    }
    let calls_at = calls_at(group, ranks_at.keys().copied());
    let at = |number: u64| at(number, &calls_at[&number]);
    let (highest, leaders) = ranks_at.pop_last().unwrap_or_default();
    let mut behind: Vec<usize> = ranks_at.values().flatten().copied().collect();
    behind.sort_unstable();
    let absent = first.world_size.saturating_sub(last.len());
    let mut parts = Vec::new();
    if highest == 0 {
        parts.push(String::from("nothing was called yet"));
    } else if behind.is_empty() {
        let ahead = "all that are here are at";
        parts.push(format!("{ahead} {}", at(highest)));
    } else {
        // Of a rank that was started again the last recording counts.
        let processes: HashMap<usize, &RankRecording> = group
            .iter()
            .map(|&(rank, recording)| (recording.rank, rank))
            .collect();
        for (&number, those) in &ranks_at {
            let verb = if those.len() == 1 { "is" } else { "are" };
            let place = match number {
                0 => String::from("has called nothing yet"),
                number => format!("{verb} behind, at {}", at(number)),
            };
            parts.push(format!("{} {place}", named(those, &roster, &processes)));
        }
        let verb = if leaders.len() == 1 { "is" } else { "are" };
        let leaders = roster.who(&leaders);
        parts.push(format!("{leaders} {verb} at {}", at(highest)));
    }
    if absent > 0 {
        let absentees = (0..first.world_size)
            .filter(|rank| !last.contains_key(rank))
            .take(16)
            .collect::<Vec<_>>();
        let more = if absent > absentees.len() {
            " and more"
        } else {
            ""
        };
        parts.push(format!(
            "nothing is known of {}{more}",
            roster.who(&absentees)
        ));
    }
    Standing {
        communicator: first.name.clone(),
        named: roster.named(&first.name),
        key: first.key.clone(),
        generation: first.generation,
        last,
        behind,
        sentence: parts.join("; "),
        inside_nccl: group
            .iter()
            .filter_map(|(_, recording)| Some((recording.rank, inside(recording)?)))
            .collect(),
    }
}

/// Names one rank with its process, several ranks by their numbers.
fn named(those: &[usize], roster: &Roster, processes: &HashMap<usize, &RankRecording>) -> String {
    match those {
        [one] if let Some(rank) = processes.get(one) => {
            let Snapshot { host, pid, .. } = &rank.snapshot;
            format!("rank {one} ({}{host}, pid {pid})", roster.others(*one))
        }
        _ => roster.who(those),
    }
}

/// `all_reduce #3, AllReduce (RING, SIMPLE): its kernel runs on 2 of 2 channels`
fn inside(recording: &Recording) -> Option<String> {
    let said = |call: &Call| {
        Some(format!(
            "{}, {}",
            describe::title(call),
            call.inside_nccl.as_ref()?
        ))
    };
    recording.calls.iter().find_map(said)
}

/// The calls of each of these numbers, on the ranks that made it.
fn calls_at<'t>(
    group: &[(&'t RankRecording, &'t Recording)],
    numbers: impl Iterator<Item = u64>,
) -> HashMap<u64, Vec<&'t Call>> {
    let mut found: HashMap<u64, Vec<&Call>> = numbers.map(|number| (number, Vec::new())).collect();
    for (_, recording) in group {
        for call in &recording.calls {
            if let Some(calls) = found.get_mut(&call.sequence) {
                calls.push(call);
            }
        }
    }
    found
}

/// The name of call `number`, and how far it has come on the ranks that made it.
fn at(number: u64, calls: &[&Call]) -> String {
    let Some(first) = calls.first() else {
        return format!("#{number}");
    };
    let same = calls.iter().all(|call| call.state == first.state);
    let state = match (same, first.state) {
        (true, state) => describe::state(state),
        (false, _) if calls.iter().any(|call| call.state == CallState::Done) => "done on some",
        (false, _) => "not done",
    };
    let kinds = calls.iter().all(|call| call.kind == first.kind);
    match kinds {
        true => format!("{} ({state})", describe::title(first)),
        false => format!("#{number}, which is not the same call on all of them ({state})"),
    }
}
