//! What is measured, and what it comes to.

use nccl_tools::statistics::median;

use super::Outcome;
use super::operation::Operation;
use super::options::Options;
use super::team::Team;

/// Repetitions in a turn, at least and at most.
const REPETITIONS: std::ops::RangeInclusive<usize> = 3..=50_000;

/// One operation at one size: the seconds that it took each competitor, round by round.
pub(crate) struct Comparison {
    pub(crate) operation: Operation,
    pub(crate) ranks: usize,
    pub(crate) bytes: usize,
    pub(crate) ours: Vec<f64>,
    pub(crate) mpi: Vec<f64>,
    pub(crate) memcpy: Vec<f64>,
    /// MPI that sends nothing before the receiver is there; empty where that is not measured.
    pub(crate) meeting: Vec<f64>,
}

/// A median, and the least and the greatest.
#[derive(Clone, Copy)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) least: f64,
    pub(crate) greatest: f64,
}

impl Spread {
    pub(crate) fn of(values: &[f64]) -> Self {
        Self {
            median: median(values).unwrap_or(f64::NAN),
            least: values.iter().copied().fold(f64::INFINITY, f64::min),
            greatest: values.iter().copied().fold(0.0, f64::max),
        }
    }
}

impl Comparison {
    /// Ours over theirs, round by round: what disturbs a round disturbs both.
    pub(crate) fn ratio(&self, others: &[f64]) -> Spread {
        let ratios: Vec<f64> = self
            .ours
            .iter()
            .zip(others)
            .map(|(ours, other)| ours / other)
            .collect();
        Spread::of(&ratios)
    }
}

/// Those that take turns.
pub(crate) struct Teams {
    pub(crate) ours: Team,
    pub(crate) theirs: Team,
    /// See [`Comparison::meeting`].
    pub(crate) meeting: Option<Team>,
}

/// From here on Open MPI does not send eagerly anyway.
pub(crate) const EAGER: usize = 4 << 10;

/// All operations and sizes with so many ranks.
pub(crate) fn all(ranks: usize, options: &Options, teams: &mut Teams) -> Outcome<Vec<Comparison>> {
    let mut cases = Vec::new();
    if ranks == 2 {
        cases.push((Operation::SendRecv, 8));
    }
    for operation in [Operation::AllToAll, Operation::AllReduce] {
        cases.extend(options.sizes().map(|bytes| (operation, bytes)));
    }
    // Every page of every buffer is used once before anything is timed, also by the peers that map it.
    let all = [&mut teams.ours, &mut teams.theirs].into_iter();
    for team in all.chain(&mut teams.meeting) {
        team.time(Operation::AllToAll, options.max, 1)?;
    }
    let mut results = Vec::new();
    for (operation, bytes) in cases {
        let all = [&mut teams.ours, &mut teams.theirs].into_iter();
        for team in all.chain(&mut teams.meeting) {
            team.check(operation, bytes)?;
        }
        let done = compare(operation, ranks, bytes, options, teams)?;
        eprintln!(
            "{ranks} ranks, {} of {bytes} B: emulator {:.2} us, Open MPI {:.2} us, memcpy {:.2} us",
            operation.name(),
            Spread::of(&done.ours).median * 1e6,
            Spread::of(&done.mpi).median * 1e6,
            Spread::of(&done.memcpy).median * 1e6
        );
        results.push(done);
    }
    Ok(results)
}

fn compare(
    operation: Operation,
    ranks: usize,
    bytes: usize,
    options: &Options,
    teams: &mut Teams,
) -> Outcome<Comparison> {
    let meets = operation == Operation::AllToAll && bytes / ranks < EAGER;
    let competitors = match teams.meeting {
        Some(_) if meets => 4,
        _ => 3,
    };
    let mut turn = |competitor: usize, count: usize| match (competitor, &mut teams.meeting) {
        (0, _) => teams.ours.time(operation, bytes, count),
        (1, _) => teams.theirs.time(operation, bytes, count),
        (3, Some(meeting)) => meeting.time(operation, bytes, count),
        _ => teams.theirs.time(Operation::Memcpy, bytes, count),
    };
    let mut counts = [0; 4];
    for (competitor, count) in counts.iter_mut().enumerate().take(competitors) {
        *count = repetitions(options.turn, |count| turn(competitor, count))?;
    }
    let mut times: [Vec<f64>; 4] = Default::default();
    for round in 0..options.rounds {
        for place in 0..competitors {
            let competitor = (round + place) % competitors;
            times[competitor].push(turn(competitor, counts[competitor])?);
        }
    }
    let [ours, mpi, memcpy, meeting] = times;
    Ok(Comparison {
        operation,
        ranks,
        bytes,
        ours,
        mpi,
        memcpy,
        meeting,
    })
}

/// How many fit into a turn.
fn repetitions(turn: f64, mut time: impl FnMut(usize) -> Outcome<f64>) -> Outcome<usize> {
    let mut count = *REPETITIONS.start();
    loop {
        let seconds = time(count)?;
        let fitting = ((turn / seconds) as usize).clamp(*REPETITIONS.start(), *REPETITIONS.end());
        // From a good part of a turn one can tell the whole.
        if fitting <= 8 * count {
            return Ok(fitting);
        }
        count *= 4;
    }
}
