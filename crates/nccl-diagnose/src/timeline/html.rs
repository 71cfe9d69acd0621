//! One self-contained page: it loads no other file, and nothing from the network.
//!
//! The tables need no JavaScript; the script in `page.html` draws the picture from a block of JSON. Every name that a
//! program, a file or another process gave goes through [`text`] or [`data`].

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::layout::Layout;
use super::{Timeline, describe};
use crate::operation::OperationKind;
use nccl_core::recorder::{CallState, Snapshot};

const PAGE: &str = include_str!("page.html");

impl Timeline {
    /// Returns one page of HTML: a lane for each rank and communicator, the last call of each rank, and the ranks that
    /// are behind. The page loads nothing.
    ///
    /// ```
    /// let timeline = nccl::recorder::Timeline::merge(vec![nccl::recorder::snapshot()])?;
    /// let page = timeline.to_html();
    /// assert!(page.contains("What each rank did last"));
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn to_html(&self) -> String {
        let layout = Layout::of(self);
        let mut page = String::with_capacity(PAGE.len() + 4096);
        let mut rest = PAGE;
        // Each placeholder once, in the order of the page: inserted text is not searched again.
        while let Some((before, after)) = rest.split_once("{{") {
            page.push_str(before);
            let Some((name, after)) = after.split_once("}}") else {
                break;
            };
            match name {
                "title" => page.push_str(&text(&self.title())),
                "facts" => page.push_str(&self.facts(&layout)),
                "standings" => page.push_str(&self.standings_table()),
                "last" => page.push_str(&self.last_table()),
                "clocks" => page.push_str(&self.clocks_table()),
                "data" => page.push_str(&data(&self.picture(&layout))),
                unknown => unreachable!("the page has no place {unknown:?}"),
            }
            rest = after;
        }
        page.push_str(rest);
        page
    }

    fn title(&self) -> String {
        let job = match self.job.is_empty() {
            true => String::new(),
            false => format!("{}, ", self.job),
        };
        let all = self.ranks.len() + self.missing.len();
        let ranks = match self.missing.is_empty() {
            true => format!("{all} ranks"),
            false => format!("{} of {all} ranks", self.ranks.len()),
        };
        format!("{job}generation {}, {ranks}", self.generation)
    }

    fn facts(&self, layout: &Layout<'_>) -> String {
        let seconds = (layout.start + layout.end).div_euclid(1_000_000_000);
        let mut html = String::new();
        let ranks = self.ranks.len() + self.missing.len();
        let _ = write!(
            html,
            "<p>Recordings of {} of {ranks} ranks, the latest taken <time data-unix=\"{seconds}\">{seconds} s \
             after 1970</time>. Times are those of {}.</p>",
            self.ranks.len(),
            text(&self.reference)
        );
        for rank in &self.missing {
            let _ = write!(
                html,
                "<p class=bad>No recording of <b>{}</b>: {}</p>",
                text(&rank.who()),
                text(&rank.why)
            );
        }
        for why in self.left_out.iter().take(20) {
            let _ = write!(html, "<p class=warn>Left out: {}</p>", text(why));
        }
        let mut reasons: Vec<_> = self
            .ranks
            .iter()
            .filter_map(|rank| rank.snapshot.reason.as_deref())
            .collect();
        reasons.sort_unstable();
        reasons.dedup();
        for reason in reasons.iter().take(8) {
            let _ = write!(
                html,
                "<p class=bad>Written because of a fault: {}</p>",
                text(reason)
            );
        }
        html
    }

    fn standings_table(&self) -> String {
        let mut html = String::new();
        for standing in self.standings() {
            let class = match standing.behind.is_empty() {
                true => "",
                false => " class=behind",
            };
            let _ = write!(
                html,
                "<tr{class}><td>{}<td>{}<td><code>{}</code><td>{}",
                text(&standing.communicator),
                standing.generation,
                text(standing.key.as_deref().map_or("", short)),
                text(&standing.sentence)
            );
        }
        html
    }

    fn last_table(&self) -> String {
        let mut rows: Vec<(usize, String)> = Vec::new();
        for rank in &self.ranks {
            let mut html = String::new();
            let (class, did) = last(&rank.snapshot);
            let phase = rank.snapshot.notes.iter().rev().find(|note| note.is_phase);
            let note = rank.snapshot.notes.iter().rev().find(|note| !note.is_phase);
            let _ = write!(
                html,
                "<tr{class}><td>{}<td>{}<td>{}<td>{}",
                text(&rank.who()),
                text(&did),
                text(phase.map_or("", |phase| &phase.text)),
                text(note.map_or("", |note| &note.text))
            );
            rows.push((rank.rank, html));
        }
        for rank in &self.missing {
            let html = format!(
                "<tr class=gone><td>{}<td colspan=3>{}",
                text(&rank.who()),
                text(&rank.why)
            );
            rows.push((rank.rank, html));
        }
        rows.sort_by_key(|(rank, _)| *rank);
        rows.into_iter().map(|(_, html)| html).collect()
    }

    fn clocks_table(&self) -> String {
        let mut html = String::new();
        for rank in &self.ranks {
            // The numbers come from a file.
            let communicators = rank.snapshot.communicators.iter();
            let cut = communicators.fold(0_usize, |cut, one| cut.saturating_add(one.left_out));
            let cut = match cut.saturating_add(rank.snapshot.notes_left_out) {
                0 => String::new(),
                _ => format!(
                    "{cut} older calls and {} notes left out for want of room",
                    rank.snapshot.notes_left_out
                ),
            };
            let _ = write!(
                html,
                "<tr><td>{}<td>{}<td>{}",
                text(&rank.who()),
                text(&describe::clock(&rank.clock)),
                text(&cut)
            );
        }
        html
    }

    /// The data that the script draws.
    fn picture(&self, layout: &Layout<'_>) -> Value {
        let micro = |nanoseconds: i128| nanoseconds as f64 / 1000.0;
        let ranks: Vec<_> = self
            .ranks
            .iter()
            .map(|rank| json!([rank.who(), describe::clock(&rank.clock), rank.rank]))
            .collect();
        let lanes: Vec<_> = layout
            .lanes
            .iter()
            .map(|lane| {
                let bars: Vec<_> = lane
                    .bars
                    .iter()
                    .map(|bar| {
                        let call = bar.call;
                        json!([
                            bar.row,
                            micro(bar.start),
                            micro(bar.end),
                            color_of(call.kind),
                            state_of(call.state),
                            call.sequence,
                            call.kind.to_string(),
                            describe::fingerprint(lane.recording, call),
                            bar.index,
                        ])
                    })
                    .collect();
                let stream = format!("{:#x}", lane.stream);
                json!({
                    "rank": lane.rank, "comm": lane.communicator, "name": lane.recording.name,
                    "life": lane.recording.life, "reason": lane.recording.reason,
                    "stream": stream, "rows": lane.rows, "bars": bars,
                })
            })
            .collect();
        let marks: Vec<_> = layout
            .marks
            .iter()
            .map(|mark| {
                json!([
                    mark.rank,
                    micro(mark.at),
                    mark.text,
                    u8::from(mark.is_phase)
                ])
            })
            .collect();
        let missing: Vec<_> = self
            .missing
            .iter()
            .map(|rank| {
                let text = format!("{}: no recording: {}", rank.who(), rank.why);
                json!([rank.rank, text])
            })
            .collect();
        json!({
            "end": micro(layout.end), "ranks": ranks, "lanes": lanes, "marks": marks, "missing": missing,
        })
    }
}

/// The class of a row, and the last call of a rank.
fn last(snapshot: &Snapshot) -> (&'static str, String) {
    let calls = snapshot
        .communicators
        .iter()
        .filter_map(|recording| Some((recording, recording.calls.last()?)));
    let Some((recording, call)) = calls.max_by_key(|(_, call)| call.since) else {
        return ("", String::from("no call"));
    };
    let now = snapshot
        .taken
        .duration_since(snapshot.origin)
        .unwrap_or_default();
    let ago = describe::span(now.saturating_sub(call.since));
    let operation = match &call.operations[..] {
        [] => String::new(),
        [one] => format!(" ({})", describe::operation(one)),
        [first, rest @ ..] => format!(" ({} and {} more)", describe::operation(first), rest.len()),
    };
    let class = match call.state {
        CallState::Failed | CallState::Aborted => " class=bad",
        state if describe::is_open(state) => " class=open",
        _ => "",
    };
    let mut did = format!(
        "{} on \"{}\"{operation}: called {ago} before, {}",
        describe::title(call),
        recording.name,
        describe::state(call.state)
    );
    if let Some(span) = &call.span {
        let _ = write!(did, ", in {}", describe::in_span(span));
    }
    if let Some(inside) = &call.inside_nccl {
        let _ = write!(did, "; inside NCCL, {inside}");
    }
    if let Some(reason) = &recording.reason {
        let _ = write!(did, "; the communicator is {}: {reason}", recording.life);
    }
    (class, did)
}

/// The number of the page's colour for an operation.
fn color_of(kind: OperationKind) -> u8 {
    use OperationKind::{
        AllGather, AllReduce, AllToAll, AllToAllV, Broadcast, Capture, Gather, Group, Recv, Reduce,
        ReduceScatter, Replay, Scatter, Send,
    };
    match kind {
        AllReduce | Reduce => 0,
        AllGather | Gather => 1,
        ReduceScatter | Scatter => 2,
        Broadcast => 3,
        AllToAll | AllToAllV => 4,
        Group | Send | Recv => 5,
        Capture | Replay => 6,
        _ => 7,
    }
}

/// The number of the page's style for a state.
fn state_of(state: CallState) -> u8 {
    match state {
        CallState::Done => 0,
        CallState::Failed => 2,
        CallState::Aborted => 3,
        _ => 1,
    }
}

/// The part of a key that a reader compares.
fn short(key: &str) -> &str {
    key.char_indices()
        .nth(8)
        .map_or(key, |(end, _)| &key[..end])
}

/// Escapes text between tags or in a quoted attribute.
fn text(text: &str) -> String {
    let mut html = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => html.push_str("&amp;"),
            '<' => html.push_str("&lt;"),
            '>' => html.push_str("&gt;"),
            '"' => html.push_str("&quot;"),
            '\'' => html.push_str("&#39;"),
            // Not allowed in a page, and useless to a reader.
            '\0'..='\u{8}' | '\u{b}' | '\u{c}' | '\u{e}'..='\u{1f}' => html.push('\u{fffd}'),
            other => html.push(other),
        }
    }
    html
}

/// JSON inside of a `script` element: it must not contain an end tag or a comment mark.
fn data(value: &Value) -> String {
    let json = value.to_string();
    // Outside of strings JSON has none of these characters.
    let json = json.replace('<', "\\u003c").replace('>', "\\u003e");
    json.replace('&', "\\u0026")
        .replace('\u{2028}', "\\u2028")
        .replace('\u{2029}', "\\u2029")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_program_named_cannot_become_markup() {
        let name = "</script><b>&\"' \u{2028}";
        assert_eq!(
            text(name),
            "&lt;/script&gt;&lt;b&gt;&amp;&quot;&#39; \u{2028}"
        );
        let json = data(&json!({ "name": name }));
        assert!(!json.contains(['<', '>', '&', '\u{2028}']), "{json}");
        let read: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(read["name"], name);
    }
}
