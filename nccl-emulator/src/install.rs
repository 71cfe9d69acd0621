//! Taking the place of libcuda and libnccl in this process.
//!
//! For each name that programs load the libraries by, a shared object without code ([`crate::elf`])
//! is made and loaded. From then on the dynamic linker finds that name loaded, and `dlsym` gives
//! the emulator's functions. One emulator, any number of names; no file, no environment variable,
//! nothing to build.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use crate::elf::{self, Symbol};
use crate::options::{self, Wishes};

/// The names that are taken over.
const CUDA: [&CStr; 2] = [c"libcuda.so", c"libcuda.so.1"];
const NCCL: [&CStr; 2] = [c"libnccl.so", c"libnccl.so.2"];

/// Why the emulator could not take over.
///
/// ```
/// use nccl_emulator::{Emulator, InstallError};
///
/// Emulator::new().devices(2).install()?;
/// match Emulator::new().devices(3).install() {
///     Err(error @ InstallError::OptionsInForce { .. }) => println!("{error}"),
///     other => panic!("{other:?}"),
/// }
/// # Ok::<(), InstallError>(())
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InstallError {
    /// The real library is in the process already: linked into the program, or loaded before.
    #[error(
        "{soname} is already loaded from {path}: the emulator must be installed before anything loads CUDA or NCCL, and \
         cannot serve a program that is linked to them"
    )]
    AlreadyLoaded {
        /// The name it has.
        soname: String,
        /// The file it came from.
        path: PathBuf,
    },
    /// An option of the builder, or an environment variable, has no sensible value.
    #[error("{name} is {value:?}, expected {expected}")]
    BadOption {
        /// The environment variable that sets the option.
        name: &'static str,
        /// What it was set to.
        value: String,
        /// What it may be set to.
        expected: String,
    },
    /// The emulator runs already, as something else.
    #[error(
        "the emulator runs with {in_force}, and cannot become {asked}: install it once, first of all"
    )]
    OptionsInForce {
        /// What the builder asked for.
        asked: String,
        /// What is in force.
        in_force: String,
    },
    /// The dynamic linker does not take the object that stands for a library.
    #[error("the dynamic linker does not load the stand-in for {soname}: {reason}")]
    Refused {
        /// The library's name.
        soname: String,
        /// What the dynamic linker says.
        reason: String,
    },
    /// Neither memory nor a temporary file could be had for the stand-in.
    #[error("no file for the stand-in of {soname}")]
    NoFile {
        /// The library's name.
        soname: String,
        /// Why.
        source: io::Error,
    },
}

/// What [`install()`](crate::install()) took over.
///
/// ```
/// let taken = nccl_emulator::install()?;
/// assert!(taken.sonames().contains(&"libcuda.so.1"));
/// println!("{taken}");
/// # Ok::<(), nccl_emulator::InstallError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Installation {
    sonames: Vec<&'static str>,
    symbols: usize,
    options: String,
}

impl Installation {
    /// The library names that lead to the emulator from now on.
    ///
    /// ```
    /// assert!(nccl_emulator::install()?.sonames().contains(&"libnccl.so.2"));
    /// # Ok::<(), nccl_emulator::InstallError>(())
    /// ```
    #[must_use]
    pub fn sonames(&self) -> &[&'static str] {
        &self.sonames
    }

    /// How many functions they have together.
    ///
    /// ```
    /// assert!(nccl_emulator::install()?.symbols() > 100);
    /// # Ok::<(), nccl_emulator::InstallError>(())
    /// ```
    #[must_use]
    pub fn symbols(&self) -> usize {
        self.symbols
    }
}

impl fmt::Display for Installation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the CPU emulator answers for {} ({} functions): {}",
            self.sonames.join(", "),
            self.symbols,
            self.options
        )
    }
}

/// Installed already.
static INSTALLED: Mutex<Option<Installation>> = Mutex::new(None);

pub(crate) fn install(wishes: Wishes) -> Result<Installation, InstallError> {
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    let options = options::fix(wishes)?;
    if let Some(installation) = &*installed {
        return Ok(installation.clone());
    }
    for soname in CUDA.iter().chain(&NCCL) {
        refuse_loaded(soname)?;
    }
    let mut installation = Installation {
        sonames: Vec::new(),
        symbols: 0,
        options: options.to_string(),
    };
    for (sonames, symbols) in [
        (CUDA, crate::driver::symbols()),
        (NCCL, crate::nccl::symbols()),
    ] {
        for soname in sonames {
            load(soname, &symbols)?;
            installation
                .sonames
                .push(soname.to_str().unwrap_or_default());
        }
        installation.symbols += symbols.len();
    }
    *installed = Some(installation.clone());
    Ok(installation)
}

/// Whether [`install()`](crate::install()) has been done.
pub(crate) fn installation() -> Option<Installation> {
    INSTALLED
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone()
}

fn refuse_loaded(soname: &CStr) -> Result<(), InstallError> {
    match loaded_from(soname) {
        Some(path) => Err(InstallError::AlreadyLoaded {
            soname: soname.to_string_lossy().into_owned(),
            path,
        }),
        None => Ok(()),
    }
}

/// The file that a library of this name was loaded from, if one was.
pub(crate) fn loaded_from(soname: &CStr) -> Option<PathBuf> {
    // SAFETY: `RTLD_NOLOAD` only asks; nothing is loaded and no code of the library runs.
    let handle = unsafe { libc::dlopen(soname.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if !handle.is_null() {
        let path = path_of(handle).unwrap_or_else(|| "an unknown file".into());
        // SAFETY: gives back the reference that the call above took.
        unsafe { libc::dlclose(handle) };
        return Some(path);
    }
    // A copy whose SONAME is another, such as libcuda.so.535.54: the file name tells.
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

/// The path that the dynamic linker knows a loaded object by.
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

/// Makes `soname` lead to `symbols`.
fn load(soname: &'static CStr, symbols: &[Symbol]) -> Result<(), InstallError> {
    let name = || soname.to_string_lossy().into_owned();
    let object = elf::shared_object(soname, symbols);
    let (path, temporary) = file_with(soname, &object).map_err(|source| InstallError::NoFile {
        soname: name(),
        source,
    })?;
    // SAFETY: the object has no code and no initializers; loading it only makes its names known.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    let reason = handle.is_null().then(last_dl_error);
    if temporary {
        // It is loaded, or never will be.
        // SAFETY: a C string.
        unsafe { libc::unlink(path.as_ptr()) };
    }
    if let Some(reason) = reason {
        return Err(InstallError::Refused {
            soname: name(),
            reason,
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
            return Err(InstallError::Refused {
                soname: name(),
                reason: "it does not resolve absolute symbols".into(),
            });
        }
    }
    // The handle is never closed: callers keep function pointers.
    Ok(())
}

/// A dynamic linker that adds the load address to absolute symbols is given values that make up for
/// it.
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
        // writable, aligned, and has `count` entries; nobody else knows the object yet.
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

/// A path that leads to the bytes, and whether it is a file to be removed.
fn file_with(soname: &CStr, bytes: &[u8]) -> io::Result<(CString, bool)> {
    match memory_file(soname, bytes) {
        Ok(path) => Ok((path, false)),
        Err(_) => temporary_file(soname, bytes).map(|path| (path, true)),
    }
}

fn memory_file(soname: &CStr, bytes: &[u8]) -> io::Result<CString> {
    let mut name = b"nccl-emulator:".to_vec();
    name.extend_from_slice(soname.to_bytes());
    let name = CString::new(name)?;
    // SAFETY: `name` is a C string; the call makes a new descriptor.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and has no other owner.
    let mut file = unsafe { File::from_raw_fd(fd) };
    file.write_all(bytes)?;
    // By number of the process, not "self": a debugger that follows the path would look among its
    // own descriptors.
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    std::fs::metadata(&path)?;
    // Kept open for ever: the dynamic linker knows the object by this path, and would take another
    // file that gets the same number for it.
    let _ = file.into_raw_fd();
    Ok(CString::new(path)?)
}

fn temporary_file(soname: &CStr, bytes: &[u8]) -> io::Result<CString> {
    use std::os::unix::ffi::OsStringExt;
    let directory = std::env::temp_dir();
    for attempt in 0..100 {
        let file = format!(
            "nccl-emulator-{}-{attempt}-{}",
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

    #[test]
    fn a_stand_in_is_found_by_its_name() {
        assert_eq!(ask(c"libnccl-emulator-test-1.so.7"), None);
        load(
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
        let path = temporary_file(soname, &object).unwrap();
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
        let path = temporary_file(soname, &object).unwrap();
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
        let path = temporary_file(soname, &object).unwrap();
        // SAFETY: an object without code.
        unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        std::fs::remove_file(path.to_str().unwrap()).unwrap();
        assert_eq!(loaded_from(soname), Some(path.to_str().unwrap().into()));
    }

    /// In the environment of the child that plays a program which is linked to CUDA.
    const LINKED: &str = "NCCL_EMULATOR_TEST_LINKED";

    #[test]
    fn a_program_that_has_the_real_library_is_told_so() {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "install::tests::the_linked_program_of_another_test",
                "--nocapture",
            ])
            .env(LINKED, "1")
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
    }

    /// Not a test but the other process of the one above.
    #[test]
    fn the_linked_program_of_another_test() {
        if std::env::var_os(LINKED).is_none() {
            return;
        }
        let object =
            elf::shared_object(c"libcuda.so.1", &[(c"cuInit", forty_two as *const c_void)]);
        let path = temporary_file(c"libcuda.so.535.54.03", &object).unwrap();
        // SAFETY: an object without code.
        unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        std::fs::remove_file(path.to_str().unwrap()).unwrap();
        let error = install(Wishes::default()).unwrap_err();
        let InstallError::AlreadyLoaded { path: found, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(found.to_str(), path.to_str().ok());
        assert!(installation().is_none());
    }
}
