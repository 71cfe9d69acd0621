//! The guard of calls that block: one thread per process that looks whether a call inside a blocking
//! communicator has been there for too long, and pulls its switch.
//!
//! A call tells it nothing but a word in memory ([`Switch::enter`]), so that it costs the call no system call and no fence.
//! The guard looks at all words every [`TICK`], and sleeps for good when nobody has called for a while; the next
//! call then wakes it. It calls neither NCCL nor CUDA, and waits for nobody: whatever may block gets a thread
//! of its own. A call that does not come out although its switch was pulled is the sentinel's
//! (`supervision/inside.rs`).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::Thread;
use std::time::Duration;

use super::switch::{Found, Switch};
use crate::error::Result;
use crate::reaper;
use crate::sync::Mutex;
use crate::threads;

/// How often it looks. A call may end up to two of these later than its limit: it counts from the first look at it.
const TICK: Duration = Duration::from_millis(5);

/// After how many looks without a call it goes to sleep.
const QUIET: u32 = 200;

static SWITCHES: Mutex<Vec<Weak<Switch>>> = Mutex::new(Vec::new());
static THREAD: Mutex<Option<Thread>> = Mutex::new(None);
/// Whether it looks; who finds that it does not, wakes it.
static AWAKE: AtomicBool = AtomicBool::new(false);

/// From now on calls on this communicator are guarded, by the thread that [`ensure`] has started.
pub(super) fn watch(switch: &Arc<Switch>) {
    let mut switches = SWITCHES.lock();
    switches.retain(|switch| switch.strong_count() > 0);
    switches.push(Arc::downgrade(switch));
}

/// Starts the thread, if it does not run.
///
/// # Errors
/// [`ErrorKind::Io`](crate::ErrorKind::Io) when there is no thread to do it.
pub(super) fn ensure() -> Result<()> {
    let mut thread = THREAD.lock();
    if thread.is_none() {
        let spawned = std::thread::Builder::new()
            .name(String::from("nccl-guard"))
            .spawn(run)
            .map_err(threads::not_started("that guards calls that block"))?;
        *thread = Some(spawned.thread().clone());
    }
    Ok(())
}

/// A call has entered.
#[inline]
pub(super) fn stay_awake() {
    if !AWAKE.load(Ordering::Relaxed) {
        wake();
    }
}

#[cold]
fn wake() {
    if !AWAKE.swap(true, Ordering::SeqCst)
        && let Some(thread) = &*THREAD.lock()
    {
        thread.unpark();
    }
}

fn run() {
    let mut calls = 0;
    let mut quiet = 0;
    loop {
        quiet = if look(&mut calls) { 0 } else { quiet + 1 };
        if quiet < QUIET {
            std::thread::sleep(TICK);
            continue;
        }
        AWAKE.store(false, Ordering::SeqCst);
        // Whoever entered before may have found it awake; what was written by then is seen a tick later.
        std::thread::sleep(TICK);
        if look(&mut calls) {
            AWAKE.store(true, Ordering::SeqCst);
        }
        while !AWAKE.load(Ordering::SeqCst) {
            std::thread::park();
        }
        quiet = 0;
    }
}

/// Looks at every communicator once. Whether anybody has called since there were so many `calls`, or is inside.
fn look(calls: &mut u64) -> bool {
    let switches: Vec<Arc<Switch>> = SWITCHES.lock().iter().filter_map(Weak::upgrade).collect();
    let (mut inside, mut now) = (false, 0_u64);
    for switch in &switches {
        now = now.wrapping_add(switch.calls());
        match switch.look() {
            Found::Nobody => continue,
            Found::Inside | Found::Ended => {}
            Found::ToEnd => {
                pull(switch);
                for other in switch.companions().iter().filter_map(Weak::upgrade) {
                    pull(&other);
                }
            }
        }
        inside = true;
    }
    let called = now != *calls;
    *calls = now;
    inside || called
}

/// Raises the flag; NCCL may take its time.
fn pull(switch: &Arc<Switch>) {
    if reaper::is_closed() {
        return;
    }
    let pulled = Arc::clone(switch);
    let spawned = threads::spawn("nccl-abort", move || pulled.pull());
    if let Err(error) = spawned {
        // It blocks those who wait for the guard, but the flag is up before that.
        crate::events::no_thread("to end a call; the guard does it itself", &error);
        switch.pull();
    }
}
