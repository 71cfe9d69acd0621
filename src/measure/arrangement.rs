//! Whether several ranks on one device work at all, in each arrangement.

use std::time::Duration;

use cudarc::driver::CudaContext;
use nccl_sys::{ncclDataType_t as Kind, ncclRedOp_t as Op, ncclUniqueId};

use super::Sheet;
use crate::nccl_call;
use crate::perf;
use crate::raw::operations::{Stream, all_reduce, exchange, group_end, group_start};
use crate::raw::{
    Comm, HOSTS, Rank, Result, Way, last_error, leave, library, run, stream_ends_within,
};

/// How long an arrangement may take.
const LIMIT: Duration = Duration::from_secs(90);
/// Elements of the all-reduce.
const COUNT: usize = 1 << 18;

/// The library, one communicator of one rank and one all-reduce.
///
/// # Errors
/// The first failure.
pub fn first_sign() -> Result {
    perf::install(1)?;
    println!("{}", library());
    run(Way::Threads, 1, LIMIT, |rank| {
        println!(
            "{} of {}",
            rank.context.name()?,
            CudaContext::device_count()?
        );
        let mut sheet = Sheet::new(rank);
        sheet.add("library", library().to_string(), "");
        sheet.add("device", rank.context.name()?, "");
        works(rank)?;
        sheet.write()
    })
}

/// Tries one arrangement; does not return where it hangs.
///
/// # Errors
/// Why it does not work.
pub fn arrangement(way: &str, ranks: usize) -> Result {
    match way {
        "one-thread" => one_thread(ranks),
        "threads" => run(Way::Threads, ranks, LIMIT, works),
        "processes" => run(Way::Processes, ranks, LIMIT, works),
        // The variables of every rank are set before its process starts.
        "hosts" if std::env::var_os(HOSTS).is_some() => run(Way::Processes, ranks, LIMIT, works),
        "hosts" => {
            let status = std::process::Command::new(std::env::current_exe()?)
                .args(std::env::args_os().skip(1))
                .env(HOSTS, "1")
                .env("NCCL_P2P_DISABLE", "1")
                .env("NCCL_SHM_DISABLE", "1")
                .env("NCCL_NET", "Socket")
                .status()?;
            leave(status.code().unwrap_or(1))
        }
        _ => Err(format!("there is no arrangement `{way}`").into()),
    }
}

/// Checks an all-reduce and an exchange by their results.
fn works(rank: &Rank) -> Result {
    let begun = std::time::Instant::now();
    let comm = Comm::new(rank, "comm", true)?;
    let size = rank.world.size();
    let own = rank.world.rank() as u8 + 1;
    let (x, y) = (
        rank.memory(&vec![own; COUNT])?,
        rank.memory(&vec![0; COUNT])?,
    );
    let stream = Stream::of(&rank.stream);
    let sum = (1..=size as u8).sum::<u8>();
    ok(
        rank,
        "all-reduce",
        all_reduce(comm, [x, y], COUNT, (Kind::ncclUint8, Op::ncclSum), stream),
    )?;
    expect(rank.read(y)? == vec![sum; COUNT], "the all-reduce is wrong")?;
    if size == 2 {
        let peer = 1 - rank.world.rank();
        ok(
            rank,
            "exchange",
            exchange(comm, [x, y], COUNT, peer, stream),
        )?;
        expect(
            rank.read(y)? == vec![3 - own; COUNT],
            "the exchange is wrong",
        )?;
    }
    rank.barrier("done")?;
    if rank.world.rank() == 0 {
        println!(
            "{size} ranks work, after {:.1} s",
            begun.elapsed().as_secs_f64()
        );
    }
    Ok(())
}

fn ok(rank: &Rank, what: &str, code: u32) -> Result {
    expect(code == 0, &format!("{what}: code {code}, {}", last_error()))?;
    match rank.ends_within(LIMIT) {
        Ok(true) => Ok(()),
        Ok(false) => Err(format!("{what}: does not end").into()),
        Err(error) => Err(format!("{what}: {error}").into()),
    }
}

fn expect(condition: bool, otherwise: &str) -> Result {
    if condition {
        Ok(())
    } else {
        Err(otherwise.into())
    }
}

/// One thread creates and calls all ranks inside one group.
fn one_thread(ranks: usize) -> Result {
    perf::install(1)?;
    let worlds = nccl::World::threads(ranks);
    let ranks: Vec<Rank> = worlds.into_iter().map(Rank::new).collect::<Result<_>>()?;
    let mut id = ncclUniqueId::default();
    expect(
        nccl_call!(ncclGetUniqueId(&mut id)) == 0,
        "there is no unique id",
    )?;
    let mut comms = vec![Comm::NULL; ranks.len()];
    group_start();
    for (rank, comm) in ranks.iter().zip(&mut comms) {
        rank.context.bind_to_thread()?;
        let (size, number) = (ranks.len() as i32, rank.world.rank() as i32);
        let code = nccl_call!(ncclCommInitRank(&mut comm.0, size, id, number));
        expect(code == 0, &format!("init: code {code}, {}", last_error()))?;
    }
    let code = group_end();
    expect(
        code == 0,
        &format!("the end of the inits: code {code}, {}", last_error()),
    )?;
    let mut results = Vec::new();
    for rank in &ranks {
        let own = rank.world.rank() as u8 + 1;
        results.push([
            rank.memory(&vec![own; COUNT])?,
            rank.memory(&vec![0; COUNT])?,
        ]);
    }
    group_start();
    for ((rank, &comm), &memory) in ranks.iter().zip(&comms).zip(&results) {
        let code = all_reduce(
            comm,
            memory,
            COUNT,
            (Kind::ncclUint8, Op::ncclSum),
            Stream::of(&rank.stream),
        );
        expect(
            code == 0,
            &format!("all-reduce: code {code}, {}", last_error()),
        )?;
    }
    let code = group_end();
    expect(
        code == 0,
        &format!("the end of the all-reduces: code {code}, {}", last_error()),
    )?;
    let sum = (1..=ranks.len() as u8).sum::<u8>();
    for (rank, [_, y]) in ranks.iter().zip(results) {
        expect(
            stream_ends_within(&rank.stream, LIMIT) == Ok(true),
            "an all-reduce does not end",
        )?;
        expect(rank.read(y)? == vec![sum; COUNT], "an all-reduce is wrong")?;
    }
    println!("{} ranks work", ranks.len());
    leave(0)
}
