//! A generation that is being formed, the events for its coordinator's driver, and the effect of an observer's reports.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use super::super::*;
use crate::departure::{Departure, Failure, LossKind, Lost, ProcessEnd, UnreachableEvidence};

/// Processes whose connections deliver everything immediately. The slot is the address.
#[derive(Default)]
struct Net {
    members: Vec<(MemberMachine, Vec<Event>)>,
    observer: Option<(ObserverMachine, Vec<Event>)>,
    /// The two ends of each connection.
    lines: Vec<[usize; 2]>,
    /// The processes that were killed, or whose messages are not delivered for a while.
    silent: BTreeSet<usize>,
    /// The pairs between which the network is cut.
    cuts: BTreeSet<[usize; 2]>,
    /// A process that no other can connect to, and that is not told that a generation is active.
    hidden: Option<usize>,
    /// A process for which frames are delayed, and those frames.
    delayed: Option<usize>,
    late_frames: Vec<Input>,
    /// The slot of a member that does not tolerate unreachable ones.
    intolerant: Option<u32>,
    now: Time,
}

/// The observer's index, used like a member's.
const OBSERVER: usize = 100;

impl Net {
    fn process_info(&self, slot: u32, incarnation: u64) -> ProcessInfo {
        ProcessInfo {
            id: id(slot, incarnation),
            host: String::from("host"),
            pid: 1000 + slot,
            start_time: 0,
            kernel: 7,
            at: self.members.len().to_string(),
            launcher_rank: None,
            observed: false,
            tolerates_unreachable: self.intolerant != Some(slot),
        }
    }

    /// Starts an observer at the first member.
    fn observe(&mut self) {
        let (me, at) = (self.process_info(99, 9), vec![String::from("0")]);
        let observer =
            ObserverMachine::new(me, at, Timing::default(), Mistakes::default(), self.now);
        self.observer = Some((observer, Vec::new()));
        self.run();
    }

    fn start(&mut self, slot: u32, incarnation: u64, role: StartRole) -> usize {
        let me = self.process_info(slot, incarnation);
        let member = MemberMachine::new(me, role, Timing::default(), Mistakes::default(), self.now);
        self.members.push((member, Vec::new()));
        self.run();
        self.members.len() - 1
    }

    fn rank(&mut self, slot: u32, incarnation: u64) -> usize {
        let (number, at) = (3, String::from("0"));
        self.start(slot, incarnation, StartRole::Rank { number, at })
    }

    fn first(size: u32, witnesses: u32) -> Self {
        let mut net = Self::default();
        net.start_first(size, witnesses);
        net
    }

    /// Creates an active generation of `size` ranks whose leases have been granted.
    fn formed(size: u32) -> Self {
        let mut net = Self::first(size, 0);
        for slot in 1..size {
            net.rank(slot, 5);
        }
        net.wait(1000 * MILLI);
        net
    }

    fn start_first(&mut self, size: u32, witnesses: u32) {
        let number = 3;
        let role = StartRole::InitialCoordinator {
            number,
            size,
            witnesses,
        };
        self.start(0, 1, role);
    }

    fn give(&mut self, to: usize, input: Input) {
        self.handle(to, input);
        self.run();
    }

    /// Ends a process; its connections are closed.
    fn kill(&mut self, of: usize) {
        self.silent.insert(of);
        self.break_lines(of);
    }

    /// Closes the connections of a process.
    fn break_lines(&mut self, of: usize) {
        for line in 0..self.lines.len() {
            if self.lines[line].contains(&of) {
                let line = Connection(line as u64);
                self.give(self.other(of, line), Input::Closed(line));
                self.give(of, Input::Closed(line));
            }
        }
    }

    /// Cuts the network between some members and others, and closes their connections.
    fn cut(&mut self, some: &[usize], others: &[usize]) {
        let pairs = some
            .iter()
            .flat_map(|one| others.iter().map(move |other| [*one, *other]));
        self.cuts
            .extend(pairs.flat_map(|[one, other]| [[one, other], [other, one]]));
        self.close_cut_lines();
    }

    /// Reconnects all members; connections across the cuts have ended.
    fn heal(&mut self) {
        self.close_cut_lines();
        self.cuts.clear();
    }

    fn close_cut_lines(&mut self) {
        for line in 0..self.lines.len() {
            let ends = self.lines[line];
            if self.cuts.contains(&ends) {
                for end in ends {
                    self.give(end, Input::Closed(Connection(line as u64)));
                }
            }
        }
    }

    fn handle(&mut self, to: usize, input: Input) {
        match (to, &mut self.observer) {
            _ if self.silent.contains(&to) => {}
            (OBSERVER, Some((observer, _))) => observer.handle(self.now, input),
            _ => self.members[to].0.handle(self.now, input),
        }
    }

    fn command(&mut self, to: usize, command: Command) {
        self.give(to, Input::Command(command));
    }

    /// Runs for `nanos` nanoseconds, with each timeout at its time.
    fn wait(&mut self, nanos: u64) {
        let until = self.now.after(nanos);
        loop {
            let living = self.members.iter().enumerate();
            let living = living.filter(|(of, _)| !self.silent.contains(of));
            let due = living.map(|(_, (member, _))| member.next_timeout());
            let observer = self.observer.iter();
            let due = due.chain(observer.map(|(observer, _)| observer.next_timeout()));
            self.now = due.min().unwrap_or(Time::NEVER).max(self.now.after(1));
            if self.now > until {
                self.now = until;
                return;
            }
            for (of, (member, _)) in self.members.iter_mut().enumerate() {
                if !self.silent.contains(&of) && member.next_timeout() <= self.now {
                    member.handle_timeout(self.now);
                }
            }
            if let Some((observer, _)) = &mut self.observer
                && observer.next_timeout() <= self.now
            {
                observer.handle_timeout(self.now);
            }
            self.run();
        }
    }

    fn run(&mut self) {
        let mut inputs = VecDeque::new();
        loop {
            while let Some((own, output)) = self.poll() {
                match output {
                    Output::Event(event) => self.events(own).push(event),
                    Output::Connection(ConnectionRequest::Dial { peer, at }) => {
                        let to = at.parse().unwrap();
                        let line = Connection(self.lines.len() as u64);
                        let dialed = match self.silent.contains(&to)
                            || self.hidden == Some(to)
                            || self.cuts.contains(&[own, to])
                        {
                            true => Input::DialFailed(peer),
                            false => Input::Connected(peer, line),
                        };
                        self.lines.push([own, to]);
                        inputs.push_back((own, dialed));
                    }
                    Output::Connection(ConnectionRequest::Transmit(line, frame)) => {
                        let message = match &frame {
                            Frame::Data { message, .. } => Some(message),
                            _ => None,
                        };
                        let other = self.other(own, line);
                        let is_lost = self.hidden == Some(other)
                            && matches!(message, Some(Message::Activate { .. }));
                        if is_lost || self.cuts.contains(&[own, other]) {
                            continue;
                        }
                        if self.delayed == Some(other) {
                            self.late_frames.push(Input::Frame(line, frame));
                            continue;
                        }
                        inputs.push_back((other, Input::Frame(line, frame)));
                    }
                    Output::Connection(ConnectionRequest::Close(line)) => {
                        let other = self.other(own, line);
                        inputs.push_back((other, Input::Closed(line)));
                    }
                }
            }
            let Some((to, input)) = inputs.pop_front() else {
                return;
            };
            self.handle(to, input);
        }
    }

    fn poll(&mut self) -> Option<(usize, Output)> {
        for (own, (member, _)) in self.members.iter_mut().enumerate() {
            if !self.silent.contains(&own)
                && let Some(output) = member.poll()
            {
                return Some((own, output));
            }
        }
        Some((OBSERVER, self.observer.as_mut()?.0.poll()?))
    }

    fn events(&mut self, of: usize) -> &mut Vec<Event> {
        match (of, &mut self.observer) {
            (OBSERVER, Some((_, events))) => events,
            _ => &mut self.members[of].1,
        }
    }

    fn other(&self, own: usize, line: Connection) -> usize {
        let [one, other] = self.lines[line.0 as usize];
        if one == own { other } else { one }
    }

    fn take_events(&mut self, of: usize) -> Vec<Event> {
        std::mem::take(self.events(of))
    }
}

fn id(slot: u32, incarnation: u64) -> MemberId {
    MemberId { slot, incarnation }
}

#[test]
fn a_generation_is_active_when_all_ranks_and_witnesses_are_there() {
    let mut net = Net::first(2, 1);
    let rank = net.rank(1, 5);
    assert_eq!(net.take_events(0), [Event::Joined(id(1, 5))]);
    assert!(net.members[0].0.joined(1).is_some());
    let (number, at) = (3, String::from("0"));
    let witness = net.start(2, 6, StartRole::Witness { number, at });
    for of in [0, rank, witness] {
        let heard = net.take_events(of);
        let active = heard.iter().find_map(|event| match event {
            Event::Active(membership) => Some(membership),
            _ => None,
        });
        let active = active.unwrap();
        assert_eq!((active.members.len(), active.witnesses.len()), (2, 1));
        assert_eq!(heard.last(), Some(&Event::Coordinator(id(0, 1))));
    }
}

#[test]
fn a_slot_that_is_taken_is_another_processes_only_when_that_is_gone() {
    let mut net = Net::first(3, 0);
    let one = net.rank(1, 5);
    let other = net.rank(1, 6);
    assert_eq!(net.members[0].0.joined(1).unwrap().id, id(1, 5));
    assert_eq!(net.take_events(0), [Event::Joined(id(1, 5))]);
    // Reported by the parent or a pidfd.
    net.give(0, Input::Ended(id(1, 5), Proof::Kernel));
    let fell = Event::JoinRevoked(1, Departure::lost(LossKind::Exited { pid: 1001 }));
    assert_eq!(net.take_events(0)[0], fell);
    net.wait(3000 * MILLI);
    let is_active = |event: &Event| matches!(event, Event::Active(_));
    for of in [one, other] {
        assert!(!net.take_events(of).iter().any(is_active));
    }
    let taken = net.members[0].0.joined(1).map(|process| process.id);
    assert!(taken.is_some(), "one of them has asked again");
}

#[test]
fn a_process_that_gives_up_joining_says_so() {
    let mut net = Net::first(3, 0);
    let rank = net.rank(1, 5);
    net.command(rank, Command::Leave(Departure::Left));
    assert_eq!(net.take_events(rank), [Event::Left]);
    let heard = [
        Event::Joined(id(1, 5)),
        Event::JoinRevoked(1, Departure::Left),
    ];
    assert_eq!(net.take_events(0), heard);
    assert!(net.members[0].0.joined(1).is_none());
}

#[test]
fn all_hear_why_there_will_be_no_generation_also_those_that_come_later() {
    let mut net = Net::first(4, 0);
    let rank = net.rank(1, 5);
    let why: Arc<[u8]> = Arc::from(&b"rank 3 did not come"[..]);
    net.command(0, Command::AbortFormation(Arc::clone(&why)));
    let late = net.rank(2, 6);
    // The driver learns that the late process has connected and has received why there is no first generation.
    assert_eq!(net.members[0].1.pop(), Some(Event::Joined(id(2, 6))));
    for of in [0, rank, late] {
        let heard = net.take_events(of);
        assert_eq!(
            heard.last(),
            Some(&Event::FormationAborted(Arc::clone(&why)))
        );
        assert!(!net.members[of].0.is_in() && net.members[of].0.is_flushed());
    }
}

#[test]
fn a_process_that_comes_only_to_say_that_it_fails_is_no_member_and_its_reason_is_heard() {
    let mut net = Net::first(2, 0);
    let failed = Departure::Failed(Failure::Error(String::from("no weights")));
    let (number, at, why) = (3, String::from("0"), failed.clone());
    let absent = net.start(1, 5, StartRole::Absent { number, at, why });
    assert_eq!(net.take_events(absent), [Event::Left]);
    assert_eq!(net.take_events(0), [Event::JoinRevoked(1, failed)]);
}

/// The driver's evidence is reported for a member that does not reconnect.
#[test]
fn evidence_that_is_newer_than_the_last_word_goes_before_silence() {
    for is_older in [false, true] {
        let mut net = Net::first(3, 0);
        for slot in 1..3 {
            net.rank(slot, 5);
        }
        net.wait(1100 * MILLI);
        let refused = Lost::from(UnreachableEvidence::Refused);
        if is_older {
            net.give(0, Input::Evidence(id(2, 5), refused.clone()));
            net.wait(1100 * MILLI);
        }
        // The process is gone as far as the network shows, and its end is not proven.
        let lines = (0..net.lines.len() as u64).map(Connection);
        let lines: Vec<_> = lines
            .filter(|line| net.lines[line.0 as usize].contains(&2))
            .collect();
        let now = net.now;
        for line in lines {
            net.members[0].0.handle(now, Input::Closed(line));
        }
        net.members[2]
            .0
            .handle(now, Input::Command(Command::Leave(Departure::Left)));
        while net.members[2].0.poll().is_some() {}
        if !is_older {
            net.give(0, Input::Evidence(id(2, 5), refused.clone()));
        }
        net.take_events(0);
        let until = net.now.after(5000 * MILLI);
        while net.now < until
            && !net
                .take_events(0)
                .iter()
                .any(|event| is_gone(event, is_older))
        {
            // The third machine does not run.
            net.now = net.now.after(100 * MILLI);
            for of in 0..2 {
                let now = net.now;
                net.members[of].0.handle_timeout(now);
            }
            net.run();
        }
        assert!(net.now < until);
    }
}

fn is_gone(event: &Event, is_older: bool) -> bool {
    let Event::Entry(entry) = event else {
        return false;
    };
    let Entry::Departed {
        departure: Departure::Lost(lost),
        ..
    } = &**entry
    else {
        return false;
    };
    let evidence = lost.unreachable_host().map(|it| &it.evidence);
    match is_older {
        true => assert!(
            matches!(evidence, Some(UnreachableEvidence::Unheard { .. })),
            "{evidence:?}"
        ),
        false => assert_eq!(evidence, Some(&UnreachableEvidence::Refused)),
    }
    true
}

#[test]
fn a_member_that_was_late_gives_its_coordinator_another_period() {
    let mut net = Net::first(3, 0);
    for slot in 1..3 {
        net.rank(slot, 5);
    }
    net.wait(2000 * MILLI);
    // The member has made a request, and wakes much later than it was due.
    let (topic, bytes) = (String::from("topic"), vec![1]);
    let now = net.now;
    let say = Input::Command(Command::Broadcast { topic, bytes });
    net.members[1].0.handle(now, say);
    let late = now.after(9000 * MILLI);
    net.members[1].0.handle_timeout(late);
    assert!(net.members[1].0.coordinator() == id(0, 1) && !net.members[1].0.is_coordinator());
    assert!(net.members[1].0.next_timeout() >= late.after(3000 * MILLI));
}

#[test]
fn an_observer_asks_the_process_that_forms_and_hears_when_that_is_done() {
    let mut net = Net::first(2, 0);
    net.observe();
    assert_eq!(net.take_events(OBSERVER), [Event::Forming(3)]);
    let words: Arc<[u8]> = Arc::from(&b"who is there"[..]);
    net.command(OBSERVER, Command::Request(Arc::clone(&words)));
    assert_eq!(
        net.take_events(0),
        [Event::Request(id(99, 9), Arc::clone(&words))]
    );
    let (to, bytes) = (id(99, 9), Arc::clone(&words));
    net.command(0, Command::Reply { to, bytes });
    assert_eq!(net.take_events(OBSERVER), [Event::Reply(words)]);
    // Longer than the timeout for a process that does not answer.
    net.wait(60_000 * MILLI);
    assert_eq!(net.take_events(OBSERVER), []);
    net.rank(1, 5);
    let heard = net.take_events(OBSERVER);
    assert!(matches!(&heard[..], [Event::Active(_), Event::Coordinator(to)] if *to == id(0, 1)));
}

/// Reports the end of the process of slot 1, as its parent does; returns the expected departure.
fn reported_end(net: &mut Net) -> Departure {
    let end = ProcessEnd::in_words("killed by SIGKILL", "");
    let proof = Proof::Launcher(Box::new(end.clone()));
    net.give(OBSERVER, Input::Ended(id(1, 5), proof));
    Departure::Lost(end.into())
}

fn gone(events: &[Event]) -> Vec<(MemberId, Departure)> {
    let entries = events.iter().filter_map(|event| match event {
        Event::Entry(entry) => Some(&**entry),
        _ => None,
    });
    let gone = entries.filter_map(|entry| match entry {
        Entry::Departed {
            member, departure, ..
        } => Some((*member, departure.clone())),
        _ => None,
    });
    gone.collect()
}

#[test]
fn an_exit_report_waits_for_a_leave_message_as_long_as_one_may_arrive() {
    for what in ["leave message", "closed", "kernel", "nothing"] {
        let mut net = Net::first(3, 0);
        net.observe();
        for slot in 1..3 {
            net.rank(slot, 5);
        }
        net.wait(1000 * MILLI);
        let mut expected = reported_end(&mut net);
        net.wait(400 * MILLI);
        assert_eq!(gone(&net.take_events(0)), [], "{what}");
        match what {
            "leave message" => {
                net.command(1, Command::Leave(Departure::Left));
                expected = Departure::Left;
            }
            "closed" => {
                let line = net.members[0].0.connection_of(id(1, 5)).unwrap();
                net.give(0, Input::Closed(line));
            }
            "kernel" => net.give(0, Input::Ended(id(1, 5), Proof::Kernel)),
            _ => net.wait(101 * MILLI),
        }
        assert_eq!(gone(&net.take_events(0)), [(id(1, 5), expected)], "{what}");
        // There is no second report.
        net.wait(3000 * MILLI);
        assert_eq!(gone(&net.take_events(0)), [], "{what}");
    }
}

#[test]
fn of_two_the_one_that_is_left_coordinates_before_a_launcher_has_reported_the_end_of_the_other() {
    for is_reported in [true, false] {
        let mut net = Net::first(2, 0);
        net.rank(1, 5);
        net.wait(1000 * MILLI);
        net.take_events(1);
        net.kill(0);
        net.wait(MILLI);
        assert_eq!(
            net.take_events(1),
            [],
            "the end of a connection proves nothing"
        );
        net.give(1, Input::Exited(id(0, 1)));
        net.wait(MILLI);
        assert_eq!(net.take_events(1), [Event::Coordinator(id(1, 5))]);
        let end = ProcessEnd::in_words("killed by SIGKILL", "");
        let proof = match is_reported {
            true => Proof::Launcher(Box::new(end.clone())),
            false => Proof::Kernel,
        };
        let expected = proof.departure(1000);
        net.give(1, Input::Ended(id(0, 1), proof));
        assert_eq!(gone(&net.take_events(1)), [(id(0, 1), expected)]);
    }
}

#[test]
fn members_that_nccl_reaches_stay_unless_one_member_does_not_tolerate_unreachable_ones() {
    for intolerant in [None, Some(1), Some(2)] {
        let mut net = Net {
            intolerant,
            ..Net::default()
        };
        net.start_first(3, 0);
        net.rank(1, 5);
        net.rank(2, 6);
        net.wait(1000 * MILLI);
        net.kill(2);
        for _ in 0..10 {
            net.give(1, Input::Progress);
            net.wait(1000 * MILLI);
        }
        let is_gone = !gone(&net.take_events(0)).is_empty();
        assert_eq!(is_gone, intolerant.is_some(), "{intolerant:?}");
    }
}

#[test]
fn the_next_generation_does_not_wait_for_a_launchers_report() {
    let mut net = Net::first(2, 0);
    net.rank(1, 5);
    net.wait(1000 * MILLI);
    net.kill(0);
    net.give(1, Input::Exited(id(0, 1)));
    net.take_events(1);
    net.command(
        1,
        Command::Reconfigure {
            timeout: 200 * MILLI,
            leaves_behind: true,
        },
    );
    net.wait(300 * MILLI);
    let events = net.take_events(1);
    let expected = Proof::Kernel.departure(1000);
    assert_eq!(gone(&events), [(id(0, 1), expected)]);
    let active =
        |event: &Event| matches!(event, Event::Active(membership) if membership.members.len() == 1);
    assert!(events.iter().any(active), "{events:?}");
}

#[test]
fn a_reply_comes_after_the_entries_that_it_rests_on() {
    let mut net = Net::first(3, 0);
    net.rank(1, 5);
    net.rank(2, 6);
    net.wait(1000 * MILLI);
    // Member 1 loses its link with the coordinator and asks for votes. The other one starts a later term, which member
    // 2 does not know.
    net.silent = BTreeSet::from([0, 2]);
    net.break_lines(0);
    net.wait(3000 * MILLI);
    net.silent.remove(&0);
    net.break_lines(0);
    for member in 0..3 {
        net.take_events(member);
    }
    net.wait(1500 * MILLI);
    let begins = Event::Coordinator(id(0, 1));
    assert!(net.take_events(0).contains(&begins));
    let reply = |net: &mut Net, to, word: &[u8]| {
        let bytes = Arc::from(word);
        net.command(0, Command::Reply { to, bytes });
    };
    reply(&mut net, id(1, 5), b"one");
    reply(&mut net, id(2, 6), b"two");
    assert!(
        net.take_events(1)
            .contains(&Event::Reply(Arc::from(&b"one"[..])))
    );
    net.silent.clear();
    net.break_lines(2);
    net.wait(2000 * MILLI);
    reply(&mut net, id(2, 6), b"three");
    let heard = net.take_events(2);
    let replies = heard.iter().filter_map(|event| match event {
        Event::Reply(bytes) => Some(&**bytes),
        _ => None,
    });
    assert_eq!(
        replies.collect::<Vec<_>>(),
        [&b"two"[..], b"three"],
        "{heard:?}"
    );
    let position = |wanted: &dyn Fn(&Event) -> bool| heard.iter().position(wanted);
    let begins = position(&|event| *event == begins);
    let replied = position(&|event| matches!(event, Event::Reply(_)));
    assert!(begins.is_some() && begins < replied, "{heard:?}");
}

/// Returns three members of which the first coordinates no more, because it has promised its vote to the second. The
/// second has asked for that vote for `asks` nanoseconds, and does not receive it yet.
fn promised(asks: u64) -> Net {
    let mut net = Net::formed(3);
    (net.silent, net.delayed) = (BTreeSet::from([0]), Some(0));
    let (topic, bytes) = (String::from("topic"), vec![1]);
    net.command(1, Command::Broadcast { topic, bytes });
    while net.members[1].0.has_coordinator() {
        net.wait(100 * MILLI);
    }
    net.wait(asks);
    net.silent.clear();
    net.delayed = Some(1);
    for frame in std::mem::take(&mut net.late_frames) {
        net.give(0, frame);
    }
    let first = &net.members[0].0;
    assert!(!first.is_coordinator() && first.coordinator() == id(1, 5));
    assert!(!net.members[1].0.is_coordinator());
    net.take_events(2);
    net
}

/// The first member of [`promised`] gives two replies to the third.
fn replies_without_a_coordinator() -> Net {
    let mut net = promised(100 * MILLI);
    for word in [b"one", b"two"] {
        give_reply(&mut net, word);
    }
    net
}

fn give_reply(net: &mut Net, word: &[u8]) {
    let (to, bytes) = (id(2, 5), Arc::from(word));
    net.command(0, Command::Reply { to, bytes });
}

fn replies(events: &[Event]) -> Vec<&[u8]> {
    let replies = events.iter().filter_map(|event| match event {
        Event::Reply(bytes) => Some(&**bytes),
        _ => None,
    });
    replies.collect()
}

#[test]
fn replies_that_a_member_gives_while_it_waits_come_once_and_in_order_when_it_coordinates_again() {
    let mut net = replies_without_a_coordinator();
    net.kill(1);
    // Member 2 votes twice, and is admitted twice.
    net.delayed = Some(0);
    net.give(0, Input::Ended(id(1, 5), Proof::Kernel));
    net.wait(700 * MILLI);
    net.delayed = None;
    for frame in std::mem::take(&mut net.late_frames) {
        net.give(0, frame);
    }
    assert!(net.members[0].0.is_coordinator());
    give_reply(&mut net, b"three");
    net.wait(1000 * MILLI);
    let heard = net.take_events(2);
    assert_eq!(replies(&heard), [&b"one"[..], b"two", b"three"]);
    let begins = Event::Coordinator(id(0, 1));
    let begins = heard.iter().position(|event| *event == begins);
    let replied = heard
        .iter()
        .position(|event| matches!(event, Event::Reply(_)));
    assert!(begins.is_some() && begins < replied, "{heard:?}");
}

#[test]
fn replies_that_a_member_gives_while_it_waits_are_dropped_when_another_one_coordinates() {
    for follows in [true, false] {
        let mut net = replies_without_a_coordinator();
        net.delayed = None;
        net.silent.extend((!follows).then_some(0));
        for frame in std::mem::take(&mut net.late_frames) {
            net.give(1, frame);
        }
        assert!(net.members[1].0.is_coordinator() && net.members[2].0.has_coordinator());
        assert_eq!(net.members[0].0.has_coordinator(), follows);
        net.silent.clear();
        net.kill(1);
        for member in [0, 2] {
            net.give(member, Input::Ended(id(1, 5), Proof::Kernel));
        }
        net.wait(3000 * MILLI);
        assert!(net.members[0].0.is_coordinator());
        give_reply(&mut net, b"three");
        net.wait(3000 * MILLI);
        assert_eq!(replies(&net.take_events(2)), [b"three"], "{follows}");
    }
}

#[test]
fn a_second_vote_does_not_exclude_a_member_that_has_received_more_entries_since_than_are_kept() {
    let mut net = promised(700 * MILLI);
    net.delayed = None;
    let mut votes = 0;
    for frame in std::mem::take(&mut net.late_frames) {
        if let Input::Frame(_, Frame::Data { message, .. }) = &frame
            && matches!(message, Message::Vote { .. })
        {
            votes += 1;
            if votes == 2 {
                assert!(net.members[1].0.is_coordinator() && net.members[0].0.has_coordinator());
                for _ in 0..200 {
                    let (topic, bytes) = (String::from("topic"), vec![1]);
                    net.command(1, Command::Broadcast { topic, bytes });
                }
                assert!(net.members[0].0.log_end() > 200);
            }
        }
        net.give(1, frame);
    }
    assert_eq!(votes, 2);
    net.wait(1000 * MILLI);
    let first = &net.members[0].0;
    assert!(first.is_in() && first.has_coordinator());
    assert_eq!(first.coordinator(), id(1, 5));
}

/// Returns the command by which a member requests the next generation.
fn reconfigure() -> Command {
    Command::Reconfigure {
        timeout: 3000 * MILLI,
        leaves_behind: false,
    }
}

#[test]
fn a_proposal_that_a_late_voter_has_accepted_goes_on_so_that_the_voter_may_leave() {
    let mut net = Net::formed(5);
    for member in 1..5 {
        net.command(member, reconfigure());
    }
    // The proposal reaches only member 1. The other three get another coordinator, which does not know the proposal.
    net.cut(&[0, 1], &[2, 3, 4]);
    net.command(0, reconfigure());
    net.wait(4000 * MILLI);
    assert!(net.members[2].0.is_coordinator());
    net.heal();
    net.command(1, Command::Leave(Departure::Left));
    net.wait(5000 * MILLI);
    let events = net.take_events(2);
    assert_eq!(gone(&events), [(id(1, 5), Departure::Left)], "{events:?}");
    assert!(!net.members[1].0.is_in());
    assert_eq!(net.members[2].0.membership().generation.number, 4);
}

#[test]
fn a_member_that_joins_once_more_is_no_other_member() {
    let mut net = Net::first(1, 0);
    let at = vec![String::from("0")];
    let joiner = net.start(1, 6, StartRole::Joiner { at });
    // The joiner agrees to the next generation, and does not learn that it is active.
    net.hidden = Some(joiner);
    net.command(0, reconfigure());
    net.cut(&[joiner], &[0]);
    net.wait(3000 * MILLI);
    let members = |net: &Net, of: usize| {
        let membership = net.members[of].0.membership();
        let ids = membership.members.iter().map(|process| process.id);
        (membership.generation.number, ids.collect::<Vec<_>>())
    };
    let both = || vec![id(0, 1), id(1, 6)];
    assert_eq!(members(&net, 0), (4, both()));
    assert!(net.members[joiner].0.is_joining());
    net.heal();
    net.wait(3000 * MILLI);
    assert_eq!(members(&net, joiner), (4, both()));
    net.hidden = None;
    for member in [0, joiner] {
        net.command(member, reconfigure());
    }
    net.wait(1000 * MILLI);
    for member in [0, joiner] {
        assert_eq!(members(&net, member), (5, both()));
    }
}

#[test]
fn a_candidate_asks_again_those_that_it_has_asked_in_the_generation_before() {
    let mut net = Net::formed(4);
    for member in 1..4 {
        net.command(member, reconfigure());
    }
    // Member 1 does not learn that the next generation is active, and member 2 does not receive the coordinator's last
    // message.
    net.hidden = Some(1);
    net.command(0, reconfigure());
    net.silent.insert(2);
    let (topic, bytes) = (String::from("topic"), vec![1]);
    net.command(0, Command::Broadcast { topic, bytes });
    net.silent.remove(&2);
    net.kill(0);
    net.hidden = None;
    // The messages of member 1 to member 3, which knows that generation, arrive after member 1 has learned of it and
    // has a majority.
    net.delayed = Some(3);
    for member in [1, 2] {
        net.give(member, Input::Ended(id(0, 1), Proof::Kernel));
    }
    net.wait(300 * MILLI);
    assert_eq!(net.members[1].0.membership().generation.number, 4);
    assert!(!net.members[1].0.is_coordinator());
    net.delayed = None;
    for frame in std::mem::take(&mut net.late_frames) {
        net.give(3, frame);
    }
    net.give(3, Input::Ended(id(0, 1), Proof::Kernel));
    net.wait(3000 * MILLI);
    assert!(net.members[1].0.is_coordinator());
    for member in 1..4 {
        let events = net.take_events(member);
        let has_heard = |event: &Event| matches!(event, Event::Entry(entry) if matches!(&**entry, Entry::Broadcast(_)));
        assert!(events.iter().any(has_heard), "{member}: {events:?}");
        assert!(net.members[member].0.is_in());
    }
}

#[test]
fn a_proposal_that_a_late_voter_has_accepted_is_not_forgotten_while_its_proposer_may_count_ends() {
    let mut net = Net::formed(5);
    net.command(4, Command::Abstain);
    let patient = || Command::Reconfigure {
        timeout: 60_000 * MILLI,
        leaves_behind: false,
    };
    for member in 1..4 {
        net.command(member, patient());
    }
    // The proposal reaches only member 1, which receives messages from both sides.
    net.cut(&[0], &[2, 3, 4]);
    net.command(0, patient());
    while !net.members[2].0.is_coordinator() {
        net.wait(50 * MILLI);
        assert!(net.now < Time::default().after(6000 * MILLI));
    }
    let follows = |net: &Net| net.members[1].0.coordinator() == id(2, 5);
    while !follows(&net) {
        net.wait(50 * MILLI);
    }
    // The members that have elected the other coordinator end, and the first coordinator makes its proposal active with
    // the answer of member 1.
    net.cut(&[0], &[1]);
    for dead in [2, 3] {
        net.kill(dead);
        for member in [0, 1, 4] {
            net.give(member, Input::Ended(id(dead as u32, 5), Proof::Kernel));
        }
    }
    net.wait(1000 * MILLI);
    let active = net.members[0].0.membership().generation;
    assert_eq!((active.number, active.proposer), (4, id(0, 1)));
    net.wait(30_000 * MILLI);
    let other = net.members[1].0.membership().generation;
    assert!(
        other.number == 3 || other == active,
        "{active:?} and {other:?}"
    );
}
