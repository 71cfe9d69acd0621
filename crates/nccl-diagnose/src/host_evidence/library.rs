//! The identity of a loaded library: its file, and the GNU build id, which differs between builds of one release.
//!
//! The id is read from the image in memory, because the file may have been replaced or removed since, and otherwise
//! from the file.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// Maximum length of the list of mappings, and of the notes, that are read.
const LONGEST_MAPS: u64 = 16 << 20;
const LONGEST_NOTES: u64 = 64 << 10;

/// Returns the GNU build id of the library that was loaded from `path`, in hexadecimal digits; `None` where it has none, or
/// cannot be read.
///
/// ```
/// let library = nccl::Library::load();
/// # let library = library.or_else(|_| { nccl_emulator::install().unwrap(); nccl::Library::load() });
/// let library = library?;
/// println!("{} has build id {:?}", library.path().display(), nccl::host_evidence::build_id(library.path()));
/// # Ok::<(), nccl::Error>(())
/// ```
#[must_use]
pub fn build_id(path: &Path) -> Option<String> {
    of_image(path).or_else(|| of_file(path))
}

/// Reads the id of the image in this process's memory.
fn of_image(path: &Path) -> Option<String> {
    let mut maps = String::new();
    let file = File::open("/proc/self/maps").ok()?;
    file.take(LONGEST_MAPS).read_to_string(&mut maps).ok()?;
    let base = base_of(&maps, path).or_else(|| base_of(&maps, &path.canonicalize().ok()?))?;
    let memory = File::open("/proc/self/mem").ok()?;
    let read = |address: u64, length: u64| read_at(&memory, base.checked_add(address)?, length);
    of_elf(&read, |header| header.address)
}

fn of_file(path: &Path) -> Option<String> {
    let file = File::open(path).ok()?;
    let read = |offset: u64, length: u64| read_at(&file, offset, length);
    of_elf(&read, |header| header.offset)
}

fn read_at(file: &File, offset: u64, length: u64) -> Option<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(length).ok()?];
    file.read_exact_at(&mut bytes, offset).ok()?;
    Some(bytes)
}

/// Returns the address of the first byte of the file `path` in `/proc/self/maps`:
/// `7f00-7f10 r--p 00000000 00:1a 123    /usr/lib/libnccl.so.2`.
fn base_of(maps: &str, path: &Path) -> Option<u64> {
    let path = path.to_str()?;
    let found = maps.lines().find_map(|line| {
        let (fields, name) = line.split_at(line.find(['/', '['])?);
        let is_it = name == path || name.strip_suffix(" (deleted)") == Some(path);
        let mut fields = fields.split_ascii_whitespace();
        let range = fields.next()?;
        let offset = u64::from_str_radix(fields.nth(1)?, 16).ok()?;
        (is_it && offset == 0).then_some(range)
    })?;
    u64::from_str_radix(found.split_once('-')?.0, 16).ok()
}

/// A program header of type `PT_NOTE`.
struct NoteHeader {
    offset: u64,
    address: u64,
    length: u64,
    alignment: u64,
}

/// Finds the id in the notes of a 64-bit little-endian ELF file or image.
fn of_elf(
    read: &dyn Fn(u64, u64) -> Option<Vec<u8>>,
    place: impl Fn(&NoteHeader) -> u64,
) -> Option<String> {
    const PT_NOTE: u64 = 4;
    let header = read(0, 64)?;
    if !header.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let table = number(&header, 32, 8)?;
    let (size, count) = (number(&header, 54, 2)?, number(&header, 56, 2)?);
    if size < 56 || count > 256 {
        return None;
    }
    let headers = read(table, size * count)?;
    let notes = headers.chunks_exact(usize::try_from(size).ok()?);
    let notes = notes.filter(|header| number(header, 0, 4) == Some(PT_NOTE));
    let notes = notes.filter_map(|header| {
        Some(NoteHeader {
            offset: number(header, 8, 8)?,
            address: number(header, 16, 8)?,
            length: number(header, 32, 8)?.min(LONGEST_NOTES),
            alignment: number(header, 48, 8)?,
        })
    });
    let mut notes = notes.filter_map(|header| {
        let bytes = read(place(&header), header.length)?;
        of_notes(&bytes, if header.alignment == 8 { 8 } else { 4 })
    });
    notes.next()
}

/// Finds the id among notes: lengths of name and value, the type, and both, padded.
fn of_notes(mut notes: &[u8], alignment: usize) -> Option<String> {
    const NT_GNU_BUILD_ID: u64 = 3;
    loop {
        let name_length = usize::try_from(number(notes, 0, 4)?).ok()?;
        let length = usize::try_from(number(notes, 4, 4)?).ok()?;
        let kind = number(notes, 8, 4)?;
        let start = 12usize
            .checked_add(name_length)?
            .checked_next_multiple_of(alignment)?;
        let end = start.checked_add(length)?;
        let name = notes.get(12..12usize.checked_add(name_length)?)?;
        let value = notes.get(start..end)?;
        if kind == NT_GNU_BUILD_ID && name == b"GNU\0" && (1..=64).contains(&length) {
            return Some(value.iter().map(|byte| format!("{byte:02x}")).collect());
        }
        notes = notes.get(end.checked_next_multiple_of(alignment)?..)?;
    }
}

/// Returns the little-endian number of `length` bytes.
fn number(bytes: &[u8], at: usize, length: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(length)?)?;
    let mut number = [0; 8];
    number[..length].copy_from_slice(bytes);
    Some(u64::from_le_bytes(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(name: &[u8], kind: u32, value: &[u8]) -> Vec<u8> {
        let mut note = Vec::new();
        for number in [name.len() as u32, value.len() as u32, kind] {
            note.extend(number.to_le_bytes());
        }
        for part in [name, value] {
            note.extend(part);
            note.resize(note.len().next_multiple_of(4), 0);
        }
        note
    }

    #[test]
    fn the_id_is_found_among_other_notes_and_nothing_makes_the_reader_panic() {
        let notes = [note(b"CORE\0", 3, &[9; 5]), note(b"GNU\0", 3, &[0xab, 1])].concat();
        assert_eq!(of_notes(&notes, 4).as_deref(), Some("ab01"));
        for end in 0..notes.len() - 2 {
            assert_eq!(of_notes(&notes[..end], 4), None, "{end}");
        }
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..10_000 {
            let mut notes = notes.clone();
            for _ in 0..random.usize(1..6) {
                let at = random.usize(0..notes.len());
                notes[at] = random.u8(..);
            }
            let _ = of_notes(&notes, 4);
            let read = |at: u64, length: u64| {
                let at = usize::try_from(at).ok()?;
                notes
                    .get(at..at.checked_add(usize::try_from(length).ok()?)?)
                    .map(<[u8]>::to_vec)
            };
            let _ = of_elf(&read, |header| header.offset);
        }
    }

    #[test]
    fn the_image_in_memory_and_its_file_have_the_same_id() {
        let own = std::env::current_exe().unwrap();
        let Some(id) = of_file(&own) else {
            println!("NOT TESTED: this linker writes no build id");
            return;
        };
        assert_eq!(of_image(&own), Some(id.clone()));
        assert_eq!(build_id(&own), Some(id));
        assert_eq!(build_id(Path::new("/nowhere/libnccl.so.2")), None);
        // Binutils reads the same.
        let notes = std::process::Command::new("readelf")
            .arg("-n")
            .arg(&own)
            .output();
        if let Ok(notes) = notes {
            let id = of_file(&own).unwrap_or_default();
            let text = String::from_utf8_lossy(&notes.stdout);
            assert!(text.contains(&id), "{id}: {text}");
        }
    }

    #[test]
    fn the_base_of_a_removed_file_is_found() {
        let maps = "7f00-7f10 r--p 00000000 00:1a 12   /usr/lib/libc.so.6\n\
                    8f00-8f10 r--p 00000000 00:01 13   /memfd:nccl (deleted)\n\
                    8f10-8f20 r-xp 00001000 00:01 13   /memfd:nccl (deleted)\n";
        let base = |path: &str| base_of(maps, Path::new(path));
        assert_eq!(base("/memfd:nccl"), Some(0x8f00));
        assert_eq!(base("/memfd:nccl (deleted)"), Some(0x8f00));
        assert_eq!(base("/usr/lib/libc.so"), None);
    }
}
