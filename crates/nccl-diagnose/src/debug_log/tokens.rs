//! The words that NCCL's lines are made of: numbers, releases, interfaces, addresses.

use std::net::IpAddr;

use nccl_sys::Version;

/// An interface and its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Interface<'a> {
    pub(super) name: &'a str,
    pub(super) address: Option<IpAddr>,
}

pub(super) fn strip_any<'a>(text: &'a str, prefixes: &[&str]) -> Option<&'a str> {
    prefixes.iter().find_map(|prefix| text.strip_prefix(prefix))
}

/// A number at the beginning, and what follows.
pub(super) fn number<T: std::str::FromStr>(text: &str) -> Option<(T, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    Some((text[..digits].parse().ok()?, &text[digits..]))
}

/// The word after `key` (which ends with a space), if there is one.
pub(super) fn after<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let at = if text.starts_with(key) {
        0
    } else {
        let spaced = text
            .match_indices(key)
            .find(|(at, _)| text[..*at].ends_with(' '));
        spaced?.0
    };
    text[at + key.len()..].split_whitespace().next()
}

/// `2.32.3+cuda13.0`
pub(super) fn version(text: &str) -> Option<Version> {
    let (major, rest) = number(text)?;
    let (minor, rest) = number(rest.strip_prefix('.')?)?;
    let (patch, _) = number(rest.strip_prefix('.')?)?;
    Some(Version::new(major, minor, patch))
}

/// Without the `[0]` before it.
pub(super) fn unnumbered(text: &str) -> &str {
    match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((_, rest)) => rest,
        None => text,
    }
}

/// `eth0:10.0.0.1<0>`; an alias has colons in its name, and so has an address of IPv6.
pub(super) fn interface(text: &str) -> Interface<'_> {
    let text = text.split_whitespace().next().unwrap_or_default();
    let whole = text.split('<').next().unwrap_or_default();
    let parsed = whole.match_indices(':').take(16).find_map(|(at, _)| {
        let address = address(&whole[at + 1..])?;
        Some((&whole[..at], address))
    });
    match parsed {
        Some((name, address)) => Interface {
            name,
            address: Some(address),
        },
        None => Interface {
            name: whole.split(':').next().unwrap_or_default(),
            address: None,
        },
    }
}

/// An address, with or without `%eth0` and `<port>`.
pub(super) fn address(text: &str) -> Option<IpAddr> {
    let text = text.split('<').next()?.split('%').next()?;
    text.parse().ok()
}

/// `[3]`; a bus id in old releases.
pub(super) fn bracketed(text: &str) -> Option<(Option<u32>, &str)> {
    let (inside, rest) = text.strip_prefix('[')?.split_once(']')?;
    Some((inside.parse().ok(), rest))
}

/// The first address that a text names, as `10.0.0.2<4000>` or after `to` or `peer`.
pub(super) fn address_in(text: &str) -> Option<IpAddr> {
    text.split_whitespace()
        .filter(|word| word.contains('<'))
        .find_map(address)
}
