//! The intended differences between NCCL and the emulator, each with its reason.

use nccl_sys::Version;

/// The verdict about a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Both behave the same.
    Equal,
    /// The emulator refuses or waits where NCCL may continue.
    Stricter,
    /// The emulator continues where NCCL refuses or hangs.
    Kinder,
    /// The emulator reports that it does not support this.
    NotThereYet,
    /// Another difference, because it is an emulator.
    OnPurpose,
}

impl Verdict {
    /// One word for tables.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Equal => "equal",
            Self::Stricter => "stricter",
            Self::Kinder => "kinder",
            Self::NotThereYet => "not there yet",
            Self::OnPurpose => "on purpose",
        }
    }
}

/// An intended difference.
#[derive(Clone, Copy, Debug)]
pub struct Intended {
    /// The program.
    pub program: &'static str,
    /// The fact, or a prefix of its name if it ends in `*`; the rank before it may be omitted.
    pub fact: &'static str,
    /// The last release with this difference; `None`: all releases.
    pub until: Option<Version>,
    /// The verdict.
    pub verdict: Verdict,
    /// Why.
    pub reason: &'static str,
}

impl Intended {
    /// Whether this applies to that release. To an unknown release only entries for all releases apply.
    #[must_use]
    pub fn holds(&self, release: Option<Version>) -> bool {
        self.until
            .is_none_or(|until| release.is_some_and(|release| release <= until))
    }

    /// Whether this covers that fact.
    #[must_use]
    pub fn covers(&self, fact: &str) -> bool {
        let without_rank = fact
            .strip_prefix("rank ")
            .and_then(|rest| rest.split_once(": "))
            .map_or(fact, |(_, rest)| rest);
        match self.fact.strip_suffix('*') {
            Some(beginning) => [fact, without_rank]
                .iter()
                .any(|f| f.starts_with(beginning)),
            None => [fact, without_rank].contains(&self.fact),
        }
    }
}

const fn meant(
    program: &'static str,
    fact: &'static str,
    verdict: Verdict,
    reason: &'static str,
) -> Intended {
    Intended {
        program,
        fact,
        until: None,
        verdict,
        reason,
    }
}

/// A difference of that release and older ones.
const fn until(release: (u32, u32, u32), meant: Intended) -> Intended {
    let (major, minor, patch) = release;
    Intended {
        until: Some(Version::new(major, minor, patch)),
        ..meant
    }
}

const LOCAL: &str = "an id holds the place of a local socket, not an internet address";

const RANDOM: &str =
    "releases that old put a random number into these ids, too: ranks that make them never meet";

const DEVICE: &str =
    "releases that old ask for the device before they look at the communicator, and here is one";

const BUFFER: &str =
    "there is no buffer in between: a program that relies on NCCL's hangs here at once";

const NOBODY: &str =
    "NCCL reads the first communicator, of which there is none, and the process ends by SIGSEGV";

/// All entries. An entry that no longer covers a difference may be removed.
pub const INTENDED: &[Intended] = &[
    meant("unique-id", "address family", Verdict::OnPurpose, LOCAL),
    meant("unique-id", "rest is zero", Verdict::OnPurpose, LOCAL),
    meant(
        "unique-id-loopback",
        "address family",
        Verdict::OnPurpose,
        LOCAL,
    ),
    meant(
        "unique-id-loopback",
        "rest is zero",
        Verdict::OnPurpose,
        LOCAL,
    ),
    until(
        (2, 18, 3),
        meant(
            "unique-id-no-interface",
            "id",
            Verdict::OnPurpose,
            "releases that old call it an internal error",
        ),
    ),
    until(
        (2, 18, 3),
        meant(
            "unique-id-after-a-refusal",
            "*",
            Verdict::Kinder,
            "after a refused unique id, releases that old never return from asking for another",
        ),
    ),
    until(
        (2, 18, 3),
        meant("comm-id", "ids are the same", Verdict::Kinder, RANDOM),
    ),
    until(
        (2, 18, 3),
        meant(
            "comm-id-of-ipv6",
            "ids are the same",
            Verdict::Kinder,
            RANDOM,
        ),
    ),
    until(
        (2, 18, 3),
        meant(
            "corrupt-communicator",
            "*",
            Verdict::Kinder,
            "releases that old do not know a communicator from other memory, and crash",
        ),
    ),
    until(
        (2, 27, 7),
        meant(
            "group-poison",
            "window without a communicator",
            Verdict::OnPurpose,
            DEVICE,
        ),
    ),
    until(
        (2, 27, 7),
        meant(
            "null-communicator",
            "ncclCommWindow*",
            Verdict::OnPurpose,
            DEVICE,
        ),
    ),
    until(
        (2, 30, 7),
        meant(
            "config-fields",
            "graphUsageMode 3",
            Verdict::OnPurpose,
            "the text of releases that old has a misspelling",
        ),
    ),
    meant(
        "small-send",
        "ends before there is a receive",
        Verdict::Stricter,
        BUFFER,
    ),
    meant(
        "message-without-bytes",
        "ends alone",
        Verdict::Stricter,
        BUFFER,
    ),
    meant("sizes-differ", "ends", Verdict::Stricter, BUFFER),
    meant("init-arguments", "how it ended", Verdict::Kinder, NOBODY),
    meant("init-arguments", "no devices", Verdict::Kinder, NOBODY),
    meant(
        "simulate-operations",
        "an estimate",
        Verdict::OnPurpose,
        "times of the emulator mean nothing, so it estimates none: the number stays what the caller has put there",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::runner::programs;

    #[test]
    fn every_entry_names_a_program_and_a_reason() {
        for entry in INTENDED {
            assert!(
                programs().any(|program| program.name == entry.program),
                "{entry:?}"
            );
            assert!(
                !entry.reason.is_empty() && entry.verdict != Verdict::Equal,
                "{entry:?}"
            );
        }
    }

    #[test]
    fn names_of_programs_are_unique() {
        let mut names: Vec<_> = programs().map(|program| program.name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn what_held_until_a_release_holds_of_no_newer_and_of_no_unknown_one() {
        let old = until((2, 27, 7), meant("p", "ends", Verdict::Kinder, "r"));
        assert!(old.holds(Some(Version::new(2, 18, 3))) && old.holds(old.until));
        assert!(!old.holds(Some(Version::new(2, 28, 3))) && !old.holds(None));
        assert!(meant("p", "ends", Verdict::Kinder, "r").holds(None));
    }

    #[test]
    fn an_entry_covers_one_fact_or_all_that_begin_alike() {
        let one = meant("p", "ends", Verdict::Stricter, "r");
        assert!(one.covers("ends") && one.covers("rank 1: ends") && !one.covers("ends late"));
        let all = meant("p", "split*", Verdict::Stricter, "r");
        assert!(all.covers("rank 0: split in the end") && !all.covers("rank 0: a split"));
    }
}
