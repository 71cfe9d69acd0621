use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use super::*;
use crate::driver::context;
use crate::sync::Mutex;

/// A job made of a closure.
struct Closure<F> {
    step: F,
    bell: Arc<Bell>,
}

impl<F: FnMut(usize) -> Step + Send> Work for Closure<F> {
    fn step(&mut self, budget: usize) -> Step {
        (self.step)(budget)
    }

    fn bell(&self) -> &Bell {
        &self.bell
    }

    fn describe(&self) -> String {
        "a test's job".into()
    }
}

fn job(mut body: impl FnMut() + Send + 'static) -> Box<dyn Work> {
    Box::new(Closure {
        step: move |_| {
            body();
            Step::Done
        },
        bell: Arc::default(),
    })
}

/// A job that is blocked until it is opened.
#[derive(Clone, Default)]
struct Gate {
    open: Arc<AtomicBool>,
    bell: Arc<Bell>,
    steps: Arc<Mutex<Vec<ThreadId>>>,
}

impl Gate {
    fn job(&self) -> Box<dyn Work> {
        let gate = self.clone();
        Box::new(Closure {
            bell: Arc::clone(&self.bell),
            step: move |_| {
                gate.steps.lock().push(thread::current().id());
                let seen = gate.bell.value();
                if gate.open.load(Ordering::SeqCst) {
                    Step::Done
                } else {
                    Step::Blocked { seen }
                }
            },
        })
    }

    fn open(&self) {
        self.open.store(true, Ordering::SeqCst);
        self.bell.ring();
    }
}

fn stream(device: i32, kind: Kind) -> Arc<Stream> {
    Stream::new(&context::primary(device).unwrap(), kind, 0)
}

/// Fails the test when `body` takes longer than a minute.
fn in_time<R: Send + 'static>(body: impl FnOnce() -> R + Send + 'static) -> R {
    let (send, receive) = mpsc::channel();
    let runner = thread::spawn(move || {
        let _ = send.send(body());
    });
    match receive.recv_timeout(Duration::from_secs(60)) {
        Ok(result) => {
            runner.join().unwrap();
            result
        }
        Err(mpsc::RecvTimeoutError::Disconnected) => match runner.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => unreachable!("it sent nothing"),
        },
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("not done after a minute"),
    }
}

fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "waited ten seconds for: {what}"
        );
        thread::sleep(Duration::from_micros(200));
    }
}

#[test]
fn the_thread_that_synchronizes_runs_the_jobs_in_order() {
    in_time(|| {
        let stream = stream(0, Kind::NonBlocking);
        let me = thread::current().id();
        // On a busy machine a worker may come first: then once more.
        for round in 0.. {
            let ran = Arc::new(Mutex::new(Vec::new()));
            for number in 0..100 {
                let ran = Arc::clone(&ran);
                let work = job(move || ran.lock().push((number, thread::current().id())));
                assert_eq!(stream.enqueue(work).unwrap(), round * 100 + number + 1);
            }
            stream.synchronize().unwrap();
            assert_eq!(stream.completed(), (round + 1) * 100);
            let ran = ran.lock();
            assert!(ran.iter().map(|(number, _)| *number).eq(0..100));
            if ran.iter().all(|(_, thread)| *thread == me) {
                break;
            }
        }
    });
}

#[test]
fn work_that_nobody_waits_for_runs_all_the_same() {
    in_time(|| {
        let stream = stream(0, Kind::NonBlocking);
        let me = thread::current().id();
        let (send, receive) = mpsc::channel();
        stream
            .enqueue(job(move || send.send(thread::current().id()).unwrap()))
            .unwrap();
        let runner = receive.recv().unwrap();
        assert_ne!(runner, me);
        until("the stream is idle", || stream.idle());
    });
}

#[test]
fn a_blocked_job_goes_on_when_its_bell_rings() {
    in_time(|| {
        let stream = stream(0, Kind::NonBlocking);
        let gate = Gate::default();
        stream.enqueue(gate.job()).unwrap();
        let opened = Arc::new(AtomicBool::new(false));
        let opener = thread::spawn({
            let (gate, opened) = (gate.clone(), Arc::clone(&opened));
            move || {
                thread::sleep(Duration::from_millis(30));
                opened.store(true, Ordering::SeqCst);
                gate.open();
            }
        });
        stream.synchronize().unwrap();
        assert!(opened.load(Ordering::SeqCst));
        opener.join().unwrap();
    });
}

#[test]
fn a_thread_that_waits_long_does_not_use_its_core() {
    in_time(|| {
        let stream = stream(0, Kind::NonBlocking);
        let gate = Gate::default();
        stream.enqueue(gate.job()).unwrap();
        let opener = thread::spawn({
            let gate = gate.clone();
            move || {
                thread::sleep(Duration::from_millis(300));
                gate.open();
            }
        });
        let used = || {
            let mut time = libc::timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            // SAFETY: a timespec to write to.
            unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
            Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
        };
        let before = used();
        stream.synchronize().unwrap();
        let spent = used() - before;
        assert!(spent < Duration::from_millis(30), "{spent:?} of 300 ms");
        opener.join().unwrap();
    });
}

#[test]
fn a_worker_makes_way_for_the_thread_that_waits() {
    in_time(|| {
        let stream = stream(0, Kind::NonBlocking);
        let gate = Gate::default();
        stream.enqueue(gate.job()).unwrap();
        let (gate2, me) = (gate.clone(), thread::current().id());
        until("a worker took the stream", || {
            !gate2.steps.lock().is_empty()
        });
        // By now the runner sleeps on the job's bell.
        thread::sleep(Duration::from_millis(20));
        let opener = thread::spawn({
            let gate = gate.clone();
            move || {
                until("the waiter runs it", || {
                    gate.steps.lock().last() == Some(&me)
                });
                gate.open();
            }
        });
        stream.synchronize().unwrap();
        assert_eq!(gate.steps.lock().last(), Some(&me));
        opener.join().unwrap();
    });
}

#[test]
fn a_wait_for_another_stream_runs_that_stream_too() {
    in_time(|| {
        let (first, second) = (stream(0, Kind::NonBlocking), stream(0, Kind::NonBlocking));
        let order = Arc::new(Mutex::new(Vec::new()));
        let note = |text: &'static str| {
            let order = Arc::clone(&order);
            job(move || order.lock().push(text))
        };
        first.enqueue(note("first")).unwrap();
        let mark = first.mark().unwrap();
        second.wait_for(&first, mark).unwrap();
        second.enqueue(note("second")).unwrap();
        second.synchronize().unwrap();
        assert_eq!(*order.lock(), ["first", "second"]);
    });
}

#[test]
fn a_chain_of_waits_longer_than_a_thread_runs_ends_all_the_same() {
    in_time(|| {
        let streams: Vec<_> = (0..40).map(|_| stream(0, Kind::NonBlocking)).collect();
        let count = Arc::new(AtomicUsize::new(0));
        for (index, stream) in streams.iter().enumerate() {
            if index > 0 {
                let before = &streams[index - 1];
                stream.wait_for(before, before.mark().unwrap()).unwrap();
            }
            let count = Arc::clone(&count);
            stream
                .enqueue(job(move || {
                    assert_eq!(count.fetch_add(1, Ordering::SeqCst), index);
                }))
                .unwrap();
        }
        streams[39].synchronize().unwrap();
        assert_eq!(count.load(Ordering::SeqCst), 40);
    });
}

#[test]
fn polling_moves_work_on_and_never_waits() {
    in_time(|| {
        let stream = stream(0, Kind::NonBlocking);
        let gate = Gate::default();
        let steps = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&steps);
        stream
            .enqueue(Box::new(Closure {
                bell: Arc::default(),
                step: move |budget| {
                    assert!(budget <= 4 << 20);
                    if counted.fetch_add(1, Ordering::SeqCst) == 9 {
                        Step::Done
                    } else {
                        Step::Progress
                    }
                },
            }))
            .unwrap();
        stream.enqueue(gate.job()).unwrap();
        until("ten steps", || {
            assert!(!stream.query().unwrap());
            steps.load(Ordering::SeqCst) == 10
        });
        assert!(!stream.query().unwrap());
        gate.open();
        until("the end", || stream.query().unwrap());
    });
}

#[test]
fn what_is_polled_now_and_then_is_run_by_a_worker() {
    const STEPS: usize = 5000;
    let polls = in_time(|| {
        let stream = stream(0, Kind::NonBlocking);
        let mut left = STEPS;
        let long = Closure {
            step: move |_| {
                left -= 1;
                match left {
                    0 => Step::Done,
                    _ => Step::Progress,
                }
            },
            bell: Arc::default(),
        };
        let number = stream.enqueue(Box::new(long)).unwrap();
        let mut polls = 0;
        while !stream.poll(number).unwrap() {
            polls += 1;
            thread::sleep(Duration::from_micros(50));
        }
        polls
    });
    // Each poll is one step.
    assert!(polls < STEPS / 2, "{polls}");
}

#[test]
fn one_thread_with_two_streams_that_need_each_other_is_not_stuck() {
    in_time(|| {
        // As with ncclCommInitAll: the two ends of a transfer, enqueued by one thread, which then
        // waits for one of them.
        let (left, right) = (stream(0, Kind::NonBlocking), stream(1, Kind::NonBlocking));
        let rounds = 50;
        let batch = || {
            let start = Instant::now();
            for _ in 0..rounds {
                let gate = Gate::default();
                left.enqueue(gate.job()).unwrap();
                right.enqueue(job(move || gate.open())).unwrap();
                left.synchronize().unwrap();
            }
            right.synchronize().unwrap();
            start.elapsed() / rounds
        };
        // On a busy machine this thread loses its core in some of them.
        let each = (0..10).map(|_| batch()).min().unwrap();
        assert!(
            each < Duration::from_millis(1),
            "{each:?} for each: nobody helped"
        );
    });
}

#[test]
fn many_threads_that_wait_for_one_stream_all_wake() {
    in_time(|| {
        let stream = stream(0, Kind::NonBlocking);
        let gates: Vec<_> = (0..8).map(|_| Gate::default()).collect();
        let done: Arc<Vec<AtomicBool>> = Arc::new((0..8).map(|_| AtomicBool::new(false)).collect());
        let waiters: Vec<_> = gates
            .iter()
            .enumerate()
            .map(|(index, gate)| {
                let sequence = stream.enqueue(gate.job()).unwrap();
                let (stream, done) = (Arc::clone(&stream), Arc::clone(&done));
                thread::spawn(move || {
                    stream.wait_until(sequence).unwrap();
                    done[index].store(true, Ordering::SeqCst);
                })
            })
            .collect();
        for (index, gate) in gates.iter().enumerate() {
            thread::sleep(Duration::from_millis(5));
            assert!(!done[index].load(Ordering::SeqCst));
            gate.open();
            until("the waiter for this one", || {
                done[index].load(Ordering::SeqCst)
            });
        }
        waiters
            .into_iter()
            .for_each(|waiter| waiter.join().unwrap());
    });
}

#[test]
fn hammering_a_stream_from_all_sides_loses_no_wake_up() {
    in_time(|| {
        let stream = stream(0, Kind::NonBlocking);
        let count = Arc::new(AtomicUsize::new(0));
        let threads: Vec<_> = (0..4)
            .map(|number| {
                let (stream, count) = (Arc::clone(&stream), Arc::clone(&count));
                thread::spawn(move || {
                    for round in 0..2000 {
                        let counted = Arc::clone(&count);
                        let sequence = stream
                            .enqueue(job(move || {
                                counted.fetch_add(1, Ordering::Relaxed);
                            }))
                            .unwrap();
                        // No nap ends by itself within the test's time limit.
                        match (number + round) % 3 {
                            0 => stream.wait_until(sequence).unwrap(),
                            1 => while !stream.poll(sequence).unwrap() {},
                            _ => {}
                        }
                    }
                })
            })
            .collect();
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        stream.synchronize().unwrap();
        assert_eq!(count.load(Ordering::Relaxed), 8000);
    });
}

#[test]
fn the_default_stream_waits_for_blocking_streams_and_they_for_it() {
    in_time(|| {
        let context = context::primary(2).unwrap();
        let (blocking, other) = (stream(2, Kind::Blocking), stream(2, Kind::NonBlocking));
        let legacy = context.legacy_stream().unwrap();
        let gate = Gate::default();
        blocking.enqueue(gate.job()).unwrap();
        let order = Arc::new(Mutex::new(Vec::new()));
        let note = |text: &'static str| {
            let order = Arc::clone(&order);
            job(move || order.lock().push(text))
        };
        legacy.enqueue(note("default")).unwrap();
        blocking.enqueue(note("blocking")).unwrap();
        other.enqueue(note("non-blocking")).unwrap();
        other.synchronize().unwrap();
        for _ in 0..100 {
            assert!(!legacy.query().unwrap());
        }
        assert_eq!(*order.lock(), ["non-blocking"]);
        gate.open();
        blocking.synchronize().unwrap();
        assert_eq!(*order.lock(), ["non-blocking", "default", "blocking"]);
    });
}

#[test]
fn each_thread_has_a_per_thread_stream_of_its_own() {
    in_time(|| {
        let context = context::primary(2).unwrap();
        let handle = || std::ptr::without_provenance_mut(2);
        let mine = lookup(handle(), &context).unwrap();
        assert!(Arc::ptr_eq(&mine, &lookup(handle(), &context).unwrap()));
        let theirs = thread::spawn(move || lookup(handle(), &context).unwrap())
            .join()
            .unwrap();
        assert!(!Arc::ptr_eq(&mine, &theirs));
        assert!(theirs.destroyed(), "its thread has ended");
    });
}

#[test]
fn a_dead_context_drops_its_jobs_and_wakes_who_waits() {
    in_time(|| {
        let context = super::context::Context::for_test(3);
        let stream = Stream::new(&context, Kind::NonBlocking, 0);
        let gate = Gate::default();
        stream.enqueue(gate.job()).unwrap();
        let ran = Arc::new(AtomicBool::new(false));
        let never = Arc::clone(&ran);
        stream
            .enqueue(job(move || never.store(true, Ordering::SeqCst)))
            .unwrap();
        let killer = thread::spawn({
            let context = Arc::clone(&context);
            move || {
                thread::sleep(Duration::from_millis(20));
                context.kill(CUresult::ERROR_ILLEGAL_ADDRESS);
                Instant::now()
            }
        });
        assert_eq!(stream.synchronize(), Err(CUresult::ERROR_ILLEGAL_ADDRESS));
        let woken = Instant::now();
        let killed = killer.join().unwrap();
        assert!(
            woken.saturating_duration_since(killed) < Duration::from_secs(10),
            "woken, not timed out"
        );
        assert!(!ran.load(Ordering::SeqCst));
        assert_eq!(
            stream.enqueue(job(|| {})),
            Err(CUresult::ERROR_ILLEGAL_ADDRESS)
        );
    });
}

#[test]
fn a_job_that_panics_costs_its_context_and_nothing_else() {
    in_time(|| {
        let context = super::context::Context::for_test(3);
        let stream = Stream::new(&context, Kind::NonBlocking, 0);
        stream.enqueue(job(|| panic!("on purpose"))).unwrap();
        assert_eq!(stream.synchronize(), Err(CUresult::ERROR_LAUNCH_FAILED));
    });
}

#[test]
fn an_event_marks_what_was_enqueued_before_it() {
    in_time(|| {
        let context = context::primary(0).unwrap();
        let stream = stream(0, Kind::NonBlocking);
        let event = Event::lookup(Event::create(&context, true).unwrap()).unwrap();
        assert!(event.query().unwrap(), "nothing recorded");
        let (before, after) = (Gate::default(), Gate::default());
        stream.enqueue(before.job()).unwrap();
        event.record(&stream, false).unwrap();
        stream.enqueue(after.job()).unwrap();
        assert!(!event.query().unwrap());
        assert_eq!(event.elapsed(&event), Err(CUresult::ERROR_NOT_READY));
        before.open();
        event.synchronize().unwrap();
        assert_eq!(event.elapsed(&event), Ok(0.0));
        assert!(!stream.query().unwrap(), "the second gate is closed");
        after.open();
        stream.synchronize().unwrap();
        let foreign = super::context::Context::for_test(0);
        let foreign = Stream::new(&foreign, Kind::NonBlocking, 0);
        assert_eq!(
            event.record(&foreign, false),
            Err(CUresult::ERROR_INVALID_HANDLE)
        );
    });
}

#[test]
fn a_destroyed_stream_finishes_its_work_and_goes_away() {
    in_time(|| {
        let stream = stream(0, Kind::NonBlocking);
        let handle = stream.publish().unwrap();
        let gate = Gate::default();
        stream.enqueue(gate.job()).unwrap();
        stream.destroy();
        let context = Arc::clone(stream.context());
        assert_eq!(
            lookup(handle, &context).err(),
            Some(CUresult::ERROR_INVALID_HANDLE)
        );
        gate.open();
        until("its work is done", || stream.idle());
        until("it is forgotten", || Arc::strong_count(&stream) == 1);
    });
}

#[test]
fn what_a_waiter_leaves_behind_is_run_though_the_dispatcher_slept() {
    in_time(|| {
        let stream = stream(0, Kind::NonBlocking);
        let gate = Gate::default();
        let sequence = stream.enqueue(gate.job()).unwrap();
        let (send, receive) = mpsc::channel();
        stream.enqueue(job(move || send.send(()).unwrap())).unwrap();
        let opener = thread::spawn({
            let gate = gate.clone();
            move || {
                // Long enough for the dispatcher to fall asleep.
                thread::sleep(Duration::from_millis(60));
                gate.open();
            }
        });
        stream.wait_until(sequence).unwrap();
        opener.join().unwrap();
        // The dispatcher's nap does not end by itself within the test's time limit.
        receive.recv().unwrap();
    });
}
