//! The layouts of types, from the DWARF debug information of the library.
//!
//! Most types appear in most of the 200 compilation units; the first complete definition is used, and reading ends when all
//! names are found. If a release lacks a name, all units are read, which takes some 0.2 s.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use gimli::{
    Abbreviations, AttributeValue, DebugAbbrev, DebugAranges, DebugInfo, DebugStr,
    DebuggingInformationEntry, EndianSlice, LittleEndian, UnitHeader, UnitOffset,
};

use super::types::{Bits, Field, Layout, Table};

type Slice<'a> = EndianSlice<'a, LittleEndian>;

/// Structures nest a few levels; deeper nesting is a sign of damage.
const DEPTH: usize = 16;
/// `cudaDeviceProp` has some 90 fields.
const FIELDS: usize = 20_000;

/// Why debug information cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum DwarfError {
    /// The data is not valid DWARF.
    #[error("{0}")]
    Invalid(#[from] gimli::Error),
    /// A form of description that the reader does not support.
    #[error("{name} has {what}")]
    Unknown {
        /// The type.
        name: String,
        /// The unexpected part.
        what: &'static str,
    },
    /// NCCL's own code lies in the range that the symbols assign to the runtime.
    #[error("the compiled code at {address:#x} lies among the functions of the CUDA runtime")]
    Overlap {
        /// The address in the library.
        address: u64,
    },
}

/// The sections that the reader uses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sections<'a> {
    pub(crate) info: &'a [u8],
    pub(crate) abbrev: &'a [u8],
    pub(crate) strings: &'a [u8],
    pub(crate) aranges: &'a [u8],
}

/// Checks that no compilation unit has code in `runtime`.
pub(crate) fn outside(sections: Sections<'_>, runtime: &Range<u64>) -> Result<(), DwarfError> {
    let aranges = DebugAranges::new(sections.aranges, LittleEndian);
    let mut headers = aranges.headers();
    while let Some(header) = headers.next()? {
        let mut entries = header.entries();
        while let Some(entry) = entries.next()? {
            let address = entry.address();
            if address < runtime.end && runtime.start < address.saturating_add(entry.length()) {
                return Err(DwarfError::Overlap { address });
            }
        }
    }
    Ok(())
}

/// Returns the layouts of those types of `wanted` that the library has.
pub(crate) fn read(sections: Sections<'_>, wanted: &[&str]) -> Result<Table, DwarfError> {
    let info = DebugInfo::new(sections.info, LittleEndian);
    let abbrev = DebugAbbrev::new(sections.abbrev, LittleEndian);
    let strings = DebugStr::new(sections.strings, LittleEndian);
    let mut missing: HashMap<&[u8], &str> =
        wanted.iter().map(|name| (name.as_bytes(), *name)).collect();
    let mut table = Table::default();
    let mut units = info.units();
    while let Some(header) = units.next()? {
        if missing.is_empty() {
            break;
        }
        let abbreviations = header.abbreviations(&abbrev)?;
        let unit = Unit {
            header: &header,
            abbreviations: &abbreviations,
            strings,
        };
        for (name, offset) in unit.definitions(&missing)? {
            if let Some(layout) = unit.layout(name, offset, &mut table.enumerators)? {
                missing.remove(name.as_bytes());
                table.types.insert(name.to_owned(), layout);
            }
        }
    }
    Ok(table)
}

/// A compilation unit.
struct Unit<'a> {
    header: &'a UnitHeader<Slice<'a>>,
    abbreviations: &'a Abbreviations,
    strings: DebugStr<Slice<'a>>,
}

/// A type without its names: `size` bytes, `count` times.
struct Shape {
    size: u64,
    count: u64,
    /// The members, if it is a structure or union.
    members: Option<UnitOffset>,
    /// The definition, if it is an enumeration.
    enumeration: Option<UnitOffset>,
}

impl<'a> Unit<'a> {
    /// Finds the complete types outside functions and classes whose names are in `missing`.
    fn definitions<'m>(
        &self,
        missing: &HashMap<&[u8], &'m str>,
    ) -> Result<Vec<(&'m str, UnitOffset)>, gimli::Error> {
        let mut found = Vec::new();
        let mut entries = self.header.entries_raw(self.abbreviations, None)?;
        let mut attributes = Vec::new();
        // The depths of the unit and of the namespaces around the entry.
        let mut scopes: Vec<isize> = Vec::new();
        while !entries.is_empty() {
            let depth = entries.next_depth();
            let offset = entries.next_offset();
            let Some(abbreviation) = entries.read_abbreviation()? else {
                continue;
            };
            while scopes.last().is_some_and(|&scope| scope >= depth) {
                scopes.pop();
            }
            let here = scopes.last().is_none_or(|&scope| scope == depth - 1);
            match abbreviation.tag() {
                gimli::DW_TAG_compile_unit | gimli::DW_TAG_namespace if here => {
                    scopes.push(depth);
                    entries.skip_attributes(abbreviation.attributes())?;
                }
                gimli::DW_TAG_structure_type
                | gimli::DW_TAG_class_type
                | gimli::DW_TAG_union_type
                | gimli::DW_TAG_enumeration_type
                | gimli::DW_TAG_typedef
                    if here =>
                {
                    entries.read_attributes(abbreviation.attributes(), &mut attributes)?;
                    let has = |name| attributes.iter().any(|attribute| attribute.name() == name);
                    if has(gimli::DW_AT_declaration) {
                        continue;
                    }
                    let name = attributes
                        .iter()
                        .find(|attribute| attribute.name() == gimli::DW_AT_name)
                        .map(|attribute| self.text(attribute.value()))
                        .transpose()?
                        .flatten();
                    if let Some(name) = name.and_then(|name| missing.get(name)) {
                        found.push((*name, offset));
                    }
                }
                _ => entries.skip_attributes(abbreviation.attributes())?,
            }
        }
        Ok(found)
    }

    fn text(&self, value: AttributeValue<Slice<'a>>) -> Result<Option<&'a [u8]>, gimli::Error> {
        Ok(match value {
            AttributeValue::String(text) => Some(text.slice()),
            AttributeValue::DebugStrRef(offset) => Some(self.strings.get_str(offset)?.slice()),
            _ => None,
        })
    }

    fn name_of(
        &self,
        entry: &DebuggingInformationEntry<Slice<'a>>,
    ) -> Result<Option<String>, gimli::Error> {
        let name = entry
            .attr_value(gimli::DW_AT_name)
            .map(|value| self.text(value));
        let name = name.transpose()?.flatten();
        Ok(name.map(|name| String::from_utf8_lossy(name).into_owned()))
    }

    /// `None` if a typedef leads to a type that is only declared in this unit.
    fn layout(
        &self,
        name: &str,
        offset: UnitOffset,
        enumerators: &mut BTreeMap<String, i64>,
    ) -> Result<Option<Layout>, DwarfError> {
        let Some(shape) = self.shape(name, Some(offset), 0)? else {
            return Ok(None);
        };
        if let Some(offset) = shape.enumeration {
            self.enumerators(offset, enumerators)?;
        }
        let mut fields = BTreeMap::new();
        if let Some(offset) = shape.members {
            self.members(
                &mut Walk {
                    name,
                    fields: &mut fields,
                },
                offset,
                "",
                0,
                0,
            )?;
        }
        Ok(Some(Layout {
            size: number(name, shape.size.saturating_mul(shape.count))?,
            fields,
        }))
    }

    /// Returns the type at `offset` without typedefs and qualifiers; `None` if it is only declared.
    fn shape(
        &self,
        name: &str,
        offset: Option<UnitOffset>,
        depth: usize,
    ) -> Result<Option<Shape>, DwarfError> {
        let Some(offset) = offset.filter(|_| depth < DEPTH) else {
            return Err(unknown(name, "a type without end"));
        };
        let entry = self.header.entry(self.abbreviations, offset)?;
        let target = match entry.attr_value(gimli::DW_AT_type) {
            Some(AttributeValue::UnitRef(target)) => Some(target),
            Some(_) => return Err(unknown(name, "a type of another compilation unit")),
            None => None,
        };
        let plain = |size| Shape {
            size,
            count: 1,
            members: None,
            enumeration: None,
        };
        Ok(match entry.tag() {
            gimli::DW_TAG_typedef
            | gimli::DW_TAG_const_type
            | gimli::DW_TAG_volatile_type
            | gimli::DW_TAG_restrict_type
            | gimli::DW_TAG_atomic_type => self.shape(name, target, depth + 1)?,
            gimli::DW_TAG_array_type => {
                let Some(element) = self.shape(name, target, depth + 1)? else {
                    return Ok(None);
                };
                let count = self.count(offset)?.saturating_mul(element.count);
                Some(Shape { count, ..element })
            }
            gimli::DW_TAG_pointer_type
            | gimli::DW_TAG_reference_type
            | gimli::DW_TAG_rvalue_reference_type => Some(plain(8)),
            tag => {
                if entry.attr_value(gimli::DW_AT_declaration).is_some() {
                    return Ok(None);
                }
                let size = entry.attr_value(gimli::DW_AT_byte_size);
                let Some(size) = size.and_then(|size| size.udata_value()) else {
                    return Err(unknown(name, "a member without a size"));
                };
                let is = |tags: &[gimli::DwTag]| tags.contains(&tag).then_some(offset);
                Some(Shape {
                    members: is(&[
                        gimli::DW_TAG_structure_type,
                        gimli::DW_TAG_class_type,
                        gimli::DW_TAG_union_type,
                    ]),
                    enumeration: is(&[gimli::DW_TAG_enumeration_type]),
                    ..plain(size)
                })
            }
        })
    }

    /// Returns the number of elements of an array; 0 if it is not stated.
    fn count(&self, array: UnitOffset) -> Result<u64, DwarfError> {
        let mut tree = self.header.entries_tree(self.abbreviations, Some(array))?;
        let mut dimensions = tree.root()?.children();
        let mut count = 1_u64;
        while let Some(dimension) = dimensions.next()? {
            let value = |name| {
                dimension
                    .entry()
                    .attr_value(name)
                    .and_then(|value| value.udata_value())
            };
            let length = value(gimli::DW_AT_count)
                .or_else(|| value(gimli::DW_AT_upper_bound)?.checked_add(1))
                .unwrap_or(0);
            count = count.saturating_mul(length);
        }
        Ok(count)
    }

    fn enumerators(
        &self,
        offset: UnitOffset,
        enumerators: &mut BTreeMap<String, i64>,
    ) -> Result<(), DwarfError> {
        let mut tree = self.header.entries_tree(self.abbreviations, Some(offset))?;
        let mut children = tree.root()?.children();
        while let Some(child) = children.next()? {
            let entry = child.entry();
            if entry.tag() != gimli::DW_TAG_enumerator {
                continue;
            }
            let value = match entry.attr_value(gimli::DW_AT_const_value) {
                Some(AttributeValue::Sdata(value)) => Some(value),
                // Compilers write negative values as signed data only.
                Some(value) => value.udata_value().map(u64::cast_signed),
                None => None,
            };
            if let (Some(name), Some(value)) = (self.name_of(entry)?, value) {
                enumerators.insert(name, value);
            }
        }
        Ok(())
    }

    /// Adds the members of the structure at `offset`, which begins `base` bytes into the type.
    fn members(
        &self,
        walk: &mut Walk<'_>,
        offset: UnitOffset,
        prefix: &str,
        base: u64,
        depth: usize,
    ) -> Result<(), DwarfError> {
        if depth > DEPTH || walk.fields.len() > FIELDS {
            return Err(unknown(walk.name, "members without end"));
        }
        let mut tree = self.header.entries_tree(self.abbreviations, Some(offset))?;
        let mut children = tree.root()?.children();
        while let Some(child) = children.next()? {
            let entry = child.entry();
            let inherited = entry.tag() == gimli::DW_TAG_inheritance;
            let is_static = entry.attr_value(gimli::DW_AT_external).is_some();
            if (entry.tag() != gimli::DW_TAG_member && !inherited) || is_static {
                continue;
            }
            let Some(AttributeValue::UnitRef(target)) = entry.attr_value(gimli::DW_AT_type) else {
                return Err(unknown(walk.name, "a member without a type"));
            };
            let Some(shape) = self.shape(walk.name, Some(target), 0)? else {
                return Err(unknown(walk.name, "a member whose type is only declared"));
            };
            let place = place(walk.name, entry, &shape)?;
            let start = base.saturating_add(place.offset);
            let inner = match self.name_of(entry)? {
                Some(name) => {
                    let path = format!("{prefix}{name}");
                    let field = Field {
                        offset: number(walk.name, start)?,
                        size: number(walk.name, shape.size)?,
                        count: number(walk.name, shape.count)?,
                        bits: place.bits,
                    };
                    let inner = format!("{path}.");
                    walk.fields.insert(path, field);
                    inner
                }
                None => prefix.to_owned(),
            };
            if let Some(members) = shape.members {
                self.members(walk, members, &inner, start, depth + 1)?;
            }
        }
        Ok(())
    }
}

/// The type being read.
struct Walk<'w> {
    name: &'w str,
    fields: &'w mut BTreeMap<String, Field>,
}

/// The position of a member in its structure.
struct Place {
    offset: u64,
    bits: Option<Bits>,
}

fn place(
    name: &str,
    entry: &DebuggingInformationEntry<Slice<'_>>,
    shape: &Shape,
) -> Result<Place, DwarfError> {
    let number = |attribute| match entry.attr_value(attribute) {
        None => Ok(None),
        Some(value) => match value.udata_value() {
            Some(value) => Ok(Some(value)),
            None => Err(unknown(name, "a member at a place that is computed")),
        },
    };
    let offset = number(gimli::DW_AT_data_member_location)?.unwrap_or(0);
    let Some(count) = number(gimli::DW_AT_bit_size)? else {
        return Ok(Place { offset, bits: None });
    };
    // DWARF 4 counts from the word's highest bit, DWARF 5 from the lowest bit of the structure.
    let word = shape.size.saturating_mul(8).max(1);
    let (offset, first) = match number(gimli::DW_AT_data_bit_offset)? {
        Some(bit) => (bit / word * shape.size, Some(bit % word)),
        None => {
            let above = number(gimli::DW_AT_bit_offset)?.unwrap_or(0);
            (offset, word.checked_sub(above.saturating_add(count)))
        }
    };
    match (first.map(u32::try_from), u32::try_from(count)) {
        (Some(Ok(first)), Ok(count)) if u64::from(first) + u64::from(count) <= word => Ok(Place {
            offset,
            bits: Some(Bits { first, count }),
        }),
        _ => Err(unknown(name, "a bit field across words")),
    }
}

fn number(name: &str, value: u64) -> Result<usize, DwarfError> {
    usize::try_from(value).map_err(|_| unknown(name, "a size past the address space"))
}

fn unknown(name: &str, what: &'static str) -> DwarfError {
    DwarfError::Unknown {
        name: name.to_owned(),
        what,
    }
}
