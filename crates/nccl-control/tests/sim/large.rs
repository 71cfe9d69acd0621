//! One job with a very large number of ranks: it joins, loses some ranks at once, including its coordinator, and forms
//! the next generation.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use nccl_control::proto::{
    Command, Entry, Event, Frame, MILLI, Message, Mistakes, SharedMembership, StartRole, Timing,
};

use super::network::Network;

/// The number of ranks of one host.
const RANKS_PER_HOST: usize = 8;

/// Measures the costs of a job of `size` ranks that loses `dies` of them.
pub(crate) fn run(size: usize, dies: usize) -> ExitCode {
    let begun = Instant::now();
    let kernels = size.div_ceil(RANKS_PER_HOST);
    let mut net = Network::new(1, kernels, Timing::default(), Mistakes::default());
    net.measure = Some(measure);
    for slot in 0..size {
        let role = match slot {
            0 => StartRole::InitialCoordinator {
                number: 0,
                size: size as u32,
                witnesses: 0,
            },
            _ => StartRole::Rank {
                number: 0,
                at: String::from("0"),
            },
        };
        net.start(slot as u32, 1 + slot as u64, slot / RANKS_PER_HOST, role);
    }
    let mut job = Job {
        net,
        active: 0,
        wished: vec![false; size],
        goes_on: false,
    };
    if !job.run_until(0, size) {
        return failed("the ranks do not join");
    }
    job.report("joined", begun);
    // Until the leases have been granted as well.
    let settled = job.net.now + 2000 * MILLI;
    while job.net.step(settled) {
        job.look(0);
    }
    job.goes_on = true;
    (job.active, job.net.bytes, job.net.frames) = (0, 0, 0);
    let killed = job.net.now;
    let mut left = dies;
    while left > 0 {
        let victim = match left == dies {
            true => 0,
            false => job.net.random.usize(0..size),
        };
        if job.net.processes[victim].alive {
            job.net.kill(victim);
            left -= 1;
        }
    }
    if !job.run_until(1, size - dies) {
        return failed("the ranks that are left do not form the next generation");
    }
    let took = (job.net.now - killed) / MILLI;
    job.report(
        &format!("lost {dies} and formed the next generation after {took} ms of virtual time"),
        begun,
    );
    ExitCode::SUCCESS
}

fn failed(what: &str) -> ExitCode {
    println!("{what}");
    ExitCode::FAILURE
}

struct Job {
    net: Network,
    active: usize,
    wished: Vec<bool>,
    goes_on: bool,
}

impl Job {
    /// Runs until `ranks` ranks are in the generation `number`.
    fn run_until(&mut self, number: u64, ranks: usize) -> bool {
        let limit = self.net.now + 60_000 * MILLI;
        while self.active < ranks {
            if !self.net.step(limit) {
                return false;
            }
            self.look(number);
        }
        true
    }

    fn look(&mut self, number: u64) {
        while let Some(process) = self.net.touched.pop() {
            for event in std::mem::take(&mut self.net.processes[process].events) {
                match event {
                    Event::Active(membership) if membership.generation.number == number => {
                        self.active += 1;
                    }
                    Event::Entry(entry)
                        if self.goes_on && matches!(&*entry, Entry::Departed { .. }) =>
                    {
                        self.reconfigure_request(process);
                    }
                    _ => {}
                }
            }
        }
    }

    /// Makes the program of a process that learns of a fault request the next generation, once.
    fn reconfigure_request(&mut self, process: usize) {
        let (timeout, leaves_behind) = (30_000 * MILLI, false);
        let reconfigure = Command::Reconfigure {
            timeout,
            leaves_behind,
        };
        if !std::mem::replace(&mut self.wished[process], true) {
            self.net.command(process, reconfigure);
        }
    }

    fn report(&self, what: &str, begun: Instant) {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let largest = self
            .net
            .processes
            .iter()
            .map(|process| process.member().size());
        println!(
            "{} ranks {what}: {:.1} s of this process, {} at most, {} frames, {:.1} MB through the wire, {:.2} MB in the largest machine",
            self.net.processes.len(),
            begun.elapsed().as_secs_f64(),
            peak.map_or("?", str::trim),
            self.net.frames,
            self.net.bytes as f64 / 1e6,
            largest.max().unwrap_or(0) as f64 / 1e6,
        );
    }
}

/// Returns the size of a frame in bytes. A membership, which many frames share, is counted once.
fn measure(frame: &Frame) -> usize {
    let size = |frame: &Frame| postcard::experimental::serialized_size(frame).unwrap_or(0);
    let Frame::Data { message, .. } = frame else {
        return size(frame);
    };
    let membership = match message {
        Message::Activate { membership, .. }
        | Message::NewerGeneration(membership)
        | Message::Propose { membership, .. } => membership,
        _ => return size(frame),
    };
    thread_local! {
        static KNOWN: std::cell::RefCell<Vec<(SharedMembership, usize)>> = const { std::cell::RefCell::new(Vec::new()) };
    }
    KNOWN.with_borrow_mut(|known| {
        if let Some((_, size)) = known
            .iter()
            .find(|(other, _)| Arc::ptr_eq(other, membership))
        {
            return *size;
        }
        let size = size(frame);
        known.push((Arc::clone(membership), size));
        size
    })
}
