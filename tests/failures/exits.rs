//! Processes that end with communicators, plans and buffers in any state: they end soon, with their own exit code, and
//! nothing accesses freed memory or communicators.

use std::any::Any;
use std::process::exit;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl::cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use nccl::plan::CapturedPlan;
use nccl::{Buffer, Communicator, Observer, ReduceOp, Registered, Rendezvous, Request, World};
use nccl_emulator::faults;
use nccl_tools::spawn::{Ended, Outcome as End};

use crate::support::{self, Ranks};

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// An object of every type of this crate, in use.
struct All {
    plan: CapturedPlan<(Registered<Buffer<f32>>, CudaSlice<f32>)>,
    registered: Registered<Buffer<u8>>,
    buffer: Buffer<u8>,
    comm: Communicator,
    request: Request,
    stream: Arc<CudaStream>,
    context: Arc<CudaContext>,
}

impl All {
    fn new(world: &World, name: &str) -> Result<Self> {
        let context = support::device(world)?;
        let stream = context.new_stream()?;
        let comm = world
            .communicator(name)
            .stream(&stream)
            .with(|comm| comm.timeouts.operation = Duration::from_secs(20))
            .build()?;
        let buffers = (
            comm.register(comm.buffer::<f32>(100_000)?)?,
            context.new_stream()?.alloc_zeros::<f32>(1000)?,
        );
        let mut plan = comm.capture(buffers, |capture, (x, y)| {
            capture.group(|group| {
                group.all_reduce_in_place(x, ReduceOp::Sum)?;
                group.all_reduce_in_place(y, ReduceOp::Max)
            })
        })?;
        let mut buffer = comm.buffer::<u8>(1 << 20)?;
        let registered = comm.register(comm.buffer::<u8>(1 << 20)?)?;
        // All of it is pending or running.
        let late = faults::late(Duration::from_millis(10));
        let request = plan.launch()?;
        comm.all_reduce(&registered, &mut buffer, ReduceOp::Max)?;
        drop(late);
        Ok(Self {
            plan,
            registered,
            buffer,
            comm,
            request,
            stream,
            context,
        })
    }

    fn into_parts(self) -> Vec<Box<dyn Any>> {
        vec![
            Box::new(self.plan),
            Box::new(self.registered),
            Box::new(self.buffer),
            Box::new(self.comm),
            Box::new(self.request),
            Box::new((self.stream, self.context)),
        ]
    }
}

/// Asserts that the ranks ended with `code`, soon, and that the emulator recorded no violation, the end of the process
/// included.
fn ended_well(ended: &Ended, begun: Instant, code: i32) {
    match &ended.outcome {
        End::Succeeded if code == 0 => {}
        End::Failed(failure) if code != 0 => {
            let said = failure.to_string();
            assert!(said.contains(&format!("exit code {code}")), "{said}");
        }
        _ => support::expect_success(ended),
    }
    for rank in &ended.ranks {
        for line in &rank.stderr {
            assert!(!line.contains("violation"), "{line}");
        }
    }
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(20), "{took:?}");
}

/// The process ends right after the last drop, with the reaper at work.
#[test]
fn a_process_that_drops_everything_in_any_order_exits() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    let begun = Instant::now();
    let ended = Ranks::new(2).outcome(|world| -> Result<()> {
        for order in 0..12 {
            let mut parts = All::new(&world, &format!("order {order}"))?.into_parts();
            let turns = order % parts.len();
            parts.rotate_left(turns);
            if order >= parts.len() {
                parts.reverse();
            }
            parts.into_iter().for_each(drop);
        }
        Ok(())
    });
    ended_well(&ended, begun, 0);
}

#[test]
fn a_process_that_calls_exit_with_everything_alive_exits() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    let begun = Instant::now();
    let ended = Ranks::new(2).outcome(|world| -> Result<()> {
        let _all = All::new(&world, "alive")?;
        exit(0)
    });
    ended_well(&ended, begun, 0);
}

#[test]
fn a_thread_that_calls_exit_ends_a_process_whose_others_launch_and_drop() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    let begun = Instant::now();
    let ended = Ranks::new(2).outcome(|world| -> Result<()> {
        let mut all = All::new(&world, "busy")?;
        let exiting = std::thread::spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            exit(0)
        });
        while !exiting.is_finished() {
            // Also after the other rank has ended, when launches only queue up, or fail.
            let Ok(_) = all.plan.launch() else { break };
            drop(all.comm.buffer::<u8>(1024)?);
        }
        exiting.join().expect("the thread exits");
        Ok(())
    });
    ended_well(&ended, begun, 0);
}

#[test]
fn a_process_that_panics_with_everything_in_use_ends_as_panics_do() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    let begun = Instant::now();
    let ended = Ranks::new(1).outcome(|world| -> Result<()> {
        let _all = All::new(&world, "panic")?;
        panic!("on purpose")
    });
    ended_well(&ended, begun, 101);
}

/// The peer ended without a finalize, so no orderly end is possible: the exit aborts.
#[test]
fn a_process_whose_peer_is_gone_exits_soon() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    let begun = Instant::now();
    let ended = Ranks::new(2).outcome(|world| -> Result<()> {
        let all = All::new(&world, "left alone")?;
        all.request.wait()?;
        world.barrier("over")?;
        if world.rank() == 1 {
            exit(0);
        }
        drop(all);
        Ok(())
    });
    ended_well(&ended, begun, 0);
}

/// The error is returned before the abort is complete; `main` returns it, with everything alive, while NCCL still has
/// the communicator.
#[test]
fn a_process_that_exits_on_an_error_while_the_abort_is_under_way_exits() {
    if !support::needs_emulator("an abort that takes long on purpose") {
        return;
    }
    let begun = Instant::now();
    let ended = Ranks::new(2).outcome(|world| -> Result<()> {
        let context = support::device(&world)?;
        let stream = context.new_stream()?;
        let comm = world
            .communicator("ending")
            .stream(&stream)
            .with(|comm| comm.timeouts.operation = Duration::from_secs(20))
            .build()?;
        let mut buffer = comm.buffer::<f32>(1000)?;
        comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?
            .wait()?;
        let aborts = faults::at_call("ncclCommAbort").delay(Duration::from_millis(700));
        world.barrier("ready")?;
        if world.rank() == 1 {
            // Returns when its own abort is complete.
            let _ = comm.abort("it is time");
        } else {
            let request = comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum);
            let error = request.and_then(|request| request.wait()).unwrap_err();
            assert!(format!("{error:#}").contains("it is time"), "{error:#}");
            assert_eq!(comm.state(), nccl::CommunicatorState::Aborting);
        }
        std::mem::forget((aborts, comm, buffer));
        exit(3)
    });
    ended_well(&ended, begun, 3);
}

/// The other rank never launches: the replay, and the work behind it, waits until the exit aborts.
#[test]
fn a_process_with_work_that_never_ends_exits_soon() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    let begun = Instant::now();
    let ranks = Ranks::new(2)
        .variable("NCCL_DEBUG", "INFO")
        .variable("NCCL_DEBUG_SUBSYS", "ALL");
    let ended = ranks.outcome(|world| -> Result<()> {
        let mut all = All::new(&world, "unanswered")?;
        all.request.wait()?;
        world.barrier("over")?;
        if world.rank() == 0 {
            drop(all.plan.launch()?);
            all.into_parts().into_iter().for_each(drop);
        } else {
            // Longer than rank 0 needs to exit.
            std::thread::sleep(Duration::from_secs(5));
            exit(0);
        }
        Ok(())
    });
    ended_well(&ended, begun, 0);
    let mut said = ended.ranks[0].stdout.iter().chain(&ended.ranks[0].stderr);
    assert!(
        said.any(|line| line.contains("Abort COMPLETE")),
        "{ended:#?}"
    );
}

/// The descriptors that a program started by this process would inherit, with their targets.
fn inheritable() -> Result<Vec<(u32, String)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        // The descriptor that reads the directory may be closed.
        let Ok(target) = std::fs::read_link(entry.path()) else {
            continue;
        };
        let number = entry.file_name();
        let number = number.to_string_lossy();
        let about = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}"));
        let about = about.unwrap_or_default();
        let flags = about.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = i32::from_str_radix(flags.unwrap_or("0").trim(), 8)?;
        if flags & libc::O_CLOEXEC == 0 {
            found.push((number.parse()?, target.display().to_string()));
        }
    }
    found.sort();
    Ok(found)
}

/// A child that holds a connection would keep it open when the rank dies, and would keep the memory.
#[test]
fn a_program_that_a_rank_starts_has_none_of_its_descriptors() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let published = directory.path().join("address");
    // In the ranks: the descriptors that the test was started with.
    let before = inheritable().expect("its own descriptors");
    Ranks::new(2)
        .variable("NCCL_TEST_PUBLISHED", &published)
        .processes(move |world| -> Result<()> {
            let published = std::env::var("NCCL_TEST_PUBLISHED")?;
            let tcp =
                |rank| Rendezvous::tcp("127.0.0.1", 0, rank, 2).map(|tcp| tcp.publish(&published));
            let other = World::join(tcp(world.rank())?)?;
            let observer = Observer::join(tcp(0)?)?;
            let _all = All::new(&world, "everything")?;
            assert_eq!(observer.recordings(Duration::from_secs(5)).ranks.len(), 2);
            other.barrier("all have everything")?;
            let descriptors = std::fs::read_dir("/proc/self/fd")?.count();
            assert!(descriptors > before.len() + 8, "only {descriptors}");
            let ours = |listed: &(u32, String)| !before.contains(listed);
            let open: Vec<_> = inheritable()?.into_iter().filter(ours).collect();
            assert!(
                open.is_empty(),
                "these stay open in programs that are started: {open:?}"
            );
            // And the descriptors of such a program: its own three, and one to read the directory.
            let mut program = std::process::Command::new("ls");
            let listed = program
                .args(["-l", "/proc/self/fd"])
                .stdin(std::process::Stdio::null());
            let listed = String::from_utf8(listed.output()?.stdout)?;
            let targets = listed.lines().filter_map(|line| line.split_once(" -> "));
            for (left, target) in targets {
                let number: u32 = left.rsplit(' ').next().unwrap_or_default().parse()?;
                let own = number < 3 || target.starts_with("/proc/");
                assert!(
                    own || !ours(&(number, target.to_owned())),
                    "{number}: {target}"
                );
            }
            other.barrier("all have looked")?;
            Ok(())
        });
}
