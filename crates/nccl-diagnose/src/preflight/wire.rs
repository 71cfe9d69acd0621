//! How facts and reports travel: fields one after another, every text and every list with a limit.
//!
//! What is longer than its limit is cut where it is written, so that everything that was written can be
//! read; what comes longer than that is refused.

use std::net::IpAddr;

use nccl_base::report::{Finding, Report, Severity};
use nccl_base::system::late::Late;
use nccl_base::system::limits::Limits;
use nccl_base::system::variables::Variable;

pub(super) use nccl_base::codec::{Broken, Fields};
use nccl_base::codec::{put_bytes, put_index, put_number};

/// The longest text, in bytes: a path.
pub(super) const LONGEST_TEXT: usize = 4096;

/// The longest list of a fact; ranks are as many as there are.
pub(super) const LONGEST_LIST: usize = 512;
const _: () = assert!(nccl_base::system::variables::MOST <= LONGEST_LIST);

/// More ranks than NCCL was ever started with.
pub(super) const MOST_RANKS: usize = 1 << 20;

pub(super) const MOST_FINDINGS: usize = 1024;

/// Something with a place in a message.
pub(super) trait Wire: Sized {
    fn put(&self, to: &mut Vec<u8>);
    fn take(from: &mut Fields<'_>) -> Result<Self, Broken>;
}

/// Everything of a message, and nothing behind it.
pub(super) fn decode<T: Wire>(bytes: &[u8]) -> Result<T, Broken> {
    let mut fields = Fields(bytes);
    let value = T::take(&mut fields)?;
    fields.end()?;
    Ok(value)
}

pub(super) fn encode<T: Wire>(value: &T) -> Vec<u8> {
    let mut bytes = Vec::new();
    value.put(&mut bytes);
    bytes
}

/// Implements [`Wire`] for a struct, field by field.
macro_rules! fields {
    ($type:ident { $($field:ident),* $(,)? }) => {
        impl $crate::preflight::wire::Wire for $type {
            fn put(&self, to: &mut Vec<u8>) {
                $($crate::preflight::wire::Wire::put(&self.$field, to);)*
            }

            fn take(
                from: &mut $crate::preflight::wire::Fields<'_>,
            ) -> Result<Self, $crate::preflight::wire::Broken> {
                Ok(Self {
                    $($field: $crate::preflight::wire::Wire::take(from)?,)*
                })
            }
        }
    };
}
pub(super) use fields;

impl Wire for u64 {
    fn put(&self, to: &mut Vec<u8>) {
        put_number(to, *self);
    }

    fn take(from: &mut Fields<'_>) -> Result<Self, Broken> {
        from.number()
    }
}

impl Wire for usize {
    fn put(&self, to: &mut Vec<u8>) {
        put_index(to, *self);
    }

    fn take(from: &mut Fields<'_>) -> Result<Self, Broken> {
        from.index()
    }
}

impl Wire for bool {
    fn put(&self, to: &mut Vec<u8>) {
        to.push(u8::from(*self));
    }

    fn take(from: &mut Fields<'_>) -> Result<Self, Broken> {
        match from.array::<1>()? {
            [0] => Ok(false),
            [1] => Ok(true),
            _ => Err(Broken("neither yes nor no")),
        }
    }
}

impl Wire for String {
    fn put(&self, to: &mut Vec<u8>) {
        put_bytes(to, &self.as_bytes()[..self.floor_to(LONGEST_TEXT)]);
    }

    fn take(from: &mut Fields<'_>) -> Result<Self, Broken> {
        let text = from.text()?;
        if text.len() > LONGEST_TEXT {
            return Err(Broken("a text that is too long"));
        }
        Ok(text)
    }
}

/// Where to cut a text.
trait Floor {
    fn floor_to(&self, longest: usize) -> usize;
}

impl Floor for String {
    fn floor_to(&self, longest: usize) -> usize {
        let mut end = longest.min(self.len());
        while !self.is_char_boundary(end) {
            end -= 1;
        }
        end
    }
}

impl Wire for IpAddr {
    fn put(&self, to: &mut Vec<u8>) {
        match self {
            Self::V4(address) => {
                to.push(4);
                to.extend_from_slice(&address.octets());
            }
            Self::V6(address) => {
                to.push(6);
                to.extend_from_slice(&address.octets());
            }
        }
    }

    fn take(from: &mut Fields<'_>) -> Result<Self, Broken> {
        match from.array::<1>()? {
            [4] => Ok(Self::from(from.array::<4>()?)),
            [6] => Ok(Self::from(from.array::<16>()?)),
            _ => Err(Broken("an address of no family")),
        }
    }
}

impl<T: Wire> Wire for Option<T> {
    fn put(&self, to: &mut Vec<u8>) {
        self.is_some().put(to);
        if let Some(value) = self {
            value.put(to);
        }
    }

    fn take(from: &mut Fields<'_>) -> Result<Self, Broken> {
        bool::take(from)?.then(|| T::take(from)).transpose()
    }
}

impl<T: Wire> Wire for Vec<T> {
    fn put(&self, to: &mut Vec<u8>) {
        put_list(self, limit::<T>(), to);
    }

    fn take(from: &mut Fields<'_>) -> Result<Self, Broken> {
        take_list(limit::<T>(), from)
    }
}

/// Lists of numbers are of ranks.
fn limit<T: Wire>() -> usize {
    if size_of::<T>() <= size_of::<usize>() {
        MOST_RANKS
    } else {
        LONGEST_LIST
    }
}

pub(super) fn put_list<T: Wire>(list: &[T], most: usize, to: &mut Vec<u8>) {
    let list = &list[..list.len().min(most)];
    put_index(to, list.len());
    list.iter().for_each(|value| value.put(to));
}

pub(super) fn take_list<T: Wire>(most: usize, from: &mut Fields<'_>) -> Result<Vec<T>, Broken> {
    let count = from.count(1)?;
    if count > most {
        return Err(Broken("a list that is too long"));
    }
    (0..count).map(|_| T::take(from)).collect()
}

const SEVERITIES: [Severity; 3] = [Severity::Ok, Severity::Warning, Severity::Error];

impl Wire for Severity {
    fn put(&self, to: &mut Vec<u8>) {
        to.push(*self as u8);
    }

    fn take(from: &mut Fields<'_>) -> Result<Self, Broken> {
        let [code] = from.array()?;
        let known = SEVERITIES.iter().find(|severity| **severity as u8 == code);
        known
            .copied()
            .ok_or(Broken("a severity that does not exist"))
    }
}

impl Wire for Finding {
    fn put(&self, to: &mut Vec<u8>) {
        self.severity.put(to);
        self.check.put(to);
        self.ranks.put(to);
        self.hosts.put(to);
        self.what.put(to);
        self.fix.put(to);
    }

    fn take(from: &mut Fields<'_>) -> Result<Self, Broken> {
        let mut finding = Self::ok("", "");
        finding.severity = Wire::take(from)?;
        finding.check = Wire::take(from)?;
        finding.ranks = Wire::take(from)?;
        finding.hosts = Wire::take(from)?;
        finding.what = Wire::take(from)?;
        finding.fix = Wire::take(from)?;
        Ok(finding)
    }
}

impl Wire for Report {
    fn put(&self, to: &mut Vec<u8>) {
        put_list(self.findings(), MOST_FINDINGS, to);
    }

    fn take(from: &mut Fields<'_>) -> Result<Self, Broken> {
        let findings = take_list(MOST_FINDINGS, from)?;
        Ok(Self::in_order(findings))
    }
}

fields!(Variable { name, value, file });

fields!(Late { name, was, is });

fields!(Limits {
    files,
    files_hard,
    files_used,
    processes,
    threads_used,
    tasks_left,
    tasks_file,
    locked,
    memory,
    memory_file,
    processors,
    shared_size,
    shared_free,
    leaked,
    leaked_bytes,
    first_port,
    last_port,
});
