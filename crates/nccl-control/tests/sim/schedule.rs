//! The events of a job, drawn at random from a seed.

use std::fmt;

use nccl_control::proto::MILLI;

/// One event. Processes are named by their initial slot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Step {
    Kill(usize),
    /// The process dies after this many more frames.
    Fuse(usize, u32),
    Freeze(usize),
    Thaw(usize),
    /// Packets from the first kernel to the second are dropped or rejected.
    Cut {
        from: usize,
        to: usize,
        rejects: bool,
    },
    Heal {
        from: usize,
        to: usize,
    },
    /// All connections between two processes end.
    Reset(usize, usize),
    Restart(usize),
    Say(usize),
    Tell(usize, usize),
    GoOn(usize),
    Jump(usize, u64),
    Leave(usize),
    /// The process is not scheduled until it thaws.
    Late(usize),
    Abstain(usize),
    Ask(usize),
    /// The program starts a thread that adds to a counter of the store several times.
    Add(usize),
    /// The operator ends all processes whose kernels are not in this set, and decides that the others may continue.
    Operator(u32),
    /// NCCL connects all ranks for this long, whatever the network does to their connections.
    Progress(u64),
}

impl Step {
    /// Returns the index of the step in the histogram.
    pub(crate) fn kind(&self) -> usize {
        match self {
            Self::Kill(_) => 0,
            Self::Fuse(..) => 1,
            Self::Freeze(_) => 2,
            Self::Thaw(_) => 3,
            Self::Cut { rejects: false, .. } => 4,
            Self::Cut { rejects: true, .. } => 5,
            Self::Heal { .. } => 6,
            Self::Reset(..) => 7,
            Self::Restart(_) => 8,
            Self::Say(_) => 9,
            Self::Tell(..) => 10,
            Self::GoOn(_) => 11,
            Self::Jump(..) => 12,
            Self::Leave(_) => 13,
            Self::Late(_) => 14,
            Self::Abstain(_) => 15,
            Self::Ask(_) => 16,
            Self::Operator(_) => 17,
            Self::Progress(_) => 18,
            Self::Add(_) => 19,
        }
    }
}

/// The names of the kinds of steps.
pub(crate) const KINDS: [&str; 20] = [
    "kill",
    "kill between two sends",
    "freeze",
    "thaw",
    "one way drops",
    "one way rejects",
    "one way heals",
    "reset",
    "restart",
    "say",
    "tell",
    "reconfigure",
    "clock jumps",
    "leave",
    "late",
    "abstain",
    "ask",
    "operator's decision",
    "progress",
    "add",
];

/// A job and its events.
#[derive(Clone)]
pub(crate) struct Schedule {
    pub(crate) seed: u64,
    /// The kernel of each rank's slot.
    pub(crate) kernels: Vec<usize>,
    /// The kernels of the witnesses, and those of the observers.
    pub(crate) witnesses: Vec<usize>,
    pub(crate) observers: Vec<usize>,
    /// Whether the first observer is the parent of all others.
    pub(crate) parent: bool,
    /// Whether processes learn of the ends of processes of their kernel.
    pub(crate) watches: bool,
    pub(crate) launcher: bool,
    /// Whether the job has a `Discovery` that decides between two halves.
    pub(crate) claims: bool,
    /// Whether programs request the next generation when they learn of a fault, and whether they leave other ranks
    /// behind.
    pub(crate) goes_on: bool,
    pub(crate) leaves_behind: bool,
    /// The events before the first generation is active. Times are from the start.
    pub(crate) forming: Vec<(u64, Step)>,
    /// The events after that. Times are from the time at which the first generation becomes active.
    pub(crate) steps: Vec<(u64, Step)>,
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            seed,
            kernels,
            witnesses,
            observers,
            parent,
            watches,
            launcher,
            claims,
            goes_on,
            leaves_behind,
            forming,
            steps,
        } = self;
        writeln!(
            f,
            "seed {seed}: kernels {kernels:?}, of witnesses {witnesses:?}, of observers {observers:?}, parent {parent}, kernels are watched {watches}, launcher {launcher}, claims {claims}, goes on {goes_on}, leaves behind {leaves_behind}"
        )?;
        for (time, step) in forming {
            writeln!(
                f,
                "  {:>9.3} ms forming: {step:?}",
                *time as f64 / MILLI as f64
            )?;
        }
        for (time, step) in steps {
            writeln!(f, "  {:>9.3} ms {step:?}", *time as f64 / MILLI as f64)?;
        }
        Ok(())
    }
}

/// The maximum number of frames that a process of an enumerated schedule sends before it dies.
const FRAMES: usize = 24;

/// A coordinator that is frozen for less than this is not replaced.
const UNRESPONSIVE: u64 = 2000 * MILLI;

/// Returns the kernels of the ranks of an enumerated schedule: all ranks on one kernel, each on its own, or every split
/// over two.
fn layouts(size: usize) -> Vec<Vec<usize>> {
    let split = |first: usize| (0..size).map(|slot| usize::from(slot >= first)).collect();
    let mut all: Vec<_> = (1..=size).map(split).collect();
    if size > 2 {
        all.push((0..size).collect());
    }
    all
}

impl Schedule {
    /// Returns all schedules of up to five ranks in which one process dies before each of its first frames, another
    /// process or none dies before each of its own, and the network between two kernels is cut at the same time or not:
    /// each schedule once, numbered from 1.
    pub(crate) fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for size in 2..=5 {
            for kernels in layouts(size) {
                let many = kernels.iter().max().map_or(1, |most| most + 1);
                for (first, at) in (0..size).flat_map(|slot| (0..FRAMES).map(move |at| (slot, at)))
                {
                    let others = (0..size).filter(|slot| *slot != first);
                    let others =
                        others.flat_map(|slot| (0..FRAMES).map(move |at| Some((slot, at))));
                    for second in others.chain([None]) {
                        for cut in 0..=usize::from(many == 2) {
                            let number = all.len() as u64 + 1;
                            all.push(Self::of(number, &kernels, (first, at), second, cut == 1));
                        }
                    }
                }
            }
        }
        all
    }

    fn of(
        number: u64,
        kernels: &[usize],
        first: (usize, usize),
        second: Option<(usize, usize)>,
        is_cut: bool,
    ) -> Self {
        let begin = 20 * MILLI;
        let mut steps: Vec<_> = (0..kernels.len())
            .map(|slot| (begin + 2 * MILLI, Step::Say(slot)))
            .collect();
        for (slot, frames) in [Some(first), second].into_iter().flatten() {
            steps.push((begin, Step::Fuse(slot, frames as u32)));
        }
        if is_cut {
            for (from, to) in [(0, 1), (1, 0)] {
                let rejects = false;
                steps.push((begin + MILLI, Step::Cut { from, to, rejects }));
            }
        }
        steps.sort_by_key(|(time, _)| *time);
        Self {
            seed: number,
            kernels: kernels.to_vec(),
            witnesses: Vec::new(),
            observers: Vec::new(),
            parent: false,
            watches: true,
            launcher: false,
            claims: false,
            goes_on: true,
            leaves_behind: true,
            forming: Vec::new(),
            steps,
        }
    }

    /// Adds threads that add to the counter, most of them at about the time of another event. They have a separate
    /// source of random numbers, so that the other events do not depend on them.
    fn draw_additions(&mut self) {
        let mut random = fastrand::Rng::with_seed(!self.seed);
        if self.steps.is_empty() || random.u8(0..3) > 0 {
            return;
        }
        for _ in 0..random.u8(1..=4) {
            let (event, _) = self.steps[random.usize(0..self.steps.len())];
            let time = match random.u8(0..4) {
                0 => random.u64(0..=event),
                1 => event.saturating_sub(random.u64(0..2 * MILLI)),
                2 => event + random.u64(0..2 * MILLI),
                _ => event + random.u64(0..4000) * MILLI,
            };
            let slot = random.usize(0..self.kernels.len());
            self.steps.push((time, Step::Add(slot)));
        }
        self.steps.sort_by_key(|(time, _)| *time);
    }

    /// Creates a schedule with two halves that are permanently cut from each other and between which a claim decides,
    /// and with processes that are delayed now and then.
    pub(crate) fn halves(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let half = random.usize(1..=4);
        let size = 2 * half;
        let rejects = random.bool();
        let mut steps: Vec<_> = [(0, 1), (1, 0)]
            .into_iter()
            .map(|(from, to)| {
                let time = random.u64(0..1000 * MILLI) * random.u64(0..=1);
                (time, Step::Cut { from, to, rejects })
            })
            .collect();
        for _ in 0..random.u8(0..4) {
            let late = random.u64(0..12_000) * MILLI;
            let slot = random.usize(0..size);
            steps.push((late, Step::Late(slot)));
            steps.push((late + random.u64(10..500) * MILLI, Step::Thaw(slot)));
        }
        steps.push((random.u64(0..3000) * MILLI, Step::GoOn(0)));
        steps.sort_by_key(|(time, _)| *time);
        Self {
            seed,
            kernels: (0..size).map(|slot| usize::from(slot >= half)).collect(),
            witnesses: Vec::new(),
            observers: Vec::new(),
            parent: false,
            watches: random.bool(),
            launcher: false,
            claims: true,
            goes_on: random.bool(),
            leaves_behind: random.bool(),
            forming: Vec::new(),
            steps,
        }
    }

    pub(crate) fn draw(seed: u64) -> Self {
        if seed.is_multiple_of(16) {
            return Self::dense(seed);
        }
        let mut random = fastrand::Rng::with_seed(seed);
        // Sometimes processes are delayed, and nothing else is wrong.
        let calm = random.u8(0..64) == 0;
        // Most schedules in which no coordinator ends and the network stays intact are drawn again.
        let any = calm || random.u8(0..64) == 0;
        let mut this = loop {
            let drawn = Self::draw_once(seed, &mut random, calm, false);
            if any || drawn.may_end_a_coordinator() {
                break drawn;
            }
        };
        this.draw_additions();
        this
    }

    /// Draws a schedule of more ranks and more steps than most: rare mistakes need several steps in one order.
    pub(crate) fn dense(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut this = Self::draw_once(seed, &mut random, false, true);
        if random.u8(0..3) == 0 {
            this.draw_restarts(&mut random);
        }
        this.draw_additions();
        this
    }

    /// Replaces the steps: processes of one host are killed and started again, and the others go on each time.
    fn draw_restarts(&mut self, random: &mut fastrand::Rng) {
        for kernels in [&mut self.kernels, &mut self.witnesses, &mut self.observers] {
            kernels.fill(0);
        }
        (self.goes_on, self.leaves_behind) = (true, false);
        self.steps.clear();
        self.forming.clear();
        let mut time = 0;
        for _ in 0..random.u8(4..=7) {
            time += match random.bool() {
                true => random.u64(0..8 * MILLI),
                false => random.u64(0..4000) * MILLI,
            };
            let slot = random.usize(0..self.kernels.len());
            self.steps.push((time, Step::Kill(slot)));
            let later = random.u64(1..4000) * MILLI;
            self.steps.push((time + later, Step::Restart(slot)));
            let says = random.usize(0..self.kernels.len());
            self.steps
                .push((time + random.u64(0..2 * MILLI), Step::Say(says)));
        }
        self.steps.sort_by_key(|(time, _)| *time);
    }

    /// Whether packets between two kernels are blocked, or a process ends that may coordinate then.
    fn may_end_a_coordinator(&self) -> bool {
        // Another process than that of slot 0 coordinates after it was silent for some time, was left out, or ended.
        let hands_over = |(time, step): &(u64, Step)| match step {
            Step::Freeze(0) | Step::Late(0) => Some(time + UNRESPONSIVE),
            Step::Abstain(0) => Some(*time),
            _ => None,
        };
        let handed_over = self.steps.iter().filter_map(hands_over).min();
        let ends = |(time, step): &(u64, Step)| match step {
            Step::Cut { .. } => true,
            Step::Kill(slot) | Step::Fuse(slot, _) | Step::Leave(slot) => {
                *slot == 0 || handed_over.is_some_and(|since| *time >= since)
            }
            _ => false,
        };
        !self.forming.is_empty() || self.steps.iter().any(ends)
    }

    fn draw_once(seed: u64, random: &mut fastrand::Rng, calm: bool, dense: bool) -> Self {
        let (sizes, events) = match dense {
            true => (4..=7, 3..=6),
            false => (2..=7, 1..=5),
        };
        let size = random.usize(sizes);
        let layout = random.u8(0..4);
        let kernels: Vec<_> = (0..size)
            .map(|slot| match layout {
                0 => 0,
                1 => slot,
                2 => usize::from(slot >= size / 2),
                _ => slot * 3 / size,
            })
            .collect();
        let many = kernels.iter().max().map_or(1, |most| most + 1);
        // Only a few: most mistakes are found without any.
        let mut beside = |one_in: u8| -> Vec<_> {
            let count = match random.u8(0..one_in) {
                0 => random.usize(1..=2),
                _ => 0,
            };
            (0..count).map(|_| random.usize(0..many)).collect()
        };
        let (witnesses, observers) = (beside(6), beside(8));
        let parent = !observers.is_empty() && random.bool();
        let watches = !parent || random.bool();
        let voters = size + witnesses.len();
        let everybody = voters + observers.len();
        let mut steps = Vec::new();
        let mut time = 0;
        for _ in 0..random.u8(events) {
            // Many events at once, or one after another, or much later.
            time += match random.u8(0..6) {
                0..=2 => random.u64(0..3 * MILLI),
                3 | 4 => random.u64(0..1500) * MILLI,
                _ => random.u64(1000..9000) * MILLI,
            };
            let one = match random.bool() {
                true => 0,
                false => random.usize(0..voters),
            };
            let other = random.usize(0..voters);
            if calm {
                let one = random.usize(1..size);
                match random.bool() {
                    true => {
                        steps.push((time, Step::Late(one)));
                        let long = random.u64(100..12000) * MILLI;
                        steps.push((time + long, Step::Thaw(one)));
                    }
                    false => steps.push((time, Step::Jump(one, random.u64(5000..20000) * MILLI))),
                }
                steps.push((time + random.u64(0..2 * MILLI), Step::Say(other)));
                steps.push((time + random.u64(0..2 * MILLI), Step::Ask(one)));
                continue;
            }
            match random.u8(0..23) {
                0..=3 => steps.push((time, Step::Kill(one))),
                4..=6 => steps.push((time, Step::Fuse(one, random.u32(0..40)))),
                7 | 8 => {
                    steps.push((time, Step::Freeze(one)));
                    if random.u8(0..4) > 0 {
                        let long = match random.bool() {
                            true => random.u64(10..3000),
                            false => random.u64(3000..20000),
                        };
                        steps.push((time + long * MILLI, Step::Thaw(one)));
                    }
                }
                9..=12 if many > 1 => {
                    let side = random.u32(1..(1 << many) - 1);
                    let is_here = |kernel: &usize| side & (1 << kernel) != 0;
                    let rejects = random.u8(0..3) == 0;
                    let one_way = random.u8(0..5) == 0;
                    let heals = match random.u8(0..3) {
                        0 => None,
                        1 => Some(random.u64(50..2900)),
                        _ => Some(random.u64(2900..15000)),
                    };
                    for from in 0..many {
                        for to in 0..many {
                            if is_here(&from) == is_here(&to) || (one_way && is_here(&from)) {
                                continue;
                            }
                            steps.push((time, Step::Cut { from, to, rejects }));
                            if let Some(heals) = heals {
                                steps.push((time + heals * MILLI, Step::Heal { from, to }));
                            }
                        }
                    }
                    if random.u8(0..16) == 0 {
                        let later = random.u64(500..9000) * MILLI;
                        steps.push((time + later, Step::Operator(side)));
                    }
                }
                9..=12 => steps.push((time, Step::Kill(one))),
                13 | 14 => steps.push((time, Step::Reset(one, other))),
                15 => {
                    steps.push((time, Step::Kill(one)));
                    let later = random.u64(1..4000) * MILLI;
                    steps.push((time + later, Step::Restart(one)));
                }
                16 => steps.push((time, Step::Say(other))),
                20 => {
                    let long = random.u64(100..6000) * MILLI;
                    steps.push((time, Step::Late(one)));
                    steps.push((time + long, Step::Thaw(one)));
                }
                21 => {
                    steps.push((time, Step::Abstain(random.usize(0..size))));
                    let later = match random.u8(0..3) {
                        0 => random.u64(0..5 * MILLI),
                        _ => random.u64(5..6000) * MILLI,
                    };
                    steps.push((time + later, Step::Kill(one)));
                }
                22 => {
                    let asks = random.usize(0..everybody);
                    steps.push((time, Step::Ask(asks)));
                    let dies = match random.bool() {
                        true => one,
                        false => random.usize(0..everybody),
                    };
                    steps.push((time + random.u64(0..MILLI), Step::Kill(dies)));
                }
                17 => steps.push((time, Step::GoOn(other))),
                18 => steps.push((time, Step::Jump(one, random.u64(100..20000) * MILLI))),
                _ => steps.push((time, Step::Leave(other))),
            }
            if random.bool() {
                steps.push((time + random.u64(0..2 * MILLI), Step::Say(other)));
                steps.push((
                    time + random.u64(0..2 * MILLI),
                    Step::Tell(other, random.usize(0..size)),
                ));
            }
        }
        steps.sort_by_key(|(time, _)| *time);
        let mut forming = Vec::new();
        if !calm && random.u8(0..32) == 0 {
            for _ in 0..random.u8(1..=3) {
                let time = random.u64(0..3 * MILLI);
                let one = random.usize(0..voters);
                forming.push((
                    time,
                    match random.u8(0..8) {
                        0..=2 => Step::Kill(one),
                        3 | 4 => Step::Fuse(one, random.u32(0..6)),
                        5 | 6 => Step::Leave(one),
                        _ => Step::Reset(0, one),
                    },
                ));
            }
        }
        let mut this = Self {
            seed,
            kernels,
            witnesses,
            observers,
            parent,
            watches,
            forming,
            launcher: random.u8(0..3) == 0,
            claims: random.u8(0..4) == 0,
            goes_on: random.u8(0..4) > 0 && !calm,
            leaves_behind: random.bool(),
            steps,
        };
        // In some outages, NCCL's data takes another path, for the duration of the outage or some seconds longer.
        let mut steps = this.steps.iter();
        let cut = steps.position(|(_, step)| matches!(step, Step::Cut { .. }));
        if let Some(at) = cut.filter(|_| random.u8(0..8) == 0) {
            let since = this.steps[at].0;
            let longer = random.u64(0..12000) * MILLI;
            let long = this.steps.last().map_or(0, |(last, _)| last - since) + longer;
            this.steps.insert(at, (since, Step::Progress(long)));
        }
        this
    }
}
