//! What `serde` does not check of a value that another process has sent: its fields are cleaned as they are read.
//!
//! ```
//! # use std::time::Duration;
//! # use serde::{Deserialize, Serialize};
//! # use nccl_base::wire::{bytes, clean};
//! #[derive(Serialize, Deserialize)]
//! struct Said {
//!     topic: String,
//!     #[serde(deserialize_with = "clean")]
//!     words: String,
//!     #[serde(deserialize_with = "clean")]
//!     age: Option<Duration>,
//!     #[serde(with = "bytes")]
//!     part: Vec<u8>,
//! }
//! ```

use std::time::Duration;

use serde::{Deserialize, Deserializer};

use crate::visible;

/// The longest time that is taken from another process: about 30 years, so that adding it to a clock cannot overflow.
const LONGEST: Duration = Duration::from_secs(1_000_000_000);

/// What is brought within bounds when it comes from another process.
#[doc(hidden)]
pub trait Clean {
    fn clean(&mut self);
}

/// A text that is only shown: no key, topic or address, which have to stay what they are.
impl Clean for String {
    fn clean(&mut self) {
        *self = visible::text(self);
    }
}

impl Clean for Duration {
    fn clean(&mut self) {
        *self = (*self).min(LONGEST);
    }
}

impl<T: Clean> Clean for Option<T> {
    fn clean(&mut self) {
        self.iter_mut().for_each(T::clean);
    }
}

impl<T: Clean> Clean for Vec<T> {
    fn clean(&mut self) {
        self.iter_mut().for_each(T::clean);
    }
}

impl<T: Clean, U: Clean> Clean for (T, U) {
    fn clean(&mut self) {
        self.0.clean();
        self.1.clean();
    }
}

/// For `#[serde(deserialize_with = "clean")]`.
#[doc(hidden)]
pub fn clean<'d, D: Deserializer<'d>, T: Deserialize<'d> + Clean>(from: D) -> Result<T, D::Error> {
    let mut value = T::deserialize(from)?;
    value.clean();
    Ok(value)
}

/// For `#[serde(with = "bytes")]`: bytes in one piece. A format that does not lend them, as JSON, cannot read them.
#[doc(hidden)]
pub mod bytes {
    use serde::{Deserialize, Deserializer, Serializer};

    #[doc(hidden)]
    pub fn serialize<S: Serializer>(bytes: &impl AsRef<[u8]>, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(bytes.as_ref())
    }

    #[doc(hidden)]
    pub fn deserialize<'d, D: Deserializer<'d>, T: From<&'d [u8]>>(from: D) -> Result<T, D::Error> {
        <&[u8]>::deserialize(from).map(T::from)
    }
}
