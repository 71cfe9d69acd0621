//! Ranks that are killed with SIGKILL, and what is seen of it from outside.

use std::thread::JoinHandle;
use std::time::Instant;

use rustix::process::Signal;

use crate::client::{Stream, get};
use crate::program::{Server, signal};
use crate::{Outcome, Spread, Text, until};

/// As the server's `--recovery`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recovery {
    Respawn,
    Shrink,
    Elastic,
}

/// What deaths of one kind took, in seconds from before the signal was sent.
pub(crate) struct Death {
    pub(crate) model: &'static str,
    pub(crate) ranks: usize,
    /// How many parts the model has after it.
    pub(crate) parts: usize,
    pub(crate) recovery: Recovery,
    /// Texts that were being written.
    pub(crate) streams: usize,
    pub(crate) kills: usize,
    /// How often `/readyz` was seen to name rank, process and signal, and after how long; it was asked every millisecond.
    pub(crate) seen: usize,
    pub(crate) named: Option<Spread>,
    /// Until `/readyz` said 200, in another generation.
    pub(crate) ready: Spread,
    /// Until there were as many copies of each expert as before, or as many as ranks.
    pub(crate) whole: Option<Spread>,
    /// The longest time between two pieces of any of the texts.
    pub(crate) gap: Option<Spread>,
}

/// Kills ranks, at random and each time the same: of one server, or, where the dead are not replaced, of a server for each.
pub(crate) fn measure(
    ranks: usize,
    recovery: Recovery,
    streams: usize,
    kills: usize,
    text: &Text,
) -> Outcome<Death> {
    let (number, how) = (ranks.to_string(), format!("{recovery:?}").to_lowercase());
    let arguments = [
        "--ranks",
        &number,
        "--model",
        text.model,
        "--recovery",
        &how,
    ];
    let mut one = None;
    let (mut named, mut ready, mut gaps) = (Vec::new(), Vec::new(), Vec::new());
    let mut whole = Vec::new();
    let mut parts = 0;
    // In turn it would always be the one that coordinates: the dead come back as the last.
    let mut random = fastrand::Rng::with_seed(7);
    for kill in 0..kills {
        let server = one.take().unwrap_or_else(|| Server::start(&arguments));
        let copies = (recovery == Recovery::Elastic).then(|| 2.min(ranks - 1));
        let found = kill_one(&server, random.usize(..ranks), streams, kill, text, copies);
        named.extend(found.named);
        ready.push(found.ready);
        gaps.extend(found.gap);
        whole.extend(found.whole);
        parts = server.health()["parts"]
            .as_u64()
            .ok_or("no parts")?
            .try_into()?;
        if recovery == Recovery::Respawn {
            one = Some(server);
        }
    }
    let death = Death {
        model: text.model,
        ranks,
        parts,
        recovery,
        streams,
        kills,
        seen: named.len(),
        named: Spread::of(&named),
        ready: Spread::of(&ready).ok_or("no kills")?,
        whole: Spread::of(&whole),
        gap: Spread::of(&gaps),
    };
    eprintln!(
        "{} on {ranks} ranks, {how}, {streams} texts: ready again after {:.0} ms",
        text.model,
        death.ready.median * 1e3
    );
    Ok(death)
}

/// What one death took.
struct Found {
    named: Option<f64>,
    ready: f64,
    whole: Option<f64>,
    gap: Option<f64>,
}

/// `copies`: how many there are to be of each expert after that.
fn kill_one(
    server: &Server,
    rank: usize,
    streams: usize,
    seed: usize,
    text: &Text,
    copies: Option<usize>,
) -> Found {
    // Before the texts: `/health` asks all ranks for their recordings, and the texts wait meanwhile.
    let pid = server.ranks()[rank];
    let asking: Vec<_> = (0..streams)
        .map(|number| {
            let mut stream = Stream::new(&server.url, &text.body(seed * streams + number));
            stream.read(1);
            std::thread::spawn(move || longest_gap(stream))
        })
        .collect();
    let readyz = format!("{}/readyz", server.url);
    let generation = get(&readyz).json()["generation"].clone();
    let begun = Instant::now();
    signal(pid, Signal::KILL);
    let mut named = None;
    let ready = until("ready again", || {
        let answer = get(&readyz);
        let (json, took) = (answer.json(), begun.elapsed().as_secs_f64());
        if json["rank"] == rank && json["pid"] == pid && json["signal"] == "SIGKILL" {
            named.get_or_insert(took);
        }
        (answer.status == 200 && json["generation"] != generation).then_some(took)
    });
    let whole = copies.map(|copies| {
        until("all copies", || {
            let now = server.metric("inference_expert_copies ");
            (now >= copies as f64).then(|| begun.elapsed().as_secs_f64())
        })
    });
    // A text that breaks off is not what is measured.
    let join = |one: JoinHandle<f64>| one.join().expect("a whole text");
    let gaps = asking.into_iter().map(join);
    Found {
        named,
        ready,
        whole,
        gap: gaps.reduce(f64::max),
    }
}

/// Reads a text to its end.
fn longest_gap(mut stream: Stream) -> f64 {
    let (mut longest, mut last) = (0.0, Instant::now());
    let mut pieces = stream.pieces;
    while stream.next() {
        if stream.pieces > pieces {
            pieces = stream.pieces;
            longest = f64::max(longest, last.elapsed().as_secs_f64());
            last = Instant::now();
        }
    }
    assert!(stream.done, "no end after {:?}", stream.text);
    longest
}
