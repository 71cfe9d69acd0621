//! One death as a picture: when the pieces of each text came, and what the ranks did meanwhile.

use std::fmt::Write;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::client::{Stream, get};
use crate::program::{Server, signal};
use crate::{Outcome, Text, until};

const TEXTS: usize = 4;
/// How much is drawn, before and after the death.
const BEFORE: Duration = Duration::from_millis(250);
const AFTER: Duration = Duration::from_millis(750);

/// What was seen, in time since the death.
struct Timeline {
    /// When each piece of each text came; before it, in negative seconds.
    pieces: Vec<Vec<f64>>,
    ready: f64,
    whole: f64,
}

/// Kills one of eight ranks of an elastic server; the picture of it.
pub(crate) fn draw() -> Outcome<String> {
    let server = Server::start(&["--ranks", "8", "--recovery", "elastic"]);
    // Before the texts: `/health` asks all ranks for their recordings, and the texts wait meanwhile.
    let pid = server.ranks()[5];
    let text = Text::tiny(400);
    let reading: Vec<_> = (0..TEXTS)
        .map(|number| {
            let mut stream = Stream::new(&server.url, &text.body(number));
            stream.read(1);
            std::thread::spawn(move || pieces(stream))
        })
        .collect();
    std::thread::sleep(BEFORE + Duration::from_millis(100));
    let readyz = format!("{}/readyz", server.url);
    let generation = get(&readyz).json()["generation"].clone();
    let killed = Instant::now();
    signal(pid, Signal::KILL);
    let ready = until("ready again", || {
        let answer = get(&readyz);
        let is_next = answer.status == 200 && answer.json()["generation"] != generation;
        is_next.then(|| killed.elapsed().as_secs_f64())
    });
    let whole = until("all copies", || {
        let copies = server.metric("inference_expert_copies ");
        (copies >= 2.0).then(|| killed.elapsed().as_secs_f64())
    });
    let since = |at: Instant| match at.checked_duration_since(killed) {
        Some(after) => after.as_secs_f64(),
        None => -killed.duration_since(at).as_secs_f64(),
    };
    let texts = reading.into_iter().map(|one| one.join().expect("a text"));
    let pieces = texts.map(|pieces| pieces.into_iter().map(since).collect());
    let timeline = Timeline {
        pieces: pieces.collect(),
        ready,
        whole,
    };
    Ok(timeline.svg())
}

/// When each piece of a text comes.
fn pieces(mut stream: Stream) -> Vec<Instant> {
    let (mut at, mut known) = (Vec::new(), stream.pieces);
    while stream.next() {
        if stream.pieces > known {
            known = stream.pieces;
            at.push(Instant::now());
        }
    }
    at
}

impl Timeline {
    fn svg(&self) -> String {
        const WIDTH: f64 = 960.0;
        /// For the last label, which may begin near the end.
        const RIGHT: f64 = 160.0;
        const LEFT: f64 = 70.0;
        const ROW: f64 = 34.0;
        const TOP: f64 = 64.0;
        let (first, last) = (-BEFORE.as_secs_f64(), AFTER.as_secs_f64());
        let x = |time: f64| LEFT + (time - first) / (last - first) * (WIDTH - LEFT - RIGHT);
        let bottom = TOP + ROW * self.pieces.len() as f64;
        let height = bottom + 46.0;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n"
        );
        let mut add = |text: std::fmt::Arguments<'_>| {
            // Writing to a string cannot fail.
            let _ = svg.write_fmt(text);
            svg.push('\n');
        };
        let spans = [
            (0.0, self.ready, "#f6d5d5"),
            (self.ready, self.whole, "#fdf3d0"),
        ];
        for (from, to, color) in spans {
            let (from, to) = (x(from), x(to.min(last)));
            let width = to - from;
            let tall = bottom - TOP;
            add(format_args!(
                "<rect x=\"{from:.1}\" y=\"{TOP}\" width=\"{width:.1}\" height=\"{tall}\" fill=\"{color}\"/>"
            ));
        }
        for (number, pieces) in self.pieces.iter().enumerate() {
            let y = TOP + ROW * (number as f64 + 0.5);
            let label = y + 4.0;
            add(format_args!(
                "<text x=\"10\" y=\"{label}\">text {}</text>",
                number + 1
            ));
            for time in pieces.iter().filter(|time| (first..last).contains(*time)) {
                let x = x(*time);
                let (high, low) = (y - 9.0, y + 9.0);
                add(format_args!(
                    "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{high}\" y2=\"{low}\" stroke=\"#1f5fa8\"/>"
                ));
            }
        }
        let marks = [
            (0.0, String::from("a rank is killed"), 14.0),
            (
                self.ready,
                format!("7 ranks serve: {:.0} ms", self.ready * 1e3),
                30.0,
            ),
            (
                self.whole,
                format!("two copies of each expert: {:.0} ms", self.whole * 1e3),
                46.0,
            ),
        ];
        for (time, label, y) in marks {
            let x = x(time.min(last));
            let (from, text) = (y + 3.0, x + 4.0);
            add(format_args!(
                "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{from}\" y2=\"{bottom}\" stroke=\"#a02020\"/>\
                 <text x=\"{text:.1}\" y=\"{y}\">{label}</text>"
            ));
        }
        for tenth in -2..=7 {
            let time = f64::from(tenth) / 10.0;
            let (x, y) = (x(time), bottom + 18.0);
            add(format_args!(
                "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{} ms</text>",
                tenth * 100
            ));
        }
        let y = bottom + 38.0;
        add(format_args!(
            "<text x=\"{LEFT}\" y=\"{y}\" fill=\"#555\">each line is a piece of a text as its client got it; eight ranks as processes on two CPU cores</text>"
        ));
        svg.push_str("</svg>\n");
        svg
    }
}
