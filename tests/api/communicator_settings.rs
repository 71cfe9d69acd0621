//! Configurations of single collectives, estimates, and the memory of communicators.

use std::sync::Arc;

use nccl::cudarc::driver::CudaStream;
use nccl::{
    CollectiveConfig, Communicator, CtaPolicy, ErrorKind, LaunchMode, Library, ReduceOp, World,
};

use crate::support::{self, ranks_as_threads};

type Set<'s> = &'s dyn Fn(&mut CollectiveConfig);
type Outcome = Result<(), Box<dyn std::error::Error>>;

fn start(world: &World) -> Result<(Arc<CudaStream>, Communicator), Box<dyn std::error::Error>> {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("settings").stream(&stream).build()?;
    Ok((stream, comm))
}

fn config(set: impl FnOnce(&mut CollectiveConfig)) -> CollectiveConfig {
    let mut config = CollectiveConfig::default();
    set(&mut config);
    config
}

/// Every collective, single, in a group and in a plan.
#[test]
fn collectives_with_a_configuration_do_the_same() {
    ranks_as_threads(2, |world| {
        let (stream, comm) = start(&world)?;
        let ring = config(|config| {
            config.algorithm = Some(String::from("RING"));
            config.fall_back = true;
            config.max_ctas = Some(2);
            config.cta_policy = Some(CtaPolicy::Default);
            config.tag = 42;
        });
        let tuned = comm.with_config(&ring)?;
        let (own, ranks) = (comm.rank(), comm.world_size());
        let x = stream.clone_htod(&[own as f32, 10.0 + own as f32])?;
        let mut y = stream.alloc_zeros::<f32>(2)?;
        let mut wide = stream.alloc_zeros::<f32>(2 * ranks)?;
        let mut narrow = stream.alloc_zeros::<f32>(1)?;
        tuned.all_reduce(&x, &mut y, ReduceOp::Sum)?.wait()?;
        assert_eq!(stream.clone_dtoh(&y)?, [1.0, 21.0]);
        tuned.reduce(&x, Some(&mut y), ReduceOp::Max, 0)?;
        tuned.broadcast(Some(&x), &mut y, 1)?.wait()?;
        assert_eq!(stream.clone_dtoh(&y)?, [1.0, 11.0]);
        tuned.all_gather(&x, &mut wide)?.wait()?;
        assert_eq!(stream.clone_dtoh(&wide)?, [0.0, 10.0, 1.0, 11.0]);
        tuned
            .reduce_scatter(&x, &mut narrow, ReduceOp::Sum)?
            .wait()?;
        assert_eq!(stream.clone_dtoh(&narrow)?, [[1.0], [21.0]][own]);
        tuned.all_to_all(&x, &mut y)?.wait()?;
        assert_eq!(stream.clone_dtoh(&y)?, [[0.0, 1.0], [10.0, 11.0]][own]);
        tuned.group(|group| group.all_reduce_in_place(&mut y, ReduceOp::Sum))?;
        let mut plan = tuned.capture(y, |capture, y| {
            capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))
        })?;
        drop(tuned);
        plan.launch()?.wait()?;
        assert_eq!(stream.clone_dtoh(&plan.views())?, [20.0, 24.0]);
        comm.barrier()?;
        Ok::<(), Box<dyn std::error::Error>>(())
    });
}

/// The event is recorded at the launch; in a plan it could not be waited for.
#[test]
fn a_launch_records_its_event() {
    ranks_as_threads(2, |world| {
        let (stream, comm) = start(&world)?;
        let event = Arc::new(stream.context().new_event(None)?);
        let with_event = config(|config| config.launch_event = Some(Arc::clone(&event)));
        let tuned = comm.with_config(&with_event)?;
        let mut y = stream.clone_htod(&[1i32; 100])?;
        let done = tuned.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
        let elsewhere = stream.context().new_stream()?;
        elsewhere.wait(&event)?;
        elsewhere.synchronize()?;
        done.wait()?;
        let mut other = stream.alloc_zeros::<i32>(1)?;
        let error = tuned
            .group(|group| {
                group.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
                group.broadcast_in_place(&mut other, 0)
            })
            .unwrap_err();
        assert!(error.to_string().contains("launch_event"), "{error}");
        let captured = tuned.capture(y, |capture, y| {
            capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Max))
        });
        let error = captured.map(drop).unwrap_err();
        assert!(error.to_string().contains("launch_event"), "{error}");
        comm.barrier()?;
        Ok::<(), Box<dyn std::error::Error>>(())
    });
}

#[test]
fn configurations_that_cannot_work_are_refused_by_name() {
    ranks_as_threads(1, |world| {
        let (_, comm) = start(&world)?;
        let none = |set: Set<'_>| comm.with_config(&config(set)).map(drop);
        let wrong: [(&str, Set<'_>); 6] = [
            ("min_ctas", &|config| config.min_ctas = Some(0)),
            ("min_ctas", &|config| {
                (config.min_ctas, config.max_ctas) = (Some(3), Some(2));
            }),
            ("cga_cluster_size", &|config| {
                config.cga_cluster_size = Some(-1);
            }),
            ("algorithm", &|config| {
                config.algorithm = Some(String::new())
            }),
            ("algorithm", &|config| {
                config.algorithm = Some(String::from("a\0b"));
            }),
            ("tag", &|config| config.tag = 1 << 63),
        ];
        for (field, set) in wrong {
            let error = none(set).unwrap_err();
            assert!(error.to_string().contains(field), "{error}");
        }
        Ok::<(), Box<dyn std::error::Error>>(())
    });
}

#[test]
fn an_older_release_has_no_configurations() {
    if !support::needs_emulator("an older release") || support::on_nvidias() {
        return;
    }
    let ranks = support::Ranks::new(1).variable("NCCL_EMULATOR_VERSION", "2.30.7");
    ranks.processes(|world| {
        let (_, comm) = start(&world)?;
        let error = comm
            .with_config(&CollectiveConfig::default())
            .map(drop)
            .unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Unsupported { .. }),
            "{error}"
        );
        Ok::<(), Box<dyn std::error::Error>>(())
    });
}

/// An estimate launches nothing, and does not disturb what comes after it.
#[test]
fn estimates_launch_nothing() {
    ranks_as_threads(2, |world| {
        let (stream, comm) = start(&world)?;
        let mut y = stream.clone_htod(&[1.0f32; 1000])?;
        let answer = comm.estimate(|group| group.all_reduce_in_place(&mut y, ReduceOp::Sum));
        if comm.launch_mode() == Some(LaunchMode::NonBlocking) {
            assert!(answer.unwrap_err().to_string().contains("NonBlocking"));
            return Ok(());
        }
        println!("estimate: {:?}", answer?);
        assert_eq!(stream.clone_dtoh(&y)?, [1.0; 1000]);
        for _ in 0..3 {
            comm.estimate(|group| group.all_reduce_in_place(&mut y, ReduceOp::Sum))?;
            comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
        }
        assert_eq!(stream.clone_dtoh(&y)?, [8.0; 1000]);
        let mut z = stream.alloc_zeros::<f32>(1000)?;
        let refused = [
            comm.estimate(|group| group.irecv(&mut z, 1 - comm.rank())),
            comm.estimate(|group| group.isend(&y, 1 - comm.rank())),
            comm.estimate(|group| group.all_to_all(&y, &mut z)),
            comm.estimate(|group| group.broadcast_in_place(&mut z, 0)),
        ];
        for answer in refused {
            let error = answer.unwrap_err();
            assert!(error.to_string().contains("model is for"), "{error}");
        }
        assert_eq!(comm.estimate(|_| Ok(()))?, None);
        let alone = comm.split("alone", Some(comm.rank() as u32), 0)?;
        let alone = alone.ok_or("every rank has a color")?;
        assert_eq!(
            alone.estimate(|group| group.all_reduce(&y, &mut z, ReduceOp::Sum))?,
            None
        );
        assert_eq!(stream.clone_dtoh(&z)?, [0.0; 1000]);
        comm.finalize()?;
        Ok::<(), Box<dyn std::error::Error>>(())
    });
}

fn suspendable(
    world: &World,
) -> Result<(Arc<CudaStream>, Communicator), Box<dyn std::error::Error>> {
    let stream = support::device(world)?.new_stream()?;
    let comm = world
        .communicator("sleeper")
        .stream(&stream)
        .with(|comm| comm.suspendable = true)
        .build()?;
    Ok((stream, comm))
}

/// Operations and plans wait for the resume; plans stay valid.
#[test]
fn a_suspended_communicator_does_nothing_until_it_is_resumed() {
    ranks_as_threads(2, |world| {
        let (stream, comm) = suspendable(&world)?;
        assert_eq!(comm.launch_mode(), Some(LaunchMode::NonBlocking));
        let mut x = stream.clone_htod(&[1.0f32; 5000])?;
        let mut plan = comm.capture(stream.clone_htod(&[1.0f32; 7])?, |capture, y| {
            capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))
        })?;
        for round in 0..3 {
            comm.all_reduce_in_place(&mut x, ReduceOp::Max)?;
            plan.launch()?;
            assert!(!comm.memory()?.is_suspended);
            assert!(comm.resume().is_err(), "it is not suspended");
            comm.suspend()?;
            let memory = comm.memory()?;
            assert!(memory.is_suspended, "{memory:?}");
            for refused in [
                comm.all_reduce_in_place(&mut x, ReduceOp::Max).map(drop),
                plan.launch().map(drop),
                comm.suspend(),
                comm.register(comm.buffer::<u8>(8)?).map(drop),
            ] {
                let error = refused.unwrap_err();
                assert!(error.to_string().contains("suspended"), "{round}: {error}");
            }
            comm.resume()?;
        }
        plan.launch()?.wait()?;
        assert_eq!(stream.clone_dtoh(&plan.views())?, [16.0; 7]);
        comm.all_reduce_in_place(&mut x, ReduceOp::Sum)?.wait()?;
        assert_eq!(stream.clone_dtoh(&x)?, [2.0; 5000]);
        drop(plan);
        comm.finalize()?;
        Ok::<(), Box<dyn std::error::Error>>(())
    });
}

/// Exactly one of two threads resumes the communicator; the other's call has no effect.
#[test]
fn two_threads_may_resume() {
    ranks_as_threads(2, |world| {
        let (_, comm) = suspendable(&world)?;
        for _ in 0..20 {
            comm.suspend()?;
            let resumed = std::thread::scope(|scope| {
                let other = scope.spawn(|| comm.resume().is_ok());
                [comm.resume().is_ok(), other.join().expect("no panic")]
            });
            assert_eq!(resumed.iter().filter(|&&resumed| resumed).count(), 1);
            comm.barrier()?;
        }
        Ok::<(), Box<dyn std::error::Error>>(())
    });
}

/// A suspended communicator can be ended in any way.
#[test]
fn a_suspended_communicator_ends_as_any_other() {
    for way in 0..3 {
        ranks_as_threads(2, move |world| {
            let (_, comm) = suspendable(&world)?;
            comm.barrier()?;
            comm.suspend()?;
            world.barrier("suspended")?;
            match way {
                0 => comm.finalize()?,
                // The other rank may have aborted the communicator already.
                1 => drop(comm.abort("enough")),
                _ => drop(comm),
            }
            Ok::<(), Box<dyn std::error::Error>>(())
        });
    }
}

#[test]
fn a_communicator_that_was_not_made_for_it_is_not_suspended() {
    ranks_as_threads(2, |world| {
        let stream = support::device(&world)?.new_stream()?;
        let builder = world.communicator("settings").stream(&stream);
        let builder = builder.with(|comm| comm.launch_mode = Some(LaunchMode::BlockingChild));
        let comm = builder.build()?;
        let error = comm.suspend().unwrap_err();
        assert!(error.to_string().contains("suspendable"), "{error}");
        println!("memory: {:?}", comm.memory()?);
        comm.barrier()?;
        Ok::<(), Box<dyn std::error::Error>>(())
    });
}

#[test]
fn parameters_are_those_that_nccl_publishes() -> Outcome {
    ranks_as_threads(1, |_| {
        let library = Library::load()?;
        let names = library.parameters()?;
        for name in &names {
            let parameter = library.parameter(name)?;
            assert_eq!(parameter.name(), name);
            parameter.text()?;
        }
        assert!(names.iter().any(|name| name == "NCCL_DEBUG"), "{names:?}");
        assert!(library.parameter("NCCL_NO_SUCH_THING").is_err());
        assert!(library.parameter("NCCL\0DEBUG").is_err());
        Ok::<(), Box<dyn std::error::Error>>(())
    });
    Ok(())
}

/// The table of docs/nccl-functions.md has a row for each function of the bindings, with the release that has it first.
#[test]
fn the_table_of_functions_is_whole() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |path: &str| std::fs::read_to_string(root.join(path)).expect(path);
    let (bindings, page) = (
        read("nccl-sys/src/bindings/functions.rs"),
        read("docs/nccl-functions.md"),
    );
    let functions = bindings.lines().filter_map(|line| {
        let name = line.trim().strip_prefix("pub fn ")?;
        name.split_once('(').map(|(name, _)| name)
    });
    let mut count = 0;
    for function in functions {
        let since = nccl_sys::since(function).expect(function);
        let row = format!("| `{function}` | {since} | ");
        assert!(page.contains(&row), "no row begins with {row}");
        count += 1;
    }
    // Those of NCCL EP are bound as well; nccl-sys has them behind a feature.
    let of_ep = read("nccl-sys/src/ep/bindings/functions.rs");
    let of_ep: Vec<_> = of_ep
        .lines()
        .filter_map(|line| line.trim().strip_prefix("pub fn ")?.split('(').next())
        .collect();
    for function in &of_ep {
        let row = format!("| `{function}` | ");
        assert!(page.contains(&row), "no row begins with {row}");
    }
    assert_eq!(
        page.matches("\n| `nccl").count(),
        count + of_ep.len(),
        "rows of no function"
    );
    assert!(count >= 73, "{count}");
}

/// Several ranks make a token each, and all ranks meet by all of them.
#[test]
fn ranks_may_meet_at_several_roots() {
    for roots in [1, 2, 3, 5] {
        crate::support::ranks_as_processes(5, |world| {
            let stream = support::device(&world)?.new_stream()?;
            let builder = world.communicator("roots").stream(&stream);
            let comm = builder.with(|comm| comm.roots = roots).build()?;
            let mut y = stream.clone_htod(&[1 + comm.rank() as u32])?;
            comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
            assert_eq!(stream.clone_dtoh(&y)?, [15]);
            comm.finalize()?;
            Ok::<(), Box<dyn std::error::Error>>(())
        });
    }
}

#[test]
fn roots_that_cannot_be_are_refused_on_all_ranks() {
    ranks_as_threads(3, |world| {
        let stream = support::device(&world)?.new_stream()?;
        let build = |name: &str, roots| {
            let builder = world.communicator(name).stream(&stream);
            builder.with(|comm| comm.roots = roots).build()
        };
        for wrong in [0, 4] {
            let error = build(&format!("wrong {wrong}"), wrong).unwrap_err();
            assert!(error.to_string().contains("roots"), "{error}");
        }
        let own = if world.rank() == 2 { 2 } else { 1 };
        let error = build("different", own).unwrap_err();
        assert!(
            error.to_string().contains("with 1 roots") && error.to_string().contains("with 2"),
            "{error}"
        );
        build("good", 3)?.barrier()?;
        Ok::<(), Box<dyn std::error::Error>>(())
    });
}
