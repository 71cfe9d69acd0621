//! Files that appear under their name only when they are complete: recordings of faults, published addresses.

use std::collections::hash_map::RandomState;
use std::fs::{self, File};
use std::hash::{BuildHasher as _, Hasher as _};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// Writes `content` into a new file in the directory of `path`, and renames it to `path`, replacing an existing file. This is
/// safe in a directory to which other users can write: the temporary name is random, and the file is created exclusively, so
/// that no file or link of another user is followed.
#[doc(hidden)]
pub fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    let (part, mut file) = create(directory(path))?;
    let written = file
        .write_all(content)
        .and_then(|()| fs::rename(&part, path));
    written.inspect_err(|_| {
        let _ = fs::remove_file(&part);
    })
}

/// Like `write`, but fails if `path` exists. The file system must support hard links: a link is made atomically and never
/// replaces another, on network file systems too.
#[doc(hidden)]
pub fn write_new(path: &Path, content: &[u8]) -> io::Result<()> {
    let (part, mut file) = create(directory(path))?;
    let written = file
        .write_all(content)
        .and_then(|()| fs::hard_link(&part, path));
    let _ = fs::remove_file(&part);
    written
}

/// Removes the file at `path` if `is_expected` returns true for its content. A file that another process puts in its place
/// meanwhile stays: it may be away for a moment, and is put back by a hard link, which does not replace a still newer file.
/// Without hard links on the file system, it replaces that.
#[doc(hidden)]
pub fn remove_if(path: &Path, is_expected: impl Fn(&[u8]) -> bool) -> io::Result<()> {
    if !is_expected(&fs::read(path)?) {
        return Ok(());
    }
    // The file is looked at again under a name that no other process replaces.
    let (aside, _) = create(directory(path))?;
    let removed = fs::rename(path, &aside).and_then(|()| {
        match is_expected(&fs::read(&aside)?) {
            true => Ok(()),
            // Put back, unless there is a still newer one.
            false => match fs::hard_link(&aside, path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    fs::rename(&aside, path)
                }
                _ => Ok(()),
            },
        }
    });
    let _ = fs::remove_file(&aside);
    removed
}

fn directory(path: &Path) -> &Path {
    let parent = path.parent();
    parent
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

/// Creates a new file under a random name that is not taken.
fn create(directory: &Path) -> io::Result<(PathBuf, File)> {
    for _ in 0..100 {
        // Random, so that another user cannot predict the name and take it first.
        let random = RandomState::new().build_hasher().finish();
        let path = directory.join(format!(".nccl-{random:016x}.part"));
        match File::create_new(&path) {
            Ok(file) => return Ok((path, file)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_link_in_the_way_is_replaced_and_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("precious"), "mine").unwrap();
        symlink(path("precious"), path("file")).unwrap();
        write(&path("file"), b"new").unwrap();
        assert!(path("file").symlink_metadata().unwrap().is_file());
        assert_eq!(std::fs::read(path("file")).unwrap(), b"new");
        assert_eq!(std::fs::read(path("precious")).unwrap(), b"mine");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2);
    }

    #[test]
    fn of_two_new_files_of_one_name_the_first_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        write_new(&path, b"first").unwrap();
        let error = write_new(&path, b"second").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read(&path).unwrap(), b"first");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn where_the_name_cannot_be_had_nothing_is_left() {
        let directory = tempfile::tempdir().unwrap();
        let taken = directory.path().join("taken");
        std::fs::create_dir(&taken).unwrap();
        assert!(write(&taken, b"x").is_err());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
