//! Messages that have no counterpart.

use std::time::Duration;

use nccl::fault::FaultClass::Asked;

use crate::row::{Ends, OnNvidias, ROW, Row, SHORT, Then};

const UNMATCHED: Row = Row {
    timeout: SHORT,
    bound: Duration::from_secs(3),
    ..ROW
};

pub(crate) const ROWS: &[Row] = &[
    Row {
        name: "send-without-receive",
        fault: "a message that nobody receives",
        play: |actor| {
            actor.harm();
            if !actor.is(0) {
                return actor.hear();
            }
            let x = actor.memory::<f32>(1024);
            actor.comm().group(|group| group.isend(&x, 1))?.wait()
        },
        ends: Ends::timed_out("unmatched", &[1], &["has no receive"]),
        ..UNMATCHED
    },
    Row {
        name: "message-sizes",
        fault: "a message is sent longer than it is received",
        play: |actor| {
            actor.harm();
            let (x, mut y) = (actor.memory::<f32>(2048), actor.memory::<f32>(1024));
            match actor.world.rank() {
                0 => actor.comm().group(|group| group.isend(&x, 1))?.wait(),
                1 => actor.comm().group(|group| group.irecv(&mut y, 0))?.wait(),
                _ => actor.hear(),
            }
        },
        on_nvidias: OnNvidias::MismatchField(
            "nobody is told: the shorter message is taken for the whole",
        ),
        ends: Ends::timed_out("unequal_counts", &[0], &["2048", "1024"]),
        ..UNMATCHED
    },
    Row {
        name: "cycle",
        fault: "each rank sends to the next before it receives, without a group",
        play: |actor| {
            actor.harm();
            let (x, mut y) = (actor.memory::<f32>(1024), actor.memory::<f32>(1024));
            let (rank, ranks) = (actor.comm().rank(), actor.comm().world_size());
            let next = (rank + 1) % ranks;
            actor.comm().group(|group| group.isend(&x, next))?.wait()?;
            let previous = (rank + ranks - 1) % ranks;
            actor
                .comm()
                .group(|group| group.irecv(&mut y, previous))?
                .wait()
        },
        ends: Ends::timed_out("cycle", &[0, 1, 2], &["0", "1", "2"]),
        ..UNMATCHED
    },
    Row {
        name: "all-to-all-counts",
        fault: "an all-to-all of differing lengths in which two ranks do not agree on one",
        play: |actor| {
            actor.harm();
            let (x, mut y) = (actor.memory::<f32>(900), actor.memory::<f32>(900));
            let (mut send, receive) = ([100; 3], [100; 3]);
            if actor.is(1) {
                send[2] = 200;
            }
            actor
                .comm()
                .all_to_all_v(&x, &send, &mut y, &receive)?
                .wait()?;
            // A rank whose own messages all arrived gets the fault, too.
            actor.hear()
        },
        on_nvidias: OnNvidias::MismatchField(
            "nobody is told: the shorter message is taken for the whole",
        ),
        ends: Ends::timed_out("unequal_counts", &[1, 2], &["200", "100"]),
        ..UNMATCHED
    },
    Row {
        name: "own-message",
        fault: "a rank sends to itself what it does not receive",
        play: |actor| {
            actor.harm();
            if !actor.is(1) {
                return Ok(());
            }
            let x = actor.memory::<f32>(64);
            actor.comm().group(|group| group.isend(&x, 1)).map(drop)
        },
        ends: Ends::Refused {
            on: &[1],
            says: &["sends to itself what it does not receive"],
        },
        then: Then::Same,
        ..ROW
    },
    Row {
        name: "left-group",
        fault: "an error of the program's own leaves a group early",
        play: |actor| {
            actor.harm();
            if !actor.is(1) {
                return Ok(());
            }
            let (x, y) = (actor.memory::<f32>(64), actor.memory::<f32>(64));
            let grouped = actor.comm().group(|group| {
                group.isend(&x, 0)?;
                // There are three ranks.
                group.isend(&y, 7)
            });
            grouped.map(drop)
        },
        ends: Ends::Refused {
            on: &[1],
            says: &["peer 7 does not exist"],
        },
        then: Then::Same,
        ..ROW
    },
    Row {
        name: "peer-aborts",
        fault: "a rank aborts while the others exchange messages",
        play: |actor| {
            actor.harm();
            if actor.is(1) {
                actor.all_reduce()?;
                actor.comm().abort("the request was withdrawn")?;
                return actor.all_reduce();
            }
            actor.work()
        },
        ends: Ends::Cause {
            culprits: &[1],
            class: Asked,
            root: "asked",
            says: &["the request was withdrawn"],
        },
        ..ROW
    },
    Row {
        name: "peer-revokes",
        fault: "a rank revokes the communicator under the others",
        play: |actor| {
            actor.harm();
            if actor.is(1) {
                actor.all_reduce()?;
                actor.comm().revoke("another step is wanted")?;
            }
            actor.work()
        },
        ends: Ends::Cause {
            culprits: &[1],
            class: nccl::fault::FaultClass::Revoked,
            root: "asked",
            says: &["another step is wanted"],
        },
        then: Then::Shrink,
        ..ROW
    },
];
