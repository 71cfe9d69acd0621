//! Networks that are cut in two: which ranks continue, which do not, and what each of them reports, before the network
//! is repaired and after. Hosts have networks, processes and names of their own: processes of one host are invisible on
//! the other.
//!
//! Needs root; without, each test reports that it was not run.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use nccl::control::Witness;
use nccl::{Observer, Rendezvous, World};
use nccl_tools::testing::{Role, again, name};

use crate::isolated_hosts::{IsolatedHosts, Plan};
use crate::programs;

const PORT: u16 = 29_400;
/// Longer than any timeout that a rank has.
const LONG: Duration = Duration::from_secs(60);

/// A process of the job, which reads commands from its standard input, one on each line: `next MS` starts the next generation,
/// `decide R,R` is the operator's decision, `talk` is an exchange of all ranks. It prints the outcome. For an observer, each line
/// lists the ranks for which the operator decides.
fn process(role: &str) {
    let mut words = role.split(' ');
    let mut word = || words.next().expect("a role has six words");
    let (kind, rank, size) = (word(), word(), word());
    let (rank, size): (usize, usize) = (rank.parse().unwrap(), size.parse().unwrap());
    let (host, witnesses, published) = (word(), word(), word());
    let witnesses = witnesses.parse().unwrap();
    if kind == "witness" {
        let at = format!("tcp:{host}:{PORT}");
        let rendezvous = Rendezvous::observer(&at).unwrap();
        let witness = Witness::join(
            rendezvous.with(|meet| meet.secret = Some([7; 32].into())),
            0,
        )
        .expect("the ranks come");
        println!("\nready");
        let _ = std::io::stdin().lines().next();
        drop(witness);
        return;
    }
    if kind == "observer" {
        let at = format!("tcp:{host}:{PORT}");
        let rendezvous = Rendezvous::observer(&at).unwrap();
        let observer = Observer::join(rendezvous.with(|meet| meet.secret = Some([7; 32].into())));
        let observer = observer.expect("the ranks come");
        println!("\nready");
        for ranks in std::io::stdin().lines() {
            let ranks = ranks.unwrap();
            let ranks: Vec<_> = ranks.split(',').map(|rank| rank.parse().unwrap()).collect();
            observer.decide_split(&ranks).expect("they are ranks");
            println!("decided");
        }
        return;
    }
    let rendezvous = Rendezvous::tcp(host, PORT, rank, size).unwrap();
    let mut rendezvous = rendezvous.with(|meet| {
        meet.secret = Some([7; 32].into());
        meet.witnesses = witnesses;
    });
    if published == "operator" {
        rendezvous = rendezvous.with(|meet| meet.majority_timeout = LONG);
    }
    if published.starts_with('/') {
        rendezvous = rendezvous.publish(published);
    }
    let mut world = World::join(rendezvous).expect("the others come");
    println!("\nready");
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (what, rest) = line.split_once(' ').unwrap_or((&line, ""));
        let said = match what {
            "next" => {
                let timeout = Duration::from_millis(rest.parse().unwrap());
                world.next_generation(timeout).map(|next| {
                    world = next;
                    format!("on {} {}", world.generation(), world.size())
                })
            }
            "talk" => {
                let parts = world.all_gather("talk", &[world.rank() as u8]);
                parts.map(|parts| format!("on {} {}", world.generation(), parts.len()))
            }
            "decide" => {
                let ranks: Vec<_> = rest.split(',').map(|rank| rank.parse().unwrap()).collect();
                world.decide_split(&ranks).map(|()| String::from("decided"))
            }
            _ => break,
        };
        match said {
            Ok(said) => println!("{said}"),
            Err(error) => println!("no: {}", format!("{error:#}").replace('\n', " ")),
        }
    }
}

/// A process, and its output.
struct Actor {
    child: Child,
    orders: ChildStdin,
    said: Receiver<String>,
}

impl Actor {
    fn tell(&mut self, order: &str) {
        // An ended process does not read; its missing answer shows that.
        let _ = writeln!(self.orders, "{order}");
    }

    /// Its next line of output.
    fn says(&self) -> String {
        let said = self.said.recv_timeout(LONG);
        said.unwrap_or_else(|_| String::from("nothing"))
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Ranks on hosts, `counts` on each, an observer on the second where an operator decides, and a witness on the last host if there is
/// one.
struct Split {
    // First, so that they are dropped before their hosts.
    ranks: Vec<Actor>,
    observer: Option<Actor>,
    _witness: Option<Actor>,
    hosts: IsolatedHosts,
    first: usize,
    log: String,
}

impl Split {
    /// `None` where isolated hosts are not available.
    fn new(test: &str, counts: [usize; 2], has_witness: bool, published: &str) -> Option<Self> {
        let hosts = IsolatedHosts::new(&Plan {
            hosts: 2 + usize::from(has_witness),
            ..Plan::default()
        })?;
        let size: usize = counts.iter().sum();
        let at = hosts.address(0);
        let witnesses = u32::from(has_witness);
        let start = |host: usize, kind: &str, rank: usize| {
            let role = format!("{kind} {rank} {size} {at} {witnesses} {published}");
            let mut command = again(test, &role);
            command.env("RUST_BACKTRACE", "0");
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut child = hosts.spawn(host, &mut command).expect("a process");
            let orders = child.stdin.take().expect("it is piped");
            let lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
            let (say, said) = mpsc::channel();
            std::thread::spawn(move || {
                let known = ["ready", "on ", "no: ", "decided"];
                for line in lines.map_while(Result::ok) {
                    if known.iter().any(|word| line.starts_with(word)) && say.send(line).is_err() {
                        return;
                    }
                }
            });
            Actor {
                child,
                orders,
                said,
            }
        };
        let ranks: Vec<_> = (0..size)
            .map(|rank| start(usize::from(rank >= counts[0]), "rank", rank))
            .collect();
        let observer = (published == "operator").then(|| start(1, "observer", 0));
        let witness = has_witness.then(|| start(2, "witness", 0));
        for actor in ranks.iter().chain(&observer).chain(&witness) {
            assert_eq!(actor.says(), "ready");
        }
        Some(Self {
            ranks,
            observer,
            _witness: witness,
            hosts,
            first: counts[0],
            log: format!("{counts:?}"),
        })
    }

    /// The ranks on a host.
    fn of(&self, host: usize) -> std::ops::Range<usize> {
        match host {
            0 => 0..self.first,
            _ => self.first..self.ranks.len(),
        }
    }

    /// Sends all ranks the same command; returns the answer of each.
    fn all(&mut self, order: &str) -> Vec<String> {
        self.tell(order);
        self.hear(order)
    }

    /// Sends all ranks the same command.
    fn tell(&mut self, order: &str) {
        self.ranks.iter_mut().for_each(|rank| rank.tell(order));
    }

    /// Returns the answer of each to the last command.
    fn hear(&mut self, order: &str) -> Vec<String> {
        let begun = Instant::now();
        let said: Vec<_> = self.ranks.iter().map(Actor::says).collect();
        let after = begun.elapsed().as_secs_f64();
        let _ = write!(self.log, "\n{order} ({after:.1} s):");
        for (rank, said) in said.iter().enumerate() {
            let _ = write!(self.log, "\n  [{rank}] {said}");
        }
        said
    }

    /// Asserts that the ranks of `host` continue in a world of their own, and that the others are refused, and report why.
    fn one_side_is_on(&self, said: &[String], host: usize) {
        let on = self.of(host);
        let expected = format!("on 1 {}", on.len());
        for (rank, said) in said.iter().enumerate() {
            match on.contains(&rank) {
                true => assert_eq!(*said, expected, "{}", self.log),
                false => self.is_refused(said),
            }
        }
    }

    /// Asserts that a rank reports a missing majority or that it was left behind, and reports no rank dead.
    fn is_refused(&self, said: &str) {
        let reasons = ["reach", "cut off", "without", "left behind", "did not come"];
        let is_reason = reasons.iter().any(|reason| said.contains(reason));
        assert!(
            said.starts_with("no: ") && is_reason,
            "{said}\n{}",
            self.log
        );
        assert!(!said.contains("died"), "{said}\n{}", self.log);
    }
}

/// Runs each of `cases` at the same time: all of them mostly wait.
fn each<T: Copy + Send + std::fmt::Debug>(cases: &[T], run: impl Fn(T) + Sync) {
    std::thread::scope(|scope| {
        for &case in cases {
            let run = &run;
            scope.spawn(move || run(case));
        }
    });
}

#[test]
fn of_an_uneven_split_the_larger_side_goes_on_and_the_other_never() {
    let test = &name(&|| ());
    if let Role::Child(role) = Role::of(test) {
        return process(&role);
    }
    let cases = [
        [1, 2],
        [2, 1],
        [1, 3],
        [3, 1],
        [1, 4],
        [2, 3],
        [3, 2],
        [4, 1],
    ];
    each(&cases, |counts| {
        let Some(mut split) = Split::new(test, counts, false, "-") else {
            return;
        };
        let larger = usize::from(counts[1] > counts[0]);
        split.hosts.cut(1);
        let said = split.all("next 15000");
        split.one_side_is_on(&said, larger);
        split.hosts.mend(1);
        std::thread::sleep(Duration::from_secs(2));
        let said = split.all("talk");
        split.one_side_is_on(&said, larger);
        let said = split.all("next 3000");
        for (rank, said) in said.iter().enumerate() {
            match split.of(larger).contains(&rank) {
                true => assert!(said.starts_with("on 2 "), "{}", split.log),
                false => split.is_refused(said),
            }
        }
    });
}

#[test]
fn of_an_even_split_nobody_goes_on() {
    let test = &name(&|| ());
    if let Role::Child(role) = Role::of(test) {
        return process(&role);
    }
    each(&[[1, 1], [2, 2]], |counts| {
        let Some(mut split) = Split::new(test, counts, false, "-") else {
            return;
        };
        split.hosts.cut(1);
        for order in ["next 15000", "next 1000"] {
            let said = split.all(order);
            said.iter().for_each(|said| split.is_refused(said));
            split.hosts.mend(1);
        }
    });
}

#[test]
fn a_network_that_is_whole_again_soon_ends_nothing() {
    let test = &name(&|| ());
    if let Role::Child(role) = Role::of(test) {
        return process(&role);
    }
    each(&[[1, 1], [2, 1], [1, 2], [2, 2]], |counts| {
        let Some(mut split) = Split::new(test, counts, false, "-") else {
            return;
        };
        for seconds in [1, 3] {
            split.hosts.cut(1);
            std::thread::sleep(Duration::from_secs(seconds));
            split.hosts.mend(1);
            let size = counts[0] + counts[1];
            for said in split.all("talk") {
                assert_eq!(said, format!("on 0 {size}"), "{}", split.log);
            }
        }
    });
}

#[test]
fn an_exchange_under_way_outlives_a_change_of_the_coordinator() {
    let test = &name(&|| ());
    if let Role::Child(role) = Role::of(test) {
        return process(&role);
    }
    // Neither side has a majority: no rank is lost.
    each(&[[1, 1], [1, 1], [2, 2], [2, 2]], |counts| {
        let Some(mut split) = Split::new(test, counts, false, "-") else {
            return;
        };
        split.hosts.cut(1);
        split.tell("talk");
        // Long enough that its followers look for another coordinator.
        std::thread::sleep(Duration::from_secs(7));
        split.hosts.mend(1);
        let size = counts[0] + counts[1];
        for said in split.hear("talk") {
            assert_eq!(said, format!("on 0 {size}"), "{}", split.log);
        }
    });
}

/// Resets connections from other hosts.
const REJECTS: &str = "iifname != lo meta l4proto tcp reject with tcp reset";

#[test]
fn connections_that_are_reset_are_made_again_and_end_nothing() {
    let test = &name(&|| ());
    if let Role::Child(role) = Role::of(test) {
        return process(&role);
    }
    each(&[[1, 1], [2, 1], [1, 2], [2, 2]], |counts| {
        let Some(mut split) = Split::new(test, counts, false, "-") else {
            return;
        };
        let size = counts[0] + counts[1];
        let is_whole = |split: &mut Split| {
            for said in split.all("talk") {
                assert_eq!(said, format!("on 0 {size}"), "{}", split.log);
            }
        };
        for host in [0, 1, 0] {
            match split.hosts.reset(host, "") {
                Ok(count) => assert!(count > 0, "no connection of host {host} was reset"),
                Err(unable) => return eprintln!("not run: {unable}"),
            }
            is_whole(&mut split);
        }
        for host in [0, 1] {
            if let Err(unable) = split.hosts.filter(host, REJECTS) {
                return eprintln!("not run: {unable}");
            }
            std::thread::sleep(Duration::from_secs(1));
            split.hosts.unfilter(host);
            is_whole(&mut split);
        }
    });
}

#[test]
fn a_firewall_that_rejects_splits_a_world_and_is_told_as_that() {
    let test = &name(&|| ());
    if let Role::Child(role) = Role::of(test) {
        return process(&role);
    }
    let cases = [([2, 1], 0), ([2, 1], 1), ([1, 2], 0), ([1, 2], 1)];
    each(&cases, |(counts, host)| {
        let Some(mut split) = Split::new(test, counts, false, "-") else {
            return;
        };
        if let Err(unable) = split.hosts.filter(host, REJECTS) {
            return eprintln!("not run: {unable}");
        }
        let larger = usize::from(counts[1] > counts[0]);
        // Data from the filtered host arrives, and may be all that another rank needs.
        for said in split.all("talk") {
            if said != "on 0 3" {
                split.is_refused(&said);
            }
        }
        let said = split.all("next 15000");
        split.one_side_is_on(&said, larger);
        split.hosts.unfilter(host);
        std::thread::sleep(Duration::from_secs(2));
        let said = split.all("talk");
        split.one_side_is_on(&said, larger);
        println!("{}", split.log);
    });
}

#[test]
fn a_majority_goes_on_also_when_a_rank_falls_out_of_reach_meanwhile() {
    let test = &name(&|| ());
    if let Role::Child(role) = Role::of(test) {
        return process(&role);
    }
    let cases = [([2, 1], 0), ([2, 1], 1), ([1, 2], 0), ([1, 2], 1)];
    each(&cases, |(counts, host)| {
        let Some(mut split) = Split::new(test, counts, false, "-") else {
            return;
        };
        if let Err(unable) = split.hosts.filter(host, REJECTS) {
            return eprintln!("not run: {unable}");
        }
        let larger = usize::from(counts[1] > counts[0]);
        let mut said = split.all("next 15000");
        // The next generation may have been agreed upon with the rank that became unreachable, which then is lost in that
        // generation.
        let others = split.of(larger);
        if said[others].iter().all(|said| said == "on 1 3") {
            split.is_refused(&said[split.of(1 - larger)][0]);
            split.all("talk");
            said = split.all("next 15000");
            for rank in split.of(larger) {
                assert_eq!(said[rank], "on 2 2", "{}", split.log);
            }
        } else {
            split.one_side_is_on(&said, larger);
        }
        println!("{}", split.log);
    });
}

#[test]
fn a_rank_that_nobody_saw_end_is_out_of_reach_and_not_dead() {
    let test = &name(&|| ());
    if let Role::Child(role) = Role::of(test) {
        return process(&role);
    }
    // The second rank coordinates.
    each(&[([2, 1], 2), ([1, 2], 0)], |(counts, alone)| {
        let Some(mut split) = Split::new(test, counts, false, "-") else {
            return;
        };
        split.ranks[alone].child.kill().expect("it runs");
        let others = || (0..3).filter(|rank| *rank != alone);
        let said = split.all("talk");
        let host = format!("(host{}, ", 1 + usize::from(alone > 0));
        // The connection to the coordinator works, but the coordinator itself only waits.
        let signs = ["refuses connections", "closed from the other end"];
        for rank in others() {
            let told = &said[rank];
            let is_told = signs.iter().any(|sign| told.contains(sign)) && told.contains(&host);
            assert!(is_told && !told.contains("died"), "{}", split.log);
        }
        let said = split.all("next 15000");
        for rank in others() {
            assert_eq!(said[rank], "on 1 2", "{}", split.log);
        }
        println!("{}", split.log);
    });
}

#[test]
fn of_an_even_split_the_side_goes_on_that_claims_first() {
    let test = &name(&|| ());
    if let Role::Child(role) = Role::of(test) {
        return process(&role);
    }
    each(&[[1, 1], [2, 2]], |counts| {
        let folder = tempfile::tempdir().expect("a folder");
        let published = folder.path().join("address");
        let published = published.to_str().expect("text");
        let Some(mut split) = Split::new(test, counts, false, published) else {
            return;
        };
        split.hosts.cut(1);
        let said = split.all("next 25000");
        let on = said.iter().position(|said| said.starts_with("on "));
        let on = on.unwrap_or_else(|| panic!("no side has gone on\n{}", split.log));
        let host = usize::from(split.of(1).contains(&on));
        split.one_side_is_on(&said, host);
        split.hosts.mend(1);
        std::thread::sleep(Duration::from_secs(2));
        let said = split.all("talk");
        split.one_side_is_on(&said, host);
    });
}

#[test]
fn of_an_even_split_the_side_goes_on_that_a_witness_is_with() {
    let test = &name(&|| ());
    if let Role::Child(role) = Role::of(test) {
        return process(&role);
    }
    each(&[(1, 0), (2, 0), (1, 1), (2, 1)], |(each, cut)| {
        let Some(mut split) = Split::new(test, [each, each], true, "-") else {
            return;
        };
        split.hosts.cut(cut);
        let said = split.all("next 15000");
        split.one_side_is_on(&said, 1 - cut);
        split.hosts.mend(cut);
        std::thread::sleep(Duration::from_secs(2));
        let said = split.all("talk");
        split.one_side_is_on(&said, 1 - cut);
    });
}

#[test]
fn of_an_even_split_the_side_goes_on_for_which_an_operator_speaks() {
    let test = &name(&|| ());
    if let Role::Child(role) = Role::of(test) {
        return process(&role);
    }
    each(&[(1, 0), (2, 0), (1, 1), (2, 1)], |(each, side)| {
        let Some(mut split) = Split::new(test, [each, each], false, "operator") else {
            return;
        };
        split.hosts.cut(1);
        // The operator ensures that the other side does not continue.
        for rank in split.of(1 - side) {
            split.ranks[rank].child.kill().expect("it runs");
        }
        // The operator takes longer than a side waits on its own.
        std::thread::sleep(Duration::from_secs(14));
        let ranks = split.of(side);
        let names: Vec<_> = ranks.clone().map(|rank| rank.to_string()).collect();
        let names = names.join(",");
        // By a rank's program, by an observer that was there before, or by a command line beside the rank that listens at the
        // rendezvous address.
        if side == 0 && each == 2 {
            let secret = tempfile::NamedTempFile::new().expect("a file");
            std::fs::write(&secret, [7; 32]).expect("a file");
            let mut command = Command::new(programs::program("nccl-doctor"));
            let at = format!("tcp:{}:{PORT}", split.hosts.address(0));
            command.args(["decide", &names, "--rendezvous", &at, "--timeout", "20"]);
            command.env("NCCL_RUN_SECRET_FILE", secret.path());
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            let doctor = split.hosts.spawn(0, &mut command).expect("a process");
            let output = doctor.wait_with_output().expect("it ends");
            let said = String::from_utf8_lossy(&output.stdout);
            let wrong = String::from_utf8_lossy(&output.stderr);
            assert!(said.contains("[0, 1] may go on"), "{said}{wrong}");
        } else if side == 1 && each == 2 {
            let observer = split.observer.as_mut().expect("there is one");
            observer.tell(&names);
            assert_eq!(observer.says(), "decided");
        } else {
            let first = &mut split.ranks[ranks.start];
            first.tell(&format!("decide {names}"));
            assert_eq!(first.says(), "decided");
        }
        for rank in ranks.clone() {
            split.ranks[rank].tell("next 15000");
        }
        for rank in ranks.clone() {
            let said = split.ranks[rank].says();
            assert_eq!(
                said,
                format!("on 1 {each}"),
                "rank {rank} of {:?}",
                (each, side)
            );
        }
    });
}
