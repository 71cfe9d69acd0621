//! The cause of the end of a communicator, as it travels between ranks and as it reads.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, ErrorKind};
use crate::rendezvous::{Broken, Fields, put_bytes, put_index, put_number};

/// Why a communicator was ended, the same on all of its ranks.
///
/// ```
/// # fn show(error: nccl::Error) {
/// if let Some(fault) = error.fault() {
///     eprintln!("look at rank {} ({}, pid {})", fault.rank(), fault.host(), fault.pid());
/// }
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    class: FaultClass,
    communicator: String,
    rank: usize,
    host: String,
    pid: u32,
    epoch: u64,
    operation: String,
    cause: String,
    hint: String,
    /// Tells apart what reads the same.
    number: u64,
}

/// What kind of thing it was.
///
/// ```
/// # fn example(fault: &nccl::Fault) {
/// if fault.class() == nccl::FaultClass::Gone {
///     eprintln!("its process has to be started again");
/// }
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FaultClass {
    /// NCCL or CUDA failed on a rank.
    Failed,
    /// An operation of a rank ran into its limit.
    TimedOut,
    /// A rank's program ended the communicator, or its abort signal was given.
    Asked,
    /// A rank's process is gone, or it said that it fails.
    Gone,
    /// A rank's program wants nothing more of it but to shrink it ([`Communicator::revoke`]).
    ///
    /// [`Communicator::revoke`]: crate::Communicator::revoke
    Revoked,
    /// This rank cannot reach the others any more, and which side is at fault is not known.
    CutOff,
}

impl FaultClass {
    /// All classes, each at its number.
    pub(crate) const ALL: [Self; 6] = [
        Self::Failed,
        Self::TimedOut,
        Self::Asked,
        Self::Gone,
        Self::Revoked,
        Self::CutOff,
    ];

    /// As events and metrics call it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::TimedOut => "timed_out",
            Self::Asked => "asked",
            Self::Gone => "gone",
            Self::Revoked => "revoked",
            Self::CutOff => "cut_off",
        }
    }
}

/// A fault before it is known whose it is.
#[derive(Clone, Debug)]
pub(crate) struct Cause {
    class: FaultClass,
    operation: String,
    text: String,
    hint: String,
}

impl Cause {
    /// The rank's program wants it so.
    pub(crate) fn asked(reason: &str) -> Self {
        Self {
            class: FaultClass::Asked,
            operation: String::new(),
            text: reason.to_owned(),
            hint: String::new(),
        }
    }

    /// The rank's program wants it to stop.
    pub(crate) fn revoked(reason: &str) -> Self {
        Self {
            class: FaultClass::Revoked,
            ..Self::asked(reason)
        }
    }

    pub(crate) fn gone(how: String) -> Self {
        Self {
            class: FaultClass::Gone,
            operation: String::new(),
            text: how,
            hint: String::from(
                "the other ranks are its victims: look at what that process said last, and whether \
                 the system or its launcher killed it",
            ),
        }
    }

    pub(crate) fn cut_off(why: &str) -> Self {
        Self {
            class: FaultClass::CutOff,
            operation: String::new(),
            text: why.to_owned(),
            hint: String::from(
                "look at the network between this host and theirs; where more than half of the ranks can \
                 reach each other, those have gone on without this side",
            ),
        }
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }
}

impl From<&Error> for Cause {
    fn from(error: &Error) -> Self {
        Self {
            class: match error.kind() {
                ErrorKind::TimedOut { .. } | ErrorKind::Queued { .. } => FaultClass::TimedOut,
                ErrorKind::Aborted { .. } => FaultClass::Asked,
                _ => FaultClass::Failed,
            },
            operation: error
                .operation()
                .map(|operation| operation.what().to_string())
                .unwrap_or_default(),
            text: match error.kind() {
                ErrorKind::Aborted { reason } => reason.clone(),
                kind => kind.to_string(),
            },
            hint: error.hint().unwrap_or_default().to_owned(),
        }
    }
}

/// Of which communicator, and where, a fault arose.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'p> {
    pub(super) communicator: &'p str,
    /// In the communicator.
    pub(super) rank: usize,
    pub(super) host: &'p str,
    pub(super) pid: u32,
    /// Of the world that made the communicator.
    pub(super) epoch: u64,
}

impl Fault {
    pub(super) fn new(cause: Cause, place: Place<'_>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self {
            class: cause.class,
            communicator: place.communicator.to_owned(),
            rank: place.rank,
            host: place.host.to_owned(),
            pid: place.pid,
            epoch: place.epoch,
            operation: cause.operation,
            cause: cause.text,
            hint: cause.hint,
            number: NEXT.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// A fault of rank `rank` of `communicator`, on this host.
    pub(crate) fn here(cause: Cause, communicator: &str, rank: usize, epoch: u64) -> Self {
        let place = Place {
            communicator,
            rank,
            host: &crate::host::name(),
            pid: std::process::id(),
            epoch,
        };
        Self::new(cause, place)
    }

    pub(crate) fn communicator(&self) -> &str {
        &self.communicator
    }

    /// The name of the operation, and its number, where they are known.
    pub(crate) fn operation_and_sequence(&self) -> (Option<&str>, Option<u64>) {
        // As `Operation::what` writes it.
        let mut words = self.operation.split(' ');
        let name = words.next().filter(|name| !name.is_empty());
        let number = words.next().and_then(|word| word.strip_prefix('#'));
        (name, number.and_then(|number| number.parse().ok()))
    }

    /// What kind of thing it was.
    ///
    /// ```
    /// # fn example(fault: &nccl::Fault) {
    /// println!("{:?}", fault.class());
    /// # }
    /// ```
    #[must_use]
    pub fn class(&self) -> FaultClass {
        self.class
    }

    /// The rank that it began with, in the communicator.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator, fault: &nccl::Fault) {
    /// if fault.rank() == comm.rank() {
    ///     println!("it began here");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// That rank's host.
    ///
    /// ```
    /// # fn example(fault: &nccl::Fault) {
    /// println!("look on {}", fault.host());
    /// # }
    /// ```
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// That rank's process.
    ///
    /// ```
    /// # fn example(fault: &nccl::Fault) {
    /// println!("look at process {}", fault.pid());
    /// # }
    /// ```
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The epoch of the world that made the communicator ([`World::epoch`](crate::World::epoch)); 0 in the
    /// first, and without a world.
    ///
    /// ```
    /// # fn example(world: &nccl::World, fault: &nccl::Fault) {
    /// if fault.epoch() < world.epoch() {
    ///     println!("the world has gone on since");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The operation of that rank, if it was in one.
    ///
    /// ```
    /// # fn example(fault: &nccl::Fault) {
    /// println!("in {}", fault.operation().unwrap_or("no operation"));
    /// # }
    /// ```
    #[must_use]
    pub fn operation(&self) -> Option<&str> {
        (!self.operation.is_empty()).then_some(&*self.operation)
    }

    /// What went wrong there.
    ///
    /// ```
    /// # fn example(fault: &nccl::Fault) {
    /// println!("{}", fault.cause());
    /// # }
    /// ```
    #[must_use]
    pub fn cause(&self) -> &str {
        &self.cause
    }

    /// What to do about it, where that is known.
    ///
    /// ```
    /// # fn example(fault: &nccl::Fault) {
    /// println!("{}", fault.hint().unwrap_or("nothing is known to help"));
    /// # }
    /// ```
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        (!self.hint.is_empty()).then_some(&*self.hint)
    }

    pub(super) fn encode(&self, members: &[usize]) -> Vec<u8> {
        let mut to = Vec::new();
        put_index(&mut to, members.len());
        members.iter().for_each(|&rank| put_index(&mut to, rank));
        let class = match self.class {
            FaultClass::Failed => 0,
            FaultClass::TimedOut => 1,
            FaultClass::Asked => 2,
            FaultClass::Gone => 3,
            FaultClass::Revoked => 4,
            FaultClass::CutOff => 5,
        };
        put_number(&mut to, class);
        put_index(&mut to, self.rank);
        put_number(&mut to, u64::from(self.pid));
        put_number(&mut to, self.epoch);
        put_number(&mut to, self.number);
        for text in self.texts() {
            put_bytes(&mut to, cut(text).as_bytes());
        }
        to
    }

    /// The fault, and the ranks of its communicator in the world.
    pub(super) fn decode(bytes: &[u8]) -> Result<(Self, Vec<usize>), Broken> {
        let mut fields = Fields(bytes);
        let members = (0..fields.count(8)?)
            .map(|_| fields.index())
            .collect::<Result<_, _>>()?;
        let class = match fields.number()? {
            0 => FaultClass::Failed,
            1 => FaultClass::TimedOut,
            2 => FaultClass::Asked,
            3 => FaultClass::Gone,
            4 => FaultClass::Revoked,
            5 => FaultClass::CutOff,
            _ => return Err(Broken("a fault of an unknown class")),
        };
        let fault = Self {
            class,
            rank: fields.index()?,
            pid: u32::try_from(fields.number()?).map_err(|_| Broken("no process"))?,
            epoch: fields.number()?,
            number: fields.number()?,
            communicator: fields.text()?,
            host: fields.text()?,
            operation: fields.text()?,
            cause: fields.text()?,
            hint: fields.text()?,
        };
        fields.end()?;
        Ok((fault, members))
    }

    fn texts(&self) -> [&str; 5] {
        [
            &self.communicator,
            &self.host,
            &self.operation,
            &self.cause,
            &self.hint,
        ]
    }
}

/// The longest text that is sent, in bytes.
const LONGEST: usize = 4096;

fn cut(text: &str) -> &str {
    let mut end = LONGEST.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} ({}, pid {}", self.rank, self.host, self.pid)?;
        if self.epoch > 0 {
            write!(f, ", epoch {}", self.epoch)?;
        }
        f.write_str(")")?;
        match self.class {
            FaultClass::Gone => write!(f, " {}", self.cause),
            FaultClass::Revoked => write!(f, " revoked it: {}", self.cause),
            FaultClass::CutOff => write!(f, " is {}", self.cause),
            FaultClass::Asked if self.operation.is_empty() => {
                write!(f, " ended it: {}", self.cause)
            }
            _ if self.operation.is_empty() => write!(f, ": {}", self.cause),
            _ => write!(f, " in {}: {}", self.operation, self.cause),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(cause: Cause) -> Fault {
        Fault::new(
            cause,
            Place {
                communicator: "model/tp",
                rank: 2,
                host: "node-b",
                pid: 977,
                epoch: 0,
            },
        )
    }

    #[test]
    fn a_fault_names_rank_host_process_operation_and_cause() {
        let gone = fault(Cause::gone(String::from("is gone: it died")));
        assert_eq!(
            gone.to_string(),
            "rank 2 (node-b, pid 977) is gone: it died"
        );
        let later = Fault {
            epoch: 3,
            ..gone.clone()
        };
        assert_eq!(
            later.to_string(),
            "rank 2 (node-b, pid 977, epoch 3) is gone: it died"
        );
        let asked = fault(Cause::asked("enough"));
        assert_eq!(
            asked.to_string(),
            "rank 2 (node-b, pid 977) ended it: enough"
        );
        let late = Cause {
            class: FaultClass::TimedOut,
            operation: String::from("all_reduce #3"),
            text: String::from("it did not finish within 2s"),
            hint: String::new(),
        };
        let late = fault(late);
        assert_eq!(late.operation_and_sequence(), (Some("all_reduce"), Some(3)));
        assert_eq!(gone.operation_and_sequence(), (None, None));
        assert_eq!(
            late.to_string(),
            "rank 2 (node-b, pid 977) in all_reduce #3: it did not finish within 2s"
        );
    }

    #[test]
    fn a_fault_comes_through_whole_or_not_at_all() {
        let fault = fault(Cause::gone(String::from("is gone")));
        let bytes = fault.encode(&[4, 7]);
        assert_eq!(Fault::decode(&bytes), Ok((fault, vec![4, 7])));
        for end in 0..bytes.len() {
            assert!(Fault::decode(&bytes[..end]).is_err(), "{end}");
        }
    }

    #[test]
    fn a_long_cause_is_cut_at_a_character() {
        let long = fault(Cause::asked(&"ä".repeat(LONGEST)));
        let (cut, _) = Fault::decode(&long.encode(&[])).unwrap();
        assert_eq!(cut.cause, "ä".repeat(LONGEST / 2));
    }
}
