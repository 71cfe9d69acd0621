//! The last lines of a rank's standard error.

use std::collections::VecDeque;

use crate::sanitize;

/// The maximum number of bytes kept of a line.
const LONGEST: usize = 2000;

/// The last `keep` lines, each cut to at most [`LONGEST`] bytes.
#[derive(Debug)]
pub(crate) struct Tail {
    keep: usize,
    lines: VecDeque<String>,
}

impl Tail {
    pub(crate) fn new(keep: usize) -> Self {
        Self {
            keep,
            lines: VecDeque::new(),
        }
    }

    pub(super) fn push(&mut self, line: &[u8]) {
        // For a progress bar, keep the last state.
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let seen = line.rsplit(|&byte| byte == b'\r').next().unwrap_or(line);
        if self.keep == 0 || seen.is_empty() {
            return;
        }
        if self.lines.len() == self.keep {
            self.lines.pop_front();
        }
        let text = String::from_utf8_lossy(&seen[..seen.len().min(LONGEST)]);
        let mut text: String = text.chars().map(sanitize::character).collect();
        if seen.len() > LONGEST {
            text.push_str(" …");
        }
        self.lines.push_back(text);
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_lines_are_kept_of_long_ones_the_beginning_and_no_control_characters() {
        let mut tail = Tail::new(3);
        for line in 0..100 {
            tail.push(format!("line {line}").as_bytes());
        }
        tail.push(b" 1/3\r 2/3\r 3/3\r");
        tail.push(b"");
        assert_eq!(tail.lines(), ["line 98", "line 99", " 3/3"]);
        tail.push(&[b'x'; 5000]);
        assert_eq!(tail.lines()[2].len(), LONGEST + " …".len());
        tail.push("\x1b]0;title\x07\x1b[2J\tgone\u{9b}2J".as_bytes());
        let seen = "\u{fffd}]0;title\u{fffd}\u{fffd}[2J\tgone\u{fffd}2J";
        assert_eq!(tail.lines()[2], seen);
        for mark in "\u{61c}\u{200e}\u{200f}\u{202a}\u{202e}\u{2066}\u{2069}".chars() {
            tail.push(format!("live {mark}lla").as_bytes());
            assert_eq!(tail.lines()[2], "live \u{fffd}lla");
        }
        tail.push("ok ✓ \u{200d}".as_bytes());
        assert_eq!(tail.lines()[2], "ok ✓ \u{200d}");
        let mut none = Tail::new(0);
        none.push(b"x");
        assert!(none.lines().is_empty());
    }
}
