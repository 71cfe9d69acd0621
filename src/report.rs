//! Formats findings: a line with ✓, ! or ✗, the fix beneath it; or JSON.
//!
//! Colour is for terminals, unless `NO_COLOR` is set. On a terminal, long sentences are broken into lines; in a file or
//! a pipe each stays on one, for `grep`.

use std::fmt::Write as _;
use std::io::IsTerminal;

use nccl::preflight::{Finding, Severity};
use serde_json::{Value, json};

/// A finding as JSON.
#[must_use]
pub fn json(finding: &Finding) -> Value {
    json!({
        "severity": finding.severity.to_string(),
        "check": finding.check,
        "ranks": finding.ranks,
        "hosts": finding.hosts,
        "what": finding.what,
        "fix": finding.fix,
    })
}

/// Reads the JSON of [`json()`]; `None` for other JSON.
#[must_use]
pub fn from_json(value: &Value) -> Option<Finding> {
    let text = |key: &str| value.get(key)?.as_str().map(str::to_owned);
    let severity = match &text("severity")?[..] {
        "ok" => Severity::Ok,
        "warning" => Severity::Warning,
        "error" => Severity::Error,
        _ => return None,
    };
    let list = |key: &str| value.get(key)?.as_array().cloned();
    let mut finding = Finding::new(severity, "", text("what")?);
    finding.check = text("check")?;
    finding.ranks = list("ranks")?
        .iter()
        .filter_map(|rank| usize::try_from(rank.as_u64()?).ok())
        .collect();
    finding.hosts = list("hosts")?
        .iter()
        .filter_map(|host| host.as_str().map(str::to_owned))
        .collect();
    finding.fix = text("fix");
    Some(finding)
}

/// The worst severity.
///
/// ```
/// use nccl::preflight::Severity;
/// assert_eq!(nccl_tools::report::worst(&[]), Severity::Ok);
/// ```
#[must_use]
pub fn worst(findings: &[Finding]) -> Severity {
    let severities = findings.iter().map(|finding| finding.severity);
    severities.max().unwrap_or(Severity::Ok)
}

/// Whether to use colour, and where to break lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Style {
    colour: bool,
    width: Option<usize>,
}

/// The width of lines on a terminal.
const WIDTH: usize = 100;

impl Style {
    /// Neither colour nor broken lines.
    pub const PLAIN: Self = Self {
        colour: false,
        width: None,
    };

    /// The style for a stream, and for the environment of the user.
    #[must_use]
    pub fn of(stream: &impl IsTerminal) -> Self {
        Self::chosen(stream.is_terminal(), |name| std::env::var(name).ok())
    }

    fn chosen(terminal: bool, get: impl Fn(&str) -> Option<String>) -> Self {
        if !terminal {
            return Self::PLAIN;
        }
        let forbidden = get("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self {
            colour: !forbidden && get("TERM").is_none_or(|terminal| terminal != "dumb"),
            width: Some(WIDTH),
        }
    }

    /// `text` in the colour of a severity.
    fn paint(self, severity: Severity, text: &str) -> String {
        let code = match severity {
            _ if !self.colour => return text.to_owned(),
            Severity::Ok => "32",
            Severity::Warning => "33",
            _ => "31",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

/// All findings, and how many there are of each severity; with `quiet`, without those of severity `Ok`.
#[must_use]
pub fn text(findings: &[Finding], style: Style, quiet: bool) -> String {
    let mut text = String::new();
    let shown = findings
        .iter()
        .filter(|finding| !quiet || finding.severity > Severity::Ok);
    for finding in shown {
        let sign = match finding.severity {
            Severity::Ok => "✓",
            Severity::Warning => "!",
            _ => "✗",
        };
        let sign = style.paint(finding.severity, sign);
        let what = wrapped(&format!("{}: {}", finding.check, finding.what), 2, style);
        let _ = writeln!(text, "{sign} {what}");
        if let Some(fix) = &finding.fix {
            let _ = writeln!(text, "    {}", wrapped(&format!("fix: {fix}"), 9, style));
        }
    }
    let of = |severity| {
        findings
            .iter()
            .filter(|finding| finding.severity == severity)
            .count()
    };
    let counted = |number, one: &str, several: &str| match number {
        0 => None,
        1 => Some(format!("1 {one}")),
        _ => Some(format!("{number} {several}")),
    };
    let parts = [
        counted(of(Severity::Error), "error", "errors"),
        counted(of(Severity::Warning), "warning", "warnings"),
        counted(of(Severity::Ok), "check is fine", "checks are fine"),
    ];
    let parts: Vec<_> = parts.into_iter().flatten().collect();
    let line = match parts.is_empty() {
        true => "nothing was checked".to_owned(),
        false => parts.join(", "),
    };
    let _ = writeln!(text, "{}", style.paint(worst(findings), &line));
    text
}

/// Whether a terminal obeys this character instead of showing it: controls, and characters that change the direction of
/// text.
pub(crate) fn steers(character: char) -> bool {
    let turns = matches!(
        character,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    );
    turns || character.is_control()
}

/// Breaks a sentence into lines, the later ones indented.
fn wrapped(sentence: &str, indent: usize, style: Style) -> String {
    // One line each: text from a log or another host must not look like a line of this program, or control the
    // terminal.
    let clean: String = sentence
        .chars()
        .map(|c| if steers(c) { ' ' } else { c })
        .collect();
    let Some(width) = style.width else {
        return clean;
    };
    let mut text = String::new();
    let mut used = indent;
    for word in clean.split(' ') {
        let length = word.chars().count();
        if used > indent && used + 1 + length > width {
            let _ = write!(text, "\n{:indent$}", "");
            used = indent;
        } else if !text.is_empty() {
            text.push(' ');
            used += 1;
        }
        text.push_str(word);
        used += length;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings() -> [Finding; 3] {
        [
            Finding::error("a", "one\x1b[2J\nforged: line").fix("do it"),
            Finding::warning("b", "two"),
            Finding::ok("c", "three"),
        ]
    }

    #[test]
    fn each_finding_is_a_line_with_what_to_do_beneath_it() {
        let plain = text(&findings(), Style::PLAIN, false);
        let lines: Vec<_> = plain.lines().collect();
        assert_eq!(
            lines,
            [
                "✗ a: one [2J forged: line",
                "    fix: do it",
                "! b: two",
                "✓ c: three",
                "1 error, 1 warning, 1 check is fine"
            ]
        );
        assert!(!text(&findings(), Style::PLAIN, true).contains("three"));
        assert_eq!(text(&[], Style::PLAIN, false), "nothing was checked\n");
    }

    #[test]
    fn colour_is_for_terminals_of_people_who_want_it() {
        let with = |name: &'static str, value: &'static str| {
            move |asked: &str| (asked == name).then(|| value.to_owned())
        };
        assert!(Style::chosen(true, |_| None).colour);
        assert!(Style::chosen(true, with("NO_COLOR", "")).colour);
        assert!(!Style::chosen(true, with("NO_COLOR", "1")).colour);
        assert!(!Style::chosen(true, with("TERM", "dumb")).colour);
        assert_eq!(Style::chosen(false, |_| None), Style::PLAIN);
        let coloured = text(&findings(), Style::chosen(true, |_| None), false);
        assert!(
            coloured.starts_with("\x1b[31m✗\x1b[0m a: one"),
            "{coloured:?}"
        );
    }

    #[test]
    fn long_sentences_are_broken_on_a_terminal_alone() {
        let long = Finding::ok("long", "word ".repeat(60));
        let narrow = text(
            std::slice::from_ref(&long),
            Style::chosen(true, with_nothing),
            false,
        );
        assert!(narrow.lines().count() > 3);
        assert!(
            narrow
                .lines()
                .all(|line| line.chars().count() <= WIDTH + 10),
            "{narrow}"
        );
        assert!(narrow.lines().nth(1).unwrap().starts_with("  word"));
        assert_eq!(text(&[long], Style::PLAIN, false).lines().count(), 2);
    }

    fn with_nothing(_: &str) -> Option<String> {
        None
    }

    #[test]
    fn json_reads_back() {
        let mut finding = Finding::error("check", "what \"is\"").fix("fix");
        finding.ranks = vec![1, 5];
        finding.hosts = vec!["node-a".to_owned()];
        let text = super::json(&finding).to_string();
        let read = from_json(&serde_json::from_str(&text).unwrap());
        assert_eq!(read, Some(finding));
        assert_eq!(from_json(&json!({"severity": "awful"})), None);
    }
}
