//! Finds the copies of NCCL that are already in this process.
//!
//! Two copies in one process do not know of each other's communicators, threads and settings; the
//! [`Loader`](crate::Loader) searches here before it opens anything.

use std::ffi::OsStr;
use std::fs;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::object::Object;

/// The symbol that identifies NCCL: every release has it.
const MARK: &core::ffi::CStr = c"ncclGetVersion";

/// A copy of NCCL in this process.
#[derive(Debug)]
pub(crate) struct Copy {
    /// Its file.
    pub(crate) file: PathBuf,
    /// Its handle; `None` if the linker does not return one, as for a copy that was loaded into a
    /// namespace of its own.
    pub(crate) object: Option<Object>,
}

impl Copy {
    /// Whether its code lies there. Its file may have another name by now: a package that is upgraded removes the file and
    /// points the link, by which it was opened, to the new one.
    fn is_in(&self, addresses: &Range<usize>) -> bool {
        self.object
            .is_some_and(|object| addresses.contains(&object.symbol(MARK).addr()))
    }
}

/// Returns all copies of NCCL in this process, each once.
pub(crate) fn copies() -> Vec<Copy> {
    let mut copies = Vec::new();

    // By NCCL's usual name. This also finds a library that has that name
    // and whose file has another, or is in no directory at all.
    for name in ["libnccl.so.2", "libnccl.so"] {
        let object = Object::already_loaded(OsStr::new(name));
        if let Some(object) = object.filter(|object| !object.symbol(MARK).is_null()) {
            add(&mut copies, object);
        }
    }

    // By mapped files: a library that was opened by path and has another name.
    for Code { addresses, file } in mapped_code() {
        let is_known = |copy: &Copy| copy.file == file || copy.is_in(&addresses);
        match Object::already_loaded(file.as_os_str()) {
            Some(object) if object.defines(MARK) => add(&mut copies, object),
            Some(_) => (),
            None if is_nccl_by_name(&file) && !copies.iter().any(is_known) => {
                copies.push(Copy { file, object: None });
            }
            None => (),
        }
    }

    // Linked into the program, or preloaded under an unrelated name. Searched last, because a
    // tool that wraps some of NCCL's functions looks the same and is not a second copy.
    if copies.is_empty()
        && let Some(object) = Object::with_global_symbol(MARK)
    {
        add(&mut copies, object);
    }
    copies
}

fn add(copies: &mut Vec<Copy>, object: Object) {
    // Compares functions, not objects: one library may have several names, for instance when a
    // preloaded one also registers under NCCL's name.
    let function = object.symbol(MARK);
    let known = |copy: &Copy| {
        copy.object
            .is_some_and(|other| other.symbol(MARK) == function)
    };
    if !copies.iter().any(known) {
        copies.push(Copy {
            file: object.file(),
            object: Some(object),
        });
    }
}

/// A file's code in this process.
struct Code {
    addresses: Range<usize>,
    file: PathBuf,
}

/// Returns the code in this process whose file may be NCCL by its name.
fn mapped_code() -> Vec<Code> {
    let maps = fs::read("/proc/self/maps").unwrap_or_default();
    let lines = maps.split(|byte| *byte == b'\n');
    lines.filter_map(code).collect()
}

/// Returns the code of one line of `/proc/self/maps`, if it is an executable mapping of a file whose name
/// is like NCCL's.
fn code(line: &[u8]) -> Option<Code> {
    // address, permissions, offset, device, inode, and after blanks the path.
    let mut fields = line.split(|byte| *byte == b' ');
    let (addresses, permissions) = (fields.next()?, fields.next()?);
    let (start, end) = str::from_utf8(addresses).ok()?.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    let addresses = address(start)?..address(end)?;
    let path = &line[line.iter().position(|byte| *byte == b'/')?..];
    let path = path.strip_suffix(b" (deleted)").unwrap_or(path);
    let path = Path::new(OsStr::from_bytes(path));
    let name = path.file_name()?.as_bytes();
    let candidate = name.starts_with(b"libnccl") && name.windows(3).any(|part| part == b".so");
    (permissions.contains(&b'x') && candidate).then(|| Code {
        addresses,
        file: path.to_owned(),
    })
}

/// Returns whether a file for which the linker has no handle is NCCL by its name, and not one of its plugins
/// (`libnccl-net.so` and the like).
fn is_nccl_by_name(file: &Path) -> bool {
    file.file_name()
        .is_some_and(|name| name.as_bytes().starts_with(b"libnccl.so"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(line: &str) -> Option<String> {
        code(line.as_bytes()).map(|code| code.file.display().to_string())
    }

    #[test]
    fn code_of_a_library_called_like_nccl_is_found_in_the_maps() {
        let line =
            "7f2a10000000-7f2a20000000 r-xp 00001000 fe:01 131 /opt/my libs/libnccl.so.2.27.7";
        assert_eq!(
            file(line).as_deref(),
            Some("/opt/my libs/libnccl.so.2.27.7")
        );
        let addresses = code(line.as_bytes()).map(|code| code.addresses);
        assert_eq!(addresses, Some(0x7f2a_1000_0000..0x7f2a_2000_0000));
        let line = "7f2a10000000-7f2a20000000 r-xp 00001000 00:01 131    /x/libnccl.so.2 (deleted)";
        assert_eq!(file(line).as_deref(), Some("/x/libnccl.so.2"));
    }

    #[test]
    fn data_other_libraries_and_anonymous_memory_are_passed_over() {
        for line in [
            "7f2a10000000-7f2a20000000 r--p 00000000 fe:01 131 /opt/libnccl.so.2",
            "7f2a10000000-7f2a20000000 r-xp 00000000 fe:01 131 /usr/lib/libc.so.6",
            "7f2a10000000-7f2a20000000 r-xp 00000000 fe:01 131 /opt/libnccl/README",
            "7f2a10000000-7f2a20000000 r-xp 00000000 00:00 0",
            "7f2a10000000-7f2a20000000 r-xp 00000000 00:00 0 [vdso]",
            "",
        ] {
            assert_eq!(file(line), None, "{line}");
        }
    }

    #[test]
    fn a_plugin_is_not_taken_for_nccl() {
        assert!(is_nccl_by_name(Path::new("/opt/libnccl.so.2")));
        assert!(!is_nccl_by_name(Path::new("/opt/libnccl-net.so")));
    }
}
