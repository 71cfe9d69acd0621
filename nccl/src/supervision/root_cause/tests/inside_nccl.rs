//! What NCCL reports of the stalled operation.

use super::*;
use crate::supervision::inside_nccl::{
    CallInside, InsideNccl, OperationInside, TransferInside, Wait,
};

/// The transfer with `peer` on channel 0: steps done, what it waits for, since when.
fn transfer(peer: usize, is_send: bool, done: u32, wait: Wait, still_ms: u64) -> TransferInside {
    TransferInside {
        peer,
        channel: 0,
        is_send,
        steps: 88,
        done: Some(done),
        is_over: false,
        waits_for: Some(wait),
        still_ms,
        waits_ms: still_ms,
        age_ms: 1900,
        network_ms: 0,
    }
}

fn ring(transfers: Vec<TransferInside>) -> OperationInside {
    OperationInside {
        function: String::from("AllReduce"),
        algorithm: String::from("RING"),
        protocol: String::from("SIMPLE"),
        channels: 2,
        kernel: None,
        has_transfers: true,
        is_incomplete: false,
        transfers,
    }
}

/// A report of a rank that waits in call 2, for which NCCL does this.
fn waits(rank: usize, operation: OperationInside) -> RankReport {
    let call = CallInside {
        number: 2,
        operations: vec![operation],
        omitted: 0,
    };
    RankReport {
        inside: Some(InsideNccl { calls: vec![call] }),
        ..entered(rank, 2, false)
    }
}

/// Three ranks in a ring, each on its own host, all of which wait for data: none is at fault.
fn all_wait() -> Table {
    ring_of([
        [
            transfer(2, false, 5, Wait::PeerData, 1500),
            transfer(1, true, 5, Wait::OwnGpu, 1500),
        ],
        [
            transfer(0, false, 5, Wait::PeerData, 1500),
            transfer(2, true, 5, Wait::OwnGpu, 1500),
        ],
        [
            transfer(1, false, 5, Wait::PeerData, 1500),
            transfer(0, true, 5, Wait::OwnGpu, 1500),
        ],
    ])
}

fn ring_of(ranks: [[TransferInside; 2]; 3]) -> Table {
    let reports = ranks.into_iter().enumerate();
    let reports = reports.map(|(rank, transfers)| waits(rank, ring(transfers.to_vec())));
    let mut table = Table::of(reports.collect());
    table.hosts = ["node-a", "node-b", "node-c"].map(String::from).to_vec();
    table
}

impl Table {
    fn transfer(&mut self, rank: usize, place: usize) -> &mut TransferInside {
        let report = self.reports.get_mut(&rank).unwrap();
        let inside = report.inside.as_mut().unwrap();
        &mut inside.calls[0].operations[0].transfers[place]
    }

    fn operation(&mut self, rank: usize) -> &mut OperationInside {
        let report = self.reports.get_mut(&rank).unwrap();
        &mut report.inside.as_mut().unwrap().calls[0].operations[0]
    }
}

#[test]
fn ranks_that_wait_for_each_other_are_told_apart_from_none() {
    let diagnosis = all_wait().find_root_cause();
    assert_eq!(diagnosis.cause.root, RootCause::Unknown);
    let evidence = diagnosis.cause.evidence.join("; ");
    for part in [
        "inside NCCL, rank 0: AllReduce (RING, SIMPLE): waits for data from rank 2 (channel 0, 5 of 88 steps done, the last 1.5 s ago)",
        "waits for its own GPU to have data for rank 1",
        "inside NCCL, rank 2: ",
    ] {
        assert!(evidence.contains(part), "{evidence}");
    }
}

#[test]
fn data_that_was_handed_to_the_network_and_does_not_arrive_is_the_networks_fault() {
    let mut table = all_wait();
    table.transfer(0, 1).done = Some(9);
    let diagnosis = table.find_root_cause();
    let expected = RootCause::SlowNetwork {
        from: 0,
        to: 1,
        done: 5,
        steps: 88,
        is_moving: false,
    };
    assert_eq!(diagnosis.cause.root, expected);
    assert!(diagnosis.cause.root.is_of_no_rank());
    assert_eq!(
        diagnosis.cause.text,
        "the network from rank 0 (node-a) to rank 1 (node-b) does not carry data: rank 0 has handed 9 of 88 steps to the \
         network, and 5 have arrived at rank 1, and for 1.5 s neither has changed; rank 0 waited: it did not finish within 2s"
    );
    assert_eq!(diagnosis.cause.class, FaultClass::TimedOut);

    // A sender that has sent all is looked at as well.
    table.transfer(0, 1).is_over = true;
    assert_eq!(table.find_root_cause().cause.root, expected);
    // What was handed over just now may arrive.
    table.transfer(0, 1).still_ms = 10;
    assert_eq!(table.find_root_cause().cause.root, RootCause::Unknown);
    // What one end alone has reported decides nothing.
    table.transfer(0, 1).still_ms = 1500;
    table.transfer(1, 0).done = None;
    assert_eq!(table.find_root_cause().cause.root, RootCause::Unknown);
}

#[test]
fn a_network_that_the_sender_waited_for_nearly_all_the_time_is_slow() {
    let mut table = all_wait();
    *table.transfer(1, 1) = transfer(2, true, 7, Wait::Network, 30);
    *table.transfer(2, 0) = transfer(1, false, 6, Wait::PeerData, 20);
    // A step in flight at the moment of the look: every healthy network has such steps.
    assert_eq!(table.find_root_cause().cause.root, RootCause::Unknown);
    table.transfer(1, 1).network_ms = 1000;
    assert_eq!(table.find_root_cause().cause.root, RootCause::Unknown);
    table.transfer(1, 1).network_ms = 1800;
    let diagnosis = table.find_root_cause();
    let expected = RootCause::SlowNetwork {
        from: 1,
        to: 2,
        done: 6,
        steps: 88,
        is_moving: true,
    };
    assert_eq!(diagnosis.cause.root, expected);
    assert!(
        diagnosis.cause.text.starts_with(
            "the network from rank 1 (node-b) to rank 2 (node-c) is slow: rank 1 has handed"
        ),
        "{diagnosis:?}"
    );
    assert!(
        diagnosis
            .cause
            .text
            .contains("was what rank 1 waited for during 1.8 of 1.9 s"),
        "{diagnosis:?}"
    );
    // A rank that came late has begun late.
    table.transfer(1, 1).age_ms = 100;
    table.transfer(1, 1).network_ms = 100;
    assert_eq!(table.find_root_cause().cause.root, RootCause::Unknown);
}

#[test]
fn a_step_that_was_handed_over_just_now_blames_no_network() {
    let mut table = all_wait();
    // The device had paused for long.
    *table.transfer(0, 1) = transfer(1, true, 5, Wait::Network, 1500);
    table.transfer(0, 1).waits_ms = 1;
    assert_eq!(table.find_root_cause().cause.root, RootCause::Unknown);
    table.transfer(0, 1).waits_ms = 1500;
    assert!(matches!(
        table.find_root_cause().cause.root,
        RootCause::SlowNetwork {
            is_moving: false,
            ..
        }
    ));
}

#[test]
fn transfers_that_cannot_be_told_apart_or_are_not_all_known_decide_nothing() {
    let mut table = all_wait();
    table.transfer(0, 1).done = Some(9);
    let again = table.transfer(0, 1).clone();
    table.operation(0).transfers.push(again);
    assert_eq!(table.find_root_cause().cause.root, RootCause::Unknown);

    let mut table = all_wait();
    *table.transfer(1, 0) = transfer(0, false, 5, Wait::OwnGpuTakes, 1500);
    table.operation(2).is_incomplete = true;
    let diagnosis = table.find_root_cause();
    assert_eq!(diagnosis.cause.root, RootCause::Unknown);
    let evidence = diagnosis.cause.evidence.join("; ");
    assert!(
        evidence.contains("not all of its transfers are known"),
        "{evidence}"
    );
}

#[test]
fn the_one_device_that_does_not_take_what_has_arrived_is_named() {
    let mut table = all_wait();
    *table.transfer(1, 0) = transfer(0, false, 5, Wait::OwnGpuTakes, 1500);
    let diagnosis = table.find_root_cause();
    assert_eq!(diagnosis.rank, 1);
    let operation = String::from("all_reduce #2");
    assert_eq!(diagnosis.cause.root, RootCause::SlowRank { operation });
    assert!(
        diagnosis
            .cause
            .text
            .contains("data from rank 0 has arrived and was not taken for 1.5 s"),
        "{diagnosis:?}"
    );

    // Between ranks of one host data moves without being seen, and it may wait there.
    table.hosts[2] = table.hosts[1].clone();
    assert_eq!(table.find_root_cause().cause.root, RootCause::Unknown);
    table.hosts[2] = String::from("node-c");
    // Two ranks that wait for no other rank cannot be told apart.
    *table.transfer(2, 0) = transfer(1, false, 5, Wait::OwnGpuTakes, 1500);
    assert_eq!(table.find_root_cause().cause.root, RootCause::Unknown);
    // A rank that was not observed may be the cause.
    *table.transfer(2, 0) = transfer(1, false, 5, Wait::PeerData, 1500);
    table.reports.get_mut(&2).unwrap().inside = None;
    assert_eq!(table.find_root_cause().cause.root, RootCause::Unknown);
}

#[test]
fn the_one_kernel_that_has_not_started_is_named_also_within_a_host() {
    let mut table = all_wait();
    table.hosts = vec![String::from("node-a"); 3];
    for rank in 0..3 {
        let operation = table.operation(rank);
        (operation.kernel, operation.transfers) = (Some((2, 0)), Vec::new());
    }
    assert_eq!(table.find_root_cause().cause.root, RootCause::Unknown);
    table.operation(2).kernel = Some((0, 0));
    // A kernel that has ended needs nothing more.
    table.operation(1).kernel = Some((2, 2));
    assert_eq!(table.find_root_cause().cause.root, RootCause::Unknown);
    table.operation(1).kernel = Some((2, 0));
    let diagnosis = table.find_root_cause();
    assert_eq!(diagnosis.rank, 2);
    assert!(matches!(diagnosis.cause.root, RootCause::SlowRank { .. }));
    let evidence = diagnosis.cause.evidence.join("; ");
    for part in [
        "inside NCCL, ranks 0-1: AllReduce (RING, SIMPLE): its kernel runs on 2 of 2 channels",
        "inside NCCL, rank 2: AllReduce (RING, SIMPLE): its kernel has not started on any of 2 channels",
    ] {
        assert!(evidence.contains(part), "{evidence}");
    }
}

#[test]
fn what_was_not_observed_is_said_and_an_absent_rank_comes_first() {
    let mut table = all_wait();
    for rank in 0..3 {
        let operation = table.operation(rank);
        (operation.has_transfers, operation.transfers) = (false, Vec::new());
    }
    let evidence = table.find_root_cause().cause.evidence.join("; ");
    assert!(
        evidence.contains(
            "inside NCCL, ranks 0-2: AllReduce (RING, SIMPLE): it is enqueued, and no more of it was observed"
        ),
        "{evidence}"
    );
    let mut table = all_wait();
    table.transfer(0, 1).done = Some(9);
    table.reports.insert(2, entered(2, 1, true));
    let diagnosis = table.find_root_cause();
    assert!(matches!(
        diagnosis.cause.root,
        RootCause::NeverEntered { .. }
    ));
    let evidence = diagnosis.cause.evidence.join("; ");
    assert!(evidence.contains("inside NCCL, rank 1: "), "{evidence}");
    assert!(!evidence.contains("inside NCCL, rank 2: "), "{evidence}");
}
