//! The log entries: their rank, their subject, and that all of them are listed in the page.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::time::{Duration, Instant};

use nccl::{ReduceOp, World};

use crate::Outcome;
use crate::listed::listed;
use crate::recovering::await_fault;
use crate::seen::{SEEN, Seen, await_seen, seen, subscribe};
use crate::support::{self, ranks_as_threads};

fn one_does_not_come(world: World) -> Outcome {
    const NAME: &str = "observed/late";
    let stream = support::device(&world)?.new_stream()?;
    let comm = world.communicator(NAME).stream(&stream).build()?;
    let mut y = stream.alloc_zeros::<f32>(4)?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    if world.rank() == 1 {
        let comm = comm.within(Duration::from_millis(300));
        let late = comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait();
        let error = late.unwrap_err();
        // Rank 0 did not enter.
        assert_eq!(error.fault().unwrap().culprit(), Some(0), "{error:#}");
    }
    let fault = await_fault(&comm)?;
    let events = await_seen("nccl.fault", NAME, 2);
    for rank in ["0", "1"] {
        let mine = events.iter().find(|seen| seen.fields["on_rank"] == rank);
        let Seen { level, fields, .. } = mine.ok_or("each rank tells of it")?;
        assert_eq!(level, "error");
        let expected = [
            ("nranks", "2"),
            ("class", "timed_out"),
            ("role", "initiating"),
            ("rank", "0"),
            ("host", &fault.host),
            ("pid", &fault.pid.to_string()),
            ("operation", "all_reduce"),
            ("seq", "2"),
            ("cause", &fault.cause),
        ];
        for (field, value) in expected {
            assert_eq!(
                fields.get(field).map(String::as_str),
                Some(value),
                "{field}"
            );
        }
        assert!(!fields["hint"].is_empty());
    }
    await_seen("nccl.comm.aborting", NAME, 2);
    for aborted in await_seen("nccl.comm.aborted", NAME, 2) {
        assert_eq!(aborted.fields["result"], "freed");
    }
    await_seen("nccl.comm.abort", NAME, 2);
    await_seen("nccl.comm.ready", NAME, 2);
    let spans = seen("nccl.comm.init", NAME);
    assert_eq!(spans.len(), 2, "{spans:?}");
    if world.rank() == 0 {
        let stats = nccl::stats();
        assert_eq!((stats.faults.timed_out, stats.faults.gone), (2, 0));
        assert_eq!((stats.aborts_freed, stats.aborts_leaked), (2, 0));
        assert_eq!((stats.init.count, stats.abort.count), (2, 2));
        only_what_is_listed()?;
    }
    Ok(())
}

#[test]
fn a_subscriber_gets_what_the_page_lists_when_a_rank_does_not_come() {
    subscribe();
    ranks_as_threads(2, one_does_not_come);
}

/// Everything that was logged in this process so far.
fn only_what_is_listed() -> Outcome {
    let listed = listed();
    let all = SEEN.lock().unwrap().clone();
    let ours = all.iter().filter(|seen| seen.target.starts_with("nccl"));
    let mut names = BTreeSet::new();
    for seen in ours {
        let entry = listed
            .get(seen.name)
            .ok_or_else(|| format!("{seen:?} is not listed"))?;
        assert_eq!(seen.target, "nccl", "{seen:?}");
        assert!(entry.levels.contains(&seen.level), "{seen:?}");
        for field in seen.fields.keys().filter(|field| *field != "message") {
            assert!(entry.fields.contains(field), "{field} of {seen:?}");
        }
        names.insert(seen.name);
    }
    assert!(names.contains("nccl.library"), "{names:?}");
    Ok(())
}

/// Rank 1's device hangs, and nothing shows that.
fn a_device_hangs(world: World) -> Outcome {
    const NAME: &str = "observed/unknown";
    subscribe();
    let stream = support::device(&world)?.new_stream()?;
    let comm = world.communicator(NAME).stream(&stream).build()?;
    let comm = comm.within(Duration::from_secs(3));
    let mut y = stream.alloc_zeros::<f32>(4)?;
    // Both ranks enter it before one times out.
    world.barrier("ready")?;
    let error = comm
        .all_reduce_in_place(&mut y, ReduceOp::Sum)
        .and_then(|request| request.wait())
        .unwrap_err();
    let fault = error.fault().ok_or("all ranks know how it ended")?;
    assert_eq!(fault.root, nccl::fault::RootCause::Unknown);
    assert_eq!(fault.culprit(), None, "{fault}");
    let text = format!("{error:#}");
    let first = fault.reported_by().ok_or("a rank ran out of time first")?;
    let says = format!("root cause: not found (first to run out of time: rank {first} (");
    assert!(text.contains(&says), "{text}");
    assert!(!text.contains("did not call the same operation"), "{text}");
    let [told] = &await_seen("nccl.fault", NAME, 1)[..] else {
        return Err("one event".into());
    };
    for absent in ["rank", "host", "pid"] {
        assert_eq!(told.fields.get(absent), None, "{absent} of {told:?}");
    }
    assert_eq!(told.fields["reported_by"], first.to_string());
    only_what_is_listed()
}

#[test]
fn the_event_of_a_fault_that_nothing_explains_names_no_culprit() {
    if !support::needs_emulator("a device that hangs on purpose") {
        return;
    }
    support::Ranks::new(2)
        .variable("NCCL_EMULATOR_FAULTS", "run=AllReduce,rank=1,action=hang")
        .processes(a_device_hangs);
}

fn a_program_aborts(world: World) -> Outcome {
    const NAME: &str = "observed/asked";
    let stream = support::device(&world)?.new_stream()?;
    let comm = world.communicator(NAME).stream(&stream).build()?;
    comm.abort("enough")?;
    let [fault] = &await_seen("nccl.fault", NAME, 1)[..] else {
        return Err("one fault".into());
    };
    assert_eq!(
        (&fault.level[..], &fault.fields["class"][..]),
        ("warn", "asked")
    );
    assert_eq!(fault.fields["cause"], "enough");
    assert!(!fault.fields.contains_key("seq"));
    assert_eq!(nccl::stats().faults.asked, 1);
    Ok(())
}

#[test]
fn what_a_program_asks_for_is_a_warning() {
    subscribe();
    ranks_as_threads(1, a_program_aborts);
}

#[test]
fn the_span_of_an_init_says_which_library_it_is() {
    subscribe();
    ranks_as_threads(1, |world| {
        let stream = support::device(&world)?.new_stream()?;
        let comm = world
            .communicator("observed/init")
            .stream(&stream)
            .build()?;
        let all = SEEN.lock().unwrap();
        let mut spans = all.iter().filter(|seen| seen.name == "nccl.comm.init");
        let version = comm.library().version().to_string();
        assert!(spans.any(|span| span.fields.get("nccl.version") == Some(&version)));
        Ok::<(), Box<dyn std::error::Error>>(())
    });
}

#[test]
fn who_is_turned_away_is_counted_and_told() -> Outcome {
    subscribe();
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("door");
    let before = nccl::stats().strangers;
    let stranger = {
        let path = path.clone();
        std::thread::spawn(move || -> std::io::Result<()> {
            let deadline = Instant::now() + Duration::from_secs(10);
            let mut connection = loop {
                match std::os::unix::net::UnixStream::connect(&path) {
                    Ok(connection) => break connection,
                    Err(error) if Instant::now() > deadline => return Err(error),
                    Err(_) => std::thread::sleep(Duration::from_millis(2)),
                }
            };
            connection.write_all(b"GET / HTTP/1.1\r\nHost: rank0\r\n\r\n")?;
            while nccl::stats().strangers == 0 && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(2));
            }
            Ok(())
        })
    };
    // No other rank joins, so it listens until its timeout.
    let rendezvous =
        nccl::Rendezvous::unix(&path, 0, 2)?.with(|meet| meet.timeout = Duration::from_secs(3));
    let alone = World::join(rendezvous);
    assert!(alone.is_err());
    stranger.join().map_err(|_| "the stranger panicked")??;
    assert!(nccl::stats().strangers > before);
    let all = SEEN.lock().unwrap();
    assert!(all.iter().any(|seen| seen.name == "nccl.stranger"));
    Ok(())
}
