//! The token with which the ranks find each other inside NCCL.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use nccl_sys as sys;

use crate::communicator::Timeouts;
use crate::digest::digest;
use crate::time::deadline_after;
use crate::{Error, Library, Result, detached_call, ffi, forked};

/// A rendezvous token of NCCL (`ncclUniqueId`): 128 opaque bytes, made by one rank and passed to all.
///
/// One token makes one communicator. The process that made the token runs the rendezvous on a thread, so the process
/// has to stay alive until every rank has joined.
///
/// ```
/// # fn main() -> nccl::Result<()> {
/// nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
/// let library = nccl::Library::load()?;
/// let id = nccl::UniqueId::new(&library)?;
/// // … send id.as_bytes() to the other ranks by any means …
/// let same = nccl::UniqueId::from_bytes(*id.as_bytes());
/// assert_eq!(id, same);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct UniqueId([u8; UniqueId::LEN]);

impl UniqueId {
    /// The number of bytes of a token.
    ///
    /// ```
    /// assert_eq!(nccl::UniqueId::LEN, 128);
    /// ```
    pub const LEN: usize = sys::NCCL_UNIQUE_ID_BYTES;

    /// Makes a new token and starts to serve it.
    ///
    /// Does not wait for other ranks. An unused token keeps a thread and a socket of NCCL until the
    /// process ends.
    ///
    /// # Errors
    /// [`ErrorKind::Nccl`](crate::ErrorKind::Nccl), for instance when no network interface is usable;
    /// [`ErrorKind::TimedOut`](crate::ErrorKind::TimedOut) when NCCL does not return within 60 s.
    ///
    /// Wraps `ncclGetUniqueId`.
    ///
    /// ```
    /// # fn main() -> nccl::Result<()> {
    /// # nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
    /// let library = nccl::Library::load()?;
    /// assert_ne!(nccl::UniqueId::new(&library)?, nccl::UniqueId::new(&library)?);
    /// # Ok(())
    /// # }
    /// ```
    pub fn new(library: &Library) -> Result<Self> {
        Self::within(library, Timeouts::default().init)
    }

    /// Like [`new`](Self::new), within `timeout`.
    pub(crate) fn within(library: &Library, timeout: Duration) -> Result<Self> {
        const CALL: &str = "ncclGetUniqueId";
        let get = library.function(sys::Api::ncclGetUniqueId)?;
        // NCCL starts a thread for it.
        forked::begin()?;
        if !crate::single_rank::is(library) {
            nccl_base::system::env_drift::record_environment();
        }
        let library = library.clone();
        let made = detached_call::run(
            deadline_after(timeout),
            || false,
            move || {
                let mut raw = sys::ncclUniqueId {
                    internal: [0; Self::LEN],
                };
                // SAFETY: `raw` is a valid out-pointer for the duration of the call.
                let code = unsafe { get(&mut raw) };
                ffi::check(&library, CALL, code).map_err(Error::from)?;
                Ok(Self(raw.internal.map(ffi::byte)))
            },
            drop,
        );
        made.map_err(|not_back| not_back.into_error(CALL, timeout))?
    }

    /// Makes a token from the bytes that another rank sent.
    ///
    /// ```
    /// let id = nccl::UniqueId::from_bytes([0; nccl::UniqueId::LEN]);
    /// assert_eq!(id.as_bytes(), &[0; 128]);
    /// ```
    #[must_use]
    pub const fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes to pass to the other ranks.
    ///
    /// ```
    /// let id = nccl::UniqueId::from_bytes([7; nccl::UniqueId::LEN]);
    /// assert_eq!(id.as_bytes().len(), nccl::UniqueId::LEN);
    /// ```
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; Self::LEN] {
        &self.0
    }

    /// Returns the key that all ranks derive from the token for its communicator; `None` without the feature `peers`.
    pub(crate) fn key(&self) -> Option<Arc<str>> {
        let hexadecimal = |byte: &u8| format!("{byte:02x}");
        cfg!(feature = "peers").then(|| {
            let key: String = digest(self.as_bytes()).iter().map(hexadecimal).collect();
            key.into()
        })
    }

    pub(crate) fn raw(&self) -> sys::ncclUniqueId {
        sys::ncclUniqueId {
            internal: self.0.map(ffi::c_byte),
        }
    }
}

impl fmt::Debug for UniqueId {
    /// Writes only the first bytes, which suffice to tell tokens apart.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId(")?;
        for byte in &self.0[..8] {
            write!(f, "{byte:02x}")?;
        }
        f.write_str("…)")
    }
}
