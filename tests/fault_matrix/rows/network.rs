//! Faults of the connections between hosts, which are network namespaces.

use std::time::Duration;

use nccl::fault::FaultClass::Gone;
use nccl::launch::Signal;

use crate::row::{Cast, Ends, OnNvidias, ROW, Row, Then};
use crate::stage::{Stage, Unable};
use crate::switch::{Hosts, try_run};

fn hosts(stage: &Stage) -> &Hosts {
    stage.hosts.as_ref().expect("the row has hosts")
}

/// Takes a host's only cable down.
fn cut(stage: &Stage, host: usize) {
    hosts(stage).on(host, "ip link set eth0 down");
}

/// Silently drops packets that reach a host and match this.
fn throw_away(stage: &Stage, host: usize, what: &str) -> Result<(), Unable> {
    let rule = format!("nft add rule ip matrix in {what} drop");
    let chain = "nft add chain ip matrix in { type filter hook input priority 0 ; }";
    for command in ["nft add table ip matrix", chain, &rule] {
        let done = hosts(stage).try_on(host, command);
        done.map_err(|_| Unable::NotHere("it needs nft, and its modules"))?;
    }
    Ok(())
}

const fn gone(
    root: &'static str,
    culprits: &'static [usize],
    says: &'static [&'static str],
) -> Ends {
    Ends::Cause {
        culprits,
        class: Gone,
        root,
        says,
    }
}

const ONE_WAY: &str = "the operations' own packets would be lost too, and the operations with them";

/// The data of these rows does not go through the cut network, and would be a reason to wait.
const ABORTS: &[(&str, &str)] = &[("NCCL_RUN_UNREACHABLE", "abort")];

/// A host's cable is pulled for 8 s, while NCCL's data takes another way, and nothing ends.
const OUTAGE: Row = Row {
    cast: Cast::Hosts(&[2, 1]),
    harm: Some(|stage| {
        cut(stage, 1);
        std::thread::sleep(Duration::from_secs(8));
        hosts(stage).on(1, "ip link set eth0 up");
        Ok(())
    }),
    ends: Ends::Nothing,
    then: Then::Same,
    on_nvidias: OnNvidias::NotTried(ONE_WAY),
    ..ROW
};

pub(crate) const ROWS: &[Row] = &[
    Row {
        name: "killed-on-another-host",
        fault: "SIGKILL on another host",
        cast: Cast::Hosts(&[2, 1]),
        harm: Some(|stage| {
            stage.signal(2, Signal::Kill);
            Ok(())
        }),
        ends: gone("died", &[2], &["(h2, ", "died"]),
        lost: &[2],
        then: Then::Generation,
        ..ROW
    },
    Row {
        name: "cable",
        fault: "a host's cable is pulled",
        cast: Cast::Hosts(&[2, 1]),
        variables: ABORTS,
        harm: Some(|stage| {
            cut(stage, 1);
            Ok(())
        }),
        ends: gone("host_lost", &[2], &["(h2, "]),
        lost: &[],
        aside: &[2],
        aside_says: "cut off",
        bound: Duration::from_secs(5),
        then: Then::Generation,
        ..ROW
    },
    Row {
        name: "cable-of-two",
        fault: "the cable of a host with two ranks is pulled",
        cast: Cast::Hosts(&[3, 2]),
        variables: ABORTS,
        harm: Some(|stage| {
            cut(stage, 1);
            Ok(())
        }),
        ends: gone("host_lost", &[3, 4], &["(h2, "]),
        aside: &[3, 4],
        aside_says: "cut off",
        bound: Duration::from_secs(5),
        then: Then::Generation,
        ..ROW
    },
    Row {
        name: "shrinks-apart",
        fault: "a host's cable is pulled, and its only rank, which coordinates, shrinks to itself what the others shrink without it",
        cast: Cast::Hosts(&[1, 2]),
        variables: ABORTS,
        harm: Some(|stage| {
            cut(stage, 0);
            let namespace = hosts(stage).namespace(0);
            std::thread::spawn(move || {
                // By then the side of the host has the fault.
                std::thread::sleep(Duration::from_secs(13));
                let _ = try_run("ip", &format!("-n {namespace} link set eth0 up"));
            });
            Ok(())
        }),
        play: |actor| {
            // At the first attempt the rank may have been left behind; at the second, the network works again.
            for wait in [5, 6] {
                if actor.is(0) {
                    std::thread::sleep(Duration::from_secs(wait));
                    let shrunk = actor.comm().shrink("alone", &[1, 2]);
                    let refused = shrunk.expect_err("the others go on").to_string();
                    let says = ["no majority", "reached a majority"];
                    assert!(says.iter().any(|says| refused.contains(says)), "{refused}");
                }
            }
            actor.work()
        },
        ends: gone("host_lost", &[0], &["(h1, "]),
        aside: &[0],
        aside_says: "cut off",
        bound: Duration::from_secs(5),
        then: Then::Shrink,
        ..ROW
    },
    Row {
        name: "tolerated",
        fault: "a host's cable is pulled for 8 s, and NCCL's data takes another way",
        play: |actor| actor.work_for(Duration::from_secs(12)),
        ..OUTAGE
    },
    Row {
        name: "tolerated-messages",
        fault: "a host's cable is pulled for 8 s, and messages in groups take another way",
        play: |actor| actor.message_for(Duration::from_secs(12)),
        ..OUTAGE
    },
    Row {
        name: "tolerated-replays",
        fault: "a host's cable is pulled for 8 s, and the data of a captured plan takes another way",
        play: |actor| actor.replay_for(Duration::from_secs(12)),
        ..OUTAGE
    },
    Row {
        name: "tolerated-until-it-stops",
        fault: "a host's cable is pulled; NCCL's data takes another way for 8 s, and then none",
        cast: Cast::Hosts(&[2, 1]),
        harm: Some(|stage| {
            cut(stage, 1);
            Ok(())
        }),
        play: |actor| {
            actor.work_for(Duration::from_secs(8))?;
            match actor.is(2) {
                true => actor.hear(),
                false => actor.work(),
            }
        },
        ends: gone("host_lost", &[2], &["(h2, "]),
        aside: &[2],
        aside_says: "cut off",
        bound: Duration::from_secs(13),
        then: Then::Generation,
        on_nvidias: OnNvidias::NotTried(ONE_WAY),
        ..ROW
    },
    Row {
        name: "blackhole",
        fault: "a firewall begins to drop everything that comes to a host",
        cast: Cast::Hosts(&[2, 1]),
        variables: ABORTS,
        harm: Some(|stage| throw_away(stage, 1, "ip saddr 10.79.0.0/24")),
        ends: gone("host_lost", &[2], &["(h2, "]),
        aside: &[2],
        aside_says: "cut off",
        bound: Duration::from_secs(5),
        then: Then::Generation,
        ..ROW
    },
    Row {
        name: "mute",
        fault: "the others' firewalls begin to drop everything that comes from a host",
        cast: Cast::Hosts(&[2, 1]),
        variables: ABORTS,
        harm: Some(|stage| throw_away(stage, 0, "ip saddr 10.79.0.2")),
        ends: gone("host_lost", &[2], &["(h2, "]),
        aside: &[2],
        aside_says: "cut off",
        bound: Duration::from_secs(5),
        then: Then::Generation,
        ..ROW
    },
    Row {
        name: "deaf-coordinator",
        fault: "a firewall begins to drop everything that comes to the host of rank 0, which coordinates",
        cast: Cast::Hosts(&[1, 1, 1]),
        variables: ABORTS,
        harm: Some(|stage| throw_away(stage, 0, "ip saddr 10.79.0.0/24")),
        ends: gone("host_lost", &[0], &["(h1, "]),
        aside: &[0],
        aside_says: "cut off",
        bound: Duration::from_secs(5),
        then: Then::Shrink,
        ..ROW
    },
    Row {
        name: "partition",
        fault: "two hosts do not hear each other any more; both hear the third, where rank 0 is",
        cast: Cast::Hosts(&[1, 1, 1]),
        harm: Some(|stage| {
            throw_away(stage, 1, "ip saddr 10.79.0.3")?;
            throw_away(stage, 2, "ip saddr 10.79.0.2")
        }),
        play: |actor| actor.work_for(Duration::from_millis(2500)),
        on_nvidias: OnNvidias::NotTried(ONE_WAY),
        ends: Ends::Nothing,
        then: Then::Same,
        ..ROW
    },
    Row {
        name: "loss",
        fault: "a network loses one packet of twenty",
        cast: Cast::Hosts(&[2, 1]),
        harm: Some(|stage| throw_away(stage, 1, "numgen random mod 20 0")),
        play: |actor| actor.work_for(Duration::from_millis(2500)),
        ends: Ends::Nothing,
        then: Then::Same,
        ..ROW
    },
    Row {
        name: "narrow",
        fault: "a network begins to lose packets of more than 1300 bytes, and does not say so",
        cast: Cast::Hosts(&[2, 1]),
        harm: Some(|stage| {
            // A cable of the kernel passes several packets as one.
            for host in 0..2 {
                let single = hosts(stage).try_on(host, "ip link set dev eth0 gso_max_segs 1");
                single.map_err(|_| Unable::NotHere("its ip knows no gso_max_segs"))?;
            }
            throw_away(stage, 1, "meta length > 1300")
        }),
        play: |actor| {
            actor.work_for(Duration::from_millis(500))?;
            let world = &actor.world;
            let key = |rank: usize| format!("large/{rank}");
            world.set(&key(world.rank()), &[7; 64 << 10])?;
            world.barrier("large")?;
            for rank in 0..world.size() {
                assert_eq!(world.get(&key(rank))?.len(), 64 << 10);
            }
            // Three seconds without an acknowledgement end a connection.
            actor.work_for(Duration::from_millis(3500))
        },
        on_nvidias: OnNvidias::NotTried(ONE_WAY),
        ends: Ends::Nothing,
        then: Then::Same,
        ..ROW
    },
    Row {
        name: "cut-coordinator",
        fault: "the cable of the host of rank 0, which coordinates, is pulled",
        cast: Cast::Hosts(&[1, 1, 1]),
        variables: ABORTS,
        harm: Some(|stage| {
            cut(stage, 0);
            Ok(())
        }),
        ends: gone("host_lost", &[0], &["(h1, "]),
        aside: &[0],
        aside_says: "cut off",
        bound: Duration::from_secs(6),
        then: Then::Shrink,
        ..ROW
    },
];
