//! Faults that a benchmark injects into itself, to show that it would notice real ones.

use crate::failure::Failure;

/// Requests a fault: `flip:RANK` spoils one received byte on that rank before each verification.
pub const VARIABLE: &str = "NCCL_TOOLS_SELF_TEST";

/// The fault that [`VARIABLE`] requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SelfTest {
    flip_on: Option<usize>,
}

impl SelfTest {
    /// Reads the variable.
    ///
    /// # Errors
    /// When the variable requests an unknown fault.
    pub fn from_environment() -> Result<Self, Failure> {
        match std::env::var(VARIABLE) {
            Ok(text) if !text.is_empty() => Self::parse(&text),
            _ => Ok(Self::default()),
        }
    }

    fn parse(text: &str) -> Result<Self, Failure> {
        match text.strip_prefix("flip:").map(str::parse) {
            Some(Ok(rank)) => Ok(Self {
                flip_on: Some(rank),
            }),
            _ => Err(Failure::usage(format!(
                "{VARIABLE}={text}: only flip:RANK is known"
            ))),
        }
    }

    /// The bit that is flipped: the change exceeds every tolerance.
    pub const FLIPPED: u8 = 0x10;

    /// Index of the byte that `rank` has to spoil among `len` received bytes: one in the middle.
    #[must_use]
    pub fn flipped_byte(self, rank: usize, len: usize) -> Option<usize> {
        (self.flip_on == Some(rank) && len > 0).then_some(len / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_rank_that_was_named_spoils_a_byte() {
        let test = SelfTest::parse("flip:2").unwrap();
        assert_eq!(test.flipped_byte(2, 100), Some(50));
        assert_eq!(test.flipped_byte(2, 0), None);
        assert_eq!(test.flipped_byte(1, 100), None);
        assert_eq!(SelfTest::default().flipped_byte(0, 100), None);
    }

    #[test]
    fn what_is_not_known_is_refused() {
        for text in ["flip", "flip:", "flip:x", "drop:1"] {
            assert!(SelfTest::parse(text).is_err(), "{text}");
        }
    }
}
