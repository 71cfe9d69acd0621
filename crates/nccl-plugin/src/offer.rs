//! Registers a plugin under the name by which NCCL asks for it.

use std::ffi::{CStr, OsString, c_void};
use std::path::PathBuf;
use std::ptr::NonNull;

use stand_in_object::{Symbol, load};

/// The result of offering a plugin to NCCL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Offer {
    /// NCCL will find the plugin of this process.
    Made,
    /// The user has configured another plugin: by this variable, or by this file under the plugin's default name.
    UserHasOne(String),
    /// The dynamic linker does not accept the stand-in.
    Failed(String),
}

/// Offers `symbols` under the name by which NCCL asks for a plugin, unless `variable` names another plugin.
pub(crate) fn offer(variable: &str, soname: &'static CStr, symbols: &[Symbol]) -> Offer {
    if let Some(value) = configured(variable) {
        return Offer::UserHasOne(format!("{variable}={value}"));
    }
    if let Some(path) = installed(soname) {
        return Offer::UserHasOne(path);
    }
    match load("nccl", soname, symbols) {
        Ok(()) => Offer::Made,
        Err(error) => Offer::Failed(error.to_string()),
    }
}

/// Returns the value that NCCL will read for a variable, from the environment or from NCCL's configuration files.
pub(crate) fn configured(variable: &str) -> Option<String> {
    if let Some(value) = std::env::var_os(variable) {
        return Some(value.display().to_string());
    }
    let files = files(std::env::var_os("NCCL_CONF_FILE"), std::env::var_os("HOME"));
    files
        .iter()
        .find_map(|file| value_in(&std::fs::read(file).ok()?, variable))
}

/// Returns NCCL's configuration files, in the order in which it reads them. An empty `NCCL_CONF_FILE` counts as unset.
fn files(named: Option<OsString>, home: Option<OsString>) -> Vec<PathBuf> {
    let named = named.filter(|path| !path.is_empty()).map(PathBuf::from);
    let of_home = || Some(PathBuf::from(home?).join(".nccl.conf"));
    let own = named.or_else(of_home);
    own.into_iter()
        .chain([PathBuf::from("/etc/nccl.conf")])
        .collect()
}

/// Returns the value of a variable in the text of a configuration file.
fn value_in(text: &[u8], variable: &str) -> Option<String> {
    // NCCL reads bytes: a comment may be in any encoding.
    let text = String::from_utf8_lossy(text);
    let lines = text.lines().map(str::trim);
    let value = lines
        .filter(|line| !line.starts_with('#'))
        .find_map(|line| line.strip_prefix(variable)?.trim_start().strip_prefix('='))?;
    Some(value.trim().to_owned())
}

/// Returns the file that the dynamic linker opens under this name. The file stays open: NCCL would open it as well.
pub(crate) fn installed(soname: &CStr) -> Option<String> {
    open(soname)?;
    let name = soname.to_string_lossy();
    let path = stand_in_object::loaded_from(soname);
    Some(path.map_or_else(|| name.into_owned(), |path| path.display().to_string()))
}

/// Opens a library as NCCL does, and never closes it.
pub(crate) fn open(name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: runs the initialisers of a library that NCCL itself would open in its first call, by the same search.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        // Takes this error, so that the next caller of `dlerror` in this thread does not get it.
        // SAFETY: takes this thread's last error.
        unsafe { libc::dlerror() };
    }
    NonNull::new(handle)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{files, value_in};

    #[test]
    fn a_value_of_a_configuration_file_is_found_and_a_comment_or_a_longer_name_is_none() {
        let text =
            b"# caf\xe9: NCCL_NET_PLUGIN=no\nNCCL_NET_PLUGIN_MORE=x\n NCCL_NET_PLUGIN = aws \n";
        assert_eq!(value_in(text, "NCCL_NET_PLUGIN").unwrap(), "aws");
        assert_eq!(value_in(text, "NCCL_PROFILER_PLUGIN"), None);
    }

    #[test]
    fn a_file_that_is_named_comes_before_that_of_the_user_and_an_empty_name_is_none() {
        let all = |named: Option<&str>, home: Option<&str>| {
            files(named.map(Into::into), home.map(Into::into))
        };
        let [own, of_user, of_all] =
            ["/x.conf", "/home/me/.nccl.conf", "/etc/nccl.conf"].map(Path::new);
        assert_eq!(all(Some("/x.conf"), Some("/home/me")), [own, of_all]);
        assert_eq!(all(Some(""), Some("/home/me")), [of_user, of_all]);
        assert_eq!(all(None, Some("/home/me")), [of_user, of_all]);
        assert_eq!(all(None, None), [of_all]);
    }
}
