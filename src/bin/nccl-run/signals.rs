//! The signals that this process gets, passed on to the ranks.
//!
//! Ranks are not in the terminal's foreground, so the terminal's keys reach this process alone.
//!
//! | signal | what happens |
//! |---|---|
//! | SIGINT, SIGQUIT, SIGTERM, SIGHUP | passed on; after the grace period the ranks are killed |
//! | a second SIGINT or SIGQUIT | the ranks are killed |
//! | SIGUSR1, SIGUSR2 | passed on to the ranks' first processes |
//! | SIGCONT, SIGWINCH | passed on |
//! | SIGTSTP | passed on, and this process stops as well |
//! | SIGCHLD, as the first process of a container | the exit status of orphans is collected ([`orphans`]) |
//!
//! Signals that were ignored when this process was started (SIGHUP under `nohup`, say) stay ignored, except SIGCHLD: the
//! kernel would not keep the exit status of the ranks.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nccl::launch::{Fleet, Signal};
use procfs::FromRead;
use procfs::process::Status;
use signal_hook::iterator::{Handle, Signals as Iterator};

use crate::{orphans, say};

/// A child has ended.
const CHLD: Signal = Signal::new(rustix::process::Signal::CHILD.as_raw());

/// Some programs pass Ctrl-C on to a child that got it from the terminal already: two within this time are one request.
const TWICE: Duration = Duration::from_millis(300);

/// Received signals that wait to be passed on.
pub(crate) struct Signals(Iterator);

/// The thread that passes signals on.
pub(crate) struct Passing {
    handle: Handle,
    thread: JoinHandle<()>,
    told_to_end: Arc<AtomicBool>,
    printer: MessagePrinter,
}

/// A thread that prints messages, so that a standard error that blocks holds up no signal.
#[derive(Clone)]
struct MessagePrinter(Sender<Box<dyn FnOnce() + Send>>);

impl MessagePrinter {
    fn start() -> io::Result<Self> {
        let (says, acts) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        std::thread::Builder::new()
            .name(String::from("messages"))
            .spawn(move || acts.into_iter().for_each(|act| act()))?;
        Ok(Self(says))
    }

    /// Prints a message as soon as those before are printed or dropped.
    fn say(&self, text: String) {
        let _ = self.0.send(Box::new(move || say(&text)));
    }

    /// Waits until all messages are printed or dropped.
    fn finish(&self) {
        let (done, is_done) = mpsc::channel::<()>();
        let _ = self.0.send(Box::new(move || drop(done)));
        let _ = is_done.recv();
    }
}

impl Signals {
    /// Installs the handlers: from now on, signals have the effects above.
    pub(crate) fn take() -> io::Result<Self> {
        let status = Status::from_file("/proc/self/status");
        let ignored = status.map_or(0, |status| status.sigign);
        let wanted = [
            Signal::Int,
            Signal::Quit,
            Signal::Term,
            Signal::Hup,
            Signal::Usr1,
            Signal::Usr2,
            Signal::Cont,
            Signal::Winch,
            Signal::Tstp,
        ];
        let wanted = wanted.iter().map(|signal| signal.number());
        let wanted = wanted.filter(|number| ignored >> (number - 1) & 1 == 0);
        // A handler replaces an ignored SIGCHLD, and programs that are started get the default.
        Ok(Self(Iterator::new(wanted.chain([CHLD.number()]))?))
    }

    /// Passes signals on to the ranks, including those received since [`take`](Self::take).
    pub(crate) fn pass_on_to(mut self, fleet: Arc<Fleet>, grace: Duration) -> io::Result<Passing> {
        let handle = self.0.handle();
        let told_to_end = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&told_to_end);
        let printer = MessagePrinter::start()?;
        let its_printer = printer.clone();
        let thread = std::thread::Builder::new()
            .name(String::from("signals"))
            .spawn(move || {
                let mut pressed: Option<Instant> = None;
                // Each message is printed once: standard error may block, and the end waits for each message.
                let (mut has_passed_on, mut has_killed) = (false, false);
                for number in self.0.forever() {
                    let signal = Signal::new(number);
                    match signal {
                        Signal::Usr1 | Signal::Usr2 | Signal::Cont | Signal::Winch => {
                            fleet.signal_all(signal);
                        }
                        _ if signal == CHLD => {
                            if orphans::come_to_us() {
                                orphans::bury(&fleet);
                            }
                        }
                        Signal::Tstp => {
                            fleet.signal_all(signal);
                            let _ = signal_hook::low_level::emulate_default_handler(number);
                        }
                        _ => {
                            told.store(true, Ordering::Release);
                            let by_hand = matches!(signal, Signal::Int | Signal::Quit);
                            if by_hand && pressed.is_some_and(|at| at.elapsed() > TWICE) {
                                if !std::mem::replace(&mut has_killed, true) {
                                    its_printer.say(format!("{signal} again: the ranks are killed"));
                                }
                                fleet.kill();
                                continue;
                            }
                            let again = if by_hand { ", or at once by another" } else { "" };
                            if !std::mem::replace(&mut has_passed_on, true) {
                                its_printer.say(format!(
                                    "{signal} is passed on to the ranks; what is left in {grace:?} is killed{again}"
                                ));
                            }
                            pressed = pressed.or(by_hand.then(Instant::now));
                            fleet.stop(signal);
                        }
                    }
                }
            })?;
        Ok(Passing {
            handle,
            thread,
            told_to_end,
            printer,
        })
    }
}

impl Passing {
    /// Whether a signal has asked for the end of the ranks, so that none is to be restarted.
    pub(crate) fn told_to_end(&self) -> bool {
        self.told_to_end.load(Ordering::Acquire)
    }

    /// Waits for the messages about the signals that the fleet has got, which precede its report.
    pub(crate) fn finish_messages(&self) {
        self.printer.finish();
    }

    /// Ends the thread, and drops its fleet.
    pub(crate) fn end(self) {
        self.handle.close();
        let _ = self.thread.join();
        self.printer.finish();
    }
}
