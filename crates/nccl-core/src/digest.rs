//! Digests of what the ranks compare, and of what is to stay secret.

/// What a digest is cut to.
pub(crate) type Digest = [u8; 16];

/// Of SHA-256.
#[cfg(feature = "peers")]
pub(crate) fn digest(bytes: &[u8]) -> Digest {
    use sha2::{Digest as _, Sha256};

    let mut digest = Digest::default();
    let of = digest.len();
    digest.copy_from_slice(&Sha256::digest(bytes)[..of]);
    digest
}

/// Without peers nothing is compared, and nothing needs a name.
#[cfg(not(feature = "peers"))]
pub(crate) fn digest(_: &[u8]) -> Digest {
    Digest::default()
}
