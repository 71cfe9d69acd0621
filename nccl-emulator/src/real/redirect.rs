//! Redirects NCCL's calls of the CUDA runtime to other functions, by patching the call sites.
//!
//! Every site in NCCL's code ([`super::calls`]) ends in a 32-bit displacement to a function of the runtime.
//! [`redirect`] replaces it by the displacement to a trampoline, one for each function of the runtime, in a
//! page that is mapped within 2 GiB of the library: `jmp [rip]` and an absolute address.
//!
//! The alternative is to overwrite the first 14 bytes of each function of the runtime with such a jump. That
//! needs 60 patches instead of 2,000 and no decoder, but:
//! - it changes NVIDIA's runtime, whose license differs from NCCL's, where this way changes only NCCL's
//!   code, and only in this process's memory;
//! - the runtime's calls to itself would end in the emulator's functions too, so that the constructors
//!   could mix both runtimes;
//! - a function shorter than 14 bytes would be overwritten together with the next one
//!   (`__cudaLaunchKernel` has 10 bytes);
//! - a forgotten function would silently run NVIDIA's runtime, where the list of sites is known to be
//!   complete, and a function without a replacement is an error at load time.
//!
//! The trampoline of a function that is referred to, but never called
//! ([`wanted::REFERENCED_ONLY`]), passes the function's name to
//! [`Provided::refused`].

use std::collections::BTreeSet;
use std::ffi::{CString, c_char, c_int, c_void};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::ptr;

use cuda_emulator::sync::Mutex;

use super::calls::{Calls, RuntimeFunction};
use super::error::LoadError;
use super::image::Image;
use super::wanted;

/// Functions of the runtime, with their names.
pub(crate) type Functions = Vec<(&'static str, *const c_void)>;

/// The replacements of the runtime's functions.
#[derive(Clone, Copy)]
pub(crate) struct Provided<'a> {
    /// Returns names, and functions with the C signatures that the names have in a version of CUDA (13040 is 13.4).
    pub(crate) functions: &'a dyn Fn(i32) -> Functions,
    /// Called in place of a function that is in no list; returns a `cudaError_t`. The name is a C
    /// string that lives as long as the process.
    pub(crate) refused: extern "C" fn(name: *const c_char) -> c_int,
}

/// The bytes of a trampoline.
const SLOT: usize = 32;
const PAGE: usize = 4096;
/// How far a displacement reaches, less room for the library's own pages around it.
const REACH: usize = (1 << 31) - (1 << 20);

/// Redirects all sites of `calls` to `provided`, and returns the address range of the trampolines. No thread may run the library's code
/// meanwhile: the library was just loaded, and its threads start with the first communicator.
pub(crate) fn redirect(
    path: &Path,
    image: &Image,
    span: u64,
    calls: &Calls,
    provided: Provided<'_>,
) -> Result<Range<usize>, LoadError> {
    let targets = targets(path, calls, provided)?;
    verify(path, image, calls, |function| {
        image.at(function.1.address) as usize
    })?;
    let area = map(path, image, span, targets.len() * SLOT)?;
    write_trampolines(path, &area, &targets)?;
    write_sites(path, image, calls, &area)?;
    verify(path, image, calls, |function| {
        area.start + function.0 * SLOT
    })?;
    Ok(area)
}

/// The target of a trampoline.
enum Target {
    Function(*const c_void),
    Refusal {
        name: CString,
        refused: extern "C" fn(*const c_char) -> c_int,
    },
}

fn targets(path: &Path, calls: &Calls, provided: Provided<'_>) -> Result<Vec<Target>, LoadError> {
    let functions = (provided.functions)(calls.cuda);
    let mut missing = BTreeSet::new();
    let mut targets = Vec::with_capacity(calls.functions.len());
    for function in &calls.functions {
        let name = function.name.as_str();
        let found = functions.iter().find(|(provided, _)| *provided == name);
        match found {
            Some(&(_, address)) if !address.is_null() => targets.push(Target::Function(address)),
            _ if wanted::REFERENCED_ONLY.contains(&name) => targets.push(Target::Refusal {
                name: CString::new(name).unwrap_or_default(),
                refused: provided.refused,
            }),
            _ => {
                missing.insert(name.to_owned());
            }
        }
    }
    if missing.is_empty() {
        return Ok(targets);
    }
    Err(LoadError::NotProvided {
        path: path.to_owned(),
        names: missing.into_iter().collect(),
        releases: wanted::releases(),
    })
}

/// Checks that each site leads to the address that `expected` returns for its function.
fn verify(
    path: &Path,
    image: &Image,
    calls: &Calls,
    expected: impl Fn((usize, &RuntimeFunction)) -> usize,
) -> Result<(), LoadError> {
    for site in &calls.sites {
        let index = usize::from(site.function);
        let address = image.at(site.address);
        // SAFETY: the site is in the code of the loaded library: its address was read from the file of
        // which `image` has the build ID, and code is readable.
        let displacement = unsafe { address.cast::<i32>().read_unaligned() };
        let target = (address as usize + 4).wrapping_add_signed(displacement as isize);
        let function = calls.functions.get(index);
        if function.map(|function| expected((index, function))) != Some(target) {
            return Err(LoadError::Changed {
                path: path.to_owned(),
                address: site.address,
            });
        }
    }
    Ok(())
}

/// Maps writable memory that all sites can reach.
fn map(path: &Path, image: &Image, span: u64, bytes: usize) -> Result<Range<usize>, LoadError> {
    let length = bytes.next_multiple_of(PAGE);
    let base = image.base();
    let end = base.saturating_add(span as usize).next_multiple_of(PAGE);
    let step = 1 << 20;
    let below = (1..)
        .map_while(|steps| base.checked_sub(steps * step))
        .take_while(|at| end - at < REACH);
    let above = (0..)
        .map(|steps| end + steps * step)
        .take_while(|at| at + length - base < REACH);
    for address in below.chain(above) {
        // SAFETY: MAP_FIXED_NOREPLACE maps free addresses or none; an older kernel takes the address
        // as a hint, and the result is compared.
        let mapped = unsafe {
            libc::mmap(
                ptr::without_provenance_mut(address),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
                -1,
                0,
            )
        };
        if mapped as usize == address {
            return Ok(address..address + length);
        }
        if mapped != libc::MAP_FAILED {
            // SAFETY: the mapping was made by the call above, and nothing refers to it.
            unsafe { libc::munmap(mapped, length) };
        }
    }
    Err(LoadError::NoRoom {
        path: path.to_owned(),
        bytes: length,
    })
}

/// The names that trampolines refer to. Like the trampolines, they live as long as the process.
static NAMES: Mutex<Vec<CString>> = Mutex::new(Vec::new());

/// Stores a name for the rest of the process, and returns the address of its characters.
fn kept(name: CString) -> *const c_char {
    let mut names = NAMES.lock();
    // The characters have memory of their own, which does not move with the string.
    let characters = name.as_ptr();
    names.push(name);
    characters
}

fn write_trampolines(
    path: &Path,
    area: &Range<usize>,
    targets: &[Target],
) -> Result<(), LoadError> {
    let mut bytes = Vec::with_capacity(area.len());
    for target in targets {
        let start = bytes.len();
        let address = match target {
            Target::Function(function) => function.expose_provenance(),
            Target::Refusal { name, refused } => {
                let name = kept(name.clone());
                // mov rdi, name
                bytes.extend_from_slice(&[0x48, 0xbf]);
                bytes.extend_from_slice(&(name.expose_provenance() as u64).to_le_bytes());
                *refused as usize
            }
        };
        // jmp [rip]
        bytes.extend_from_slice(&[0xff, 0x25, 0, 0, 0, 0]);
        bytes.extend_from_slice(&(address as u64).to_le_bytes());
        // int3
        bytes.resize(start + SLOT, 0xcc);
    }
    let start = ptr::with_exposed_provenance_mut::<u8>(area.start);
    // SAFETY: `area` was mapped writable by `map` for this many trampolines, and is not yet in use.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), start, bytes.len()) };
    protect(path, area, "trampolines", Protection::Executable)
}

fn write_sites(
    path: &Path,
    image: &Image,
    calls: &Calls,
    area: &Range<usize>,
) -> Result<(), LoadError> {
    let (Some(first), Some(last)) = (calls.sites.first(), calls.sites.last()) else {
        return Ok(());
    };
    let start = image.at(first.address) as usize / PAGE * PAGE;
    let end = (image.at(last.address) as usize + 4).next_multiple_of(PAGE);
    let pages = start..end;
    protect(path, &pages, "NCCL's code", Protection::Writable)?;
    for site in &calls.sites {
        let address = image.at(site.address);
        let trampoline = area.start + usize::from(site.function) * SLOT;
        // Within REACH, so that no bits are lost.
        let displacement = trampoline.wrapping_sub(address as usize + 4) as i32;
        // SAFETY: the page is writable since `protect`; `verify` has seen that a displacement to the
        // runtime is here; no thread runs the library's code at the time.
        unsafe { address.cast::<i32>().write_unaligned(displacement) };
    }
    protect(path, &pages, "NCCL's code", Protection::Executable)
}

#[derive(Clone, Copy)]
pub(super) enum Protection {
    Writable,
    Executable,
    Constant,
}

/// Sets the protection of pages of trampolines or of the library.
pub(super) fn protect(
    path: &Path,
    pages: &Range<usize>,
    what: &'static str,
    protection: Protection,
) -> Result<(), LoadError> {
    let (flags, name) = match protection {
        Protection::Writable => (libc::PROT_READ | libc::PROT_WRITE, "writable"),
        Protection::Executable => (libc::PROT_READ | libc::PROT_EXEC, "executable"),
        Protection::Constant => (libc::PROT_READ, "constant"),
    };
    // SAFETY: the pages are trampolines, code or symbols of the loaded library, to which no Rust reference
    // exists, and which are not in use at the time.
    let code = unsafe {
        libc::mprotect(
            ptr::with_exposed_provenance_mut(pages.start),
            pages.len(),
            flags,
        )
    };
    if code == 0 {
        return Ok(());
    }
    Err(LoadError::Protect {
        path: path.to_owned(),
        what,
        protection: name,
        source: io::Error::last_os_error(),
    })
}
