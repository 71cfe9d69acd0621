//! Stand-ins: shared objects through which the dynamic linker of this process finds functions and tables of this
//! process under a library's name.
//!
//! [`load`] makes and loads a shared object without code (`elf`) whose SONAME is the library's. From then on the
//! dynamic linker treats the library as loaded, and `dlsym` returns the given addresses.
#![cfg(not(loom))]
#![allow(
    rustdoc::private_intra_doc_links,
    reason = "an internal crate: its readers have the sources"
)]

mod elf;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

pub use elf::{Symbol, shared_object};

/// Why a stand-in could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum StandInError {
    /// The dynamic linker refused the object.
    #[error("the dynamic linker does not load the stand-in for {soname}: {reason}")]
    Refused {
        /// The library's name.
        soname: String,
        /// The dynamic linker's message.
        reason: String,
    },
    /// Neither a memory file nor a temporary file could be made for the object.
    #[error("no file for the stand-in of {soname}")]
    NoFile {
        /// The library's name.
        soname: String,
        /// The cause.
        source: io::Error,
    },
}

/// Returns the file that a library of this name was loaded from, if it is loaded.
pub fn loaded_from(soname: &CStr) -> Option<PathBuf> {
    // SAFETY: `RTLD_NOLOAD` only asks; nothing is loaded and no code of the library runs.
    let handle = unsafe { libc::dlopen(soname.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if !handle.is_null() {
        let path = path_of(handle).unwrap_or_else(|| "an unknown file".into());
        // SAFETY: gives back the reference that the call above took.
        unsafe { libc::dlclose(handle) };
        return Some(path);
    }
    // A copy with a different SONAME, such as libcuda.so.535.54: search by file name.
    let mut search = Search {
        prefix: soname
            .to_bytes()
            .split(|&b| b == b'.')
            .next()
            .unwrap_or_default(),
        found: None,
    };
    // SAFETY: the callback gets `search` back, which outlives the call, and keeps no pointer.
    unsafe { libc::dl_iterate_phdr(Some(matches_file_name), (&raw mut search).cast()) };
    search.found
}

struct Search<'a> {
    /// "libcuda".
    prefix: &'a [u8],
    found: Option<PathBuf>,
}

unsafe extern "C" fn matches_file_name(
    info: *mut libc::dl_phdr_info,
    _: usize,
    data: *mut c_void,
) -> c_int {
    use std::os::unix::ffi::OsStrExt;
    // SAFETY: `loaded_from` passed a `Search`, and `info` is valid for the call.
    let (search, name) = unsafe { (&mut *data.cast::<Search<'_>>(), (*info).dlpi_name) };
    if name.is_null() {
        return 0;
    }
    // SAFETY: the dynamic linker's names are C strings.
    let path = unsafe { CStr::from_ptr(name) }.to_bytes();
    let file = path.rsplit(|&b| b == b'/').next().unwrap_or_default();
    let rest = file.strip_prefix(search.prefix);
    if rest.is_some_and(|rest| rest.starts_with(b".so")) {
        search.found = Some(PathBuf::from(std::ffi::OsStr::from_bytes(path)));
        return 1;
    }
    0
}

/// Returns the path by which the dynamic linker knows a loaded object.
fn path_of(handle: *mut c_void) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt;
    let mut map: *mut LinkMap = std::ptr::null_mut();
    // SAFETY: a live handle; the request stores one pointer.
    let failed = unsafe { dlinfo(handle, RTLD_DI_LINKMAP, (&raw mut map).cast()) } != 0;
    if failed || map.is_null() {
        return None;
    }
    // SAFETY: the link map of a live handle, whose name is a C string.
    let name = unsafe { CStr::from_ptr((*map).name) };
    Some(PathBuf::from(std::ffi::OsStr::from_bytes(name.to_bytes())))
}

const RTLD_DI_LINKMAP: c_int = 2;

/// The public part of the dynamic linker's record of an object.
#[repr(C)]
struct LinkMap {
    address: usize,
    name: *const c_char,
}

unsafe extern "C" {
    fn dlinfo(handle: *mut c_void, request: c_int, info: *mut c_void) -> c_int;
}

/// Makes `soname` resolve to `symbols`, for the rest of the process. `owner` is the beginning of the object's name in
/// `/proc/self/maps`.
///
/// # Errors
/// See [`StandInError`].
pub fn load(owner: &str, soname: &CStr, symbols: &[Symbol]) -> Result<(), StandInError> {
    let name = || soname.to_string_lossy().into_owned();
    let object = elf::shared_object(soname, symbols);
    let (path, temporary) =
        file_with(owner, soname, &object).map_err(|source| StandInError::NoFile {
            soname: name(),
            source,
        })?;
    // SAFETY: the object has no code and no initializers; loading it only makes its names known.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    let reason = handle.is_null().then(last_dl_error);
    if temporary {
        // The file is not needed after `dlopen`, loaded or not.
        // SAFETY: a C string.
        unsafe { libc::unlink(path.as_ptr()) };
    }
    if let Some(reason) = reason {
        return Err(StandInError::Refused {
            soname: name(),
            reason,
        });
    }
    // SAFETY: `RTLD_NOLOAD` only asks.
    let named = unsafe { libc::dlopen(soname.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if !named.is_null() {
        // SAFETY: gives back the reference that the call above took.
        unsafe { libc::dlclose(named) };
    }
    // If the descriptor of an earlier object was closed, this one may have its path, which the dynamic linker knows already.
    if named != handle {
        return Err(StandInError::Refused {
            soname: name(),
            reason: "it knows another object by this name or path".into(),
        });
    }
    let Some((first, address)) = symbols.first() else {
        return Ok(());
    };
    // SAFETY: a live handle and a C string.
    let found = unsafe { libc::dlsym(handle, first.as_ptr()) };
    let base = found.addr().wrapping_sub(address.addr());
    if base != 0 {
        correct(handle, base, symbols.len());
        // SAFETY: as above.
        let found = unsafe { libc::dlsym(handle, first.as_ptr()) };
        if found.addr() != address.addr() {
            return Err(StandInError::Refused {
                soname: name(),
                reason: "it does not resolve absolute symbols".into(),
            });
        }
    }
    // The handle is never closed: callers keep function pointers.
    Ok(())
}

/// Corrects the symbol values for a dynamic linker that adds the load address to absolute symbols.
fn correct(handle: *mut c_void, base: usize, count: usize) {
    let mut map: *mut LinkMap = std::ptr::null_mut();
    // SAFETY: a live handle; the request stores one pointer.
    if unsafe { dlinfo(handle, RTLD_DI_LINKMAP, (&raw mut map).cast()) } != 0 || map.is_null() {
        return;
    }
    let (first, step) = elf::VALUES;
    // SAFETY: the link map of a live handle.
    let loaded = unsafe { (*map).address };
    for index in 0..count {
        let value = std::ptr::with_exposed_provenance_mut::<usize>(loaded + first + index * step);
        // SAFETY: the object was made by `elf::shared_object`: its symbol table is loaded there,
        // writable, aligned, and has `count` entries; no other code knows the object yet.
        unsafe { *value = (*value).wrapping_sub(base) };
    }
}

fn last_dl_error() -> String {
    // SAFETY: returns a C string, or null, that stays valid until the next call on this thread.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            "no reason given".into()
        } else {
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }
}

/// Stores the bytes in a file. Returns its path, and whether the file must be removed later.
fn file_with(owner: &str, soname: &CStr, bytes: &[u8]) -> io::Result<(CString, bool)> {
    match memory_file(owner, soname, bytes) {
        Ok(path) => Ok((path, false)),
        Err(_) => temporary_file(owner, soname, bytes).map(|path| (path, true)),
    }
}

fn memory_file(owner: &str, soname: &CStr, bytes: &[u8]) -> io::Result<CString> {
    let name = CString::new([owner.as_bytes(), b":", soname.to_bytes()].concat())?;
    let mut file = new_memory_file(&name)?;
    file.write_all(bytes)?;
    // The dynamic linker's own mapping is private, and stays writable.
    let seals = libc::F_SEAL_SEAL | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_WRITE;
    // SAFETY: adds seals to a descriptor that is open here.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // By process id, not "self": a debugger that follows the path would look among its own
    // descriptors.
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    // Where /proc is that of another PID namespace, the number is another process's.
    let (named, own) = (std::fs::metadata(&path)?, file.metadata()?);
    if (named.dev(), named.ino()) != (own.dev(), own.ino()) {
        let text = format!("{path} is another file");
        return Err(io::Error::new(io::ErrorKind::NotFound, text));
    }
    // Kept open for ever: the dynamic linker identifies the object by this path, and would mistake
    // another file with the same descriptor number for it.
    let _ = file.into_raw_fd();
    Ok(CString::new(path)?)
}

fn new_memory_file(name: &CStr) -> io::Result<File> {
    let sealable = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // A kernel may demand that files in memory are not executable (`vm.memfd_noexec`), which this one need not be; kernels
    // before 6.3 do not know the flag.
    for flags in [sealable | MFD_NOEXEC_SEAL, sealable] {
        // SAFETY: `name` is a C string; the call makes a new descriptor.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
        if fd >= 0 {
            // SAFETY: the descriptor was just made and has no other owner.
            return Ok(unsafe { File::from_raw_fd(fd) });
        }
    }
    Err(io::Error::last_os_error())
}

const MFD_NOEXEC_SEAL: libc::c_uint = 0x8;

fn temporary_file(owner: &str, soname: &CStr, bytes: &[u8]) -> io::Result<CString> {
    use std::os::unix::ffi::OsStringExt;
    let directory = std::env::temp_dir();
    for attempt in 0..100 {
        let file = format!(
            "{owner}-{}-{attempt}-{}",
            std::process::id(),
            soname.to_string_lossy()
        );
        let path = directory.join(file);
        match File::options().write(true).create_new(true).open(&path) {
            Ok(mut file) => {
                file.write_all(bytes)?;
                return Ok(CString::new(path.into_os_string().into_vec())?);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn forty_two() -> c_int {
        42
    }

    fn ask(soname: &CStr) -> Option<c_int> {
        // SAFETY: asks for an object that the test loaded.
        let handle = unsafe { libc::dlopen(soname.as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() {
            return None;
        }
        // SAFETY: a live handle and a C string.
        let symbol = unsafe { libc::dlsym(handle, c"forty_two".as_ptr()) };
        // SAFETY: dlsym gives null or the address of the function above.
        let function: Option<extern "C" fn() -> c_int> = unsafe { std::mem::transmute(symbol) };
        function.map(|function| function())
    }

    /// As after a `closefrom`: the next memory file gets the number, and so the path, of the first. In a process of its own,
    /// where no other test takes the number.
    #[test]
    fn an_object_that_the_linker_takes_for_another_one_is_refused_and_does_not_change_that_one() {
        const CHILD: &str = "NCCL_TEST_CLOSED_NUMBER";
        if std::env::var_os(CHILD).is_none() {
            let name = std::thread::current().name().unwrap().to_owned();
            let output = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", &name, "--nocapture"])
                .env(CHILD, "1")
                .output()
                .unwrap();
            assert!(output.status.success(), "{output:?}");
            return;
        }
        let (first, second) = (
            c"libnccl-emulator-test-5.so.7",
            c"libnccl-emulator-test-6.so.7",
        );
        load("test", first, &[(c"forty_two", forty_two as *const c_void)]).unwrap();
        let path = loaded_from(first).unwrap();
        let number = path.file_name().unwrap().to_str().unwrap();
        // SAFETY: `load` keeps the descriptor open only so that no other file gets its number.
        unsafe { libc::close(number.parse().unwrap()) };
        let symbols = [c"a", c"b", c"c"].map(|name| (name, forty_two as *const c_void));
        let error = load("test", second, &symbols).unwrap_err();
        assert!(error.to_string().contains("another object"), "{error}");
        assert_eq!(ask(first), Some(42));
    }

    #[test]
    fn a_stand_in_is_found_by_its_name() {
        assert_eq!(ask(c"libnccl-emulator-test-1.so.7"), None);
        load(
            "test",
            c"libnccl-emulator-test-1.so.7",
            &[(c"forty_two", forty_two as *const c_void)],
        )
        .unwrap();
        assert_eq!(ask(c"libnccl-emulator-test-1.so.7"), Some(42));
    }

    #[test]
    fn without_memfd_a_temporary_file_serves_and_is_removed() {
        let soname = c"libnccl-emulator-test-2.so";
        let object = elf::shared_object(soname, &[(c"forty_two", forty_two as *const c_void)]);
        let path = temporary_file("test", soname, &object).unwrap();
        // SAFETY: an object without code.
        assert!(!unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) }.is_null());
        std::fs::remove_file(path.to_str().unwrap()).unwrap();
        assert_eq!(ask(soname), Some(42));
    }

    #[test]
    fn a_linker_that_relocates_absolute_symbols_is_made_up_for() {
        let soname = c"libnccl-emulator-test-3.so";
        let mut object = elf::shared_object(soname, &[(c"forty_two", forty_two as *const c_void)]);
        // A symbol of a section is relocated by every dynamic linker: section 1 in place of
        // SHN_ABS.
        let (value, _) = elf::VALUES;
        object[value - 2..value].copy_from_slice(&1_u16.to_ne_bytes());
        let path = temporary_file("test", soname, &object).unwrap();
        // SAFETY: an object without code.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        std::fs::remove_file(path.to_str().unwrap()).unwrap();
        // SAFETY: a live handle and a C string.
        let found = unsafe { libc::dlsym(handle, c"forty_two".as_ptr()) };
        let base = found.addr().wrapping_sub(forty_two as *const () as usize);
        assert_ne!(base, 0, "this test needs a relocated symbol");
        correct(handle, base, 1);
        assert_eq!(ask(soname), Some(42));
    }

    #[test]
    fn a_loaded_library_is_noticed_by_its_file_name() {
        let soname = c"libnccl-emulator-test-4.so.9";
        let object = elf::shared_object(soname, &[(c"forty_two", forty_two as *const c_void)]);
        assert_eq!(loaded_from(soname), None);
        let path = temporary_file("test", soname, &object).unwrap();
        // SAFETY: an object without code.
        unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        std::fs::remove_file(path.to_str().unwrap()).unwrap();
        assert_eq!(loaded_from(soname), Some(path.to_str().unwrap().into()));
    }
}
