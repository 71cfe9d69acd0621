//! Unpacks a bundle, with no other program than `tar`.

use std::fs::{self, File};
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use lzma_rust2::XzReader;
use serde_json::Value;

use crate::failure::{Exit, Failure};

/// An unpacked bundle.
#[derive(Debug)]
pub struct Unpacked {
    /// The directory of the programs.
    pub programs: PathBuf,
    /// NVIDIA's library, if the bundle has it.
    pub library: Option<PathBuf>,
    /// The description of the bundle's contents.
    pub description: Value,
}

/// Unpacks the bundle in `from` into `to`; the library only if it is `wanted`.
///
/// # Errors
/// Names the file that is missing or cannot be written.
pub fn unpack(from: &Path, to: &Path, wanted: bool) -> Result<Unpacked, Failure> {
    let failed = |what: &Path| {
        let what = what.display().to_string();
        move |error: io::Error| Failure::new(Exit::Usage, format!("{what}: {error}"))
    };
    let description = from.join("bundle.json");
    let text = fs::read_to_string(&description).map_err(failed(&description))?;
    let description = serde_json::from_str(&text)
        .map_err(|error| Failure::usage(format!("{}: {error}", description.display())))?;
    // From an earlier run.
    let _ = fs::remove_dir_all(to);
    fs::create_dir_all(to).map_err(failed(to))?;

    let packed = from.join("programs.tar.xz");
    untar(&packed, to).map_err(failed(&packed))?;
    let packed = from.join("libnccl.so.2.xz");
    let library = if wanted && packed.is_file() {
        let directory = to.join("lib");
        fs::create_dir_all(&directory).map_err(failed(&directory))?;
        let library = directory.join("libnccl.so.2");
        let copied = File::open(&packed).and_then(|file| {
            let mut reader = XzReader::new(BufReader::new(file), true);
            io::copy(&mut reader, &mut File::create(&library)?)
        });
        copied.map_err(failed(&packed))?;
        // The name that linkers look for.
        let link = directory.join("libnccl.so");
        std::os::unix::fs::symlink("libnccl.so.2", &link).map_err(failed(&link))?;
        Some(library)
    } else {
        None
    };
    Ok(Unpacked {
        programs: to.join("programs"),
        library,
        description,
    })
}

fn untar(packed: &Path, to: &Path) -> io::Result<()> {
    let mut reader = XzReader::new(BufReader::new(File::open(packed)?), true);
    let mut tar = Command::new("tar")
        .args(["-x", "-f", "-", "-C"])
        .arg(to)
        .stdin(Stdio::piped())
        .spawn()?;
    let copied = io::copy(&mut reader, &mut tar.stdin.take().expect("it is piped"));
    let status = tar.wait()?;
    copied?;
    if status.success() {
        Ok(())
    } else {
        Err(io::Error::other(format!("tar failed: {status}")))
    }
}
