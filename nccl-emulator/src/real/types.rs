//! [`Types`]: the layouts of NCCL's and CUDA's structures in one build of the library.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The bits of a bit field, from the lowest bit of the little-endian word at the field's offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Bits {
    /// The lowest bit.
    pub(crate) first: u32,
    /// The number of bits.
    pub(crate) count: u32,
}

/// The position of a field: `count` elements of `size` bytes, from `offset` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Field {
    /// The offset in bytes from the start of the requested type.
    pub(crate) offset: usize,
    /// Bytes of the field, or of one element of an array; of a bit field, of the word it is in.
    pub(crate) size: usize,
    /// The number of elements; 1 if the field is no array, 0 for an array of unstated length.
    pub(crate) count: usize,
    /// `None` unless the field is a bit field.
    pub(crate) bits: Option<Bits>,
}

/// A structure, union, enumeration or typedef.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layout {
    /// The size in bytes.
    pub(crate) size: usize,
    /// By path: `conn.step`. Members of anonymous members have no prefix; `a.b` of an array `a` is
    /// the field `b` of its first element.
    pub(crate) fields: BTreeMap<String, Field>,
}

/// The layouts read from a library's debug information.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Table {
    /// By name.
    pub(crate) types: BTreeMap<String, Layout>,
    /// The values of all requested enumerations.
    pub(crate) enumerators: BTreeMap<String, i64>,
}

/// Why an offset, size or value is not available.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub(crate) enum LayoutError {
    /// The type does not exist in this build, or is not in `wanted.rs`.
    #[error("{library} has no type {name}; expected a release of NCCL that has it")]
    Type {
        /// The build of the library.
        library: Library,
        /// The type.
        name: String,
    },
    /// The field does not exist in this build.
    #[error(
        "{library}: {name} ({size} bytes) has no field {field}; expected a release of NCCL that has it"
    )]
    Field {
        /// The build of the library.
        library: Library,
        /// The type.
        name: String,
        /// The type's size.
        size: usize,
        /// The field.
        field: String,
    },
    /// No requested enumeration has that value.
    #[error("{library} has no enumerator {name}; expected a release of NCCL that has it")]
    Enumerator {
        /// The build of the library.
        library: Library,
        /// The enumerator.
        name: String,
    },
}

/// A build of libnccl, for errors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Library {
    pub(crate) path: PathBuf,
    pub(crate) build_id: String,
}

impl std::fmt::Display for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (build ID {})", self.path.display(), self.build_id)
    }
}

/// The layouts of one build of libnccl.
#[derive(Debug, Clone)]
pub(crate) struct Types {
    library: Library,
    table: Table,
}

impl Types {
    pub(crate) fn new(library: Library, table: Table) -> Self {
        Self { library, table }
    }

    /// Returns the size of the type `name` in bytes.
    ///
    /// # Errors
    /// [`LayoutError::Type`].
    pub(crate) fn size_of(&self, name: &str) -> Result<usize, LayoutError> {
        Ok(self.layout(name)?.size)
    }

    /// Returns the field `path` of the type `name`: names joined by dots, without those of anonymous members. An array in the
    /// path stands for its first element.
    ///
    /// # Errors
    /// [`LayoutError::Type`], [`LayoutError::Field`].
    pub(crate) fn field(&self, name: &str, path: &str) -> Result<Field, LayoutError> {
        let layout = self.layout(name)?;
        layout
            .fields
            .get(path)
            .copied()
            .ok_or_else(|| LayoutError::Field {
                library: self.library.clone(),
                name: name.to_owned(),
                size: layout.size,
                field: path.to_owned(),
            })
    }

    /// Returns the value of an enumerator of any enumeration in `wanted.rs`.
    ///
    /// # Errors
    /// [`LayoutError::Enumerator`].
    pub(crate) fn enumerator(&self, name: &str) -> Result<i64, LayoutError> {
        let value = self.table.enumerators.get(name).copied();
        value.ok_or_else(|| LayoutError::Enumerator {
            library: self.library.clone(),
            name: name.to_owned(),
        })
    }

    fn layout(&self, name: &str) -> Result<&Layout, LayoutError> {
        self.table.types.get(name).ok_or_else(|| LayoutError::Type {
            library: self.library.clone(),
            name: name.to_owned(),
        })
    }
}
