//! What the emulator's NCCL reports to a profiler plugin about data between hosts, and about operations that hang.

mod plugin;
mod ranks;

use nccl_sys::ncclDataType_t as Kind;
use plugin::*;
use ranks::{alone, api, nccl, processes, threads, wait_until};

/// Ranks of one process communicate over the network, as ranks of different hosts do.
const SOCKETS: [(&str, &str); 2] = [("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1")];
/// Each process counts as a host of its own.
const HOSTS: [(&str, &str); 1] = [("NCCL_HOSTID", "{rank}")];
/// Bytes that the emulator copies at a time.
const CHUNK: usize = 256 << 10;

#[test]
fn a_message_between_hosts_is_told_of_in_steps() {
    let name = "a_message_between_hosts_is_told_of_in_steps";
    processes(name, 2, &HOSTS, |process| {
        api();
        install(&[7]);
        let rank = process.join();
        assert_eq!(told().communicators[0].nodes, 2);
        let elements = 10 * CHUNK / 4 + 7;
        let (from, to) = (
            rank.memory(&vec![2f32; elements]),
            rank.memory(&vec![0f32; elements]),
        );
        exchange(&rank, &from, &to);
        rank.sync();
        assert_eq!(to.read()[elements - 1], 2.);
        wait_for_ends(PROXY_OP, 2);
        {
            let told = told();
            for event in told.of(PROXY_OP) {
                assert_eq!(event.peer, 1 - rank.rank);
                assert_eq!(event.pid, std::process::id());
                assert_eq!((event.steps, event.chunk as usize), (11, CHUNK));
                assert_eq!(states(&event), [IN_PROGRESS]);
                let task = &told.events[event.parent - 1];
                assert_eq!(task.kind, P2P);
                assert_eq!(task.function == "Send", event.is_send);
                let steps = told.below(&event, PROXY_STEP);
                let numbers: Vec<i32> = steps.iter().map(|step| step.step).collect();
                assert_eq!(numbers, (0..11).collect::<Vec<_>>());
                for step in &steps {
                    let wanted = match event.is_send {
                        true => [SEND_GPU_WAIT, SEND_PEER_WAIT, SEND_WAIT],
                        false => [RECV_WAIT, RECV_FLUSH_WAIT, RECV_GPU_WAIT],
                    };
                    assert_eq!(states(step), wanted);
                    let size = if step.step == 10 { 28 } else { CHUNK as u64 };
                    assert_eq!(step.states[2].1, size);
                    assert_eq!(step.stops, 1);
                }
            }
        }
        process.mark(&format!("done.{}", rank.rank));
        process.wait_for(&format!("done.{}", 1 - rank.rank));
        rank.destroy();
    });
}

#[test]
fn a_receive_that_hangs_is_in_the_state_of_waiting_for_its_peer() {
    let name = "a_receive_that_hangs_is_in_the_state_of_waiting_for_its_peer";
    processes(name, 3, &HOSTS, |process| {
        api();
        install(&[7]);
        let rank = process.join();
        let (from, to) = (rank.memory(&[1.; 100]), rank.memory(&[0.; 100]));
        let other = rank.memory(&[0.; 100]);
        // Connects all ranks.
        for _ in 0..2 {
            assert_eq!(
                rank.all_to_all(
                    &rank.memory(&[1.; 3]),
                    &rank.memory(&[0.; 3]),
                    Kind::ncclFloat32
                ),
                0
            );
        }
        rank.sync();
        wait_for_ends(PROXY_OP, 8);
        forget();
        if rank.rank == 0 {
            assert_eq!(nccl!(ncclGroupStart()), 0);
            assert_eq!(rank.receive(&to, Kind::ncclFloat32, 1), 0);
            assert_eq!(rank.receive(&other, Kind::ncclFloat32, 2), 0);
            assert_eq!(nccl!(ncclGroupEnd()), 0);
            assert!(!rank.is_idle());
            let op_of = |peer: i32| {
                let ops = told().of(PROXY_OP);
                ops.into_iter().find(|op| op.peer == peer).unwrap()
            };
            let waits = |peer: i32| {
                let op = op_of(peer);
                let steps = told().below(&op, PROXY_STEP);
                steps.len() == 1 && states(&steps[0]) == [RECV_WAIT]
            };
            wait_until("both wait", || waits(1) && waits(2));
            process.mark("waiting");
            // The operation with rank 1 ends; the one with rank 2 continues to wait.
            wait_until("one is over", || op_of(1).stops == 1);
            assert!(waits(2));
            assert_eq!(op_of(2).stops, 0);
            let channels = told().of(KERNEL_CH);
            let ended = channels.iter().filter(|channel| channel.stops == 1);
            assert_eq!((channels.len(), ended.count()), (2, 1));
            process.mark("seen");
            rank.sync();
            assert_eq!(op_of(2).stops, 1);
        } else {
            process.wait_for(if rank.rank == 1 { "waiting" } else { "seen" });
            assert_eq!(rank.send(&from, Kind::ncclFloat32, 0), 0);
            rank.sync();
        }
        process.mark(&format!("done.{}", rank.rank));
        (0..3).for_each(|other| process.wait_for(&format!("done.{other}")));
        rank.destroy();
    });
}

#[test]
fn a_send_whose_peer_does_not_receive_waits_for_the_peer_and_is_not_stopped_by_an_abort() {
    let name =
        "a_send_whose_peer_does_not_receive_waits_for_the_peer_and_is_not_stopped_by_an_abort";
    processes(name, 2, &HOSTS, |process| {
        api();
        install(&[5]);
        let rank = process.join();
        let (from, to) = (rank.memory(&[1.; 100]), rank.memory(&[0.; 100]));
        exchange(&rank, &from, &to);
        rank.sync();
        wait_for_ends(PROXY_OP, 2);
        forget();
        if rank.rank == 0 {
            assert_eq!(rank.send(&from, Kind::ncclFloat32, 1), 0);
            wait_until("it waits", || {
                rank.is_idle();
                let steps = told().of(PROXY_STEP);
                steps.len() == 1 && states(&steps[0]) == [SEND_GPU_WAIT, SEND_PEER_WAIT]
            });
            assert_eq!(rank.abort(), 0);
            let told = told();
            assert!(told.of(PROXY_STEP)[0].stops == 0 && told.of(PROXY_OP)[0].stops == 0);
            assert_eq!(told.of(KERNEL_CH)[0].stops, 0);
            assert!(told.communicators[0].is_finalized);
            process.mark("aborted");
        } else {
            process.wait_for("aborted");
            assert_eq!(rank.abort(), 0);
        }
    });
}

#[test]
fn a_collective_that_lacks_a_rank_shows_how_far_each_of_the_others_came() {
    let name = "a_collective_that_lacks_a_rank_shows_how_far_each_of_the_others_came";
    alone(name, &SOCKETS, || {
        api();
        install(&[7]);
        let missing = 1;
        let seen = std::sync::Barrier::new(4);
        threads(4, |rank| {
            let memory = rank.memory(&vec![1.; 1 << 20]);
            sum(rank, &memory);
            rank.sync();
            if seen.wait().is_leader() {
                wait_for_ends(PROXY_OP, 8);
                forget();
            }
            seen.wait();
            if rank.rank == missing {
                seen.wait();
                sum(rank, &memory);
                return;
            }
            sum(rank, &memory);
            let steps_of = |is_send: bool| {
                let told = told();
                let op = told
                    .of(PROXY_OP)
                    .into_iter()
                    .find(|op| op.rank == rank.rank && op.is_send == is_send)?;
                assert_eq!(op.steps, 6);
                Some(told.below(&op, PROXY_STEP))
            };
            // Rank 2 has received nothing, rank 3 one step, rank 0 two.
            let received = (rank.rank + 4 - missing - 1) % 4;
            wait_until("the others have come as far as they can", || {
                rank.is_idle();
                let Some(steps) = steps_of(false) else {
                    return false;
                };
                let over = steps.iter().filter(|step| step.stops == 1).count();
                over == received as usize && steps.len() == 6
            });
            std::thread::sleep(std::time::Duration::from_millis(30));
            let steps = steps_of(false).unwrap();
            assert!(states(&steps[received as usize]) == [RECV_WAIT]);
            let sent = steps_of(true).unwrap();
            let over = sent.iter().filter(|step| step.stops == 1).count();
            let can = if rank.rank == 0 { 0 } else { received + 1 };
            assert_eq!(over, can as usize, "rank {}", rank.rank);
            if rank.rank == 0 {
                assert_eq!(states(&sent[0]), [SEND_GPU_WAIT, SEND_PEER_WAIT]);
            }
            seen.wait();
        });
        wait_for_ends(PROXY_OP, 8);
        assert!(told().of(PROXY_STEP).iter().all(|step| step.stops == 1));
    });
}
