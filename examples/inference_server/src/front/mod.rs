//! The front: the process that clients talk to, that starts the ranks, and that survives them.
//!
//! ```text
//! clients ──HTTP──▶ http (tokio) ──requests──▶ engine (one thread) ──steps──▶ ranks (processes)
//!                      ▲                         │   ▲   ▲  └──starts them again (nccl::launch::Fleet)
//!                      └──────── tokens ─────────┘   │   └───── how they end ◀──┘
//!                                                    └──────── tokens, faults
//! ```
//!
//! It loads neither CUDA nor NCCL, and is a member of the ranks' control plane ([`nccl::Observer`]), so it can say how it
//! stands with them when they cannot.
//!
//! - `options`: what it is told; `http`: what it answers;
//! - `engine`: what happens and what follows; `scheduler`: which tokens the next step takes; `caller`, `text`: what a
//!   client is told;
//! - `crew`, `links`: the ranks' processes and connections; `view`: what can be seen of all this.

/// Says something to whoever started the server. Who does not listen any more is no reason to stop serving.
macro_rules! note {
    ($($text:tt)*) => {{
        use std::io::Write;
        let _ = writeln!(std::io::stderr(), "inference-server: {}", format_args!($($text)*));
    }};
}

mod caller;
mod crew;
mod engine;
mod http;
mod links;
mod options;
mod scheduler;
mod text;
mod view;

use std::error::Error;
use std::net::TcpListener;
use std::sync::{Arc, Mutex, mpsc};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tokio::sync::oneshot;

pub use self::options::{HELP, Options, Recovery, Role};

use self::crew::Crew;
use self::engine::{Engine, Event};
use self::http::Server;
use self::scheduler::Scheduler;
use self::view::View;

/// Tokens of one prompt in a step, at most.
const CHUNK: usize = 32;

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// When it cannot begin: a number of ranks that the model cannot be shared by, an address that is taken. And when it gives
/// up: ranks that end again and again.
pub fn serve(options: &Options) -> Result<(), Box<dyn Error + Send + Sync>> {
    let file = options.model.open(&options.models)?;
    file.check_ranks(options.ranks)?;
    let tokenizer = file.tokenizer()?;
    drop(file);
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
    let server = Arc::new(Server {
        engine: to.clone(),
        view: Arc::clone(&view),
        observer: crew.observer(),
        model: options.model.name().to_owned(),
        tokenizer,
        settings: options.settings,
        queue: options.queue,
    });
    let scheduler = Scheduler::new(options.settings, CHUNK, options.queue);
    let engine = Engine::new(crew, scheduler, view, inbox);
    let (over, is_over) = oneshot::channel();
    let engine = std::thread::Builder::new()
        .name(String::from("engine"))
        .spawn(move || {
            let outcome = engine.run();
            // Nobody waits for it when serving has failed.
            let _ = over.send(());
            outcome
        })?;
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    let grace = options.grace;
    std::thread::Builder::new()
        .name(String::from("signals"))
        .spawn(move || {
            for _ in signals.forever() {
                let _ = to.send(Event::End(grace));
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
        let serving = axum::serve(listener, http::router(server)).with_graceful_shutdown(async {
            // Also when the engine is gone in another way.
            let _ = is_over.await;
        });
        // Who does not read the end of an answer is not waited for.
        let (done, is_done) = oneshot::channel::<()>();
        let serving = tokio::spawn(async move {
            let outcome = serving.await;
            drop(done);
            outcome
        });
        while !engine.is_finished() && !serving.is_finished() {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        let _ = tokio::time::timeout(std::time::Duration::from_secs(1), is_done).await;
        Ok::<(), std::io::Error>(())
    })?;
    runtime.shutdown_background();
    match engine.join() {
        Ok(outcome) => outcome,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}
