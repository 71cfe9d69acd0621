//! From tokens to the text that a client gets: whole characters, and nothing of what ends a text.

use crate::model::tokenizer::{TextStream, Tokenizer};

/// The text of one request as it is said. What may be the beginning of a text that ends it is held back until it is known.
#[derive(Clone, Debug, Default)]
pub(super) struct Speech {
    characters: TextStream,
    stops: Vec<String>,
    held: String,
    stopped: bool,
    /// How long the text is that was said, in bytes, and where in it each token's first character begins.
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

    /// Whether one of the texts came that end it.
    pub(super) fn has_stopped(&self) -> bool {
        self.stopped
    }

    /// What can be said after this token.
    pub(super) fn push(&mut self, token: u32) -> String {
        self.begins.push(self.said + self.held.len());
        self.held += &self.characters.push(token);
        self.say()
    }

    /// What is left at the end, and how many tokens the whole text has that was said. Tokens with which it stopped are
    /// not among them, but for one that has something before as well.
    pub(super) fn finish(mut self) -> (String, usize) {
        let mut rest = String::new();
        if !self.stopped {
            self.held += &std::mem::take(&mut self.characters).finish();
            rest = self.say();
            if !self.stopped {
                rest += &self.held;
                // What has no text, such as a mark that some models make, was in it all the same.
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
        // The longest end of it that some stop begins with.
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

    /// What is said after each token, and at the end.
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
