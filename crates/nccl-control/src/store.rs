//! The store of a world: keys and values that the coordinator keeps for all ranks of one generation.
//!
//! The coordinator's service carries out each request as one step (`service/store.rs`). A member repeats a change after
//! it has lost the coordinator for a while, and the service carries it out only once (`node/services.rs`). If a call
//! fails because the coordinator is lost or silent, its change may nevertheless have been carried out.

use std::time::Duration;

use super::coordinator_message::Answer;
use super::frame::LARGEST;
use super::request::{ExpectedValue, Request};
use super::round::RequestError;
use super::service::LONGEST_NAME;
use super::world::World;
use crate::error::Result;
use crate::time::deadline_after;

/// The result of [`World::compare_set`].
///
/// ```
/// use nccl::control::CompareSet;
///
/// let world = nccl::World::single();
/// assert_eq!(world.compare_set("leader", None, b"0")?, CompareSet::Set);
/// let current = Some(b"0".to_vec());
/// assert_eq!(world.compare_set("leader", None, b"1")?, CompareSet::Unchanged { current });
/// # Ok::<(), nccl::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "the value may be another one than the expected"]
pub enum CompareSet {
    /// The key had the expected value, and now has the new one.
    Set,
    /// The key had another value, which is unchanged.
    Unchanged {
        /// The current value; `None` when the key is not set.
        current: Option<Vec<u8>>,
    },
}

impl CompareSet {
    /// Whether the new value was set.
    ///
    /// ```
    /// let world = nccl::World::single();
    /// assert!(world.compare_set("leader", None, b"0")?.is_set());
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn is_set(&self) -> bool {
        *self == Self::Set
    }
}

impl World {
    /// Stores `value` under `key`, for any rank to [`get`](Self::get); an earlier value is replaced.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.check_bytes(key, value.len())?;
        let request = |_| Request::Set {
            key: key.to_owned(),
            value: value.to_vec(),
        };
        self.ask_about_key(key, request).map(drop)
    }

    /// Returns the value under `key`; waits until a rank has set it.
    pub fn get(&self, key: &str) -> Result<Vec<u8>> {
        let request = |timeout: Duration| Request::Get {
            key: key.to_owned(),
            timeout,
        };
        match self.ask_about_key(key, request)? {
            Answer::Value(value) => Ok(value.to_vec()),
            _ => Err(self.error_of(key, &RequestError::OtherMembers)),
        }
    }

    /// Returns the value under `key`, if it is set now.
    pub fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let request = |_| Request::TryGet {
            key: key.to_owned(),
        };
        match self.ask_about_key(key, request)? {
            Answer::Value(value) => Ok(Some(value.to_vec())),
            Answer::Absent => Ok(None),
            _ => Err(self.error_of(key, &RequestError::OtherMembers)),
        }
    }

    /// Waits until all keys are set at the same time.
    pub fn wait(&self, keys: &[&str]) -> Result<()> {
        let topic = match keys {
            [] => return Ok(()),
            [key] => (*key).to_owned(),
            [first, others @ ..] => format!("{first} and {} more", others.len()),
        };
        for key in keys {
            self.check_key(&topic, key)?;
        }
        self.check_bytes(&topic, keys.iter().map(|key| key.len()).sum())?;
        let request = |timeout: Duration| Request::AwaitKeys {
            keys: keys.iter().map(|key| (*key).to_owned()).collect(),
            timeout,
        };
        self.ask_store(&topic, request).map(drop)
    }

    /// Adds to the decimal number under `key`, which counts as 0 if it is not set, and returns the sum.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let request = |_| Request::Add {
            key: key.to_owned(),
            amount,
        };
        match self.ask_about_key(key, request)? {
            Answer::Sum(sum) => Ok(sum),
            _ => Err(self.error_of(key, &RequestError::OtherMembers)),
        }
    }

    /// Stores `value` under `key` if the current value is `expected`; with `None`, if the key is not set.
    pub fn compare_set(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        value: &[u8],
    ) -> Result<CompareSet> {
        self.check_bytes(key, value.len() + expected.map_or(0, <[u8]>::len))?;
        let request = |_| Request::CompareSet {
            key: key.to_owned(),
            expected: expected.map(|bytes| ExpectedValue(bytes.to_vec())),
            value: value.to_vec(),
        };
        let current = match self.ask_about_key(key, request)? {
            Answer::Done => return Ok(CompareSet::Set),
            Answer::Value(value) => Some(value.to_vec()),
            Answer::Absent => None,
            _ => return Err(self.error_of(key, &RequestError::OtherMembers)),
        };
        Ok(CompareSet::Unchanged { current })
    }

    /// Removes `key` and its value. Returns whether it was set.
    pub fn delete(&self, key: &str) -> Result<bool> {
        let request = |_| Request::Delete {
            key: key.to_owned(),
        };
        match self.ask_about_key(key, request)? {
            Answer::Done => Ok(true),
            Answer::Absent => Ok(false),
            _ => Err(self.error_of(key, &RequestError::OtherMembers)),
        }
    }

    fn ask_about_key(
        &self,
        key: &str,
        request: impl FnOnce(Duration) -> Request,
    ) -> Result<Answer> {
        self.check_key(key, key)?;
        self.ask_store(key, request)
    }

    fn ask_store(&self, topic: &str, request: impl FnOnce(Duration) -> Request) -> Result<Answer> {
        self.ask(topic, request, deadline_after(self.timeout()), None)
    }

    /// Checks that a key is not too long.
    fn check_key(&self, topic: &str, key: &str) -> Result<()> {
        match key.len() {
            ..=LONGEST_NAME => Ok(()),
            bytes => Err(self.error_of(topic, &RequestError::TooLarge { bytes })),
        }
    }

    /// Checks that a request is within the size limit of the store.
    fn check_bytes(&self, topic: &str, bytes: usize) -> Result<()> {
        match bytes {
            ..=LARGEST => Ok(()),
            _ => Err(self.error_of(topic, &RequestError::TooLarge { bytes })),
        }
    }
}
