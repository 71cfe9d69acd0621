//! [`load`] and [`RealNccl`]: NVIDIA's libnccl, loaded and redirected.

use std::ffi::{CString, c_int, c_void};
use std::path::{Path, PathBuf};

use nccl_sys::Version;

use super::cache::{Analysis, Cache, CacheUse, Key};
use super::calls::{self, Calls};
use super::dwarf;
use super::entries::{self, Entries};
use super::error::LoadError;
use super::file::{ElfFile, Source};
use super::image::Image;
pub(crate) use super::redirect::Provided;
use super::redirect::redirect;
use super::types::{Library, Types};
use super::wanted;

/// NVIDIA's libnccl in this process. It stays loaded until the process ends.
#[derive(Debug)]
pub(crate) struct RealNccl {
    path: PathBuf,
    version: Version,
    types: Types,
    calls: Calls,
    entries: Entries,
    build_id: String,
    cache: CacheUse,
    base: usize,
    #[cfg(test)]
    trampolines: std::ops::Range<usize>,
}

/// An object in the loaded library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DataSymbol {
    /// The address in this process.
    pub(crate) address: *const u8,
    /// The size in bytes.
    pub(crate) size: usize,
}

/// Loads the libnccl at `path` and redirects its calls of the CUDA runtime to `provided`.
///
/// # Errors
/// [`LoadError`]; the library is then not in the process.
pub(crate) fn load(path: &Path, provided: Provided<'_>) -> Result<RealNccl, LoadError> {
    load_with(path, provided, &Cache::of_environment())
}

pub(super) fn load_with(
    path: &Path,
    provided: Provided<'_>,
    cache: &Cache,
) -> Result<RealNccl, LoadError> {
    if !cfg!(target_arch = "x86_64") {
        return Err(LoadError::ThisCpu {
            found: std::env::consts::ARCH,
        });
    }
    let source = Source::open(path)?;
    let file = ElfFile::parse(&source)?;
    let build_id = file.build_id()?;
    let key = Key {
        build_id: build_id.text(),
        length: source.length(),
    };
    let (analysis, cache) = cache.get(&key, || analyse(&file))?;
    let image = Image::load(path, &build_id)?;
    let version = version(path, &image, &analysis.calls)?;
    let _trampolines = redirect(path, &image, file.span()?, &analysis.calls, provided)?;
    let library = Library {
        path: path.to_owned(),
        build_id: key.build_id.clone(),
    };
    let types = Types::new(library, analysis.table);
    let entries = entries::redirect(path, &image, &analysis.calls, &types)?;
    let base = image.base();
    image.keep();
    Ok(RealNccl {
        path: path.to_owned(),
        version,
        types,
        calls: analysis.calls,
        entries,
        build_id: key.build_id,
        cache,
        base,
        #[cfg(test)]
        trampolines: _trampolines,
    })
}

/// Reads all required data of the file.
pub(super) fn analyse(file: &ElfFile<'_>) -> Result<Analysis, LoadError> {
    let sections = file.sections()?;
    let calls = calls::read(file, &sections)?;
    let debug = dwarf::Sections {
        info: sections.debug(".debug_info")?,
        abbrev: sections.debug(".debug_abbrev")?,
        strings: sections.debug(".debug_str")?,
        aranges: sections.debug(".debug_aranges")?,
    };
    let dwarf = |source| LoadError::Dwarf {
        path: file.path().to_owned(),
        source,
    };
    dwarf::outside(debug, &calls.runtime).map_err(dwarf)?;
    let table = dwarf::read(debug, wanted::TYPES).map_err(dwarf)?;
    Ok(Analysis { calls, table })
}

/// Returns the library's version, which is a constant: the call does not use CUDA.
fn version(path: &Path, image: &Image, calls: &Calls) -> Result<Version, LoadError> {
    let mut found = "of unknown version".to_owned();
    let export = calls
        .exports
        .iter()
        .find(|export| export.name == "ncclGetVersion");
    if let Some(export) = export {
        let mut code: c_int = 0;
        // SAFETY: `ncclGetVersion` is exported at this address by the library of which `image` has the
        // build ID; it has had this signature in all releases.
        let status = unsafe {
            let function: extern "C" fn(*mut c_int) -> c_int =
                std::mem::transmute(image.at(export.address));
            function(&raw mut code)
        };
        match Version::from_code(code) {
            Some(version) if status == 0 && wanted::RELEASES.contains(&version) => {
                return Ok(version);
            }
            Some(version) => found = version.to_string(),
            None => found = format!("with version code {code}"),
        }
    }
    Err(LoadError::UnknownRelease {
        path: path.to_owned(),
        found,
        releases: wanted::releases(),
    })
}

impl RealNccl {
    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the build ID in hexadecimal digits.
    pub(crate) fn build_id(&self) -> &str {
        &self.build_id
    }

    /// Returns the release.
    pub(crate) fn version(&self) -> Version {
        self.version
    }

    /// Returns the version of CUDA that the library was compiled with: 13040 for 13.4.
    pub(crate) fn cuda(&self) -> i32 {
        self.calls.cuda
    }

    /// Returns the layouts of the library's structures.
    pub(crate) fn types(&self) -> &Types {
        &self.types
    }

    /// Returns whether the analysis came from the file or from the cache.
    pub(crate) fn cache(&self) -> &CacheUse {
        &self.cache
    }

    /// Returns the mangled name of the kernel that host code refers to by `host_stub`.
    #[cfg(test)]
    pub(crate) fn kernel_of(&self, host_stub: *const c_void) -> Option<&str> {
        let address = host_stub.addr().checked_sub(self.base)?;
        let name = self.calls.kernels.get(&(address as u64))?;
        Some(name)
    }

    /// Returns the kernels: the function that host code refers to, and the mangled name.
    pub(crate) fn kernels(&self) -> impl Iterator<Item = (*const c_void, &str)> {
        let kernels = self.calls.kernels.iter();
        kernels.map(|(&address, name)| (self.at(address), name.as_str()))
    }

    /// Returns the table `name`, one of `wanted.rs`.
    pub(crate) fn data(&self, name: &str) -> Option<DataSymbol> {
        let data = self.calls.data.iter().find(|data| data.name == name)?;
        Some(DataSymbol {
            address: self.at(data.address).cast(),
            size: usize::try_from(data.size).ok()?,
        })
    }

    /// Returns the functions `nccl*` and `pnccl*` that the library exports, with the addresses of their trampolines, or their own
    /// addresses if they have none.
    pub(crate) fn nccl_symbols(&self) -> Vec<(CString, *const c_void)> {
        let symbols = self.calls.exports.iter().map(|export| {
            let name = CString::new(export.name.as_str()).ok()?;
            let entry = self.entries.of(export.address);
            Some((name, entry.unwrap_or_else(|| self.at(export.address))))
        });
        symbols.flatten().collect()
    }

    /// Returns the base address of the library.
    #[cfg(test)]
    pub(crate) fn base(&self) -> usize {
        self.base
    }

    /// Returns the address range of the trampolines.
    #[cfg(test)]
    pub(crate) fn trampolines(&self) -> &std::ops::Range<usize> {
        &self.trampolines
    }

    fn at(&self, address: u64) -> *const c_void {
        std::ptr::with_exposed_provenance(self.base.wrapping_add(address as usize))
    }
}
