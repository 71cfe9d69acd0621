//! What comes over the wire may be anything.

use super::random::facts;
use crate::preflight::facts::Facts;
use crate::preflight::reach::{Door, Failure};
use crate::preflight::wire::{self, LONGEST_LIST, LONGEST_TEXT, Wire};
use nccl_base::report::{Finding, Report};

/// What is understood is written and read back.
fn again<T: Wire + PartialEq + std::fmt::Debug>(bytes: &[u8]) -> bool {
    let Ok(value) = wire::decode::<T>(bytes) else {
        return false;
    };
    assert_eq!(wire::decode::<T>(&wire::encode(&value)), Ok(value));
    true
}

#[test]
fn no_bytes_make_the_decoders_panic_or_keep_more_than_they_were_given() {
    let mut random = fastrand::Rng::with_seed(7);
    let mut seeds: Vec<Vec<u8>> = (0..20).map(|_| wire::encode(&facts(&mut random))).collect();
    let findings = (0..4).map(|number| {
        let mut finding = Finding::warning("check", format!("finding {number}")).fix("do it");
        finding.ranks = vec![1, 2, number];
        finding.hosts = vec![String::from("h")];
        finding
    });
    seeds.push(wire::encode(&Report::new(findings.collect())));
    let failure = Failure {
        source: String::from("10.0.0.1"),
        ..Failure::default()
    };
    seeds.push(wire::encode(&vec![failure; 3]));
    seeds.push(wire::encode(&Door::default()));
    let mut understood = 0;
    for _ in 0..20_000 {
        let mut bytes = random.choice(&seeds).unwrap().clone();
        for _ in 0..random.usize(0..4) {
            let at = random.usize(..bytes.len());
            match random.u8(..5) {
                0 => bytes[at] ^= 1 << random.u8(..8),
                1 => bytes[at] = *random.choice(&[0, 1, 0x7f, 0x80, 0xff][..]).unwrap(),
                2 => bytes.truncate(at.max(1)),
                3 => bytes.insert(at, random.u8(..)),
                _ => {
                    let other = random.choice(&seeds).unwrap();
                    bytes.splice(at.., other.iter().copied());
                }
            }
        }
        understood += usize::from(again::<Facts>(&bytes));
        understood += usize::from(again::<Report>(&bytes));
        understood += usize::from(again::<Vec<Failure>>(&bytes));
        understood += usize::from(again::<Door>(&bytes));
    }
    // Otherwise the mutations were too wild to get anywhere.
    assert!(understood > 5_000, "{understood}");
}

#[test]
fn what_is_too_long_is_cut_where_it_is_written_and_refused_where_it_is_read() {
    let text = "ü".repeat(LONGEST_TEXT);
    let back = wire::decode::<String>(&wire::encode(&text)).unwrap();
    assert_eq!(back.len(), LONGEST_TEXT);
    assert!(text.starts_with(&back));
    let list = vec![String::from("x"); LONGEST_LIST + 10];
    let back = wire::decode::<Vec<String>>(&wire::encode(&list)).unwrap();
    assert_eq!(back.len(), LONGEST_LIST);

    let mut bytes = ((LONGEST_TEXT + 1) as u64).to_le_bytes().to_vec();
    bytes.resize(8 + LONGEST_TEXT + 1, b'x');
    assert!(wire::decode::<String>(&bytes).is_err());
    let mut bytes = ((LONGEST_LIST + 1) as u64).to_le_bytes().to_vec();
    bytes.resize(8 + (LONGEST_LIST + 1) * 8, 0);
    assert!(wire::decode::<Vec<String>>(&bytes).is_err());
    // A promise of more than there is reserves nothing.
    assert!(wire::decode::<Vec<usize>>(&u64::MAX.to_le_bytes()).is_err());
}
