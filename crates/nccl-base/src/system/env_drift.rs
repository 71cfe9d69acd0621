//! Variables that were changed after NCCL had read them.
//!
//! NCCL reads nearly every variable once in the life of a process and keeps that value, even if the environment changes
//! later. The value cannot be queried, so the environment is recorded when NCCL is first used.

use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use super::System;
use super::nccl_variables;
use super::variables::{self, Variable};

/// The variables at NCCL's first use.
static FOUND: OnceLock<Vec<Variable>> = OnceLock::new();

/// A variable that differs from what NCCL has read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[doc(hidden)]
pub struct DriftedVariable {
    pub name: String,
    /// `None` if it was not set.
    pub was: Option<String>,
    pub is: Option<String>,
}

/// Records the variables. To be called before NCCL is first used, because NCCL keeps the values from then on.
pub fn record_environment() {
    FOUND.get_or_init(|| variables::gather(&System::real()));
}

/// Returns the variables that have changed since NCCL was first used in this process.
pub fn gather(now: &[Variable]) -> Vec<DriftedVariable> {
    FOUND.get().map_or_else(Vec::new, |then| changed(then, now))
}

fn changed(then: &[Variable], now: &[Variable]) -> Vec<DriftedVariable> {
    let value = |list: &[Variable], name: &str| {
        let found = list.iter().find(|variable| variable.name == name);
        found.map(|variable| variable.value.clone())
    };
    let mut names: Vec<&str> = then.iter().chain(now).map(|v| &v.name[..]).collect();
    names.sort_unstable();
    names.dedup();
    names
        .into_iter()
        // Unknown variables have a finding of their own; NCCL reads `NCCL_COMM_ID` every time.
        .filter(|name| nccl_variables::find(name).is_some() && *name != "NCCL_COMM_ID")
        .map(|name| DriftedVariable {
            name: name.to_owned(),
            was: value(then, name),
            is: value(now, name),
        })
        .filter(|late| late.was != late.is)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_unset_or_changed_later_is_found() {
        let list = |pairs: &[(&str, &str)]| -> Vec<Variable> {
            let variable = |&(name, value): &(&str, &str)| Variable {
                name: name.to_owned(),
                value: value.to_owned(),
                file: String::new(),
            };
            pairs.iter().map(variable).collect()
        };
        let then = list(&[
            ("NCCL_ALGO", "Ring"),
            ("NCCL_PROTO", "LL"),
            ("NCCL_DEBUG", "WARN"),
            ("NCCL_COMM_ID", "a:1"),
        ]);
        let now = list(&[
            ("NCCL_DEBUG", "WARN"),
            ("NCCL_ALGO", "Tree"),
            ("NCCL_P2P_DISABLE", "1"),
            ("NCCL_COMM_ID", "b:2"),
            ("NCCL_NOT_ITS_OWN", "1"),
        ]);
        let late = |name: &str, was: Option<&str>, is: Option<&str>| DriftedVariable {
            name: name.to_owned(),
            was: was.map(str::to_owned),
            is: is.map(str::to_owned),
        };
        assert_eq!(
            changed(&then, &now),
            [
                late("NCCL_ALGO", Some("Ring"), Some("Tree")),
                late("NCCL_P2P_DISABLE", None, Some("1")),
                late("NCCL_PROTO", Some("LL"), None),
            ]
        );
        assert_eq!(changed(&now, &now), []);
    }
}
