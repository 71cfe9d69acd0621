//! [`Version`]: a release of NCCL, and the two ways in which a release has been written as a number.

use core::ffi::c_int;
use core::fmt;

use crate::bindings::types::{NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH};

/// A release of NCCL.
///
/// ```
/// use nccl_sys::Version;
///
/// let version = Version::from_code(23203).unwrap();
/// assert_eq!(version, Version::new(2, 32, 3));
/// assert!(version >= Version::new(2, 28, 7));
/// assert_eq!(version.to_string(), "2.32.3");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// The first number.
    pub major: u32,
    /// The second number.
    pub minor: u32,
    /// The third number. Releases that differ only here add functions, too.
    pub patch: u32,
}

impl Version {
    /// The release whose header this crate was generated from.
    ///
    /// ```
    /// assert!(nccl_sys::Version::HEADER >= nccl_sys::Version::new(2, 32, 3));
    /// ```
    pub const HEADER: Self = Self::new(NCCL_MAJOR as u32, NCCL_MINOR as u32, NCCL_PATCH as u32);

    /// Returns the release `major.minor.patch`.
    ///
    /// ```
    /// assert_eq!(nccl_sys::Version::new(2, 28, 3).to_string(), "2.28.3");
    /// ```
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self {
            major,
            minor,
            patch,
        }
    }

    /// Returns the number of this release, `NCCL_VERSION(major, minor, patch)`:
    /// `X * 1000 + Y * 100 + Z` up to 2.8, `X * 10000 + Y * 100 + Z` from 2.9.
    ///
    /// Meant for numbers that NCCL could have: `patch` up to 99, `minor` up to 99 from 2.9.
    ///
    /// ```
    /// assert_eq!(nccl_sys::Version::new(2, 28, 3).code(), 22803);
    /// ```
    pub const fn code(self) -> c_int {
        let thousands = if self.major <= 2 && self.minor <= 8 {
            1_000
        } else {
            10_000
        };
        (self.major * thousands + self.minor * 100 + self.patch) as c_int
    }

    /// Returns the release with this `code`, as returned by `ncclGetVersion`, by either of the two
    /// rules of [`code`](Self::code). `None` for a code of neither.
    ///
    /// ```
    /// use nccl_sys::Version;
    /// assert_eq!(Version::from_code(22803), Some(Version::new(2, 28, 3)));
    /// assert_eq!(Version::from_code(2708), Some(Version::new(2, 7, 8)));
    /// assert_eq!(Version::from_code(7), None);
    /// ```
    pub const fn from_code(code: c_int) -> Option<Self> {
        if code < 1_000 {
            return None;
        }
        let code = code as u32;
        // The largest code of the first rule is that of 2.8.99, the smallest of the second 2.9.0's.
        let thousands = if code < 10_000 { 1_000 } else { 10_000 };
        let version = Self::new(code / thousands, code % thousands / 100, code % 100);
        if version.code() == code as c_int {
            Some(version)
        } else {
            None
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_read_by_the_rule_of_its_time() {
        for (code, version) in [
            (2_408, (2, 4, 8)),
            (2_804, (2, 8, 4)),
            (20_906, (2, 9, 6)),
            (21_803, (2, 18, 3)),
            (22_707, (2, 27, 7)),
            (23_203, (2, 32, 3)),
            (30_100, (3, 1, 0)),
        ] {
            let version = Version::new(version.0, version.1, version.2);
            assert_eq!(Version::from_code(code), Some(version));
            assert_eq!(version.code(), code);
        }
    }

    #[test]
    fn what_is_no_code_is_no_version() {
        // The first rule never wrote 2.9, the second never 2.8.
        for code in [c_int::MIN, -1, 0, 999, 2_906, 9_999, 20_804] {
            assert_eq!(Version::from_code(code), None, "{code}");
        }
    }

    #[test]
    fn versions_sort_by_number_not_by_text() {
        assert!(Version::new(2, 9, 6) < Version::new(2, 18, 1));
        assert!(Version::new(2, 28, 7) < Version::new(2, 28, 10));
        assert!(Version::new(2, 32, 3) < Version::new(3, 0, 0));
    }
}
