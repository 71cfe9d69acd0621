//! Queries of the loaded library's debug information ([`Types`]) for the positions of fields.

use std::fmt;

/// The types of the loaded library.
pub(crate) trait Types {
    /// Returns the size of a structure in bytes.
    fn size_of(&self, ty: &str) -> Result<usize, Mismatch>;
    /// Returns a field of a structure: `ring.prev` is a field of a field; names of anonymous structures and unions are omitted.
    fn field(&self, ty: &str, path: &str) -> Result<Field, Mismatch>;
    /// Returns the value of an enumerator.
    fn enumerator(&self, name: &str) -> Result<i64, Mismatch>;
}

/// A field: `size` bytes at `offset`, or `bits.1` bits of them from bit `bits.0` on, counted from the lowest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Field {
    pub(crate) offset: usize,
    pub(crate) size: usize,
    pub(crate) bits: Option<(u32, u32)>,
}

/// The library lacks data that the interpreter needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Mismatch {
    /// There is no such type.
    NoType { ty: String },
    /// The type has no such field.
    NoField { ty: String, path: String },
    /// There is no such enumerator.
    NoEnumerator { name: String },
    /// A field has another size, or its bits do not fit.
    Shape {
        ty: String,
        path: String,
        field: Field,
    },
    /// The table of functions has an unexpected number of rows.
    Rows { expected: usize, found: usize },
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoType { ty } => write!(f, "libnccl has no type {ty}"),
            Self::NoField { ty, path } => write!(f, "libnccl's {ty} has no field {path}"),
            Self::NoEnumerator { name } => write!(f, "libnccl has no enumerator {name}"),
            Self::Shape { ty, path, field } => write!(
                f,
                "libnccl's {ty}.{path} has a shape that is not known: {} bytes at {}, bits {:?}",
                field.size, field.offset, field.bits
            ),
            Self::Rows { expected, found } => write!(
                f,
                "libnccl's table of device functions has {found} rows, not {expected}"
            ),
        }?;
        write!(
            f,
            "; this release's kernels cannot be interpreted: use NCCL 2.27 to 2.32"
        )
    }
}

impl std::error::Error for Mismatch {}

impl Field {
    /// Returns the field's value in the bytes of its structure, unsigned.
    pub(crate) fn get(self, bytes: &[u8]) -> u64 {
        let mut word = [0; 8];
        let size = self.size.min(8);
        if let Some(from) = bytes.get(self.offset..self.offset + size) {
            word[..size].copy_from_slice(from);
        }
        let value = u64::from_le_bytes(word);
        match self.bits {
            Some((first, count)) => (value >> first) & (u64::MAX >> (64 - count.clamp(1, 64))),
            None => value,
        }
    }

    /// Returns the field's value, a signed number of 4 or 8 bytes.
    pub(crate) fn signed(self, bytes: &[u8]) -> i64 {
        let value = self.get(bytes);
        if self.size == 4 {
            i64::from(value as u32 as i32)
        } else {
            value as i64
        }
    }

    /// Returns the element at `index` of a field that is an array of elements of `size` bytes.
    pub(crate) fn element(self, index: usize, size: usize) -> Self {
        Self {
            offset: self.offset + index * size,
            size,
            bits: None,
        }
    }
}

/// Queries fields of one structure.
pub(super) struct Asked<'a> {
    pub(super) types: &'a dyn Types,
    pub(super) ty: &'a str,
}

impl Asked<'_> {
    pub(super) fn size(&self) -> Result<usize, Mismatch> {
        self.types.size_of(self.ty)
    }

    pub(super) fn field(&self, path: &str) -> Result<Field, Mismatch> {
        let field = self.types.field(self.ty, path)?;
        let end = field
            .bits
            .map_or(0, |(first, count)| first as usize + count as usize);
        let inside = field.offset + field.size <= self.size()?;
        if !inside || field.size == 0 || end > field.size.min(8) * 8 {
            return Err(self.shape(path, field));
        }
        Ok(field)
    }

    fn shape(&self, path: &str, field: Field) -> Mismatch {
        Mismatch::Shape {
            ty: self.ty.to_owned(),
            path: path.to_owned(),
            field,
        }
    }

    /// Returns a field of whole bytes of a known size.
    pub(super) fn sized(&self, path: &str, size: usize) -> Result<Field, Mismatch> {
        let field = self.field(path)?;
        if field.size != size || field.bits.is_some() {
            return Err(self.shape(path, field));
        }
        Ok(field)
    }

    /// Returns the offset of such a field.
    pub(super) fn offset(&self, path: &str, size: usize) -> Result<usize, Mismatch> {
        Ok(self.sized(path, size)?.offset)
    }

    /// Returns a field that only some releases have.
    pub(super) fn optional(&self, path: &str) -> Option<Field> {
        self.field(path).ok()
    }
}

macro_rules! fields {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident = $path:literal $kind:tt),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone)]
        pub(crate) struct $name {
            #[allow(dead_code, reason = "some structures are only pointed to")]
            pub(crate) size: usize,
            $($(#[$field_meta])* pub(crate) $field: fields!(@type $kind),)*
        }

        impl $name {
            pub(super) fn ask(types: &dyn Types, ty: &str) -> Result<Self, Mismatch> {
                let asked = Asked { types, ty };
                Ok(Self {
                    size: asked.size()?,
                    $($field: fields!(@ask asked $path $kind),)*
                })
            }
        }
    };
    (@type word) => { Field };
    (@type half) => { Field };
    (@type number) => { Field };
    (@type optional) => { Option<Field> };
    (@ask $asked:ident $path:literal word) => { $asked.sized($path, 8)? };
    (@ask $asked:ident $path:literal half) => { $asked.sized($path, 4)? };
    (@ask $asked:ident $path:literal number) => { $asked.field($path)? };
    (@ask $asked:ident $path:literal optional) => { $asked.optional($path) };
}

pub(super) use fields;
