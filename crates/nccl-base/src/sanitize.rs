//! Sanitizes text of other processes for a terminal: nothing in it moves the cursor, or changes the reading order of a line.

/// The replacement for a character that a terminal interprets instead of displaying.
const INSTEAD: char = '\u{fffd}';

/// Returns the character, or its replacement. Line ends are replaced as well.
#[doc(hidden)]
pub fn character(character: char) -> char {
    match character {
        '\t' => '\t',
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
            INSTEAD
        }
        control if control.is_control() => INSTEAD,
        other => other,
    }
}

/// Sanitizes a name, which is one line.
#[doc(hidden)]
pub fn name(name: &str) -> String {
    if is_plain(name) {
        return name.to_owned();
    }
    name.chars().map(character).collect()
}

/// Returns whether all characters are printable ASCII, which needs no replacement. Nearly every text is.
pub(crate) fn is_plain(text: &str) -> bool {
    text.bytes().all(|byte| matches!(byte, b' '..=b'~'))
}

/// Sanitizes a text of several lines.
#[doc(hidden)]
pub fn text(text: &str) -> String {
    let shown = |c| if c == '\n' { c } else { character(c) };
    text.chars().map(shown).collect()
}

/// Sanitizes a line of a program's output that is printed after a prefix, which must stay intact. Of a progress bar, only the
/// last visible state is kept; colours are reset at the end of the line.
#[doc(hidden)]
pub fn line(line: &[u8]) -> String {
    let line = String::from_utf8_lossy(line);
    let line = line.trim_end_matches('\r');
    let mut rest = line.rsplit('\r').next().unwrap_or(line);
    let (mut shown, mut is_coloured) = (String::with_capacity(rest.len()), false);
    while let Some(next) = rest.chars().next() {
        let colour = colour(rest).unwrap_or(0);
        let length = colour.max(erasure(rest)).max(next.len_utf8());
        is_coloured |= colour > 0;
        if colour > 0 {
            shown.push_str(&rest[..colour]);
        } else if erasure(rest) == 0 {
            shown.push(character(next));
        }
        rest = &rest[length..];
    }
    if is_coloured {
        shown.push_str("\x1b[0m");
    }
    shown
}

/// Returns the length of a leading sequence that sets colours and similar attributes (SGR), which does not move the
/// cursor.
fn colour(text: &str) -> Option<usize> {
    let parameters = text.strip_prefix("\x1b[")?;
    let end = parameters.find(|c: char| !c.is_ascii_digit() && !matches!(c, ';' | ':'))?;
    parameters[end..]
        .starts_with('m')
        .then_some("\x1b[".len() + end + "m".len())
}

/// Returns the length of a leading sequence that erases the rest of the line, which is empty at that point; grep and GCC
/// write one after each colour.
fn erasure(text: &str) -> usize {
    let sequences = ["\x1b[K", "\x1b[0K"].into_iter();
    let found = sequences.filter(|sequence| text.starts_with(sequence));
    found.map(str::len).next().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_keeps_its_lines_and_nothing_that_a_terminal_obeys() {
        assert_eq!(
            text("it broke\r\x1b[2J\u{9b}1A\u{202e}\n\tat 3\x7f"),
            "it broke\u{fffd}\u{fffd}[2J\u{fffd}1A\u{fffd}\n\tat 3\u{fffd}"
        );
    }

    #[test]
    fn a_name_stays_on_its_line() {
        assert_eq!(
            name("node\nnccl: rank 3 died"),
            "node\u{fffd}nccl: rank 3 died"
        );
    }

    #[test]
    fn a_line_keeps_its_colours_and_cannot_reach_what_stands_in_front_of_it() {
        for (printed, shown) in [
            (&b"plain \xc3\xa9"[..], "plain é"),
            (b"of DOS\r", "of DOS"),
            (b" 1/3\r 2/3\r 3/3\r", " 3/3"),
            (b"\r[0] forged", "[0] forged"),
            (b"\x1b[1;31mred\x1b[m", "\x1b[1;31mred\x1b[m\x1b[0m"),
            (b"\x1b[38:5:1mred", "\x1b[38:5:1mred\x1b[0m"),
            (
                b"\x1b[01;31m\x1b[Kred\x1b[m\x1b[0K",
                "\x1b[01;31mred\x1b[m\x1b[0m",
            ),
            (b"\x1b[1K\x1b[2K", "\u{fffd}[1K\u{fffd}[2K"),
            (b"\x1b[99D[0] forged", "\u{fffd}[99D[0] forged"),
            (b"\x1b[1G\x1b[A", "\u{fffd}[1G\u{fffd}[A"),
            (b"\x1b", "\u{fffd}"),
            (b"\x1b[1;3", "\u{fffd}[1;3"),
            (b"\xc2\x9b1A \x9b1A", "\u{fffd}1A \u{fffd}1A"),
            (b"\x08\x0b\x0c", "\u{fffd}\u{fffd}\u{fffd}"),
        ] {
            assert_eq!(line(printed), shown, "{printed:?}");
        }
    }
}
