//! A copy of `libnccl.so.2` with device code for one GPU architecture only, and without debug information.
//!
//! NVIDIA's library has machine code for every architecture, a few hundred megabytes, and debug information, some seventy. Code
//! that a given GPU never selects is overwritten with zeros in place, and so are the debug sections: every offset stays the
//! same, the linker sees the same file, and a compressor removes almost all of the zeros.

use std::ops::Range;

use crate::Result;

/// The names of sections with device code.
const SECTIONS: [&[u8]; 2] = [b"__nv_relfatbin", b".nv_fatbin"];
/// The first bytes of every container of device code.
const MAGIC: u32 = 0xBA55_ED50;
/// The kind of an entry with machine code; others are PTX.
const CUBIN: u16 = 2;

/// The beginning of the names of sections that only debuggers read.
const DEBUG: &[u8] = b".debug_";

/// Zeros the debug sections, and all device code in `image` except machine code for `architecture` (compute capability times
/// ten); returns the bytes of device code that are left.
///
/// # Errors
/// When `image` is no 64-bit ELF file, or has no machine code for that architecture.
pub(crate) fn keep_architecture(image: &mut [u8], architecture: u32) -> Result<usize> {
    let mut kept = 0;
    for (kind, range) in sections(image)? {
        let section = image
            .get_mut(range)
            .ok_or("a section lies outside of the file")?;
        match kind {
            Kind::Device => kept += blank(section, architecture)?,
            Kind::Debug => section.fill(0),
        }
    }
    if kept == 0 {
        return Err(format!("there is no machine code for sm_{architecture} in it").into());
    }
    Ok(kept)
}

/// The kind of a section that is changed.
enum Kind {
    Device,
    Debug,
}

/// The ranges of these sections in the file.
fn sections(image: &[u8]) -> Result<Vec<(Kind, Range<usize>)>> {
    if !image.starts_with(b"\x7fELF\x02\x01") {
        return Err("it is not a 64-bit little-endian ELF file".into());
    }
    let table = number(image, 0x28, 8)?;
    let size = number(image, 0x3A, 2)?;
    let count = number(image, 0x3C, 2)?;
    let names = number(image, table + number(image, 0x3E, 2)? * size + 0x18, 8)?;
    let mut found = Vec::new();
    for index in 0..count {
        let header = table + index * size;
        let name = names + number(image, header, 4)?;
        let name = image.get(name..).unwrap_or_default();
        let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
        let kind = match SECTIONS.contains(&name) {
            true => Kind::Device,
            false if name.starts_with(DEBUG) => Kind::Debug,
            false => continue,
        };
        let begin = number(image, header + 0x18, 8)?;
        found.push((kind, begin..begin + number(image, header + 0x20, 8)?));
    }
    Ok(found)
}

/// Zeros entries of other architectures in one section; returns the bytes that are left.
fn blank(section: &mut [u8], architecture: u32) -> Result<usize> {
    let (mut kept, mut at) = (0, 0);
    while at + 16 <= section.len() {
        if number(section, at, 4)? != MAGIC as usize {
            at += 8;
            continue;
        }
        let mut entry = at + number(section, at + 6, 2)?;
        let end = entry + number(section, at + 8, 8)?;
        while entry < end {
            let kind = number(section, entry, 2)?;
            let header = number(section, entry + 4, 4)?;
            let size = number(section, entry + 8, 8)?;
            let first = entry + header;
            if kind == usize::from(CUBIN)
                && number(section, entry + 28, 4)? == architecture as usize
            {
                kept += size;
            } else {
                section
                    .get_mut(first..first + size)
                    .ok_or("an entry of device code reaches beyond its section")?
                    .fill(0);
            }
            if header + size == 0 {
                return Err("an entry of device code is empty".into());
            }
            entry = first + size;
        }
        at = end;
    }
    Ok(kept)
}

/// The little-endian number of `size` bytes at `at`.
fn number(bytes: &[u8], at: usize, size: usize) -> Result<usize> {
    let bytes = at
        .checked_add(size)
        .and_then(|end| bytes.get(at..end))
        .ok_or("the file ends in the middle of a structure")?;
    let number = bytes
        .iter()
        .rev()
        .fold(0u64, |number, &byte| number << 8 | u64::from(byte));
    Ok(usize::try_from(number)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An entry of device code: its header is 64 bytes long.
    fn entry(kind: u16, architecture: u32, payload: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 64];
        bytes[0..2].copy_from_slice(&kind.to_le_bytes());
        bytes[4..8].copy_from_slice(&64u32.to_le_bytes());
        bytes[8..16].copy_from_slice(&(payload.len() as u64).to_le_bytes());
        bytes[28..32].copy_from_slice(&architecture.to_le_bytes());
        bytes.extend(payload);
        bytes
    }

    fn container(entries: &[Vec<u8>]) -> Vec<u8> {
        let body = entries.concat();
        let mut bytes = MAGIC.to_le_bytes().to_vec();
        bytes.extend(1u16.to_le_bytes());
        bytes.extend(16u16.to_le_bytes());
        bytes.extend((body.len() as u64).to_le_bytes());
        bytes.extend(body);
        bytes
    }

    /// The debug section of [`library`].
    const LINES: [u8; 24] = [4; 24];

    /// A file with one section of device code, one for debuggers, and a section of names.
    fn library(code: &[u8]) -> Vec<u8> {
        let names = b"\0.nv_fatbin\0.debug_line\0";
        let mut image = vec![0; 64];
        image[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let begin = image.len();
        image.extend(code);
        let lines_at = image.len();
        image.extend(LINES);
        let names_at = image.len();
        image.extend(names);
        let table = image.len();
        for (name, offset, size) in [
            (1u32, begin, code.len()),
            (12, lines_at, LINES.len()),
            (0, names_at, names.len()),
        ] {
            let mut header = vec![0; 64];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[0x18..0x20].copy_from_slice(&(offset as u64).to_le_bytes());
            header[0x20..0x28].copy_from_slice(&(size as u64).to_le_bytes());
            image.extend(header);
        }
        image[0x28..0x30].copy_from_slice(&(table as u64).to_le_bytes());
        for (at, value) in [(0x3A, 64u16), (0x3C, 3), (0x3E, 2)] {
            image[at..at + 2].copy_from_slice(&value.to_le_bytes());
        }
        image
    }

    #[test]
    fn only_code_for_the_architecture_is_left_and_nothing_moves() {
        let [old, wanted, text] = [[1; 24], [2; 24], [3; 24]];
        let code = container(&[
            entry(2, 80, &old),
            entry(2, 90, &wanted),
            entry(1, 90, &text),
        ]);
        let mut image = library(&code);
        let before = image.clone();
        assert_eq!(keep_architecture(&mut image, 90).unwrap(), 24);
        let left = |byte| image.iter().filter(|&&b| b == byte).count();
        assert_eq!(image.len(), before.len());
        assert!(
            !image
                .windows(24)
                .any(|w| w == old || w == text || w == LINES)
        );
        assert!(image.windows(24).any(|w| w == wanted));
        assert!(left(2) >= 24);
    }

    #[test]
    fn a_library_without_that_architecture_is_refused() {
        let code = container(&[entry(2, 80, &[1; 16])]);
        let error = keep_architecture(&mut library(&code), 90).unwrap_err();
        assert!(error.to_string().contains("sm_90"), "{error}");
        assert!(keep_architecture(&mut b"#!/bin/sh".to_vec(), 90).is_err());
        let mut cut = library(&code);
        cut.truncate(70);
        assert!(keep_architecture(&mut cut, 90).is_err());
    }
}
