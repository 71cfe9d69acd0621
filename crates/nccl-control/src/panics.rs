//! How the message of a panic reaches the other ranks.

use std::cell::RefCell;
use std::panic::PanicHookInfo;
use std::sync::{Once, mpsc};
use std::time::Duration;

use super::session;
use crate::departure::cut;
use crate::forked;

/// The longest message that is kept, in bytes.
const LONGEST: usize = 4096;

/// How long an aborting process takes to report to the other ranks.
const REPORT_TIMEOUT: Duration = Duration::from_secs(1);

thread_local! {
    static LAST: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Installs a panic hook, so that the other ranks receive the message and the location of a panic that ends a `World`,
/// instead of only the fact that it panicked.
///
/// A panic hook belongs to the whole process, so a library must not set one on its own: call this once, in `main`. The
/// previous hook is called as well. A world that is dropped while its thread unwinds then fails with `its thread
/// panicked at src/main.rs:10:5: message`. In a program that is built with `panic = "abort"`, every world of the
/// process fails in this way, because no thread unwinds. A panic that is caught before it reaches a world is not
/// reported.
///
/// ```
/// nccl::process::install_panic_hook();
/// let mut worlds = nccl::World::threads(2);
/// let (one, zero) = (worlds.pop().unwrap(), worlds.pop().unwrap());
/// let rank = std::thread::spawn(move || {
///     let _world = one;
///     panic!("the weights are of another model");
/// });
/// assert!(rank.join().is_err());
/// let error = zero.barrier("loaded").unwrap_err().to_string();
/// assert!(error.contains("the weights are of another model"), "{error}");
/// ```
pub fn install_panic_hook() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let text = describe(info);
            if cfg!(panic = "abort") {
                fail_all_sessions(&text);
            }
            // A thread that has destroyed its thread-local data has nothing to set.
            let _ = LAST.try_with(|last| *last.borrow_mut() = Some(text));
            before(info);
        }));
    });
}

fn describe(info: &PanicHookInfo<'_>) -> String {
    let payload = info.payload();
    let message = match (
        payload.downcast_ref::<&str>(),
        payload.downcast_ref::<String>(),
    ) {
        (Some(text), _) => *text,
        (_, Some(text)) => text,
        _ => "a value that is no text",
    };
    let mut text = match info.location() {
        Some(place) => format!("its thread panicked at {place}: {message}"),
        None => format!("its thread panicked: {message}"),
    };
    cut(&mut text, LONGEST);
    text
}

/// Describes the panic that unwinds this thread.
pub(super) fn of_this_thread() -> String {
    let last = LAST.try_with(|last| last.borrow().clone());
    last.ok()
        .flatten()
        .unwrap_or_else(|| String::from("its thread panicked"))
}

/// Reports to the other ranks of all worlds that this process is about to abort. Runs on a separate thread, because the
/// panicking thread may hold any lock.
pub(super) fn fail_all_sessions(text: &str) {
    if forked::is_child() {
        return;
    }
    let text = text.to_owned();
    let (done, done_receiver) = mpsc::channel();
    let content = move || {
        let sessions = session::sessions();
        for session in &sessions {
            session.fail(text.clone());
        }
        let _ = done.send(());
        // Dropping a session may block, and the process ends anyway.
        std::mem::forget(sessions);
    };
    if std::thread::Builder::new().spawn(content).is_ok() {
        let _ = done_receiver.recv_timeout(REPORT_TIMEOUT);
    }
}
