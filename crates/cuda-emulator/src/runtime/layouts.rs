//! The layouts of the runtime's structures in the calling build.
//!
//! The layouts differ between releases of CUDA, so none is hard-coded here: the loader of the calling library reads
//! them from its debug information ([`Structures`]). Every used field is checked for its size and its bounds in the
//! structure. Unused fields of a structure filled here are zero.

use std::ffi::c_int;

/// The position of a field: `count` elements of `size` bytes, from `offset` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field {
    /// The offset in bytes from the start of the structure.
    pub offset: usize,
    /// The size of an element in bytes.
    pub size: usize,
    /// The number of elements; 1 for a field that is no array.
    pub count: usize,
}

impl Field {
    fn end(self) -> Option<usize> {
        self.size
            .checked_mul(self.count)
            .and_then(|bytes| bytes.checked_add(self.offset))
    }

    /// Returns each element as a field of its own.
    pub(super) fn elements(self) -> impl Iterator<Item = Self> {
        (0..self.count).map(move |at| Self {
            offset: self.offset + at * self.size,
            size: self.size,
            count: 1,
        })
    }
}

/// A source of the structure layouts of the calling build.
pub trait Structures {
    /// Returns the size of the structure `name` in bytes, if the build has it.
    fn size_of(&self, name: &str) -> Option<usize>;

    /// Returns the field `path` (names joined by dots, without those of anonymous members) of the structure `name`.
    fn field(&self, name: &str, path: &str) -> Option<Field>;
}

/// Why the functions cannot serve a build.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The build has no such structure.
    #[error(
        "the library describes no {name}; expected a build of CUDA 12 or 13 with debug information"
    )]
    NoStructure {
        /// The structure.
        name: &'static str,
    },
    /// The structure is shorter than the driver's of the same purpose.
    #[error(
        "{name} of the library has {found} bytes; expected {expected} or more, as the driver reads"
    )]
    Size {
        /// The structure.
        name: &'static str,
        /// Bytes of the driver's.
        expected: usize,
        /// Bytes that the library has.
        found: usize,
    },
    /// The structure has no such field.
    #[error("{name} of the library has no field {field}; expected a build of CUDA 12 or 13")]
    NoField {
        /// The structure.
        name: &'static str,
        /// The field.
        field: &'static str,
    },
    /// The field is not what the functions write or read.
    #[error(
        "{name}.{field} of the library has {} element(s) of {} bytes at {}, in a structure of {size} bytes; expected \
         {expected}", found.count, found.size, found.offset
    )]
    Fit {
        /// The structure.
        name: &'static str,
        /// The field.
        field: &'static str,
        /// Bytes of the structure.
        size: usize,
        /// What was expected.
        expected: Expected,
        /// What the library has.
        found: Field,
    },
}

/// The expected shape of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Expected {
    /// This many bytes, in elements of any size.
    Bytes(usize),
    /// This many numbers of 4 or 8 bytes.
    Numbers(usize),
    /// The field of the driver's structure of the same purpose, which the functions pass on.
    Exactly(Field),
}

impl std::fmt::Display for Expected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Bytes(bytes) => write!(f, "{bytes} bytes"),
            Self::Numbers(count) => write!(f, "{count} number(s) of 4 or 8 bytes"),
            Self::Exactly(Field { offset, size, .. }) => write!(f, "{size} bytes at {offset}"),
        }
    }
}

impl Expected {
    fn fits(self, found: Field) -> bool {
        match self {
            Self::Bytes(bytes) => found.size.checked_mul(found.count) == Some(bytes),
            Self::Numbers(count) => matches!(found.size, 4 | 8) && found.count == count,
            Self::Exactly(field) => found == field,
        }
    }
}

/// The property of a device that a field of `cudaDeviceProp` holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Property {
    Name,
    Uuid,
    /// Bytes of memory.
    Memory,
    /// Attributes with consecutive numbers from this one on, one for each element.
    Attributes(c_int),
}

impl Property {
    fn expected(self, elements: usize) -> Expected {
        match self {
            Self::Name => Expected::Bytes(256),
            Self::Uuid => Expected::Bytes(16),
            Self::Memory => Expected::Bytes(8),
            Self::Attributes(_) => Expected::Numbers(elements),
        }
    }
}

/// Fields of `cudaDeviceProp` that every build has, with their number of elements.
const PROPERTIES: &[(&str, Property, usize)] = &[
    ("name", Property::Name, 1),
    ("uuid", Property::Uuid, 1),
    ("totalGlobalMem", Property::Memory, 1),
    ("sharedMemPerBlock", Property::Attributes(8), 1),
    ("regsPerBlock", Property::Attributes(12), 1),
    ("warpSize", Property::Attributes(10), 1),
    ("memPitch", Property::Attributes(11), 1),
    ("maxThreadsPerBlock", Property::Attributes(1), 1),
    ("maxThreadsDim", Property::Attributes(2), 3),
    ("maxGridSize", Property::Attributes(5), 3),
    ("totalConstMem", Property::Attributes(9), 1),
    ("major", Property::Attributes(75), 1),
    ("minor", Property::Attributes(76), 1),
    ("textureAlignment", Property::Attributes(14), 1),
    ("multiProcessorCount", Property::Attributes(16), 1),
    ("integrated", Property::Attributes(18), 1),
    ("canMapHostMemory", Property::Attributes(19), 1),
    ("concurrentKernels", Property::Attributes(31), 1),
    ("ECCEnabled", Property::Attributes(32), 1),
    ("pciBusID", Property::Attributes(33), 1),
    ("pciDeviceID", Property::Attributes(34), 1),
    ("pciDomainID", Property::Attributes(50), 1),
    ("asyncEngineCount", Property::Attributes(40), 1),
    ("unifiedAddressing", Property::Attributes(41), 1),
    ("memoryBusWidth", Property::Attributes(37), 1),
    ("l2CacheSize", Property::Attributes(38), 1),
    ("maxThreadsPerMultiProcessor", Property::Attributes(39), 1),
    ("streamPrioritiesSupported", Property::Attributes(78), 1),
    ("sharedMemPerMultiprocessor", Property::Attributes(81), 1),
    ("regsPerMultiprocessor", Property::Attributes(82), 1),
    ("managedMemory", Property::Attributes(83), 1),
    (
        "canUseHostPointerForRegisteredMem",
        Property::Attributes(91),
        1,
    ),
    ("cooperativeLaunch", Property::Attributes(95), 1),
    ("sharedMemPerBlockOptin", Property::Attributes(97), 1),
    ("hostRegisterSupported", Property::Attributes(99), 1),
    ("maxBlocksPerMultiProcessor", Property::Attributes(106), 1),
    ("reservedSharedMemPerBlock", Property::Attributes(111), 1),
    ("memoryPoolsSupported", Property::Attributes(115), 1),
    ("gpuDirectRDMASupported", Property::Attributes(116), 1),
    ("clusterLaunch", Property::Attributes(120), 1),
];

/// Fields of `cudaFuncAttributes`, and the attribute of the driver's function that each holds.
const FUNCTION: &[(&str, c_int)] = &[
    ("sharedSizeBytes", 1),
    ("constSizeBytes", 2),
    ("localSizeBytes", 3),
    ("maxThreadsPerBlock", 0),
    ("numRegs", 4),
    ("ptxVersion", 5),
    ("binaryVersion", 6),
    ("cacheModeCA", 7),
    ("maxDynamicSharedSizeBytes", 8),
    ("preferredShmemCarveout", 9),
];

/// `CUmemPoolProps`: name, offset and size of each field.
const POOL: (&str, usize, &[(&str, usize, usize)]) = (
    "cudaMemPoolProps",
    88,
    &[
        ("allocType", 0, 4),
        ("handleTypes", 4, 4),
        ("location.type", 8, 4),
        ("location.id", 12, 4),
        ("win32SecurityAttributes", 16, 8),
        ("maxSize", 24, 8),
    ],
);

/// `CUmemcpyAttributes`.
const COPY: (&str, usize, &[(&str, usize, usize)]) = (
    "cudaMemcpyAttributes",
    24,
    &[
        ("srcAccessOrder", 0, 4),
        ("srcLocHint.type", 4, 4),
        ("srcLocHint.id", 8, 4),
        ("dstLocHint.type", 12, 4),
        ("dstLocHint.id", 16, 4),
        ("flags", 20, 4),
    ],
);

/// A structure that a function fills: its size, and its fields with their meaning.
pub(super) struct Filled<T> {
    size: usize,
    pub(super) fields: Vec<(Field, T)>,
}

impl<T> Filled<T> {
    /// Returns an all-zero value.
    pub(super) fn empty(&self) -> Value {
        Value(vec![0; self.size])
    }
}

/// The bytes of a structure that is being filled.
pub(super) struct Value(Vec<u8>);

impl Value {
    /// Stores bytes, up to the size of the field.
    pub(super) fn put(&mut self, field: Field, bytes: &[u8]) {
        let room = self.0.get_mut(field.offset..).unwrap_or_default();
        for (to, from) in room.iter_mut().zip(bytes).take(field.size * field.count) {
            *to = *from;
        }
    }

    /// Stores a number in a field of 4 or 8 bytes.
    pub(super) fn put_number(&mut self, field: Field, value: impl Into<i64>) {
        // Little-endian, as every machine that this crate builds for.
        self.put(field, &value.into().to_le_bytes());
    }

    /// Copies the whole structure to `place`.
    ///
    /// # Safety
    /// `place` has room for the structure.
    pub(super) unsafe fn copy_to(&self, place: *mut u8) {
        // SAFETY: the caller promises the room; the bytes are of this value alone.
        unsafe { place.copy_from_nonoverlapping(self.0.as_ptr(), self.0.len()) };
    }
}

/// The meaning of a field of `cudaPointerAttributes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Address {
    Kind,
    Device,
    DevicePointer,
    HostPointer,
}

/// See the module.
pub(super) struct Layouts {
    pub(super) properties: Filled<Property>,
    pub(super) function: Filled<c_int>,
    pub(super) address: Filled<Address>,
    /// Whether the build has the structures that equal the driver's under another name.
    pub(super) has_pool: bool,
    pub(super) has_copy: bool,
}

impl Layouts {
    pub(super) fn read(structures: &dyn Structures) -> Result<Self, LayoutError> {
        let properties = PROPERTIES
            .iter()
            .map(|&(field, property, elements)| (field, property.expected(elements), property));
        let function = FUNCTION
            .iter()
            .map(|&(field, attribute)| (field, Expected::Numbers(1), attribute));
        let address = [
            ("type", Expected::Bytes(4), Address::Kind),
            ("device", Expected::Bytes(4), Address::Device),
            ("devicePointer", Expected::Bytes(8), Address::DevicePointer),
            ("hostPointer", Expected::Bytes(8), Address::HostPointer),
        ];
        Ok(Self {
            properties: filled(structures, "cudaDeviceProp", properties)?,
            function: filled(structures, "cudaFuncAttributes", function)?,
            address: filled(structures, "cudaPointerAttributes", address)?,
            has_pool: is_the_drivers(structures, POOL)?,
            has_copy: is_the_drivers(structures, COPY)?,
        })
    }
}

fn filled<T>(
    structures: &dyn Structures,
    name: &'static str,
    fields: impl IntoIterator<Item = (&'static str, Expected, T)>,
) -> Result<Filled<T>, LayoutError> {
    let size = structures
        .size_of(name)
        .ok_or(LayoutError::NoStructure { name })?;
    let fields = fields.into_iter().map(|(field, expected, meaning)| {
        Ok((checked(structures, (name, size), field, expected)?, meaning))
    });
    Ok(Filled {
        size,
        fields: fields.collect::<Result<_, LayoutError>>()?,
    })
}

/// Returns the field of a structure, after checks of its shape and bounds.
fn checked(
    structures: &dyn Structures,
    (name, size): (&'static str, usize),
    field: &'static str,
    expected: Expected,
) -> Result<Field, LayoutError> {
    let found = structures
        .field(name, field)
        .ok_or(LayoutError::NoField { name, field })?;
    let inside = found.end().is_some_and(|end| end <= size);
    if inside && expected.fits(found) {
        Ok(found)
    } else {
        Err(LayoutError::Fit {
            name,
            field,
            size,
            expected,
            found,
        })
    }
}

/// Returns whether the build has a structure. Fails if the structure differs from the driver's in any field.
fn is_the_drivers(
    structures: &dyn Structures,
    (name, drivers, fields): (&'static str, usize, &[(&'static str, usize, usize)]),
) -> Result<bool, LayoutError> {
    let Some(size) = structures.size_of(name) else {
        return Ok(false);
    };
    for &(field, offset, bytes) in fields {
        let expected = Expected::Exactly(Field {
            offset,
            size: bytes,
            count: 1,
        });
        checked(structures, (name, size), field, expected)?;
    }
    if size < drivers {
        return Err(LayoutError::Size {
            name,
            expected: drivers,
            found: size,
        });
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Every structure as it is expected, one field behind the other, and one change.
    struct Made {
        sizes: HashMap<&'static str, usize>,
        fields: HashMap<(&'static str, &'static str), Field>,
    }

    impl Structures for Made {
        fn size_of(&self, name: &str) -> Option<usize> {
            self.sizes.get(name).copied()
        }

        fn field(&self, name: &str, path: &str) -> Option<Field> {
            let found = self
                .fields
                .iter()
                .find(|((n, f), _)| (*n, *f) == (name, path));
            found.map(|(_, field)| *field)
        }
    }

    fn made() -> Made {
        let mut made = Made {
            sizes: HashMap::new(),
            fields: HashMap::new(),
        };
        let mut add = |name, field, size, count| {
            let end = made.sizes.entry(name).or_insert(0);
            let field_at = Field {
                offset: *end,
                size,
                count,
            };
            made.fields.insert((name, field), field_at);
            *end += size * count;
        };
        for &(field, property, elements) in PROPERTIES {
            match property.expected(elements) {
                Expected::Bytes(bytes) => add("cudaDeviceProp", field, 1, bytes),
                _ => add("cudaDeviceProp", field, 4, elements),
            }
        }
        for (field, _) in FUNCTION {
            add("cudaFuncAttributes", field, 4, 1);
        }
        for (field, size) in [
            ("type", 4),
            ("device", 4),
            ("devicePointer", 8),
            ("hostPointer", 8),
        ] {
            add("cudaPointerAttributes", field, size, 1);
        }
        for (name, size, fields) in [POOL, COPY] {
            for &(field, offset, size) in fields {
                let field_at = Field {
                    offset,
                    size,
                    count: 1,
                };
                made.fields.insert((name, field), field_at);
            }
            made.sizes.insert(name, size);
        }
        made
    }

    #[test]
    fn layouts_that_fit_are_taken() {
        let layouts = Layouts::read(&made()).unwrap();
        assert!(layouts.has_pool && layouts.has_copy);
        assert_eq!(layouts.properties.fields.len(), PROPERTIES.len());
    }

    #[test]
    fn every_field_that_is_absent_or_outside_is_refused_by_name() {
        for (name, field) in made().fields.into_keys() {
            let mut lacking = made();
            lacking.fields.remove(&(name, field));
            let refused = Layouts::read(&lacking).err();
            assert_eq!(refused, Some(LayoutError::NoField { name, field }));

            let mut moved = made();
            let size = moved.sizes[name];
            let Some(found) = moved.fields.get_mut(&(name, field)) else {
                unreachable!()
            };
            found.offset = size - 1;
            let text = Layouts::read(&moved).err().unwrap().to_string();
            assert!(text.starts_with(&format!("{name}.{field} ")), "{text}");
            found_far(&mut moved, (name, field));
            assert!(Layouts::read(&moved).is_err());
        }
    }

    fn found_far(made: &mut Made, key: (&'static str, &'static str)) {
        if let Some(found) = made.fields.get_mut(&key) {
            found.offset = usize::MAX;
        }
    }

    #[test]
    fn a_field_of_another_size_is_refused_and_the_sentence_says_both() {
        let mut other = made();
        let key = ("cudaPointerAttributes", "device");
        other.fields.entry(key).and_modify(|field| field.size = 2);
        assert_eq!(
            Layouts::read(&other).err().unwrap().to_string(),
            "cudaPointerAttributes.device of the library has 1 element(s) of 2 bytes at 4, in a structure of 24 bytes; \
             expected 4 bytes"
        );
    }

    #[test]
    fn a_structure_that_only_some_builds_have_may_be_absent() {
        let mut older = made();
        older.sizes.remove("cudaMemcpyAttributes");
        assert!(!Layouts::read(&older).unwrap().has_copy);
        older.sizes.remove("cudaDeviceProp");
        assert_eq!(
            Layouts::read(&older).err(),
            Some(LayoutError::NoStructure {
                name: "cudaDeviceProp"
            })
        );
    }
}
