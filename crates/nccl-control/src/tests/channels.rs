//! Ordered messages: one order for all ranks, bounded buffers, and one end.

use super::*;

const LONG: Duration = Duration::from_secs(20);

fn worlds<R: Send>(name: &'static str, size: usize, body: impl Fn(World) -> R + Sync) -> Vec<R> {
    let body = &body;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                scope.spawn(move || body(World::join(rendezvous(name, rank, size)).unwrap()))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn what_all_ranks_send_comes_to_all_in_one_order() {
    const EACH: usize = 300;
    let heard = worlds("order", 3, |world| {
        let steps = world.channel("steps");
        let heard = std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 0..EACH {
                    steps
                        .send(&[world.rank() as u8, (n >> 8) as u8, n as u8])
                        .unwrap();
                }
            });
            let heard: Vec<_> = (0..2 * EACH)
                .map(|_| steps.recv(LONG).unwrap().expect("a message"))
                .collect();
            heard
        });
        world.barrier("end").unwrap();
        heard
    });
    // Two receivers got their common messages in the same order.
    for (a, b) in [(0, 1), (1, 2), (0, 2)] {
        let third = 3 - a - b;
        let of_third = |rank: usize| -> Vec<_> {
            let messages = heard[rank].iter();
            messages.filter(|message| message.from == third).collect()
        };
        assert_eq!(of_third(a).len(), EACH);
        assert_eq!(of_third(a), of_third(b));
        for (n, message) in of_third(a).iter().enumerate() {
            assert_eq!(message.bytes[..], [third as u8, (n >> 8) as u8, n as u8]);
        }
    }
}

#[test]
fn two_receivers_hear_two_senders_in_one_order() {
    let heard = worlds("one-order", 4, |world| {
        let steps = world.channel("steps");
        world.barrier("start").unwrap();
        let mut heard = Vec::new();
        std::thread::scope(|scope| {
            if world.rank() < 2 {
                scope.spawn(|| {
                    (0..200u8).for_each(|n| steps.send(&[world.rank() as u8, n]).unwrap())
                });
            }
            // A sender receives the other sender's messages.
            let count = if world.rank() < 2 { 200 } else { 400 };
            for _ in 0..count {
                heard.push(steps.recv(LONG).unwrap().expect("a message").bytes);
            }
        });
        world.barrier("end").unwrap();
        heard
    });
    assert_eq!(heard[2].len(), 400);
    assert_eq!(heard[2], heard[3]);
}

#[test]
fn a_sender_waits_for_the_slowest_and_names_it_in_vain() {
    worlds("slow", 3, |world| {
        let steps = world.channel("steps");
        match world.rank() {
            0 => {
                for n in 0..64u8 {
                    steps.send(&[n]).unwrap();
                }
                let begun = Instant::now();
                let hasty = world.with_timeout(Duration::from_millis(200));
                let error = hasty
                    .channel("steps")
                    .send(b"no room")
                    .unwrap_err()
                    .to_string();
                let after = begun.elapsed();
                assert!(
                    after >= Duration::from_millis(200) && after < LONG / 2,
                    "{after:?}"
                );
                for word in [
                    "rank 2 of 3",
                    "channel/steps",
                    "64 messages wait",
                    "phase \"think\"",
                ] {
                    assert!(error.contains(word), "{word:?} in {error:?}");
                }
                // Another channel has its own room.
                hasty.channel("other").send(b"x").unwrap();
                hasty.barrier("named").unwrap();
                // Rank 2 takes a quarter of the capacity, which is reported at once, and that many messages fit.
                let patient = hasty.with_timeout(LONG);
                for n in 64..80u8 {
                    patient.channel("steps").send(&[n]).unwrap();
                }
                patient.barrier("end").unwrap();
            }
            rank => {
                if rank == 2 {
                    world.phase("think");
                    world.barrier("named").unwrap();
                }
                for n in 0..80u8 {
                    let message = steps.recv(LONG).unwrap().expect("a message");
                    assert_eq!((message.from, &message.bytes[..]), (0, &[n][..]));
                    if rank == 1 && n == 63 {
                        world.barrier("named").unwrap();
                    }
                }
                assert_eq!(
                    world.channel("other").recv(LONG).unwrap().unwrap().bytes[..],
                    *b"x"
                );
                world.barrier("end").unwrap();
            }
        }
    });
}

#[test]
fn when_a_rank_goes_all_get_what_was_sent_before_and_then_one_cause() {
    for odd in [0, 1] {
        let name = ["gone-0", "gone-1"][odd];
        let heard = std::sync::Barrier::new(3);
        let said = worlds(name, 4, |world| {
            let steps = world.channel("steps");
            if world.rank() == odd {
                for n in 0..5u8 {
                    steps.send(&[n]).unwrap();
                }
                world.fail(&std::io::Error::other("no more tokens"));
                return String::new();
            }
            for n in 0..5u8 {
                assert_eq!(steps.recv(LONG).unwrap().unwrap().bytes[..], [n]);
            }
            let error = steps.recv(LONG).unwrap_err().to_string();
            assert_eq!(steps.recv(LONG).unwrap_err().to_string(), error);
            let sending = steps.send(b"x").unwrap_err().to_string();
            assert!(sending.contains("no more tokens"), "{sending}");
            heard.wait();
            error
        });
        let said: Vec<_> = said.into_iter().filter(|text| !text.is_empty()).collect();
        assert_eq!(said.len(), 3);
        assert!(said.iter().all(|text| *text == said[0]), "{said:#?}");
        let who = format!("rank {odd} (");
        assert!(
            said[0].contains(&who) && said[0].contains("no more tokens"),
            "{said:?}"
        );
    }
}

#[test]
fn a_message_has_its_limits() {
    let world = World::single();
    let steps = world.channel("steps");
    let error = steps.send(&vec![0; (1 << 20) + 1]).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Io { .. }), "{error}");
    assert!(steps.send_to(1, b"x").is_err());
    steps.send_to(0, &vec![7; 1 << 20]).unwrap();
    assert_eq!(
        steps.recv(Duration::ZERO).unwrap().unwrap().bytes.len(),
        1 << 20
    );
}

#[test]
fn a_receiver_that_is_cut_off_learns_from_whom_whichever_rank_coordinates() {
    use crate::departure::UnfinishedExchange;

    // All ranks stay in the world until the end of this test.
    let worlds = worlds("channel-cut", 3, |world| world);
    let why = "rank 2 coordinates now, and the others continue without this rank";
    let inbox = &worlds[1].session.inbox;
    inbox.set_coordinator(2, false);
    inbox.cut_off(vec![0, 2], why);
    let error = worlds[1].channel("steps").recv(LONG).unwrap_err();
    let text = error.to_string();
    assert!(text.contains(why) && !text.contains("rank 0"), "{text}");
    let cut_off = UnfinishedExchange::CutOff {
        from: vec![0, 2],
        why: why.to_owned(),
    };
    assert_eq!(error.unfinished(), Some(&cut_off));
}
