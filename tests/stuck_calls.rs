//! Calls of NCCL's and CUDA's that do not come back: who is in one is named, and what others wait for ends.

mod support;
#[path = "support/unattended.rs"]
mod unattended;

use nccl::{FaultClass, RootCause, Timeouts};
use nccl_emulator::faults;
use support::{needs_emulator, ranks_as_processes};
use unattended::{LIMIT, Outcome, SOON, fault, start, unattended};

#[test]
fn the_one_rank_that_does_not_come_back_from_the_call_is_named_on_all() {
    if !needs_emulator("a call that hangs on purpose") {
        return;
    }
    ranks_as_processes(3, |world| -> Outcome {
        let (_stream, comm) = start(&world, |builder| builder.timeout(LIMIT))?;
        if world.rank() == 1 {
            faults::at_call("ncclAllReduce").hang().keep();
            let comm = comm.clone();
            std::thread::spawn(move || {
                let _ = unattended(&comm);
            });
        }
        // Nobody waits before it is in there.
        world.barrier("begin")?;
        if world.rank() != 1 {
            unattended(&comm)?;
        }
        let fault = fault(&comm)?;
        assert_eq!(
            (fault.rank(), fault.class()),
            (1, FaultClass::TimedOut),
            "{fault}"
        );
        let root = fault.root();
        assert!(matches!(root, RootCause::StuckInside { .. }), "{fault}");
        let cause = fault.cause();
        assert!(cause.contains("inside the call of all_reduce #"), "{cause}");
        world.barrier("end")?;
        // A thread hangs.
        std::process::exit(0);
    });
}

#[test]
fn a_call_into_nccl_that_does_not_come_back_is_found() {
    if !needs_emulator("a call that hangs on purpose") {
        return;
    }
    ranks_as_processes(2, |world| -> Outcome {
        let limits = Timeouts::new().operation(LIMIT).abort(LIMIT);
        let (_stream, comm) = start(&world, |builder| builder.timeouts(limits))?;
        world.barrier("begin")?;
        if world.rank() == 0 {
            faults::at_call("ncclAllReduce").hang().keep();
            let comm = comm.clone();
            std::thread::spawn(move || {
                let _ = unattended(&comm);
            });
        }
        let fault = fault(&comm)?;
        assert_eq!((fault.rank(), fault.class()), (0, FaultClass::TimedOut));
        let cause = fault.cause();
        assert!(
            cause.contains("the call into NCCL, under way for"),
            "{cause}"
        );
        world.barrier("end")?;
        // A thread hangs.
        std::process::exit(0);
    });
}

#[test]
fn a_watchdog_that_is_stuck_does_not_keep_an_operation_from_its_end() {
    if !needs_emulator("a call that hangs on purpose") {
        return;
    }
    ranks_as_processes(2, |world| -> Outcome {
        let limits = Timeouts::new().operation(LIMIT).abort(LIMIT);
        let (stream, comm) = start(&world, |builder| builder.timeouts(limits))?;
        let elsewhere = stream.context().new_stream()?;
        let other = world.communicator("other").stream(&elsewhere);
        let other = other.timeout(LIMIT).build()?;
        other.warm_up(SOON)?;
        world.barrier("begin")?;
        if world.rank() == 0 {
            unattended(&comm)?;
            // The first to ask is the watchdog.
            faults::at_call("ncclCommGetAsyncError")
                .nth(1)
                .hang()
                .keep();
        }
        let stuck = fault(&comm)?;
        assert_eq!((stuck.rank(), stuck.class()), (0, FaultClass::TimedOut));
        let cause = stuck.cause();
        assert!(
            cause.contains("ncclCommGetAsyncError has not come back"),
            "{cause}"
        );
        // Others are still watched over.
        if world.rank() == 0 {
            unattended(&other)?;
        }
        let late = fault(&other)?;
        assert!(
            late.cause().contains("the operation, running for"),
            "{late}"
        );
        world.barrier("end")?;
        // A thread hangs.
        std::process::exit(0);
    });
}

#[test]
fn a_driver_that_hangs_under_the_watchdog_does_not_keep_an_operation_from_its_end() {
    if !needs_emulator("a call that hangs on purpose") {
        return;
    }
    ranks_as_processes(2, |world| -> Outcome {
        let limits = Timeouts::new().operation(LIMIT).abort(LIMIT);
        let (_stream, comm) = start(&world, |builder| builder.timeouts(limits))?;
        world.barrier("begin")?;
        if world.rank() == 0 {
            // Nobody but the watchdog asks.
            faults::at_call("cuEventQuery").hang().keep();
            unattended(&comm)?;
        }
        let fault = fault(&comm)?;
        assert_eq!((fault.rank(), fault.class()), (0, FaultClass::TimedOut));
        let cause = fault.cause();
        assert!(cause.contains("cuEventQuery has not come back"), "{cause}");
        world.barrier("end")?;
        // A thread hangs.
        std::process::exit(0);
    });
}
