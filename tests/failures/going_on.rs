//! After a rank has died, or hangs, the others continue: in the same processes, with right results, soon.

use std::process::Command;
use std::time::{Duration, Instant};

use nccl::cudarc::driver::{CudaSlice, CudaStream};
use nccl::moe::{ExpertParallel, Routing};
use nccl::plan::{CapturedPlan, RenewablePlan};
use nccl::{Communicator, ReduceOp, World};
use nccl_tools::testing::name;

use crate::programs::program;
use crate::support;
use crate::support::apart::{self, Apart};

/// How long ranks wait for each other.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Time within which the surviving ranks work again.
const SOON: Duration = Duration::from_secs(15);

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// All-reduces and checks the result, until one fails or all want to stop; `turns` 0 is for ever.
fn work(comm: &Communicator, stream: &std::sync::Arc<CudaStream>, turns: usize) -> Outcome<()> {
    let ranks = comm.world_size();
    let expected = (ranks * (ranks + 1) / 2) as f32;
    for turn in 1.. {
        let mut y = stream.clone_htod(&vec![comm.rank() as f32 + 1.0; 1 << 12])?;
        comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
        let y = stream.clone_dtoh(&y)?;
        assert!(
            y.iter().all(|&sum| sum == expected),
            "{} for {expected}",
            y[0]
        );
        if turn == 1 {
            println!("right: {ranks} ranks");
        }
        if turn == 10 {
            println!("working: {ranks} ranks");
        }
        if turn == turns {
            return Ok(());
        }
    }
    Ok(())
}

fn says(ranks: &mut [Apart], words: &str) -> Vec<String> {
    ranks.iter_mut().map(|rank| rank.says(words)).collect()
}

#[test]
fn the_example_goes_on_twenty_times_and_nothing_is_left_of_the_past() {
    if !support::needs_processes(4) {
        return;
    }
    const ROUNDS: usize = 20;
    let output = Command::new(program("going_on"))
        .arg(ROUNDS.to_string())
        .env_remove("NCCL_RUN_RANK")
        // NCCL's RAS thread keeps its connections to dead processes for a while.
        .env("NCCL_RAS_ENABLE", "0")
        // Aborts that take half a second would hold more resources the faster the rounds are.
        .env("NCCL_EMULATOR_PROXY_POLL_MS", "0")
        .output()
        .expect("the example runs");
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{errors}");
    println!("{}", said.lines().last().unwrap_or_default());
    // The processes of rank 0 and of the next two die, each of them as the coordinator; rank 3 survives all.
    let of_rank_3 = said
        .lines()
        .filter(|line| line.starts_with("rank 3: at work: 4 ranks"));
    let held: Vec<(usize, usize)> = of_rank_3
        .map(|line| {
            let number = |word: &str| {
                let words: Vec<&str> = line.split([' ', ',']).collect();
                let at = words.iter().position(|&other| other == word);
                words[at.expect(word) - 1].parse().expect("a number")
            };
            (number("descriptors"), number("threads"))
        })
        .collect();
    assert_eq!(held.len(), ROUNDS + 1, "{said}");
    type Held = (usize, usize);
    let each = |held: &[Held], pick: fn(Vec<usize>) -> Option<usize>| {
        let of = |what: fn(&Held) -> usize| pick(held.iter().map(what).collect());
        (
            of(|held| held.0).expect("some"),
            of(|held| held.1).expect("some"),
        )
    };
    let most = |held: &[Held]| each(held, |all| all.into_iter().max());
    let least = |held: &[Held]| each(held, |all| all.into_iter().min());
    if support::on_nvidias() {
        // With aborts that take half a second: the resources that they hold come and go, and nothing else. By the
        // fourth round this rank coordinates, and has created the permanent resources of a process.
        let (early, late) = (least(&held[4..12]), least(&held[13..]));
        assert!(late.0 <= early.0 && late.1 <= early.1, "{held:?}");
    } else {
        // The first rounds create the permanent resources of a process.
        let (early, late) = (most(&held[8..13]), most(&held[16..]));
        assert!(late.0 <= early.0 + 4 && late.1 <= early.1 + 3, "{held:?}");
    }
}

/// A rank that works with the remaining ranks, until it is alone or killed.
fn survivor(mut world: World, leaves_behind: bool) -> Outcome<()> {
    let stream = support::device(&world)?.new_stream()?;
    let mut old: Option<Communicator> = None;
    loop {
        let comm = world
            .communicator("work")
            .stream(&stream)
            .with(|comm| comm.timeouts.operation = TIMEOUT)
            .build()?;
        if let Some(old) = old.replace(comm.clone()) {
            let mut y = stream.alloc_zeros::<f32>(1)?;
            let error = old.all_reduce_in_place(&mut y, ReduceOp::Sum).unwrap_err();
            println!("old: {}", format!("{error:#}").replace('\n', " "));
        }
        if world.size() == 2 {
            work(&comm, &stream, 20)?;
            return Ok(comm.finalize()?);
        }
        let error = work(&comm, &stream, 0).unwrap_err();
        println!("ended: {}", format!("{error:#}").replace('\n', " "));
        let timeout = match leaves_behind {
            true => Duration::from_millis(500),
            false => TIMEOUT,
        };
        world = match leaves_behind {
            true => world.next_generation_leaving_behind(timeout)?,
            false => world.next_generation(timeout)?,
        };
    }
}

/// Of four ranks one dies, and of the three that continue another one: `victim` each time.
fn two_die(test: &str, victim: usize) {
    const RANKS: usize = 4;
    if let Some((_, world)) = apart::rank(test, RANKS) {
        survivor(world, false).expect("this rank survives");
        return;
    }
    if !support::needs_processes(RANKS) {
        return;
    }
    let mut ranks = apart::start(test, "", RANKS, &[]);
    for left in [4, 3] {
        says(&mut ranks, &format!("working: {left} ranks"));
        let mut victim = ranks.remove(victim);
        let begun = Instant::now();
        victim.kill();
        for said in says(&mut ranks, "ended: ") {
            assert!(said.contains(&format!("pid {}", victim.pid())), "{said}");
        }
        says(&mut ranks, &format!("right: {} ranks", left - 1));
        let took = begun.elapsed();
        println!("{left} ranks went on as {} after {took:?}", left - 1);
        assert!(took < SOON, "{took:?}");
    }
    for rank in ranks {
        let (rest, status) = rank.end(TIMEOUT);
        assert!(status.success(), "{status}: {rest}");
    }
}

#[test]
fn two_die_one_after_the_other_and_two_go_on() {
    two_die(&name(&|| ()), 1);
}

#[test]
fn rank_0_dies_and_so_does_the_next_one_and_two_go_on() {
    two_die(&name(&|| ()), 0);
}

/// A routing, choices, weights, tokens, rows of experts, and results.
type LayerBuffers = (
    Routing,
    CudaSlice<i32>,
    CudaSlice<f32>,
    CudaSlice<f32>,
    CudaSlice<f32>,
    CudaSlice<f32>,
);

/// A layer of experts that return what they get: 6 experts on 3 ranks or on 2.
fn capture_layer(
    comm: &Communicator,
    former: Option<LayerBuffers>,
) -> Outcome<CapturedPlan<LayerBuffers>> {
    let (rank, stream) = (comm.rank() as i32, comm.stream());
    let ep = ExpertParallel::builder(comm)
        .with(|ep| (ep.experts, ep.top_k, ep.max_tokens, ep.max_row_bytes) = (6, 1, 4, 4))
        .build()?;
    let choices = [rank, rank + 1, rank + 2, rank + 3];
    let buffers = match former {
        Some((_, _, weights, x, y, out)) => (
            ep.routing()?,
            stream.clone_htod(&choices)?,
            weights,
            x,
            y,
            out,
        ),
        None => (
            ep.routing()?,
            stream.clone_htod(&choices)?,
            stream.clone_htod(&[1f32; 4])?,
            stream.clone_htod(&[1f32, 2.0, 3.0, 4.0])?,
            stream.alloc_zeros(ep.rows())?,
            stream.alloc_zeros(4)?,
        ),
    };
    Ok(comm.capture(
        buffers,
        |capture, (mut routing, topk, weights, x, mut y, out)| {
            let mut experts = ep.capture(capture)?;
            experts.route(&topk, &mut routing)?;
            experts.dispatch(&routing, &x, &mut y)?;
            experts.next_part();
            experts.combine(&routing, &y, &weights, out)
        },
    )?)
}

fn layers(mut world: World) -> Outcome<()> {
    let stream = support::device(&world)?.new_stream()?;
    let mut layer = RenewablePlan::new(capture_layer);
    loop {
        let comm = world
            .communicator("work")
            .stream(&stream)
            .with(|comm| comm.timeouts.operation = TIMEOUT)
            .build()?;
        let ranks = world.size();
        let mut turn = |turn: usize| -> Outcome<()> {
            let plan = layer.on(&comm)?;
            stream.memset_zeros(&mut plan.views_mut().5)?;
            plan.launch()?.wait()?;
            // The tokens are those that were copied before anything was lost.
            let out = stream.clone_dtoh(&plan.views().5)?;
            assert_eq!(out, [1.0, 2.0, 3.0, 4.0]);
            assert_eq!(layer.captures() as usize, 4 - ranks);
            if turn == 10 {
                println!("working: {ranks} ranks, captured in {:?}", layer.took());
            }
            Ok(())
        };
        if ranks == 2 {
            (0..20).try_for_each(turn)?;
            return Ok(comm.finalize()?);
        }
        let error = (0..).try_for_each(&mut turn).unwrap_err();
        println!("ended: {}", format!("{error:#}").replace('\n', " "));
        world = world.next_generation(TIMEOUT)?;
    }
}

#[test]
fn a_layer_of_experts_is_captured_again_by_the_ranks_that_are_left() {
    const RANKS: usize = 3;
    let test = name(&|| ());
    if let Some((_, world)) = apart::rank(&test, RANKS) {
        layers(world).expect("this rank survives");
        return;
    }
    if !support::needs_processes(RANKS) {
        return;
    }
    let mut ranks = apart::start(&test, "", RANKS, &[]);
    says(&mut ranks, "working: 3 ranks");
    let mut victim = ranks.remove(1);
    victim.kill();
    for said in says(&mut ranks, "ended: ") {
        assert!(said.contains(&format!("pid {}", victim.pid())), "{said}");
    }
    for said in says(&mut ranks, "working: 2 ranks") {
        println!("{said}");
    }
    for rank in ranks {
        let (rest, status) = rank.end(TIMEOUT);
        assert!(status.success(), "{status}: {rest}");
    }
}

#[test]
fn a_rank_that_hangs_is_left_behind_and_learns_it() {
    const RANKS: usize = 3;
    let test = name(&|| ());
    if let Some((_, world)) = apart::rank(&test, RANKS) {
        let rank = world.rank();
        let stream = support::device(&world).and_then(|device| device.new_stream());
        let stream = stream.expect("a stream");
        let comm = world.communicator("work").stream(&stream);
        // No rank dies: the timeout ends the work.
        let comm = comm
            .with(|comm| comm.timeouts.operation = Duration::from_secs(1))
            .build()
            .expect("all are there");
        let error = work(&comm, &stream, 0).unwrap_err();
        println!("ended: {}", format!("{error:#}").replace('\n', " "));
        let short = Duration::from_millis(500);
        if rank == 2 {
            let error = world.next_generation(TIMEOUT).unwrap_err();
            println!("behind: {error:#}");
            return;
        }
        let error = world.next_generation(short).unwrap_err();
        println!("named: {error:#}");
        let next = world
            .next_generation_leaving_behind(short)
            .expect("two are left");
        let comm = next
            .communicator("work")
            .stream(&stream)
            .build()
            .expect("both are there");
        work(&comm, &stream, 20).expect("both work");
        // The rank that was left behind watches rank 0's connection.
        let mut line = String::new();
        let _ = std::io::stdin().read_line(&mut line);
        return;
    }
    if !support::needs_processes(RANKS) {
        return;
    }
    let mut ranks = apart::start(&test, "", RANKS, &[]);
    says(&mut ranks, "working");
    let mut hangs = ranks.pop().expect("three ranks");
    hangs.stop();
    for said in says(&mut ranks, "named: ") {
        assert!(
            said.contains("rank 2 of 3 did not come to \"the next generation\""),
            "{said}"
        );
    }
    says(&mut ranks, "right: 2 ranks");
    hangs.resume();
    let said = hangs.says("behind: ");
    assert!(said.contains("left behind"), "{said}");
    for mut rank in ranks {
        rank.go_on();
        let (rest, status) = rank.end(TIMEOUT);
        assert!(status.success(), "{status}: {rest}");
    }
}

#[test]
fn an_old_communicator_says_that_the_world_went_on() {
    const RANKS: usize = 3;
    let test = name(&|| ());
    if let Some((_, world)) = apart::rank(&test, RANKS) {
        survivor(world, false).expect("this rank survives");
        return;
    }
    if !support::needs_processes(RANKS) {
        return;
    }
    let mut ranks = apart::start(&test, "", RANKS, &[]);
    says(&mut ranks, "working");
    ranks.pop().expect("three ranks").kill();
    for said in says(&mut ranks, "old: ") {
        // The cause is unchanged, and the advice is new.
        assert!(said.contains("it died"), "{said}");
        assert!(
            said.contains("now in generation 1: make it again there"),
            "{said}"
        );
    }
    for rank in ranks {
        let (said, status) = rank.end(TIMEOUT);
        assert!(status.success(), "{status}: {said}");
    }
}

/// The lines of a program, as they arrive.
struct Lines {
    child: std::process::Child,
    lines: std::sync::mpsc::Receiver<String>,
    all: Vec<String>,
    /// For each rank, how many lines were read.
    heard: [usize; 4],
}

impl Lines {
    fn of(mut command: Command) -> Self {
        use std::io::BufRead;
        let mut child = command
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .expect("it runs");
        let (said, lines) = std::sync::mpsc::channel();
        let stdout = child.stdout.take().expect("a pipe");
        let stderr = child.stderr.take().expect("a pipe");
        let also = said.clone();
        std::thread::spawn(move || {
            let lines = std::io::BufReader::new(stdout).lines();
            lines
                .map_while(Result::ok)
                .all(|line| said.send(line).is_ok())
        });
        std::thread::spawn(move || {
            let lines = std::io::BufReader::new(stderr).lines();
            lines
                .map_while(Result::ok)
                .all(|line| also.send(line).is_ok())
        });
        Self {
            child,
            lines,
            all: Vec::new(),
            heard: [0; 4],
        }
    }

    /// The next line of each of these ranks that contains `words`.
    fn all_say(&mut self, ranks: &[usize], words: &str) -> Vec<String> {
        let deadline = Instant::now() + 2 * TIMEOUT;
        let mut said = Vec::new();
        for &rank in ranks {
            let words = format!("[{rank}] {words}");
            said.push(loop {
                if self.heard[rank] == self.all.len() {
                    let left = deadline.saturating_duration_since(Instant::now());
                    let line = self.lines.recv_timeout(left);
                    let line = line.unwrap_or_else(|_| {
                        panic!("{words:?} is not said:\n{}", self.all.join("\n"))
                    });
                    self.all.push(line);
                }
                let line = &self.all[self.heard[rank]];
                self.heard[rank] += 1;
                if let Some(rest) = line.strip_prefix(&words) {
                    break rest.to_owned();
                }
            });
        }
        said
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        // The launcher's ranks end with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `nccl-run` restarts a killed rank alone; the others continue soon and take it in. More rounds:
/// `NCCL_TEST_ROUNDS=20 cargo test -p nccl-tests --test failures nccl_run -- --nocapture`.
#[test]
fn nccl_run_brings_back_each_rank_that_is_killed_whoever_coordinates() {
    if !support::needs_processes(4) {
        return;
    }
    let rounds = std::env::var("NCCL_TEST_ROUNDS").ok();
    let rounds: usize = rounds.map_or(4, |rounds| rounds.parse().expect("a number"));
    let mut command = Command::new(program("nccl-run"));
    command
        .args(["-n", "4", "--restarts", "1000", "--restart", "failed", "--"])
        .arg(program("going_on"))
        .arg("rank")
        .env_remove("NCCL_RUN_RANK");
    let mut run = Lines::of(command);
    let all = [0, 1, 2, 3];
    let mut pids = run.all_say(&all, "process ");
    let mut generation = 0;
    run.all_say(&all, "at work: 4 ranks");
    for round in 0..rounds {
        // Rank 0 coordinates, then another; later victims are the coordinators of that time.
        let victim = [0, 2, 1, 3][round % 4];
        let others: Vec<usize> = all.into_iter().filter(|rank| *rank != victim).collect();
        // By then nccl-run has joined as an observer.
        std::thread::sleep(Duration::from_millis(300));
        let begun = Instant::now();
        let pid = pids[victim]
            .parse()
            .ok()
            .and_then(rustix::process::Pid::from_raw);
        rustix::process::kill_process(pid.expect("a process"), rustix::process::Signal::KILL)
            .expect("it runs");
        for said in run.all_say(&others, "rank ") {
            assert!(said.contains("killed by SIGKILL"), "round {round}: {said}");
        }
        // The others continue without the killed rank, or with it if it joined before they agreed.
        run.all_say(&others, "right: ");
        let took = begun.elapsed();
        assert!(took < SOON, "round {round}: {took:?}");
        let again = run.all_say(&[victim], "process ");
        assert_ne!(again[0], pids[victim]);
        pids[victim].clone_from(&again[0]);
        let at_work = run.all_say(&all, "at work: 4 ranks in generation ");
        println!(
            "round {round}: without rank {victim} after {took:?}, with it after {:?}",
            begun.elapsed()
        );
        let numbers: Vec<u64> = at_work
            .iter()
            .map(|said| {
                said.split(',')
                    .next()
                    .and_then(|n| n.parse().ok())
                    .expect("a generation")
            })
            .collect();
        assert!(
            numbers.iter().all(|n| *n == numbers[0] && *n > generation),
            "{numbers:?}"
        );
        generation = numbers[0];
        let says = run
            .all
            .iter()
            .filter(|line| line.contains("started again alone"));
        assert_eq!(says.count(), round + 1);
    }
    let text = run.all.join("\n");
    assert!(!text.contains("instead of"), "{text}");
}

/// When no rank is left, a rank that is restarted alone would look for others in vain.
#[test]
fn nccl_run_starts_all_ranks_again_when_none_of_them_is_left() {
    if !support::needs_processes(4) {
        return;
    }
    let mut command = Command::new(program("nccl-run"));
    command
        .args(["-n", "4", "--restarts", "100", "--restart", "failed", "--"])
        .arg(program("going_on"))
        .arg("rank")
        .env_remove("NCCL_RUN_RANK");
    let mut run = Lines::of(command);
    let all = [0, 1, 2, 3];
    // All ranks are killed at once, or one after another while restarted ranks still look for the others.
    for gap in [0, 0, 150] {
        run.all_say(&all, "at work: 4 ranks");
        let lines = run.all.iter().rev();
        let last = |words: String| {
            let said = lines.clone().find_map(|line| line.strip_prefix(&words));
            said.and_then(|pid| rustix::process::Pid::from_raw(pid.parse().ok()?))
        };
        let pids = all.map(|rank| last(format!("[{rank}] process ")).expect("a process"));
        for pid in pids {
            // Unless the death of another rank has already ended it.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            std::thread::sleep(Duration::from_millis(gap));
        }
        let begun = Instant::now();
        // Rank 3 was killed last: all four have restarted once it works.
        run.all_say(&[3], "process ");
        run.all_say(&[3], "right: 4 ranks");
        println!("gaps of {gap} ms: right again after {:?}", begun.elapsed());
        assert!(begun.elapsed() < SOON, "{gap}");
    }
    let of_all = |line: &String| line.contains("all ranks are started again, as generation ");
    assert!(run.all.iter().any(of_all), "{:#?}", run.all);
}
