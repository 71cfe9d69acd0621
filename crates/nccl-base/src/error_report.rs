//! An error as plain values, for logs in JSON and for other processes.

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind};
use crate::fault::Fault;

/// An [`Error`] as plain values, which serde reads and writes.
///
/// ```
/// let error = nccl::Rendezvous::unix("/tmp/x.sock", 4, 4).unwrap_err();
/// let report = error.report();
/// assert_eq!(report.kind, "rendezvous");
/// assert_eq!(report.text, error.to_string());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ErrorReport {
    /// The name of its [`ErrorKind`], in lower case: `timed_out`, `nccl`, …
    pub kind: String,
    /// The error in one line, as printed.
    pub text: String,
    /// The operation in which it arose, if it arose in one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operation: Option<ReportedOperation>,
    /// The fault that ended the communicator on all of its ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<Fault>,
}

/// An [`Operation`](crate::operation::Operation) as plain values.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
/// # let mut y = stream.clone_htod(&[1.0f32; 8])?;
/// comm.abort("an example")?;
/// let error = comm.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum).unwrap_err();
/// let operation: nccl::error::ReportedOperation = error.report().operation.expect("it was in one");
/// assert_eq!((&*operation.kind, operation.world_size), ("all_reduce", 1));
/// assert!(serde_json::to_string(&operation)?.contains("\"communicator\":\"demo\""));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ReportedOperation {
    /// The kind, as [`OperationKind`](crate::operation::OperationKind) prints it.
    pub kind: String,
    /// The name of the communicator.
    pub communicator: String,
    /// The reporting rank, in the communicator.
    pub rank: usize,
    /// The reporting rank in the world, if that is another number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub world_rank: Option<usize>,
    /// The launcher rank of the reporting rank, if that is not its number in the world.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub launcher_rank: Option<usize>,
    /// The number of ranks of the communicator.
    pub world_size: usize,
    /// The reporting host.
    pub host: String,
    /// The reporting process.
    pub pid: u32,
    /// The generation of the world that made the communicator; 0 where there is none.
    pub generation: u64,
    /// The number of the operation on its communicator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<u64>,
    /// The rank at the other end, for messages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<usize>,
    /// The root, for operations that have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<usize>,
    /// The number of elements.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<usize>,
    /// The type of the elements.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_type: Option<String>,
    /// The time from the call to the error, in milliseconds.
    pub elapsed_ms: u64,
}

impl Error {
    /// Returns the error as plain values.
    ///
    /// ```
    /// # fn show(error: nccl::Error) {
    /// let report = error.report();
    /// if let Some(operation) = &report.operation {
    ///     println!("{} on rank {}", operation.kind, operation.rank);
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn report(&self) -> ErrorReport {
        let operation = self.operation().map(|operation| ReportedOperation {
            kind: operation.kind.to_string(),
            communicator: operation.communicator.to_string(),
            rank: operation.rank,
            world_rank: Some(operation.world_rank()).filter(|rank| *rank != operation.rank),
            launcher_rank: operation.launcher_rank(),
            world_size: operation.world_size,
            host: operation.host.to_string(),
            pid: operation.pid,
            generation: operation.generation,
            sequence: operation.sequence,
            peer: operation.peer,
            root: operation.root,
            count: operation.count,
            data_type: operation.data_type.map(|data_type| data_type.to_string()),
            elapsed_ms: crate::time::millis(operation.elapsed),
        });
        ErrorReport {
            kind: name(self.kind()).to_owned(),
            text: self.to_string(),
            operation,
            fault: self.fault().cloned(),
        }
    }
}

impl Error {
    /// Returns the path of the documentation (`cargo doc`) on this kind of error: cause, remedy, and a sample.
    ///
    /// The path is relative to the root of the documentation, like the path of any item. An error that is printed with `{:#}`
    /// ends with it.
    ///
    /// ```
    /// # nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
    /// let error = nccl::device(1000).unwrap_err();
    /// assert_eq!(error.help(), "nccl/error/index.html#no_such_device");
    /// assert!(format!("{error:#}").ends_with("nccl/error/index.html#no_such_device"));
    /// ```
    #[must_use]
    pub fn help(&self) -> String {
        format!("nccl/error/index.html#{}", name(self.kind()))
    }
}

/// Returns the name of a kind, which is stable; `nccl/errors.md` has a section of that name.
fn name(kind: &ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Load(_) => "load",
        ErrorKind::Unsupported { .. } => "unsupported",
        ErrorKind::InvalidConfig { .. } => "invalid_config",
        ErrorKind::Nccl(_) => "nccl",
        ErrorKind::Cuda { .. } => "cuda",
        ErrorKind::NoDriver { .. } => "no_driver",
        ErrorKind::NoSuchDevice { .. } => "no_such_device",
        ErrorKind::Length { .. } => "length",
        ErrorKind::NoBuffer { .. } => "no_buffer",
        ErrorKind::WrongReduction { .. } => "wrong_reduction",
        ErrorKind::DataTypeMismatch { .. } => "data_type_mismatch",
        ErrorKind::UnknownDataType(_) => "unknown_data_type",
        ErrorKind::PartialElement { .. } => "partial_element",
        ErrorKind::Misaligned { .. } => "misaligned",
        ErrorKind::NoSuchRank { .. } => "no_such_rank",
        ErrorKind::UnpairedOwnMessages { .. } => "unpaired_own_messages",
        ErrorKind::Stream { .. } => "stream",
        ErrorKind::NotInPlan { .. } => "not_in_plan",
        ErrorKind::CaptureDiffers { .. } => "capture_differs",
        ErrorKind::CallsDiffer { .. } => "calls_differ",
        ErrorKind::PlansDiffer { .. } => "plans_differ",
        ErrorKind::StepsDiffer { .. } => "steps_differ",
        ErrorKind::ExpertCapacity { .. } => "expert_capacity",
        ErrorKind::NoSuchExpert { .. } => "no_such_expert",
        ErrorKind::NotWeighed(_) => "not_weighed",
        ErrorKind::TimedOut { .. } => "timed_out",
        ErrorKind::Queued { .. } => "queued",
        ErrorKind::Busy { .. } => "busy",
        ErrorKind::Aborted { .. } => "aborted",
        ErrorKind::Closed { .. } => "closed",
        ErrorKind::Forked { .. } => "forked",
        ErrorKind::Unavailable { .. } => "unavailable",
        ErrorKind::Rendezvous { .. } => "rendezvous",
        ErrorKind::Launch { .. } => "launch",
        ErrorKind::Preflight { .. } => "preflight",
        ErrorKind::Io { .. } => "io",
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// The page. Each kind occurs in backticks or as a heading, so that a browser's search finds it.
    const PAGE: &str = include_str!("../../../nccl/errors.md");

    #[test]
    fn every_kind_has_a_section_with_cause_and_remedy_and_a_sample() {
        // The names are read from the function above: a new kind has to be there, or it does not compile.
        let names: Vec<_> = include_str!("error_report.rs")
            .lines()
            .filter(|line| line.trim_start().starts_with("ErrorKind::"))
            .filter_map(|line| line.split_once("=> \"")?.1.split_once('"'))
            .map(|(name, _)| name)
            .collect();
        assert!(names.len() > 20, "{names:?}");
        let sections: Vec<_> = PAGE.split("\n## ").skip(1).collect();
        for name in &names {
            let section = sections.iter().find(|section| {
                let title = section.lines().next();
                title == Some(name)
            });
            let section = section.unwrap_or_else(|| panic!("no section {name}"));
            for part in ["```text\n", "**Cause.** ", "**Remedy.** "] {
                assert!(section.contains(part), "{name} lacks {part:?}");
            }
        }
        // The last two are about the numbers of ranks, and about roots.
        assert_eq!(sections.len(), names.len() + 2, "a section too many");
    }

    #[test]
    fn every_root_has_its_row() {
        let sources = include_str!("fault/cause.rs");
        let (_, roots) = sources.split_once("pub enum RootCause {").expect("roots");
        let (roots, _) = roots.split_once("\n}\n").expect("an end");
        let variants = roots.lines().filter_map(|line| {
            let name = line.strip_prefix("    ")?;
            name.starts_with(|first: char| first.is_ascii_uppercase())
                .then(|| name.trim_end_matches([' ', '{', ',']))
        });
        let variants: Vec<_> = variants.collect();
        assert!(variants.len() > 10, "{variants:?}");
        for variant in variants {
            let mut name = String::new();
            for (at, letter) in variant.chars().enumerate() {
                if letter.is_ascii_uppercase() && at > 0 {
                    name.push('_');
                }
                name.push(letter.to_ascii_lowercase());
            }
            assert!(
                PAGE.contains(&format!("\n| `{name}` | ")),
                "nccl/errors.md lacks {name}"
            );
        }
    }

    #[test]
    fn every_link_of_the_page_leads_somewhere() {
        let docs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
        for link in PAGE.split("](").skip(1) {
            let link = link.split(')').next().expect("a link");
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let page = match file {
                "" => PAGE.to_owned(),
                file => std::fs::read_to_string(docs.join(file))
                    .unwrap_or_else(|error| panic!("{link}: {error}")),
            };
            let found = page
                .lines()
                .filter(|line| line.starts_with('#'))
                .any(|title| {
                    let title = title.trim_start_matches('#').trim().to_lowercase();
                    let kept = title
                        .chars()
                        .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
                    kept.collect::<String>().replace(' ', "-") == anchor
                });
            assert!(anchor.is_empty() || found, "{link} leads nowhere");
        }
    }
    use crate::fault::{Cause, Roster};

    #[test]
    fn one_fault_gives_errors_of_one_kind_on_all_ranks() {
        let timeout = std::time::Duration::from_secs(2);
        let time_ran_out = || {
            Error::new(ErrorKind::TimedOut {
                what: String::from("the operation"),
                timeout,
            })
        };
        let aborted = || {
            Error::new(ErrorKind::Aborted {
                reason: String::from("the others did"),
            })
        };
        let failed = || Error::new(ErrorKind::NotWeighed(crate::data_type::DataType::Int8));
        let of = |cause| {
            Arc::new(Fault::here(cause, ("tp", &Roster::default()), 0, 0, |_| {
                None
            }))
        };
        let late = of(Cause::from(&time_ran_out()));
        for (seen, own) in [(time_ran_out(), true), (aborted(), false), (failed(), true)] {
            let error = seen.because_of(&late, own, None);
            let is_it = matches!(error.kind(), ErrorKind::TimedOut { timeout: passed, .. } if *passed == timeout);
            assert!(is_it && error.is_timeout(), "{error:?}");
        }
        let asked = of(Cause::asked("enough"));
        for (seen, own) in [
            (time_ran_out(), false),
            (aborted(), true),
            (failed(), false),
        ] {
            let error = seen.because_of(&asked, own, None);
            let is_it = matches!(error.kind(), ErrorKind::Aborted { .. });
            assert!(is_it && !error.is_timeout(), "{error:?}");
        }
        // The rank on which something failed has seen more than the others, and reports that beside what all return.
        let broken = of(Cause::from(&failed()));
        for own in [true, false] {
            let error = failed().because_of(&broken, own, None);
            let is_it = matches!(error.kind(), ErrorKind::Aborted { .. });
            assert!(is_it && !error.is_timeout(), "{error:?}");
            let seen = error.local_kind();
            assert_eq!(matches!(seen, Some(ErrorKind::NotWeighed(_))), own);
            assert_eq!(
                error.to_string().starts_with("i8 cannot be"),
                own,
                "{error}"
            );
        }
        // What was seen stays when the same fault is set again.
        let again = failed()
            .because_of(&broken, true, None)
            .because_of(&broken, true, None);
        assert!(matches!(again.local_kind(), Some(ErrorKind::NotWeighed(_))));
        // A queued operation on one rank is a timeout on all of them.
        let queued = || {
            Error::new(ErrorKind::Queued {
                what: "the operation",
                waited: timeout,
                timeout,
            })
        };
        let outside = of(Cause::from(&queued()));
        for (seen, own) in [
            (queued(), true),
            (time_ran_out(), false),
            (aborted(), false),
        ] {
            let error = seen.because_of(&outside, own, None);
            let is_it = matches!(error.kind(), ErrorKind::TimedOut { .. });
            assert!(is_it && error.is_timeout(), "{error:?}");
            let is_queued = matches!(error.local_kind(), Some(ErrorKind::Queued { .. }));
            assert_eq!(is_queued, own);
        }
        // An end that a program asks for is no timeout, on the rank that ran out of time as well.
        let error = time_ran_out().because_of(&asked, true, None);
        let is_it = matches!(error.kind(), ErrorKind::Aborted { .. });
        assert!(is_it && !error.is_timeout(), "{error:?}");
        // The same holds for a communicator that was not made.
        let rendezvous = || Error::rendezvous("rank 1 does not come");
        for fault in [&late, &asked, &broken] {
            let kind = |error: &Error| name(error.kind()).to_owned();
            let early = rendezvous().before_nccl(fault);
            assert_eq!(
                kind(&early),
                kind(&aborted().because_of(fault, false, None))
            );
            assert!(
                early.to_string().starts_with(&rendezvous().to_string()),
                "{early}"
            );
        }
        // A communicator that ends with another one ends for the same cause.
        for told in [late, broken] {
            let other = of(Cause::from(&aborted().because_of(&told, false, None)));
            let values = |fault: &Fault| (fault.class, fault.role, fault.root.clone());
            assert_eq!(values(&other), values(&told));
        }
    }

    #[test]
    fn an_error_with_its_fault_goes_through_json_and_has_the_fault_at_the_end_of_its_chain() {
        let fault = Arc::new(Fault::here(
            Cause::asked("enough"),
            ("model/tp", &Roster::default()),
            3,
            1,
            |_| None,
        ));
        let error = Error::new(ErrorKind::Aborted {
            reason: String::new(),
        });
        let error = error.because_of(&fault, false, None);
        let report = error.report();
        let json = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<ErrorReport>(&json).unwrap(), report);
        assert_eq!(error.fault(), Some(&*fault));
    }
}
