//! Parses a line of a file into NCCL's text and its origin.
//!
//! NCCL writes `HOST:PID:TID [DEVICE] NCCL INFO TEXT`, and before a warning's mark also the place in its source:
//! `HOST:PID:TID [DEVICE] init.cc:2955 (function) NCCL WARN TEXT`, with the time in front since 2.26. Launchers and log
//! collectors add more in front: rank, container, colour, time. NCCL's line may follow the unfinished line of another
//! program.
//!
//! The parser finds the mark first, and reads the prefix from there to the left; text without a prefix is not NCCL's. A
//! prefix never reaches beyond the mark before it, so that the time of parsing grows linearly with the line.

use super::tokens::number;

/// The level of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// Also `ATTN` of 2.32, which is no error.
    Info,
    Warn,
    /// `CALL` and `TRACE`: builds for NCCL's own developers.
    Trace,
}

/// One of NCCL's lines, parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record<'a> {
    /// The text before the prefix: times and tags of launchers and collectors.
    pub(super) lead: &'a str,
    /// Empty when host, process and thread were removed from the log.
    pub(super) host: &'a str,
    pub(super) pid: u32,
    pub(super) tid: u32,
    /// The current device; some releases print garbage there.
    pub(super) device: Option<u32>,
    pub(super) level: Level,
    /// The place of a warning in NCCL's source.
    pub(super) place: &'a str,
    pub(super) text: &'a str,
}

/// The longest prefix: a host's name, three numbers, a file and a function.
const LONGEST_PREFIX: usize = 512;

const MARK: &str = "NCCL ";

/// NCCL's part of a line.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Parts<'a> {
    pub(super) records: Vec<Record<'a>>,
    /// `NCCL version …` without a prefix, as rank 0 prints it below `INFO`.
    pub(super) version: Option<&'a str>,
    /// Whether there is a mark without a prefix: a partial line.
    pub(super) broken: bool,
}

/// Parses a line; it may contain several records, when ranks wrote at the same time.
pub(super) fn parse(line: &str) -> Parts<'_> {
    let mut parts = Parts::default();
    let mut from = 0;
    let mut after_mark = 0;
    while let Some(found) = line[from..].find(MARK) {
        let mark = from + found;
        from = mark + MARK.len();
        let rest = &line[from..];
        let Some((level, length)) = level(rest) else {
            if rest.starts_with("version ") && parts.version.is_none() {
                parts.version = Some(&line[mark..]);
            }
            continue;
        };
        match prefix(window(&line[after_mark..mark]), level) {
            Some(mut record) => {
                if let Some(previous) = parts.records.last_mut() {
                    // The text of the previous record ends where this record begins.
                    let start = offset(line, record.lead) + record.lead.len();
                    previous.text = line[offset(line, previous.text)..start].trim_end();
                    record.lead = "";
                }
                from += length;
                record.text = line[from..].trim_end();
                parts.records.push(record);
            }
            None => {
                parts.broken |= parts.records.is_empty();
                from += length;
            }
        }
        after_mark = from;
    }
    if !parts.records.is_empty() {
        (parts.version, parts.broken) = (None, false);
    }
    parts
}

/// The offset of `part` within `line`.
fn offset(line: &str, part: &str) -> usize {
    part.as_ptr() as usize - line.as_ptr() as usize
}

/// The level, and its length in bytes.
fn level(rest: &str) -> Option<(Level, usize)> {
    let word = rest.split_whitespace().next()?;
    if !rest.starts_with(word) {
        return None;
    }
    let level = match word {
        "INFO" | "ATTN" => Level::Info,
        "WARN" => Level::Warn,
        "CALL" | "TRACE" => Level::Trace,
        _ => return None,
    };
    Some((level, (word.len() + 1).min(rest.len())))
}

/// The end of `text`, at most [`LONGEST_PREFIX`] long.
fn window(text: &str) -> &str {
    let mut start = text.len().saturating_sub(LONGEST_PREFIX);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    &text[start..]
}

/// Reads the prefix that ends at the mark.
fn prefix(before: &str, level: Level) -> Option<Record<'_>> {
    let before = before.trim_end();
    let record = |lead, host, pid, tid, device, place| Record {
        lead,
        host,
        pid,
        tid,
        device,
        level,
        place,
        text: "",
    };
    // `CALL` has no device.
    if level == Level::Trace
        && let Some((lead, host, pid, tid)) = origin(before)
    {
        return Some(record(lead, host, pid, tid, None, ""));
    }
    let close = before.rfind(']')?;
    let open = before[..close].rfind('[')?;
    let place = before[close + 1..].trim();
    let device: i64 = before[open + 1..close].trim().parse().ok()?;
    let device = u32::try_from(device).ok().filter(|device| *device < 1024);
    // `file:line (function)`
    let place = place.split_whitespace().next().unwrap_or_default();
    let left = before[..open].trim_end();
    if let Some((lead, host, pid, tid)) = origin(left) {
        return Some(record(lead, host, pid, tid, device, place));
    }
    let anonymous = left.is_empty() || stamp(left).is_some_and(|(_, end)| left[end..].len() <= 1);
    anonymous.then(|| record(left, "", 0, 0, device, place))
}

/// `HOST:PID:TID` at the end.
fn origin(text: &str) -> Option<(&str, &str, u32, u32)> {
    let (rest, tid) = number_at_end(text)?;
    let (rest, pid) = number_at_end(rest.strip_suffix(':')?)?;
    let rest = rest.strip_suffix(':')?;
    let ends = |c: char| {
        c.is_whitespace() || c.is_control() || matches!(c, ':' | ']' | ')' | '|' | '"' | '\'' | '=')
    };
    let start = rest
        .char_indices()
        .rev()
        .find(|&(_, c)| ends(c))
        .map_or(0, |(at, c)| at + c.len_utf8());
    let mut start = start;
    // A collector's time zone, without a separator: `-07:00node-a`.
    let zone = &rest.as_bytes()[..start];
    if let [.., b'+' | b'-', tens, ones, b':'] = zone
        && tens.is_ascii_digit()
        && ones.is_ascii_digit()
        && rest.as_bytes()[start..].len() > 2
        && rest.as_bytes()[start..start + 2]
            .iter()
            .all(u8::is_ascii_digit)
    {
        start += 2;
    }
    let host = &rest[start..];
    (!host.is_empty()).then_some((&rest[..start], host, pid, tid))
}

fn number_at_end(text: &str) -> Option<(&str, u32)> {
    let digits = text.bytes().rev().take_while(u8::is_ascii_digit).count();
    let (rest, digits) = text.split_at(text.len() - digits);
    Some((rest, digits.parse().ok()?))
}

/// The last time in `text`, as `2026-11-21 02:17:39.123`, and where it ends.
pub(super) fn stamp(text: &str) -> Option<(String, usize)> {
    const PATTERN: &[u8] = b"0000-00-00 00:00:00";
    let matches = |window: &[u8]| {
        window
            .iter()
            .zip(PATTERN)
            .all(|(byte, wanted)| match wanted {
                b'0' => byte.is_ascii_digit(),
                b' ' => matches!(byte, b' ' | b'T' | b'_'),
                other => byte == other,
            })
    };
    let bytes = text.as_bytes();
    let start = bytes.windows(PATTERN.len()).rposition(matches)?;
    let mut end = start + PATTERN.len();
    if matches!(bytes.get(end), Some(b'.' | b',')) {
        let digits = bytes[end + 1..].iter().take_while(|b| b.is_ascii_digit());
        end += 1 + digits.count().min(9);
    }
    // All of it is ASCII, so these are character boundaries.
    let normal = text[start..end].replace(['T', '_'], " ").replace(',', ".");
    Some((normal, end))
}

/// The rank that a launcher wrote before the line: `[1,3]<stdout>:` of Open MPI, `3: ` of `srun -l`,
/// `[3] ` of `nccl-run`, `[rank3]` and `[rank 3]`, `(VllmWorker rank=3 pid=77)`.
pub(super) fn tag(lead: &str) -> Option<usize> {
    let lead = lead.trim_start();
    if let Some((rank, rest)) = number::<usize>(lead) {
        return rest.starts_with(": ").then_some(rank);
    }
    if let Some(inside) = lead.strip_prefix('(') {
        let (inside, _) = inside.split_once(')')?;
        return inside.split_whitespace().find_map(|word| {
            let (rank, rest) = number::<usize>(word.strip_prefix("rank=")?)?;
            rest.is_empty().then_some(rank)
        });
    }
    let inside = lead.strip_prefix('[')?;
    if let Some(rest) = inside.strip_prefix("rank") {
        let (rank, rest) = number(rest.trim_start())?;
        return rest.starts_with(']').then_some(rank);
    }
    let (rank, rest) = number::<usize>(inside)?;
    if rest.starts_with("] ") {
        return Some(rank);
    }
    let (rank, rest) = number(rest.strip_prefix(',')?)?;
    rest.starts_with("]<std").then_some(rank)
}

/// The rank in the name of a file of `nccl-run`: `nccl.rank-3.log`.
pub(super) fn tag_of_file(name: &str) -> Option<usize> {
    let file = name.rsplit('/').next()?;
    let (rank, rest) = number::<usize>(file.strip_prefix("nccl.rank-")?)?;
    rest.starts_with('.').then_some(rank)
}

/// Removes the escape sequences that colour the line.
pub(super) fn without_colour(line: String) -> String {
    if !line.contains('\x1b') {
        return line;
    }
    let mut plain = String::with_capacity(line.len());
    let mut rest = &line[..];
    while let Some((before, after)) = rest.split_once('\x1b') {
        plain.push_str(before);
        rest = match after.strip_prefix('[') {
            // Parameters, then one letter.
            Some(sequence) => {
                let end = sequence.find(|c: char| !matches!(c, '0'..='9' | ';' | '?' | ':'));
                end.map_or("", |end| {
                    let letter = sequence[end..].chars().next().map_or(0, char::len_utf8);
                    &sequence[end + letter..]
                })
            }
            None => after,
        };
    }
    plain.push_str(rest);
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(line: &str) -> Record<'_> {
        let mut parts = parse(line);
        assert_eq!(parts.records.len(), 1, "{line:?}: {parts:?}");
        parts.records.remove(0)
    }

    #[test]
    fn the_prefixes_of_all_releases_are_read() {
        let info = one("node-a:4021:4077 [3] NCCL INFO Using network IB\r");
        assert_eq!((info.host, info.pid, info.tid), ("node-a", 4021, 4077));
        assert_eq!((info.device, info.text), (Some(3), "Using network IB"));
        let old = one("node-a:1:2 [0] misc/socket.cc:483 NCCL WARN Connect failed");
        assert_eq!((old.level, old.place), (Level::Warn, "misc/socket.cc:483"));
        let new =
            one("[2026-11-21 02:17:39] node-a:1:2 [0] init.cc:2955 (a function) NCCL WARN no");
        assert_eq!((new.place, new.text), ("init.cc:2955", "no"));
        assert_eq!(stamp(new.lead).unwrap().0, "2026-11-21 02:17:39");
        let attention = one("node-a:1:2 [0] init.cc:1 (a function) NCCL ATTN x");
        assert_eq!((attention.level, attention.text), (Level::Info, "x"));
        let call = one("node-a:1:2 NCCL CALL ncclCommDestroy(0x1)");
        assert_eq!((call.level, call.device), (Level::Trace, None));
        let trace = one("node-a:1:2 [0] 12.25 bootstrapInit:7 NCCL TRACE hello");
        assert_eq!((trace.level, trace.text), (Level::Trace, "hello"));
        let garbage = one("node-a:1:2 [-1] NCCL INFO x");
        assert_eq!(garbage.device, None);
        let garbage = one("node-a:1:2 [2147483647] NCCL INFO x");
        assert_eq!(garbage.device, None);
        assert_eq!(one("node-a:1:2 [0] NCCL INFO").text, "");
    }

    #[test]
    fn what_launchers_and_collectors_put_before_a_line_is_no_part_of_it() {
        for lead in [
            "[1,3]<stdout>:",
            "3: ",
            "[rank3]:",
            "[rank 3] ",
            "(Worker pid=77) ",
            "[default3]:[rank3]:",
            "2026-04-22T21:34:20.123456Z ",
            "pod/trainer-0: ",
            "Ünïcödé ",
            "log line=\"",
            "2025-05-16T16:39:51.208-07:00",
        ] {
            let line = format!("{lead}node-a:4021:4077 [3] NCCL INFO Using network IB");
            let record = one(&line);
            assert_eq!((record.host, record.lead), ("node-a", lead));
        }
        let tagged = [
            "[1,3]<stderr>:",
            "3: ",
            "[rank3]:",
            "[rank 3] ",
            "(W rank=3 pid=7) ",
            "[3] ",
        ];
        assert_eq!(tagged.map(tag), [Some(3); 6]);
        let others = [
            "",
            "[3]",
            "[default3]:",
            "33",
            "[rank3",
            "(pid=3)",
            "10:22: ",
        ];
        assert_eq!(others.map(tag), [None; 7]);
        let (when, _) = stamp("2026-04-22T21:34:20.123456Z ").unwrap();
        assert_eq!(when, "2026-04-22 21:34:20.123456");
        let colour = without_colour("\x1b[36m(pid=1)\x1b[0m a:1:2 \x1bx\x1b[".to_owned());
        assert_eq!(colour, "(pid=1) a:1:2 x");
    }

    #[test]
    fn lines_without_their_host_are_read_and_half_lines_are_not() {
        let bare = one(" [3] NCCL INFO Using network IB");
        assert_eq!((bare.host, bare.pid, bare.device), ("", 0, Some(3)));
        assert_eq!(one("[2026-11-21 02:17:39] [1] a.cc:1 NCCL WARN x").host, "");
        for half in [
            "021:4077 [3 NCCL INFO x",
            "INFO:root: got NCCL INFO x",
            "] NCCL WARN x",
        ] {
            let parts = parse(half);
            assert!(
                parts.broken && parts.records.is_empty(),
                "{half}: {parts:?}"
            );
        }
        for other in [
            "",
            "NCCL",
            "NCCL ",
            "NCCL INFORMATION",
            "the NCCL backend",
            "NCCL  INFO x",
        ] {
            assert_eq!(parse(other), Parts::default(), "{other}");
        }
    }

    #[test]
    fn two_ranks_on_one_line_are_two_records() {
        let line = "a:1:2 [0] NCCL INFO Channel 00/0 :a:3:4 [1] NCCL INFO Using network IB";
        let texts: Vec<_> = parse(line)
            .records
            .iter()
            .map(|r| (r.pid, r.text))
            .collect();
        assert_eq!(texts, [(1, "Channel 00/0 :"), (3, "Using network IB")]);
        let quoted = "a:1:2 [0] NCCL INFO somebody says NCCL WARN in a text";
        assert_eq!(one(quoted).text, "somebody says NCCL WARN in a text");
    }

    #[test]
    fn the_version_of_rank_0_has_no_prefix() {
        let parts = parse("NCCL version 2.18.3+cuda12.1");
        assert_eq!(parts.version, Some("NCCL version 2.18.3+cuda12.1"));
        assert_eq!(
            parse("a:1:2 [0] NCCL INFO NCCL version 2.18.3").version,
            None
        );
    }
}
