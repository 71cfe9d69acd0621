//! Processes that are alive and do not take part: stopped, busy, asleep, late.

use std::time::Duration;

use nccl::launch::Signal;

use crate::actor::Actor;
use crate::cgroup::Group;
use crate::row::{Ends, OnNvidias, ROW, Row, SHORT, Then};
use crate::stage::Unable;

/// Rank 1 does something else instead of the next operation.
fn instead(actor: &Actor, what: impl FnOnce()) -> nccl::Result<()> {
    actor.harm();
    if !actor.is(1) {
        return actor.all_reduce();
    }
    what();
    actor.hear()
}

pub(crate) const ROWS: &[Row] = &[
    Row {
        name: "skips",
        fault: "a rank never enters an operation",
        timeout: SHORT,
        play: |actor| instead(actor, || actor.world.phase("decode")),
        ends: Ends::timed_out("never_entered", &[1], &["all_reduce", "decode"]),
        bound: Duration::from_secs(3),
        ..ROW
    },
    Row {
        name: "stopped",
        fault: "SIGSTOP, a debugger, a page that is swapped in for minutes",
        timeout: SHORT,
        harm: Some(|stage| {
            stage.signal(1, Signal::Stop);
            Ok(())
        }),
        ends: Ends::timed_out("not_answering", &[1], &["stopped"]),
        lost: &[1],
        bound: Duration::from_secs(5),
        then: Then::Behind,
        ..ROW
    },
    Row {
        name: "stopped-coordinator",
        fault: "SIGSTOP of rank 0, which coordinates, for 6 s; it is told as well when it goes on",
        timeout: SHORT,
        harm: Some(|stage| {
            stage.signal(0, Signal::Stop);
            let pid = i32::try_from(stage.pid(0)).ok();
            let pid = pid.and_then(rustix::process::Pid::from_raw);
            let pid = pid.ok_or_else(|| String::from("no process"))?;
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_secs(6));
                // The process may have ended.
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::CONT);
            });
            Ok(())
        }),
        ends: Ends::timed_out(
            "not_answering",
            &[0],
            &["does not answer", "stopped", "it coordinates"],
        ),
        bound: Duration::from_secs(8),
        ..ROW
    },
    Row {
        name: "late-for-long",
        fault: "a rank comes later than the others for a while, and then not at all",
        timeout: SHORT,
        play: |actor| {
            for _ in 0..6 {
                if actor.is(1) {
                    std::thread::sleep(Duration::from_millis(300));
                }
                actor.all_reduce()?;
            }
            instead(actor, || ())
        },
        ends: Ends::timed_out(
            "never_entered",
            &[1],
            &["rank 1 had been the last to arrive in"],
        ),
        bound: Duration::from_secs(3),
        ..ROW
    },
    Row {
        name: "queued",
        fault: "work of the program's own is in front of a rank's operation, and does not end",
        timeout: SHORT,
        play: |actor| {
            // Work that follows an operation within 10 ms counts as part of it, and so does later work while a busy
            // machine delays the counting thread.
            std::thread::sleep(Duration::from_millis(300));
            actor.harm();
            std::thread::sleep(Duration::from_millis(300));
            let gate = actor
                .is(1)
                .then(|| crate::support::gate::Gate::closed_on(&actor.stream).expect("a gate"));
            let result = actor.all_reduce();
            drop(gate);
            result
        },
        ends: Ends::timed_out("stuck_outside", &[1], &["all_reduce"]),
        bound: Duration::from_secs(3),
        ..ROW
    },
    Row {
        name: "never-begins",
        fault: "an operation hangs on the device of one rank; all have entered it",
        timeout: SHORT,
        variables: &[(
            "NCCL_EMULATOR_FAULTS",
            "run=AllReduce,rank=1,nth=3,action=hang",
        )],
        on_nvidias: OnNvidias::NotTried("its fault is one of the emulator's own NCCL"),
        play: |actor| {
            actor.harm();
            actor.all_reduce()
        },
        ends: Ends::timed_out(
            "unknown",
            &[],
            &["all_reduce", "not found (first to run out of time: rank "],
        ),
        bound: Duration::from_secs(3),
        ..ROW
    },
    Row {
        name: "late",
        fault: "a rank is late, within the timeout",
        play: |actor| {
            actor.harm();
            if actor.is(1) {
                std::thread::sleep(Duration::from_millis(700));
            }
            actor.all_reduce()
        },
        ends: Ends::Nothing,
        then: Then::Same,
        ..ROW
    },
    Row {
        name: "starved",
        fault: "a rank gets a tenth of a processor",
        harm: Some(|stage| {
            let Some(group) = Group::new("cpu", 100) else {
                return Err(Unable::NotHere(
                    "it needs a control group that can be written",
                ));
            };
            let taken = group.take(stage.pid(1));
            stage.group = Some(group);
            taken.map_err(|error| Unable::Failed(format!("the control group: {error:#}")))
        }),
        play: |actor| actor.work_for(Duration::from_millis(300)),
        ends: Ends::Nothing,
        then: Then::Same,
        ..ROW
    },
    Row {
        name: "interrupted",
        fault: "a signal every millisecond",
        play: |actor| {
            actor.harm();
            if actor.is(1) {
                signals_all_the_time();
            }
            actor.work_for(Duration::from_millis(800))
        },
        ends: Ends::Nothing,
        then: Then::Again,
        ..ROW
    },
];

/// A signal with a handler that does nothing interrupts whatever call the process is in.
fn signals_all_the_time() {
    extern "C" fn nothing(_: libc::c_int) {}
    let handler: extern "C" fn(libc::c_int) = nothing;
    // SAFETY: the handler does nothing; zeroes are an empty mask and no flags (calls are not restarted).
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as libc::sighandler_t;
        assert_eq!(
            libc::sigaction(libc::SIGALRM, &action, std::ptr::null_mut()),
            0
        );
    }
    let each = libc::timeval {
        tv_sec: 0,
        tv_usec: 1000,
    };
    let timer = libc::itimerval {
        it_interval: each,
        it_value: each,
    };
    // SAFETY: the timer is whole; SIGALRM has a handler.
    let set = unsafe { libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut()) };
    assert_eq!(set, 0);
}
