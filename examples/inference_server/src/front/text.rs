//! From tokens to the text that a client gets: whole characters, without stop texts.

use crate::model::tokenizer::{TextStream, Tokenizer};

/// The text of one request. Text that may be the beginning of a stop text is held back until that is decided.
#[derive(Clone, Debug, Default)]
pub(super) struct Speech {
    characters: TextStream,
    stops: Vec<String>,
    held: String,
    stopped: bool,
    /// The length of the passed-on text in bytes, and the position in the text at which each token begins.
    said: usize,
    begins: Vec<usize>,
}

impl Speech {
    pub(super) fn new(tokenizer: &Tokenizer, stops: Vec<String>) -> Self {
        Self {
            characters: tokenizer.stream(),
            stops,
            ..Self::default()
        }
    }

    /// Returns whether a stop text has occurred.
    pub(super) fn has_stopped(&self) -> bool {
        self.stopped
    }

    /// Returns the text that can be passed on after this token.
    pub(super) fn push(&mut self, token: u32) -> String {
        self.begins.push(self.said + self.held.len());
        self.held += &self.characters.push(token);
        self.say()
    }

    /// Returns the remaining text at the end, and the number of tokens of the passed-on text. Tokens of the stop text do not
    /// count, except a token that also contains text before it.
    pub(super) fn finish(mut self) -> (String, usize) {
        let mut rest = String::new();
        if !self.stopped {
            self.held += &std::mem::take(&mut self.characters).finish();
            rest = self.say();
            if !self.stopped {
                rest += &self.held;
                // A token without text, such as a special token of some models, still counts.
                return (rest, self.begins.len());
            }
        }
        (
            rest,
            self.begins.partition_point(|&begin| begin < self.said),
        )
    }

    fn say(&mut self) -> String {
        if self.stopped {
            return String::new();
        }
        let found = self.stops.iter().filter_map(|stop| self.held.find(stop));
        if let Some(at) = found.min() {
            self.stopped = true;
            self.held.truncate(at);
            self.said += at;
            return std::mem::take(&mut self.held);
        }
        // The longest suffix of the held text that is a prefix of a stop text.
        let begins = |&at: &usize| {
            self.held.is_char_boundary(at)
                && self
                    .stops
                    .iter()
                    .any(|stop| stop.starts_with(&self.held[at..]))
        };
        let keep = (0..self.held.len()).find(begins);
        let rest = self.held.split_off(keep.unwrap_or(self.held.len()));
        self.said += self.held.len();
        std::mem::replace(&mut self.held, rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tokenizer::encode;

    /// Returns the text passed on after each token, whether a stop text occurred, and the remaining text.
    fn say(text: &str, stops: &[&str]) -> (Vec<String>, bool, String) {
        let mut speech = Speech::new(
            &Tokenizer::default(),
            stops.iter().map(ToString::to_string).collect(),
        );
        let said = encode(text)
            .into_iter()
            .map(|token| speech.push(token))
            .collect();
        (said, speech.has_stopped(), speech.finish().0)
    }

    #[test]
    fn a_text_that_ends_a_request_is_never_said_not_even_its_beginning() {
        let (said, stopped, rest) = say("one. two", &[". "]);
        assert_eq!(said, ["o", "n", "e", "", "", "", "", ""]);
        assert!(stopped);
        assert_eq!(rest, "");
    }

    #[test]
    fn what_only_looked_like_the_end_is_said_after_all() {
        let (said, stopped, rest) = say("aab", &["aac"]);
        assert_eq!(said.concat(), "aab");
        assert_eq!(said[..2], ["", ""]);
        assert!(!stopped && rest.is_empty());
        let (said, stopped, rest) = say("xaa", &["aac"]);
        assert_eq!(
            (said.concat(), stopped, rest),
            ("x".into(), false, "aa".into())
        );
    }

    #[test]
    fn the_first_of_several_ends_counts() {
        let (said, stopped, _) = say("a1b2c", &["2", "1"]);
        assert_eq!((said.concat(), stopped), ("a".into(), true));
        let (said, ..) = say("aaab", &["aab"]);
        assert_eq!(said.concat(), "a");
    }

    #[test]
    fn characters_are_said_when_they_are_whole() {
        let (said, ..) = say("é!", &["é?"]);
        assert_eq!(said, ["", "", "é!"]);
        let mut speech = Speech::default();
        speech.push(0xe2);
        assert_eq!(speech.finish(), ("\u{fffd}".into(), 1));
    }

    #[test]
    fn tokens_are_counted_that_have_a_part_in_what_was_said() {
        let count = |text: &str, stops: &[&str]| {
            let stops = stops.iter().map(ToString::to_string).collect();
            let mut speech = Speech::new(&Tokenizer::default(), stops);
            for token in encode(text) {
                speech.push(token);
            }
            speech.finish().1
        };
        assert_eq!(count("", &[]), 0);
        assert_eq!(count("one. two", &[]), 8);
        assert_eq!(count("one. two", &[". "]), 3);
        assert_eq!(count("one. two", &["one"]), 0);
        // Held back, and said at the end.
        assert_eq!(count("one.", &[". "]), 4);
        // Two bytes are two tokens of one character.
        assert_eq!(count("aé!", &["!"]), 3);
        assert_eq!(count("aé!", &["é"]), 1);
        assert_eq!(count("aé!", &[]), 4);
    }
}
