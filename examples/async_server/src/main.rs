//! A server on one tokio thread: rank 0 receives numbers over TCP, all ranks compute, and rank 0 answers.
//!
//! ```text
//! cargo run --release -p async-server
//! ```
//!
//! The program prints its address. `echo 5 | nc 127.0.0.1 PORT` returns the sum over all ranks of 5 × (rank + 1); `quit` ends
//! the server.

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc as std_mpsc;
use std::time::Duration;

use nccl::cudarc::driver::CudaStream;
use nccl::{Communicator, ReduceOp, World};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// What rank 0 sends in place of a number when the server ends.
const QUIT: i64 = i64::MIN;

/// A number from a client, and where its answer goes.
type Request = (i64, oneshot::Sender<i64>);
/// A number for all ranks; on rank 0, with where its answer goes.
type Work = nccl::Result<(i64, Option<oneshot::Sender<i64>>)>;

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
    let (requests, received) = std_mpsc::channel();
    let (numbers, work) = mpsc::unbounded_channel();
    std::thread::scope(|scope| {
        // The calls of a channel block, so they have a thread of their own.
        scope.spawn(move || match world.rank() {
            0 => distribute(world, &received, &numbers),
            _ => receive(world, &numbers),
        });
        let local = tokio::task::LocalSet::new();
        local.block_on(&runtime, async {
            if world.rank() == 0 {
                let listener = TcpListener::bind("127.0.0.1:0").await?;
                println!("listening at {}", listener.local_addr()?);
                tokio::task::spawn_local(accept(listener, requests));
            }
            serve(&comm, &stream, work).await
        })
    })
}

/// Sends the numbers of rank 0 to all ranks, itself included, in one order.
fn distribute(
    world: &World,
    requests: &std_mpsc::Receiver<Request>,
    numbers: &mpsc::UnboundedSender<Work>,
) {
    let channel = world.channel("work");
    for (number, reply) in requests {
        let sent = channel.send(&number.to_le_bytes());
        if numbers.send(sent.map(|()| (number, Some(reply)))).is_err() {
            break;
        }
    }
}

/// Receives them on the other ranks. A rank that waits here waits for as long as there is no request, and has no operation on
/// its GPU meanwhile: a collective that waits for rank 0 would be a kernel that occupies the device.
fn receive(world: &World, numbers: &mpsc::UnboundedSender<Work>) {
    let channel = world.channel("work");
    while !numbers.is_closed() {
        let work = match channel.recv(Duration::from_secs(1)) {
            Ok(None) => continue,
            Ok(Some(message)) => Ok((number(&message.bytes), None)),
            Err(error) => Err(error),
        };
        let is_last = !matches!(work, Ok((number, _)) if number != QUIT);
        if numbers.send(work).is_err() || is_last {
            break;
        }
    }
}

fn number(bytes: &[u8]) -> i64 {
    i64::from_le_bytes(bytes.try_into().expect("rank 0 sends eight bytes"))
}

async fn accept(listener: TcpListener, requests: std_mpsc::Sender<Request>) {
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
        let requests = requests.clone();
        tokio::task::spawn_local(async move {
            if let Err(error) = talk(connection, &requests).await {
                eprintln!("a connection ended: {error}");
            }
        });
    }
}

/// Serves one connection. Many of them wait here at the same time, on the thread that also awaits NCCL.
async fn talk(mut connection: TcpStream, requests: &std_mpsc::Sender<Request>) -> Outcome {
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
        if requests.send((number, reply)).is_err() {
            break;
        }
        let Ok(answer) = answer.await else {
            break;
        };
        output.write_all(format!("{answer}\n").as_bytes()).await?;
    }
    Ok(())
}

/// The loop of every rank. Its operations have the communicator's timeout, so that a hanging rank is named.
async fn serve(
    comm: &Communicator,
    stream: &Arc<CudaStream>,
    mut work: mpsc::UnboundedReceiver<Work>,
) -> Outcome {
    let mut cell = stream.alloc_zeros::<i64>(1)?;
    while let Some(work) = work.recv().await {
        let (number, reply) = work?;
        if number == QUIT {
            break;
        }
        let mine = number.wrapping_mul(comm.rank() as i64 + 1);
        stream.memcpy_htod(&[mine], &mut cell)?;
        comm.all_reduce_in_place(&mut cell, ReduceOp::Sum)?.await?;
        if let Some(reply) = reply {
            // The client may have disconnected.
            let _ = reply.send(stream.clone_dtoh(&cell)?[0]);
        }
    }
    Ok(())
}
