//! A coordinator that dies between two sends.

use super::*;
use crate::inbox::Notice;
use crate::sync::Mutex;

/// The coordinator dies between two sends: some ranks have received the message, and some have not.
#[test]
fn a_coordinator_that_dies_between_two_sends_leaves_one_order_on_all_others() {
    for (speaker, sends) in [(1, 0), (1, 1), (1, 2), (1, 3), (3, 0), (3, 1), (3, 2)] {
        let name = format!("between-{speaker}-{sends}");
        let joining: Vec<_> = (0..4)
            .map(|rank| {
                let meet = rendezvous(&name, rank, 4);
                std::thread::spawn(move || World::join(meet).unwrap())
            })
            .collect();
        let worlds: Vec<_> = joining
            .into_iter()
            .map(|rank| rank.join().unwrap())
            .collect();
        let heard: Vec<_> = worlds[1..]
            .iter()
            .map(|world| {
                let heard = Arc::new(Mutex::new(Vec::new()));
                let hearing = Arc::clone(&heard);
                world.session.on_notice(move |notice| {
                    let text = match notice {
                        Notice::Announced { topic, from, .. } if topic == "fault/x" => {
                            format!("fault of rank {from}")
                        }
                        Notice::Departed { rank, departure } => format!("rank {rank}: {departure}"),
                        Notice::CutOff { why, .. } => why.clone(),
                        _ => return,
                    };
                    hearing.lock().push(text);
                });
                heard
            })
            .collect();
        worlds[0].session.die_after_for_a_test(sends);
        let begun = Instant::now();
        worlds[speaker].session.announce("fault/x", b"it failed");
        while heard.iter().any(|heard| heard.lock().len() < 2) {
            let so_far: Vec<_> = heard.iter().map(|heard| heard.lock().clone()).collect();
            assert!(begun.elapsed() < Duration::from_secs(10), "{so_far:#?}");
            std::thread::sleep(Duration::from_millis(1));
        }
        let first = heard[0].lock().clone();
        println!("{sends} sends, after {:?}: {first:?}", begun.elapsed());
        let fault = first
            .iter()
            .position(|text| *text == format!("fault of rank {speaker}"));
        // A message that no rank had received is sent after the report of the death.
        assert_eq!(fault, Some(usize::from(sends == 0)), "{first:?}");
        let death = format!("rank 0: its process (pid {}) ended", std::process::id());
        assert!(
            first.iter().any(|text| text.starts_with(&death)),
            "{first:?}"
        );
        for other in &heard[1..] {
            assert_eq!(*other.lock(), first);
        }
        for world in &worlds[1..] {
            assert_eq!(world.session.coordinator(), 1);
        }
    }
}

/// Otherwise, the rank that collects the reports would conclude that the rank that has reported does not answer.
#[test]
fn what_was_said_to_one_rank_alone_outlives_the_coordinator() {
    let joining: Vec<_> = (0..4)
        .map(|rank| {
            let meet = rendezvous("alone", rank, 4);
            std::thread::spawn(move || World::join(meet).unwrap())
        })
        .collect();
    let worlds: Vec<_> = joining
        .into_iter()
        .map(|rank| rank.join().unwrap())
        .collect();
    let (told, heard) = std::sync::mpsc::channel();
    worlds[2].session.on_notice(move |notice| {
        if let Notice::Direct { from, topic, bytes } = notice {
            let _ = told.send((*from, topic.clone(), bytes.to_vec()));
        }
    });
    // Rank 0 dies before it has forwarded anything.
    worlds[0].session.die_after_for_a_test(0);
    for (rank, text) in [(1, b"stuck"), (3, b"ahead")] {
        worlds[rank]
            .session
            .send_direct(2, "report/x", text.to_vec());
    }
    let mut all: Vec<_> = (0..2)
        .map(|_| heard.recv_timeout(Duration::from_secs(10)).unwrap())
        .collect();
    all.sort();
    let said = |from, text: &[u8]| (from, String::from("report/x"), text.to_vec());
    assert_eq!(all, [said(1, b"stuck"), said(3, b"ahead")]);
    assert_eq!(worlds[2].session.coordinator(), 1);
}
