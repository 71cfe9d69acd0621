//! The text form of faults.

use std::sync::Arc;
use std::time::Duration;

use super::point::{Action, Point};
use super::rule::{Faults, Name, Rule};

/// A problem in a specification of faults.
///
/// ```
/// let error = nccl_emulator::faults::specify("run=Dance,action=hang").unwrap_err();
/// assert!(error.to_string().contains("Dance"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("in \"{entry}\": {problem}")]
pub struct SpecificationError {
    pub(super) entry: String,
    pub(super) problem: String,
}

/// A parsed specification.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Specification {
    entries: Vec<Entry>,
    late: Duration,
}

#[derive(Debug, Clone, PartialEq)]
struct Entry {
    point: Point,
    rank: Option<i32>,
    communicator: Option<Name>,
    nth: Option<u64>,
    action: Action,
}

impl Specification {
    /// Creates new faults from the specification.
    pub(super) fn build(&self) -> Faults {
        let rule = |entry: &Entry| {
            Arc::new(Rule {
                communicator: entry.communicator.clone(),
                ..Rule::new(entry.point.clone(), entry.rank, entry.nth, entry.action)
            })
        };
        Faults {
            rules: self.entries.iter().map(rule).collect(),
            late: self.late,
        }
    }
}

const OPERATIONS: &[&str] = &[
    "AllGather",
    "AllReduce",
    "AlltoAll",
    "Broadcast",
    "Gather",
    "Recv",
    "Reduce",
    "ReduceScatter",
    "Scatter",
    "Send",
];

/// Returns whether faults can be injected into this function.
pub(super) fn is_function(name: &str) -> bool {
    nccl_sys::Api::NAMES.contains(&name) || cuda_emulator::driver::has_faults_at(name)
}

/// Returns the point of an operation's name.
pub(super) fn operation(name: &str) -> Option<Point> {
    match name {
        "any" => Some(Point::Operation(None)),
        name => OPERATIONS
            .contains(&name)
            .then(|| Point::Operation(Some(name.to_owned()))),
    }
}

pub(super) fn parse(text: &str) -> Result<Specification, SpecificationError> {
    let mut specification = Specification::default();
    for entry in text
        .split(';')
        .map(str::trim)
        .filter(|entry| !entry.is_empty())
    {
        let error = |problem: String| SpecificationError {
            entry: entry.to_owned(),
            problem,
        };
        if let Some(late) = entry.strip_prefix("late=") {
            specification.late += duration(late).map_err(error)?;
        } else {
            specification
                .entries
                .push(parse_entry(entry).map_err(error)?);
        }
    }
    Ok(specification)
}

fn parse_entry(entry: &str) -> Result<Entry, String> {
    let (mut point, mut rank, mut nth, mut action) = (None, None, None, None);
    let mut communicator = None;
    for field in entry.split(',').map(str::trim) {
        let (key, value) = field
            .split_once('=')
            .ok_or_else(|| format!("\"{field}\" is not of the form key=value"))?;
        match key {
            "call" if is_function(value) => point = Some(Point::Call(value.to_owned())),
            "call" => {
                return Err(format!(
                    "neither NCCL nor the driver has a function \"{value}\""
                ));
            }
            "run" => {
                let names = OPERATIONS.join(", ");
                let found = operation(value);
                point = Some(found.ok_or_else(|| {
                    format!("\"{value}\" is no operation (any of {names}, or any)")
                })?);
            }
            "rank" => {
                rank = Some(
                    value
                        .parse()
                        .map_err(|_| format!("\"{value}\" is no rank"))?,
                )
            }
            "comm" => communicator = Some(Name::new(value)),
            "nth" => match value.parse() {
                Ok(n @ 1..) => nth = Some(n),
                _ => {
                    return Err(format!(
                        "nth counts from 1, and \"{value}\" is no such number"
                    ));
                }
            },
            "action" => action = Some(parse_action(value)?),
            _ => {
                return Err(format!(
                    "\"{key}\" is none of call, run, rank, comm, nth, action"
                ));
            }
        }
    }
    let point = point.ok_or("it says neither call=FUNCTION nor run=OPERATION")?;
    let action = action.ok_or("it says no action=delay=TIME, hang, stall, fail=CODE or kill")?;
    let of_nccl = match &point {
        Point::Call(function) => function.starts_with("nccl"),
        Point::Operation(_) => true,
    };
    match (&point, action) {
        (Point::Call(function), _)
            if rank.is_some() && (!of_nccl || function == "ncclGetUniqueId") =>
        {
            return Err(format!("{function} belongs to no rank"));
        }
        (Point::Call(function), _)
            if communicator.is_some() && (!of_nccl || function == "ncclGetUniqueId") =>
        {
            return Err(format!("{function} belongs to no communicator"));
        }
        (_, Action::Fail(code)) if of_nccl && !(1..=8).contains(&code) => {
            return Err(format!("\"{code}\" is no error code of NCCL (1 to 8)"));
        }
        _ => {}
    }
    Ok(Entry {
        point,
        rank,
        communicator,
        nth,
        action,
    })
}

fn parse_action(text: &str) -> Result<Action, String> {
    match text.split_once('=') {
        None if text == "hang" => Ok(Action::Hang),
        None if text == "stall" => Ok(Action::Stall),
        None if text == "kill" => Ok(Action::Kill),
        Some(("delay", time)) => Ok(Action::Delay(duration(time)?)),
        Some(("fail", code)) => match code.parse() {
            Ok(code @ 1..) => Ok(Action::Fail(code)),
            _ => Err(format!("\"{code}\" is no error code")),
        },
        _ => Err(format!(
            "\"{text}\" is none of delay=TIME, hang, stall, fail=CODE, kill"
        )),
    }
}

/// Parses `50` (milliseconds), `50ms`, `200us` or `1.5s`.
fn duration(text: &str) -> Result<Duration, String> {
    let at = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    let scale = match unit {
        "s" => 1.0,
        "ms" | "" => 1e-3,
        "us" => 1e-6,
        _ => return Err(format!("\"{unit}\" is no unit of time (s, ms, us)")),
    };
    let seconds: f64 = number
        .parse()
        .map_err(|_| format!("\"{text}\" is no time"))?;
    Duration::try_from_secs_f64(seconds * scale).map_err(|_| format!("\"{text}\" is no time"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_specification_says_where_and_what() {
        let text =
            "call=ncclGroupEnd,rank=1,nth=3,action=hang; run=any,action=delay=1.5s;late=200us;";
        let got = parse(text).unwrap();
        assert_eq!(got.late, Duration::from_micros(200));
        let point = Point::Call("ncclGroupEnd".to_owned());
        assert_eq!(
            got.entries[0],
            Entry {
                point,
                rank: Some(1),
                communicator: None,
                nth: Some(3),
                action: Action::Hang
            }
        );
        assert_eq!(
            got.entries[1].action,
            Action::Delay(Duration::from_millis(1500))
        );
        assert_eq!(parse("").unwrap(), Specification::default());
    }

    #[test]
    fn a_bad_specification_is_told_what_is_wrong_with_it() {
        for (text, problem) in [
            (
                "call=ncclGroupEnds,action=hang",
                "neither NCCL nor the driver has a function \"ncclGroupEnds\"",
            ),
            ("call=ncclSend", "no action"),
            ("action=hang", "neither call"),
            ("run=Sends,action=hang", "is no operation"),
            ("call=ncclSend,action=fail=0", "no error code"),
            ("call=ncclSend,nth=0,action=hang", "counts from 1"),
            ("call=ncclSend,action=delay=5h", "no unit of time"),
            ("late=soon", "no unit of time"),
            (
                "call=ncclGetUniqueId,rank=1,action=hang",
                "belongs to no rank",
            ),
            ("call=cuEventQuery,rank=0,action=hang", "belongs to no rank"),
            (
                "call=cuEventQuery,comm=tp,action=hang",
                "belongs to no communicator",
            ),
            ("call=cuEventQuery_v2,action=hang", "has a function"),
            ("call=ncclSend,action=fail=9", "no error code of NCCL"),
            ("hang", "key=value"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(problem), "{text}: {error}");
        }
    }
}
