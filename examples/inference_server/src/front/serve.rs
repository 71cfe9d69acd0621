//! The front from start to end: the checks, the order of the starts, and the order of the ends.

use std::error::Error;
use std::net::TcpListener;
use std::sync::{Arc, mpsc};

use parking_lot::Mutex;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tokio::sync::oneshot;

use super::crew::Crew;
use super::engine::{Engine, Event};
use super::http::{self, Limits, Server};
use super::links;
use super::options::{Options, Recovery};
use super::scheduler::Scheduler;
use super::view::View;

/// The most tokens of one prompt in a step.
const CHUNK: usize = 32;

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// If the server cannot start: no GPU and no `--emulator`, a number of ranks that the model cannot be split over, an
/// address in use, a low limit of open files. And if the server gives up: ranks that end again and again.
pub fn serve(options: &Options) -> Result<(), Box<dyn Error + Send + Sync>> {
    let file = options.model.open(&options.models)?;
    match options.recovery {
        Recovery::Elastic { .. } if file.experts() == 0 => {
            let model = options.model.name();
            return Err(format!(
                "{model} has no experts that could have copies: take --recovery respawn or shrink"
            )
            .into());
        }
        // Any number can share it.
        Recovery::Elastic { .. } if options.ranks > 0 => {}
        _ => file.check_ranks(options.ranks)?,
    }
    let tokenizer = file.tokenizer()?;
    drop(file);
    if !options.emulator {
        // Opened only for a moment: the devices belong to the ranks.
        nccl::device(0).map_err(|error| {
            format!(
                "there is no GPU to run on: {error}; --emulator runs on the CPU where there is none"
            )
        })?;
    }
    let limits = Limits::new(options)?;
    let listener = TcpListener::bind(&options.listen).map_err(|error| {
        let (listen, hint) = (&options.listen, "another address is chosen with --listen");
        format!("{listen} cannot be listened at: {error}; {hint}")
    })?;
    listener.set_nonblocking(true)?;

    let (to, inbox) = mpsc::channel();
    let link = links::listen(to.clone())?;
    // Before the threads of the runtime: each rank is forked from this process.
    let crew = Crew::start(options, &link, to.clone())?;
    let view = Arc::new(Mutex::new(View::new(options.ranks)));
    let server = Server::new(options, tokenizer, to.clone(), &view, crew.observer());
    let scheduler = Scheduler::new(options.settings, CHUNK, options.queue);
    let engine = Engine::new(crew, scheduler, view, inbox);
    let (over, is_over) = oneshot::channel();
    let engine = std::thread::Builder::new()
        .name(String::from("engine"))
        .spawn(move || {
            let outcome = engine.run();
            // The receiver is gone when serving has failed.
            let _ = over.send(());
            outcome
        })?;
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    let grace = options.grace;
    std::thread::Builder::new()
        .name(String::from("signals"))
        .spawn(move || {
            for _ in signals.forever() {
                if to.send(Event::End(grace)).is_err() {
                    // The engine waits for the ranks to end. They are killed with this process.
                    note!("a second signal: the ranks are not waited for");
                    std::process::exit(1);
                }
            }
        })?;

    note!(
        "{} on {} ranks, at http://{}",
        options.model.name(),
        options.ranks,
        listener.local_addr()?
    );
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let over = async {
            // Also ends when the engine's thread ends without a message.
            let _ = is_over.await;
        };
        http::serve(listener, &Arc::new(server), limits, over).await;
        Ok::<(), std::io::Error>(())
    })?;
    runtime.shutdown_background();
    match engine.join() {
        Ok(outcome) => outcome,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}
