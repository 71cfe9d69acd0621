//! The secret of a job, which only its processes know.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::limits;
use crate::error::{Error, Result};

/// The secret of a job, which only its processes know: any bytes; surrounding whitespace is ignored.
///
/// Both sides of every connection prove that they know the secret without sending it. All messages are encrypted and
/// authenticated: bytes that were changed, repeated or dropped on the way end the connection.
///
/// The secret must be random, with at least 128 bits (`openssl rand -hex 32`): a recorded connection is enough to try
/// secrets offline. A secret of less than 16 bytes is an error where it is used. The `Debug` output does not contain
/// the secret.
///
/// ```
/// use nccl::control::Secret;
///
/// let secret = Secret::from("c8d2f0a19b7e4c55\n");
/// assert_eq!(secret, Secret::from(*b"c8d2f0a19b7e4c55"));
/// assert_eq!(format!("{secret:?}"), "Secret(…)");
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Creates a secret of any length; [`Job::check`](super::job::Job::check) refuses one that is too short.
    pub(super) fn new(bytes: impl AsRef<[u8]>) -> Self {
        Self(bytes.as_ref().trim_ascii().to_vec())
    }

    #[doc(hidden)]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Reads `NCCL_RUN_SECRET`, or the file that `NCCL_RUN_SECRET_FILE` names: any bytes; surrounding whitespace is
    /// ignored. A variable that is set but cannot be read is an error, so that a job never runs without its secret.
    pub(super) fn from_variables(get: impl Fn(&str) -> Option<OsString>) -> Result<Option<Self>> {
        match (get("NCCL_RUN_SECRET"), get("NCCL_RUN_SECRET_FILE")) {
            (Some(_), Some(path)) => Err(Error::rendezvous(format!(
                "both NCCL_RUN_SECRET and NCCL_RUN_SECRET_FILE={path:?} are set: leave one"
            ))),
            (Some(secret), None) => {
                let secret = secret.as_bytes();
                limits::secret("NCCL_RUN_SECRET", secret).map_err(Error::rendezvous)?;
                Ok(Some(Self::new(secret)))
            }
            (None, Some(path)) => Self::from_file(Path::new(&path)).map(Some),
            (None, None) => Ok(None),
        }
    }

    fn from_file(path: &Path) -> Result<Self> {
        let failed = |error| {
            Error::io(format!(
                "reading the job's secret (NCCL_RUN_SECRET_FILE={})",
                path.display()
            ))(error)
        };
        let mode = std::fs::metadata(path)
            .map_err(failed)?
            .permissions()
            .mode();
        if mode & 0o077 != 0 {
            return Err(Error::rendezvous(format!(
                "the job's secret in {} can be read by others (mode {:o}): chmod 600 it",
                path.display(),
                mode & 0o777
            )));
        }
        let bytes = std::fs::read(path).map_err(failed)?;
        let what = format!("the job's secret in {}", path.display());
        limits::secret(&what, &bytes).map_err(Error::rendezvous)?;
        Ok(Self::new(bytes))
    }
}

impl From<Vec<u8>> for Secret {
    fn from(bytes: Vec<u8>) -> Self {
        Self::new(bytes)
    }
}

impl From<&[u8]> for Secret {
    fn from(bytes: &[u8]) -> Self {
        Self::new(bytes)
    }
}

impl<const N: usize> From<[u8; N]> for Secret {
    fn from(bytes: [u8; N]) -> Self {
        Self::new(bytes)
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self::new(text)
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Self::new(text)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_secret_is_bytes_and_one_that_cannot_be_read_is_an_error() {
        let variable = |name: &'static str, value: &'static [u8]| {
            let value = OsStr::from_bytes(value);
            Secret::from_variables(move |asked| (asked == name).then(|| value.to_owned()))
        };
        let bytes = &b"\xff\xfe\x80 of sixteen bytes"[..];
        assert_eq!(
            variable("NCCL_RUN_SECRET", b"\xff\xfe\x80 of sixteen bytes\n").unwrap(),
            Some(Secret::new(bytes))
        );
        for (short, words) in [
            (&b""[..], "NCCL_RUN_SECRET is empty"),
            (b" \n", "NCCL_RUN_SECRET is empty"),
            (b" fifteen bytes!!\n", "NCCL_RUN_SECRET has 15 bytes"),
        ] {
            let error = variable("NCCL_RUN_SECRET", short).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
            let remedy = "(umask 077; openssl rand -hex 32 > FILE)";
            assert!(error.contains(remedy), "{error}");
        }
        let error = variable("NCCL_RUN_SECRET_FILE", b"/nowhere/\xff").unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Io { .. }), "{error}");
    }

    #[test]
    fn a_secret_comes_from_a_variable_or_a_private_file() {
        let path = std::env::temp_dir().join(format!("nccl-secret-{}", std::process::id()));
        std::fs::write(&path, "hush, and nobody hears it\n").unwrap();
        let read = || {
            Secret::from_variables(|name| {
                (name == "NCCL_RUN_SECRET_FILE").then(|| path.clone().into())
            })
        };
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        let error = read().unwrap_err().to_string();
        assert!(error.contains("chmod 600"), "{error}");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        let secret = Secret::new("hush, and nobody hears it");
        assert_eq!(read().unwrap(), Some(secret));
        std::fs::write(&path, "hush\n").unwrap();
        let error = read().unwrap_err().to_string();
        assert!(
            error.contains("has 4 bytes") && error.contains("openssl rand"),
            "{error}"
        );
        std::fs::remove_file(&path).unwrap();
        assert!(read().is_err());

        let both = Secret::from_variables(|_| Some("x".into()));
        assert!(both.unwrap_err().to_string().contains("leave one"));
        assert_eq!(Secret::from_variables(|_| None).unwrap(), None);
        assert_eq!(format!("{:?}", Secret::new("hush")), "Secret(…)");
    }
}
