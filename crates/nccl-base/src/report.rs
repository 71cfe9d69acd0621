//! Findings of checks, and their text.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize};

/// How bad a finding is.
///
/// ```
/// use nccl::preflight::Severity;
/// assert!(Severity::Error > Severity::Warning && Severity::Warning > Severity::Ok);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Severity {
    /// The check found no problem.
    Ok,
    /// It may work, or works less well than it could.
    Warning,
    /// NCCL would hang, fail, or compute something else.
    Error,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Error => "error",
        })
    }
}

/// The finding of one check.
///
/// Printed, it is one line: the sentence, and what to do.
///
/// ```
/// let report = nccl::preflight::host(&nccl::preflight::Settings::default());
/// for finding in &report.findings {
///     println!("{:>7} {:<20} {}", finding.severity, finding.check, finding.what);
///     if let Some(fix) = &finding.fix {
///         println!("{:>28} {fix}", "fix:");
///     }
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// The check's name, which stays the same from release to release: `nccl-version`, `reachable`, …
    pub check: String,
    /// The ranks that differ, or all ranks if none differs. Empty for a host without a world.
    pub ranks: Vec<usize>,
    /// The hosts of these ranks.
    pub hosts: Vec<String>,
    /// What was found, as a sentence.
    pub what: String,
    /// What to do about it, as a sentence.
    pub fix: Option<String>,
}

impl Finding {
    #[doc(hidden)]
    pub fn new(severity: Severity, check: &'static str, what: impl Into<String>) -> Self {
        Self {
            severity,
            check: check.to_owned(),
            ranks: Vec::new(),
            hosts: Vec::new(),
            what: what.into(),
            fix: None,
        }
    }

    #[doc(hidden)]
    pub fn ok(check: &'static str, what: impl Into<String>) -> Self {
        Self::new(Severity::Ok, check, what)
    }

    #[doc(hidden)]
    pub fn error(check: &'static str, what: impl Into<String>) -> Self {
        Self::new(Severity::Error, check, what)
    }

    #[doc(hidden)]
    pub fn warning(check: &'static str, what: impl Into<String>) -> Self {
        Self::new(Severity::Warning, check, what)
    }

    #[doc(hidden)]
    pub fn fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(fix.into());
        self
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.severity, self.check, self.what)?;
        match &self.fix {
            Some(fix) => write!(f, "; {fix}"),
            None => Ok(()),
        }
    }
}

/// All findings, the worst first.
///
/// ```
/// let report = nccl::preflight::host(&nccl::preflight::Settings::default());
/// if report.worst() > nccl::preflight::Severity::Ok {
///     eprintln!("{report}");
/// }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Report {
    /// The findings.
    #[serde(deserialize_with = "in_order")]
    pub findings: Vec<Finding>,
}

fn in_order<'d, D: Deserializer<'d>>(from: D) -> Result<Vec<Finding>, D::Error> {
    Vec::deserialize(from).map(|findings| Report::in_order(findings).findings)
}

impl Report {
    /// Sorts the findings, the worst first; those of equal severity by the checks' names and ranks, so that the
    /// report does not depend on which rank came first.
    #[doc(hidden)]
    pub fn new(mut findings: Vec<Finding>) -> Self {
        findings.sort_by(|a, b| {
            let key = |f: &Finding| (std::cmp::Reverse(f.severity), f.check.clone());
            (key(a), &a.ranks, &a.what).cmp(&(key(b), &b.ranks, &b.what))
        });
        findings.dedup();
        Self { findings }
    }

    /// Puts the worst findings first. Findings of equal severity keep their order, in which a cause precedes its
    /// consequences.
    #[doc(hidden)]
    pub fn in_order(mut findings: Vec<Finding>) -> Self {
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        Self { findings }
    }

    #[doc(hidden)]
    pub fn of(&self, severity: Severity) -> impl Iterator<Item = &Finding> {
        self.findings
            .iter()
            .filter(move |finding| finding.severity == severity)
    }

    /// Returns how bad the worst finding is.
    ///
    /// ```
    /// use nccl::preflight::{Severity, Settings, host};
    /// if host(&Settings::default()).worst() == Severity::Error {
    ///     eprintln!("NCCL would not work here");
    /// }
    /// ```
    #[must_use]
    pub fn worst(&self) -> Severity {
        let severities = self.findings.iter().map(|finding| finding.severity);
        severities.max().unwrap_or(Severity::Ok)
    }

    /// Writes the errors, as the text of an error: in one line, or in the alternate form a line for each.
    pub(crate) fn write_errors(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let between = if f.alternate() {
            "\n  and:        "
        } else {
            "; and: "
        };
        f.write_str("before NCCL was started: ")?;
        for (index, finding) in self.of(Severity::Error).enumerate() {
            if index > 0 {
                f.write_str(between)?;
            }
            write!(f, "{} [{}]", finding.what, finding.check)?;
            if let Some(fix) = &finding.fix {
                write!(f, "; {fix}")?;
            }
        }
        Ok(())
    }
}

/// One line for each finding, the worst first.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, finding) in self.findings.iter().enumerate() {
            if number > 0 {
                writeln!(f)?;
            }
            write!(f, "{finding}")?;
        }
        Ok(())
    }
}
