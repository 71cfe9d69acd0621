//! A server on one tokio thread: rank 0 receives numbers over TCP, all ranks compute, and rank 0 answers.
//!
//! ```text
//! cargo run --release -p async-server
//! ```
//!
//! The program prints its address. `echo 5 | nc 127.0.0.1 PORT` returns the sum over all ranks of 5 × (rank + 1); `quit` ends
//! the server.

use std::collections::VecDeque;
use std::error::Error;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nccl::cudarc::driver::CudaStream;
use nccl::{Communicator, ReduceOp, World};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, oneshot};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// What rank 0 sends in place of a number when the server ends.
const QUIT: i64 = i64::MIN;

/// The work for all ranks, and the channel for its result.
#[derive(Default)]
struct Queue {
    waiting: Mutex<VecDeque<(i64, oneshot::Sender<i64>)>>,
    arrived: Notify,
}

fn main() -> ExitCode {
    nccl::launch::local_ranks(2, rank)
}

fn rank(world: &World) -> Outcome {
    nccl_emulator::install_unless_gpu()?;
    let stream = nccl::device(world.local_rank())?.new_stream()?;
    let comm = world.communicator("server").stream(&stream).build()?;
    // All calls that block until other ranks arrive are made before the first task starts. Inside a task, use `warm_up_async`.
    comm.warm_up(Duration::from_secs(60))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?;
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, async {
        let queue = Arc::new(Queue::default());
        if world.rank() == 0 {
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            println!("listening at {}", listener.local_addr()?);
            tokio::task::spawn_local(accept(listener, Arc::clone(&queue)));
        }
        work(&comm, &stream, &queue).await
    })
}

async fn accept(listener: TcpListener, queue: Arc<Queue>) {
    loop {
        let connection = match listener.accept().await {
            Ok((connection, _)) => connection,
            // The client has already disconnected, or the process is out of descriptors for now.
            Err(error) => {
                eprintln!("a connection was not accepted: {error}");
                tokio::task::yield_now().await;
                continue;
            }
        };
        let queue = Arc::clone(&queue);
        tokio::task::spawn_local(async move {
            if let Err(error) = talk(connection, &queue).await {
                eprintln!("a connection ended: {error}");
            }
        });
    }
}

/// Serves one connection. Many of them wait here at the same time, on the thread that also awaits NCCL.
async fn talk(mut connection: TcpStream, queue: &Queue) -> Outcome {
    let (input, mut output) = connection.split();
    let mut lines = BufReader::new(input).lines();
    while let Some(line) = lines.next_line().await? {
        let number = match line.trim() {
            "quit" => QUIT,
            text => match text.parse()? {
                QUIT => return Err("that number is taken".into()),
                number => number,
            },
        };
        let (reply, answer) = oneshot::channel();
        queue
            .waiting
            .lock()
            .expect("no panic holds it")
            .push_back((number, reply));
        queue.arrived.notify_one();
        let Ok(answer) = answer.await else {
            break;
        };
        output.write_all(format!("{answer}\n").as_bytes()).await?;
    }
    Ok(())
}

/// The loop of every rank. The first broadcast of a round has no timeout: it waits for a request, however long that takes. The
/// following operations have the communicator's timeout, so that a hanging rank is named.
async fn work(comm: &Communicator, stream: &Arc<CudaStream>, queue: &Queue) -> Outcome {
    let patient = comm.within(Duration::MAX);
    let mut cell = stream.alloc_zeros::<i64>(1)?;
    loop {
        let mut reply = None;
        if comm.rank() == 0 {
            let (number, to) = next(queue).await;
            stream.memcpy_htod(&[number], &mut cell)?;
            reply = Some(to);
        }
        patient.broadcast_in_place(&mut cell, 0)?.await?;
        let number = stream.clone_dtoh(&cell)?[0];
        if number == QUIT {
            return Ok(());
        }
        let mine = number.wrapping_mul(comm.rank() as i64 + 1);
        stream.memcpy_htod(&[mine], &mut cell)?;
        comm.all_reduce_in_place(&mut cell, ReduceOp::Sum)?.await?;
        if let Some(to) = reply {
            // The client may have disconnected.
            let _ = to.send(stream.clone_dtoh(&cell)?[0]);
        }
    }
}

async fn next(queue: &Queue) -> (i64, oneshot::Sender<i64>) {
    loop {
        let first = queue.waiting.lock().expect("no panic holds it").pop_front();
        match first {
            Some(first) => return first,
            None => queue.arrived.notified().await,
        }
    }
}
