//! Digests of values that the ranks compare, and of secret values.

/// The first bytes of a SHA-256 digest.
pub(crate) type Digest = [u8; 16];

/// Returns the first bytes of the SHA-256 digest.
#[cfg(feature = "peers")]
pub(crate) fn digest(bytes: &[u8]) -> Digest {
    use sha2::{Digest as _, Sha256};

    let mut digest = Digest::default();
    let of = digest.len();
    digest.copy_from_slice(&Sha256::digest(bytes)[..of]);
    digest
}

/// Without the feature `peers` no digest is needed.
#[cfg(not(feature = "peers"))]
pub(crate) fn digest(_: &[u8]) -> Digest {
    Digest::default()
}
