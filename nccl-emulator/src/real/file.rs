//! [`ElfFile`]: the sections and symbols of a library's file.
//!
//! Parts are read on demand, so that the check of a library of 300 MB against a cache entry reads a few kilobytes.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use object::elf::{self, FileHeader64};
use object::read::elf::{FileHeader, ProgramHeader, Rela, SectionHeader, SectionTable, Sym};
use object::{LittleEndian, ReadCache, StringTable};

use super::error::LoadError;

const ENDIAN: LittleEndian = LittleEndian;

type Header = FileHeader64<LittleEndian>;

/// The file, read on demand.
pub(crate) struct Source {
    path: PathBuf,
    length: u64,
    data: ReadCache<File>,
}

impl Source {
    pub(crate) fn open(path: &Path) -> Result<Self, LoadError> {
        let unreadable = |source| LoadError::Unreadable {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(unreadable)?;
        let metadata = file.metadata().map_err(unreadable)?;
        if !metadata.is_file() {
            return Err(LoadError::NotElf {
                path: path.to_owned(),
            });
        }
        Ok(Self {
            path: path.to_owned(),
            length: metadata.len(),
            data: ReadCache::new(file),
        })
    }

    /// Returns the length in bytes.
    pub(crate) fn length(&self) -> u64 {
        self.length
    }
}

/// A function or object of a symbol table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Symbol<'a> {
    pub(crate) name: &'a str,
    pub(crate) address: u64,
    pub(crate) size: u64,
    pub(crate) kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Function,
    Object,
}

/// A section of machine code.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Code<'a> {
    pub(crate) address: u64,
    pub(crate) bytes: &'a [u8],
}

/// The build ID, and its address relative to the library's base.
#[derive(Debug, Clone)]
pub(crate) struct BuildId {
    pub(crate) bytes: Vec<u8>,
    pub(crate) address: u64,
}

impl BuildId {
    pub(crate) fn text(&self) -> String {
        self.bytes
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }
}

/// A little-endian x86-64 ELF file.
pub(crate) struct ElfFile<'a> {
    source: &'a Source,
    header: &'a Header,
}

impl<'a> ElfFile<'a> {
    pub(crate) fn parse(source: &'a Source) -> Result<Self, LoadError> {
        use object::ReadRef;
        let path = || source.path.clone();
        let Ok(ident) = (&source.data).read_bytes_at(0, 20) else {
            return Err(LoadError::NotElf { path: path() });
        };
        if ident[..4] != elf::ELFMAG {
            return Err(LoadError::NotElf { path: path() });
        }
        let (class, order) = (ident[4], ident[5]);
        let machine = match order {
            2 => u16::from_be_bytes([ident[18], ident[19]]),
            _ => u16::from_le_bytes([ident[18], ident[19]]),
        };
        if (class, order, machine) != (2, 1, 62) {
            let cpu = match machine {
                183 => "AArch64".to_owned(),
                62 => "x86-64".to_owned(),
                other => format!("ELF machine {other}"),
            };
            let found = format!("{cpu}, ELF class {class}, byte order {order}");
            return Err(LoadError::OtherCpu {
                path: path(),
                found,
            });
        }
        let header = Header::parse(&source.data).map_err(|source| LoadError::Damaged {
            path: path(),
            part: "the ELF header",
            source,
        })?;
        Ok(Self { source, header })
    }

    pub(crate) fn path(&self) -> &'a Path {
        &self.source.path
    }

    fn damaged(&self, part: &'static str) -> impl FnOnce(object::Error) -> LoadError + use<'_, 'a> {
        move |source| LoadError::Damaged {
            path: self.source.path.clone(),
            part,
            source,
        }
    }

    /// Returns the build ID from the program headers, which are in memory as well.
    pub(crate) fn build_id(&self) -> Result<BuildId, LoadError> {
        let data = &self.source.data;
        let headers = self
            .header
            .program_headers(ENDIAN, data)
            .map_err(self.damaged("the program headers"))?;
        for header in headers {
            let notes = header
                .notes(ENDIAN, data)
                .map_err(self.damaged("the notes"))?;
            let Some(mut notes) = notes else { continue };
            while let Some(note) = notes.next().map_err(self.damaged("the notes"))? {
                if note.name() == elf::ELF_NOTE_GNU && note.n_type(ENDIAN) == elf::NT_GNU_BUILD_ID {
                    // The build ID is the only note of its segment in what linkers write; the comparison with the
                    // loaded image fails for any other arrangement.
                    let address = header.p_vaddr(ENDIAN).saturating_add(16);
                    return Ok(BuildId {
                        bytes: note.desc().to_vec(),
                        address,
                    });
                }
            }
        }
        Err(LoadError::NoBuildId {
            path: self.source.path.clone(),
        })
    }

    /// Returns the size of the address space of the loaded library.
    pub(crate) fn span(&self) -> Result<u64, LoadError> {
        let headers = self
            .header
            .program_headers(ENDIAN, &self.source.data)
            .map_err(self.damaged("the program headers"))?;
        let loads = headers
            .iter()
            .filter(|header| header.p_type(ENDIAN) == elf::PT_LOAD);
        let ends = loads.map(|header| {
            header
                .p_vaddr(ENDIAN)
                .saturating_add(header.p_memsz(ENDIAN))
        });
        Ok(ends.max().unwrap_or(0))
    }

    pub(crate) fn sections(&self) -> Result<Sections<'a>, LoadError> {
        let table = self
            .header
            .sections(ENDIAN, &self.source.data)
            .map_err(self.damaged("the section headers"))?;
        Ok(Sections {
            source: self.source,
            table,
        })
    }
}

/// The sections of an [`ElfFile`].
pub(crate) struct Sections<'a> {
    source: &'a Source,
    table: SectionTable<'a, Header, &'a ReadCache<File>>,
}

impl<'a> Sections<'a> {
    fn damaged(&self, part: &'static str) -> impl FnOnce(object::Error) -> LoadError + use<'_, 'a> {
        move |source| LoadError::Damaged {
            path: self.source.path.clone(),
            part,
            source,
        }
    }

    /// Returns the defined functions and objects; `None` without a symbol table.
    pub(crate) fn symbols(&self) -> Result<Option<Vec<Symbol<'a>>>, LoadError> {
        self.symbol_table(elf::SHT_SYMTAB, "the symbol table", |_| true)
    }

    /// Returns the exported functions and objects.
    pub(crate) fn exports(&self) -> Result<Vec<Symbol<'a>>, LoadError> {
        let table = self.symbol_table(elf::SHT_DYNSYM, "the dynamic symbol table", |symbol| {
            matches!(symbol.st_bind(), elf::STB_GLOBAL | elf::STB_WEAK)
        })?;
        Ok(table.unwrap_or_default())
    }

    /// Returns the address range of the dynamic symbol table in the loaded library.
    pub(crate) fn dynamic_symbols(&self) -> Result<Range<u64>, LoadError> {
        let part = "the dynamic symbol table";
        let table = self
            .table
            .symbols(ENDIAN, &self.source.data, elf::SHT_DYNSYM)
            .map_err(self.damaged(part))?;
        let section = self
            .table
            .section(table.section())
            .map_err(self.damaged(part))?;
        let start = section.sh_addr(ENDIAN);
        Ok(start..start.saturating_add(section.sh_size(ENDIAN)))
    }

    fn symbol_table(
        &self,
        kind: elf::SectionType,
        part: &'static str,
        take: impl Fn(&elf::Sym64<LittleEndian>) -> bool,
    ) -> Result<Option<Vec<Symbol<'a>>>, LoadError> {
        let data = &self.source.data;
        let table = self
            .table
            .symbols(ENDIAN, data, kind)
            .map_err(self.damaged(part))?;
        if table.is_empty() {
            return Ok(None);
        }
        let strings = self
            .table
            .section(table.string_section())
            .and_then(|section| section.data(ENDIAN, data))
            .map_err(self.damaged(part))?;
        let strings = StringTable::new(strings, 0, strings.len() as u64);
        let mut symbols = Vec::with_capacity(table.len());
        for symbol in table.iter() {
            let kind = match symbol.st_type() {
                elf::STT_FUNC => Kind::Function,
                elf::STT_OBJECT => Kind::Object,
                _ => continue,
            };
            if symbol.is_undefined(ENDIAN) || !take(symbol) {
                continue;
            }
            let name = symbol.name(ENDIAN, strings).map_err(self.damaged(part))?;
            // No function or table of NCCL or CUDA has a name that is not ASCII.
            if let Ok(name) = std::str::from_utf8(name) {
                symbols.push(Symbol {
                    name,
                    address: symbol.st_value(ENDIAN),
                    size: symbol.st_size(ENDIAN),
                    kind,
                });
            }
        }
        Ok(Some(symbols))
    }

    /// Returns the sections of machine code.
    pub(crate) fn code(&self) -> Result<Vec<Code<'a>>, LoadError> {
        let mut code = Vec::new();
        for section in self.table.iter() {
            if section.sh_type(ENDIAN) != elf::SHT_PROGBITS
                || !section.sh_flags(ENDIAN).contains(elf::SHF_EXECINSTR)
            {
                continue;
            }
            let bytes = section
                .data(ENDIAN, &self.source.data)
                .map_err(self.damaged("machine code"))?;
            code.push(Code {
                address: section.sh_addr(ENDIAN),
                bytes,
            });
        }
        Ok(code)
    }

    /// Returns the addresses in the library that its data contain after relocation.
    pub(crate) fn pointers(&self) -> Result<Vec<u64>, LoadError> {
        let mut pointers = Vec::new();
        for section in self.table.iter() {
            let relocations = section
                .rela(ENDIAN, &self.source.data)
                .map_err(self.damaged("the relocations"))?;
            let Some((relocations, _)) = relocations else {
                continue;
            };
            pointers.extend(
                relocations
                    .iter()
                    .filter(|relocation| relocation.r_type(ENDIAN, false) == elf::R_X86_64_RELATIVE)
                    .map(|relocation| relocation.r_addend(ENDIAN).cast_unsigned()),
            );
        }
        Ok(pointers)
    }

    /// Returns the version of CUDA that the library states it was compiled with: 13040 for 13.4.
    pub(crate) fn cuda(&self) -> Result<Option<i32>, LoadError> {
        const SAYS: &[u8] = b" compiled with CUDA ";
        let Some((_, section)) = self.table.section_by_name(ENDIAN, b".rodata") else {
            return Ok(None);
        };
        let bytes = section
            .data(ENDIAN, &self.source.data)
            .map_err(self.damaged("constant data"))?;
        let Some(at) = bytes.windows(SAYS.len()).position(|window| window == SAYS) else {
            return Ok(None);
        };
        let rest = &bytes[at + SAYS.len()..];
        let end = rest
            .iter()
            .position(|byte| !matches!(byte, b'0'..=b'9' | b'.'));
        let text = std::str::from_utf8(&rest[..end.unwrap_or(0)]).unwrap_or_default();
        let version = text.split_once('.').and_then(|(major, minor)| {
            let (major, minor): (i32, i32) = (major.parse().ok()?, minor.parse().ok()?);
            major.checked_mul(1000)?.checked_add(minor.checked_mul(10)?)
        });
        Ok(version)
    }

    /// Returns a section of debug information.
    pub(crate) fn debug(&self, name: &'static str) -> Result<&'a [u8], LoadError> {
        let missing = |found| LoadError::NoDebugInformation {
            path: self.source.path.clone(),
            section: name,
            found,
        };
        let Some((_, section)) = self.table.section_by_name(ENDIAN, name.as_bytes()) else {
            return Err(missing("is missing"));
        };
        if section.sh_flags(ENDIAN).contains(elf::SHF_COMPRESSED) {
            return Err(missing("is compressed"));
        }
        section
            .data(ENDIAN, &self.source.data)
            .map_err(self.damaged("debug information"))
    }
}
