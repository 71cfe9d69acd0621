//! Processes and the network between them, in virtual time.
//!
//! A connection preserves order and loses nothing while it exists. It can fail in the ways in which kernels let it
//! fail: a path that drops packets for longer than [`UNACKNOWLEDGED`] ends its connections, later and at different
//! times on the two sides; a path that rejects packets ends them at once; a process that ends closes its own.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use nccl_control::proto::{
    Command, Connection, ConnectionRequest, Event, Frame, Input, MILLI, MemberId, MemberMachine,
    Mistakes, ObserverMachine, Output, ProcessInfo, Proof, SharedMembership, StartRole, Time,
    Timing,
};

use nccl_base::departure::ProcessEnd;

/// How long the kernel waits for an acknowledgement (`TCP_USER_TIMEOUT`).
pub(crate) const UNACKNOWLEDGED: u64 = 2000 * MILLI;

/// The state of a path between two kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    Open,
    Drops,
    Rejects,
}

/// The machine of a process.
#[allow(clippy::large_enum_variant, reason = "nearly all are the large one")]
pub(crate) enum Machine {
    Member(MemberMachine),
    Observer(ObserverMachine),
}

/// Calls a method that both machines have.
macro_rules! of_both {
    ($machine:expr, $call:ident($($argument:expr),*)) => {
        match &mut $machine {
            Machine::Member(member) => member.$call($($argument),*),
            Machine::Observer(observer) => observer.$call($($argument),*),
        }
    };
}

/// One incarnation of one process.
pub(crate) struct Process {
    pub(crate) machine: Machine,
    /// An observer that has started all other processes, and learns how they end.
    pub(crate) parent: bool,
    /// The time at which it was killed.
    pub(crate) killed: Option<u64>,
    pub(crate) id: MemberId,
    pub(crate) kernel: usize,
    pub(crate) alive: bool,
    pub(crate) frozen: bool,
    /// The number of frames after which it dies.
    pub(crate) fuse: Option<u32>,
    /// How far its clock has jumped.
    jumped: u64,
    /// The time at which it is woken; wakes planned for another time do not count.
    wakes: u64,
    backlog: VecDeque<Input>,
    /// The events that its program has not seen yet.
    pub(crate) events: VecDeque<Event>,
}

impl Process {
    /// Returns the machine of a process that is not an observer.
    pub(crate) fn member(&self) -> &MemberMachine {
        match &self.machine {
            Machine::Member(member) => member,
            Machine::Observer(_) => unreachable!("an observer is no member"),
        }
    }
}

struct Line {
    ends: [usize; 2],
    open: [bool; 2],
    /// The times until which the frames of each direction are on their way.
    busy: [u64; 2],
    /// The same for frames that overtake others.
    overtaken: [u64; 2],
    /// Frames that a path does not let pass.
    held: [VecDeque<Frame>; 2],
    /// Whether a check is planned whether the path is open again.
    checked: bool,
}

enum Happening {
    Frame {
        line: usize,
        to: usize,
        frame: Frame,
    },
    Closed {
        line: usize,
        side: usize,
    },
    Dialed {
        from: usize,
        peer: MemberId,
        to: Option<usize>,
    },
    Wake(usize),
    Input(usize, Input),
    Check(usize),
    Step(usize),
}

/// Empty containers whose memory the next network of this thread uses, which is then still in the cache.
#[derive(Default)]
struct Spare {
    processes: Vec<Process>,
    lines: Vec<Line>,
    heap: BinaryHeap<Reverse<u128>>,
    slab: Vec<Option<Happening>>,
    free: Vec<usize>,
}

thread_local! {
    static SPARE: Cell<Spare> = Cell::default();
}

impl Drop for Network {
    fn drop(&mut self) {
        self.processes.clear();
        self.lines.clear();
        self.heap.clear();
        self.slab.clear();
        self.free.clear();
        SPARE.set(Spare {
            processes: std::mem::take(&mut self.processes),
            lines: std::mem::take(&mut self.lines),
            heap: std::mem::take(&mut self.heap),
            slab: std::mem::take(&mut self.slab),
            free: std::mem::take(&mut self.free),
        });
    }
}

/// The simulated network; see the module.
pub(crate) struct Network {
    pub(crate) now: u64,
    pub(crate) processes: Vec<Process>,
    /// The process that listens at each slot's address.
    slots: Vec<usize>,
    /// Indexed by kernel: from, then to.
    pub(crate) paths: Vec<Vec<Path>>,
    lines: Vec<Line>,
    heap: BinaryHeap<Reverse<u128>>,
    slab: Vec<Option<Happening>>,
    free: Vec<usize>,
    order: u64,
    pub(crate) random: fastrand::Rng,
    pub(crate) timing: Timing,
    pub(crate) mistakes: Mistakes,
    /// Whether a launcher reports how the processes that it has started end.
    pub(crate) launcher: bool,
    /// Whether processes learn of the ends of processes of their kernel.
    pub(crate) watches: bool,
    /// Whether frames are printed.
    pub(crate) trace: bool,
    /// The due steps of the schedule.
    pub(crate) due: Vec<usize>,
    /// The processes that have had an event since this list was cleared.
    pub(crate) touched: Vec<usize>,
    /// Called with each frame that is sent.
    pub(crate) measure: Option<fn(&Frame) -> usize>,
    pub(crate) bytes: u64,
    pub(crate) frames: u64,
}

impl Network {
    pub(crate) fn new(seed: u64, kernels: usize, timing: Timing, mistakes: Mistakes) -> Self {
        let Spare {
            processes,
            lines,
            heap,
            slab,
            free,
        } = SPARE.take();
        Self {
            now: 0,
            processes,
            slots: Vec::new(),
            paths: vec![vec![Path::Open; kernels]; kernels],
            lines,
            heap,
            slab,
            free,
            order: 0,
            random: fastrand::Rng::with_seed(seed),
            timing,
            mistakes,
            launcher: false,
            watches: true,
            trace: false,
            due: Vec::new(),
            touched: Vec::new(),
            measure: None,
            bytes: 0,
            frames: 0,
        }
    }

    fn at(&mut self, time: u64, happening: Happening) {
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slab[slot] = Some(happening);
                slot
            }
            None => {
                self.slab.push(Some(happening));
                self.slab.len() - 1
            }
        };
        self.order += 1;
        // The slot is in the low bits, so that events at the same time stay in order.
        let key = self.order << 24 | slot as u64;
        self.heap
            .push(Reverse(u128::from(time) << 64 | u128::from(key)));
    }

    /// Plans a step of the schedule for `time`.
    pub(crate) fn plan(&mut self, time: u64, step: usize) {
        self.at(time, Happening::Step(step));
    }

    /// Passes an input to a process after a delay.
    pub(crate) fn input_in(&mut self, delay: u64, process: usize, input: Input) {
        self.at(self.now + delay, Happening::Input(process, input));
    }

    fn delay(&mut self) -> u64 {
        let micros = self.random.u64(20..400);
        // Sometimes the delay is long.
        let micros = if self.random.u8(..) == 0 {
            micros * 50
        } else {
            micros
        };
        micros * 1000
    }

    /// Starts a process, which listens at the address of its slot, like its predecessor.
    pub(crate) fn start(
        &mut self,
        slot: u32,
        incarnation: u64,
        kernel: usize,
        role: StartRole,
    ) -> usize {
        let (timing, mistakes, now) = (self.timing, self.mistakes, Time(self.now));
        let member = |info| Machine::Member(MemberMachine::new(info, role, timing, mistakes, now));
        self.start_with(slot, incarnation, kernel, false, member)
    }

    /// As [`start`](Self::start), for an observer that looks for the coordinator at the addresses of these slots.
    pub(crate) fn observe(&mut self, slot: u32, kernel: usize, parent: bool, ranks: u32) -> usize {
        let (timing, mistakes, now) = (self.timing, self.mistakes, Time(self.now));
        let at = (0..ranks).map(|slot| slot.to_string()).collect();
        let observer =
            |info| Machine::Observer(ObserverMachine::new(info, at, timing, mistakes, now));
        self.start_with(slot, 1, kernel, parent, observer)
    }

    fn start_with(
        &mut self,
        slot: u32,
        incarnation: u64,
        kernel: usize,
        parent: bool,
        machine: impl FnOnce(ProcessInfo) -> Machine,
    ) -> usize {
        let number = self.processes.len();
        let place = slot as usize;
        self.slots.resize(self.slots.len().max(place + 1), number);
        self.slots[place] = number;
        let id = MemberId { slot, incarnation };
        let info = ProcessInfo {
            id,
            host: String::new(),
            pid: number as u32,
            kernel: kernel as u64 + 1,
            at: slot.to_string(),
            start_time: 0,
            launcher_rank: None,
            observed: false,
            tolerates_unreachable: true,
        };
        self.processes.push(Process {
            machine: machine(info),
            parent,
            killed: None,
            id,
            kernel,
            alive: true,
            frozen: false,
            fuse: None,
            jumped: 0,
            wakes: u64::MAX,
            backlog: VecDeque::new(),
            events: VecDeque::new(),
        });
        self.pump(number);
        number
    }

    pub(crate) fn process_of(&self, id: MemberId) -> Option<usize> {
        self.processes.iter().position(|process| process.id == id)
    }

    fn path(&self, from: usize, to: usize) -> Path {
        let (from, to) = (self.processes[from].kernel, self.processes[to].kernel);
        if from == to {
            Path::Open
        } else {
            self.paths[from][to]
        }
    }

    /// Whether packets pass in both directions.
    pub(crate) fn is_connected(&self, one: usize, other: usize) -> bool {
        self.path(one, other) == Path::Open && self.path(other, one) == Path::Open
    }

    /// Runs until a step is due, or until `limit`. Returns whether anything has happened.
    pub(crate) fn step(&mut self, limit: u64) -> bool {
        let Some(&Reverse(key)) = self.heap.peek() else {
            return false;
        };
        let time = (key >> 64) as u64;
        if time > limit {
            self.now = limit;
            return false;
        }
        self.heap.pop();
        self.now = time;
        let slot = (key & 0xff_ffff) as usize;
        let happening = self.slab[slot].take().expect("a happening");
        self.free.push(slot);
        match happening {
            Happening::Frame { line, to, frame } => {
                if self.lines[line].open[to] {
                    let process = self.lines[line].ends[to];
                    self.give(process, Input::Frame(Connection(line as u64), frame));
                }
            }
            Happening::Closed { line, side } => {
                if std::mem::take(&mut self.lines[line].open[side]) {
                    let process = self.lines[line].ends[side];
                    self.give(process, Input::Closed(Connection(line as u64)));
                }
            }
            Happening::Dialed { from, peer, to } => self.dialed(from, peer, to),
            Happening::Wake(process) => {
                let own = &mut self.processes[process];
                if own.wakes == time {
                    own.wakes = u64::MAX;
                    if own.alive && !own.frozen {
                        self.wake(process);
                    }
                }
            }
            Happening::Input(process, input) => self.give(process, input),
            Happening::Check(line) => self.check(line),
            Happening::Step(step) => self.due.push(step),
        }
        true
    }

    fn give(&mut self, process: usize, input: Input) {
        let own = &mut self.processes[process];
        if !own.alive {
            return;
        }
        if own.frozen {
            own.backlog.push_back(input);
            return;
        }
        let now = Time(self.now + own.jumped);
        of_both!(own.machine, handle(now, input));
        self.pump(process);
    }

    /// Passes a command of the program to the machine.
    pub(crate) fn command(&mut self, process: usize, command: Command) {
        self.give(process, Input::Command(command));
    }

    /// Carries out the outputs of a process's machine.
    fn pump(&mut self, process: usize) {
        while let Some(output) = of_both!(self.processes[process].machine, poll()) {
            match output {
                Output::Event(event) => {
                    self.processes[process].events.push_back(event);
                    self.touched.push(process);
                }
                Output::Connection(ConnectionRequest::Transmit(connection, frame)) => {
                    if let Some(left) = &mut self.processes[process].fuse {
                        if *left == 0 {
                            return self.kill(process);
                        }
                        *left -= 1;
                    }
                    self.transmit(process, connection.0 as usize, frame);
                }
                Output::Connection(ConnectionRequest::Close(connection)) => {
                    self.hang_up(process, connection.0 as usize)
                }
                Output::Connection(ConnectionRequest::Dial { peer, at }) => {
                    let slot: usize = at.parse().expect("a number");
                    self.dial(process, peer, self.slots[slot]);
                }
            }
        }
        let own = &mut self.processes[process];
        let next = of_both!(own.machine, next_timeout());
        let at = next.0.saturating_sub(own.jumped).max(self.now + 1);
        // A wake planned for an earlier time checks again.
        if next != Time::NEVER && at < own.wakes {
            own.wakes = at;
            self.at(at, Happening::Wake(process));
        }
    }

    fn wake(&mut self, process: usize) {
        let own = &mut self.processes[process];
        let now = Time(self.now + own.jumped);
        if of_both!(own.machine, next_timeout()) <= now {
            of_both!(own.machine, handle_timeout(now));
        }
        self.pump(process);
    }

    fn dial(&mut self, from: usize, peer: MemberId, to: usize) {
        let there = to < self.processes.len();
        let (delay, to) = match there {
            false => (MILLI, None),
            true => match (self.path(from, to), self.path(to, from)) {
                (Path::Open, Path::Open) => (self.delay(), self.processes[to].alive.then_some(to)),
                (Path::Rejects, _) | (_, Path::Rejects) => (MILLI, None),
                _ => (1000 * MILLI, None),
            },
        };
        self.at(self.now + delay, Happening::Dialed { from, peer, to });
    }

    fn dialed(&mut self, from: usize, peer: MemberId, to: Option<usize>) {
        let to = to.filter(|to| self.processes[*to].alive && self.is_connected(from, *to));
        let Some(to) = to else {
            return self.give(from, Input::DialFailed(peer));
        };
        let line = self.lines.len();
        self.lines.push(Line {
            ends: [from, to],
            open: [true, true],
            busy: [0, 0],
            overtaken: [0, 0],
            held: [VecDeque::new(), VecDeque::new()],
            checked: false,
        });
        self.give(from, Input::Connected(peer, Connection(line as u64)));
    }

    fn transmit(&mut self, from: usize, line: usize, frame: Frame) {
        if self.trace {
            let side = usize::from(self.lines[line].ends[0] != from);
            let to = self.lines[line].ends[1 - side];
            if !matches!(
                frame,
                Frame::Heartbeat(_) | Frame::HeartbeatReply(_) | Frame::Acknowledge(_)
            ) {
                println!(
                    "{:>10.3} ms {from} -> {to} {}",
                    self.now as f64 / MILLI as f64,
                    brief(&frame)
                );
            }
        }
        self.frames += 1;
        if let Some(measure) = self.measure {
            self.bytes += measure(&frame) as u64;
        }
        let own = &self.lines[line];
        let side = usize::from(own.ends[0] != from);
        if !own.open[side] {
            return;
        }
        let is_first = own.held[side].is_empty();
        match self.path(from, own.ends[1 - side]) {
            Path::Open if is_first => {
                // Heartbeats overtake messages, some of which are large.
                let overtakes = !matches!(frame, Frame::Data { .. } | Frame::Acknowledge(_));
                let is_large = !overtakes && self.random.u8(0..32) == 0;
                let delay = match is_large {
                    true => self.delay() + self.random.u64(0..100) * MILLI,
                    false => self.delay(),
                };
                let own = &mut self.lines[line];
                let before = match overtakes {
                    true => own.overtaken[side],
                    false => own.overtaken[side].max(own.busy[side]),
                };
                let at = (self.now + delay).max(before + 1);
                match overtakes {
                    true => own.overtaken[side] = at,
                    false => own.busy[side] = at,
                }
                let to = 1 - side;
                self.at(at, Happening::Frame { line, to, frame });
            }
            Path::Rejects => self.reset(line),
            _ => self.lines[line].held[side].push_back(frame),
        }
    }

    fn hang_up(&mut self, process: usize, line: usize) {
        let side = usize::from(self.lines[line].ends[0] != process);
        self.lines[line].open[side] = false;
        self.close_other(line, side);
    }

    /// Notifies the other side that this one has closed, after its earlier frames.
    fn close_other(&mut self, line: usize, side: usize) {
        let [one, other] = [side, 1 - side].map(|side| self.lines[line].ends[side]);
        if self.lines[line].open[1 - side] && self.path(one, other) != Path::Drops {
            let delay = self.delay();
            let own = &self.lines[line];
            let before = own.busy[side].max(own.overtaken[side]);
            let at = (self.now + delay).max(before + 1);
            let side = 1 - side;
            self.at(at, Happening::Closed { line, side });
        }
    }

    /// Notifies both sides at once that the connection is gone; frames on their way are lost.
    pub(crate) fn reset(&mut self, line: usize) {
        for side in 0..2 {
            let delay = self.delay();
            self.at(self.now + delay, Happening::Closed { line, side });
        }
    }

    /// Returns the open connections between two processes.
    pub(crate) fn between(&self, one: usize, other: usize) -> Vec<usize> {
        let ends = |line: &Line| line.ends == [one, other] || line.ends == [other, one];
        let lines = self.lines.iter().enumerate();
        lines
            .filter(|(_, line)| ends(line) && line.open == [true, true])
            .map(|(number, _)| number)
            .collect()
    }

    /// Changes a path.
    pub(crate) fn set_path(&mut self, from: usize, to: usize, path: Path) {
        self.paths[from][to] = path;
        for line in 0..self.lines.len() {
            let [one, other] = self.lines[line].ends;
            let kernels = [self.processes[one].kernel, self.processes[other].kernel];
            if kernels != [from, to] && kernels != [to, from]
                || self.lines[line].open == [false, false]
            {
                continue;
            }
            if path == Path::Open {
                self.release(line);
            } else if !std::mem::replace(&mut self.lines[line].checked, true) {
                let late = self.random.u64(0..300) * MILLI;
                self.at(self.now + UNACKNOWLEDGED + late, Happening::Check(line));
            }
        }
    }

    /// Sends the held frames if the path is open.
    fn release(&mut self, line: usize) {
        for side in 0..2 {
            let (from, to) = (self.lines[line].ends[side], self.lines[line].ends[1 - side]);
            if self.path(from, to) != Path::Open {
                continue;
            }
            if !self.lines[line].open[side] {
                // The kernel of an ended process answers with a reset.
                self.close_other(line, side);
            }
            let again = self.random.u64(1..300) * MILLI;
            let mut at = (self.now + again).max(self.lines[line].busy[side] + 1);
            for frame in std::mem::take(&mut self.lines[line].held[side]) {
                let to = 1 - side;
                self.at(at, Happening::Frame { line, to, frame });
                self.lines[line].busy[side] = at;
                self.lines[line].overtaken[side] = at;
                at += 1000;
            }
        }
    }

    /// Gives up the connections of a path that has been closed for long enough, as the kernels do.
    fn check(&mut self, line: usize) {
        self.lines[line].checked = false;
        let [one, other] = self.lines[line].ends;
        if self.is_connected(one, other) {
            return;
        }
        for side in 0..2 {
            let later = self.random.u64(0..500) * MILLI;
            self.at(self.now + later, Happening::Closed { line, side });
        }
    }

    /// Ends the process, as SIGKILL does.
    pub(crate) fn kill(&mut self, process: usize) {
        let own = &mut self.processes[process];
        if !own.alive {
            return;
        }
        own.alive = false;
        own.killed = Some(self.now);
        own.fuse = None;
        let (id, kernel) = (own.id, own.kernel);
        for line in 0..self.lines.len() {
            let Some(side) = self.lines[line].ends.iter().position(|end| *end == process) else {
                continue;
            };
            if std::mem::take(&mut self.lines[line].open[side]) {
                self.close_other(line, side);
            }
        }
        for other in 0..self.processes.len() {
            let beside = self.watches && self.processes[other].kernel == kernel;
            let proof = match &self.processes[other].machine {
                Machine::Observer(_) if self.processes[other].parent => {
                    let end = ProcessEnd::in_words("killed by signal 9", "");
                    Proof::Launcher(Box::new(end))
                }
                Machine::Member(_) if beside || self.launcher => Proof::Kernel,
                _ => continue,
            };
            if other != process {
                let mut delay = self.random.u64(10..3000) * 1000;
                // A driver that expects a launcher's report passes both inputs.
                if proof == Proof::Kernel && self.random.bool() {
                    self.input_in(delay, other, Input::Exited(id));
                    delay += self.random.u64(0..500) * MILLI;
                }
                self.input_in(delay, other, Input::Ended(id, proof));
            }
        }
    }

    /// Reports the earlier ends of processes to a driver that starts to watch the processes of its kernel.
    pub(crate) fn watch(&mut self, process: usize, membership: &SharedMembership) {
        for voter in membership.voters() {
            let Some(of) = self
                .process_of(voter.id)
                .filter(|of| !self.processes[*of].alive)
            else {
                continue;
            };
            let beside = self.processes[of].kernel == self.processes[process].kernel;
            if self.launcher || (self.watches && beside) {
                let delay = self.random.u64(10..3000) * 1000;
                self.input_in(delay, process, Input::Ended(voter.id, Proof::Kernel));
            }
        }
    }

    pub(crate) fn freeze(&mut self, process: usize) {
        self.processes[process].frozen = true;
    }

    pub(crate) fn thaw(&mut self, process: usize) {
        self.processes[process].frozen = false;
        // Inputs from sockets and from pidfds are read in any order relative to each other, but each kind in order.
        let mut backlog: Vec<_> = std::mem::take(&mut self.processes[process].backlog).into();
        if self.random.bool() {
            backlog.sort_by_key(|input| !matches!(input, Input::Ended(..) | Input::Exited(..)));
        }
        for input in backlog {
            self.give(process, input);
        }
        if self.processes[process].alive {
            self.pump(process);
        }
    }

    /// Makes the clock of a process jump ahead.
    pub(crate) fn jump(&mut self, process: usize, by: u64) {
        self.processes[process].jumped += by;
        if self.processes[process].alive && !self.processes[process].frozen {
            self.pump(process);
        }
    }
}

fn brief(frame: &Frame) -> String {
    use nccl_control::proto::Message;
    match frame {
        Frame::Data {
            sequence,
            generation,
            message,
            ..
        } => {
            let what = match message {
                Message::Vote { term, report } => {
                    format!(
                        "Vote {term:?} synced {:?} log {}+{} accepted {:?}",
                        report.synced,
                        report.log.first,
                        report.log.entries.len(),
                        report
                            .accepted
                            .as_ref()
                            .map(|(term, next)| (*term, next.generation))
                    )
                }
                Message::Activate {
                    membership: next, ..
                }
                | Message::NewerGeneration(next) => {
                    format!("Activate or Ahead {:?}", next.generation)
                }
                Message::Propose { term, membership } => {
                    format!("Propose {term:?} {:?}", membership.generation)
                }
                Message::Append { at, .. } => format!("Append {at}"),
                Message::SyncLog {
                    term,
                    start,
                    entries,
                } => format!("Lead {term:?} {start}+{}", entries.len()),
                Message::Join { role, .. } => format!("Join {role:?}"),
                message => format!("{message:?}"),
            };
            format!("[{sequence} of {generation}] {what}")
        }
        frame => format!("{frame:?}"),
    }
}
