//! Compiles libraries that look like NCCL to the loader, or fail to in different ways.

use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A library to compile.
pub(crate) struct Source {
    code: String,
    soname: Option<&'static str>,
    needs: Option<PathBuf>,
}

impl Source {
    /// A library whose version is `code`, with NCCL's usual soname.
    pub(crate) fn nccl(code: i32) -> Self {
        Self {
            code: format!("int ncclGetVersion(int *version) {{ *version = {code}; return 0; }}\n"),
            soname: Some("libnccl.so.2"),
            needs: None,
        }
    }

    /// A library that consists of this C code.
    pub(crate) fn of(code: &str) -> Self {
        Self {
            code: code.to_owned(),
            soname: None,
            needs: None,
        }
    }

    /// Adds another function, which does nothing.
    pub(crate) fn with_function(mut self, name: &str) -> Self {
        self.code += &format!("int {name}(void) {{ return 0; }}\n");
        self
    }

    /// Removes the soname.
    pub(crate) fn without_soname(self) -> Self {
        Self {
            soname: None,
            ..self
        }
    }

    /// Sets the soname.
    pub(crate) fn with_soname(self, soname: &'static str) -> Self {
        Self {
            soname: Some(soname),
            ..self
        }
    }

    /// Makes the library depend on another one.
    pub(crate) fn needing(self, library: &Path) -> Self {
        Self {
            needs: Some(library.to_owned()),
            ..self
        }
    }

    /// Compiles the library to `file`, and creates the directories above it.
    pub(crate) fn compile_to(&self, file: impl AsRef<Path>) -> PathBuf {
        let file = file.as_ref();
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        let source = file.with_extension("c");
        fs::write(&source, &self.code).unwrap();
        let mut command = Command::new("cc");
        command
            .args(["-shared", "-fPIC", "-o"])
            .arg(file)
            .arg(&source);
        if let Some(soname) = self.soname {
            command.arg(format!("-Wl,-soname,{soname}"));
        }
        if let Some(library) = &self.needs {
            command.arg("-Wl,--no-as-needed").arg(library);
        }
        let output = command.output().expect("the C compiler `cc` is needed");
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        file.to_owned()
    }
}

/// Makes the dynamic linker's own search fail, even on a machine where NCCL is installed:
/// the first file that it finds is not a library.
pub(crate) fn hide_installed(directory: &Path, command: &mut Command) {
    let hidden = directory.join("hidden");
    fs::create_dir(&hidden).unwrap();
    for name in ["libnccl.so.2", "libnccl.so"] {
        fs::write(
            hidden.join(name),
            "this is not a shared object, by a long way: ".repeat(4),
        )
        .unwrap();
    }
    command.env("LD_LIBRARY_PATH", hidden);
}

/// Loads `file` as another part of the process would.
pub(crate) fn load_elsewhere(file: &Path) {
    let name = CString::new(file.as_os_str().as_bytes()).unwrap();
    // SAFETY: the file was compiled by `Source` and has no initialiser.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
    assert!(!handle.is_null(), "cannot load {}", file.display());
}

/// Returns whether the process has mapped a file whose path contains `text`.
pub(crate) fn is_mapped(text: &str) -> bool {
    fs::read_to_string("/proc/self/maps")
        .unwrap()
        .contains(text)
}
