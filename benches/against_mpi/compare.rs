//! Runs the measurements, and computes their results.

use nccl_tools::statistics::median;

use super::Outcome;
use super::example::Example;
use super::operation::Operation;
use super::options::Options;
use super::rank::BATCH;
use super::team::Team;

/// Repetitions in a turn, at least and at most.
const REPETITIONS: std::ops::RangeInclusive<usize> = 3..=50_000;

/// One operation at one size: the seconds of each competitor, round by round.
pub(crate) struct Comparison {
    pub(crate) operation: Operation,
    pub(crate) ranks: usize,
    pub(crate) bytes: usize,
    pub(crate) ours: Vec<f64>,
    pub(crate) mpi: Vec<f64>,
    pub(crate) memcpy: Vec<f64>,
    /// MPI that sends nothing before the receiver is ready; empty if not measured.
    pub(crate) meeting: Vec<f64>,
    /// As `ours`, called through the safe crate; empty if not measured.
    pub(crate) by_crate: Vec<f64>,
    /// By the C functions, in cycles as the example program measures; empty if not measured.
    pub(crate) in_cycles: Vec<f64>,
    /// Through the safe crate in the same cycles; empty if not measured.
    pub(crate) crate_in_cycles: Vec<f64>,
    /// By the example program; empty if not measured.
    pub(crate) by_example: Vec<f64>,
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
    /// Ours over theirs, round by round: a disturbance of a round affects both.
    pub(crate) fn ratio(&self, others: &[f64]) -> Spread {
        ratio(&self.ours, others)
    }

    /// The safe crate over the C functions, likewise.
    pub(crate) fn crate_ratio(&self) -> Spread {
        ratio(&self.by_crate, &self.ours)
    }

    /// The example program over the C functions in cycles, likewise.
    pub(crate) fn example_ratio(&self) -> Spread {
        ratio(&self.by_example, &self.in_cycles)
    }

    /// The example program over the safe crate in the same cycles, likewise.
    pub(crate) fn example_over_crate(&self) -> Spread {
        ratio(&self.by_example, &self.crate_in_cycles)
    }

    /// The time that the safe crate adds to the C functions within each round, in seconds.
    pub(crate) fn added(&self) -> Spread {
        let pairs = self.by_crate.iter().zip(&self.ours);
        Spread::of(&pairs.map(|(a, b)| a - b).collect::<Vec<f64>>())
    }
}

fn ratio(some: &[f64], others: &[f64]) -> Spread {
    let ratios: Vec<f64> = some.iter().zip(others).map(|(a, b)| a / b).collect();
    Spread::of(&ratios)
}

/// The teams that alternate.
pub(crate) struct Teams {
    pub(crate) ours: Team,
    pub(crate) theirs: Team,
    /// See [`Comparison::meeting`].
    pub(crate) meeting: Option<Team>,
    pub(crate) example: Option<Example>,
}

/// From this size on Open MPI does not send eagerly anyway.
pub(crate) const EAGER: usize = 4 << 10;

/// Measures all operations and sizes with `ranks` ranks.
pub(crate) fn all(ranks: usize, options: &Options, teams: &mut Teams) -> Outcome<Vec<Comparison>> {
    let mut cases = Vec::new();
    if ranks == 2 {
        cases.push((Operation::SendRecv, 8));
    }
    for operation in [Operation::AllToAll, Operation::AllReduce] {
        cases.extend(options.sizes().map(|bytes| (operation, bytes)));
    }
    // Every page of every buffer is used once before the timing, also by the peers that map it.
    let all = [&mut teams.ours, &mut teams.theirs].into_iter();
    for team in all.chain(&mut teams.meeting) {
        team.time(Operation::AllToAll, options.max, 1)?;
    }
    teams
        .ours
        .time(Operation::AllToAllByCrate, options.max, 1)?;
    let mut results = Vec::new();
    for (operation, bytes) in cases {
        let all = [&mut teams.ours, &mut teams.theirs].into_iter();
        for team in all.chain(&mut teams.meeting) {
            team.check(operation, bytes)?;
        }
        if operation == Operation::AllToAll {
            teams.ours.check(Operation::AllToAllByCrate, bytes)?;
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
    let mut competitors = vec![Competitor::Ours, Competitor::Mpi, Competitor::Memcpy];
    if operation == Operation::AllToAll {
        competitors.push(Competitor::Crate);
        if teams.meeting.is_some() && bytes / ranks < EAGER {
            competitors.push(Competitor::Meeting);
        }
    }
    let example = teams.example.as_ref();
    let example = example.filter(|_| operation == Operation::AllToAll);
    let mut turn = |competitor: Competitor, count: usize| match (competitor, &mut teams.meeting) {
        (Competitor::Ours, _) => teams.ours.time(operation, bytes, count),
        (Competitor::Crate, _) => teams.ours.time(Operation::AllToAllByCrate, bytes, count),
        (Competitor::Meeting, Some(meeting)) => meeting.time(operation, bytes, count),
        (Competitor::Mpi | Competitor::Meeting, _) => teams.theirs.time(operation, bytes, count),
        (Competitor::Memcpy, _) => teams.theirs.time(Operation::Memcpy, bytes, count),
        (Competitor::Cycles, _) => time_cycles(&mut teams.ours, "cycles", bytes, count),
        (Competitor::CrateCycles, _) => {
            time_cycles(&mut teams.ours, "cycles-by-crate", bytes, count)
        }
        (Competitor::Example, _) => example.ok_or("no example")?.time_cycles(bytes, count),
    };
    let mut counts = Vec::new();
    for &competitor in &competitors {
        counts.push(repetitions(options.turn, |count| turn(competitor, count))?);
    }
    if example.is_some() {
        // About as many operations as the C functions in their turn.
        let cycles = counts[0].div_ceil(BATCH).clamp(1, 100);
        competitors.extend([
            Competitor::Cycles,
            Competitor::CrateCycles,
            Competitor::Example,
        ]);
        counts.extend([cycles; 3]);
    }
    let mut done = Comparison {
        operation,
        ranks,
        bytes,
        ours: Vec::new(),
        mpi: Vec::new(),
        memcpy: Vec::new(),
        meeting: Vec::new(),
        by_crate: Vec::new(),
        in_cycles: Vec::new(),
        crate_in_cycles: Vec::new(),
        by_example: Vec::new(),
    };
    // A competitor leaves data in the caches for the next: each order occurs.
    let mut random = fastrand::Rng::with_seed(bytes as u64);
    let mut order: Vec<usize> = (0..competitors.len()).collect();
    for _ in 0..options.rounds {
        random.shuffle(&mut order);
        for &at in &order {
            let time = turn(competitors[at], counts[at])?;
            done.times(competitors[at]).push(time);
        }
    }
    Ok(done)
}

/// A competitor of a turn.
#[derive(Clone, Copy)]
enum Competitor {
    Ours,
    Mpi,
    Memcpy,
    Meeting,
    Crate,
    Cycles,
    CrateCycles,
    Example,
}

impl Comparison {
    fn times(&mut self, competitor: Competitor) -> &mut Vec<f64> {
        match competitor {
            Competitor::Ours => &mut self.ours,
            Competitor::Mpi => &mut self.mpi,
            Competitor::Memcpy => &mut self.memcpy,
            Competitor::Meeting => &mut self.meeting,
            Competitor::Crate => &mut self.by_crate,
            Competitor::Cycles => &mut self.in_cycles,
            Competitor::CrateCycles => &mut self.crate_in_cycles,
            Competitor::Example => &mut self.by_example,
        }
    }
}

/// Seconds of one all-to-all: the median of so many cycles, of each of which the slowest rank counts.
fn time_cycles(team: &mut Team, order: &str, bytes: usize, count: usize) -> Outcome<f64> {
    let mut slowest = vec![0u64; count];
    for answer in team.tell(&format!("{order} {bytes} {count}"))? {
        for (slowest, own) in slowest.iter_mut().zip(answer.split(' ')) {
            *slowest = own.parse::<u64>()?.max(*slowest);
        }
    }
    let seconds: Vec<f64> = slowest.iter().map(|time| *time as f64 * 1e-9).collect();
    Ok(median(&seconds).ok_or("no cycle")? / BATCH as f64)
}

/// How many repetitions fit into a turn.
fn repetitions(turn: f64, mut time: impl FnMut(usize) -> Outcome<f64>) -> Outcome<usize> {
    let mut count = *REPETITIONS.start();
    loop {
        let seconds = time(count)?;
        let fitting = ((turn / seconds) as usize).clamp(*REPETITIONS.start(), *REPETITIONS.end());
        // A good part of a turn is enough to estimate the whole.
        if fitting <= 8 * count {
            return Ok(fitting);
        }
        count *= 4;
    }
}
