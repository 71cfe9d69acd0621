//! The value of an option.

use std::ffi::OsStr;
use std::path::PathBuf;

use nccl::ReduceOp;

use super::number;
use super::table::Entry;
use super::{Algorithms, Register};
use crate::algorithm::Algorithm;
use crate::element::{self, Element};
use crate::failure::Failure;
use crate::program::{OPERATORS, Program};

/// The value of one option, before it is parsed.
pub(super) struct Value<'a> {
    pub(super) entry: &'a Entry,
    pub(super) text: &'a OsStr,
}

impl Value<'_> {
    fn refused(&self, why: &str) -> Failure {
        Failure::usage(format!(
            "{} {}: {why}",
            self.entry.spelled(),
            self.text.to_string_lossy()
        ))
    }

    pub(super) fn between(&self, low: i64, high: i64) -> Result<i64, Failure> {
        let number = self.text.to_str().and_then(number::integer);
        number
            .filter(|number| (low..=high).contains(number))
            .ok_or_else(|| {
                self.refused(&match high {
                    i64::MAX => format!("a whole number from {low} on is needed"),
                    _ => format!("a whole number from {low} to {high} is needed"),
                })
            })
    }

    pub(super) fn count(&self, low: i64) -> Result<u32, Failure> {
        // As in nccl-tests these are C ints.
        Ok(self.between(low, i64::from(i32::MAX))? as u32)
    }

    pub(super) fn switch(&self) -> Result<bool, Failure> {
        Ok(self.between(0, 1)? == 1)
    }

    pub(super) fn size(&self) -> Result<u64, Failure> {
        let text = self.text.to_str().unwrap_or("?");
        number::size(text).map_err(|why| self.refused(&format!("this {why}")))
    }

    pub(super) fn one_of(&self, names: &[&str]) -> Result<(), Failure> {
        if names.iter().any(|name| self.text == *name) {
            Ok(())
        } else {
            Err(self.refused(&format!("one of {} is needed", names.join(", "))))
        }
    }

    pub(super) fn element(&self) -> Result<Option<Element>, Failure> {
        let text = self.text.to_str().unwrap_or_default();
        if text == "all" {
            return Ok(None);
        }
        Element::named(text).map(Some).ok_or_else(|| {
            let names: Vec<_> = element::ALL.iter().map(|element| element.name).collect();
            self.refused(&format!("one of {}, or all is needed", names.join(", ")))
        })
    }

    /// A path with `extension`, the only one that can be written.
    pub(super) fn file(&self, extension: &str) -> Result<PathBuf, Failure> {
        let path = PathBuf::from(self.text);
        match path.extension() {
            Some(found) if found.eq_ignore_ascii_case(extension) => Ok(path),
            _ => Err(self.refused(&format!(
                "only {} can be written, to a name that ends in .{extension}",
                extension.to_uppercase()
            ))),
        }
    }

    /// One operator, or all; "mulsum" is accepted only where it makes no difference.
    pub(super) fn operators(&self, program: &Program) -> Result<Vec<ReduceOp>, Failure> {
        let text = self.text.to_str().unwrap_or_default();
        if let Some(op) = OPERATORS.into_iter().find(|op| op.to_string() == text) {
            return Ok(vec![op]);
        }
        match text {
            "all" => Ok(OPERATORS.to_vec()),
            "mulsum" if !program.has_operator => Ok(Vec::new()),
            "mulsum" => {
                Err(self.refused("sums of scaled values are not available in this program"))
            }
            _ => {
                let names: Vec<_> = OPERATORS.iter().map(ToString::to_string).collect();
                Err(self.refused(&format!("one of {}, or all is needed", names.join(", "))))
            }
        }
    }

    pub(super) fn register(&self) -> Result<Register, Failure> {
        Ok(match self.between(0, 2)? {
            0 => Register::No,
            1 => Register::Local,
            _ => Register::Window,
        })
    }

    pub(super) fn algorithms(&self, program: &Program) -> Result<Algorithms, Failure> {
        let known = program.algorithms;
        if known.is_empty() {
            return Err(self.refused(&format!("for the {} there is only one way", program.what)));
        }
        let text = self.text.to_str().unwrap_or_default();
        if text == "all" {
            return Ok(Algorithms::All);
        }
        let mut chosen: Vec<&'static Algorithm> = Vec::new();
        for name in text.split(',') {
            let Some(algorithm) = known.iter().find(|known| known.name == name) else {
                let names: Vec<_> = known.iter().map(|algorithm| algorithm.name).collect();
                return Err(self.refused(&format!(
                    "one or several of {}, with commas, or all is needed",
                    names.join(", ")
                )));
            };
            if chosen.contains(&algorithm) {
                return Err(self.refused(&format!("{name} is named twice")));
            }
            chosen.push(algorithm);
        }
        Ok(Algorithms::Named(chosen))
    }

    /// An option of nccl-tests that this program lacks: only 0, which switches it off, is accepted.
    pub(super) fn only_zero(&self, what: &str, most: i64) -> Result<(), Failure> {
        match self.between(0, most)? {
            0 => Ok(()),
            _ => Err(self.refused(&format!("{what} is not available in this program"))),
        }
    }
}
