//! The order of PAT's steps: the distances to which a rank sends and from which it receives, in order.
//!
//! The trees of all ranks are rotations of each other, so the schedule of rank 0 determines that of every rank. A step moves
//! one rank's chunk; steps of several ranks are aggregated into one step of a connection if they fit. The tops of the trees,
//! which are long and thin, are walked last (scatter) or first (gather). The host's proxies count the steps of each connection
//! by the same schedule.

/// The data to move, in elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    /// Bytes of a chunk, which fits a step of a connection.
    pub(super) step_bytes: i64,
    /// The number of steps that a connection holds.
    pub(super) depth: i64,
    /// The most groups of threads; a power of two.
    pub(super) groups: i64,
    /// The channel's share.
    pub(super) begin: i64,
    pub(super) end: i64,
    /// The elements of a rank, over all channels.
    pub(super) count: i64,
    pub(super) chunk: i64,
    pub(super) rank: i64,
    pub(super) ranks: i64,
    /// Bytes of an element.
    pub(super) element: i64,
}

/// One step of one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Step {
    /// The exponent of the distance to receive from, as a power of two, or -1 for this rank's own buffer.
    pub(super) receive: i64,
    /// The same for the distance to send to.
    pub(super) send: i64,
    /// The offset in elements from the beginning of the connection's step.
    pub(super) receive_offset: i64,
    pub(super) send_offset: i64,
    /// Steps ahead of the connection's own.
    pub(super) step_offset: i64,
    pub(super) post_receive: bool,
    pub(super) post_send: bool,
    pub(super) count: i64,
    pub(super) input: i64,
    pub(super) output: i64,
    /// The group has nothing to do and waits for the others.
    pub(super) skipped: bool,
    /// The last step of all.
    pub(super) last: bool,
}

/// The aggregation of the steps of several ranks.
#[derive(Debug, Clone, Copy)]
struct Aggregation {
    /// Ranks in an aggregated step, a power of two.
    factor: i64,
    /// The distance between them.
    delta: i64,
    /// Ranks in one step of a connection.
    frequency: i64,
    groups: i64,
    /// The number of ranks, rounded up to a power of two.
    power: i64,
}

impl Aggregation {
    fn new(plan: &Plan) -> Self {
        let power = (plan.ranks as u64).next_power_of_two() as i64;
        let (mut factor, mut delta) = (1, power);
        let share = (plan.end - plan.begin) * plan.element;
        while plan.step_bytes / (share * factor) >= 2 && factor < plan.ranks / 2 {
            factor *= 2;
            delta /= 2;
        }
        let frequency = factor;
        let groups = plan.groups.min(frequency);
        let mut depth = plan.depth;
        while depth > 1 && factor < plan.ranks / 2 {
            depth /= 2;
            factor *= 2;
            delta /= 2;
        }
        Self {
            factor,
            delta,
            frequency,
            groups,
            power,
        }
    }

    /// Returns the lowest set bit of a distance, as an exponent; for distance 0, `power`.
    fn dimension(&self, distance: i64) -> i64 {
        match distance {
            0 => self.power,
            distance => i64::from(distance.trailing_zeros()),
        }
    }

    /// Returns whether the step after `index` begins a new step of the connection.
    fn fills(&self, index: i64) -> bool {
        index.rem_euclid(self.frequency) + 1 >= self.frequency
    }
}

/// Returns the complement of the bits of `index` below `limit`, in reverse order.
fn mirror(index: i64, limit: i64) -> i64 {
    let (mut mirrored, mut bit, mut image) = (0, 1, limit / 2);
    while bit < limit {
        if index & bit == 0 {
            mirrored += image;
        }
        bit <<= 1;
        image >>= 1;
    }
    mirrored
}

/// The phase of a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Leaves: data between this rank's buffer and the nearest peer.
    Leaf,
    /// Inner nodes of the lower tree.
    Inner,
    /// The upper tree, nodes at odd positions of a scale.
    Odd,
    /// The upper tree, nodes at the scale itself (only scatter).
    Even,
    /// This rank's result (only scatter).
    Root,
}

/// The steps of a reduce-scatter.
pub(super) struct Scatter {
    plan: Plan,
    by: Aggregation,
    offset: i64,
    count: i64,
    phase: Phase,
    scale: i64,
    /// The distance within an aggregated step's delta.
    low: i64,
    at: i64,
    limit: i64,
    send_skipped: i64,
    step_offset: i64,
}

impl Scatter {
    pub(super) fn new(plan: Plan) -> Self {
        let by = Aggregation::new(&plan);
        let mut schedule = Self {
            plan,
            by,
            offset: plan.begin,
            count: 0,
            phase: Phase::Leaf,
            scale: 1,
            low: 0,
            at: 0,
            limit: 0,
            send_skipped: 0,
            step_offset: 0,
        };
        schedule.begin_chunk();
        schedule
    }

    /// Returns the number of groups that walk the schedule together.
    pub(super) fn groups(&self) -> usize {
        self.by.groups as usize
    }

    fn begin_chunk(&mut self) {
        self.count = self.plan.chunk.min(self.plan.end - self.offset);
        self.phase = Phase::Leaf;
        self.scale = 1;
        self.low = self.by.delta - 1;
        self.begin_phase();
    }

    fn begin_phase(&mut self) {
        self.at = 0;
        self.send_skipped = 0;
        self.step_offset = 0;
        self.limit = match self.phase {
            Phase::Leaf | Phase::Inner => self.by.factor,
            Phase::Odd | Phase::Even => self.by.factor / (2 * self.scale),
            Phase::Root => 1,
        };
    }

    /// Returns whether only the upper bits of `index` are set, which is where the data of another peer begin.
    fn new_peer(index: i64, power: i64) -> bool {
        ((index ^ (power - 1)) + 1).count_ones() == 1
    }

    fn data_of(&self, distance: i64) -> i64 {
        let rank = (self.plan.rank + distance).rem_euclid(self.plan.ranks);
        rank * self.plan.count + self.offset
    }

    pub(super) fn next(&mut self) -> Step {
        let (ranks, by, at, count) = (self.plan.ranks, self.by, self.at, self.count);
        let mut step = Step {
            count,
            output: self.offset,
            step_offset: self.step_offset,
            ..Step::default()
        };
        let place = |index: i64| index.rem_euclid(by.frequency) * count;
        if at >= self.limit {
            step.skipped = true;
        } else {
            match self.phase {
                Phase::Leaf => {
                    let distance = mirror(at, self.limit) * by.delta + self.low;
                    step.skipped = distance >= ranks;
                    step.input = self.data_of(distance);
                    step.receive = -1;
                    step.send = 0;
                    step.output = 0;
                    step.receive_offset = -1;
                    step.send_offset = place(at);
                    step.post_send = by.fills(at) || at == self.limit - 1;
                }
                Phase::Inner => self.inner(&mut step),
                Phase::Odd => {
                    let upper = (2 * mirror(at, self.limit) + 1) * self.scale * by.delta;
                    step.post_send = at == self.limit - 1 || by.fills(at);
                    if upper + 1 < ranks {
                        let index = at + by.factor - by.factor / self.scale;
                        step.post_receive = by.fills(index);
                        step.receive_offset = place(index);
                    } else if upper < ranks {
                        step.receive = -1;
                        step.receive_offset = -1;
                    } else {
                        step.skipped = true;
                    }
                    step.input = self.data_of(upper);
                    step.send = self.toward(upper);
                    step.send_offset = place(at);
                }
                Phase::Even => {
                    let upper = (2 * mirror(at, self.limit) + 1) * self.scale * by.delta;
                    step.receive = by.dimension(upper);
                    step.post_receive = at == self.limit - 1 || by.fills(at);
                    step.receive_offset = place(at);
                    let rest = upper - (1 << step.receive);
                    step.input = self.data_of(rest);
                    step.send = self.toward(rest);
                    if upper >= ranks {
                        if rest < ranks {
                            step.receive = -1;
                            step.receive_offset = -1;
                            step.post_receive = false;
                        } else {
                            step.skipped = true;
                        }
                    }
                    if Self::new_peer(at, by.factor / (2 * self.scale)) {
                        self.send_skipped = at;
                        self.step_offset = 0;
                        step.step_offset = 0;
                    }
                    let index = at - self.send_skipped;
                    if by.fills(index) && !step.skipped {
                        self.step_offset += 1;
                    }
                    step.send_offset = if step.send >= 0 { place(index) } else { -1 };
                }
                Phase::Root => {
                    step.receive = 0;
                    step.send = -1;
                    step.input = self.data_of(0);
                    step.receive_offset = place(by.factor - 1);
                    step.send_offset = -1;
                    step.post_receive = true;
                    self.offset += self.plan.chunk;
                }
            }
        }
        self.advance(&mut step);
        step
    }

    fn inner(&mut self, step: &mut Step) {
        let (ranks, by, at, count) = (self.plan.ranks, self.by, self.at, self.count);
        let place = |index: i64| index.rem_euclid(by.frequency) * count;
        let distance = mirror(at, self.limit) * by.delta + self.low;
        step.skipped = distance >= ranks;
        step.receive = by.dimension(distance);
        step.send_offset = place(at);
        step.receive_offset = place(at);
        let full = by.fills(at) || at == self.limit - 1;
        step.post_send = step.receive == 0 && full;
        step.post_receive = full;
        let from = step.receive;
        let rest = distance - (1 << from);
        step.input = self.data_of(rest);
        step.send = self.toward(rest);
        if step.send == -1 {
            step.send_offset = -1;
        } else if self.low == 1 << from {
            if Self::new_peer(at, by.factor) {
                self.send_skipped = at;
                self.step_offset = 0;
                step.step_offset = 0;
            }
            step.send_offset = place(at - self.send_skipped);
        }
        if rest < ranks && step.skipped {
            step.receive = -1;
            step.receive_offset = -1;
            step.post_receive = false;
            step.skipped = false;
        }
        if from > 0 && by.fills(at - self.send_skipped) && !step.skipped {
            self.step_offset += 1;
        }
    }

    /// Returns the dimension to send to from a distance; -1 if the data has reached its rank.
    fn toward(&self, distance: i64) -> i64 {
        match distance {
            0 => -1,
            distance => self.by.dimension(distance),
        }
    }

    fn advance(&mut self, step: &mut Step) {
        self.at += 1;
        if self.at < self.limit || self.at < self.by.groups {
            return;
        }
        let was = self.phase;
        if was == Phase::Inner {
            self.low -= 1;
        }
        if was == Phase::Even {
            self.scale *= 2;
        }
        self.phase = match was {
            Phase::Leaf if self.low != 1 => Phase::Inner,
            Phase::Leaf if self.by.factor > 1 => Phase::Odd,
            Phase::Leaf => Phase::Root,
            Phase::Inner if self.low % 2 == 1 => Phase::Leaf,
            Phase::Inner => Phase::Inner,
            Phase::Odd => Phase::Even,
            Phase::Even if self.scale < self.by.factor => Phase::Odd,
            Phase::Even => Phase::Root,
            Phase::Root => Phase::Root,
        };
        if was != Phase::Root {
            self.begin_phase();
        } else if self.offset >= self.plan.end {
            step.last = true;
        } else {
            self.begin_chunk();
        }
    }
}

/// The steps of an all-gather.
pub(super) struct Gather {
    plan: Plan,
    by: Aggregation,
    offset: i64,
    count: i64,
    phase: Phase,
    scale: i64,
    low: i64,
    at: i64,
    limit: i64,
    walk: Walk,
}

impl Gather {
    pub(super) fn new(plan: Plan) -> Self {
        let by = Aggregation::new(&plan);
        let mut schedule = Self {
            plan,
            by,
            offset: plan.begin,
            count: 0,
            phase: Phase::Inner,
            scale: 0,
            low: 0,
            at: 0,
            limit: 0,
            walk: Walk::new(by.delta),
        };
        schedule.begin_chunk();
        schedule
    }

    /// Returns the number of groups that walk the schedule together.
    pub(super) fn groups(&self) -> usize {
        self.by.groups as usize
    }

    fn begin_chunk(&mut self) {
        self.count = self.plan.chunk.min(self.plan.end - self.offset);
        self.scale = self.by.factor / 2;
        self.phase = match self.scale {
            0 => Phase::Inner,
            _ => Phase::Odd,
        };
        self.walk = Walk::new(self.by.delta);
        self.low = self.walk.next();
        self.begin_phase();
    }

    fn begin_phase(&mut self) {
        self.at = 0;
        self.limit = match self.phase {
            Phase::Odd => self.by.factor / (2 * self.scale),
            _ => self.by.factor,
        };
    }

    fn data_of(&self, distance: i64) -> i64 {
        let rank = (self.plan.rank + distance).rem_euclid(self.plan.ranks);
        rank * self.plan.count + self.offset
    }

    pub(super) fn next(&mut self) -> Step {
        let (ranks, by, at, count) = (self.plan.ranks, self.by, self.at, self.count);
        let mut step = Step {
            count,
            input: self.offset,
            ..Step::default()
        };
        let place = |index: i64| index.rem_euclid(by.frequency) * count;
        if at >= self.limit {
            step.skipped = true;
        } else {
            match self.phase {
                Phase::Leaf => {
                    let distance = at * by.delta + self.low;
                    step.skipped = distance >= ranks;
                    step.output = self.data_of(distance);
                    step.send = -1;
                    step.input = 0;
                    step.send_offset = -1;
                    step.receive_offset = place(at);
                    step.post_receive = by.fills(at) || distance + by.delta >= ranks;
                }
                Phase::Inner => self.inner(&mut step),
                _ => {
                    let distance = (2 * at + 1) * self.scale * by.delta;
                    let next = (2 * at + 3) * self.scale * by.delta;
                    step.post_send = by.fills(at) || next >= ranks;
                    step.skipped = distance >= ranks;
                    step.send = by.dimension(distance);
                    let rest = distance - (1 << step.send);
                    step.send_offset = place(at);
                    step.step_offset = at / by.frequency;
                    step.output = self.data_of(rest);
                    if rest == 0 {
                        step.receive = -1;
                        step.receive_offset = -1;
                    } else {
                        step.receive = by.dimension(rest);
                        let index = (at * 2 * self.scale * by.delta) >> (step.receive + 1);
                        step.receive_offset = place(index);
                        step.step_offset = index / by.frequency;
                    }
                }
            }
        }
        self.advance(&mut step);
        step
    }

    fn inner(&mut self, step: &mut Step) {
        let (ranks, by, at, count) = (self.plan.ranks, self.by, self.at, self.count);
        let place = |index: i64| index.rem_euclid(by.frequency) * count;
        let distance = at * by.delta + self.low;
        step.skipped = distance >= ranks;
        step.send = by.dimension(distance);
        let nearest = step.send == 0;
        let rest = distance - (1 << step.send);
        step.output = self.data_of(rest);
        step.send_offset = place(at);
        step.receive_offset = place(at);
        step.post_send = by.fills(at) || distance + by.delta >= ranks;
        step.post_receive = nearest && (by.fills(at) || distance + by.delta > ranks);
        step.step_offset = if nearest { 0 } else { at / by.frequency };
        if rest == 0 {
            step.receive = -1;
            step.receive_offset = -1;
            step.post_receive = false;
        } else {
            step.receive = by.dimension(rest);
            if self.low == 1 << step.send {
                let index = (at * by.delta) >> (step.receive + 1);
                let next = ((index + 1) * 2 + 1) << step.receive;
                step.receive_offset = place(index);
                step.post_receive = nearest && (by.fills(index) || next >= ranks);
                step.step_offset = if nearest { 0 } else { index / by.frequency };
            }
        }
        if rest < ranks && nearest && step.skipped {
            // The data is received only once, even if it is not sent on.
            step.send = -1;
            step.send_offset = -1;
            step.post_send = false;
            step.skipped = false;
        }
    }

    fn advance(&mut self, step: &mut Step) {
        self.at += 1;
        if self.at < self.limit || self.at < self.by.groups {
            return;
        }
        let (was, low) = (self.phase, self.low);
        if was == Phase::Odd {
            self.scale /= 2;
        }
        self.phase = match was {
            Phase::Odd if self.scale > 0 => Phase::Odd,
            Phase::Inner if low % 2 == 1 => Phase::Leaf,
            _ => Phase::Inner,
        };
        if was == Phase::Leaf || (was == Phase::Inner && low % 2 == 0) {
            self.low = self.walk.next();
        }
        if was == Phase::Leaf && self.low == self.by.delta / 2 {
            self.offset += self.plan.chunk;
            if self.offset >= self.plan.end {
                step.last = true;
            } else {
                self.begin_chunk();
            }
        } else {
            self.begin_phase();
        }
    }
}

/// The distances within a delta, in the order of a gather's lower tree.
struct Walk {
    value: i64,
    /// For each bit, how long it stays, and how often it was cleared.
    bits: Vec<(i64, i64)>,
}

impl Walk {
    fn new(delta: i64) -> Self {
        let count = i64::from(delta.trailing_zeros());
        Self {
            value: 0,
            bits: (0..count).map(|bit| (count - bit, 1)).collect(),
        }
    }

    fn next(&mut self) -> i64 {
        let count = self.bits.len() as i64;
        for (bit, (stays, cleared)) in self.bits.iter_mut().enumerate() {
            let bit = 1 << bit;
            *stays -= 1;
            if *stays != 0 {
                continue;
            }
            self.value ^= bit;
            *stays = bit;
            if self.value & bit == 0 {
                let lowest = match *cleared {
                    0 => count,
                    cleared => i64::from(cleared.trailing_zeros()),
                };
                *stays += lowest - 1;
                if *stays == 0 {
                    self.value ^= bit;
                    *stays = bit;
                }
                *cleared += 1;
            }
        }
        self.value
    }
}
