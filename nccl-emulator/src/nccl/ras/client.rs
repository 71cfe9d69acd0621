//! The protocol of clients: lines of text.
//!
//! | line | answer |
//! |---|---|
//! | `CLIENT PROTOCOL n` | `SERVER PROTOCOL 2` |
//! | `TIMEOUT seconds` | `OK`; how long other processes have for their answers, 0 for as long as they take |
//! | `SET FORMAT text`, `json` | `OK`, from 2.28.7 |
//! | `STATUS`, `VERBOSE STATUS` | the state of the job, and the end of the connection |
//! | `MONITOR lifecycle,trace,all` | `OK`, from 2.29, and events as they happen |
//!
//! A value without a socket: it takes bytes, and returns the requested actions.

use crate::version;

/// The most bytes of a line.
const LONGEST: usize = 1024;

/// The events that a client wants.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Monitor {
    pub(super) lifecycle: bool,
    pub(super) trace: bool,
}

/// The format of a client's answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Format {
    pub(super) is_json: bool,
    pub(super) is_verbose: bool,
}

/// The action that a client requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Action {
    /// Send this text.
    Reply(String),
    /// Send the state of the job, gathered within this many seconds if the client has set a limit; nothing else follows.
    Status(Format, Option<u32>),
    /// Close the connection.
    Close,
}

/// A client's connection.
#[derive(Debug)]
pub(super) struct Conversation {
    line: Vec<u8>,
    timeout: Option<u32>,
    format: Format,
    pub(super) monitor: Monitor,
    /// Whether the state was requested: later lines are not read.
    pub(super) is_over: bool,
}

impl Conversation {
    pub(super) fn new() -> Self {
        Self {
            line: Vec::new(),
            timeout: None,
            format: Format::default(),
            monitor: Monitor::default(),
            is_over: false,
        }
    }

    /// Whether the client wants JSON.
    pub(super) fn is_json(&self) -> bool {
        self.format.is_json
    }

    /// Takes what the client has sent.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Vec<Action> {
        let mut actions = Vec::new();
        for &byte in bytes {
            if self.is_over {
                break;
            }
            if byte != b'\n' {
                if self.line.len() == LONGEST {
                    self.is_over = true;
                    actions.push(Action::Close);
                }
                self.line.push(byte);
                continue;
            }
            let line = std::mem::take(&mut self.line);
            let line = line.strip_suffix(b"\r").unwrap_or(&line);
            let action = self.command(&String::from_utf8_lossy(line));
            self.is_over = matches!(action, Action::Status(..));
            actions.push(action);
        }
        actions
    }

    fn command(&mut self, line: &str) -> Action {
        let reply = |text: String| Action::Reply(text + "\n");
        let after = |beginning: &str| {
            let (head, rest) = line.split_at_checked(beginning.len())?;
            head.eq_ignore_ascii_case(beginning).then_some(rest)
        };
        if after("client protocol ").is_some() {
            return reply("SERVER PROTOCOL 2".into());
        }
        if let Some(seconds) = after("timeout ") {
            return reply(match seconds.trim_start().parse::<u32>() {
                Ok(seconds) => {
                    self.timeout = Some(seconds);
                    "OK".into()
                }
                Err(_) => format!("ERROR: Invalid timeout value {seconds}"),
            });
        }
        let has_json = version::is_at_least(2, 28, 7);
        if let Some(format) = after("set format ").filter(|_| has_json) {
            let is_json = format.eq_ignore_ascii_case("json");
            if !is_json && !format.eq_ignore_ascii_case("text") {
                return reply(format!("ERROR: Invalid format {format}"));
            }
            self.format.is_json = is_json;
            return reply("OK".into());
        }
        if line.eq_ignore_ascii_case("status") {
            return Action::Status(self.format, self.timeout);
        }
        if line.eq_ignore_ascii_case("verbose status") {
            self.format.is_verbose = true;
            return Action::Status(self.format, self.timeout);
        }
        let groups = after("monitor").filter(|rest| rest.is_empty() || rest.starts_with(' '));
        if let Some(groups) = groups.filter(|_| version::is_at_least(2, 29, 0)) {
            return reply(self.set_monitor(groups.trim_start_matches(' ')));
        }
        reply(format!("ERROR: Unknown command {line}"))
    }

    fn set_monitor(&mut self, groups: &str) -> String {
        let mut monitor = Monitor::default();
        for group in groups.split(',').filter(|group| !group.is_empty()) {
            match group.to_ascii_lowercase().as_str() {
                "lifecycle" => monitor.lifecycle = true,
                "trace" => monitor.trace = true,
                "all" => (monitor.lifecycle, monitor.trace) = (true, true),
                _ => return format!("ERROR: Invalid event group '{group}'"),
            }
        }
        monitor.lifecycle |= !monitor.trace;
        self.monitor = monitor;
        "OK".into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replies(conversation: &mut Conversation, lines: &str) -> Vec<String> {
        let reply = |action| match action {
            Action::Reply(text) => text,
            other => format!("{other:?}"),
        };
        let actions = conversation.take(lines.as_bytes());
        actions.into_iter().map(reply).collect()
    }

    #[test]
    fn each_line_is_answered_whatever_pieces_it_comes_in() {
        let mut conversation = Conversation::new();
        let said = replies(
            &mut conversation,
            "CLIENT PROTOCOL 9\ntimeout 7\r\nTIMEOUT -1\ntimeout x\nset format JSON\nSET FORMAT xml\n",
        );
        assert_eq!(
            said,
            [
                "SERVER PROTOCOL 2\n",
                "OK\n",
                "ERROR: Invalid timeout value -1\n",
                "ERROR: Invalid timeout value x\n",
                "OK\n",
                "ERROR: Invalid format xml\n",
            ]
        );
        assert_eq!(conversation.take(b"VERBOSE ST"), []);
        let format = Format {
            is_json: true,
            is_verbose: true,
        };
        let actions = conversation.take(b"ATUS\nSTATUS\n");
        assert_eq!(actions, [Action::Status(format, Some(7))]);
        assert_eq!(conversation.take(b"STATUS\n"), []);
    }

    #[test]
    fn a_client_that_monitors_says_which_events_it_wants() {
        let mut conversation = Conversation::new();
        let mut monitor = |line: &str| {
            let said = replies(&mut conversation, line);
            (said[0].clone(), conversation.monitor)
        };
        let both = |lifecycle, trace| Monitor { lifecycle, trace };
        assert_eq!(monitor("MONITOR\n"), ("OK\n".into(), both(true, false)));
        assert_eq!(monitor("monitor trace\n").1, both(false, true));
        assert_eq!(monitor("monitor ALL\n").1, both(true, true));
        let (said, monitored) = monitor("monitor lifecycle,nothing\n");
        assert_eq!(said, "ERROR: Invalid event group 'nothing'\n");
        assert_eq!(monitored, both(true, true));
        assert_eq!(monitor("monitors\n").0, "ERROR: Unknown command monitors\n");
    }

    #[test]
    fn garbage_is_answered_with_an_error_and_a_line_without_an_end_with_the_end() {
        let mut conversation = Conversation::new();
        let said = replies(&mut conversation, "GET / HTTP/1.1\n\n");
        assert_eq!(said[0], "ERROR: Unknown command GET / HTTP/1.1\n");
        assert_eq!(said[1], "ERROR: Unknown command \n");
        let actions = conversation.take(&[0xff, 0xc3, b'\n']);
        assert!(matches!(&actions[..], [Action::Reply(text)] if text.starts_with("ERROR")));
        assert_eq!(conversation.take(&[b'a'; 5000]), [Action::Close]);
        let mut random = fastrand::Rng::with_seed(2);
        for _ in 0..2000 {
            let mut conversation = Conversation::new();
            let bytes: Vec<u8> = (0..random.usize(..200)).map(|_| random.u8(..)).collect();
            conversation.take(&bytes);
        }
    }
}
